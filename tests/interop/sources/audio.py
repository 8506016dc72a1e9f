"""Recordings as torchaudio's users hold them, of many lengths or one."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


def _waveform(index: int, length: int = 400) -> torch.Tensor:
    return torch.sin(torch.arange(length) * (index + 1) / 50)[None]


def _command(index: int, length: int = 400) -> tuple[torch.Tensor, int, str, str, int]:
    """The tuple of torchaudio's SPEECHCOMMANDS: waveform, rate, label, speaker, number of the utterance."""
    return _waveform(index, length), 16000, ("yes", "no", "up")[index % 3], f"speaker{index % 4}", index


def _padded(samples: list[Any]) -> Any:
    waveforms = pad_sequence([sample[0][0] for sample in samples], batch_first=True)
    return waveforms, [sample[2] for sample in samples]


def _spectrogram(index: int) -> tuple[torch.Tensor, int]:
    spectrum = torch.stft(_waveform(index), 64, window=torch.hann_window(64), return_complex=True)
    return (spectrum.abs() ** 2).clamp_min(1e-10).log10(), index % 3


def _crop(index: int) -> tuple[torch.Tensor, int]:
    start = int(torch.randint(0, 100, ()))
    return _waveform(index)[:, start : start + 300], index % 3


WAYS = {
    "speech_commands": lambda setting: setting.made(
        lambda index: _command(index, 300 + 10 * (index % 7)), collate_fn=_padded
    ),
    "speech_commands_of_one_length": lambda setting: setting.made(_command),
    "waveform_and_label": lambda setting: setting.made(lambda index: (_waveform(index), index % 3)),
    "spectrogram": lambda setting: setting.made(_spectrogram),
    "random_crop_of_long_recordings": lambda setting: setting.made(_crop),
}

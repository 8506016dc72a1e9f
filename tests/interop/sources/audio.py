"""Recordings as torchaudio's users hold them, of many lengths or one."""

from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting


def _waveform(index: int, length: int) -> torch.Tensor:
    return torch.sin(torch.arange(length) * (index + 1) / 50)[None]


class _SpeechCommands(Dataset[Any]):
    """The tuples of torchaudio's SPEECHCOMMANDS: waveform, rate, label, speaker, number of the utterance."""

    def __init__(self, *, of_one_length: bool) -> None:
        self.of_one_length = of_one_length

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, str, str, int]:
        length = 400 if self.of_one_length else 300 + 10 * (index % 7)
        return _waveform(index, length), 16000, ("yes", "no", "up")[index % 3], f"speaker{index % 4}", index


def _padded(samples: list[Any]) -> Any:
    waveforms = pad_sequence([sample[0][0] for sample in samples], batch_first=True)
    return waveforms, [sample[2] for sample in samples]


def speech_commands(setting: Setting) -> Any:
    return setting.loader(_SpeechCommands(of_one_length=False), collate_fn=_padded)


def speech_commands_of_one_length(setting: Setting) -> Any:
    return setting.loader(_SpeechCommands(of_one_length=True))


class _Waveforms(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return _waveform(index, 400), index % 3


class _Spectrograms(_Waveforms):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        waveform, label = super().__getitem__(index)
        spectrum = torch.stft(waveform, 64, window=torch.hann_window(64), return_complex=True)
        return (spectrum.abs() ** 2).clamp_min(1e-10).log10(), label


class _Crops(_Waveforms):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        waveform, label = super().__getitem__(index)
        start = int(torch.randint(0, 100, ()))
        return waveform[:, start : start + 300], label


def waveform_and_label(setting: Setting) -> Any:
    return setting.loader(_Waveforms())


def spectrogram(setting: Setting) -> Any:
    return setting.loader(_Spectrograms())


def random_crop_of_long_recordings(setting: Setting) -> Any:
    return setting.loader(_Crops())

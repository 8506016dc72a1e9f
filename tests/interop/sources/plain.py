"""Samples that plain PyTorch takes, generators of a dataset's own, and streams."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.interop.setting import SAMPLES, Setting, Way, held, made
from tests.sources import CountedStream

# ---- nested, named, odd, or with something in them that is no number ----

ODD = 13  # set-up always reads it


class _Pair(NamedTuple):
    image: torch.Tensor
    label: int


@dataclass
class _Record:
    image: torch.Tensor
    label: int


def _image(index: int, channels: int = 3) -> torch.Tensor:
    return torch.full((channels, 4, 4), index % 256, dtype=torch.uint8)


def _clip(index: int) -> Any:
    frames = torch.full((2, 3, 4, 4), index, dtype=torch.uint8)
    return {"video": {"frames": frames, "rate": 25.0}, "audio": {"samples": torch.ones(8) * index}, "label": index}


def _numbers(index: int) -> Any:
    return [torch.tensor([index % 2 == 0]), torch.full((3,), index, dtype=torch.bfloat16), torch.ones(2) * 1j, True]


PLAIN = {
    "image_and_filename": made(lambda index: (_image(index), f"images/{index}.png")),
    "one_odd_sample": made(  # has a single channel, which the collate_fn mends
        lambda index: (_image(index, 1 if index == ODD else 3), index),
        length=40,
        collate_fn=lambda samples: torch.stack([image.expand(3, 4, 4) for image, _ in samples]),
    ),
    "clips_in_nested_dicts": made(_clip),
    "numpy_scalars_and_arrays": made(
        lambda index: (np.full((2, 3), index, np.float32), np.int64(index), np.float32(0.5))
    ),
    "named_tuples": made(lambda index: _Pair(_image(index), index)),
    "bare_tensors": made(_image),
    "bare_ints": made(lambda index: index),
    "booleans_halves_and_complex": made(_numbers),
    "dataclasses": made(lambda index: _Record(_image(index), index), collate_fn=list),
    "samples_with_none": made(
        lambda index: {"image": _image(index), "mask": None},
        collate_fn=lambda samples: torch.stack([sample["image"] for sample in samples]),
    ),
    "encoded_bytes": made(lambda index: (bytes([index] * (1 + index)), index), collate_fn=list),
}

# ---- tokens as language models take them ----

WINDOW = 8


def _tokens(index: int, length: int = 0) -> dict[str, list[int]]:
    """A dict of lists, as tokenisers give them, padded to a length."""
    ids = [index + 1] * (3 + index % 5)
    pad = [0] * (length - len(ids))
    return {"input_ids": ids + pad, "attention_mask": [1] * len(ids) + pad}


def _padded_tokens(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    return {
        key: pad_sequence([torch.tensor(sample[key]) for sample in samples], batch_first=True) for key in samples[0]
    }


def _masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.15, -1), "labels": ids}


def _windows(start: Callable[[int], int]) -> Way:
    """Windows of a token file, which begin where a function says."""

    def window(self: Any, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        chosen = torch.from_numpy(tokens[start(index) :][: WINDOW + 1].astype(np.int64))
        return chosen[:-1], chosen[1:]

    def way(setting: Setting) -> Any:
        path = setting.folder / "tokens.bin"
        np.arange(WINDOW * SAMPLES + 1, dtype=np.uint16).tofile(path)
        return setting.loader(held(window, path=path))

    return way


TEXT = {
    "varying_lengths_padded_in_collate": made(_tokens, collate_fn=_padded_tokens),
    "padded_to_max_length": made(lambda index: _tokens(index, 8)),
    "strings_and_labels": made(lambda index: ("word " * (1 + index % 4), index % 2)),
    "masked_in_collate": made(lambda index: _tokens(index, 8), collate_fn=_masked),
    "random_windows": _windows(lambda _: int(torch.randint(0, WINDOW * (SAMPLES - 1), ()))),
    "consecutive_windows": _windows(lambda index: WINDOW * index),
}

# ---- recordings as torchaudio's users hold them ----


def _waveform(index: int, length: int = 400) -> torch.Tensor:
    return torch.sin(torch.arange(length) * (index + 1) / 50)[None]


def _command(index: int, length: int = 400) -> tuple[torch.Tensor, int, str, str, int]:
    """The tuple of torchaudio's SPEECHCOMMANDS: waveform, rate, label, speaker, number of the utterance."""
    return _waveform(index, length), 16000, ("yes", "no", "up")[index % 3], f"speaker{index % 4}", index


def _padded_waveforms(samples: list[Any]) -> Any:
    waveforms = pad_sequence([sample[0][0] for sample in samples], batch_first=True)
    return waveforms, [sample[2] for sample in samples]


def _spectrogram(index: int) -> tuple[torch.Tensor, int]:
    spectrum = torch.stft(_waveform(index), 64, window=torch.hann_window(64), return_complex=True)
    return (spectrum.abs() ** 2).clamp_min(1e-10).log10(), index % 3


def _crop(index: int) -> tuple[torch.Tensor, int]:
    start = int(torch.randint(0, 100, ()))
    return _waveform(index)[:, start : start + 300], index % 3


AUDIO = {
    "speech_commands": made(lambda index: _command(index, 300 + 10 * (index % 7)), collate_fn=_padded_waveforms),
    "speech_commands_of_one_length": made(_command),
    "waveform_and_label": made(lambda index: (_waveform(index), index % 3)),
    "spectrogram": made(_spectrogram),
    "random_crop_of_long_recordings": made(_crop),
}

# ---- generators of a dataset's own, wherever it keeps them ----

_OF_THE_MODULE = np.random.default_rng(0)


def _noisy(index: int, noise: Any = 0.0) -> torch.Tensor:
    return torch.full((4,), index + float(noise))


def _owner(draw: Callable[[Any, int], Any], make: Callable[[int], Any], **options: Any) -> Way:
    """A dataset whose generator is an attribute."""

    def load(self: Any, index: int) -> torch.Tensor:
        return _noisy(index, draw(self.generator, index))

    return lambda setting: setting.loader(held(load, generator=make(0)), **options)


def _module_global(setting: Setting) -> Any:
    _OF_THE_MODULE.bit_generator.state = np.random.default_rng(0).bit_generator.state
    return made(lambda index: _noisy(index, _OF_THE_MODULE.random()))(setting)


def _closure(setting: Setting) -> Any:
    generator = np.random.RandomState(0)
    return made(lambda index: _noisy(index, generator.rand()))(setting)


GENERATORS = {
    "numpy_in_every_sample": _owner(lambda generator, _: generator.random(), np.random.default_rng),
    "numpy_in_one_of_five": _owner(lambda dice, index: index % 5 == 4 and dice.random(), np.random.default_rng),
    "random_in_every_sample": _owner(lambda generator, _: generator.random(), random.Random),
    "torch_in_every_sample": _owner(
        lambda generator, _: torch.rand((), generator=generator),
        lambda seed: torch.Generator().manual_seed(seed),
        persistent_workers=False,
    ),
    "module_global": _module_global,
    "closure": _closure,
}

# ---- data without an index: iterable-style datasets and WebDataset's tar files ----


class _SizedStream(CountedStream):
    def __len__(self) -> int:
        return SAMPLES


def _in_order(dataset: Callable[[Setting], Any]) -> Way:
    return lambda setting: DataLoader(dataset(setting), **setting.options | {"shuffle": False})


def _webdataset(setting: Setting) -> Any:
    wds = pytest.importorskip("webdataset")
    paths = [str(setting.folder / f"shard{number}.tar") for number in range(2)]
    for shard, path in enumerate(paths):
        with wds.TarWriter(path) as archive:
            for number in range(shard, SAMPLES, len(paths)):
                archive.write({"__key__": f"{number:04}", "npy": np.full((2, 3), number)})
    return wds.WebDataset(paths, shardshuffle=False).decode().to_tuple("npy")


def _web_loader(setting: Setting) -> Any:
    dataset = _webdataset(setting).batched(4)
    loader = pytest.importorskip("webdataset").WebLoader(dataset, batch_size=None, num_workers=setting.workers)
    return loader.with_epoch(4)


STREAMS = {
    "iterable_dataset": _in_order(lambda _: CountedStream(SAMPLES, _noisy)),
    "iterable_dataset_with_length": _in_order(lambda _: _SizedStream(SAMPLES, _noisy)),
    "webdataset_in_a_loader": _in_order(_webdataset),
    "web_loader": _web_loader,
}

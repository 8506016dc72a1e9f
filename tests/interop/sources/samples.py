"""Samples of any kind that plain PyTorch takes: nested, named, odd, or with something in them that is no number."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting

ODD = 13  # set-up always reads it


class _Made(Dataset[Any]):
    """Samples that a function makes of their index."""

    def __init__(self, make: Callable[[int], Any], length: int = SAMPLES) -> None:
        self.make, self.length = make, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class _Pair(NamedTuple):
    image: torch.Tensor
    label: int


@dataclass
class _Record:
    image: torch.Tensor
    label: int


def _image(index: int, channels: int = 3) -> torch.Tensor:
    return torch.full((channels, 4, 4), index % 256, dtype=torch.uint8)


def image_and_filename(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: (_image(index), f"images/{index}.png")))


def one_odd_sample(setting: Setting) -> Any:
    """One in forty has a single channel, which the collate_fn mends."""
    source = _Made(lambda index: (_image(index, 1 if index == ODD else 3), index), 40)
    return setting.loader(source, collate_fn=lambda samples: torch.stack([x.expand(3, 4, 4) for x, _ in samples]))


def clips_in_nested_dicts(setting: Setting) -> Any:
    def clip(index: int) -> Any:
        frames = torch.full((2, 3, 4, 4), index, dtype=torch.uint8)
        return {"video": {"frames": frames, "rate": 25.0}, "audio": {"samples": torch.ones(8) * index}, "label": index}

    return setting.loader(_Made(clip))


def numpy_scalars_and_arrays(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: (np.full((2, 3), index, np.float32), np.int64(index), np.float32(0.5))))


def named_tuples(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: _Pair(_image(index), index)))


def bare_tensors(setting: Setting) -> Any:
    return setting.loader(_Made(_image))


def bare_ints(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: index))


def booleans_halves_and_complex(setting: Setting) -> Any:
    def numbers(index: int) -> Any:
        return [torch.tensor([index % 2 == 0]), torch.full((3,), index, dtype=torch.bfloat16), torch.ones(2) * 1j, True]

    return setting.loader(_Made(numbers))


def dataclasses(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: _Record(_image(index), index)), collate_fn=list)


def samples_with_none(setting: Setting) -> Any:
    source = _Made(lambda index: {"image": _image(index), "mask": None})
    return setting.loader(source, collate_fn=lambda samples: torch.stack([sample["image"] for sample in samples]))


def encoded_bytes(setting: Setting) -> Any:
    return setting.loader(_Made(lambda index: (bytes([index] * (1 + index)), index)), collate_fn=list)

"""Samples of any kind that plain PyTorch takes: nested, named, odd, or with something in them that is no number."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

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


WAYS = {
    "image_and_filename": lambda setting: setting.made(lambda index: (_image(index), f"images/{index}.png")),
    "one_odd_sample": lambda setting: setting.made(  # has a single channel, which the collate_fn mends
        lambda index: (_image(index, 1 if index == ODD else 3), index),
        length=40,
        collate_fn=lambda samples: torch.stack([image.expand(3, 4, 4) for image, _ in samples]),
    ),
    "clips_in_nested_dicts": lambda setting: setting.made(_clip),
    "numpy_scalars_and_arrays": lambda setting: setting.made(
        lambda index: (np.full((2, 3), index, np.float32), np.int64(index), np.float32(0.5))
    ),
    "named_tuples": lambda setting: setting.made(lambda index: _Pair(_image(index), index)),
    "bare_tensors": lambda setting: setting.made(_image),
    "bare_ints": lambda setting: setting.made(lambda index: index),
    "booleans_halves_and_complex": lambda setting: setting.made(_numbers),
    "dataclasses": lambda setting: setting.made(lambda index: _Record(_image(index), index), collate_fn=list),
    "samples_with_none": lambda setting: setting.made(
        lambda index: {"image": _image(index), "mask": None},
        collate_fn=lambda samples: torch.stack([sample["image"] for sample in samples]),
    ),
    "encoded_bytes": lambda setting: setting.made(lambda index: (bytes([index] * (1 + index)), index), collate_fn=list),
}

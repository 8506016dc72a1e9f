"""Tokens as language models take them: lists, windows, and a padding or masking collate_fn."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting

WINDOW = 8


def _tokens(index: int, length: int = 0) -> dict[str, list[int]]:
    """A dict of lists, as tokenisers give them, padded to a length."""
    ids = [index + 1] * (3 + index % 5)
    pad = [0] * (length - len(ids))
    return {"input_ids": ids + pad, "attention_mask": [1] * len(ids) + pad}


def _padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        key: torch.tensor([sample[key] + [0] * (longest - len(sample[key])) for sample in samples])
        for key in samples[0]
    }


def _masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.15, -1), "labels": ids}


def _windows(setting: Setting, start: Callable[[int], int]) -> Any:
    """Windows of a token file, which begin where a function says."""
    path = setting.folder / "tokens.bin"
    np.arange(WINDOW * SAMPLES + 1, dtype=np.uint16).tofile(path)

    def window(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(path, dtype=np.uint16, mode="r")
        chosen = torch.from_numpy(tokens[start(index) :][: WINDOW + 1].astype(np.int64))
        return chosen[:-1], chosen[1:]

    return setting.made(window)


WAYS = {
    "varying_lengths_padded_in_collate": lambda setting: setting.made(_tokens, collate_fn=_padded),
    "padded_to_max_length": lambda setting: setting.made(lambda index: _tokens(index, 8)),
    "strings_and_labels": lambda setting: setting.made(lambda index: ("word " * (1 + index % 4), index % 2)),
    "masked_in_collate": lambda setting: setting.made(lambda index: _tokens(index, 8), collate_fn=_masked),
    "random_windows": lambda setting: _windows(setting, lambda _: int(torch.randint(0, WINDOW * (SAMPLES - 1), ()))),
    "consecutive_windows": lambda setting: _windows(setting, lambda index: WINDOW * index),
}

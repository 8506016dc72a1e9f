"""Tokens as language models take them: lists, windows, and a padding or masking collate_fn."""

from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.interop.sources.files import SAMPLES
from tests.interop.training import Setting


class _Tokenised(Dataset[Any]):
    """Dicts of lists, as tokenisers give them, of their own length or padded to eight."""

    def __init__(self, *, padded: bool) -> None:
        self.padded = padded

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        ids = [index + 1] * (3 + index % 5)
        pad = [0] * (8 - len(ids)) if self.padded else []
        return {"input_ids": ids + pad, "attention_mask": [1] * len(ids) + pad}


def _padded(samples: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        key: torch.tensor([sample[key] + [0] * (longest - len(sample[key])) for sample in samples])
        for key in samples[0]
    }


def varying_lengths_padded_in_collate(setting: Setting) -> Any:
    return setting.loader(_Tokenised(padded=False), collate_fn=_padded)


def padded_to_max_length(setting: Setting) -> Any:
    return setting.loader(_Tokenised(padded=True))


class _Sentences(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[str, int]:
        return "word " * (1 + index % 4), index % 2


def strings_and_labels(setting: Setting) -> Any:
    return setting.loader(_Sentences())


def _masked(samples: list[Any]) -> dict[str, torch.Tensor]:
    ids = torch.tensor([sample["input_ids"] for sample in samples])
    return {"input_ids": ids.masked_fill(torch.rand(ids.shape) < 0.15, -1), "labels": ids}


def masked_in_collate(setting: Setting) -> Any:
    return setting.loader(_Tokenised(padded=True), collate_fn=_masked)


class _Windows(Dataset[Any]):
    """Windows of a token file, where the index says or anywhere."""

    def __init__(self, path: str, *, anywhere: bool) -> None:
        self.path, self.anywhere = path, anywhere

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = np.memmap(self.path, dtype=np.uint16, mode="r")
        start = int(torch.randint(0, len(tokens) - 9, ())) if self.anywhere else 8 * index
        window = torch.from_numpy(tokens[start : start + 9].astype(np.int64))
        return window[:-1], window[1:]


def _windows(setting: Setting, *, anywhere: bool) -> Any:
    path = setting.folder / "tokens.bin"
    np.arange(8 * SAMPLES + 1, dtype=np.uint16).tofile(path)
    return setting.loader(_Windows(str(path), anywhere=anywhere))


def random_windows(setting: Setting) -> Any:
    return _windows(setting, anywhere=True)


def consecutive_windows(setting: Setting) -> Any:
    return _windows(setting, anywhere=False)

"""What the benchmarks load: the example's JPEG files, images out of memory, and wrappers that wait or count."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

sys.path.append(str(Path(__file__).resolve().parents[1]))  # where photos and model lie, the example's data and model

__all__ = ["Clocked", "Counted", "Late", "Pool", "jpegs"]


def jpegs(samples: int) -> Dataset[Any]:
    """The example's data, 320x320 JPEG files resized to 96x96: so many samples of both classes. Makes them, once."""
    from photos import images, make  # here: it imports Lightning, for which the other sources need not wait

    make(train_files=samples, val_files=2)
    files = images("train")
    return Subset(files, torch.linspace(0, len(files) - 1, samples).long().tolist())


class Pool(Dataset[tuple[torch.Tensor, int]]):
    """Images of noise and int labels, copied out of a small pool: hardly any work, any length, any shape.

    Args:
        samples: length of the dataset.
        shape: of the uint8 images.
    """

    def __init__(self, samples: int, shape: Sequence[int]) -> None:
        self.samples, self.shape = samples, tuple(shape)
        self._pool = torch.randint(0, 256, (64, *shape), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.samples:
            raise IndexError(index)
        return self._pool[index % 64].clone(), index % 10


class _Around(Dataset[Any]):
    def __init__(self, source: Dataset[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


class Late(_Around):
    """A source that waits before each read, as a network drive makes one wait; the CPU is free meanwhile."""

    def __init__(self, source: Dataset[Any], milliseconds: float) -> None:
        super().__init__(source)
        self.milliseconds = milliseconds

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.milliseconds / 1000)
        return self.source[index]


class Clocked(_Around):
    """A source that adds up the seconds that this process has spent in it."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        start = time.perf_counter()
        try:
            return self.source[index]
        finally:
            self.seconds += time.perf_counter() - start


class Counted(_Around):
    """A source that counts its loads by itself, in all processes: each writes one byte to the end of a file."""

    def __init__(self, source: Dataset[Any], log: str) -> None:
        super().__init__(source)
        self.log = log

    def __getitem__(self, index: int) -> Any:
        file = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(file, b".")
        finally:
            os.close(file)
        return self.source[index]

    @property
    def loads(self) -> int:
        return os.path.getsize(self.log) if os.path.exists(self.log) else 0

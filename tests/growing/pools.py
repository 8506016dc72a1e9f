"""A source whose samples show their index, and rolling caches of it: written to, waited for and read."""

from collections.abc import Callable, Iterable, Iterator
from multiprocessing import active_children
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_stocache import CachedLoader, RollingCache, RollingWriter, SampleSpec
from lightning_stocache.cache.store import StoreHandle
from tests.processes import wait_until
from tests.sources import CountedSource

__all__ = ["LENGTH", "SPEC", "WORDS", "Numbers", "Stream", "all_resident", "epoch", "fillers_end", "labels", "write"]

LENGTH = 40
WORDS = 256
SPEC = SampleSpec.infer((torch.zeros(WORDS, dtype=torch.int64), 0))


class Numbers(CountedSource):
    """Samples whose every word is their index; `trouble` is called with the index before each load."""

    def __init__(
        self, length: int = LENGTH, trouble: Callable[[int], None] | None = None, log_path: str | Path = ""
    ) -> None:
        super().__init__(length, (WORDS,), log_path)
        self.trouble = trouble

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.trouble is not None:
            self.trouble(index)
        return super().__getitem__(index)

    def expected(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full(self.shape, index), index


class Stream(IterableDataset[Any]):
    """The samples of Numbers up to an end, divided among workers."""

    def __init__(self, end: int = LENGTH) -> None:
        self.end = end

    def __iter__(self) -> Iterator[Any]:
        info: Any = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return map(Numbers().expected, range(first, self.end, step))


def write(handle: StoreHandle, numbers: Iterable[int]) -> None:
    """Append samples of Numbers, as any process may."""
    with RollingWriter.attach(handle) as writer:
        for number in numbers:
            writer.append(Numbers().expected(number), number)


def labels(loader: Any) -> list[int]:
    """The numbers of an epoch, whose words are all checked."""
    found = []
    for words, numbers in loader:
        assert (words == numbers[:, None]).all()
        found += numbers.tolist()
    return found


def epoch(pool: RollingCache) -> list[int]:
    """The numbers of an epoch of a CachedLoader, sorted."""
    return sorted(labels(CachedLoader(pool, 8, shuffle=True)))


def all_resident(pool: RollingCache, count: int = LENGTH) -> None:
    """Wait for so many samples."""
    wait_until(lambda: pool.stats().resident == count)


def fillers_end() -> None:
    """Wait until this process has no filler."""
    wait_until(lambda: not [child for child in active_children() if child.name.startswith("filler")])

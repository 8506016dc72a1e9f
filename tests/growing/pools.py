"""A source whose samples show their index, and rolling caches of it: written to, waited for and read."""

from collections.abc import Callable, Iterable
from multiprocessing import active_children
from typing import Any

import torch

from lightning_stocache import CachedLoader, RollingCache, RollingWriter
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import StoreHandle
from tests.processes import wait_until
from tests.sources import Made

LENGTH = 40


def row(index: int) -> tuple[torch.Tensor, int]:
    """A sample whose every word is its index."""
    return torch.full((256,), index), index


SPEC = SampleSpec.infer(row(0))


class Numbers(Made):
    """A source of such samples, or of others; `trouble` is called with the index before each load."""

    def __init__(self, trouble: Callable[[int], object] | None = None, make: Any = row, **options: Any) -> None:
        super().__init__(make, **{"length": LENGTH} | options)
        self.trouble = trouble

    def __getitem__(self, index: int) -> Any:
        if self.trouble is not None:
            self.trouble(index)
        return super().__getitem__(index)


def write(handle: StoreHandle, numbers: Iterable[int]) -> None:
    """Append samples of Numbers, as any process may."""
    with RollingWriter.attach(handle) as writer:
        for number in numbers:
            writer.append(row(number), number)


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

"""An epoch of a dataset that is cached whole: nothing is looked up, loaded, or sent.

Where the sampler is one that draws only indices of the dataset, and alone, all that is left to do for a batch is a
gather, and 40 us of Python around it. For small batches that is more than the gather: so they are gathered together, in
blocks of up to 1 MiB, and handed out as parts of one. A thread gathers one block ahead.

An iterator holds nothing that holds it: it ends its thread when it is exhausted, closed, or no longer referred to.

Ctrl-C is not held back here, which costs 5 us. Instead each step ends with assignments and no call, after which Python
would look for signals: it is done or, where it was interrupted, it is done again.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.loading.ahead import Ahead, Job
from lightning_stocache.loading.collation import Collation
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.interrupts import HeldBack
from lightning_stocache.loading.kept import Kept
from lightning_stocache.loading.schedule import Schedule
from lightning_stocache.loading.stand_in import cached_in

__all__ = ["WarmEpoch", "pass_through"]

_BLOCK_BYTES = 1 << 20  # 12 us per batch of eight 3x32x32 images where a gather for each takes 80
_DRAWN = 4096  # indices that are drawn, and looked up, at a time


class _Block(NamedTuple):
    """Batches that are gathered together.

    Args:
        indices: int64 `[samples]`, of all of them.
        places: int64 `[samples]`, where they lie.
    """

    indices: torch.Tensor
    places: torch.Tensor


class WarmEpoch:
    """An iterator over the batches of one epoch.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache, which is full.
        schedule: when indices are drawn; one that can be trusted.
        kept: the memory of batches.
    """

    def __init__(self, loader: DataLoader[Any], schedule: Schedule, kept: Kept) -> None:
        dataset = cached_in(loader.dataset)
        assert dataset is not None
        assert kept.collation is not None
        self._dataset, self._sampler = dataset, cast(Any, loader.batch_sampler)
        self._schedule, self._kept, self._collation = schedule, kept, kept.collation
        self._size = self._sampler.batch_size
        self._at_once = max(_DRAWN // self._size, 1)
        self._together = max(_BLOCK_BYTES // max(self._size * kept.cache.codec.nbytes, 1), 1)
        self._blocks: deque[_Block] = deque()
        self._job: Job | None = None  # the gather of the first of them, if the thread has it
        self._parts: list[tuple[Any, int]] = []  # of the block that is handed out, the last first
        self._indices = torch.empty(0, dtype=torch.int64)  # of that block
        self._gathered = True  # or parts are indices, because the cache is not to be read any more
        self._with_workers = loader.num_workers > 0
        self._ahead = Ahead()
        self._finalizer = weakref.finalize(self, kept.end_epoch, self._ahead)
        try:
            kept.end_workers()
            kept.begin_epoch()
            if loader.num_workers:
                self._draw()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> WarmEpoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return len(self._sampler)

    def __next__(self) -> Any:
        """The next batch."""
        self._ahead.back()
        if not self._parts:
            self._open()
        elif self._gathered and self._changed():
            left = self._indices[-sum(samples for _, samples in self._parts) :]
            self._parts, self._gathered = self._uncached(left), False
        part, samples = self._parts[-1]
        last = len(self._parts) == 1 and self._gathered and self._job is None
        if last and (self._blocks or self._draw()) and self._ahead.worthwhile:
            self._job = Job(partial(_gather, self._kept, self._collation, self._size, self._blocks[0].places))
            self._ahead.offer(self._job)
        self._ahead.leave()
        if self._gathered:
            self._dataset.opened.count_hits(samples, self._kept.take_gather_ns())
        else:
            part = pass_through(self._dataset, part, self._kept)
        del self._parts[-1]
        return part

    def close(self) -> None:
        """End the epoch and its thread."""
        self._parts.clear()
        self._blocks.clear()
        self._finalizer()

    def _open(self) -> None:
        """Begin with the next block, or end the epoch."""
        if not (self._blocks or self._draw()):
            self.close()
            raise StopIteration
        (indices, places), job = self._blocks[0], self._job
        self._gathered = self._dataset.cache is self._kept.cache and not self._changed()
        if not self._gathered:
            parts = self._uncached(indices)
        elif job is not None:
            try:
                parts = job.result()[::-1]
            except BaseException:
                self._job = None
                raise
        else:
            parts = _gather(self._kept, self._collation, self._size, places)[::-1]
        self._indices, self._parts, self._job = indices, parts, None
        del self._blocks[0]

    def _changed(self) -> bool:
        """Whether the source is to be seen as it is now; workers would not know that it has changed."""
        return not self._with_workers and self._dataset.changed

    def _uncached(self, indices: torch.Tensor) -> list[tuple[Any, int]]:
        """The batches of these indices, to be loaded without the cache, the last first."""
        return _with_sizes(torch.split(indices, self._size), indices.shape[0], self._size)[::-1]

    def _draw(self) -> bool:
        """Draw the next batches and plan their blocks; whether there were any."""
        with HeldBack():
            indices = self._schedule.draw_many(self._at_once) if self._finalizer.alive else None
            if indices is None:
                return False
            places, step = self._kept.cache.lookup(indices), self._together * self._size
            for first in range(0, indices.shape[0], step):
                self._blocks.append(_Block(indices[first : first + step], places[first : first + step]))
            return True


def _gather(kept: Kept, collation: Collation, size: int, places: torch.Tensor) -> list[tuple[Any, int]]:
    """The batches of a block. It does not hold the iterator, which may go while a thread is at it."""
    samples = places.shape[0]
    return _with_sizes(collation.batches(kept.gather(places), samples, size), samples, size)


def _with_sizes(parts: Sequence[Any], samples: int, size: int) -> list[tuple[Any, int]]:
    """Each batch of a block with the number of its samples: that of the last one may be smaller."""
    return [(part, min(size, samples - number * size)) for number, part in enumerate(parts)]


def pass_through(dataset: CachedDataset, indices: Any, kept: Kept) -> Any:
    """A batch of a cache that has been closed, or of keys that only the source understands."""
    wanted = indices.tolist() if isinstance(indices, torch.Tensor) else indices
    return kept.pinned(default_collate(dataset.__getitems__(wanted)))

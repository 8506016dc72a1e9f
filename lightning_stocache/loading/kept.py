"""What a CachedLoader keeps from one epoch to the next: the memory of batches, and persistent workers.

It belongs to one cache: workers know the cache that the dataset had when they were started, and no other. An epoch
takes it, and gives it back when it is exhausted, closed, or no longer referred to; a second epoch at the same time gets
one of its own.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader

from lightning_stocache.cache.store import NO_PLACE, SampleStore
from lightning_stocache.loading.ahead import Ahead
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collation import Collation
from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.torch_internals import pinned

__all__ = ["Kept", "Way"]

Way = Literal["main", "worker"]
_SLACK = 3  # in shared memory besides those under way: the batch of the step, the one fetched ahead, one to spare


class Kept:
    """What outlives an epoch.

    Args:
        loader: the loader.
        cache: what its dataset is cached in.
        way: who makes the batches.

    Raises:
        TypeError: (also RuntimeError) the main process is to make them, and `default_collate` has another way to make
            them than one tensor per field.
    """

    def __init__(self, loader: DataLoader[Any], cache: SampleStore, way: Way) -> None:
        self.cache, self.way = cache, way
        self.collation = Collation(cache.codec) if way == "main" else None
        self.persistent = loader.persistent_workers and loader.num_workers > 0
        self.pins = loader.pin_memory and torch.cuda.is_available()
        self.crew: Crew | None = None
        under_way = (loader.prefetch_factor or 0) * loader.num_workers
        self.pool = BatchPool(
            pinned=self.pins, shared=under_way + _SLACK if under_way else 0, promised=lambda: cache.promised_bytes
        )
        self.in_use = False
        self._gather_ns = 0  # written by who gathers, and the next by who counts: these may be two threads
        self._told_ns = 0
        self._pid = os.getpid()

    @property
    def full(self) -> bool:
        """Whether every index of the dataset has a slot that is READY."""
        return self.cache.full

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, if the loader wants it there."""
        return pinned(batch) if self.pins else batch

    def memory(self, samples: int) -> list[torch.Tensor]:
        """Private memory for a batch, uint8 `codec.sizes(samples)`."""
        return self.pool.take(self.cache.codec.sizes(samples))

    def gather(self, places: torch.Tensor, into: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """The samples of READY places in the memory of a batch, by default in private one."""
        start = time.perf_counter_ns()
        rows = self.memory(places.shape[0]) if into is None else into
        self.cache.gather(places, rows)
        # One thread at a time, but after an interrupted wait, which may cost a few.
        self._gather_ns += time.perf_counter_ns() - start
        return rows

    def take_gather_ns(self) -> int:
        """Nanoseconds that gathering has taken since the last call."""
        taken = self._gather_ns - self._told_ns
        self._told_ns += taken
        return taken

    def gather_ready(self, places: torch.Tensor, into: list[torch.Tensor] | None = None) -> list[torch.Tensor]:
        """As `gather`, where some are NO_PLACE, whose samples are undefined."""
        some = int(places.max())
        if some == NO_PLACE:
            return self.memory(places.shape[0]) if into is None else into
        # Where there is no place, one that is READY is read: a hole of the file would take a page, or fault where none
        # is left.
        return self.gather(places.masked_fill(places == NO_PLACE, some), into)

    def handed_out(self, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """A batch in shared memory as the trainer gets it: lent, or copied where it is to be pinned or none is left."""
        if self.pool.may_lend and not self.pins:
            return memory
        private = self.pool.take([field.shape[0] for field in memory])
        for mine, field in zip(private, memory, strict=True):
            mine.copy_(field)
        return private

    def end_broken_workers(self) -> None:
        """End workers that another epoch could not use: one was killed, or Ctrl-C came while they were called back."""
        if self.crew is not None and not self.crew.usable:
            self.end_workers()

    def begin_epoch(self) -> None:
        """Call the workers back from an epoch that was broken off: its memory is not written to any more."""
        self.in_use = True
        if self.crew is not None:
            self.crew.begin_epoch()

    def end_epoch(self, ahead: Ahead | None = None) -> None:
        """Stop the workers, unless they are persistent and may still have something to load.

        Args:
            ahead: the epoch's thread, which is stopped too.
        """
        if os.getpid() != self._pid:
            return  # the copy of an iterator that a worker inherited ends nothing
        if ahead is not None:
            ahead.stop()
        if not self.persistent or (self.way == "main" and self.full):
            self.end_workers()
        self.in_use = False

    def end_workers(self) -> None:
        """End the workers."""
        crew, self.crew = self.crew, None
        if crew is not None:
            crew.close()
        if self.way == "main":
            self.pool.trim()  # no other epoch may want it

    def end(self) -> None:
        """End the workers and give up all memory."""
        self.end_workers()
        self.pool.close()

    def release(self) -> None:
        """The loader is gone: end now, or with the epoch under way.

        Left to the garbage collector, DataLoader waits for 5 s per worker: their queues may be collected before them.
        """
        if os.getpid() != self._pid:
            return
        self.persistent = False
        if not self.in_use:
            self.end()

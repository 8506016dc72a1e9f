"""What a CachedLoader keeps from one epoch to the next: buffers, windows, and persistent workers.

It belongs to one cache: workers know the cache that the dataset had when they were started, and no other. An epoch
takes it, and gives it back when it is exhausted, closed, or no longer referred to; a second epoch at the same time gets
one of its own.
"""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader
from torch.utils.data._utils import pin_memory as pinning

from lightning_stocache.cache.store import NO_PLACE, SampleStore
from lightning_stocache.loading.ahead import Ahead
from lightning_stocache.loading.buffers import Buffers
from lightning_stocache.loading.collation import Collation
from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.staging import Staging
from lightning_stocache.loading.windows import Windows

__all__ = ["Kept", "Way"]

Way = Literal["main", "worker"]
_SLACK = 3  # windows beyond those under way: the batch of the step, the one fetched ahead of it, and one to spare


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
        self.buffers = Buffers(self.pins)
        self.crew: Crew | None = None
        self.staging: Staging | None = None
        self.windows = Windows(
            (loader.prefetch_factor or 0) * loader.num_workers + _SLACK, lambda: cache.promised_bytes
        )
        self.abandoned: list[int | None] = []  # windows of errands that nobody will ask for
        self.in_use = False
        self._gather_ns = 0  # written by who gathers, and the next by who counts: these may be two threads
        self._told_ns = 0
        self._pid = os.getpid()

    @property
    def full(self) -> bool:
        """Whether every index of the dataset has a slot that is READY."""
        return self.cache.full

    @property
    def promised(self) -> int:
        """Bytes that the cache has been granted and may still take."""
        return self.cache.promised_bytes

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, if the loader wants it there."""
        return cast(Any, pinning).pin_memory(batch) if self.pins else batch

    def gather(self, places: torch.Tensor) -> list[torch.Tensor]:
        """The samples of READY places in memory that is used again, uint8 `codec.sizes(samples)`."""
        start = time.perf_counter_ns()
        rows = self._memory(places.shape[0])
        self.cache.gather(places, rows)
        # One thread at a time, but after an interrupted wait, which may cost a few.
        self._gather_ns += time.perf_counter_ns() - start
        return rows

    def take_gather_ns(self) -> int:
        """Nanoseconds that gathering has taken since the last call."""
        taken = self._gather_ns - self._told_ns
        self._told_ns += taken
        return taken

    def gather_ready(self, places: torch.Tensor) -> list[torch.Tensor]:
        """The same where some are NO_PLACE, whose samples are undefined."""
        some = int(places.max())
        if some == NO_PLACE:
            return self._memory(places.shape[0])
        # Where there is no place, one that is READY is read: a hole of the file would take a page, or fault where none
        # is left.
        return self.gather(places.masked_fill(places == NO_PLACE, some))

    def _memory(self, samples: int) -> list[torch.Tensor]:
        return [self.buffers.take(field, nbytes) for field, nbytes in enumerate(self.cache.codec.sizes(samples))]

    def end_broken_workers(self) -> None:
        """End workers that another epoch could not use: one was killed, or Ctrl-C came while they were called back."""
        if self.crew is not None and not self.crew.usable:
            self.end_workers()

    def begin_epoch(self) -> None:
        """Take what an epoch left behind that was broken off."""
        self.in_use = True
        if self.crew is not None:
            self.crew.begin_epoch()
        if self.staging is not None:
            self.staging.begin_epoch()
        while self.abandoned:
            self.windows.give_back(self.abandoned.pop())

    def end_epoch(self, ahead: Ahead | None = None, windows: deque[int | None] | None = None) -> None:
        """Stop the workers, unless they are persistent and may still have something to load.

        Args:
            ahead: the epoch's thread, which is stopped too.
            windows: those of the epoch's errands, which nobody will ask for any more.
        """
        if os.getpid() != self._pid:
            return  # the copy of an iterator that a worker inherited ends nothing
        if ahead is not None:
            ahead.stop()
        if windows is not None:
            self.abandoned.extend(windows)
            windows.clear()
        if not self.persistent or (self.way == "main" and self.full):
            self.end_workers()
        self.in_use = False

    def end_workers(self) -> None:
        """End the workers and give up their staging area."""
        crew, self.crew = self.crew, None
        staging, self.staging = self.staging, None
        if crew is not None:
            crew.close()
        if staging is not None:
            staging.close()

    def end(self) -> None:
        """End the workers and give up all memory."""
        self.end_workers()
        self.windows.close()

    def release(self) -> None:
        """The loader is gone: end now, or with the epoch under way.

        Left to the garbage collector, DataLoader waits for 5 s per worker: their queues may be collected before them.
        """
        if os.getpid() != self._pid:
            return
        self.persistent = False
        if not self.in_use:
            self.end()

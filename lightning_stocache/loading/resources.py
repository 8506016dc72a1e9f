"""What a CachedLoader keeps from one epoch to the next: the memory of batches, and persistent workers.

Workers end when all that the loader's sampler can draw is READY: the whole dataset, or the fold that it leaves to be
drawn. Should it draw something else after all, that is loaded in the process that reads.

It belongs to one cache: workers know the cache that the dataset had when they were started, and no other. An epoch
takes it, and gives it back when it is exhausted, closed, or no longer referred to; a second epoch at the same time gets
one of its own.
"""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store, gathers
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.interrupts import held_back
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.prefetch import Prefetcher
from lightning_stocache.loading.worker_pool import WorkerPool, under_way
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.torch_internals import pinned

__all__ = ["Resources", "Route"]

Route = Literal["main", "worker"]
"""Who puts batches together: the main process, from the cache and what workers have loaded, or a worker, whole."""

_SLACK = 3  # in shared memory besides those under way: the batch of the step, the one fetched ahead, one to spare


class Resources:
    """What outlives an epoch.

    Args:
        loader: the loader.
        cache: what its dataset is cached in.
        route: who puts its batches together.

    Raises:
        TypeError: (also RuntimeError) it is the main process, and `default_collate` has another way to make batches
            than one tensor per field.
    """

    def __init__(self, loader: DataLoader[Any], cache: Store, route: Route) -> None:
        self.cache, self.route = cache, route
        self.pins = loader.pin_memory and torch.cuda.is_available()
        self.collator = Collator(self.rows.codec, self.pins) if route == "main" else None
        self.persistent = loader.persistent_workers and loader.num_workers > 0
        self.workers: WorkerPool | None = None
        shared = under_way(loader) + _SLACK if loader.num_workers else 0
        self.pool = BatchPool(pinned=self.pins, shared=shared, promised=lambda: cache.promised_bytes)
        self.in_use, self.idle, self.ended = False, False, False
        self._gather_ns = 0  # written by who gathers, and the next by who counts: these may be two threads
        self._told_ns = 0
        self._pid = os.getpid()

    @property
    def rows(self) -> Store:
        """The cache where the main process puts batches together, which it does by gathering rows."""
        assert gathers(self.cache)
        return self.cache

    @property
    def full(self) -> bool:
        """Whether every index of the dataset has a slot that is READY."""
        return self.cache.full

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, if the loader wants it there."""
        return pinned(batch) if self.pins else batch

    def gather(self, places: Integers, into: Memory | None = None) -> Memory:
        """The samples of READY places in the memory of a batch, by default in private one."""
        start = time.perf_counter_ns()
        memory = self._private(len(places)) if into is None else into
        self.rows.gather(places, memory)
        # One thread at a time.
        self._gather_ns += time.perf_counter_ns() - start
        return memory

    def take_gather_ns(self) -> int:
        """Nanoseconds that gathering has taken since the last call."""
        taken = self._gather_ns - self._told_ns
        self._told_ns += taken
        return taken

    def gather_ready(self, places: Integers, into: Memory | None = None) -> Memory:
        """The samples of places in the memory of a batch; where a place is NO_PLACE, what lies there is undefined."""
        ready = int(places.max())
        if ready == NO_PLACE:
            return self._private(len(places)) if into is None else into
        # Where there is no place, one that is READY is read: a hole of the file would take a page, or fault where none
        # is left.
        return self.gather(np.where(places == NO_PLACE, ready, places), into)

    def handed_out(self, memory: Memory) -> Memory:
        """A batch in shared memory as the trainer gets it: lent, or copied where it is to be pinned or none is left."""
        if self.pool.may_lend and not self.pins:
            return memory
        private = self.pool.take([len(field) for field in memory])
        for mine, field in zip(private, memory, strict=True):
            mine[:] = field
        return private

    def _private(self, samples: int) -> Memory:
        return self.pool.take(self.rows.codec.sizes(samples))

    def end_broken_workers(self) -> None:
        """End workers that another epoch could not use: one has ended, or Ctrl-C came while they were called back.

        Raises:
            RuntimeError: one has crashed or was killed, and no epoch has ended by that.
        """
        if self.workers is not None and not self.workers.usable():
            self.end_workers()

    def begin_epoch(self, loader: DataLoader[Any]) -> None:
        """End workers that have nothing to load; call others back from an epoch that was broken off.

        The memory of that epoch is not written to any more then.
        """
        self.idle = self.route == "main" and (self.full or (loader.num_workers > 0 and self._holds_all_of(loader)))
        if self.idle:
            self.end_workers()
        self.in_use = True
        if self.workers is not None:
            self.workers.begin_epoch()

    def _holds_all_of(self, loader: DataLoader[Any]) -> bool:
        """Whether all that a loader's sampler can draw is READY, as far as that is known."""
        drawn = sampler_domain(batches_of(loader), self.cache.length) if self.cache.filled else None
        if drawn is None or len(drawn) > self.cache.filled:
            return False
        return not bool((self.cache.lookup(drawn.indices) == NO_PLACE).any())

    def end_epoch(self, prefetcher: Prefetcher) -> None:
        """Stop the epoch's thread, and the workers, unless they are persistent and may still have something to load."""
        if os.getpid() != self._pid:
            return  # the copy of an iterator that a worker inherited ends nothing
        with held_back():
            prefetcher.stop()
            if not self.persistent or (self.route == "main" and self.full):
                self.end_workers()
            self.in_use = False

    def end_workers(self) -> None:
        """End the workers."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()
        if self.route == "main":
            self.pool.trim()  # no other epoch may want it

    def end(self) -> None:
        """End the workers and give up all memory; for another epoch others are to be made."""
        self.ended = True
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

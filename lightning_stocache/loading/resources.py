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

import torch
from torch.utils.data import DataLoader

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store
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
        cache: what its dataset is cached in; rows, where the main process puts batches together.
        route: who puts its batches together.

    Raises:
        TypeError: (also RuntimeError) it is the main process, and `default_collate` has another way to make batches
            than one tensor per field.
    """

    def __init__(self, loader: DataLoader[Any], cache: Store, route: Route) -> None:
        self.cache, self.route = cache, route
        self.pins = loader.pin_memory and torch.cuda.is_available()
        self._collator = Collator(cache.codec, self.pins) if route == "main" else None
        self.persistent = loader.persistent_workers and loader.num_workers > 0
        self.workers: WorkerPool | None = None
        shared = under_way(loader) + _SLACK if loader.num_workers else 0
        self.pool = BatchPool(pinned=self.pins, shared=shared, promised=lambda: cache.promised_bytes)
        self.in_use = self.ended = False
        self._gather_ns = 0  # written by who gathers, and the next by who counts: these may be two threads
        self._told_ns = 0
        self._pid = os.getpid()

    @property
    def collator(self) -> Collator:
        """How the main process makes batches of gathered rows."""
        assert self._collator is not None
        return self._collator

    def gather(self, places: Integers, into: Memory | None = None) -> Memory:
        """The samples of READY places in the memory of a batch, by default in private one."""
        start = time.perf_counter_ns()
        memory = self.pool.take(self.cache.codec.sizes(len(places))) if into is None else into
        self.cache.gather(places, memory)
        # One thread at a time.
        self._gather_ns += time.perf_counter_ns() - start
        return memory

    def take_gather_ns(self) -> int:
        """Nanoseconds that gathering has taken since the last call."""
        taken = self._gather_ns - self._told_ns
        self._told_ns += taken
        return taken

    def pinned(self, batch: Any) -> Any:
        """The batch in page-locked memory, if the loader wants it there."""
        return pinned(batch) if self.pins else batch

    def is_usable(self) -> bool:
        """Whether another epoch can begin with this; broken workers are ended.

        Raises:
            RuntimeError: a worker has crashed or was killed, and no epoch has ended by that.
        """
        if self.in_use or self.ended:
            return False
        if self.workers is not None and not self.workers.usable():
            self.end_workers()
        return True

    def begin_epoch(self, loader: DataLoader[Any], seed_state: torch.Tensor | None) -> None:
        """Start workers, or call them back from an epoch that was broken off; end those that have nothing to load.

        The memory of that epoch is not written to any more then.
        """
        self.in_use = True
        if self.route == "main" and (self.cache.full or (loader.num_workers and self._holds_all_of(loader))):
            self.end_workers()
        elif self.workers is not None:
            self.workers.begin_epoch()
        elif loader.num_workers:
            with held_back():
                self.workers = WorkerPool(loader, seed_state)

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
            if not self.persistent or (self.route == "main" and self.cache.full):
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

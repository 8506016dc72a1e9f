"""The batches of an epoch that are still to come, planned as their indices are drawn.

A batch whose samples are all READY is planned together with those that follow, as a block that one gather makes. Any
other batch is planned by itself, and a worker or this process makes it. Where nobody can notice that indices are drawn
at once (`draws`), up to a few thousand are drawn and looked up together. With workers, these are then asked only for
the batches that are not READY; and once the cache is full, for none.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lightning_stocache.cache.gather_pool import GatherPool
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.draws import END, EpochDraws
from lightning_stocache.loading.prefetch import Job
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import Reply, Request

__all__ = ["Gatherer", "Plan", "Plans"]

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
AHEAD = 64  # batches that are drawn in search of one for a worker


class Gatherer:
    """Gathers batches of READY samples out of a cache of rows, into page-locked memory if it `pins`.

    Raises:
        TypeError: (also RuntimeError) `default_collate` has another way to make batches than one tensor per field.
    """

    def __init__(self, cache: Store, *, pins: bool) -> None:
        self.cache = cache
        self.pins = pins
        self.pool = BatchPool(pinned=pins)
        self._collator = Collator(cache.codec, pins)

    def batches(self, places: Integers, size: int, threads: GatherPool) -> tuple[deque[Any], int]:
        """Batches of `size` samples each, of which the last may have fewer; and the nanoseconds that this took."""
        start = time.perf_counter_ns()
        samples = len(places)
        memory = self.pool.take(self._collator.sizes(samples))
        self.cache.gather(places, memory, threads)
        with torch.inference_mode(False):  # a block may outlast the mode
            batches = deque(self._collator.batches(memory, samples, size))
        return batches, time.perf_counter_ns() - start


@dataclass
class Plan:
    """A batch to come, or a block of several.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: int64 `[samples]`, if all are READY: the places to gather from.
        number: of the request, if a worker was asked.
        reply: the reply of a worker, if it has come before its turn.
        gather: the job that the thread has been offered.
    """

    indices: Any
    places: Integers | None = None
    number: int | None = None
    reply: Reply | None = None
    gather: Job | None = None


class Plans(Iterator[Request]):
    """The plans of an epoch. As an iterator it draws for the workers, whenever DataLoader would draw a batch.

    Args:
        cached: the cached source.
        draws: draws the indices.
        gatherer: gathers what is READY; None if workers make all batches.
        length: number of samples of the dataset.

    Attributes:
        queue: the plans, in the order of the sampler.
        request: makes the request of a number for keys.
        has_failed: whether the last draw was an error.
    """

    def __init__(self, cached: CachedSource, draws: EpochDraws, gatherer: Gatherer | None, length: int) -> None:
        self._cached = cached
        self._draws = draws
        self._gatherer = gatherer
        self._length = length
        self.queue: deque[Plan] = deque()
        self.request: Callable[[int, Any], Request] = Request
        self.has_failed = False
        self._unasked: deque[Plan] = deque()  # for workers, before others are drawn
        self._is_paused = False
        self._is_full = False
        self._requests = 0

    @property
    def gathers(self) -> bool:
        """Whether batches whose samples are READY are gathered."""
        return self._gatherer is not None

    @property
    def are_local(self) -> bool:
        """Whether this process makes what is drawn from now on: the cache is full."""
        if self._gatherer is not None and not self._is_full:
            cache = self._gatherer.cache
            self._is_full = self._length <= cache.length and cache.full
        return self._gatherer is not None and self._is_full

    # ---- for this process ----

    def draw(self) -> bool:
        """Plan the next batch, or the next few thousand indices where nobody can notice. Returns False at the end."""
        if self._gatherer is None or not self._draws.are_unseen:
            return self._draw_one() is not None
        indices = self._draws.draw_many()
        if indices is None:
            return False
        size = self._draws.size
        cache = self._gatherer.cache
        places = cache.lookup(indices)
        firsts = np.arange(0, len(indices), size)
        are_ready = np.logical_and.reduceat(places != NO_PLACE, firsts).tolist()
        most = max(BLOCK_BYTES // max(size * cache.codec.nbytes, 1), 1)
        first = 0
        while first < len(firsts):
            end = first + 1
            while are_ready[first] and end < min(len(firsts), first + most) and are_ready[end]:
                end += 1
            block = slice(first * size, end * size)
            self.queue.append(Plan(indices[block], places[block] if are_ready[first] else None))
            first = end
        return True

    def _draw_one(self) -> Plan | None:
        indices = self._draws.draw()
        if indices is END:
            return None
        plan = Plan(indices)
        if not isinstance(indices, np.ndarray):
            self._cached.check_keys(indices)
        elif self._gatherer is not None and len(indices):
            places = self._gatherer.cache.lookup(indices)
            if (places != NO_PLACE).all():
                plan.places = places
        self.queue.append(plan)
        return plan

    # ---- for workers ----

    def begin(self) -> Plans:
        """Begin the sampler, when DataLoader does."""
        self._draws.begin()
        return self

    def __next__(self) -> Request:
        if self._unasked:
            return self._asked(self._unasked.popleft())
        if self._is_paused or (self._draws.are_unseen and self.are_local):
            raise StopIteration
        self.has_failed = True
        for ahead in range(AHEAD):
            plan = self._draw_one()
            if plan is None or (plan.places is not None and self.are_local):
                break  # not the end: DataLoader asks again, and then another batch is drawn
            if plan.places is None or ahead + 1 == AHEAD or not self._draws.are_unseen:
                self.has_failed = False
                return self._asked(plan)
        self.has_failed = False
        raise StopIteration

    def _asked(self, plan: Plan) -> Request:
        plan.places = None
        plan.number = self._requests
        self._requests += 1
        return self.request(plan.number, plan.indices)

    def pause(self) -> None:
        """Draw nothing when DataLoader asks, until `resume` is called."""
        self._is_paused = True

    def resume(self) -> Plans:
        """Have workers make what nobody has made: first of all what is planned."""
        self._is_paused = False
        self._unasked = deque(plan for plan in self.queue if plan.number is None)
        return self

    # ---- after a change ----

    def gather_no_more(self, gathered: Integers) -> None:
        """Have all batches made.

        Args:
            gathered: indices of batches that were gathered, and are to be made before all others.
        """
        plans, self.queue = self.queue, deque()
        self._plan_each(gathered)
        for plan in plans:
            if plan.places is None:
                self.queue.append(plan)
            else:
                self._plan_each(plan.indices)
        self._gatherer = None

    def _plan_each(self, indices: Integers) -> None:
        size = self._draws.size or max(len(indices), 1)
        for first in range(0, len(indices), size):
            self.queue.append(Plan(indices[first : first + size]))

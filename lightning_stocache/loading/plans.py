"""The batches of an epoch that are still to come, planned as their indices are drawn.

A loader that draws its indices at other moments than DataLoader does gives other batches: samplers, the worker seed and
the user's own code draw from the same generators. So every draw is made on the caller's thread, at the moment at which
DataLoader makes it:

- `iter(loader)`: `iter(sampler)`; the base seed of the workers; with workers, `iter(sampler)` once more, and the first
  `prefetch_factor * num_workers` batches. A persistent loader's later epochs draw no base seed and call `iter` once.
- `next(iterator)`: with workers, one batch, after the current one has come; without, the current one.

Batches may be drawn ahead only if nobody can notice: if the sampler draws from a generator of its own. Two samplers do
not: a RandomSampler with the user's generator, which draws a second permutation when the first runs out, and a subclass
with its own `__iter__`. Where drawing ahead is allowed, a few thousand indices are drawn and looked up together.

A batch whose samples are all READY is planned together with those that follow, as a block that one gather makes. Any
other batch is planned by itself, and a worker or this process makes it; it is looked up again when its turn comes. Once
the cache is full, workers are asked for nothing more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader

from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.loading.draws import ArrayBatches, ResumableBatches, as_indices
from lightning_stocache.loading.loader_sampler import draws_unseen
from lightning_stocache.loading.message import Reply, Request
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import under_way
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler, StreamBatches

__all__ = ["Plan", "Plans"]

DRAWN = 4096  # indices that are drawn and looked up together, if nobody can notice
BLOCK_BYTES = 2 << 20  # a batch of eight 3x32x32 images takes 7 us in a block, and 80 us by a gather of its own
_ROLLING_BATCHES = 16  # batches of a RollingSampler, whose samples are replaced meanwhile


@dataclass
class Plan:
    """A batch to come, or a block of several.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        slots: int64 `[samples]`, if all are READY: the slots to gather from.
        number: of the request, if a worker was asked.
        reply: the reply of a worker, if it has come before its turn.
    """

    indices: Any
    slots: Integers | None = None
    number: int | None = None
    reply: Reply | None = None


class Plans(Iterator["Request | None"]):
    """The plans of an epoch. As an iterator it draws for the workers, whenever DataLoader would draw a batch.

    Args:
        loader: the loader, whose batch sampler is drawn from.
        cached: the cached source of its dataset.
        state: the position of the loader. Its epoch has begun; it notes the states of the generators.
        cache: the store from which READY batches are gathered; None if workers make all batches.

    Attributes:
        cache: the store from which batches are gathered; None after a change, when nothing may be gathered any more.
        are_unseen: whether nobody can notice that a batch is drawn ahead.
        size: samples of a batch, of which the last may have fewer; 0 for a batch sampler of the user's own.
        queue: the plans, in the order of the sampler.
        request: makes the request of a number for keys.
        has_failed: whether the last draw was an error.
        is_paused: whether nothing is drawn when DataLoader asks.
    """

    def __init__(self, loader: DataLoader[Any], cached: CachedSource, state: LoaderState, cache: Store | None) -> None:
        batches: Any = loader.batch_sampler
        is_stream = type(batches) is StreamBatches
        is_plain = type(batches) is BatchSampler
        sampler = batches.sampler if is_plain else None  # not the loader's: the user may have given the BatchSampler
        self.cache = cache
        self.are_unseen = is_stream or draws_unseen(sampler)
        self.size = batches.batch_size if is_stream or is_plain else 0
        self.queue: deque[Plan] = deque()
        self.request: Callable[[int, Any], Request] = Request
        self.has_failed = self.is_paused = False
        self._cached = cached
        self._length = len(cast(Any, loader.dataset))
        self._draws_arrays = not is_stream and ArrayBatches.can_draw(sampler, state)
        self._batches: Any = batches
        if not is_stream:
            self._batches = (ArrayBatches if self._draws_arrays else ResumableBatches)(batches, state)
        self._drawing: Iterator[Any] = iter(())
        self._has_drawn = False
        self._is_full = False  # remembered, because `cache.full` reads the states of all slots
        self._requests = 0
        # A rank that draws one batch of a LocalitySampler deals the batches of all ranks.
        batches_dealt = sampler.num_replicas if isinstance(sampler, LocalitySampler) else 1
        self._at_once = max(DRAWN // max(self.size * batches_dealt, 1), 1)
        if type(sampler) is RollingSampler:
            self._at_once = _ROLLING_BATCHES

    @property
    def are_local(self) -> bool:
        """Whether this process makes what is drawn from now on: the cache is full."""
        if self.cache is None:
            return False
        self._is_full = self._is_full or (self._length <= self.cache.length and self.cache.full)
        return self._is_full

    # ---- draw ----

    def begin(self) -> Plans:
        """Begin the sampler, as DataLoader does, perhaps twice."""
        drawing = iter(self._batches)
        self._drawing = drawing if self._draws_arrays else map(as_indices, drawing)
        return self

    def begin_alone(self, loader: DataLoader[Any], *, draws_seed: bool) -> None:
        """Begin the sampler where no worker is asked, and draw as many batches as DataLoader does at once.

        A DataLoader would draw the base seed of its workers all the same.
        """
        self.begin()
        if draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if loader.num_workers:
                self.begin()
        most = min(under_way(loader), 1) if self.are_unseen else under_way(loader)
        while len(self.queue) < most and self.draw():
            pass

    def draw(self) -> bool:
        """Plan the next batch, or the next few thousand indices where nobody can notice. Returns False at the end."""
        self._has_drawn = True
        at_once = self._at_once if self.are_unseen and self.cache is not None else 1
        drawn = list(islice(self._drawing, at_once))
        if len(drawn) > 1 and all(isinstance(batch, np.ndarray) for batch in drawn):
            self._plan_blocks(drawn)
            return True
        for batch in drawn:
            if not isinstance(batch, np.ndarray):
                self._cached.check_keys(batch)
            self.queue.append(Plan(batch))
            self._look_up(self.queue[-1])
        return bool(drawn)

    def _plan_blocks(self, drawn: list[Integers]) -> None:
        """Plan batches that are drawn together: those that are READY in blocks, each other by itself."""
        cache = cast(Store, self.cache)
        indices = np.concatenate(drawn)
        slots = cache.lookup(indices)
        ends = list(accumulate(map(len, drawn)))
        begins = [0, *ends[:-1]]
        are_ready = np.logical_and.reduceat(slots != NO_SLOT, begins).tolist()
        most = max(BLOCK_BYTES // max(self.size * cache.codec.nbytes, 1), 1)
        first = 0
        while first < len(drawn):
            last = first
            stop = min(first + most, len(drawn)) - 1
            # Only the last batch of a block may be smaller than the others.
            while last < stop and are_ready[last] and are_ready[last + 1] and len(drawn[last]) == self.size:
                last += 1
            block = slice(begins[first], ends[last])
            self.queue.append(Plan(indices[block], slots[block] if are_ready[first] else None))
            first = last + 1

    def _look_up(self, plan: Plan) -> None:
        """Plan to gather a batch if its samples are READY by now."""
        if self.cache is None or not isinstance(plan.indices, np.ndarray) or not len(plan.indices):
            return
        slots = self.cache.lookup(plan.indices)
        if (slots != NO_SLOT).all():
            plan.slots = slots

    def first(self) -> Plan | None:
        """The plan of the next batch; None if the next batch is not drawn yet."""
        if not self.queue:
            return None
        plan = self.queue[0]
        if plan.slots is None and plan.number is None:
            self._look_up(plan)
        return plan

    # ---- for workers ----

    def __next__(self) -> Request | None:
        """The next request. None asks for no batch, because all are READY, and has DataLoader draw again."""
        if self.is_paused:
            raise StopIteration
        plan = self._unasked()
        # The first draw is seen: RandomSampler draws the seed of its generator from torch's.
        has_more = not (self.are_unseen and self.are_local and self._has_drawn)
        if plan is None and has_more:
            self.has_failed = True
            has_more = self.draw()
            self.has_failed = False
            plan = self._unasked()
        if plan is not None:
            return self._asked(plan)
        if not has_more or self.are_local:
            raise StopIteration  # not the end: DataLoader asks again, and then another batch is drawn
        return None if self.are_unseen else self._asked(self.queue[-1])

    def _unasked(self) -> Plan | None:
        """The first plan for which no worker was asked and that is not READY; None if there is none."""
        for plan in self.queue:
            if plan.slots is None and plan.number is None:
                self._look_up(plan)
                if plan.slots is None:
                    return plan
        return None

    def _asked(self, plan: Plan) -> Request:
        plan.slots = None
        plan.number = self._requests
        self._requests += 1
        return self.request(plan.number, plan.indices)

    def resume(self) -> Plans:
        """Have workers make what nobody has made: first of all what is planned."""
        self.is_paused = False
        return self

    # ---- after a change ----

    def gather_no_more(self, gathered: Integers) -> None:
        """Have all batches made.

        Args:
            gathered: indices of batches that were gathered, and are to be made before all others.
        """
        plans, self.queue = self.queue, deque()
        self.cache = None
        self._plan_each(gathered)
        for plan in plans:
            if plan.slots is None:
                self.queue.append(plan)
            else:
                self._plan_each(plan.indices)

    def _plan_each(self, indices: Integers) -> None:
        size = self.size or max(len(indices), 1)
        for first in range(0, len(indices), size):
            self.queue.append(Plan(indices[first : first + size]))

"""What an epoch does for each batch to come: it is planned when its indices are drawn, on the caller's thread.

The indices are looked up. If something of a batch is not READY, and there are workers, the rest is gathered at once,
into memory that one of them is requested to complete; where workers put batches together, all of it is requested.

Once every index is READY and the stream can be trusted (it draws only indices of the dataset, and alone), all that is
left to do for a batch is the gather, and the Python around it, which is more for small batches. So many batches are
planned at once, and those that are small are to be gathered together, in blocks of up to 2 MiB.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.interrupts import held_back
from lightning_stocache.loading.prefetch import Job
from lightning_stocache.loading.request import BatchRequest
from lightning_stocache.loading.resources import Resources
from lightning_stocache.loading.shared_batch import SharedBatch
from lightning_stocache.loading.worker_pool import WorkerPool, under_way

__all__ = ["BatchPlan", "BatchPlanner"]

log = logging.getLogger(__name__)

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
DRAWN = 4096  # indices that are drawn, and looked up, at a time, where all are READY


@dataclass
class BatchPlan:
    """A batch to come, or several that are gathered together.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: int64 `[samples]`, where they lie; None for what passes through or is requested whole.
        missing: positions in the batch that are being loaded.
        requested: whether a worker has been asked, and its reply is awaited.
        shared: memory that the worker can write to; None if there was none to be had.
        rows: that memory with the hits in it, per field.
        gather: once it has been offered to the thread.
    """

    indices: Any
    places: Integers | None = None
    missing: list[int] = field(default_factory=list)
    requested: bool = False
    shared: SharedBatch | None = None
    rows: Memory | None = None
    gather: Job | None = None


class BatchPlanner:
    """Draws the batches of an epoch, and plans them.

    Args:
        loader: the loader.
        cached: what serves its dataset.
        stream: when indices are drawn.
        resources: memory and workers.
        warm: whether every index is READY, and the stream can be trusted.
    """

    def __init__(
        self, loader: DataLoader[Any], cached: CachedSource, stream: IndexStream, resources: Resources, warm: bool
    ) -> None:
        self.plans: deque[BatchPlan] = deque()
        self.ahead_unseen = stream.ahead_unseen
        self._cached, self._stream, self._resources, self._warm = cached, stream, resources, warm
        self._batch_size: Any = cast(Any, loader.batch_sampler).batch_size if warm else None
        self._open = True

    def begin_with_workers(self, loader: DataLoader[Any]) -> None:
        """Start them, before there is a thread, and draw as DataLoader does: it plans a number of batches at once."""
        resources = self._resources
        if resources.workers is None and not resources.idle:
            with held_back():
                resources.workers = WorkerPool(loader, self._stream.seed_state)
        for _ in range(1 if self._warm else under_way(loader)):
            self.plan()

    def plan(self) -> bool:
        """Draw and plan what comes next; whether there was something."""
        if not self._open:
            return False
        return self._plan_blocks() if self._warm else self._plan_batch()

    def batch_size(self, plan: BatchPlan) -> int:
        """Samples per batch of a plan, but the last."""
        return int(self._batch_size) if self._warm else max(len(plan.indices), 1)

    def plan_again(self, indices: Integers) -> None:
        """Have batches of these indices come next, and from the source as it is now."""
        self.plans.extendleft(BatchPlan(part) for part in reversed(self._batches(indices)))

    def close(self) -> None:
        """Plan nothing any more."""
        self._open = False
        self.plans.clear()

    @property
    def ended(self) -> bool:
        """Whether `close` was called."""
        return not self._open

    @property
    def closed(self) -> bool:
        """Whether the dataset has let go of the cache."""
        return self._cached.cache is not self._resources.cache

    def _plan_batch(self) -> bool:
        indices = self._stream.draw()
        if indices is None:
            return False
        plan, workers = BatchPlan(indices), self._resources.workers
        self.plans.append(plan)
        if self._resources.route == "worker":
            assert workers is not None
            plan.shared = shared = self._resources.pool.take_shared()
            wanted = indices.tolist() if isinstance(indices, np.ndarray) else indices
            workers.send(BatchRequest(wanted, None if shared is None else shared.place))
            plan.requested = True
        elif isinstance(indices, np.ndarray) and len(indices) and not self.closed:
            plan.places = self._resources.cache.lookup(indices)
            plan.missing = np.flatnonzero(plan.places == NO_PLACE).tolist()
            if plan.missing and workers is not None:
                self._request_missing(plan, plan.places, workers)
        return True

    def _plan_blocks(self) -> bool:
        size, cache = self._batch_size, self._resources.cache
        indices = self._stream.draw_many(max(DRAWN // size, 1))
        if indices is None:
            return False
        if self.closed:
            self.plans.extend(map(BatchPlan, self._batches(indices)))
            return True
        places = cache.lookup(indices)
        # Pinned memory is found again by torch's allocator only where a batch has it for itself.
        together = 1 if self._resources.pins else max(BLOCK_BYTES // max(size * cache.codec.nbytes, 1), 1)
        for first in range(0, len(indices), together * size):
            block = slice(first, first + together * size)
            self.plans.append(BatchPlan(indices[block], places[block]))
        return True

    def _batches(self, indices: Integers) -> list[Integers]:
        """Indices as batches."""
        return [indices[first : first + self._batch_size] for first in range(0, len(indices), self._batch_size)]

    def _request_missing(self, plan: BatchPlan, places: Integers, workers: WorkerPool) -> None:
        """Gather what is READY into memory that a worker can write to, and have the rest put there."""
        sizes, place = self._resources.rows.codec.sizes(len(places)), None
        shared = self._resources.pool.take_shared(sizes)
        if shared is not None:
            rows = shared.fields(sizes)
            try:
                self._resources.gather_ready(places, rows)
                place, plan.shared, plan.rows = shared.place, shared, rows
            except Exception:
                # A cache closed by another thread, no memory: the batch before is made, and would be lost.
                log.debug("a batch could not be gathered where a worker is to complete it", exc_info=True)
        indices = plan.indices.tolist()
        wanted = [indices[position] for position in plan.missing]
        workers.send(BatchRequest(wanted, place, missing=plan.missing, of_batch=indices))
        plan.requested = True  # only now: who waits for a reply must have asked

"""One epoch of a CachedLoader.

Batches are planned when their indices are drawn, on the caller's thread. What is READY needs a gather; what is missing
is loaded here, or by a worker, which is asked at once, and given the memory in which the rest has been gathered. Where
workers put batches together, all of a batch is asked for. A plan is completed when its turn comes.

Once every index is READY and the stream can be trusted (it draws only indices of the dataset, and alone), all that is
left to do for a batch is the gather, and the Python around it, which is more for small batches. So many batches are
planned at once, and those that are small are gathered together, in blocks of up to 2 MiB, and handed out one by one. A
thread gathers the next block while the consumer computes.

Where the cache has been closed meanwhile, or the source has changed, and for keys that only the source understands,
samples pass through. A batch with an odd sample (one that is not of the codec) is collated as DataLoader does: by the
worker that has loaded it, or here where there are no workers.

An iterator holds nothing that holds it: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to. Ctrl-C ends the epoch, and its workers; the next epoch is whole.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.batch_pool import SharedBatch
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import WORTHWHILE_NS, Job, Prefetcher
from lightning_stocache.loading.request import Request, unpacked
from lightning_stocache.loading.resources import Resources
from lightning_stocache.loading.worker_pool import under_way

__all__ = ["Epoch"]

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
DRAWN = 4096  # indices that are drawn, and looked up, at a time, where all are READY

_Made = tuple[Any, int]  # a batch, and its hits that are still to be counted


@dataclass
class Plan:
    """A batch to come, or several that are gathered together.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: int64 `[samples]`, where they lie; None for what passes through or is made by a worker. For a sample
            that is missing any place will do.
        missing: positions of the samples that are not READY.
        requested: whether a worker has been asked, and its reply is awaited.
        shared: memory that the worker can write to, if there was any.
        rows: that memory with the hits in it, per field; None where the worker makes the whole batch.
        gather: what the thread has been offered.
    """

    indices: Any
    places: Integers | None = None
    missing: list[int] = field(default_factory=list)
    requested: bool = False
    shared: SharedBatch | None = None
    rows: Memory | None = None
    gather: Job | None = None


class Epoch:
    """An iterator over the batches of one epoch.

    Args:
        loader: the loader.
        cached: what serves its dataset; its cache is that of the resources.
        stream: when indices are drawn.
        resources: memory and workers.
        state: counts the batches that are handed out.
        warm: whether every index is READY, and the stream can be trusted.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        cached: CachedSource,
        stream: IndexStream,
        resources: Resources,
        state: LoaderState,
        *,
        warm: bool,
    ) -> None:
        self._cached, self._stream, self._resources, self._state = cached, stream, resources, state
        self._batches = cast(Any, loader.batch_sampler)
        self._warm, self._with_workers = warm, loader.num_workers > 0
        self._size = int(self._batches.batch_size) if warm else 0
        self._plans: deque[Plan] = deque()
        self._made: list[_Made] = []  # of the plan that is handed out, the last first
        self._block: Any = None  # the indices of these, if the source may still be asked for them again
        self._open = True
        self._prefetcher = Prefetcher()
        self._finalizer = weakref.finalize(self, resources.end_epoch, self._prefetcher)
        try:
            resources.begin_epoch(loader, stream.seed_state)
            if self._with_workers:  # DataLoader draws a number of batches at once
                for _ in range(1 if warm else under_way(loader)):
                    self._plan()
        except BaseException:
            self._break_off()
            raise

    def __iter__(self) -> Epoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return len(self._batches)

    def __next__(self) -> Any:
        """The next batch."""
        try:
            with self._state.waiting as waiting:
                if self._made and self._block is not None and self._changed:
                    self._plan_again(self._block[-sum(hits for _, hits in self._made) :])
                if not self._made:
                    self._complete()
                batch, hits = self._made.pop()
                if not self._made and waiting.last_away_ns > WORTHWHILE_NS:
                    self._prefetch()
                if hits:
                    self._cached.count_hits(hits, self._resources.take_gather_ns())
                self._state.batches += 1
                return batch
        except KeyboardInterrupt:
            self._break_off()
            raise

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._open, self._made = False, []
        self._plans.clear()
        self._finalizer()

    def _break_off(self) -> None:
        """End the epoch, its workers and its memory, whatever they are being used for."""
        self.close()
        self._resources.end()

    # ---- plan ----

    def _plan(self) -> bool:
        """Draw and plan what comes next; whether there was something."""
        if not self._open:
            return False
        return self._plan_blocks() if self._warm else self._plan_batch()

    def _plan_blocks(self) -> bool:
        size, resources = self._size, self._resources
        indices = self._stream.draw_many(max(DRAWN // size, 1))
        if indices is None:
            return False
        if self._closed:
            self._plan_again(indices)
            return True
        places = resources.cache.lookup(indices)
        # Pinned memory is found again by torch's allocator only where a batch has it for itself.
        together = 1 if resources.pins else max(BLOCK_BYTES // max(size * resources.cache.codec.nbytes, 1), 1)
        for first in range(0, len(indices), together * size):
            block = slice(first, first + together * size)
            self._plans.append(Plan(indices[block], places[block]))
        return True

    def _plan_batch(self) -> bool:
        indices = self._stream.draw()
        if indices is None:
            return False
        resources, plan = self._resources, Plan(indices)
        self._plans.append(plan)
        if resources.route == "worker":
            self._request(plan, resources.pool.take_shared())
        elif isinstance(indices, np.ndarray) and len(indices) and not self._closed:
            places = resources.cache.lookup(indices)
            plan.missing = np.flatnonzero(places == NO_PLACE).tolist()
            plan.places = places
            if plan.missing:  # what is read instead: a hole of the file would take a page, or fault where none is left
                places[plan.missing] = places.max()
            if plan.missing and resources.workers is not None:
                sizes = resources.cache.codec.sizes(len(indices))
                shared = resources.pool.take_shared(sizes)
                if shared is not None:
                    plan.rows = _gather_hits(resources, plan, shared.fields(sizes))
                self._request(plan, shared)
        return True

    def _request(self, plan: Plan, shared: SharedBatch | None) -> None:
        """Have a worker load what is missing into the rows, or make the whole batch."""
        assert self._resources.workers is not None
        indices = plan.indices.tolist() if isinstance(plan.indices, np.ndarray) else list(plan.indices)
        missing = None if plan.rows is None else plan.missing
        plan.shared = shared
        self._resources.workers.send(Request(indices, missing, None if shared is None else shared.handle))
        plan.requested = True

    def _plan_again(self, indices: Any) -> None:
        """Have batches of these indices come next, and from the source as it is now."""
        self._made, size = [], self._size or max(len(indices), 1)
        parts = [indices[first : first + size] for first in range(0, len(indices), size)]
        self._plans.extendleft(Plan(part) for part in reversed(parts))

    def _prefetch(self) -> None:
        """Have the thread begin with the next plan, if that is only a gather."""
        if not self._plans and not (self._warm and self._plan()):
            return
        plan = self._plans[0]
        if plan.places is not None and not plan.missing and plan.gather is None:
            plan.gather = self._gather_job(plan)
            self._prefetcher.offer(plan.gather)

    # ---- complete ----

    def _complete(self) -> None:
        """Make the batches of the next plan, or end the epoch."""
        if self._warm or not self._with_workers:
            ahead = 2 if self._stream.ahead_unseen and not self._warm else 1
            while len(self._plans) < ahead and self._plan():
                pass
        if not self._plans:
            self._state.ended = self._state.ended or self._open
            self.close()
            raise StopIteration
        plan, workers = self._plans[0], self._resources.workers
        if plan.places is not None and not plan.requested and (self._closed or self._changed):
            self._plans.popleft()
            self._plan_again(plan.indices)
            plan = self._plans[0]
        if plan.places is not None and not plan.missing:
            made = self._gathered(plan)
            self._go_on()
            self._made, self._block = made, plan.indices
            return
        replies, self._block = 0 if workers is None else workers.replies, None
        try:
            if plan.requested:
                batch = self._received(plan)
            elif plan.places is None:
                batch = self._passed_through(plan)
            else:
                batch = self._loaded(plan)
        except Exception:
            # As in DataLoader: what the source raises takes the place of the batch. One whose reply has not come is the
            # next one again.
            if not plan.requested or workers is None or workers.replies > replies:
                self._go_on()
            raise
        self._go_on()
        self._made = [batch]

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, plan another before the batch (or its error) is handed on.

        An error of the sampler takes the place of that batch, as in DataLoader.
        """
        self._plans.popleft()
        if self._with_workers and not self._warm:
            self._plan()

    def _gathered(self, plan: Plan) -> list[_Made]:
        """The batches of a plan that is only a gather, the last first."""
        samples = len(plan.indices)
        size = self._size or samples
        contents: list[Any] = (plan.gather or self._gather_job(plan)).result()
        made = [(content, size) for content in contents]
        made[-1] = contents[-1], samples - (len(contents) - 1) * size
        made.reverse()
        return made

    def _gather_job(self, plan: Plan) -> Job:
        """What gathers the batches of a plan. It does not hold the iterator, which may go while a thread is at it."""
        return Job(
            partial(_gather_batches, self._resources, cast(Integers, plan.places), self._size or len(plan.indices))
        )

    def _loaded(self, plan: Plan) -> _Made:
        """A batch with misses, which are loaded here while the thread gathers the hits."""
        resources, samples = self._resources, len(plan.indices)
        codec = resources.cache.codec
        memory = resources.pool.take(codec.sizes(samples))
        hits = Job(partial(_gather_hits, resources, plan, memory))
        if len(plan.missing) < samples:
            self._prefetcher.offer(hits)
        batch = codec.rows(hits.result, samples)
        odd = self._cached.load_into(batch, plan.indices[plan.missing].tolist(), plan.missing)
        rows: Memory = hits.result()
        if odd:
            content = default_collate([odd.get(at, sample) for at, sample in enumerate(codec.split(rows, samples))])
            return resources.pinned(content), samples - len(plan.missing)
        return resources.collator.batch(rows, samples), samples - len(plan.missing)

    def _received(self, plan: Plan) -> _Made:
        """A batch of which a worker has loaded what was missing, or made all of it."""
        resources, samples = self._resources, len(plan.indices)
        assert resources.workers is not None
        batch, packed = resources.workers.receive()
        shared, rows = plan.shared, plan.rows
        plan.shared = plan.rows = None  # what is not lent is to be free again for the next plan
        if batch is not None or rows is None:
            return resources.pinned(unpacked(batch, shared, resources.pool) if packed else batch), 0
        if not (resources.pool.may_lend or resources.pins):
            rows = [row.copy() for row in rows]
        return resources.pinned(resources.collator.batch(rows, samples)), samples - len(plan.missing)

    def _passed_through(self, plan: Plan) -> _Made:
        """A batch from the source as it is now."""
        indices = plan.indices.tolist() if isinstance(plan.indices, np.ndarray) else plan.indices
        samples = self._cached.samples(indices)
        return self._resources.pinned(default_collate(list(samples) if self._cached.transforms else samples)), 0

    # ---- what may have happened meanwhile ----

    @property
    def _closed(self) -> bool:
        """Whether the dataset has let go of the cache."""
        return self._cached.cache is not self._resources.cache

    @property
    def _changed(self) -> bool:
        """Whether the source is to be seen as it is now; workers go on with the one that they were started with."""
        return not self._with_workers and self._cached.changed


def _gather_batches(resources: Resources, places: Integers, size: int) -> list[Any]:
    """Batches of READY places."""
    return resources.collator.batches(resources.gather(places), len(places), size)


def _gather_hits(resources: Resources, plan: Plan, memory: Memory) -> Memory:
    """The memory of a batch, with what is READY gathered in it."""
    if len(plan.missing) < len(plan.indices):
        resources.gather(cast(Integers, plan.places), memory)
    return memory

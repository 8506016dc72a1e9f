"""One epoch of a CachedLoader, and what the loader keeps from one epoch to the next.

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

import os
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.loading.batch_pool import BatchPool, SharedBatch
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import WORTHWHILE_NS, Job, Prefetcher, held_back
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.worker_pool import Request, WorkerPool, under_way, unpacked
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.torch_internals import pinned

__all__ = ["Epoch", "Resources", "Route"]

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
DRAWN = 4096  # indices that are drawn, and looked up, at a time, where all are READY
_SLACK = 3  # in shared memory besides those under way: the batch of the step, the one fetched ahead, one to spare

Route = Literal["main", "worker"]
"""Who puts batches together: the main process, from the cache and what workers have loaded, or a worker, whole."""

_Made = tuple[Any, int]  # a batch, and its hits that are still to be counted


class Resources:
    """What outlives an epoch: the memory of batches, and persistent workers.

    They belong to one cache: workers know the cache that the dataset had when they were started, and no other. An epoch
    takes them, and gives them back when it is exhausted, closed, or no longer referred to; a second epoch at the same
    time gets its own. Workers end when all that the loader's sampler can draw is READY: the whole dataset, or a fold.
    Should it draw something else after all, that is loaded in the process that reads.

    Args:
        loader: the loader.
        cache: what its dataset is cached in; rows, where the main process puts batches together.
        route: who puts its batches together.

    Raises:
        TypeError: (also RuntimeError) `default_collate` has another way to make batches than one tensor per field.
    """

    def __init__(self, loader: DataLoader[Any], cache: Store, route: Route) -> None:
        self.cache, self.route = cache, route
        self.pins = loader.pin_memory and torch.cuda.is_available()
        self.collator = cast(Collator, Collator(cache.codec, self.pins) if route == "main" else None)
        self.persistent = loader.persistent_workers and loader.num_workers > 0
        self.workers: WorkerPool | None = None
        shared = under_way(loader) + _SLACK if loader.num_workers else 0
        self.pool = BatchPool(pinned=self.pins, shared=shared, promised=lambda: cache.promised_bytes)
        self.in_use = self.ended = False
        self._gather_ns = 0  # written by who gathers, and the next by who counts: these may be two threads
        self._told_ns = 0
        self._pid = os.getpid()

    def gather(self, places: Integers, into: Memory | None = None, missing: Sequence[int] = ()) -> Memory:
        """The samples of READY places in the memory of a batch, by default in private one; undefined at the missing."""
        start = time.perf_counter_ns()
        memory = self.pool.take(self.collator.sizes(len(places))) if into is None else into
        if len(missing) < len(places):
            self.cache.gather(places, memory)
        self._gather_ns += time.perf_counter_ns() - start  # one thread at a time
        return memory

    def batches(self, places: Integers, size: int) -> list[Any]:
        """Batches of READY places, of `size` samples each, but the last."""
        return self.collator.batches(self.gather(places), len(places), size)

    def take_gather_ns(self) -> int:
        """Nanoseconds that gathering has taken since the last call."""
        taken = self._gather_ns - self._told_ns
        self._told_ns += taken
        return taken

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
        return bool((self.cache.lookup(drawn.indices) != NO_PLACE).all())

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
        if os.getpid() == self._pid:
            self.persistent = False
            if not self.in_use:
                self.end()


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

    @property
    def is_gather(self) -> bool:
        """Whether all of it lies in the cache."""
        return self.places is not None and not self.missing


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
        self._block: Any = None  # the indices of that plan
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
                if self._made and self._changed:
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
        """End the epoch, its workers and its memory."""
        self.close()
        self._resources.end()

    # ---- plan ----

    def _plan(self) -> bool:
        """Draw and plan what comes next; whether there was something."""
        return self._open and (self._plan_blocks() if self._warm else self._plan_batch())

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
            plan.places = places = resources.cache.lookup(indices)
            plan.missing = np.flatnonzero(places == NO_PLACE).tolist()
            if plan.missing:  # what is read instead: a hole of the file would take a page, or fault where none is left
                places[plan.missing] = places.max()
            if plan.missing and resources.workers is not None:
                sizes = resources.collator.sizes(len(indices))
                if (shared := resources.pool.take_shared(sizes)) is not None:
                    plan.rows = resources.gather(places, shared.fields(sizes), plan.missing)
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
        if plan.is_gather and plan.gather is None:
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
        replies = 0 if workers is None else workers.replies
        try:
            if plan.requested:
                made = [self._received(plan)]
            elif plan.places is None:
                made = [self._passed_through(plan)]
            else:
                made = [self._loaded(plan)] if plan.missing else self._gathered(plan)
            if self._resources.pins and not plan.is_gather:
                made = [(pinned(batch), hits) for batch, hits in made]
        except Exception:
            # As in DataLoader, what the source raises takes the place of the batch. A gather is done again, and a batch
            # whose reply has not come is the next one again.
            awaited = plan.requested and workers is not None and workers.replies == replies
            if not (awaited or plan.is_gather):
                self._go_on()
            raise
        self._go_on()
        self._made, self._block = made, plan.indices

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, plan another before the batch (or its error) is handed on.

        An error of the sampler takes the place of that batch, as in DataLoader.
        """
        self._plans.popleft()
        if self._with_workers and not self._warm:
            self._plan()

    def _gathered(self, plan: Plan) -> list[_Made]:
        """The batches of a plan that is only a gather, the last first."""
        samples, size = len(plan.indices), self._size or len(plan.indices)
        contents: list[Any] = (plan.gather or self._gather_job(plan)).result()
        return [(content, min(size, samples - number * size)) for number, content in enumerate(contents)][::-1]

    def _gather_job(self, plan: Plan) -> Job:
        """What gathers the batches of a plan. It does not hold the iterator, which may go while a thread is at it."""
        return Job(partial(self._resources.batches, cast(Integers, plan.places), self._size or len(plan.indices)))

    def _loaded(self, plan: Plan) -> _Made:
        """A batch with misses, which are loaded here while the thread gathers the hits."""
        resources, samples = self._resources, len(plan.indices)
        codec = resources.cache.codec
        memory = resources.pool.take(resources.collator.sizes(samples))
        hits = Job(partial(resources.gather, cast(Integers, plan.places), memory, plan.missing))
        if len(plan.missing) < samples:
            self._prefetcher.offer(hits)
        into = codec.rows(hits.result, samples)
        odd = self._cached.load_into(into, plan.indices[plan.missing].tolist(), plan.missing)
        rows: Memory = hits.result()
        if odd:
            batch = default_collate([odd.get(at, sample) for at, sample in enumerate(codec.split(rows, samples))])
        else:
            batch = resources.collator.batch(rows, samples)
        return batch, samples - len(plan.missing)

    def _received(self, plan: Plan) -> _Made:
        """A batch of which a worker has loaded what was missing, or made all of it."""
        resources, samples = self._resources, len(plan.indices)
        assert resources.workers is not None
        batch, packed = resources.workers.receive()
        shared, rows = plan.shared, plan.rows
        plan.shared = plan.rows = None  # what is not lent is to be free again for the next plan
        if batch is not None or rows is None:
            return unpacked(batch, shared, resources.pool) if packed else batch, 0
        if not (resources.pool.may_lend or resources.pins):
            rows = [row.copy() for row in rows]
        return resources.collator.batch(rows, samples), samples - len(plan.missing)

    def _passed_through(self, plan: Plan) -> _Made:
        """A batch from the source as it is now."""
        indices = plan.indices.tolist() if isinstance(plan.indices, np.ndarray) else plan.indices
        samples = self._cached.samples(indices)
        return default_collate(list(samples) if self._cached.transforms else samples), 0

    @property
    def _closed(self) -> bool:
        """Whether the dataset has let go of the cache."""
        cache = self._resources.cache
        return self._cached.opened.cache is not cache or cache.closed

    @property
    def _changed(self) -> bool:
        """Whether the source is to be seen as it is now; workers go on with the one that they were started with."""
        return not self._with_workers and self._cached.changed

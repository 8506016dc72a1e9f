"""One epoch of a CachedLoader, and what the loader keeps from one epoch to the next.

A batch is planned when its indices are drawn, on the caller's thread, and made when its turn comes:

    all samples READY       gather them, collate
    some missing            gather the hits, load the others here; or have a worker load them into the same memory
    made by workers         ask a worker for the whole batch
    passed through          read the source itself: the cache is closed, the source has changed, or a sampler draws keys

Before the first batch is handed out, a few stored samples may be read again: by a worker, by this process if the loader
has no workers, or by a process like a worker if none runs. Once the source has changed, batches that were made or asked
for are made anew: by workers if the loader has some, which have the source as it is for them.

Once every index is READY and the stream draws only indices of the dataset, many batches are planned at once, and small
ones are gathered together in blocks of up to 2 MiB. A thread gathers the next block while the consumer computes.

An iterator is in no reference cycle: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to. Ctrl-C ends the epoch and its workers; the next epoch is whole.
"""

from __future__ import annotations

import os
import time
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import numpy as np
import torch
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.counters import count
from lightning_stocache.cache.gather_pool import GatherPool, gather_threads
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.loading.batch_pool import BatchPool, SharedBatch, fields_of
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import WORTHWHILE_NS, Job, Prefetcher, held_back
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.worker_pool import Request, WorkerPool, under_way, unpacked
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.source.looks import Look
from lightning_stocache.torch_internals import pinned

__all__ = ["Epoch", "Resources", "Route"]

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
DRAWN = 4096  # indices that are drawn, and looked up, at a time, where all are READY
_SLACK = 3  # in shared memory besides those under way: the batch of the step, the one fetched ahead, one to spare

Route = Literal["main", "worker"]
"""The process that makes batches: the main process, from the cache and from loaded samples, or a worker."""

_Batch = tuple[Any, int]  # a batch, and the number of its hits that are still to be counted


class Resources:
    """The memory of batches and the persistent workers, which outlive an epoch.

    They belong to one cache, which the workers have. A second epoch at the same time gets its own resources. Workers
    end when all samples that the loader's sampler can draw are READY, unless they are persistent: these have a source
    of their own, which may change otherwise than that of this process, so they read samples again.

    Args:
        loader: the loader.
        cache: the store of its dataset. It has rows if the main process makes batches.
        route: the process that makes batches.

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
        self.in_use = self.released = False
        self.gather_pool = GatherPool()
        self.gather_ns = 0  # since the last plan was completed; one thread at a time gathers
        self._pid, self._finalizer = os.getpid(), weakref.finalize(loader, self.release)

    def gather(self, places: Integers, missing: Sequence[int] = (), into: Memory | None = None) -> Memory:
        """Copy the samples of READY places into a batch's memory, by default private. Missing rows are undefined."""
        start = time.perf_counter_ns()
        memory = self.pool.take(self.collator.sizes(len(places))) if into is None else into
        if len(missing) < len(places):
            self.cache.gather(places, memory, self.gather_pool)
            self.gather_ns += time.perf_counter_ns() - start
        return memory

    def batches(self, places: Integers, size: int) -> list[_Batch]:
        """Make batches of READY places, of `size` samples each; the last may be smaller. In reverse."""
        samples = len(places)
        batches = self.collator.batches(self.gather(places), samples, size)
        return [(batch, min(size, samples - number * size)) for number, batch in enumerate(batches)][::-1]

    def is_usable(self) -> bool:
        """Whether another epoch can begin with these resources. Workers that have ended are replaced.

        Raises:
            RuntimeError: a worker was killed, and no epoch has raised that.
        """
        if self.workers is not None and not self.in_use and not self.workers.are_alive():
            self.end_workers()
        return not (self.in_use or self.released)

    def begin_epoch(self, loader: DataLoader[Any], seed_state: torch.Tensor | None, group: NodeGroup) -> None:
        """Start workers, or call them back from a broken-off epoch; end them if there is nothing to load."""
        self.in_use = True
        self.gather_pool.threads = gather_threads(group)
        if self.workers is not None:
            self.workers.begin_epoch()
        elif loader.num_workers and (self.persistent or not self._has_nothing_to_load(loader)):
            self.start_workers(loader, seed_state)

    def start_workers(self, loader: DataLoader[Any], seed_state: torch.Tensor | None) -> None:
        """Start workers."""
        with held_back():
            self.workers = WorkerPool(loader, seed_state)

    def _has_nothing_to_load(self, loader: DataLoader[Any]) -> bool:
        return self.route == "main" and (self.cache.full or self._holds_all_of(loader))

    def _holds_all_of(self, loader: DataLoader[Any]) -> bool:
        """Whether all samples that a loader's sampler can draw are known to be READY."""
        drawn = sampler_domain(batches_of(loader), self.cache.length) if self.cache.filled else None
        if drawn is None or len(drawn) > self.cache.filled:
            return False
        return bool((self.cache.lookup(drawn.indices) != NO_PLACE).all())

    def end_epoch(self, prefetcher: Prefetcher) -> None:
        """Stop the epoch's thread, and the workers unless they are persistent."""
        if os.getpid() != self._pid:
            return  # a worker has inherited a copy of the iterator, which ends nothing
        with held_back():
            prefetcher.stop()
            self.gather_pool.close()
            if not self.persistent or self.released:
                self.end_workers()
            elif self.route == "main" and self.cache.full:
                self.pool.trim()  # later epochs need no shared memory
            self.in_use = False

    def end_workers(self) -> None:
        """End the workers."""
        workers, self.workers = self.workers, None
        if workers is not None:
            workers.close()
        if self.released:
            self.pool.close()
        elif self.route == "main":
            self.pool.trim()  # the next epoch may not need shared memory

    def release(self) -> None:
        """End workers and memory, now or with the epoch under way. The loader calls this, or its finalizer does.

        Left to the garbage collector, DataLoader waits for 5 s per worker: their queues may be collected before them.
        """
        self._finalizer.detach()
        if os.getpid() == self._pid:
            self.released = True
            if not self.in_use:
                self.end_workers()


@dataclass
class Plan:
    """A batch to come, or several that are gathered together.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: int64 `[samples]`, the places of the samples; None if they pass through or a worker makes the batch. A
            missing sample has any place.
        missing: positions of the samples that are not READY.
        requested: whether a worker has been asked, and its reply is awaited.
        shared: memory that the worker can write to, if there was any.
        rows: that memory with the hits in it, per field; None if the worker makes the whole batch.
        gather: the job that the thread has been offered.
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
        cached: the cached source of its dataset, with the cache of the resources.
        stream: draws the indices.
        resources: memory and workers.
        state: counts the batches that are handed out.
        warm: whether every index is READY, and the stream can be trusted.
        passes: whether all samples pass through, made by persistent workers that go on.
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
        passes: bool = False,
    ) -> None:
        self._cached, self._stream, self._resources, self._state = cached, stream, resources, state
        self._loader: DataLoader[Any] | None = loader
        self._batch_sampler = cast(Any, loader.batch_sampler)
        self._warm, self._with_workers = warm, loader.num_workers > 0
        self._workers, self._requests, self._first_batch = loader.num_workers, 0, state.batches
        self._is_anew = False  # whether the requests of the epoch's beginning are made a second time
        self._size = int(self._batch_sampler.batch_size) if warm else 0
        self._plans: deque[Plan] = deque()
        self._batches: list[_Batch] = []  # of the plan that is handed out, the last first
        self._block: Any = None  # the indices of that plan
        self._open, self._passes, self._has_looked = True, passes, passes
        self.next_epoch: Iterator[Any] | None = None
        """The newer epoch whose batches are handed out: a loader with persistent workers has one iterator."""
        self._prefetcher = Prefetcher()
        self._finalizer = weakref.finalize(self, resources.end_epoch, self._prefetcher)
        try:
            resources.begin_epoch(loader, stream.seed_state, cached.opened.group)
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
        return len(self._batch_sampler)

    def __next__(self) -> Any:
        """The next batch."""
        if self.next_epoch is not None:
            while isinstance(self.next_epoch, Epoch) and self.next_epoch.next_epoch is not None:
                self.next_epoch = self.next_epoch.next_epoch
            return next(self.next_epoch)
        try:
            with self._state.waiting as waiting:
                if not self._batches:
                    self._draw()  # first: a sampler may change the source as it draws
                self._look()
                if not self._passes and self._is_stale():
                    self._pass_through()
                if not self._batches:
                    self._complete()
                if not self._passes and self._cached.changes.are_heard:  # since this batch was begun
                    self._pass_through()
                    self._complete()
                batch, hits = self._batches.pop()
                if not self._batches and waiting.last_away_ns > WORTHWHILE_NS:
                    self._prefetch()
                if hits:
                    self._cached.count_hits(hits)
                self._state.batches += 1
                return batch
        except KeyboardInterrupt:
            self._break_off()
            raise

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._open, self._batches = False, []
        self._plans.clear()
        self._finalizer()
        self._loader = None

    def _break_off(self) -> None:
        """End the epoch, its workers and its memory."""
        self._resources.release()
        self.close()

    # ---- look ----

    def _look(self) -> None:
        """Before the epoch's first batch: read some stored samples again where plain training would read them."""
        if self._has_looked or not self._open:
            return
        self._has_looked = True
        changes, workers = self._cached.changes, self._resources.workers
        due = changes.begin_epoch()
        if workers is not None:
            look = workers.look(due) if due.samples or due.is_compared else Look()
        elif self._with_workers:
            look = changes.look_apart(due, cast(Any, self._loader))
        else:
            look = changes.look(due)
        changes.end(look)

    # ---- plan ----

    def _plan(self) -> bool:
        """Draw and plan the next batches. Returns whether there were any."""
        if not self._open:
            return False
        indices = self._stream.draw_many(max(DRAWN // self._size, 1)) if self._warm else self._stream.draw()
        if indices is None:
            return False
        if self._passes:
            for plan in self._passing(indices):
                self._plans.append(plan)
                self._request_whole(plan)
        elif self._warm:
            self._plan_blocks(indices)
        else:
            self._plan_batch(indices)
        return True

    def _plan_blocks(self, indices: Integers) -> None:
        size, resources = self._size, self._resources
        places = resources.cache.lookup(indices)
        # Pinned memory is found again by torch's allocator only where a batch has it for itself.
        together = 1 if resources.pins else max(BLOCK_BYTES // max(size * resources.cache.codec.nbytes, 1), 1)
        for first in range(0, len(indices), together * size):
            block = slice(first, first + together * size)
            self._plans.append(Plan(indices[block], places[block]))

    def _plan_batch(self, indices: Any) -> None:
        resources, plan = self._resources, Plan(indices)
        self._plans.append(plan)
        if not isinstance(indices, np.ndarray):
            self._cached.check_keys(indices)
        if resources.route == "worker":
            self._request(plan, resources.pool.take_shared())
        elif isinstance(indices, np.ndarray) and len(indices) and not self._is_closed:
            places = resources.cache.lookup(indices)
            missing = np.flatnonzero(places == NO_PLACE)
            if len(missing) and resources.workers is None and self._stores_few(indices[missing]):
                return  # to copy samples into rows, and store none of them, would cost more than to collate them
            plan.places, plan.missing = places, missing.tolist()
            if plan.missing:  # read other places instead: a hole of the file would take a page, or fault without memory
                places[plan.missing] = places.max()
            if plan.missing and resources.workers is not None:
                sizes = resources.collator.sizes(len(indices))
                if (shared := resources.pool.take_shared(sizes)) is not None:
                    plan.rows = resources.gather(places, plan.missing, fields_of(shared, sizes))
                self._request(plan, shared)

    def _stores_few(self, missing: Integers) -> bool:
        """Whether most of some missing samples have no place in the cache."""
        return 2 * int(np.count_nonzero(self._resources.cache.have_places(missing))) < len(missing)

    def _request_whole(self, plan: Plan) -> None:
        """Ask a worker for a batch that passes through, if there are workers."""
        if self._resources.workers is not None:
            self._request(plan, self._resources.pool.take_shared())

    def _request(self, plan: Plan, shared: SharedBatch | None) -> None:
        """Ask a worker to load the missing samples into the rows, or to make the whole batch."""
        missing = None if plan.rows is None else plan.missing
        plan.shared, plan.requested = shared, True
        handle = None if shared is None else shared.handle
        begins = self._requests < self._workers
        self._requests += 1
        request = Request(_as_list(plan.indices), missing, handle, begins, begins and self._is_anew)
        cast(WorkerPool, self._resources.workers).send(request)

    def _draw(self) -> None:
        """Draw what the next batch needs; with workers it has been drawn when the batch before was made."""
        if self._with_workers and not self._warm:
            return
        ahead = 2 if self._stream.ahead_unseen and not self._warm else 1
        while len(self._plans) < ahead and self._plan():
            pass

    # ---- make ----

    def _complete(self) -> None:
        """Make the batches of the next plan, or end the epoch."""
        if not self._plans:
            self._state.ended = self._state.ended or self._open
            self.close()
            raise StopIteration
        plan, workers = self._plans[0], self._resources.workers
        replies = 0 if workers is None else workers.replies
        try:
            batches = self._make(plan)
        except Exception:
            # As in DataLoader, the source's error takes the place of the batch. After a time-out the reply still comes.
            if not plan.requested or workers is None or workers.replies > replies:
                self._go_on()
            raise
        gather_ns, self._resources.gather_ns = self._resources.gather_ns, 0
        count(self._cached.opened.counters, gather_ns=gather_ns)
        self._go_on()
        self._batches, self._block = batches, plan.indices

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, plan another before the batch (or its error) is handed on.

        An error of the sampler takes the place of that batch, as in DataLoader.
        """
        self._plans.popleft()
        if self._with_workers and not self._warm:
            self._plan()

    def _make(self, plan: Plan) -> list[_Batch]:
        """The batches of a plan, in reverse."""
        if plan.places is not None and not plan.missing:
            batches: list[_Batch] = (plan.gather or self._gather_job(plan)).result()
            return batches
        if plan.requested:
            batch, hits = self._received(plan)
        elif plan.places is not None:
            batch, hits = self._loaded(plan, plan.places)
        else:
            samples = self._cached.samples(_as_list(plan.indices))
            batch = default_collate(list(samples) if self._cached.transforms else samples)
            hits = 0
        return [(pinned(batch) if self._resources.pins else batch, hits)]

    def _loaded(self, plan: Plan, places: Integers) -> _Batch:
        """A batch whose misses this process loads."""
        resources, samples = self._resources, len(plan.indices)
        codec = resources.cache.codec
        rows = resources.gather(places, plan.missing)
        into = codec.rows(rows, samples)
        odd = self._cached.load_into(into, plan.indices[plan.missing].tolist(), plan.missing)
        if odd:
            batch = default_collate([odd.get(at, sample) for at, sample in enumerate(codec.split(rows, samples))])
        else:
            batch = resources.collator.batch(rows, samples)
        return batch, samples - len(plan.missing)

    def _received(self, plan: Plan) -> _Batch:
        """A batch whose missing samples a worker has loaded, or that a worker has made."""
        resources, samples = self._resources, len(plan.indices)
        batch, packed, _ = cast(WorkerPool, resources.workers).receive()
        shared, rows = plan.shared, plan.rows
        plan.shared = plan.rows = None  # memory that is not lent is free again for the next plan
        if batch is not None or rows is None:
            return unpacked(batch, shared, resources.pool) if packed else batch, 0
        if not (resources.pool.shared_left or resources.pins):
            rows = [row.copy() for row in rows]
        return resources.collator.batch(rows, samples), samples - len(plan.missing)

    def _prefetch(self) -> None:
        """Offer the next plan to the thread, if it is only a gather."""
        if not self._plans and not (self._warm and self._plan()):
            return
        plan = self._plans[0]
        if plan.places is not None and not plan.missing and plan.gather is None:
            plan.gather = self._gather_job(plan)
            self._prefetcher.offer(plan.gather)

    def _gather_job(self, plan: Plan) -> Job:
        """The job that gathers the batches of a plan. It does not refer to the iterator, which may end first."""
        return Job(partial(self._resources.batches, cast(Integers, plan.places), self._size or len(plan.indices)))

    # ---- pass through ----

    @property
    def _is_closed(self) -> bool:
        """Whether the dataset has closed or replaced the cache."""
        cache = self._resources.cache
        return self._cached.opened.cache is not cache or cache.closed

    def _is_stale(self) -> bool:
        """Whether to read the source as it is now. Workers go on with the source that they were started with."""
        if self._cached.changes.are_heard or (not self._with_workers and self._cached.changes.are_seen):
            return True
        return not self._batches and self._resources.route == "main" and self._is_closed

    def _pass_through(self) -> None:
        """Make all later batches of the source itself, including those that were made or asked for."""
        is_change = self._cached.changes.are_heard
        if is_change:
            self._cached.changes.refresh()
        plans, self._plans, self._passes = list(self._plans), deque(), True
        if self._batches:
            block = self._block
            if self._warm:
                block = block[-sum(hits for _, hits in self._batches) :]
            plans.insert(0, Plan(block))
            self._batches = []
        if not is_change:  # the cache was closed: what workers were asked for still comes
            for plan in plans:
                self._plans.extend([plan] if plan.requested else self._passing(plan.indices))
            return
        workers = self._resources.workers
        if workers is not None:
            dropped = workers.drop(
                sum(plan.requested for plan in plans)
            )  # they may hold samples from before the change
            count(self._cached.opened.counters, bypasses=-dropped)  # these are made, and counted, anew
            batches = self._state.batches - self._first_batch
            workers.begin_epoch(batches)
            self._requests, self._is_anew = 0, batches == 0
        elif self._with_workers and self._loader is not None:
            self._resources.start_workers(self._loader, self._stream.seed_state)
        for plan in plans:
            for passing in self._passing(plan.indices):
                self._plans.append(passing)
                self._request_whole(passing)

    def _passing(self, indices: Any) -> list[Plan]:
        """Plans for batches of these indices that pass through."""
        if not self._warm:
            return [Plan(indices)]
        return [Plan(indices[first : first + self._size]) for first in range(0, len(indices), self._size)]


def _as_list(indices: Any) -> Any:
    """The indices of a plan as a list; a sampler's keys as they are."""
    return indices.tolist() if isinstance(indices, np.ndarray) else indices

"""One epoch of a CachedLoader.

A batch goes one of three ways:

    warm block     all its samples are READY, and the main process gathers it, together with those that follow if they
                   are small. A thread gathers the next block while the consumer computes
    made batch     a worker makes it; or the main process, if the loader has no workers
    DataLoader's   the cache has nothing to add: `loader` leaves the epoch to DataLoader

Batches are planned as their indices are drawn, at the moments at which DataLoader draws them. Where nobody can notice
that others are drawn at once (`draws`), up to a few thousand indices are drawn and looked up together. With workers,
these are then asked only for the batches that are not READY; and once the cache is full, for none.

Before the epoch's first batch, a few stored samples may be read again: by a worker, by this process if the loader has
no workers, or by a process like a worker if none runs. Once the source has changed, or the cache was closed, what was
gathered is dropped, and all later batches are made.

An iterator is in no reference cycle: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to. Ctrl-C ends the epoch and its workers; the next epoch is whole.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import DataLoader

from lightning_stocache.cache.counters import Counters, Served, count, noted, served_in
from lightning_stocache.cache.gather_pool import GatherPool, gather_threads
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.draws import END, EpochDraws
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.maker import Maker
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import WORTHWHILE_NS, Job, Prefetcher
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import Reply, Request, Workers, under_way
from lightning_stocache.source.looks import Look
from lightning_stocache.torch_internals import pinned

__all__ = ["Batches", "Epoch", "Gatherer", "PlainEpoch"]

BLOCK_BYTES = 2 << 20  # 7 us per batch of eight 3x32x32 images where a gather for each takes 80
AHEAD = 64  # batches that are drawn in search of one for a worker


class Gatherer:
    """Gathers batches of READY samples out of a cache of rows.

    Args:
        cache: the cache.
        pins: whether into page-locked memory.

    Raises:
        TypeError: (also RuntimeError) `default_collate` has another way to make batches than one tensor per field.
    """

    def __init__(self, cache: Store, *, pins: bool) -> None:
        self.cache, self.pins = cache, pins
        self.pool = BatchPool(pinned=pins)
        self._collator = Collator(cache.codec, pins)

    def batches(self, places: Integers, size: int, threads: GatherPool) -> tuple[deque[Any], int]:
        """Batches of `size` samples each, of which the last may have fewer; and the nanoseconds that this took."""
        start, samples = time.perf_counter_ns(), len(places)
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
    """The batches of an epoch that are still to come, planned as they are drawn.

    As an iterator it draws for the workers: DataLoader asks it for a request whenever it would draw a batch.

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
        self._cached, self._draws, self._gatherer, self._length = cached, draws, gatherer, length
        self.queue: deque[Plan] = deque()
        self.request: Callable[[int, Any], Request] = Request
        self.has_failed = False
        self._unasked: deque[Plan] = deque()  # for workers, before others are drawn
        self._is_paused = self._is_full = False
        self._requests = 0

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
        size, cache = self._draws.size, self._gatherer.cache
        places = cache.lookup(indices)
        firsts = np.arange(0, len(indices), size)
        are_ready = np.logical_and.reduceat(places != NO_PLACE, firsts).tolist()
        most = max(BLOCK_BYTES // max(size * cache.codec.nbytes, 1), 1)
        first, batches = 0, len(firsts)
        while first < batches:
            end = first + 1
            while are_ready[first] and end < min(batches, first + most) and are_ready[end]:
                end += 1
            block = slice(first * size, end * size)
            self.queue.append(Plan(indices[block], places[block] if are_ready[first] else None))
            first = end
        return True

    def _draw_one(self) -> Plan | None:
        """Plan the next batch."""
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
        plan.places, plan.number = None, self._requests
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
        """Plan each batch of a block."""
        size = self._draws.size or max(len(indices), 1)
        for first in range(0, len(indices), size):
            self.queue.append(Plan(indices[first : first + size]))


class Epoch(Iterator[Any]):
    """The batches of one epoch.

    Args:
        loader: the loader.
        cached: the cached source of its dataset.
        gatherer: gathers batches in this process; None if workers make all.
        workers: the workers, of which a persistent loader may have some that make no batch.
        state: the position of the loader.
        keep: called with workers that start in the middle of the epoch.
        asks: whether workers make batches.
        draws_seed: whether a DataLoader without a running worker would draw a base seed.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        cached: CachedSource,
        gatherer: Gatherer | None,
        workers: Workers | None,
        state: LoaderState,
        *,
        keep: Callable[[Workers], None],
        asks: bool,
        draws_seed: bool,
    ) -> None:
        self._loader, self._cached, self._waiting, self._keep = loader, cached, state.ledger.waiting, keep
        self.served: Served = (0, 0, 0)
        """Where the samples of the last batch came from."""
        self._draws = EpochDraws(loader, state)
        self._plans = Plans(cached, self._draws, gatherer, len(cast(Any, loader.dataset)))
        self._gatherer, self._gathers = gatherer, gatherer is not None
        self._maker = Maker(loader.collate_fn, pinned=gatherer is not None and gatherer.pins)
        self._workers, self._asks = workers, asks
        self._batches: deque[Any] = deque()  # of the block that is handed out
        self._block: Integers = np.empty(0, dtype=np.int64)  # the indices of these batches
        self._due = cached.changes.begin_epoch()
        self._has_looked, self._has_begun, self._is_open = False, not asks, True
        self._failure: Exception | None = None  # of a worker that was to read samples again
        self._prefetcher, self._gather_pool = Prefetcher(), GatherPool(gather_threads(cached.opened.group))
        self._finalizer = weakref.finalize(self, _end_threads, self._prefetcher, self._gather_pool)
        if asks:
            try:
                self._begin()
            except RuntimeError as error:
                if self._has_looked:
                    raise
                self._failure = error  # DataLoader raises a time-out in `next`
            return
        self._draws.begin_alone(loader, draws_seed=draws_seed)
        if loader.num_workers:  # a DataLoader draws some batches at once
            most = 1 if self._draws.are_unseen else under_way(loader)
            while len(self._plans.queue) < most and self._plans.draw():
                pass

    def _begin(self) -> None:
        """Begin an epoch of workers. Before its first request, one of them may read stored samples again."""
        changes, plans, workers = self._cached.changes, self._plans, cast(Workers, self._workers)
        if not self._has_looked:
            if self._due.samples or self._due.is_compared:
                changes.end(workers.look(self._due, plans.begin))
            self._has_looked = True
            if changes.are_heard:
                plans.gather_no_more(self._block)
        plans.request = workers.requests.request
        workers.begin(plans.begin)
        self._has_begun = True

    def __next__(self) -> Any:
        """The next batch."""
        if not self._is_open:
            raise StopIteration
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        if not self._has_begun:
            self._begin()
        if not self._batches:
            self._draw()  # first: a sampler may change the source as it draws
        self._look()
        if self._gathers and self._is_stale:
            self._gather_no_more()
        if not self._batches:
            made = self._next_made()
            if made is not None:
                return made[0]
        return self._next_of_block()

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._is_open = False
        self._batches.clear()
        self._plans.queue.clear()
        self._finalizer()
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if self._loader.persistent_workers:
            workers.trim()
        else:
            workers.close()

    def break_off(self) -> None:
        """End the epoch and its workers."""
        if self._workers is not None:
            self._workers.close()
        self.close()

    # ---- draw ----

    @property
    def _draws_here(self) -> bool:
        """Whether batches are drawn for this process, not for workers."""
        return not self._asks or self._plans.are_local

    def _draw(self) -> None:
        """Draw what the next batch needs, if it has not been drawn before it is asked for."""
        if self._plans.queue or not self._draws_here:
            return
        if self._draws.are_unseen or not self._loader.num_workers:
            self._plans.draw()

    def _go_on(self) -> None:
        """Leave the first plan behind. With workers, another batch is drawn before the consumer gets this one."""
        self._plans.queue.popleft()
        if self._draws_here and self._loader.num_workers and not self._draws.are_unseen:
            self._plans.draw()

    # ---- look ----

    def _look(self) -> None:
        """Before the epoch's first batch: read some stored samples again where plain training would read them."""
        if self._has_looked:
            return
        self._has_looked = True
        changes, due = self._cached.changes, self._due
        if self._workers is not None:
            changes.end(self._workers.look(due, self._plans.begin) if due.samples or due.is_compared else Look())
        elif self._loader.num_workers:
            changes.end(changes.look_apart(due, self._loader))
        else:
            changes.end(changes.look(due))

    # ---- hand out ----

    def _next_made(self) -> tuple[Any] | None:
        """The next batch, if it was made; None if a block was gathered in its place.

        Raises:
            StopIteration: the epoch is over.
            Exception: an error of the source or of the sampler, which takes the place of the batch as in DataLoader.
        """
        waiting = self._plans.queue
        if not waiting and self._draws_here:
            self.close()
            raise StopIteration
        plan = waiting[0] if waiting else Plan(None, number=0)
        if plan.places is not None:
            self._gather(plan)
            return None
        if plan.number is None and not self._loader.num_workers:
            try:
                batch = self._maker.make(self._cached, plan.indices, cast(Gatherer, self._gatherer).pool)
            finally:
                self._go_on()
            self.served = self._maker.served
            return (pinned(batch) if cast(Gatherer, self._gatherer).pins else batch,)
        if plan.number is None:
            self._ask_workers()
        reply = plan.reply or self._received()
        waiting.popleft()
        if reply.error is not None:
            reply.error.reraise()  # type: ignore[no-untyped-call]
        self.served = reply.served
        return (reply.batch,)

    def _received(self) -> Reply:
        """The next reply of a worker."""
        workers, plans = cast(Workers, self._workers), self._plans
        plans.has_failed = False
        try:
            return workers.receive()
        except StopIteration:
            self.close()
            raise
        except Exception:
            if plans.has_failed:  # DataLoader has lost the reply
                workers.end_lease(cast(int, plans.queue.popleft().number))
            raise

    def _ask_workers(self) -> None:
        """Have workers make what is planned. What they were asked for before keeps its turn."""
        plans, workers = self._plans, self._workers
        if workers is None:
            workers = self._workers = Workers(self._loader, is_late=True)
            self._keep(workers)
        elif self._asks:
            plans.pause()
            for plan in plans.queue:
                if plan.number is not None and plan.reply is None:
                    plan.reply = self._received()
        self._asks, plans.request = True, workers.requests.request
        workers.begin(plans.resume)

    def _gather(self, plan: Plan) -> None:
        """Gather the batches of a block."""
        job = plan.gather or self._gather_job(plan)
        batches, gather_ns = job.result()
        self._go_on()  # an error of the sampler takes the place of the batch
        self._batches, self._block = batches, plan.indices
        count(self._cached.opened.counters, gather_ns=gather_ns)

    def _next_of_block(self) -> Any:
        batch, size = self._batches.popleft(), self._draws.size or len(self._block)
        samples, self._block = self._block[:size], self._block[size:]
        if not self._batches and self._waiting.last_away_ns > WORTHWHILE_NS:
            self._prefetch()
        self._cached.count_hits(len(samples))
        self.served = len(samples), 0, 0
        return batch

    def _prefetch(self) -> None:
        """Offer the next block to the thread."""
        waiting = self._plans.queue
        if not waiting and self._draws_here and self._draws.are_unseen:
            self._plans.draw()
        if waiting and waiting[0].places is not None and waiting[0].gather is None:
            waiting[0].gather = self._gather_job(waiting[0])
            self._prefetcher.offer(waiting[0].gather)

    def _gather_job(self, plan: Plan) -> Job:
        """The job that gathers a block. It does not refer to the iterator, which may end first."""
        gatherer, places = cast(Gatherer, self._gatherer), cast(Integers, plan.places)
        return Job(partial(gatherer.batches, places, self._draws.size or len(places), self._gather_pool))

    # ---- after a change ----

    @property
    def _is_stale(self) -> bool:
        """Whether nothing more may be gathered. Workers compare the state of the source that they have."""
        changes = self._cached.changes
        if changes.are_heard:
            return True
        waiting = self._plans.queue
        is_gathered = bool(self._batches) or (bool(waiting) and waiting[0].places is not None)
        if is_gathered and not self._loader.num_workers and changes.are_seen:
            return True
        cache = cast(Gatherer, self._gatherer).cache
        return not self._batches and (self._cached.opened.cache is not cache or cache.closed)

    def _gather_no_more(self) -> None:
        """Have all later batches made, those that were gathered, too."""
        self._gathers = False
        self._cached.changes.refresh()
        self._plans.gather_no_more(self._block)
        self._batches.clear()


def _end_threads(prefetcher: Prefetcher, gather_pool: GatherPool) -> None:
    prefetcher.stop()
    gather_pool.close()


class PlainEpoch(Iterator[Any]):
    """DataLoader's own epoch over a cached dataset, whose samples are counted where that can be known.

    Args:
        batches: DataLoader's iterator.
        counters: of the dataset, if there are any.
        sizes: without a cache: the numbers of samples in the batches that were drawn.
        has_workers: whether workers make the batches.
    """

    def __init__(self, batches: Iterator[Any], counters: Counters | None, sizes: deque[int], *, has_workers: bool):
        self._batches, self._counters, self._sizes, self._has_workers = batches, counters, sizes, has_workers
        self.served: Served = (0, 0, 0)

    @classmethod
    def none(cls) -> PlainEpoch:
        """An epoch that is over."""
        return cls(iter(()), None, deque(), has_workers=False)

    def __next__(self) -> Any:
        """The next batch."""
        with noted(self._counters) as note:
            batch = next(self._batches)
        self.served = served_in(note)
        if self._has_workers and self._sizes:
            self.served = 0, 0, self._sizes.popleft()
        return batch

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._batches, name)


class Batches(Iterator[Any]):
    """The iterator of a loader: counts the batches of an epoch, ours or DataLoader's, and the consumer's waiting time.

    A loader with persistent workers has one for all of its epochs, as a DataLoader has.

    A thread may end the epoch while another one iterates: it waits for the batch under way. Torch's iterator waits for
    ever for a batch whose worker has ended. A forked process has no part in the epoch, and does not end it.

    Args:
        loader: the loader.
        state: the position of the loader.
    """

    def __init__(self, loader: DataLoader[Any], state: LoaderState) -> None:
        self._state, self._drawn_from = state, batches_of(loader)
        self._epoch: Epoch | PlainEpoch = PlainEpoch.none()
        self._turn, self._is_ending = threading.RLock(), False
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the epoch began. Another thread may have been iterating then."""
        return self._pid != os.getpid()

    def begin(self, epoch: Epoch | PlainEpoch) -> None:
        """Hand out the batches of another epoch."""
        with self._turn:
            self._epoch, self._is_ending = epoch, False

    def __iter__(self) -> Batches:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return len(self._drawn_from)

    def __next__(self) -> Any:
        """The next batch."""
        ledger = self._state.ledger
        with self._turn:
            epoch = self._epoch
            try:
                if self._is_ending:  # a thread waits for its turn to end the epoch
                    raise StopIteration
                with ledger.waiting:
                    batch = next(epoch)
            except StopIteration:
                self._state.ended = True
                raise
            except KeyboardInterrupt:
                if isinstance(epoch, Epoch):
                    self.break_off()
                raise
            self._state.batches += 1
            ledger.add(*epoch.served)
            return batch

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._end(Epoch.close)

    def break_off(self) -> None:
        """End the epoch and its workers."""
        self._end(Epoch.break_off)

    def _end(self, end: Callable[[Epoch], None]) -> None:
        if self.is_inherited:
            return
        self._is_ending = True
        with self._turn:
            if isinstance(self._epoch, Epoch):
                end(self._epoch)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Batches") or name == "_epoch":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._epoch, name)

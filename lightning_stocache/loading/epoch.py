"""One epoch of a CachedLoader.

A batch goes one of three ways:

    warm block     all its samples are READY, and the main process gathers it, together with those that follow if they
                   are small. A thread gathers the next block while the consumer computes
    made batch     a worker makes it; or the main process, if the loader has no workers
    DataLoader's   the cache has nothing to add: `loader` leaves the epoch to DataLoader

Batches are planned (`plans`) at the moments at which DataLoader draws them.

Before the epoch's first batch, a few stored samples may be read again: by a worker, by this process if the loader has
no workers, or by a process like a worker if none runs. Once the source has changed, or the cache was closed, what was
gathered is dropped, and all later batches are made.

An iterator is in no reference cycle: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to. Ctrl-C ends the epoch and its workers; the next epoch is whole.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader

from lightning_stocache.cache.counters import Counters, Served, count, noted, served_in
from lightning_stocache.cache.gather_pool import GatherPool, gather_threads
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.store import Store
from lightning_stocache.loading.loader_sampler import batches_of
from lightning_stocache.loading.maker import Maker
from lightning_stocache.loading.plans import Plan, Plans
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import WORTHWHILE_NS, Prefetcher
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.loading.workers import Workers
from lightning_stocache.source.looks import Look

__all__ = ["Batches", "Epoch", "PlainEpoch"]


class Epoch(Iterator[Any]):
    """The batches of one epoch.

    Args:
        loader: the loader.
        cached: the cached source of its dataset.
        maker: makes batches in this process.
        cache: the store from which blocks are gathered; None if workers make all batches.
        workers: the workers, if there are any. Those of a persistent loader stay even if they make no batch.
        state: the position of the loader.
        keep: called with workers that start in the middle of the epoch.
        asks: whether workers make batches.
        draws_seed: whether a DataLoader without a running worker would draw a base seed.

    Attributes:
        served: where the samples of the last batch came from.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        cached: CachedSource,
        maker: Maker,
        cache: Store | None,
        workers: Workers | None,
        state: LoaderState,
        *,
        keep: Callable[[Workers], None],
        asks: bool,
        draws_seed: bool,
    ) -> None:
        self.served: Served = (0, 0, 0)
        self._loader = loader
        self._cached = cached
        self._maker = maker
        self._workers = workers
        self._ledger = state.ledger
        self._keep = keep
        self._asks = asks
        self._plans = Plans(loader, cached, state, cache)
        self._changes = 0 if cache is None else cache.changes
        self._batches: deque[Any] = deque()  # of the block that is handed out
        self._block: Integers = np.empty(0, dtype=np.int64)  # the indices of these batches
        self._due = cached.changes.begin_epoch()
        self._has_looked = False
        self._has_begun = False
        self._is_open = True
        self._failure: Exception | None = None  # of a worker that was to read samples again
        self._prefetcher = Prefetcher()
        self._gather_pool = GatherPool(gather_threads(cached.opened.group))
        self._finalizer = weakref.finalize(self, _end_threads, self._prefetcher, self._gather_pool)
        if not asks:
            self._plans.begin_alone(loader, draws_seed=draws_seed)
            self._has_begun = True
            return
        try:
            self._begin()
        except RuntimeError as error:
            if self._has_looked:
                raise
            self._failure = error  # DataLoader raises a time-out in `next`

    def _begin(self) -> None:
        """Begin an epoch of workers. Before its first request, one of them may read stored samples again."""
        workers = cast(Workers, self._workers)
        if not self._has_looked:
            self._look()
            self._has_looked = True
            if self._cached.changes.source_has_changed:
                self._plans.gather_no_more(self._block)
        self._plans.request = workers.requests.request
        workers.begin(self._plans.begin)
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
        if not self._has_looked:
            self._has_looked = True
            self._look()
        if self._plans.cache is not None and self._has_changed(self._plans.cache):
            self._gather_no_more()
        if not self._batches:
            plan = self._next_plan()
            if plan.slots is None:
                return self._make(plan)
            self._gather(plan)
            if self._cached.cache is not None and self._cached.cache.changes != self._changes:
                self._gather_no_more()
                return self._make(self._next_plan())
        return self._next_of_block()

    def close(self, *, ends_workers: bool = False) -> None:
        """End the epoch: its thread, and its workers unless they are persistent and may go on."""
        if ends_workers and self._workers is not None:
            self._workers.close()
        self._is_open = False
        self._batches.clear()
        self._plans.queue.clear()
        self._finalizer()
        if self._cached.cache is not None:
            self._cached.cache.end_epoch()
        workers, self._workers = self._workers, None
        if workers is None:
            return
        if self._loader.persistent_workers:
            workers.trim(keeps_median=self._asks)  # workers that make no batches need no memory
        else:
            workers.close()

    # ---- draw ----

    @property
    def _draws_here(self) -> bool:
        """Whether batches are drawn for this process, not for workers."""
        return not self._asks or self._plans.are_local

    def _draw(self) -> None:
        """Draw what the next batch needs, if it has not been drawn before it is asked for."""
        if self._plans.queue or not self._draws_here:
            return
        if self._plans.are_unseen or not self._loader.num_workers:
            self._plans.draw()

    def _go_on(self) -> None:
        """Leave the first plan behind. With workers, another batch is drawn before the consumer gets this one."""
        self._plans.queue.popleft()
        if self._draws_here and self._loader.num_workers and not self._plans.are_unseen:
            self._plans.draw()

    # ---- look ----

    def _look(self) -> None:
        """Before the epoch's first batch: read some stored samples again where plain training would read them."""
        changes = self._cached.changes
        due = self._due
        if self._workers is not None:
            changes.end(self._workers.look(due, self._plans.begin) if due.samples or due.is_compared else Look())
        elif self._loader.num_workers:
            changes.end(changes.look_apart(due, self._loader))
        else:
            changes.end(changes.look(due))

    # ---- hand out ----

    def _next_plan(self) -> Plan:
        """The plan of the next batch.

        Raises:
            StopIteration: the epoch is over.
        """
        while (plan := self._plans.first()) is None:
            if not self._draws_here:
                self._receive(None)
            elif not self._plans.draw():
                self.close()
                raise StopIteration
        return plan

    def _make(self, plan: Plan) -> Any:
        """The batch of a plan, made by this process or by a worker.

        Raises:
            Exception: an error of the source or of the sampler, which takes the place of the batch as in DataLoader.
        """
        if plan.number is None and not self._loader.num_workers:
            try:
                batch = self._maker.make(self._cached, plan.indices)
            finally:
                self._go_on()
            self.served = self._maker.served
            return batch
        if plan.number is None:
            self._ask_workers()
        while plan.reply is None:
            self._receive(plan)
        self._plans.queue.popleft()
        if plan.reply.error is not None:
            plan.reply.error.reraise()  # type: ignore[no-untyped-call]
        self.served = plan.reply.served
        return plan.reply.batch

    def _receive(self, plan: Plan | None) -> None:
        """Wait for the answer to the next request: the reply of a plan, or one that has no reply.

        Raises:
            StopIteration: the epoch is over.
            Exception: an error of the sampler, a time-out, or a killed worker.
        """
        workers, plans = cast(Workers, self._workers), self._plans
        plans.has_failed = False
        try:
            reply = workers.receive()
        except StopIteration:
            self.close()
            raise
        except Exception:
            if plans.has_failed and plan is not None:  # DataLoader has lost the reply
                workers.end_lease(cast(int, plan.number))
                plans.queue.popleft()
            raise
        if plan is not None:
            plan.reply = reply

    def _ask_workers(self) -> None:
        """Have workers make what is planned. What they were asked for before keeps its turn."""
        plans = self._plans
        workers = self._workers
        if workers is None:
            workers = self._workers = Workers(self._loader, is_late=True)
            self._keep(workers)
        elif self._asks:
            plans.is_paused = True
            for plan in plans.queue:
                while plan.number is not None and plan.reply is None:
                    self._receive(plan)
        self._asks = True
        plans.request = workers.requests.request
        workers.begin(plans.resume)

    def _gather(self, plan: Plan) -> None:
        batches, gather_ns = self._prefetcher.result(self._gathering(plan))
        self._go_on()  # an error of the sampler takes the place of the batch
        self._batches = batches
        self._block = plan.indices
        count(self._cached.opened.counters, gather_ns=gather_ns)

    def _next_of_block(self) -> Any:
        batch = self._batches.popleft()
        size = self._plans.size or len(self._block)
        samples = len(self._block[:size])
        self._block = self._block[size:]
        if not self._batches and self._ledger.last_away_ns > WORTHWHILE_NS:
            self._prefetch()
        self._cached.count_hits(samples)
        self.served = samples, 0, 0
        return batch

    def _prefetch(self) -> None:
        """Offer the next block to the thread."""
        if not self._plans.queue and self._draws_here and self._plans.are_unseen:
            self._plans.draw()
        plan = self._plans.first()
        if plan is not None and plan.slots is not None:
            self._prefetcher.offer(self._gathering(plan))

    def _gathering(self, plan: Plan) -> Callable[[], tuple[deque[Any], int]]:
        """The function that gathers a block. It has no reference to this iterator, which may end before the thread."""
        slots = cast(Integers, plan.slots)
        size = self._plans.size or len(slots)
        return partial(self._maker.block, cast(Store, self._plans.cache), slots, size, self._gather_pool)

    # ---- after a change ----

    def _has_changed(self, cache: Store) -> bool:
        """Whether nothing more may be gathered. Workers compare the state of the source that they have."""
        changes = self._cached.changes
        if changes.source_has_changed or cache.changes != self._changes:
            return True
        queue = self._plans.queue
        is_gathered = bool(self._batches) or (bool(queue) and queue[0].slots is not None)
        if is_gathered and not self._loader.num_workers and changes.look_for_change():
            return True
        return not self._batches and (self._cached.opened.cache is not cache or cache.closed)

    def _gather_no_more(self) -> None:
        """Have all later batches made, those that were gathered, too."""
        self._cached.changes.refresh()
        self._plans.gather_no_more(self._block)
        self._batches.clear()
        self._prefetcher.forget()


def _end_threads(prefetcher: Prefetcher, gather_pool: GatherPool) -> None:
    prefetcher.stop()
    gather_pool.close()


class PlainEpoch(Iterator[Any]):
    """DataLoader's own epoch over a cached dataset, whose samples are counted where that can be known.

    Args:
        batches: DataLoader's iterator.
        counters: of the dataset, if there are any.
        sizes: of the batches that workers were asked for, if there is no cache; else empty.
    """

    def __init__(self, batches: Iterator[Any], counters: Counters | None, sizes: deque[int]) -> None:
        self._batches = batches
        self._counters = counters
        self._sizes = sizes
        self.served: Served = (0, 0, 0)

    @classmethod
    def none(cls) -> PlainEpoch:
        """An epoch that is over."""
        return cls(iter(()), None, deque())

    def __next__(self) -> Any:
        """The next batch."""
        with noted(self._counters) as note:
            batch = next(self._batches)
        self.served = served_in(note)
        if self._sizes:
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
    """

    def __init__(self, loader: DataLoader[Any], state: LoaderState) -> None:
        self._state = state
        self._drawn_from = batches_of(loader)
        self._epoch: Epoch | PlainEpoch = PlainEpoch.none()
        self._turn = threading.RLock()
        self._is_ending = False
        self._pid = os.getpid()

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked after the epoch began. Another thread may have been iterating then."""
        return self._pid != os.getpid()

    def begin(self, epoch: Epoch | PlainEpoch) -> None:
        """Hand out the batches of another epoch."""
        with self._turn:
            self._epoch = epoch
            self._is_ending = False

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
                with ledger:
                    batch = next(epoch)
                self._state.batches += 1
                ledger.add(*epoch.served)
                return batch
            except StopIteration:
                self._state.ended = True
                raise
            except KeyboardInterrupt:  # also while the batch is counted: nobody gets it
                if isinstance(epoch, Epoch):
                    self.close(ends_workers=True)
                raise

    def close(self, *, ends_workers: bool = False) -> None:
        """End the epoch: its thread, and its workers unless they are persistent and may go on."""
        if self.is_inherited:
            return
        self._is_ending = True
        with self._turn:
            if isinstance(self._epoch, Epoch):
                self._epoch.close(ends_workers=ends_workers)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_Batches") or name == "_epoch":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._epoch, name)

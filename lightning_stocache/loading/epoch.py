"""One epoch of a CachedLoader: plan, request, complete.

What is to be done for a batch is planned when its indices are drawn (`plan`), and what workers are to do for it is
requested then. A plan is completed when its turn comes: by the worker's reply, by loading what is missing here, or by a
gather, which a thread may have begun. Batches that were gathered together are handed out one by one.

Where the cache has been closed meanwhile, or the source has changed, and for keys that only the source understands,
samples pass through. A batch with an odd sample (one that is not of the codec) is collated as DataLoader does: by the
worker that has loaded it, or here where there are no workers.

An iterator holds nothing that holds it: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to.

Ctrl-C ends the epoch, and its workers: one of them may have sent half of a reply. The next epoch is whole.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any, cast

import numpy as np
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.collate import Collator
from lightning_stocache.loading.index_stream import IndexStream
from lightning_stocache.loading.plan import BatchPlan, BatchPlanner
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.loading.prefetch import Job, Prefetcher
from lightning_stocache.loading.request import Collated, Reply, Written, unpacked
from lightning_stocache.loading.resources import Resources

__all__ = ["Epoch"]

_Made = tuple[Any, int]  # a batch, and its hits that are still to be counted


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
        self._cached, self._resources, self._state, self._warm = cached, resources, state, warm
        self._batches = cast(Any, loader.batch_sampler)
        self._with_workers = loader.num_workers > 0
        self._planner = BatchPlanner(loader, cached, stream, resources, warm)
        self._plans = self._planner.plans
        self._made: list[_Made] = []  # of the plan that is handed out, the last first
        self._block: Integers | None = None  # what that was made of, if the source may still be asked for it again
        self._prefetcher = Prefetcher()
        self._finalizer = weakref.finalize(self, resources.end_epoch, self._prefetcher)
        try:
            resources.begin_epoch(loader)
            if self._with_workers:
                self._planner.begin_with_workers(loader)
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
            return self._next()
        except KeyboardInterrupt:
            self._break_off()
            raise

    def _next(self) -> Any:
        self._prefetcher.back()
        if self._made and self._block is not None and self._changed:
            self._plan_again(self._block)
        if not self._made:
            self._complete()
        batch, hits = self._made[-1]
        if len(self._made) == 1:
            self._prefetch()
        self._prefetcher.leave()
        if hits:
            self._cached.count_hits(hits, self._resources.take_gather_ns())
        self._state.batches += 1
        del self._made[-1]
        return batch

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._planner.close()
        self._made = []
        self._finalizer()

    def _break_off(self) -> None:
        """End the epoch, its workers and its memory, whatever they are being used for."""
        self.close()
        self._resources.end()

    # ---- plan ----

    def _plan_again(self, block: Integers) -> None:
        """Have what is left of the block that is handed out come from the source as it is now."""
        self._planner.plan_again(block[-sum(hits for _, hits in self._made) :])
        self._made = []

    def _prefetch(self) -> None:
        """Have the thread begin with the next plan, if that is only a gather, and the consumer will be away for it."""
        if not self._prefetcher.worthwhile or not (self._plans or (self._warm and self._planner.plan())):
            return
        plan = self._plans[0]
        if plan.places is not None and not plan.missing and plan.gather is None:
            plan.gather = Job(partial(_gather_batches, self._resources, plan.places, self._planner.batch_size(plan)))
            self._prefetcher.offer(plan.gather)

    # ---- complete ----

    def _complete(self) -> None:
        """Make the batches of the next plan, or end the epoch."""
        if self._warm and (self._plans or self._planner.plan()):
            plan = self._plans[0]
            if plan.places is not None and not self._planner.closed and not self._changed:
                self._made, self._block = self._gathered(plan, plan.places), plan.indices
                del self._plans[0]
                return
            if plan.places is not None:
                del self._plans[0]
                self._planner.plan_again(plan.indices)
        try:
            self._complete_first()
        except StopIteration:
            raise
        except Exception:
            if self._resources.workers is not None:
                self._resources.workers.note_failure()
            raise

    def _complete_first(self) -> None:
        if not self._with_workers and not self._warm:
            while len(self._plans) < (2 if self._planner.ahead_unseen else 1) and self._planner.plan():
                pass
        if not self._plans:
            self._state.ended = self._state.ended or not self._planner.ended
            self.close()
            raise StopIteration
        plan, workers = self._plans[0], self._resources.workers
        replies = 0 if workers is None else workers.replies
        try:
            made = self._batches_of(plan)
        except Exception:
            # As in DataLoader: what the source raises takes the place of the batch. One whose reply has not come is the
            # next one again.
            if workers is None or not self._awaits_reply(plan) or workers.replies > replies:
                self._go_on()
            raise
        self._go_on()
        self._made, self._block = made, None

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, plan another before the batch (or its error) is handed on."""
        # Where the cache was closed, a worker may still write to this plan's memory: none is taken any more then.
        self._plans.popleft()
        if self._with_workers and not self._warm:
            self._planner.plan()

    def _batches_of(self, plan: BatchPlan) -> list[_Made]:
        if self._awaits_reply(plan):
            return [self._received(plan)]
        if plan.places is None or self._planner.closed or self._changed:
            wanted = plan.indices.tolist() if isinstance(plan.indices, np.ndarray) else plan.indices
            samples = self._cached.samples(wanted)
            collated = default_collate(list(samples) if self._cached.transforms else samples)
            return [(self._resources.pinned(collated), 0)]
        return [self._loaded(plan, plan.places)] if plan.missing else self._gathered(plan, plan.places)

    def _gathered(self, plan: BatchPlan, places: Integers) -> list[_Made]:
        """The batches of a plan that is only a gather, the last first."""
        size = self._planner.batch_size(plan)
        job, plan.gather = plan.gather, None  # after an error, another try gathers again
        contents = _gather_batches(self._resources, places, size) if job is None else job.result()
        made = [(content, size) for content in contents]
        made[-1] = contents[-1], len(places) - (len(contents) - 1) * size
        made.reverse()
        return made

    def _loaded(self, plan: BatchPlan, places: Integers) -> _Made:
        """A batch with misses, which are loaded here while the thread gathers the hits."""
        samples, hits = len(places), Job(partial(self._resources.gather_ready, places))
        if len(plan.missing) < samples:
            self._prefetcher.offer(hits)
        codec = self._resources.rows.codec
        batch = codec.rows(hits.result, samples)
        try:
            odd = self._cached.load_into(batch, plan.indices[plan.missing].tolist(), plan.missing)
        finally:
            rows: Memory = hits.result()  # waited for after an error, too
        if not odd:
            return self._collated(plan, rows)
        others = codec.split(rows, samples)
        content = default_collate([odd.get(place, other) for place, other in enumerate(others)])
        return self._resources.pinned(content), samples - len(plan.missing)

    def _received(self, plan: BatchPlan) -> _Made:
        """A batch of which a worker has loaded what was missing, or made all of it."""
        resources = self._resources
        assert resources.workers is not None
        reply: Reply = resources.workers.receive()
        (shared, plan.shared), (rows, plan.rows) = (plan.shared, None), (plan.rows, None)
        if isinstance(reply, Written):
            content = unpacked(reply, shared, resources.pool)
            del shared
            return resources.pinned(content), 0
        del shared  # what is not lent is to be free again for the next plan
        if isinstance(reply, Collated):
            hits = 0 if reply.counted else len(plan.indices) - len(plan.missing)
            return resources.pinned(reply.batch), hits
        assert plan.places is not None
        rows = resources.gather_ready(plan.places) if rows is None else resources.handed_out(rows)
        if reply is not None:
            memory = rows
            batch = resources.rows.codec.rows(lambda: memory, len(plan.places))
            for number, place in enumerate(plan.missing):
                batch.write(place, [field[number] for field in reply.fields])
        return self._collated(plan, rows)

    def _collated(self, plan: BatchPlan, rows: Memory) -> _Made:
        samples = len(plan.indices)
        return _collator(self._resources).batch(rows, samples), samples - len(plan.missing)

    # ---- what may have happened meanwhile ----

    @property
    def _changed(self) -> bool:
        """Whether the source is to be seen as it is now; workers go on with the one that they were started with."""
        return not self._with_workers and self._cached.changed

    def _awaits_reply(self, plan: BatchPlan) -> bool:
        """Whether a plan is completed by a worker: by itself, or with what this process has read from the cache."""
        return plan.requested and (self._resources.route == "worker" or not self._planner.closed)


def _gather_batches(resources: Resources, places: Integers, size: int) -> list[Any]:
    """Batches of READY places. It does not hold the iterator, which may go while a thread is at it."""
    return _collator(resources).batches(resources.gather(places), len(places), size)


def _collator(resources: Resources) -> Collator:
    assert resources.collator is not None  # where the main process puts batches together
    return resources.collator

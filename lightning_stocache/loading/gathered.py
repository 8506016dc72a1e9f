"""An epoch whose batches are put together in the main process.

Each batch is planned when its indices are drawn, by the `Schedule`, on the caller's thread. If something of it is not
READY, and there are workers, the rest is gathered at once, into memory that one of them then completes. Else it is
gathered when its turn comes, or on a thread just before. Where the cache has been closed meanwhile, and for keys that
only the source understands, samples pass through.

An iterator holds nothing that holds it: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to.

Ctrl-C comes while the iterator waits for workers or loads samples, or when a batch is made, never in between; the batch
that it has kept from being handed out is the next one again. A batch with an odd sample (one that is not of the spec)
is collated as DataLoader does: by the worker that has loaded it, or here where there are no workers.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, default_collate

from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.ahead import Ahead, Job
from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.errand import Errand
from lightning_stocache.loading.interrupts import HeldBack
from lightning_stocache.loading.kept import Kept
from lightning_stocache.loading.replies import Collated, MissingRows, RowReplies
from lightning_stocache.loading.schedule import Schedule
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.loading.warm import pass_through

__all__ = ["GatheredEpoch"]

log = logging.getLogger(__name__)


@dataclass
class _Plan:
    """A batch to come.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: where they lie; None for what passes through.
        missing: positions in the batch that are being loaded.
        asked: whether a worker is asked to load them.
        memory: of the batch, uint8 per field, where the worker puts them; None if there was no shared memory.
        job: the gather, once it has been offered to the thread.
    """

    indices: Any
    places: torch.Tensor | None = None
    missing: list[int] = field(default_factory=list)
    asked: bool = False
    memory: list[torch.Tensor] | None = None
    job: Job | None = None


class GatheredEpoch:
    """An iterator over the batches of one epoch.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache.
        schedule: when indices are drawn.
        kept: memory and workers.
    """

    def __init__(self, loader: DataLoader[Any], schedule: Schedule, kept: Kept) -> None:
        dataset = cached_in(loader.dataset)
        assert dataset is not None
        assert kept.collation is not None
        self._dataset, self._batches = dataset, loader.batch_sampler
        self._schedule, self._kept, self._cache, self._collation = schedule, kept, kept.cache, kept.collation
        self._with_workers = loader.num_workers > 0
        self._plans: deque[_Plan] = deque()
        self._made: tuple[Any] | None = None  # the batch that is to be handed out
        self._ahead = Ahead()
        self._finalizer = weakref.finalize(self, kept.end_epoch, self._ahead)
        try:
            if kept.full:
                kept.end_workers()
            kept.begin_epoch()
            if self._with_workers:
                if kept.crew is None and not kept.full:  # before the thread starts
                    kept.crew = Crew(loader, RowReplies(), schedule.seed_state)
                for _ in range((loader.prefetch_factor or 2) * loader.num_workers):
                    self._draw()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> GatheredEpoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return len(cast(Any, self._batches))

    def __next__(self) -> Any:
        """The next batch."""
        if self._made is None:
            with HeldBack():
                self._made = (self._make(),)
        (batch,), self._made = self._made, None  # no call from here on: nothing comes in between
        return batch

    def _make(self) -> Any:
        self._ahead.back()
        if not self._with_workers and self._finalizer.alive:
            while len(self._plans) < (2 if self._schedule.ahead_unseen else 1) and self._draw():
                pass
        if not self._plans:
            self.close()
            raise StopIteration
        plan, crew = self._plans[0], self._kept.crew
        answered = 0 if crew is None else crew.answered
        try:
            batch = self._complete(plan)
        except BaseException as error:
            # As in DataLoader: what the source raises takes the place of the batch. One that was interrupted, or whose
            # answer has not come, is the next one again.
            if crew is not None and plan.asked and not self._closed:
                over = crew.answered > answered
            else:
                over = not isinstance(error, KeyboardInterrupt)
            if over:
                self._go_on()
            plan.job = None
            raise
        self._go_on()
        following = self._plans[0] if self._plans else None
        if following is not None and following.places is not None and not following.missing and self._ahead.worthwhile:
            following.job = Job(partial(self._kept.gather, following.places))
            self._ahead.offer(following.job)
        self._ahead.leave()
        return batch

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._plans.clear()
        self._made = None
        self._finalizer()

    @property
    def _closed(self) -> bool:
        """Whether the dataset has let go of the cache."""
        return self._dataset.cache is not self._cache

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, draw another, before the batch (or its error) is handed on."""
        # Where the cache was closed, a worker may still write to this plan's memory: none is taken any more then.
        self._plans.popleft()
        if self._with_workers:
            self._draw()

    def _draw(self) -> bool:
        """Draw and plan one batch; whether there was one."""
        indices = self._schedule.draw()
        if indices is None:
            return False
        plan, cache = _Plan(indices), self._cache
        self._plans.append(plan)
        if self._closed or not isinstance(indices, torch.Tensor) or not indices.shape[0]:
            return True
        plan.places = cache.lookup(indices)
        plan.missing = (plan.places == NO_PLACE).nonzero().flatten().tolist()
        if plan.missing and self._kept.crew is not None:
            self._ask(plan, plan.places, self._kept.crew)
        return True

    def _ask(self, plan: _Plan, places: torch.Tensor, crew: Crew) -> None:
        """Gather what is READY into memory that a worker can write to, and have the rest put there."""
        sizes, place = self._cache.codec.sizes(places.shape[0]), None
        shared = self._kept.pool.take_shared(sizes)
        if shared is not None:
            memory = shared.fields(sizes)
            try:
                self._kept.gather_ready(places, memory)
                place, plan.memory = shared.place, memory
            except Exception:  # the batch before is made already, and would be lost: this one's turn will come
                log.debug("a batch could not be gathered where a worker is to complete it", exc_info=True)
        indices = plan.indices.tolist()
        wanted = [indices[position] for position in plan.missing]
        crew.send(Errand(wanted, place, missing=plan.missing, of_batch=indices))
        plan.asked = True  # only now: who waits for an answer must have asked

    def _complete(self, plan: _Plan) -> Any:
        """The batch of a plan, counted."""
        # Workers go on with the source that they were started with.
        if plan.places is None or self._closed or (not self._with_workers and self._dataset.changed):
            return pass_through(self._dataset, plan.indices, self._kept)
        samples, odd = plan.places.shape[0], dict[int, Any]()
        if plan.asked:
            rows = self._receive(plan, plan.places)
        elif plan.missing:
            rows, odd = self._load(plan, plan.places)
        elif plan.job is not None:
            rows = plan.job.result()
        else:
            rows = self._kept.gather(plan.places)
        counted = isinstance(rows, Collated) and rows.counted
        self._dataset.opened.count_hits(0 if counted else samples - len(plan.missing), self._kept.take_gather_ns())
        if isinstance(rows, Collated):
            return self._kept.pinned(rows.batch)
        if odd:
            others = self._cache.codec.split(rows, samples)
            return self._kept.pinned(default_collate([odd.get(place, other) for place, other in enumerate(others)]))
        return self._collation.batch(rows, samples)

    def _load(self, plan: _Plan, places: torch.Tensor) -> tuple[list[torch.Tensor], dict[int, Any]]:
        """The rows of a batch with misses, loaded here while the thread gathers the hits, and by place what is odd."""
        hits = Job(partial(self._kept.gather_ready, places))
        if len(plan.missing) < places.shape[0]:
            self._ahead.offer(hits)
        batch = self._cache.codec.rows(hits.result, places.shape[0])
        try:
            odd = self._dataset.load_into(batch, plan.indices[plan.missing].tolist(), plan.missing)
        finally:
            rows: list[torch.Tensor] = hits.result()  # waited for after an error, too
        return rows, odd

    def _receive(self, plan: _Plan, places: torch.Tensor) -> list[torch.Tensor] | Collated:
        """The rows of a batch with misses, which a worker has loaded; if it could not complete them, its batch."""
        kept = self._kept
        assert kept.crew is not None
        answer: MissingRows | Collated | None = kept.crew.receive()
        memory, plan.memory = plan.memory, None  # what is not lent is to be free again for the next plan
        if isinstance(answer, Collated):
            return answer
        rows = kept.gather_ready(places) if memory is None else kept.handed_out(memory)
        if answer is not None:
            batch = self._cache.codec.rows(lambda: rows, places.shape[0])
            for number, place in enumerate(plan.missing):
                batch.write(place, [field[number] for field in answer.fields])
        return rows

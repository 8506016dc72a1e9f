"""An epoch whose batches are put together in the main process.

Each batch is planned when its indices are drawn, by the `Schedule`, on the caller's thread: what is not READY is sent
to the workers at once, and the rest is gathered when the batch's turn comes, or on a thread just before. Where the
cache has been closed meanwhile, and for keys that only the source understands, samples pass through.

An iterator holds nothing that holds it: it ends its thread, and its workers if they are not persistent, when it is
exhausted, closed, or no longer referred to.

Ctrl-C comes while the iterator waits for workers or loads samples, or when a batch is made, never in between; the batch
that it has kept from being handed out is the next one again. A batch with an odd sample (one that is not of the spec)
is collated as DataLoader does: by the worker that has loaded it, or here where there are no workers.
"""

from __future__ import annotations

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
from lightning_stocache.loading.schedule import Schedule
from lightning_stocache.loading.staging import Collated, Staged, Staging, Stretch
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.loading.warm import pass_through

__all__ = ["GatheredEpoch"]

_ROWS = 256  # of an errand in the staging area, where a batch_sampler does not tell its batch size


@dataclass
class _Plan:
    """A batch to come.

    Args:
        indices: int64 `[samples]`, or a sampler's keys.
        places: where they lie; None for what passes through.
        missing: positions in the batch that are being loaded.
        stretch: where workers put what does not become READY; None if there is no errand.
        job: the gather, once it has been offered to the thread.
    """

    indices: Any
    places: torch.Tensor | None = None
    missing: list[int] = field(default_factory=list)
    stretch: Stretch | None = None
    job: Job | None = None


class GatheredEpoch:
    """An iterator over the batches of one epoch.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache.
        schedule: when indices are drawn.
        kept: buffers and workers.
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
                under_way = (loader.prefetch_factor or 2) * loader.num_workers
                self._hire(loader, under_way)
                for _ in range(under_way):
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
            if crew is not None and plan.stretch is not None and not self._closed:
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

    def _hire(self, loader: DataLoader[Any], under_way: int) -> None:
        """Start the workers before the thread, if there is anything to load."""
        kept = self._kept
        if kept.crew is None and not kept.full:
            kept.staging = Staging(self._cache.codec, _rows_of(loader), under_way + 1, kept.promised)
            kept.crew = Crew(loader, kept.staging, self._schedule.seed_state)

    def _go_on(self) -> None:
        """Leave the first plan behind; with workers, draw another, before the batch (or its error) is handed on."""
        plan = self._plans.popleft()
        if plan.stretch is not None and self._kept.staging is not None:
            self._kept.staging.give_back(plan.stretch)
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
        crew, staging = self._kept.crew, self._kept.staging
        if plan.missing and crew is not None and staging is not None:
            stretch = staging.take(len(plan.missing))
            crew.send(Errand(indices[plan.missing].tolist(), stretch, of_batch=indices.tolist()))
            plan.stretch = stretch  # only now: who waits for an answer must have asked
        return True

    def _complete(self, plan: _Plan) -> Any:
        """The batch of a plan, counted."""
        # Workers go on with the source that they were started with.
        if plan.places is None or self._closed or (not self._with_workers and self._dataset.changed):
            return pass_through(self._dataset, plan.indices, self._kept)
        samples, odd = plan.places.shape[0], dict[int, Any]()
        if plan.stretch is not None:
            rows = self._receive(plan, plan.places, plan.stretch)
        elif plan.missing:
            rows, odd = self._load(plan, plan.places)
        elif plan.job is not None:
            rows = plan.job.result()
        else:
            rows = self._kept.gather(plan.places)
        self._dataset.opened.count_hits(samples - len(plan.missing), self._kept.take_gather_ns())
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

    def _receive(self, plan: _Plan, places: torch.Tensor, stretch: Stretch) -> list[torch.Tensor] | Collated:
        """The rows of a batch with misses, which workers have loaded; if one of them is odd, the batch."""
        missing, cache, kept = plan.missing, self._cache, self._kept
        assert kept.crew is not None
        assert kept.staging is not None
        answer: Staged | Collated = kept.crew.receive()
        if isinstance(answer, Collated):
            return answer
        left = {*answer.places, *answer.sent}
        if filled := [position for place, position in enumerate(missing) if place not in left]:
            places[filled] = cache.lookup(plan.indices[filled])
        memory = kept.gather_ready(places)
        batch = cache.codec.rows(lambda: memory, places.shape[0])
        for place in answer.places:
            kept.staging.copy_to(batch, missing[place], stretch.first + place)
        for place, sent in answer.sent.items():
            batch.write(missing[place], sent)
        return memory


def _rows_of(loader: DataLoader[Any]) -> int:
    """The most samples that a batch has; a guess where a batch_sampler does not tell. More are sent by message."""
    rows: Any = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    return rows if isinstance(rows, int) and rows > 0 else _ROWS

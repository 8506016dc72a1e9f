"""One epoch of a CachedLoader, in either of its two ways.

`GatheredEpoch` puts batches together in the main process: it plans each batch when its indices are drawn, sends what is
not READY to the workers at once, and gathers when the batch's turn comes, or on a thread just before. `MadeEpoch` has
workers make whole batches. Both draw their indices by the `Schedule`, on the caller's thread.

What outlives an epoch (buffers, windows, persistent workers) lies in `Kept`. An iterator holds nothing that holds it:
it ends its thread, and its workers if they are not persistent, when it is exhausted, closed, or no longer referred
to.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol, cast

import torch
from torch.utils.data import DataLoader, default_collate
from torch.utils.data._utils import pin_memory as pinning

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.placement import NO_SLOT
from lightning_stocache.loading.ahead import Ahead, Job
from lightning_stocache.loading.buffers import Buffers
from lightning_stocache.loading.collation import Collation
from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.schedule import Schedule
from lightning_stocache.loading.staging import Staged, Staging
from lightning_stocache.loading.windows import WindowClerk, Windows

__all__ = ["Epoch", "GatheredEpoch", "Kept", "MadeEpoch", "Way"]

Way = Literal["main", "worker"]
_ROWS = 256  # of a staging window, where a batch_sampler does not tell its batch size; more is sent by message
_SLACK = 3  # windows beyond those under way: the batch of the step, the one fetched ahead of it, and one to spare


class Epoch(Protocol):
    """An iterator over batches that can be ended early."""

    def __next__(self) -> Any:
        """The next batch."""

    def close(self) -> None:
        """End it."""


class Kept:
    """What a loader keeps from one epoch to the next.

    Args:
        way: who makes the batches.
        loader: the loader.
    """

    def __init__(self, way: Way, loader: DataLoader[Any]) -> None:
        self.way = way
        self.persistent = loader.persistent_workers and loader.num_workers > 0
        self.pins = loader.pin_memory and torch.cuda.is_available()
        self.buffers = Buffers(self.pins)
        self.crew: Crew | None = None
        self.staging: Staging | None = None
        self.windows = Windows((loader.prefetch_factor or 0) * loader.num_workers + _SLACK)
        self.abandoned: list[int | None] = []  # windows of errands that nobody will ask for
        self.in_use = False

    def end_epoch(self, ahead: Ahead, windows: deque[int | None]) -> None:
        """Stop the thread, and the workers too unless they are persistent."""
        ahead.stop()
        self.abandoned.extend(windows)
        windows.clear()
        if not self.persistent:
            self.end_workers()
        self.in_use = False

    def begin_epoch(self) -> None:
        """Take what an epoch left behind that was broken off."""
        self.in_use = True
        if self.crew is not None:
            self.crew.begin_epoch()
        while self.abandoned:
            self.windows.give_back(self.abandoned.pop())

    def end_workers(self) -> None:
        """End the workers and give up their staging area."""
        crew, self.crew = self.crew, None
        staging, self.staging = self.staging, None
        if crew is not None:
            crew.close()
        if staging is not None:
            staging.close()

    def end(self) -> None:
        """End the workers and give up all memory."""
        self.end_workers()
        self.windows.close()


@dataclass
class _Plan:
    """A batch to come: its indices, their slots, and the positions that are being loaded, into a window or here."""

    indices: torch.Tensor
    slots: torch.Tensor
    missing: list[int]
    window: int | None = None
    job: Job | None = None


class GatheredEpoch:
    """An epoch whose batches are gathered in the main process.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache.
        schedule: when indices are drawn.
        kept: buffers and workers.
    """

    def __init__(self, loader: DataLoader[Any], schedule: Schedule, kept: Kept) -> None:
        assert isinstance(loader.dataset, CachedDataset)
        self._dataset = loader.dataset
        cache = loader.dataset.cache
        assert cache is not None
        self._cache = cache
        self._schedule, self._kept = schedule, kept
        self._collation = Collation(cache.spec)
        self._full = len(cache) == cache.arc.size == cache.filled
        self._with_workers = loader.num_workers > 0
        self._left, self._length = len(loader), len(loader)
        self._plans: deque[_Plan] = deque()
        self._ahead = Ahead()
        kept.begin_epoch()
        self._finalizer = weakref.finalize(self, kept.end_epoch, self._ahead, deque())
        if self._with_workers:
            self._hire(loader)
            for _ in range((loader.prefetch_factor or 2) * loader.num_workers):
                self._draw()

    def __iter__(self) -> GatheredEpoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return self._length

    def __next__(self) -> Any:
        """The next batch."""
        if not self._with_workers:
            while len(self._plans) < (2 if self._schedule.ahead_unseen else 1) and self._draw():
                pass
        if not self._plans:
            self.close()
            raise StopIteration
        plan = self._plans.popleft()
        try:
            batch = self._complete(plan)
        finally:
            if self._with_workers:
                self._draw()  # before the batch, or the worker's error, is handed on
        if self._plans and not self._plans[0].missing:
            following = self._plans[0]
            following.job = Job(partial(_gather, self._cache, self._kept.buffers, following.slots))
            self._ahead.offer(following.job)
        return batch

    def close(self) -> None:
        """End the epoch: its thread, and its workers unless they are persistent."""
        self._plans.clear()
        self._finalizer()

    def _hire(self, loader: DataLoader[Any]) -> None:
        """Start the workers before the thread, if there is anything to load."""
        kept = self._kept
        if self._full:
            kept.end_workers()
        elif kept.crew is None:
            rows = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None) or _ROWS
            windows = (loader.prefetch_factor or 2) * loader.num_workers + 2
            kept.staging = Staging(self._cache.spec, rows, windows)
            kept.crew = Crew(loader, kept.staging, self._schedule.seed_state)

    def _draw(self) -> bool:
        """Draw and plan one batch; whether there was one."""
        indices = self._schedule.draw()
        if indices is None:
            return False
        cache = self._cache
        if self._full and self._schedule.trusted:  # nothing to look up, and nothing to look at
            self._plans.append(_Plan(indices, cache.arc.slots_of(indices), []))
            return True
        slots = cache.ready_slots(indices)
        outside = indices >= cache.arc.size  # the source will say what is wrong with them
        missing = ((slots == NO_SLOT) | outside).nonzero().flatten().tolist()
        slots[missing] = NO_SLOT
        plan = _Plan(indices, slots, missing)
        if missing and self._kept.crew is not None and self._kept.staging is not None:
            plan.window = self._kept.staging.window()
            self._kept.crew.send(indices[missing].tolist(), plan.window)
        self._plans.append(plan)
        return True

    def _complete(self, plan: _Plan) -> Any:
        """The batch of a plan, counted."""
        if self._cache.closed or not plan.indices.shape[0]:  # closed meanwhile: samples pass through
            return default_collate(self._dataset.__getitems__(plan.indices.tolist()))
        if plan.missing:
            rows = self._load(plan)
        elif plan.job is not None:
            rows = plan.job.result()
        else:
            rows = _gather(self._cache, self._kept.buffers, plan.slots)
        self._dataset.count_hits(plan.indices.shape[0] - len(plan.missing))
        return self._collation.batch(rows)

    def _load(self, plan: _Plan) -> list[torch.Tensor]:
        """The rows of a batch with misses: workers have loaded them, or they are loaded here."""
        missing = plan.missing
        indices = plan.indices[missing]
        cache, kept = self._cache, self._kept
        staged, loose = [], {}
        if plan.window is not None:
            assert kept.crew is not None
            answer: Staged = kept.crew.receive()
            staged, loose = answer.places, answer.sent
            slots = cache.arc.slots_of(indices)
            slots[[*staged, *loose]] = NO_SLOT
        else:
            samples = self._dataset.__getitems__(indices.tolist())
            slots = cache.ready_slots(indices)
            for place in (slots == NO_SLOT).nonzero().flatten().tolist():
                loose[place] = cache.spec.flatten(samples[place], int(indices[place]))
        plan.slots[missing] = slots
        rows = _gather(cache, kept.buffers, plan.slots, ready=False)
        for place in staged:
            assert kept.staging is not None
            assert plan.window is not None
            kept.staging.copy_to(rows, missing[place], plan.window, place)
        for place, own in loose.items():
            for row, one in zip(rows, own, strict=True):
                row[missing[place]].copy_(one)
        return rows


class MadeEpoch:
    """An epoch whose batches are made by workers.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache.
        schedule: when indices are drawn.
        kept: windows and workers.
    """

    def __init__(self, loader: DataLoader[Any], schedule: Schedule, kept: Kept) -> None:
        self._schedule, self._kept = schedule, kept
        self._length = len(loader)
        self._windows: deque[int | None] = deque()  # of the errands under way
        kept.begin_epoch()
        if kept.crew is None:
            kept.crew = Crew(loader, WindowClerk(), schedule.seed_state)
        self._crew = kept.crew
        self._finalizer = weakref.finalize(self, kept.end_epoch, Ahead(), self._windows)
        for _ in range(self._crew.most):
            self._draw()

    def __iter__(self) -> MadeEpoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return self._length

    def __next__(self) -> Any:
        """The next batch."""
        if not self._windows:
            self.close()
            raise StopIteration
        window = self._windows.popleft()
        try:
            answer = self._crew.receive()
        except BaseException:
            self._kept.windows.give_back(window)
            raise
        finally:
            self._draw()
        batch = self._kept.windows.open(answer, window)
        return cast(Any, pinning).pin_memory(batch) if self._kept.pins else batch

    def close(self) -> None:
        """End the epoch, and its workers unless they are persistent."""
        self._finalizer()

    def _draw(self) -> None:
        indices = self._schedule.draw()
        if indices is not None:
            windows = self._kept.windows
            window = windows.take()
            self._crew.send(indices.tolist(), None if window is None else windows.handle(window))
            self._windows.append(window)


def _gather(cache: SharedCache, buffers: Buffers, slots: torch.Tensor, ready: bool = True) -> list[torch.Tensor]:
    """The rows of those slots, uint8 `[samples, nbytes]` per field; undefined for those that are not ready."""
    samples = slots.shape[0]
    memory = [buffers.take(samples * nbytes) for nbytes in cache.spec.row_bytes]
    if ready:
        return cache.gather(slots, memory)
    some = int(slots.max())
    if some == NO_SLOT:
        return [one.view(samples, nbytes) for one, nbytes in zip(memory, cache.spec.row_bytes, strict=True)]
    # Where there is no slot, one that is READY is read: a hole of the file would take a page, or fault where none is
    # left.
    return cache.gather(slots.masked_fill(slots == NO_SLOT, some), memory)

"""An epoch whose batches are made by workers, in shared memory that the trainer is lent.

Indices are drawn by the `Schedule` on the caller's thread, and each batch of them is an errand for a worker, with
memory to put the batch in if some is free. An iterator holds nothing that holds it: it ends its workers, if they are
not persistent, when it is exhausted, closed, or no longer referred to. A batch that Ctrl-C has kept from being handed
out is the next one again.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.batch_pool import SharedBatch
from lightning_stocache.loading.crew import Crew
from lightning_stocache.loading.errand import Errand
from lightning_stocache.loading.interrupts import HeldBack
from lightning_stocache.loading.kept import Kept
from lightning_stocache.loading.replies import BatchReplies, opened
from lightning_stocache.loading.schedule import Schedule

__all__ = ["MadeEpoch"]


class MadeEpoch:
    """An iterator over the batches of one epoch.

    Args:
        loader: the loader; its dataset is a CachedDataset with an open cache.
        schedule: when indices are drawn.
        kept: memory and workers.
    """

    def __init__(self, loader: DataLoader[Any], schedule: Schedule, kept: Kept) -> None:
        self._schedule, self._kept, self._batches = schedule, kept, loader.batch_sampler
        self._memory: deque[SharedBatch | None] = deque()  # of the errands under way
        self._made: tuple[Any] | None = None  # the batch that is to be handed out
        self._finalizer = weakref.finalize(self, kept.end_epoch)
        try:
            kept.begin_epoch()
            if kept.crew is None:
                kept.crew = Crew(loader, BatchReplies(), schedule.seed_state)
            self._crew = kept.crew
            for _ in range(self._crew.most):
                self._draw()
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> MadeEpoch:
        return self

    def __len__(self) -> int:
        """Number of batches in the epoch."""
        return len(cast(Any, self._batches))

    def __next__(self) -> Any:
        """The next batch."""
        if self._made is None:
            with HeldBack():
                self._made = (self._receive(),)
        (batch,), self._made = self._made, None  # no call from here on: nothing comes in between
        return batch

    def _receive(self) -> Any:
        if not self._memory:
            self.close()
            raise StopIteration
        answered = self._crew.answered
        try:
            answer = self._crew.receive()
        except BaseException:
            if self._crew.answered > answered:  # else the answer is still to come, and is the next one
                self._memory.popleft()
                self._draw()  # before the error is handed on
            raise
        batch = opened(answer, self._memory.popleft(), self._kept.pool)
        self._draw()
        return self._kept.pinned(batch)

    def close(self) -> None:
        """End the epoch, and its workers unless they are persistent."""
        self._made = None
        self._memory.clear()
        self._finalizer()

    def _draw(self) -> None:
        """Draw a batch of indices and send for it."""
        indices = self._schedule.draw()
        if indices is None:
            return
        shared = self._kept.pool.take_shared()
        wanted = indices.tolist() if isinstance(indices, torch.Tensor) else indices
        self._crew.send(Errand(wanted, None if shared is None else shared.place))
        self._memory.append(shared)

"""Worker processes that run errands.

DataLoader's own worker processes, but fed by errands instead of a sampler (`torch_internals`): an errand is a list of
indices with a place where the answer may be put. The workers hold the loader's own dataset, and a `worker_init_fn`
finds the user's. What they answer is made by what runs in the worker as the collate function. Only the consumer's
thread touches a crew. Ctrl-C is let through only while nothing has come.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.errand import Errand
from lightning_stocache.loading.interrupts import HeldBack
from lightning_stocache.loading.torch_internals import WorkerIterator
from lightning_stocache.loading.worker_init import InitOnSource

__all__ = ["Crew"]


class _Feed:
    """The errands that wait. Empty is not the end: the next one may come."""

    def __init__(self) -> None:
        self.waiting: deque[Errand] = deque()

    def __iter__(self) -> Iterator[Errand]:
        return self

    def __next__(self) -> Errand:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()

    def __len__(self) -> int:
        return len(self.waiting)


class Crew:
    """The workers of a loader.

    Args:
        loader: number of workers, start method, time-out and the rest are its.
        clerk: turns an errand and its samples into the answer, in the worker.
        seed_state: state of the generator from which the base seed of the workers is drawn.
    """

    def __init__(self, loader: DataLoader[Any], clerk: Callable[[Any], Any], seed_state: torch.Tensor | None) -> None:
        generator = torch.Generator()
        if seed_state is not None:
            generator.set_state(seed_state)
        self._feed = _Feed()
        self.most = (loader.prefetch_factor or 2) * loader.num_workers
        fed: DataLoader[Any] = DataLoader(
            loader.dataset,
            batch_sampler=self._feed,
            num_workers=loader.num_workers,
            collate_fn=clerk,
            timeout=loader.timeout,
            worker_init_fn=InitOnSource.of(loader.worker_init_fn),
            multiprocessing_context=loader.multiprocessing_context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # an empty feed must not end them
        )
        self._workers = WorkerIterator(fed)
        self._at_rest = True  # or the workers were being called back when that was interrupted

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin: Ctrl-C on a terminal ends workers, too."""
        return self._at_rest and self._workers.alive

    def begin_epoch(self) -> None:
        """Wait for answers that nobody wants any more (of an epoch broken off); the first worker is next again."""
        self._feed.waiting.clear()
        self._at_rest = False
        with HeldBack():
            self._workers.begin_epoch()
            self._at_rest = True

    def send(self, errand: Errand) -> None:
        """Give an errand to the next worker."""
        with HeldBack():
            self._feed.waiting.append(errand)
            if self._workers.outstanding < self.most:
                self._workers.push()

    def receive(self) -> Any:
        """The answer to the earliest errand that has none yet. The caller holds Ctrl-C back until it has put it away.

        Raises:
            Exception: what the dataset raised in the worker, with the worker's traceback: that is the answer. Where
                there is none (a time-out, a worker that was killed, KeyboardInterrupt), `answered` stays what it was.
        """
        return self._workers.receive()

    @property
    def answered(self) -> int:
        """Number of answers, this epoch."""
        return self._workers.answered

    def close(self) -> None:
        """End the workers, and wait for them."""
        with HeldBack():
            self._workers.shut_down()

"""Worker processes that run errands.

DataLoader's own worker processes, with all it knows of starting, seeding, watching and ending them, but fed by
errands instead of a sampler: an errand is a list of indices with a place where the answer may be put. The workers
hold the loader's own dataset, and a `worker_init_fn` finds the user's. What they answer is made by a clerk, which
runs in the worker as the collate function.

Of DataLoader's iterator, five private names are used, which are the same from torch 2.4 to 2.15. `_try_put_index`
pushes the feed: an iterator that asked for errands itself would plan a whole epoch ahead when they are rare.
`_tasks_outstanding` says whether it may, `_rcvd_idx` how many answers have been handed out. `_data_queue` is where
answers come from, `_workers` who may have died. Only the consumer's thread touches a crew.

Ctrl-C is let through only while nothing has come: what has left the queue is an answer, or stays with the iterator.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lightning_stocache.loading.errand import Errand
from lightning_stocache.loading.interrupts import HeldBack, LetThrough
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


class _Mailbox:
    """The queue of the workers' answers, which can be interrupted only while it is empty."""

    def __init__(self, answers: Any) -> None:
        self._answers = answers

    def get(self, timeout: float | None = None) -> Any:
        """The next answer.

        Raises:
            Empty: none has come in that many seconds.
        """
        with LetThrough():
            came = self._answers._reader.poll(timeout)
        if not came:
            raise queue.Empty
        return self._answers.get()


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
        self._loader: DataLoader[Any] = DataLoader(
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
        self._workers: Any = cast(Any, iter(self._loader))
        self._workers._data_queue = _Mailbox(self._workers._data_queue)
        self._at_rest = True  # or the workers were being called back when that was interrupted

    @property
    def usable(self) -> bool:
        """Whether another epoch can begin: Ctrl-C on a terminal ends workers, too."""
        return self._at_rest and all(worker.is_alive() for worker in self._workers._workers)

    def begin_epoch(self) -> None:
        """Wait for answers that nobody wants any more (of an epoch broken off); the first worker is next again."""
        self._feed.waiting.clear()
        self._at_rest = False
        with HeldBack():
            self._workers = iter(self._loader)
            self._at_rest = True

    def send(self, errand: Errand) -> None:
        """Give an errand to the next worker."""
        with HeldBack():
            self._feed.waiting.append(errand)
            if self._workers._tasks_outstanding < self.most:
                self._workers._try_put_index()

    def receive(self) -> Any:
        """The answer to the earliest errand that has none yet. The caller holds Ctrl-C back until it has put it away.

        Raises:
            Exception: what the dataset raised in the worker, with the worker's traceback: that is the answer. Where
                there is none (a time-out, a worker that was killed, KeyboardInterrupt), `answered` stays what it was.
        """
        return next(self._workers)

    @property
    def answered(self) -> int:
        """Number of answers, this epoch."""
        return int(self._workers._rcvd_idx)

    def close(self) -> None:
        """End the workers, and wait for them."""
        with HeldBack():
            self._workers._shutdown_workers()

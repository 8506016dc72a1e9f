"""The worker processes of a CachedLoader, and the requests that they serve.

They are DataLoader's own worker processes, but fed by requests instead of a sampler (`torch_internals`): a request is
the indices of a batch, or of those of its samples that are missing, with the place where they are to be put. Workers
hold the loader's dataset inside a `Responder`. Only the consumer's thread touches a pool.

A user's `worker_init_fn` asks `get_worker_info().dataset` for the dataset, to open a file or to seed generators; some
walk through all that they find there, as MONAI's does. What a loader's workers hold instead, and what the Trainer's
doors have put in front of the user's dataset, is none of their business.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, get_worker_info

from lightning_stocache.loading.dataset import cached_source
from lightning_stocache.loading.interrupts import held_back
from lightning_stocache.loading.prefill import Prefill
from lightning_stocache.loading.request import Reply, Request, Responder
from lightning_stocache.loading.stand_in import StandIn, cached_in
from lightning_stocache.torch_internals import WorkerIterator, do_when_idle, idling_context, set_worker_dataset

__all__ = ["InitOnSource", "WorkerPool", "under_way"]

_CTRL_C = (0, -signal.SIGINT)
"""How workers end that were interrupted, or told to."""


def under_way(loader: DataLoader[Any]) -> int:
    """How many batches a loader has drawn and not handed out yet; none without workers."""
    return (loader.prefetch_factor or 2) * loader.num_workers


class _Feed:
    """The requests that wait. Empty is not the end: the next one may come."""

    def __init__(self) -> None:
        self.waiting: deque[Request] = deque()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Request:
        if not self.waiting:
            raise StopIteration
        return self.waiting.popleft()

    def __len__(self) -> int:
        return len(self.waiting)


def _as_it_is(reply: Any) -> Any:
    """The collate function of the workers: a reply is complete."""
    return reply


class WorkerPool:
    """The workers of a loader.

    Args:
        loader: number of workers, start method, time-out and the rest are its.
        seed_state: state of the generator from which the base seed of the workers is drawn.
    """

    def __init__(self, loader: DataLoader[Any], seed_state: torch.Tensor | None) -> None:
        generator = torch.Generator()
        if seed_state is not None:
            generator.set_state(seed_state)
        self._feed = _Feed()
        context, cached = loader.multiprocessing_context, cached_in(loader.dataset)
        if cached is not None and cached_source(cached).opened.request.prefill:
            context = idling_context(context)
        self.most = under_way(loader)
        fed: DataLoader[Any] = DataLoader(
            Responder(loader.dataset, loader.collate_fn),
            batch_sampler=self._feed,
            num_workers=loader.num_workers,
            collate_fn=_as_it_is,
            timeout=loader.timeout,
            worker_init_fn=InitOnSource(loader.worker_init_fn),
            multiprocessing_context=context,
            generator=generator,
            prefetch_factor=loader.prefetch_factor,
            persistent_workers=True,  # an empty feed must not end them
        )
        self._workers = WorkerIterator(fed)
        self._at_rest = True  # or the workers were being called back when that was interrupted
        self._failed = False

    def usable(self) -> bool:
        """Whether another epoch can begin: Ctrl-C on a terminal ends workers, too.

        Raises:
            RuntimeError: a worker has crashed or was killed, and no epoch has ended by that. DataLoader's handler of
                SIGCHLD cannot be relied on for it: what is running when it raises may take that for an error of its
                own, and go on. Once it is said, new workers can take over.
        """
        if self._failed or not self._at_rest:
            return False
        ended = self._workers.ended
        if failed := [worker for worker in ended if worker.exitcode not in _CTRL_C]:
            self._failed = True
            who = "; ".join(f"pid {worker.pid}, exit code {worker.exitcode}" for worker in failed)
            raise RuntimeError(f"DataLoader worker ({who}) exited unexpectedly")
        return not ended

    def begin_epoch(self) -> None:
        """Wait for replies that nobody wants any more (of an epoch broken off); the first worker is next again."""
        self._feed.waiting.clear()
        self._at_rest = False  # and stays so where a worker has crashed
        self._workers.begin_epoch()
        self._at_rest = True

    def send(self, request: Request) -> None:
        """Give a request to the next worker."""
        self._feed.waiting.append(request)
        if self._workers.outstanding < self.most:
            with self._noting_failures(), held_back(), held_back(signal.SIGCHLD):  # which would leave a queue locked
                self._workers.push()

    def receive(self) -> Reply:
        """The reply to the earliest request that has none yet.

        Raises:
            Exception: what the dataset raised in the worker, with the worker's traceback: that is the reply. Where
                there is none (a time-out, a worker that was killed), `replies` stays what it was.
        """
        with self._noting_failures():
            return cast(Reply, self._workers.receive())

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        """Note that an epoch ends by an error: if workers have crashed, it was said."""
        try:
            yield
        except Exception:
            self._failed = self._failed or bool(self._workers.ended)
            raise

    @property
    def replies(self) -> int:
        """Number of replies, this epoch."""
        return self._workers.answered

    def close(self) -> None:
        """End the workers, and wait for them."""
        with held_back():
            self._workers.shut_down()


@dataclass(frozen=True)
class InitOnSource:
    """Calls a function in a worker that has just been started, where the dataset is the user's own.

    Args:
        function: the user's; None: nothing is called.
    """

    function: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        """In a worker, which has the number that is given."""
        info: Any = get_worker_info()
        asked = isinstance(info.dataset, Responder)
        dataset = info.dataset.dataset if asked else info.dataset
        cached = cached_in(dataset)
        if asked and cached is not None and cached_source(cached).opened.request.prefill:
            do_when_idle(Prefill(cached_source(cached), worker, info.num_workers))
        if cached is not None and isinstance(dataset, StandIn):  # a CachedDataset of the user's is what he expects
            dataset = cached.source
        set_worker_dataset(dataset)
        if self.function is not None:
            self.function(worker)

    @classmethod
    def of(cls, function: Callable[[int], None] | None) -> Callable[[int], None] | None:
        """The function of a loader, wrapped once; None stays None."""
        return function if function is None or isinstance(function, cls) else cls(function)

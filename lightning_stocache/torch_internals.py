"""Every private name of torch's that this package uses, and what happens without it.

- `_MultiProcessingDataLoaderIter`: DataLoader's iterator over workers, which is fed by us (`WorkerIterator`):
  `_try_put_index` pushes the feed, `_tasks_outstanding` and `_rcvd_idx` count requests and answers, `_data_queue` is
  where answers come from, `_workers` are the processes, `_shutdown_workers` ends them. Where one of these is missing, a
  loader with workers is a plain DataLoader, with one warning (`knows_workers`).
- `_utils.collate` and `_utils.pin_memory`: a torch without them is not supported, and says so at the import.
- `RandomSampler._num_samples`: where it is missing, a sampler is taken for one of the user's.
- Workers wait for requests in `get` of a queue that DataLoader makes by its `multiprocessing_context`. A worker that
  waits elsewhere does nothing when it is idle.
- `_BaseDataLoaderIter`: what a loader that is read already holds.
- `_utils.worker._worker_info` and `WorkerInfo`: tell a filler of a rolling cache its part of a stream. Where they are
  missing, it draws the whole stream.
- `distributed_c10d._get_default_store`: where it is missing, ranks send messages over a store of our own.

The names are the same from torch 2.4 to 2.15.
"""

from __future__ import annotations

import copy
import logging
import multiprocessing
import queue
import time
from collections.abc import Callable, Sequence
from functools import cache
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, ClassVar, cast

import torch
from torch.utils.data import DataLoader, Sampler, get_worker_info
from torch.utils.data import dataloader as dataloaders
from torch.utils.data._utils import pin_memory as pinning
from torch.utils.data._utils import worker
from torch.utils.data._utils.collate import collate, default_collate_fn_map

__all__ = [
    "WorkerIterator",
    "become_worker",
    "collate",
    "default_collate_fn_map",
    "do_when_idle",
    "draws_all_once",
    "idling_context",
    "is_loader_iterator",
    "job_store",
    "knows_workers",
    "pinned",
    "set_worker_dataset",
    "shut_down",
]

log = logging.getLogger(__name__)

_TERMINATED_SECONDS = 2.0  # for workers that were sent SIGTERM, which torch's handler obeys at once, or SIGKILL
_ENDING_SECONDS = 10.0  # for a worker that has closed its socket to be dead: moments, on a busy machine seconds

_OF_WORKERS = ("_try_put_index", "_tasks_outstanding", "_rcvd_idx", "_data_queue", "_workers", "_shutdown_workers")


@cache
def knows_workers() -> bool:
    """Whether this version of torch has the names by which workers are fed; says once if it has not."""
    kind: Any = getattr(dataloaders, "_MultiProcessingDataLoaderIter", None)
    known = set(dir(kind)) | _names_in(kind, "__init__") | _names_in(kind, "_reset")
    if missing := sorted(set(_OF_WORKERS) - known):
        log.warning(
            "this version of torch (%s) has no %s: a CachedLoader with workers is a plain DataLoader.\nThe dataset is "
            "cached all the same",
            torch.__version__,
            ", ".join(missing),
        )
    return not missing


class WorkerIterator:
    """The iterator of a loader with persistent workers, fed from outside.

    Args:
        loader: its `batch_sampler` is the feed: an iterator that may be empty now and have more later.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._iterator = cast(Any, iter(loader))
        self._iterator._data_queue = _Mailbox(self._iterator._data_queue, self._iterator._workers)

    def begin_epoch(self) -> None:
        """Wait for answers that nobody wants any more; the first worker is next again."""
        self._iterator = iter(self._loader)

    def push(self) -> None:
        """Send what the feed has next to the next worker."""
        self._iterator._try_put_index()

    def receive(self) -> Any:
        """The next answer, or what the worker raised."""
        return next(self._iterator)

    @property
    def outstanding(self) -> int:
        """Number of answers that are to come."""
        return int(self._iterator._tasks_outstanding)

    @property
    def answered(self) -> int:
        """Number of answers, this epoch."""
        return int(self._iterator._rcvd_idx)

    @property
    def ended(self) -> list[BaseProcess]:
        """The workers that do not run any more."""
        return [worker for worker in self._iterator._workers if not worker.is_alive()]

    def shut_down(self) -> None:
        """End the workers, and wait for them."""
        shut_down(self._iterator)


class _IdleQueue(Queue):  # type: ignore[type-arg]
    """A queue whose reader may do something useful while it is empty."""

    work: ClassVar[Callable[[], bool] | None] = None
    """In the process that reads: does a little, and says whether there may be more."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item, as `Queue.get` gives it; work takes no more time than may be waited."""
        end = None if timeout is None else time.monotonic() + timeout
        while _IdleQueue.work is not None and self.empty():
            if end is not None and time.monotonic() >= end:
                raise queue.Empty  # who reads looks now and then whether the other side is alive
            if not _IdleQueue.work():
                _IdleQueue.work = None
        return super().get(block, timeout)


def do_when_idle(work: Callable[[], bool]) -> None:
    """In a worker: do this, again and again until it gives False, while no request waits."""
    _IdleQueue.work = work


def idling_context(given: str | BaseContext | None) -> BaseContext:
    """The context of a loader, with queues that know `do_when_idle`."""
    base = given if isinstance(given, BaseContext) else multiprocessing.get_context(given)
    context: Any = copy.copy(base)
    context.Queue = lambda maxsize=0: _IdleQueue(maxsize, ctx=base)
    return cast(BaseContext, context)


class _Mailbox:
    """The queue of the workers' answers."""

    def __init__(self, answers: Any, workers: list[BaseProcess]) -> None:
        self._answers, self._workers = answers, workers

    def get(self, timeout: float | None = None) -> Any:
        """The next answer; raises `Empty` if none has come in that many seconds."""
        try:
            return self._answers.get(timeout=timeout)
        except (EOFError, ConnectionError, FileNotFoundError):
            # A worker that is killed closes its sockets before it is known to have ended; DataLoader says so then.
            ended = connection.wait([worker.sentinel for worker in self._workers], _ENDING_SECONDS)
            for worker in self._workers:
                if worker.sentinel in ended:
                    worker.join()  # its files close before it is dead
            raise


def shut_down(iterator: Any) -> None:
    """End the workers of a loader's iterator, and wait for them; what hangs is killed."""
    iterator._shutdown_workers()
    left = [process for process in iterator._workers if process.is_alive()]
    for process in left:
        process.terminate()  # the iterator does not where the interpreter is about to end
    for process in _still_alive(left):
        process.kill()
    _still_alive(left)


def _still_alive(processes: Sequence[BaseProcess]) -> list[BaseProcess]:
    """The processes that do not end in time."""
    deadline = time.monotonic() + _TERMINATED_SECONDS
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0))
    return [process for process in processes if process.is_alive()]


def set_worker_dataset(dataset: Any) -> None:
    """In a worker: what `get_worker_info().dataset` is from now on. The object refuses to be changed."""
    object.__setattr__(get_worker_info(), "dataset", dataset)


def become_worker(number: int, workers: int, seed: int, dataset: Any) -> None:
    """In a process of ours: what `get_worker_info()` says from now on."""
    if hasattr(worker, "_worker_info") and hasattr(worker, "WorkerInfo"):
        told: Any = worker
        told._worker_info = told.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)


def is_loader_iterator(value: Any) -> bool:
    """Whether it is an iterator of a DataLoader."""
    return isinstance(value, dataloaders._BaseDataLoaderIter)


def draws_all_once(sampler: Sampler[Any]) -> bool:
    """Whether a RandomSampler draws every index of its dataset once."""
    given: Any = sampler
    return not given.replacement and getattr(given, "_num_samples", 0) is None


def job_store() -> Any:
    """The `torch.distributed.Store` of the running job, on a connection of its own; None if it has none (MPI)."""
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    clone = getattr(store, "clone", None)  # not before torch 2.6
    return store if clone is None else clone()


def pinned(batch: Any) -> Any:
    """A batch in page-locked memory."""
    return cast(Any, pinning).pin_memory(batch)


def _names_in(kind: Any, method: str) -> set[str]:
    """The names of attributes that a method reads or sets."""
    code = getattr(getattr(kind, method, None), "__code__", None)
    return set(getattr(code, "co_names", ()))

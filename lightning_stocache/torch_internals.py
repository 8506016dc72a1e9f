"""Every private name of torch that this package uses, and what happens without it.

- `_MultiProcessingDataLoaderIter`: DataLoader's iterator over workers, which `WorkerIterator` feeds. `_try_put_index`
  sends the next request, `_worker_queue_idx_cycle` names the next worker, `_send_idx` and `_rcvd_idx` count requests
  and replies, `_data_queue` has the replies, `_index_queues` the requests, `_workers` are the processes,
  `_shutdown_workers` ends them. Without one of these, a loader with workers is a plain DataLoader, with one warning
  (`knows_workers`).
- `_utils.collate` and `_utils.pin_memory`: without them, the import of this module fails.
- `RandomSampler._num_samples`: without it, a RandomSampler is treated as a sampler of the user's own class.
- Workers wait for requests in `get` of a queue that DataLoader makes with its `multiprocessing_context`. If a worker
  waits elsewhere, it does nothing while it is idle.
- `_BaseDataLoaderIter`: the base class of DataLoader's iterators. Without it, `is_loader_iterator` fails.
- `_utils.worker._worker_info` and `WorkerInfo`: give a filler of a rolling cache its part of a stream. Without them,
  the filler draws the whole stream.
- `Tensor._version`: the number of writes to a tensor. Without it, only a network's first bytes tell of a change.
- `_IterDataPipeSerializationWrapper._datapipe`: without it, a datapipe is another dataset for each of its loaders.
- `distributed_c10d._get_default_store`: without it, ranks send messages over a store that this package makes.

The names are the same from torch 2.4 to 2.15.
"""

from __future__ import annotations

import copy
import logging
import math
import multiprocessing
import queue
import time
from collections import deque
from collections.abc import Iterator
from functools import cache
from multiprocessing import connection
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any, ClassVar, cast

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, IterDataPipe, Sampler, get_worker_info
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
    "unwrapped_pipe",
    "version_of",
]

log = logging.getLogger(__name__)

_TERMINATED_SECONDS = 2.0  # for a worker to end after SIGTERM, which torch's handler obeys at once
_LOCKED_SECONDS = 1.0  # that the thread of a queue may have it locked: microseconds
_ENDING_SECONDS = 10.0  # for a worker to end after its socket has closed: milliseconds, on a busy machine seconds

_OF_WORKERS = (
    *("_try_put_index", "_worker_queue_idx_cycle", "_send_idx", "_rcvd_idx", "_data_queue", "_index_queues"),
    *("_workers", "_shutdown_workers"),
)
_ASIDE = -1  # the number of a question beside the requests
_POLL_SECONDS = 5.0  # between two looks whether a worker is alive


@cache
def knows_workers() -> bool:
    """Whether this version of torch has the names that `WorkerIterator` needs. Warns once if it does not."""
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
        loader: a loader whose `batch_sampler` is the feed: an iterator that may be empty now and have more later.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader
        self._iterator = cast(Any, iter(loader))
        self._mailbox = _Mailbox(self._iterator._data_queue, self._iterator._workers)
        self._iterator._data_queue = self._mailbox

    def begin_epoch(self, batches: int = 0) -> None:
        """Wait for the replies of the last epoch and drop them. The next request is for the worker of that batch."""
        self._iterator = iter(self._loader)
        for _ in range(batches % self._loader.num_workers):
            next(self._iterator._worker_queue_idx_cycle)

    def push(self) -> None:
        """Send the next item of the feed to the next worker."""
        self._iterator._try_put_index()

    def receive(self) -> Any:
        """The next reply. Raises the worker's error, if there was one."""
        return next(self._iterator)

    def ask(self, number: int, question: Any) -> Any:
        """The reply of one worker to a question, which leaves the order of requests and replies as it is.

        None if the worker has ended, or if its reply is an error.

        Raises:
            RuntimeError: the loader's `timeout` has passed, as for a batch.
        """
        self._iterator._index_queues[number].put((_ASIDE, question))
        reply = self._mailbox.aside(number, self._loader.timeout or math.inf)
        return None if isinstance(reply, ExceptionWrapper) else reply

    @property
    def outstanding(self) -> int:
        """Number of requests whose reply has not been received, although it may have come before an earlier one."""
        return int(self._iterator._send_idx - self._iterator._rcvd_idx)

    @property
    def answered(self) -> int:
        """Number of replies in this epoch."""
        return int(self._iterator._rcvd_idx)

    @property
    def ended(self) -> list[BaseProcess]:
        """The workers that have ended."""
        return [worker for worker in self._iterator._workers if not worker.is_alive()]

    def shut_down(self) -> None:
        """End the workers, and wait for them."""
        shut_down(self._iterator)


class _IdleQueue(Queue):  # type: ignore[type-arg]
    """A queue whose reading process works while the queue is empty."""

    work: ClassVar[Iterator[None] | None] = None
    """The work of the reading process: each step does a small part."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item, as from `Queue.get`. Working counts as waiting."""
        end = None if timeout is None else time.monotonic() + timeout
        while _IdleQueue.work is not None and self.empty():
            if end is not None and time.monotonic() >= end:
                raise queue.Empty  # the worker checks then whether the main process is alive
            try:
                next(_IdleQueue.work)
            except StopIteration:
                _IdleQueue.work = None
        return super().get(block, timeout)


def do_when_idle(work: Iterator[None]) -> None:
    """In a worker: take a step of `work` whenever no request waits, until the work ends."""
    _IdleQueue.work = work


def idling_context(given: str | BaseContext | None) -> BaseContext:
    """A multiprocessing context whose queues support `do_when_idle`.

    Args:
        given: the context that the loader asks for, or its name; None for the default.
    """
    base = given if isinstance(given, BaseContext) else multiprocessing.get_context(given)
    context: Any = copy.copy(base)
    context.Queue = lambda maxsize=0: _IdleQueue(maxsize, ctx=base)
    return cast(BaseContext, context)


class _Mailbox:
    """The queue of the workers' replies."""

    def __init__(self, replies: Any, workers: list[BaseProcess]) -> None:
        self._replies, self._workers = replies, workers
        self._early = deque[Any]()  # replies that have come before the answer to a question

    def aside(self, number: int, seconds: float) -> Any:
        """The answer of a worker to a question beside the requests; None if it has ended.

        Raises:
            RuntimeError: no answer has come within so many seconds.
        """
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"DataLoader timed out after {seconds} seconds")
            try:
                reply = self._replies.get(timeout=min(left, _POLL_SECONDS))
            except queue.Empty:
                if not self._workers[number].is_alive():
                    return None
                continue
            except (EOFError, ConnectionError, FileNotFoundError):
                return None  # a worker was killed: DataLoader raises its own error when it asks for a reply
            if reply[0] == _ASIDE:
                return reply[1]
            self._early.append(reply)

    def get(self, timeout: float | None = None) -> Any:
        """The next reply. Raises `queue.Empty` if none comes within the timeout, in seconds."""
        if self._early:
            return self._early.popleft()
        try:
            reply = self._replies.get(timeout=timeout)
            while reply[0] == _ASIDE:  # an answer that came too late
                reply = self._replies.get(timeout=timeout)
            return reply
        except (EOFError, ConnectionError, FileNotFoundError):
            # A killed worker closes its sockets before it has ended. DataLoader raises its own error after the end.
            ended = connection.wait([worker.sentinel for worker in self._workers], _ENDING_SECONDS)
            for worker in self._workers:
                if worker.sentinel in ended:
                    worker.join()  # its sentinel is ready before it is dead
            raise


def shut_down(iterator: Any) -> None:
    """End the workers of a loader's iterator, and wait for them. A worker that hangs is terminated."""
    for indices in iterator._index_queues:
        _unlock(indices)
    iterator._shutdown_workers()
    left = [process for process in iterator._workers if process.is_alive()]
    for process in left:
        process.terminate()  # the iterator does not do so while the interpreter ends
    for process in left:
        process.join(_TERMINATED_SECONDS)


def _unlock(locked: Any) -> None:
    """Unlock a queue that Ctrl-C has left locked, in the middle of a `put`: the next `put` would wait for ever."""
    lock = getattr(locked, "_notempty", None)
    if lock is not None:
        lock.acquire(timeout=_LOCKED_SECONDS)
        lock.release()


def set_worker_dataset(dataset: Any) -> None:
    """In a worker: replace `get_worker_info().dataset`, which forbids ordinary assignment."""
    object.__setattr__(get_worker_info(), "dataset", dataset)


def become_worker(number: int, workers: int, seed: int, dataset: Any) -> None:
    """In a process that DataLoader did not start: set the result of `get_worker_info()`."""
    if hasattr(worker, "_worker_info") and hasattr(worker, "WorkerInfo"):
        module: Any = worker
        module._worker_info = module.WorkerInfo(id=number, num_workers=workers, seed=seed, dataset=dataset)


def is_loader_iterator(value: Any) -> bool:
    """Whether a value is an iterator of a DataLoader."""
    return isinstance(value, dataloaders._BaseDataLoaderIter)


def unwrapped_pipe(dataset: Any) -> Any:
    """The IterDataPipe in a wrapper that each DataLoader makes anew for its pickle; any other dataset as it is."""
    is_wrapper = isinstance(dataset, IterDataPipe) and type(dataset).__name__ == "_IterDataPipeSerializationWrapper"
    return getattr(dataset, "_datapipe", dataset) if is_wrapper else dataset


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor has been written to in place, as far as torch counts it."""
    return getattr(tensor, "_version", 0)


def draws_all_once(sampler: Sampler[Any]) -> bool:
    """Whether a RandomSampler draws every index of its dataset once."""
    given: Any = sampler
    return not given.replacement and getattr(given, "_num_samples", 0) is None


def job_store() -> Any:
    """The `torch.distributed.Store` of the running job, on a new connection; None if the job has none (MPI)."""
    from torch.distributed import distributed_c10d

    find = getattr(distributed_c10d, "_get_default_store", None)
    store = None if find is None else find()
    clone = getattr(store, "clone", None)  # torch 2.6 brought it
    return store if clone is None else clone()


def pinned(batch: Any) -> Any:
    """A batch in page-locked memory."""
    return cast(Any, pinning).pin_memory(batch)


def _names_in(kind: Any, method: str) -> set[str]:
    """The names of attributes that a method reads or sets."""
    code = getattr(getattr(kind, method, None), "__code__", None)
    return set(getattr(code, "co_names", ()))

"""Every private name of torch that this package uses, and what happens without it.

- `DataLoader._iterator`; `_workers`, `_index_queues`, `_shutdown` and `_shutdown_workers` of its iterator over workers.
  Without them, workers end when their iterator is collected, also in a forked process, and killed workers are replaced
  one epoch later.
- `_utils.ExceptionWrapper`: an error with its traceback, for another process. Without it, the import of this module
  fails.
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
import multiprocessing
import os
import queue
import time
import weakref
from collections.abc import Iterator
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
    "ExceptionWrapper",
    "become_worker",
    "collate",
    "default_collate_fn_map",
    "do_when_idle",
    "draws_all_once",
    "idling_context",
    "has_pinned_memory",
    "is_loader_iterator",
    "iterator_of",
    "job_store",
    "pinned",
    "processes_of",
    "set_worker_dataset",
    "shut_down",
    "start_epoch",
    "unwrapped_pipe",
    "version_of",
    "wrapped_error",
]

log = logging.getLogger(__name__)

_TERMINATED_SECONDS = 2.0  # for a worker to end after SIGTERM, which torch's handler obeys at once
_LOCKED_SECONDS = 1.0  # that the thread of a queue may have it locked: microseconds


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


def iterator_of(loader: DataLoader[Any]) -> Any:
    """The iterator of a loader with persistent workers; None if no epoch has begun, or for another loader."""
    return getattr(loader, "_iterator", None)


def processes_of(iterator: Any) -> list[BaseProcess]:
    """The workers of a loader's iterator."""
    return getattr(iterator, "_workers", [])


_iterators: weakref.WeakSet[Any] = weakref.WeakSet()  # of loaders, whose workers are children of this process


def start_epoch(loader: DataLoader[Any]) -> Iterator[Any]:
    """DataLoader's own iterator for a new epoch. In a process that is forked later it has no workers."""
    iterator = DataLoader.__iter__(loader)
    _iterators.add(iterator)
    return iterator


def _disown_workers() -> None:
    # In a forked process. Torch would tell the workers of the parent to end, as soon as the iterator is collected here:
    # the parent would wait for their batches for ever.
    for iterator in list(_iterators):
        vars(iterator).update(_shutdown=True, _workers=[], _index_queues=[])


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disown_workers)


def shut_down(iterator: Any) -> None:
    """End the workers of a loader's iterator, and wait for them. A worker that hangs is terminated."""
    for indices in getattr(iterator, "_index_queues", []):
        _unlock(indices)
    end = getattr(iterator, "_shutdown_workers", None)
    if end is not None:
        end()
    left = [process for process in processes_of(iterator) if process.is_alive()]
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


def has_pinned_memory() -> bool:
    """Whether DataLoader would copy batches to page-locked memory."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6 brought it
    if accelerator is None:
        return torch.cuda.is_available()
    return bool(accelerator.is_available()) and accelerator.current_accelerator().type != "mps"


def wrapped_error(where: str) -> ExceptionWrapper:
    """The error that is being handled, for another process or thread to raise again with its traceback."""
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


def pinned(batch: Any) -> Any:
    """A batch in page-locked memory."""
    return cast(Any, pinning).pin_memory(batch)

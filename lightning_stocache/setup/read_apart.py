"""A process that reads a source, gives one answer, and is thrown away.

It is a worker of a DataLoader, so that a source finds there what it would find in the user's own: `get_worker_info`,
seeds, one thread. A forked process may hang before it has begun: it inherits the locks that other threads of its parent
held in that moment, and CPython 3.11 waits for one of them. It is ended, and another one is forked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stocache.node.waiting import TOLD_SECONDS
from lightning_stocache.torch_internals import shut_down

__all__ = ["NotStartedError", "read_apart", "shared_counts"]

_FORKS = 3


class NotStartedError(RuntimeError):
    """No process could be started."""


def read_apart(
    reading: IterableDataset[bytes],
    method: str,
    waiting: Callable[[], None],
    worker_init_fn: Callable[[int], None] | None = None,
    every: float = TOLD_SECONDS,
) -> bytes:
    """Have another process read.

    Args:
        reading: runs there; the first thing that it yields is the answer.
        method: how the process is started: fork, spawn or forkserver.
        waiting: called here now and then while there is no answer; what it raises ends the wait.
        worker_init_fn: called there with 0 before anything is read.
        every: seconds between two calls of `waiting`, and those that a forked process may take to begin.

    Raises:
        NotStartedError: there is no shared memory, or whatever a start method or a pickle raises.
        TimeoutError: none of three processes that were forked has begun.
        Exception: what is raised there, and what DataLoader says of a process that has died.
    """
    for _ in range(_FORKS if method == "fork" else 1):
        answers, begun = _start(reading, method, worker_init_fn, every)
        try:
            while True:
                try:
                    return cast(bytes, next(answers))
                except RuntimeError as error:
                    if not str(error).startswith("DataLoader timed out"):  # the source's own, or the worker has died
                        raise
                if method == "fork" and not begun:
                    break
                waiting()
        finally:
            shut_down(answers)
    raise TimeoutError(f"none of {_FORKS} processes that were forked to read it has begun")


def _start(
    reading: IterableDataset[bytes], method: str, worker_init_fn: Callable[[int], None] | None, every: float
) -> tuple[Any, torch.Tensor]:
    """The answers of a process, and in shared memory whether it has begun."""
    try:
        begun = shared_counts(1)
        return iter(
            DataLoader(
                reading,
                batch_size=None,
                num_workers=1,
                collate_fn=cast(Any, _as_it_is),
                timeout=every,
                worker_init_fn=partial(_begin, begun, worker_init_fn),
                multiprocessing_context=method,
                generator=torch.Generator(),  # the base seed of the process is not drawn from the user's
            )
        ), begun
    except Exception as error:  # whatever a start method or a pickle raises
        raise NotStartedError(f"{type(error).__name__}: {error}") from error


def shared_counts(number: int) -> torch.Tensor:
    """That many zeros, int64, which a process that is started later shares.

    Raises:
        NotStartedError: there is no shared memory.
    """
    try:
        return cast(torch.Tensor, cast(Any, torch.zeros(number, dtype=torch.int64)).share_memory_())
    except Exception as error:  # it depends on how torch shares memory
        raise NotStartedError(f"{type(error).__name__}: {error}") from error


def _begin(begun: torch.Tensor, worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    begun.fill_(1)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _as_it_is(answer: bytes) -> bytes:
    return answer

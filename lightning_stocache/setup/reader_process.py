"""A process that reads a source, gives one answer, and is thrown away.

It is a worker of a DataLoader, so that a source finds there what it would find in the user's own: `get_worker_info`,
seeds, one thread. A forked process may hang before it has begun: it inherits the locks that other threads of its parent
held in that moment, and has nobody to open them. It is ended then, and another one is forked, at most twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_stocache.node.waiting import TOLD_SECONDS
from lightning_stocache.torch_internals import shut_down

__all__ = ["NotStartedError", "read_apart", "shared_counts"]

log = logging.getLogger(__name__)

_FORKS = 3


class NotStartedError(Exception):
    """No process could be started: there is no shared memory, or what a start method or a pickle has raised."""


def read_apart(
    reader: IterableDataset[bytes],
    method: str,
    on_wait: Callable[[], None],
    worker_init_fn: Callable[[int], None] | None = None,
    seconds: float = TOLD_SECONDS,
) -> bytes:
    """Have another process read.

    Args:
        reader: iterated there; the first thing that it gives is the answer.
        method: how the process is started: fork, spawn or forkserver.
        on_wait: called here after each of these times without an answer; what it raises ends the wait.
        worker_init_fn: called there with 0 before anything is read.
        seconds: between two calls of `on_wait`. One that was forked and has not begun after that time is replaced.

    Raises:
        NotStartedError: no process could be started.
        Exception: what is raised there, and what DataLoader says of a process that has died.
    """
    for forks in range(1, _FORKS + 1):
        answers, begun = _start(reader, method, worker_init_fn, seconds)
        try:
            while True:
                try:
                    return cast(bytes, next(answers))
                except RuntimeError as error:
                    if not str(error).startswith("DataLoader timed out"):  # the source's own, or the worker has died
                        raise
                if method == "fork" and not begun and forks < _FORKS:
                    log.warning(
                        "set-up forks another process: one that was to read samples has not begun for %.0f s. A thread "
                        "of this one may have held a lock when it was forked",
                        seconds,
                    )
                    break
                on_wait()
        finally:
            shut_down(answers)
    raise AssertionError("the last one is not replaced")


def shared_counts(number: int) -> torch.Tensor:
    """That many zeros, int64, in memory that a process which is started later shares.

    Raises:
        NotStartedError: there is none.
    """
    try:
        counts: Any = torch.zeros(number, dtype=torch.int64, device="cpu")  # whatever the user's default device is
        return cast(torch.Tensor, counts.share_memory_())
    except Exception as error:  # it depends on how torch shares memory
        raise NotStartedError(f"{type(error).__name__}: {error}") from error


def _start(
    reader: IterableDataset[bytes], method: str, worker_init_fn: Callable[[int], None] | None, seconds: float
) -> tuple[Any, torch.Tensor]:
    """The answers of a process, and in shared memory whether it has begun."""
    begun = shared_counts(1)
    try:
        return iter(
            DataLoader(
                reader,
                batch_size=None,
                num_workers=1,
                collate_fn=cast(Any, _as_it_is),
                timeout=seconds,
                worker_init_fn=partial(_begin, begun, worker_init_fn),
                multiprocessing_context=method,
                generator=torch.Generator(),  # the base seed of the process is not drawn from the user's
            )
        ), begun
    except Exception as error:  # whatever a start method or a pickle raises
        raise NotStartedError(f"{type(error).__name__}: {error}") from error


def _begin(begun: torch.Tensor, worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    begun.fill_(1)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _as_it_is(answer: bytes) -> bytes:
    return answer

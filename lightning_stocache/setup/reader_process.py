"""A process that reads a source, answers questions about it, and is thrown away.

It is a worker of a DataLoader, so that a source finds there what it would find in the user's own: `get_worker_info`,
seeds, one thread. A forked process may hang before it has begun: it inherits the locks that other threads of its parent
held in that moment, and has nobody to open them. It is ended then, and another one is forked, at most twice.

A question is what the loader's sampler gives, the answer is the loader's batch. The loader draws the next question
before it hands an answer out, when nobody has asked it yet: then None is sent, whose answer is dropped.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.node.waiting import REPORT_SECONDS
from lightning_stocache.torch_internals import shut_down

__all__ = ["NotStartedError", "ReaderProcess", "read_apart", "shared_counts"]

log = logging.getLogger(__name__)

_FORKS = 3


class NotStartedError(Exception):
    """No process could be started: there is no shared memory, or what a start method or a pickle has raised."""


class ReaderProcess:
    """A process that is started at the first question, and answers until it is closed.

    Args:
        reader: what `reader[question]` returns there is the answer; `reader[None]` must be bytes, too.
        method: how the process is started: fork, spawn or forkserver.
        seconds: between two calls of `on_wait`. A process that was forked and has not begun by then is replaced.
    """

    def __init__(self, reader: Dataset[bytes], method: str, seconds: float = REPORT_SECONDS) -> None:
        self._reader, self._method, self._seconds = reader, method, seconds
        self._questions = _Questions()
        self._answers: Any = None

    def ask(self, question: Any, on_wait: Callable[[], None]) -> bytes:
        """The answer to a question.

        Args:
            question: it is pickled.
            on_wait: called here after each `seconds` without an answer; what it raises ends the wait.

        Raises:
            NotStartedError: no process could be started.
            Exception: what is raised there, and what DataLoader says of a process that has died. The process is closed.
        """
        try:
            self._questions.asked = question
            if self._answers is not None:
                self._answer(on_wait)  # to what was sent when nobody had asked
                return self._answer(on_wait)
            for forks in range(1, _FORKS + 1):
                self._questions.asked = question
                begun = self._start()
                try:
                    return self._answer(on_wait, begun if self._method == "fork" and forks < _FORKS else None)
                except _NotBegunError:
                    log.warning(
                        "set-up forks another process: one that was to read samples has not begun for %.0f s. A thread "
                        "of this one may have held a lock when it was forked",
                        self._seconds,
                    )
                    self.close()
            raise AssertionError("the last one is not replaced")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process."""
        answers, self._answers = self._answers, None
        if answers is not None:
            shut_down(answers)

    def _answer(self, on_wait: Callable[[], None], begun: torch.Tensor | None = None) -> bytes:
        """The next answer; a _NotBegunError after a time in which the process was to begin, and has not."""
        while True:
            try:
                return cast(bytes, next(self._answers))
            except RuntimeError as error:
                if not str(error).startswith("DataLoader timed out"):  # the source's own, or the worker has died
                    raise
            if begun is not None and not begun:
                raise _NotBegunError
            on_wait()

    def _start(self) -> torch.Tensor:
        """Start the process, with the question that was asked; in shared memory, whether it has begun."""
        begun = shared_counts(1)
        try:
            self._answers = iter(
                DataLoader(
                    self._reader,
                    batch_size=None,
                    sampler=self._questions,
                    num_workers=1,
                    prefetch_factor=1,
                    collate_fn=cast(Any, _as_it_is),
                    timeout=self._seconds,
                    worker_init_fn=partial(_begin, begun),
                    multiprocessing_context=self._method,
                    generator=torch.Generator(),  # the base seed of the process is not drawn from the user's
                )
            )
        except Exception as error:  # whatever a start method or a pickle raises
            raise NotStartedError(f"{type(error).__name__}: {error}") from error
        return begun


def read_apart(read: Callable[[], Any], method: str, on_wait: Callable[[], None]) -> Any:
    """What a function returns in a process; `method`, `on_wait` and errors are those of `ReaderProcess`."""
    with closing(ReaderProcess(_Called(read), method)) as process:
        return pickle.loads(process.ask(True, on_wait))


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


class _NotBegunError(Exception):
    """A forked process has not begun in time."""


class _Questions:
    """Without end: the question that was asked, once, else None."""

    asked: Any = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        question, self.asked = self.asked, None
        return question


class _Called(Dataset[bytes]):
    """What a function returns, pickled, when it is asked for."""

    def __init__(self, read: Callable[[], Any]) -> None:
        self.read = read

    def __getitem__(self, question: Any) -> bytes:
        return b"" if question is None else pickle.dumps(self.read())


def _begin(begun: torch.Tensor, worker: int) -> None:
    begun.fill_(1)


def _as_it_is(answer: bytes) -> bytes:
    return answer

"""A process that reads sources for set-up, answers questions about them, and then ends.

Many sources open a file at their first read. If the trainer's process read them, all forked workers would share one
file handle with one offset, and the sources could not be sent to spawned workers. Other sources draw from their own
generators, count, or remember. These traces end with the process. It is a worker of a DataLoader over the questions.

Some processes cannot start another: a daemonic process, or one whose source or answer cannot be pickled. Systems
without fork start none by default, because a spawned process would run the user's script again. Then the source is read
in this process, and its reachable attributes and generators are restored.
"""

from __future__ import annotations

import gc
import logging
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.node.processes import REPORT_SECONDS, end_with_parent, why_not_begun
from lightning_stocache.source.generators import Generators, reachable
from lightning_stocache.torch_internals import set_worker_dataset, shut_down

__all__ = ["Child", "NoProcessError", "Subject", "start_method"]

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0  # for one answer: a look at a source takes at least four reads


class NoProcessError(Exception):
    """No process could be started, or its answer cannot be pickled."""


def start_method(chosen: str | None) -> str | None:
    """The start method of a process that reads a source; None if this process reads it."""
    return chosen or ("fork" if sys.platform == "linux" else None)


class Subject(NamedTuple):
    """A source, and the function that answers questions about it.

    Args:
        answer: called with the arguments of each question.
        source: the user's dataset, for `get_worker_info`.
        title: title of the source, for messages.
    """

    answer: Callable[..., Any]
    source: Any
    title: str


class Child:
    """A process that starts at the first question, and answers until it is closed.

    Args:
        subjects: the sources that the process reads: to start and to end a process takes 30 ms.
        method: start method; None: this process reads the source.
        init: the user's `worker_init_fn`.
        must: whether the process must read the source, however long that takes. Otherwise this process reads it if no
            other can be started, and a source that takes too long is an error.
    """

    def __init__(
        self,
        subjects: Sequence[Subject],
        method: str | None,
        *,
        init: Callable[[int], None] | None = None,
        must: bool = False,
    ) -> None:
        self._subjects, self._answers, self._method, self._must = subjects, _Answers(subjects, init), method, must
        self._questions = list[bytes]()
        self._process: Any = None

    def ask(self, *question: Any, number: int = 0) -> Any:
        """Ask a question about subject `number`. After an error the next question goes to a new process.

        Raises:
            NoProcessError: (`must`) no process could be started, or its answer cannot be pickled.
            ChildProcessError: the source took too long, or the process has died.
            Exception: the error of `answer`.
        """
        answer, source, title = self._subjects[number]
        if self._method is not None:
            try:
                return self._ask_process(title, (number, question))
            except BaseException as error:
                self.close()
                if self._must or not isinstance(error, NoProcessError):
                    raise
                log.debug("%s is read in this process: %s", title, error)
        with _put_back(source):
            return answer(*question)

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            shut_down(process)

    def _ask_process(self, title: str, question: tuple[int, tuple[Any, ...]]) -> Any:
        try:
            self._questions[:] = [pickle.dumps(question)]
            if self._process is None:
                self._loader: DataLoader[bytes] = DataLoader(
                    self._answers,
                    None,
                    sampler=self._questions,
                    num_workers=1,
                    timeout=REPORT_SECONDS,
                    worker_init_fn=self._answers.begin,
                    multiprocessing_context=self._method,
                    generator=torch.Generator(),  # else the process-wide one would move
                    persistent_workers=True,
                )
            self._process = iter(self._loader)
        except Exception as error:  # whatever a start method or a pickle raises
            raise NoProcessError(f"{type(error).__name__}: {error}") from error
        begun, warned = time.monotonic(), False
        while True:
            try:
                word, content = pickle.loads(next(self._process))
                break
            except RuntimeError as error:  # of the DataLoader
                if not str(error).startswith("DataLoader timed out"):
                    why = why_not_begun(str(self._method))
                    raise ChildProcessError(f"{error}{f'. {why}' if why else ''}") from None
            if not self._must and time.monotonic() - begun > PATIENCE_SECONDS:
                raise ChildProcessError(f"reading it has not ended in {PATIENCE_SECONDS:.0f} s")
            if not warned:
                log.warning("set-up waits for %s: it reads a few samples to learn what they are", title)
            warned = True
        if word == "raises":
            raise content
        return content


class _Answers(Dataset[bytes]):
    """The answers to pickled questions, pickled."""

    def __init__(self, subjects: Sequence[Subject], init: Callable[[int], None] | None) -> None:
        self._subjects, self._init = subjects, init

    def begin(self, worker: int) -> None:
        """Prepare the process."""
        end_with_parent()
        gc.freeze()  # a collection would copy every page of the trainer's objects that the process shares

    def __getitem__(self, asked: Any) -> bytes:
        try:
            number, question = pickle.loads(asked)
            subject = self._subjects[number]
            set_worker_dataset(subject.source)
            init, self._init = self._init, None
            if init is not None:
                init(0)
            outcome = "gives", subject.answer(*question)
        except Exception as error:  # the source is the user's, and may raise anything
            outcome = "raises", _sendable(error)
        try:
            return pickle.dumps(outcome)
        except Exception as error:  # whatever pickle raises of a class that other processes cannot find
            return pickle.dumps(("raises", NoProcessError(f"{type(error).__name__}: {error}")))


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note, or a RuntimeError if it cannot be pickled."""
    error.add_note(f"In the process that read it:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


@contextmanager
def _put_back(source: Any) -> Iterator[None]:
    """Restore the attributes of the objects that can be reached from a source, and its generators."""
    attributes = [
        (names, dict(names))
        for _, node in reachable(source)
        if not isinstance(node, type | FunctionType) and type(names := getattr(node, "__dict__", None)) is dict
    ]
    try:
        with Generators(source):
            yield
    finally:
        for names, before in attributes:
            # By identity: two arrays that are compared have no single truth value.
            if names.keys() != before.keys() or any(names[name] is not value for name, value in before.items()):
                names.clear()
                names.update(before)

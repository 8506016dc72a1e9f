"""A process that reads a source for set-up, answers questions about it, and is thrown away.

Many sources open a file when they are first read, so that each worker has a handle of its own. Read in the trainer's
process, they would hand all forked workers one handle with one offset, and could not be sent to spawned ones. Others
draw from generators of their own, count, or remember. Here nothing of that is left in the trainer.

The process is like a worker of a DataLoader, so that a source finds there what it would find in the user's own:
`get_worker_info`, one thread, the same start method. It sends one message when it begins, one before each read, and one
with each answer. A forked process may hang before it begins: it inherits the locks that other threads of its parent
held at that moment, and nobody opens them. It is replaced, at most twice.

Where no process can be started (a daemonic process; what cannot be pickled, under spawn), and where the trainer reads
the source itself and nothing can be forked (macOS), the caller reads in its own process.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

import torch

from lightning_stocache.node.processes import REPORT_SECONDS, end_with_parent, why_not_begun
from lightning_stocache.torch_internals import become_worker

__all__ = ["Child", "NoAnswerError", "Told", "start_method"]

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 30.0  # without a read that ends
_MOST_REPLACED = 2
_END_SECONDS = 2.0  # for a process to end by itself, or once it is killed

Told: TypeAlias = Callable[[int], None]
"""Is told the index of a sample before it is read, -1 where it has none."""


class NoAnswerError(Exception):
    """No process could be started, or its answer cannot be pickled: the question is for this process."""


def start_method(chosen: str | None = None) -> str | None:
    """How a process is started that reads a source; None where the source is read in this process.

    Where nobody has chosen and nothing can be forked, a spawned process would run the user's script again.
    """
    return chosen or ("fork" if sys.platform == "linux" else None)


class Child:
    """A process that is started at the first question, and answers until it is closed.

    Args:
        answer: is called there with each question and a `Told`.
        source: the user's dataset, for `get_worker_info`.
        method: how the process is started: fork, spawn or forkserver.
        title: what is read, for messages.
        gives_up: whether a source is given up after half a minute without a read that ends.
    """

    def __init__(
        self, answer: Callable[[Any, Told], Any], source: Any, method: str, title: str, *, gives_up: bool = True
    ) -> None:
        self._answer, self._source, self._method = answer, source, method
        self._title, self._gives_up = title, gives_up
        self._process: BaseProcess | None = None
        self._pipe: Any = None
        self._begun = False

    def ask(self, question: Any = None) -> Any:
        """The answer to a question. After an error the process is closed.

        Raises:
            NoAnswerError: no process could be started, or its answer cannot be pickled.
            TimeoutError: the source is given up.
            ChildProcessError: the process has died.
            Exception: what `answer` raises there.
        """
        try:
            if self._process is None:
                self._begin()
            with suppress(ConnectionError):  # it has died, which is told next
                self._pipe.send_bytes(pickle.dumps(question))
            return self._receive()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process. One that hangs in a system call which no signal ends is left."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ConnectionError):
            self._pipe.send_bytes(b"")
        process.join(_END_SECONDS if self._begun else 0)
        if process.is_alive():
            process.kill()
            process.join(_END_SECONDS)
        self._pipe.close()
        if not process.is_alive():
            process.close()

    def _begin(self) -> None:
        for _ in range(_MOST_REPLACED if self._method == "fork" else 0):
            self._start()
            if self._pipe.poll(REPORT_SECONDS):
                return
            log.warning(
                "set-up forks another process: one that was to read samples has not begun for %.0f s. A thread of this "
                "one may have held a lock when it was forked",
                REPORT_SECONDS,
            )
            self.close()
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context(self._method)
        self._begun = False
        self._pipe, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, self._answer, self._source), daemon=True)
        try:
            process.start()
        except Exception as error:  # whatever a start method or a pickle raises
            self._pipe.close()
            raise NoAnswerError(f"{type(error).__name__}: {error}") from error
        finally:
            theirs.close()
        self._process = process

    def _receive(self) -> Any:
        """Wait for the answer, and say so after ten seconds; again and again where nothing is given up."""
        assert self._process is not None
        sample, last, told = "sample 0", time.monotonic(), False
        due = last + REPORT_SECONDS
        while True:
            if wait([self._pipe, self._process.sentinel], max(due - time.monotonic(), 0)):
                word, content = self._message()
                if word == "gives":
                    return content
                if word == "raises":
                    raise content
                if word == "reads":
                    sample = "its next sample" if content < 0 else f"sample {content}"
                last = time.monotonic()
            if time.monotonic() < due:
                continue
            due += REPORT_SECONDS
            if self._gives_up and time.monotonic() - last > PATIENCE_SECONDS:
                raise TimeoutError(f"reading {sample} has not ended in {PATIENCE_SECONDS:.0f} s")
            if not told or not self._gives_up:
                words = "set-up waits for %s: it reads a few samples to learn what they are, now %s"
                log.warning(words, self._title, sample)
            told = True

    def _message(self) -> tuple[str, Any]:
        assert self._process is not None
        try:
            if self._pipe.poll():
                message: tuple[str, Any] = pickle.loads(self._pipe.recv_bytes())
                self._begun = True
                return message
        except (EOFError, ConnectionError):
            pass
        self._process.join(_END_SECONDS)
        code = self._process.exitcode or 0
        if not self._begun and (why := why_not_begun(self._method)):
            raise ChildProcessError(f"the process that was to read it ended before it began. {why}")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        raise ChildProcessError(f"the process that was reading it exited unexpectedly ({how})")


def _serve(pipe: Connection, answer: Callable[[Any, Told], Any], source: Any) -> None:
    """In the process: answer questions until an empty one comes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the trainer's, which ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # Lightning's handler would end the other ranks
    end_with_parent()
    torch.set_num_threads(1)
    become_worker(0, 1, random.SystemRandom().getrandbits(31), source)

    def tell(word: str, content: Any = None) -> None:
        pipe.send_bytes(pickle.dumps((word, content)))

    tell("begins")
    while question := pipe.recv_bytes():
        try:
            outcome = "gives", answer(pickle.loads(question), lambda index: tell("reads", index))
        except Exception as error:  # the source is the user's, and may raise anything
            outcome = "raises", _sendable(error)
        try:
            tell(*outcome)
        except Exception as error:  # whatever pickle raises of a class that other processes cannot find
            tell("raises", NoAnswerError(f"{type(error).__name__}: {error}"))


def _sendable(error: Exception) -> Exception:
    """The error with its traceback as a note; a RuntimeError in its place where pickle refuses it."""
    error.add_note(f"In the process that read it:\n{''.join(traceback.format_exception(error))}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error

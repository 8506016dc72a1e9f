"""A process that reads sources for set-up, answers questions about them, and then ends.

Reading leaves traces: many sources open a file at their first read, others draw from generators of their own, count, or
remember. These traces end with the process. It starts as the workers of the loader do.

1. The process starts at the first question. A forked process gets open files of its own (`node/isolation`), so that it
   moves no position of the trainer's and takes none of its messages. A spawned process cannot read the pipes, sockets
   and queues that come with the source. Parallel loops have as many threads as in the process that will read the
   source, so that floating-point numbers have the same bits.
2. Question and answer are one pickle each, on one pipe. While no answer comes, the forked process is looked at: if all
   of its threads wait for a thread that a fork does not have, it is ended (`node/hang`).
3. `close` kills the process. It ends with the trainer, too.

Where the process cannot read a source, and the loader has no workers, this process reads it, as it will in training.
Attributes, containers, positions in files and generators are put back. It does not do so

- if the source reads from a pipe, a socket or a queue: what it takes there cannot be put back;
- if the process has died, or has taken too long.

A source that fails in a forked process and hides that gives samples that it never gives in training. `is_certain` says
whether samples of the process may be stored.

Some systems and processes cannot start another one: without fork, set-up starts none, because a spawned process would
run the user's script again; a daemonic process has no children; a source or an answer may have no pickle. Then this
process reads the source, whatever the loader has.
"""

from __future__ import annotations

import errno
import gc
import logging
import multiprocessing
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from functools import partial
from multiprocessing import connection, pool, queues
from typing import Any, ClassVar, NamedTuple

import torch

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.node.errors import text_of, trace_of
from lightning_stocache.node.hang import LOOK_SECONDS, HangWatch
from lightning_stocache.node.isolation import File, descriptors, end_openmp_threads, end_with_creator, isolate
from lightning_stocache.node.processes import REPORT_SECONDS, end_with_parent, other_threads, why_not_begun
from lightning_stocache.node.segment import open_descriptors
from lightning_stocache.source.generators import Generators, claim_threads
from lightning_stocache.source.probe import attributed
from lightning_stocache.source.snapshot import Snapshot
from lightning_stocache.source.walk import reachable
from lightning_stocache.torch_internals import become_worker

__all__ = ["HungError", "NoProcessError", "Reader", "Subject", "UnsharedError", "start_method"]

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 120.0  # for one answer: a look at a source takes at least four reads
_END_SECONDS = 10.0  # for a killed process to end: on a busy machine, or while it waits for a disk
_WAY_OUT = 'To cache it, give its loader workers and multiprocessing_context="forkserver" or "spawn"'
_WAY_TO_SHARE = "To cache it, let each process open its own at its first read"
_HANGS = "it hangs in a forked process, where it waits for a thread that only this process has"
_TAKES = "it reads from a pipe, a socket or a queue, and what set-up took there would be missing in training"
_QUEUES = (queue.Queue, queue.SimpleQueue, queues.Queue, queues.SimpleQueue, connection.Connection, socket.socket)
_THREADS = (threading.Thread, Executor, pool.Pool)
_ASKED = (Executor, pool.Pool, logging.Logger)  # their queues carry what a read puts there itself


class NoProcessError(Exception):
    """No process could be started, or its answer cannot be pickled."""


class HungError(ChildProcessError):
    """The process can never answer: its threads wait for one that it does not have."""


class UnsharedError(ChildProcessError):
    """The source reads from a pipe, a socket or a queue, which set-up must leave alone."""


def start_method(chosen: str | None) -> str | None:
    """The start method of a process that reads a source; None if this process reads it."""
    return chosen or ("fork" if sys.platform == "linux" else None)


class Subject(NamedTuple):
    """A source, and the function that answers questions about it.

    Args:
        answer: called with the arguments of each question.
        source: the user's dataset, for `get_worker_info`.
        title: title of the source, for messages.
        has_workers: whether workers read it in training, not this process.
        is_iterator: whether it is its own iterator, which this process never reads at set-up.
        way_out: advice on a source that a forked process, or this one, cannot read.
    """

    answer: Callable[..., Any]
    source: Any
    title: str
    has_workers: bool = False
    is_iterator: bool = False
    way_out: str = _WAY_OUT

    def reply(self, question: Sequence[Any]) -> Any:
        """The answer to a question.

        Raises:
            FaultError: this package has raised an error in its own code.
            Exception: the error of the source.
        """
        try:
            return self.answer(*question)
        except Exception as error:
            failure = attributed(error)
            raise failure from (None if failure is error else error)


class Reader:
    """A process that starts at the first question, and answers until it is closed.

    Args:
        subjects: the sources that the process reads: to start and to end a process takes 30 ms.
        method: start method; None: this process reads the sources.
        init: the user's `worker_init_fn`.
        must: whether the process must read the source, however long that takes. Otherwise a source that takes too long
            is an error, and this process may read it instead.
    """

    hung: ClassVar[set[bool]] = set()
    """Whether sources that have hung in a fork had workers. In this job, no source without workers is read in a fork
    after one of them has hung, and none with workers after one of those."""

    _pipes: ClassVar[set[int]] = set()  # descriptors of all readers of this process

    def __init__(
        self,
        subjects: Sequence[Subject],
        method: str | None,
        *,
        init: Callable[[int], None] | None = None,
        must: bool = False,
    ) -> None:
        self._subjects, self._method, self._init, self._must = subjects, method, init, must
        self._process: Any = None
        self._pipe: Any = None
        self._read_here = set[int]()  # the numbers of subjects
        self._missing = set[str]()  # what this process can use and the forked process cannot

    def ask(self, *question: Any, number: int = 0) -> Any:
        """Ask a question about subject `number`. After an error the next question goes to a new process.

        Raises:
            NoProcessError: (`must`) no process could be started, or its answer cannot be pickled.
            HungError: the source hangs in a forked process.
            UnsharedError: the source reads from a pipe, a socket or a queue.
            ChildProcessError: the source took too long, the process has died, or this process, which read the source
                instead, cannot put its state back.
            Exception: the error of `answer`.
        """
        subject = self._subjects[number]
        if self._method is None and subject.is_iterator:
            raise NoProcessError("it is its own iterator, and no process can be started that would read it for set-up")
        if self._method is None or number in self._read_here:
            return _answer_here(subject, question)
        try:
            return self._ask_process(number, question)
        except BaseException as error:
            self.close()
            if self._must or subject.is_iterator or not isinstance(error, Exception):
                raise
            refusal = _refusal(subject, error, is_certain=not self._missing)
            if refusal is not None:
                raise refusal from (None if refusal is error else error)
            log.debug("%s is read in this process: %s", subject.title, text_of(error))  # a log may keep the error
        self._read_here.add(number)
        return _answer_here(subject, question)

    def is_certain(self, number: int = 0, *, by_reach: bool = False) -> bool:
        """Whether the samples of subject `number` are certainly those of the training.

        They are not if reading may have failed in the process alone, which the source may hide: a pipe or a socket was
        replaced, or this process has another thread.

        Args:
            number: the number of the subject.
            by_reach: whether only a pipe, a socket, a queue or a thread counts that can be reached from the source.
                It may use others by numbers or through libraries in C.
        """
        if not self._missing or number in self._read_here:
            return True
        return by_reach and not _reached(self._subjects[number].source, (*_QUEUES, *_THREADS))

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.join(_END_SECONDS)
        self._pipes.discard(self._pipe.fileno())
        self._pipe.close()

    def _ask_process(self, number: int, question: tuple[Any, ...]) -> Any:
        subject = self._subjects[number]
        if not self._must and _has_remote_queue(subject.source):
            raise UnsharedError(_TAKES)
        if self._method == "fork" and not self._must and subject.has_workers in self.hung:
            words = "an earlier source hung in a forked process: this one is not read in a fork"
            raise HungError(f"{words}. {subject.way_out}")
        try:
            message = pickle.dumps((number, question))
            if self._process is None:
                self._start()
        except Exception as error:  # whatever a start method or a pickle raises
            raise NoProcessError(f"{type(error).__name__}: {text_of(error)}") from error
        try:
            self._pipe.send_bytes(message)
            self._wait(subject)
            value, failure, missing = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, ConnectionError):
            raise self._end() from None
        except HungError:
            self.hung.add(subject.has_workers)
            raise
        self._missing.update(missing)
        if self._missing:
            log.debug("no sample of %s is stored at set-up, because of %s", subject.title, sorted(self._missing))
        if failure is not None:
            raise failure
        return value

    def _start(self) -> None:
        is_forked, threads = self._method == "fork", torch.get_num_threads()
        if is_forked:
            self._missing.update(thread.name for thread in other_threads())
            if threads > 1 and not end_openmp_threads():
                threads = 1  # a parallel loop would wait for the pool, which the fork does not have
        shared, kept = descriptors(), open_descriptors() | self._pipes
        parent: Any = multiprocessing.parent_process()
        if parent is not None:
            kept.add(parent.sentinel)
        ours, theirs = multiprocessing.Pipe()
        if is_forked:
            prepare = partial(_begin_fork, os.getpid(), ours.fileno(), shared, kept)
        else:
            prepare = partial(_begin_spawned, [] if self._must else [subject.source for subject in self._subjects])
        context: Any = multiprocessing.get_context(self._method)
        arguments = (theirs, self._subjects, self._init, prepare, threads)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of a fork beside threads
                process.start()
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        self._process, self._pipe = process, ours
        self._pipes.add(ours.fileno())

    def _wait(self, subject: Subject) -> None:
        """Wait for an answer, or for the end of the process."""
        watch = HangWatch(self._process.pid) if self._method == "fork" else None
        begun, warned = time.monotonic(), False
        while not self._pipe.poll(LOOK_SECONDS) and self._process.is_alive():
            if watch is not None and watch.look():
                raise HungError(f"{_HANGS}. {subject.way_out}")
            seconds = time.monotonic() - begun
            if seconds > PATIENCE_SECONDS and not self._must:
                raise ChildProcessError(f"reading it has not ended in {PATIENCE_SECONDS:.0f} s")
            if seconds > REPORT_SECONDS and not warned:
                log.warning("set-up waits for %s: it reads a few samples to learn what they are", subject.title)
                warned = True

    def _end(self) -> ChildProcessError:
        """The error of a process that has died."""
        self._process.join(_END_SECONDS)
        code, why = self._process.exitcode, why_not_begun(str(self._method))
        how = f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
        return ChildProcessError(f"the process that read it ({how}) exited unexpectedly{f'. {why}' if why else ''}")


# ---- in this process ----


def _answer_here(subject: Subject, question: tuple[Any, ...]) -> Any:
    """Answer a question in this process, and put back what reading has moved.

    Raises:
        UnsharedError: the source has a pipe, a socket or a queue, which cannot be put back.
        ChildProcessError: a state cannot be put back.
        Exception: the error of `answer`.
    """
    if _has_queue(subject.source) or _has_remote_queue(subject.source):
        raise UnsharedError(f"{_TAKES}. {_WAY_TO_SHARE}")
    snapshot = Snapshot(subject.source)
    try:
        with Generators(subject.source):
            answer = subject.reply(question)
    except BaseException:
        snapshot.put_back()
        raise
    place = snapshot.put_back()
    if place is not None:
        raise ChildProcessError(f"reading it moves {place}, which set-up cannot put back. {subject.way_out}")
    return answer


def _refusal(subject: Subject, error: Exception, is_certain: bool) -> Exception | None:
    """The error to raise instead of reading a source in this process; None if this process may read it."""
    if isinstance(error, NoProcessError):
        return None
    if isinstance(error, UnsharedError):
        return UnsharedError(f"{error}. {_WAY_TO_SHARE}")
    is_hung = isinstance(error, HungError)
    was_read = isinstance(error, UnsupportedSampleError | SampleMismatchError)
    has_ended = isinstance(error, ChildProcessError) and not is_hung
    is_shared = not subject.has_workers or not is_certain
    if was_read or has_ended or not is_shared or (is_hung and subject.has_workers):
        return error
    if _has_queue(subject.source):
        return UnsharedError(f"{_TAKES} ({type(error).__name__}: {text_of(error)}). {_WAY_TO_SHARE}")
    return error if subject.has_workers else None


def _has_queue(source: Any) -> bool:
    """Whether a source reaches a pipe, a socket or a queue, apart from those of an executor."""
    asked = tuple(f"{where}." for where, _ in _reached(source, _ASKED))
    return any(not where.startswith(asked) for where, _ in _reached(source, _QUEUES))


def _has_remote_queue(source: Any) -> bool:
    """Whether a source reaches a queue of a `multiprocessing.Manager`: each process has its own connection to it."""
    managers: Any = sys.modules.get("multiprocessing.managers")
    if managers is None:
        return False
    return any("Queue" in type(proxy).__name__ for _, proxy in _reached(source, (managers.BaseProxy,)))


def _reached(source: Any, kinds: tuple[type, ...]) -> list[tuple[str, Any]]:
    """The objects of some classes that a source reaches, and where they lie."""
    return [(where, node) for where, node in reachable(source) if issubclass(type(node), kinds)]


# ---- in the process ----


def _serve(
    pipe: connection.Connection,
    subjects: Sequence[Subject],
    init: Callable[[int], None] | None,
    prepare: Callable[[], list[str]],
    threads: int,
) -> None:
    """Answer questions until the pipe ends.

    An answer is the result, or the error instead of it, and what the process cannot read although the source may
    need it.

    Args:
        pipe: carries questions and answers.
        subjects: the sources.
        init: the user's `worker_init_fn`.
        prepare: called before anything is read. Returns what the trainer can read and this process cannot.
        threads: threads for parallel loops; a loader's workers have one.
    """
    claim_threads()
    try:
        missing = prepare()
    except OSError as error:  # no descriptor is left
        pipe.recv_bytes()
        pipe.send_bytes(pickle.dumps((None, NoProcessError(f"{type(error).__name__}: {error}"), [])))
        return
    last = None
    try:
        while True:
            number, question = pickle.loads(pipe.recv_bytes())
            subject = subjects[number]
            if number != last:
                torch.set_num_threads(1 if subject.has_workers else threads)
                last = number
            pipe.send_bytes(_answer(subject, question, init, missing))
            init = None
    except (EOFError, OSError, KeyboardInterrupt):  # the trainer has gone, or ends
        return


def _begin_fork(parent: int, pipe: int, shared: Mapping[int, File], kept: set[int]) -> list[str]:
    """Prepare a forked process. Returns what its parent can read and it cannot.

    Args:
        parent: process id of the parent.
        pipe: the parent's descriptor of the pipe.
        shared: the parent's descriptors before it made the pipe, with their files.
        kept: those that stay shared.
    """
    os.close(pipe)
    if not end_with_creator(parent):
        end_with_parent()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the handlers are the trainer's
    missing = isolate(shared, kept)
    gc.freeze()  # a collection would copy every page of the trainer's objects that the process shares
    return missing


def _begin_spawned(sources: Sequence[Any]) -> list[str]:
    """Prepare a process that is not forked. Returns what its parent can read and it cannot.

    Args:
        sources: their pipes, sockets and queues, which came with them, become descriptors on which reads fail.
    """
    end_with_parent()
    numbers = set[int]()
    for source in sources:
        for _, node in _reached(source, (connection.Connection, socket.socket)):
            with suppress(OSError):  # it is closed
                numbers.add(node.fileno())
    return isolate({number: file for number, file in descriptors().items() if number in numbers})


def _answer(
    subject: Subject, question: tuple[Any, ...], init: Callable[[int], None] | None, missing: list[str]
) -> bytes:
    value, error = None, None
    try:
        become_worker(0, 1, torch.Generator().initial_seed(), subject.source)
        if init is not None:
            init(0)
        value = subject.reply(question)
    except Exception as raised:  # the source is the user's, and may raise anything
        error = _sendable(raised, bool(missing))
    try:
        return pickle.dumps((value, error, missing))
    except Exception as raised:  # whatever pickle raises of a class that other processes cannot find
        return pickle.dumps((None, NoProcessError(f"{type(raised).__name__}: {text_of(raised)}"), missing))


def _sendable(error: Exception, is_shared: bool) -> Exception:
    """The error with its traceback as a note, or another error if it cannot be pickled."""
    if is_shared and _has_bad_descriptor(error):
        return UnsharedError(f"{_TAKES} ({type(error).__name__}: {text_of(error)})")
    error.add_note(f"In the process that read it:\n{trace_of(error)}")
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {text_of(error)}")
    return error


def _has_bad_descriptor(error: BaseException | None) -> bool:
    """Whether an error comes from a descriptor that was replaced."""
    while error is not None:
        if isinstance(error, OSError) and error.errno == errno.EBADF:
            return True
        error = error.__context__ if error.__cause__ is None else error.__cause__
    return False

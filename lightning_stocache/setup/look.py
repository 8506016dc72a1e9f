"""The look at a source before its cache opens: what a sample looks like, and what of the source is random.

A source is read where its loader would read it. Many open a file when they are first read, so that each worker has a
handle of its own; read in the trainer's process, they would hand all forked workers one handle with one offset, and
could not be sent to spawned ones. Others draw from generators of their own, count, or remember. So the look happens in
a worker process, started as the loader starts its own, which is thrown away when the caches are open: nothing that it
opened, drew or assigned is left in the trainer. Where none can be started (a daemonic process; what cannot be pickled,
under spawn), the source is read here, and the attributes and generators that can be reached from it are put back. So it
is where the trainer reads the source itself and nothing can be forked (macOS): a spawned process would run the user's
script again.

A source that blocks is given up after half a minute without a read that has ended, not counting the time in which
processes that do not begin are replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.cache.field import UnsupportedSampleError
from lightning_stocache.cache.spec import SampleMismatchError
from lightning_stocache.node.parent import why_not_begun
from lightning_stocache.node.waiting import TOLD_SECONDS
from lightning_stocache.setup.finding import Finding, Reading
from lightning_stocache.setup.reader_process import NotStartedError, ReaderProcess, shared_counts
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.generators import Generators, owned_generators, reachable
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["SourceReader"]

log = logging.getLogger(__name__)

_UNSENDABLE = b""
PATIENCE_SECONDS = 30.0  # without a read that has ended


class SourceReader:
    """Reads the source of a request, in a process that lives from the first read until this is closed.

    Args:
        request: whose source.
    """

    def __init__(self, request: CacheRequest) -> None:
        self.request = request
        self._process: ReaderProcess | None = None
        self._progress = torch.empty(0)  # int64 [2] in shared memory: how many reads have begun, the index of the last
        self._here: Reading | None = None
        self._ended = False

    def look(self) -> Finding:
        """Look at the source.

        Raises:
            UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
            SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
            Exception: (`strict`) what the source itself raises.
        """
        request = self.request
        if request.spec is not None:
            return Finding(request.spec)
        if not request.length:
            return Finding(reason="it has no samples")
        try:
            return cast(Finding, self._asked("find"))
        except Exception as error:  # the source is the user's, and may raise anything
            if request.strict:
                raise
            return Finding(reason=_words(error))

    def read(self, found: Finding, indices: Sequence[int], *, again: bool = False) -> dict[int, list[bytes]]:
        """Samples of some indices, encoded, as far as they can be had; see `Reading.contents`."""
        if self._ended or not indices:
            return {}
        try:
            return cast("dict[int, list[bytes]]", self._asked("contents", found, tuple(indices), again))
        except Exception as error:  # likewise
            log.debug("%s cannot be read: %s", self.request.title, error)
            return {}

    def close(self) -> None:
        """End the process."""
        self._ended = True
        if self._process is not None:
            self._process.close()

    def _asked(self, *question: Any) -> Any:
        """What a `Reading` answers: in its process, or here where none can be started, or where it cannot tell."""
        answer = _UNSENDABLE if self._here is not None else self._answer(pickle.dumps(question))
        if answer != _UNSENDABLE:
            return pickle.loads(answer)
        if self._here is None:
            self._here = Reading(self.request)
        with _put_back(self.request.source):
            return getattr(self._here, question[0])(*question[1:])

    def _answer(self, question: bytes) -> bytes:
        """The answer of another process, pickled."""
        request = self.request
        if (method := _start_method(request.reader)) is None:
            return _UNSENDABLE
        begun, last, told = time.monotonic(), -1, False

        def on_wait() -> None:
            nonlocal begun, last, told
            reads, index = self._progress.tolist()
            if reads != last:
                begun, last = time.monotonic() - TOLD_SECONDS, reads
            if time.monotonic() - begun > PATIENCE_SECONDS:
                raise TimeoutError(f"reading sample {index} has not ended in {PATIENCE_SECONDS:.0f} s")
            if not told:
                log.warning(
                    "set-up waits for %s: it reads a few samples to learn their shape, now sample %d",
                    request.title,
                    index,
                )
            told = True

        try:
            if self._process is None:
                self._progress = shared_counts(2)
                user_init_fn = None if request.reader is None else request.reader.worker_init_fn
                asked = _Asked(request, self._progress)
                self._process = ReaderProcess(asked, method, partial(_begin, user_init_fn), TOLD_SECONDS)
            return self._process.ask(question, on_wait)
        except NotStartedError as error:
            log.debug("no process can be started to look at %s (%s): it is read here", request.title, error)
            return _UNSENDABLE
        except RuntimeError as error:
            self._ended = True
            why = why_not_begun(method)
            if why and not int(self._progress[0]) and "exited unexpectedly" in str(error):
                raise ChildProcessError(f"the process that was to read it ended before it began. {why}") from error
            raise
        except BaseException:
            self._ended = True
            raise


class _Asked(Dataset[bytes]):
    """Reads a source in a worker. A question is a method of `Reading` with its arguments, the answer one pickle.

    Args:
        request: whose source.
        progress: int64 `[2]` in shared memory: how many reads have begun, and the index of the last.
    """

    def __init__(self, request: CacheRequest, progress: torch.Tensor) -> None:
        self.request, self.progress = request, progress
        self._reading: Reading | None = None

    def __getitem__(self, question: bytes | None) -> bytes:
        if question is None:
            return _UNSENDABLE
        if self._reading is None:
            self._reading = Reading(self.request, self._told)
        method, *arguments = pickle.loads(question)
        try:
            answer = getattr(self._reading, method)(*arguments)
            if isinstance(answer, Finding):
                answer = replace(answer, worker_bytes=_private_bytes())
        except Exception as error:  # as in `look`
            if self.request.strict or method != "find":
                raise
            answer = Finding(reason=_words(error))
        try:
            return pickle.dumps(answer)
        except Exception:  # a sample of a class that other processes cannot find: whatever pickle raises then
            return _UNSENDABLE

    def _told(self, index: int) -> None:
        self.progress += torch.tensor([1, index - int(self.progress[1])])


def _start_method(loader: LoaderSettings | None) -> str | None:
    """How the worker is started; None where it would have to be sent what is read in the trainer's own process."""
    if loader is not None and loader.num_workers:
        return loader.start_method or multiprocessing.get_start_method()
    return "fork" if sys.platform == "linux" else None


@contextmanager
def _put_back(source: Any) -> Iterator[None]:
    """Give the objects that can be reached from a source their attributes back, and its generators their state."""
    attributes = [
        (names, dict(names))
        for _, node in reachable(source)
        if not isinstance(node, type | FunctionType) and type(names := getattr(node, "__dict__", None)) is dict
    ]
    generators = Generators(owned_generators(source))
    before = generators.state()
    try:
        yield
    finally:
        generators.restore(before)
        for names, kept in attributes:
            if names != kept:
                names.clear()
                names.update(kept)


def _begin(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """What the user's loader does when a worker starts, on the user's own dataset."""
    info: Any = get_worker_info()
    set_worker_dataset(info.dataset.request.source)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _private_bytes() -> int | None:
    """Memory that this process shares with no other; None where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("Private_Clean:", "Private_Dirty:")))


def _words(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, UnsupportedSampleError | SampleMismatchError | TimeoutError | ChildProcessError):
        return str(error)
    lines = str(error).strip().splitlines()
    said = lines[-1] if lines else ""
    return f"reading it raised {said if said.startswith(type(error).__name__) else f'{type(error).__name__}: {said}'}"

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.data import Dataset

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.node.parent import why_not_begun
from lightning_stocache.node.waiting import REPORT_SECONDS
from lightning_stocache.setup.finding import Finding, Reading
from lightning_stocache.setup.reader_process import NotStartedError, ReaderProcess, shared_counts
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.generators import Generators, reachable
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["SourceReader"]

log = logging.getLogger(__name__)

_UNSENDABLE = b""
PATIENCE_SECONDS = 30.0  # without a read that has ended


class SourceReader:
    """Reads the sources of some requests, in a process that lives from the first read until this is closed.

    One process reads all sources whose workers are forked. What is spawned is sent its source alone.

    Args:
        requests: whose sources.
    """

    def __init__(self, requests: Sequence[CacheRequest]) -> None:
        self.requests = requests
        self._processes: dict[int | str, ReaderProcess] = {}  # by number; one for all that are forked
        self._progress = torch.empty(0)  # int64 [2] in shared memory: how many reads have begun, the index of the last
        self._here: dict[int, Reading] = {}
        self._given_up = set[int]()

    def look(self, number: int, known: str = "") -> Finding:
        """Look at the source of the request with this number.

        Args:
            number: of the request.
            known: what was found of it before, see `Reading.find`.

        Raises:
            UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
            SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
            Exception: (`strict`) what the source itself raises.
        """
        request = self.requests[number]
        if request.spec is not None:
            return Finding(request.spec)
        if not request.length:
            return Finding(reason="it has no samples")
        try:
            return cast(Finding, self._asked(number, "find", known))
        except Exception as error:  # the source is the user's, and may raise anything
            if request.strict:
                raise
            return Finding(reason=_words(error))

    def read(self, number: int, found: Finding, indices: Sequence[int], again: bool = False) -> dict[int, list[bytes]]:
        """Samples of a source, encoded, by their index, as far as they can be had; see `Reading.contents`."""
        if number in self._given_up or not indices:
            return {}
        try:
            return cast("dict[int, list[bytes]]", self._asked(number, "contents", found, tuple(indices), again))
        except Exception as error:  # likewise
            log.debug("%s cannot be read: %s", self.requests[number].title, error)
            return {}

    def close(self) -> None:
        """End the process."""
        for process in self._processes.values():
            process.close()

    def _asked(self, number: int, *question: Any) -> Any:
        """What a `Reading` answers: in its process, or here where none can be started, or where it cannot tell."""
        answer = _UNSENDABLE if number in self._here else self._answer(number, pickle.dumps((number, *question)))
        if answer != _UNSENDABLE:
            return pickle.loads(answer)
        request = self.requests[number]
        reading = self._here.setdefault(number, Reading(request))
        with _put_back(request.source):
            return getattr(reading, question[0])(*question[1:])

    def _answer(self, number: int, question: bytes) -> bytes:
        """The answer of another process, pickled."""
        request = self.requests[number]
        if (method := _start_method(request.reader)) is None:
            return _UNSENDABLE
        begun, last, told = time.monotonic(), -1, False

        def on_wait() -> None:
            nonlocal begun, last, told
            reads, index = self._progress.tolist()
            if reads != last:
                begun, last = time.monotonic() - REPORT_SECONDS, reads
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
            if not len(self._progress):
                self._progress = shared_counts(2)
            key = method if method == "fork" else number
            if key not in self._processes:
                requests = dict(enumerate(self.requests)) if method == "fork" else {number: request}
                self._processes[key] = ReaderProcess(_Asked(requests, self._progress), method, seconds=REPORT_SECONDS)
            return self._processes[key].ask(question, on_wait)
        except NotStartedError as error:
            log.debug("no process can be started to look at %s (%s): it is read here", request.title, error)
            return _UNSENDABLE
        except RuntimeError as error:
            self._given_up.add(number)
            why = why_not_begun(method)
            if why and not int(self._progress[0]) and "exited unexpectedly" in str(error):
                raise ChildProcessError(f"the process that was to read it ended before it began. {why}") from error
            raise
        except BaseException:
            self._given_up.add(number)
            raise


class _Asked(Dataset[bytes]):
    """Reads sources in a worker. A question is a number and a method of `Reading` with its arguments, pickled.

    Args:
        requests: whose sources, by their numbers.
        progress: int64 `[2]` in shared memory: how many reads have begun, and the index of the last.
    """

    def __init__(self, requests: Mapping[int, CacheRequest], progress: torch.Tensor) -> None:
        self.requests, self.progress = requests, progress
        self._readings: dict[int, Reading] = {}
        self._first_bytes: int | None = None

    def __getitem__(self, question: bytes | None) -> bytes:
        if question is None:
            return _UNSENDABLE
        number, method, *arguments = pickle.loads(question)
        request = self.requests[number]
        has_workers = request.reader is not None and request.reader.num_workers > 0
        before = _private_bytes() if method == "find" and has_workers else None  # 13 ms where torch is imported
        if self._first_bytes is None:
            self._first_bytes = before
        set_worker_dataset(request.source)
        if number not in self._readings:
            if request.reader is not None and request.reader.worker_init_fn is not None:
                request.reader.worker_init_fn(0)  # as the user's loader does when a worker starts
            self._readings[number] = Reading(request, self._told)
        try:
            answer = getattr(self._readings[number], method)(*arguments)
            if isinstance(answer, Finding):
                answer = replace(answer, worker_bytes=self._worker_bytes(before, self._readings[number].kept_bytes))
        except Exception as error:  # as in `look`
            if request.strict or method != "find":
                raise
            answer = Finding(reason=_words(error))
        try:
            return pickle.dumps(answer)
        except Exception:  # a sample of a class that other processes cannot find: whatever pickle raises then
            return _UNSENDABLE

    def _worker_bytes(self, before: int | None, kept: int) -> int | None:
        """What this process would have for itself if it had read the last source alone, and had kept none of it."""
        if before is None or self._first_bytes is None or (now := _private_bytes()) is None:
            return None
        return max(now - kept - before, 0) + self._first_bytes

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
    try:
        with Generators(source):
            yield
    finally:
        for names, kept in attributes:
            if names != kept:
                names.clear()
                names.update(kept)


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

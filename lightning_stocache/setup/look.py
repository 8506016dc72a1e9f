"""The look at a source before its cache opens: what a sample looks like, and what of the source is random.

A source is read where its loader would read it. Many open a file when they are first read, so that each worker has a
handle of its own; read in the trainer's process, they would hand all forked workers one handle with one offset, and
could not be sent to spawned ones. Others draw from generators of their own, count, or remember. So the look happens in
a worker process, started as the loader starts its own, which is thrown away: nothing that it opened, drew or assigned
is left in the trainer. Where none can be started (a daemonic process; what cannot be pickled, under spawn), the source
is read here, and the attributes and generators that can be reached from it are put back. So it is where the trainer
reads the source itself and nothing can be forked (macOS): a spawned process would run the user's script again.

A source that blocks is given up after half a minute without a read that has ended, not counting the time in which
processes that do not begin are replaced.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any, cast

import torch
from torch.utils.data import IterableDataset, get_worker_info

from lightning_stocache.cache.field import UnsupportedSampleError
from lightning_stocache.cache.spec import SampleMismatchError
from lightning_stocache.node.parent import why_not_begun
from lightning_stocache.node.waiting import TOLD_SECONDS
from lightning_stocache.setup.finding import Finding, find
from lightning_stocache.setup.reader_process import NotStartedError, read_apart, shared_counts
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from lightning_stocache.source.generators import Generators, owned_generators, reachable
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["look"]

log = logging.getLogger(__name__)

_UNSENDABLE = b""
PATIENCE_SECONDS = 30.0  # without a read that has ended


def look(request: CacheRequest) -> Finding:
    """Look at the source of a request.

    Raises:
        UnsupportedSampleError: (`strict`) a sample holds something that cannot be kept as bytes.
        SampleMismatchError: (`strict`, rows) the samples differ in shape, dtype or structure.
        Exception: (`strict`) what the source itself raises.
    """
    if request.spec is not None:
        return Finding(request.spec)
    if not request.length:
        return Finding(reason="it has no samples")
    try:
        finding = _look_apart(request)
        return _look_here(request) if finding is None else finding
    except Exception as error:  # the source is the user's, and may raise anything
        if request.strict:
            raise
        return Finding(reason=_words(error))


class _Looker(IterableDataset[bytes]):
    """Looks at a source in a worker, and answers with one pickle.

    Args:
        request: whose source.
        progress: int64 `[2]` in shared memory: how many reads have begun, and the index of the last.
    """

    def __init__(self, request: CacheRequest, progress: torch.Tensor) -> None:
        self.request, self.progress = request, progress

    def __iter__(self) -> Iterator[bytes]:
        def told(index: int) -> None:
            self.progress += torch.tensor([1, index - int(self.progress[1])])

        try:
            finding = replace(find(self.request, told), worker_bytes=_private_bytes())
        except Exception as error:  # as in `look`
            if self.request.strict:
                raise
            finding = Finding(reason=_words(error))
        try:
            yield pickle.dumps(finding)
        except Exception:  # a sample of a class that other processes cannot find: whatever pickle raises then
            yield _UNSENDABLE


def _look_apart(request: CacheRequest) -> Finding | None:
    """What another process has found; None where none can be started, or where it cannot tell."""
    if (method := _start_method(request.reader)) is None:
        return None
    begun, last, told = time.monotonic(), -1, False

    def on_wait() -> None:
        nonlocal begun, last, told
        reads, index = progress.tolist()
        if reads != last:
            begun, last = time.monotonic() - TOLD_SECONDS, reads
        if time.monotonic() - begun > PATIENCE_SECONDS:
            raise TimeoutError(f"reading sample {index} has not ended in {PATIENCE_SECONDS:.0f} s")
        if not told:
            log.warning(
                "set-up waits for %s: it reads a few samples to learn their shape, now sample %d", request.title, index
            )
        told = True

    try:
        progress = shared_counts(2)
        user_init_fn = None if request.reader is None else request.reader.worker_init_fn
        answer = read_apart(_Looker(request, progress), method, on_wait, partial(_begin, user_init_fn), TOLD_SECONDS)
    except NotStartedError as error:
        log.debug("no process can be started to look at %s (%s): it is read here", request.title, error)
        return None
    except RuntimeError as error:
        why = why_not_begun(method)
        if why and not int(progress[0]) and "exited unexpectedly" in str(error):
            raise ChildProcessError(f"the process that was to read it ended before it began. {why}") from error
        raise
    return None if answer == _UNSENDABLE else cast(Finding, pickle.loads(answer))


def _start_method(loader: LoaderSettings | None) -> str | None:
    """How the worker is started; None where it would have to be sent what is read in the trainer's own process."""
    if loader is not None and loader.num_workers:
        return loader.start_method or multiprocessing.get_start_method()
    return "fork" if sys.platform == "linux" else None


def _look_here(request: CacheRequest) -> Finding:
    with _put_back(request.source):
        return find(request)


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

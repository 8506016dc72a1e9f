"""Reads of a source under given seeds, with the generators that each of them moves.

Two reads of an index under different seeds show that a source is random: a generator has moved, or the bits differ.
They never show that it is not, as long as a generator may be hidden: RandomErasing(p=0.1) leaves four of five pairs
equal, and only its draws betray it.

A stream is read once. Its generators are watched meanwhile (`StreamReader`).
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.node.errors import text_of
from lightning_stocache.source.access import iterate
from lightning_stocache.source.generators import Generators, State
from lightning_stocache.source.samples import Bits, bits, where_different

__all__ = ["FEW", "MANY", "SOME", "Probe", "Read", "StreamReader", "attributed", "spread", "why_random", "words_of"]

FEW = 4
"""Samples on which set-up, a look or a comparison relies where each costs a read and nothing is in doubt."""
SOME = 8
"""Samples that are read where there is a doubt."""
MANY = 32
"""Samples that are read where reading is quick, or where a doubt has to end."""

_PACKAGE = __name__.partition(".")[0]
_LIBRARIES = frozenset({"torch", "numpy", *sys.stdlib_module_names})  # whose code raises for this package and for users
# Functions of this package that call the code of users.
_CALLERS = ("sample", "load", "__getitem__", "__call__", "_called", "read", "decode", "_read", "_look_once")


def spread(among: Any, count: int) -> tuple[int, ...]:
    """Up to `count` of some indices, spread evenly from the first to the last.

    Example:
        >>> spread(range(100), 4), spread([7, 8], 4)
        ((0, 33, 66, 99), (7, 8))
    """
    count = min(count, len(among))
    return tuple(int(among[k * (len(among) - 1) // max(count - 1, 1)]) for k in range(count))


@dataclass(frozen=True)
class Read:
    """One read of an index.

    Args:
        index: the index that was read, or a list of indices.
        sample: the sample, or the list of samples; None if it was compared, and is no longer needed.
        seed: seed of the read.
        bits: bits of the sample.
        moved: names of the generators that the read drew from.
        after: the state of all generators after the read.
        ns: nanoseconds that the source took.
    """

    index: Any
    sample: Any
    seed: int
    bits: Bits
    moved: list[str]
    after: State
    ns: int = 0


class Probe:
    """Reads of one source under given seeds, counted. At the end of a `with` all generators are where they were.

    Args:
        source: the source, whose own generators are watched, too.
    """

    def __init__(self, source: Dataset[Any]) -> None:
        self.generators, self.reads = Generators(source), 0
        self.always: set[str] | None = None
        """The names of the generators that have drawn during each read, for whatever thread."""

    def __enter__(self) -> Probe:
        self.generators.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.generators.__exit__()

    def read(self, source: Any, index: Any, seed: int) -> Read:
        """Read an index of the source, or of a copy with another transform, under a seed. Its errors are raised.

        Of a list of indices, the source reads all in one call. A generator that the first read has made is watched from
        then on.
        """
        self.generators.seed(seed)
        before = self.generators.state()
        begun = time.perf_counter_ns()
        sample = self.sample(source, index, seed)
        ns = time.perf_counter_ns() - begun
        after = self.generators.state()
        changed = set(self.generators.changed(before, after))
        self.always = changed if self.always is None else self.always & changed
        read = Read(index, sample, seed, bits(sample), self.generators.moved(before, after), after, ns)
        if self.reads == 1:
            self.generators.find_new()
        return read

    def sample(self, source: Any, index: Any, seed: int) -> Any:
        """Read an index as a worker with this seed."""
        self.reads += 1
        with _worker_of(seed):
            return source.__getitems__(index) if isinstance(index, list) else source[index]

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[Read, Read]:
        """Read an index under two seeds, which no other index has. Only the second read has its sample."""
        first = replace(self.read(source, index, 2 * index), sample=None)  # samples may be large
        return first, self.read(source, index, 2 * index + 1)


@contextmanager
def _worker_of(seed: int) -> Iterator[None]:
    """Give a worker another seed and number for the time of a read, because sources may draw from these."""
    info: Any = get_worker_info()
    before = {} if info is None else {"seed": info.seed, "id": info.id}
    for name, value in zip(before, (seed, seed % 2), strict=False):
        object.__setattr__(info, name, value)  # its own `__setattr__` refuses
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(info, name, value)


def why_random(first: Read, second: Read) -> str | None:
    """The evidence in words that two reads of an index are random; None if there is none."""
    for read in (first, second):
        if read.moved:
            return f"reading index {read.index} moves the generator of {' and '.join(read.moved)}"
    where = where_different(first.bits, second.bits)
    return None if where is None else f"two reads of index {first.index} differ in sample{where}"


# ---- of streams ----

_SLOW_NS = 1_000_000  # a sample that takes so long is watched in any case: watching takes 0.05 ms


class StreamReader:
    """Reads a stream from its beginning, and watches whether it draws random numbers for its samples.

    The first sample is left out, because many streams draw their order there. The next 31 are watched, and later those
    that follow a slow one, so that watching takes at most a twentieth of the stream's time. Not seen are the generators
    of WebDataset's and `datasets`' shuffling. Shuffling by process-wide generators cannot be told from augmentation.

    Args:
        source: the stream, whose own generators are watched, too.
        watched: whether draws matter.
    """

    def __init__(self, source: Any, watched: bool = True) -> None:
        self._generators = Generators(source) if watched else None
        self._stream, self._samples = iterate(source), 0
        self.moved: str | None = None
        """The generators that moved while a sample was read, in words; None as long as none has."""
        self.source_ns = 0
        """Nanoseconds that the last sample took."""

    def __next__(self) -> Any:
        """The next sample. Errors of the stream are raised as they are."""
        is_watched = self._samples > 0 and (self._samples < MANY or self.source_ns > _SLOW_NS)
        generators = self._generators if is_watched else None
        with nullcontext(list[str]()) if generators is None else generators.watch() as moved:
            start = time.perf_counter_ns()
            sample = next(self._stream)
            self.source_ns = time.perf_counter_ns() - start
        if moved:
            self.moved, self._generators = " and ".join(moved), None
        self._samples += 1
        return sample


# ---- errors ----


class FaultError(RuntimeError):
    """This package has raised an error in its own code."""


def attributed(error: Exception) -> Exception:
    """The error itself, or a FaultError if the code of this package has raised it, not the user's that it calls."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    calls = [(str(frame.f_globals.get("__name__")).partition(".")[0], frame.f_code.co_name) for frame in frames]
    while calls and calls[-1][0] in _LIBRARIES:
        calls.pop()
    if _is_message(error) or not calls or calls[-1][0] != _PACKAGE or calls[-1][1] in _CALLERS:
        return error
    return FaultError(f"{words_of(error, f'{_PACKAGE} itself')}. This is no fault of the data: please report it")


def words_of(error: BaseException, what: str) -> str:
    """An error in one line, raised by `what`. A message of this package stays as it is."""
    if _is_message(error):
        return text_of(error)
    return f"{what} raised {type(error).__name__}: {(text_of(error).strip().splitlines() or [''])[-1]}"


def _is_message(error: BaseException) -> bool:
    return type(error).__module__.startswith(f"{_PACKAGE}.") or isinstance(error, ChildProcessError)

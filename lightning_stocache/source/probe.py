"""Reading a source under given seeds, and comparing what came, bit for bit.

A `Probe` reads one index at a time. Before each read it seeds every process-wide generator (torch, CUDA if it runs,
NumPy, Python); it notes the bits of the sample and the state of the generators before and after. `sign` compares two
reads of an index under different seeds: unequal bits or a generator that moved show that the source is random
(RandomErasing(p=0.1) seldom changes bits, but always draws).

The generators that belong to the source (`generators`) cannot be seeded: they go on from read to read, which does as
well, and start a seed's second read where they started its first.

At the end of a `with` of the Probe all generators are where they were at its beginning.

The look at set-up reads a handful of samples. A source that is random in few others, and draws from what no look can
find, gets its first draw frozen. `Recheck` is the last chance to find that out: while a cache fills, each process that
loads samples reads one of them again now and then, under another seed. The first comes after about a hundred loads, the
next ever more rarely, eight at most. All generators are put back, so nothing else changes; who waits for that batch
waits for one more read.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.source.generators import ENTROPY, Generators, State
from lightning_stocache.source.samples import Bits, bits, difference

__all__ = ["Probe", "Read", "Recheck", "sign"]

log = logging.getLogger(__name__)

_FIRST = 64  # loads before the first second read may come
_MOST = 8


@dataclass(frozen=True)
class Read:
    """One read of an index.

    Args:
        index: that was read.
        sample: what came.
        bits: of the sample.
        moved: names of the generators that it drew from.
        after: the state of all generators after it.
    """

    index: int
    sample: Any
    bits: Bits
    moved: list[str]
    after: State


class Probe:
    """Reads of one source under given seeds, counted.

    Args:
        source: The source, whose own generators are watched.
        indices: The indices that are to be probed.
        told: Called with each index before it is read.
    """

    def __init__(
        self, source: Dataset[Any], indices: tuple[int, ...], told: Callable[[int], None] | None = None
    ) -> None:
        self.indices = indices
        self._told = told
        self.generators = Generators(source)
        self.reads = 0
        self._started: dict[int, State] = {}  # by seed

    def __enter__(self) -> Probe:
        self.generators.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.generators.__exit__()

    def read(self, source: Dataset[Any], index: int, seed: int) -> Read:
        """Read an index of the source, or of a copy with another transform, under a seed; what it raises comes through.

        A generator that the first read has made is watched from then on.
        """
        self.generators.seed(seed)
        if seed in self._started:
            self.generators.restore_owned(self._started[seed])
        before = self._started[seed] = self.generators.state()
        self.reads += 1
        if self._told is not None:
            self._told(index)
        with _worker_of(seed):
            sample = source[index]
        content, after = bits(sample), self.generators.state()
        read = Read(index, sample, content, self.generators.moved(before, after), after)
        if self.reads == 1:
            self.generators.find_new()
        return read

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[Read, Read]:
        """Read an index under two seeds, which no other index has."""
        return self.read(source, index, 2 * index), self.read(source, index, 2 * index + 1)


@contextmanager
def _worker_of(seed: int) -> Iterator[None]:
    """In a worker: have another seed and number for a while, because what is drawn from them is random."""
    info: Any = get_worker_info()
    if info is None:
        yield
        return
    before = info.seed, info.id
    try:
        object.__setattr__(info, "seed", seed)  # it refuses to be changed
        object.__setattr__(info, "id", seed % 2)
        yield
    finally:
        object.__setattr__(info, "seed", before[0])
        object.__setattr__(info, "id", before[1])


def sign(first: Read, second: Read) -> str | None:
    """What shows that two reads of an index are random, in words; None if nothing does."""
    for read in (first, second):
        if read.moved == [ENTROPY]:
            return f"reading index {read.index} makes a generator with a seed of the system's"
        if read.moved:
            return f"reading index {read.index} moves the generator of {' and '.join(read.moved)}"
    where = difference(first.bits, second.bits)
    return None if where is None else f"two reads of index {first.index} differ in sample{where}"


class Recheck:
    """Reads samples of a source again.

    Args:
        source: what is read.
        first_to_tell: says whether nobody on this node has warned of it yet.
    """

    def __init__(self, source: Dataset[Any], first_to_tell: Callable[[], bool]) -> None:
        self._source, self._first_to_tell = source, first_to_tell
        self._left = _MOST
        self._gap = _FIRST
        self._dice = random.Random()  # not a process-wide one, whose draws are the user's
        self._due = self._next()

    def after(self, index: int, sample: Any) -> bool:
        """A sample has been loaded; whether it was read again."""
        self._due -= 1
        if self._due or not self._left:
            return False
        self._left -= 1
        self._gap *= 2
        self._due = self._next()
        before = bits(sample)
        with Generators(self._source) as generators:
            generators.seed(self._dice.getrandbits(31))
            try:
                differs = bits(self._source[index]) != before
            except Exception:  # whatever the user's code raises when it is asked twice: the sample has been served
                return True
        if differs:
            self._left = 0
            if self._first_to_tell():
                log.warning(
                    "sample %d of %s is another one when it is read again: its source is random, and the cache freezes "
                    "its first draw.\nGive its deterministic part to CachedDataset, and the random rest as transform=; "
                    "or leave it uncached (budget=0)",
                    index,
                    type(self._source).__name__,
                )
        return True

    def _next(self) -> int:
        return self._gap + self._dice.randrange(self._gap)

"""Reading a source under given seeds, and comparing what came, bit for bit.

A `Probe` reads one index at a time. Before each read it seeds every process-wide generator (torch, CUDA if it runs,
NumPy, Python); it notes the bits of the sample and the state of the generators before and after. `sign` compares two
reads of an index under different seeds: unequal bits or a generator that moved show that the source is random
(RandomErasing(p=0.1) seldom changes bits, but always draws).

The generators that belong to the source (`generators`) cannot be seeded: they go on from read to read, which does as
well, and start a seed's second read where they started its first.

At the end of a `with` of the Probe all generators are where they were at its beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.source.generators import ENTROPY, Generators, State
from lightning_stocache.source.samples import Bits, bits, difference

__all__ = ["Probe", "Read", "sign"]


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

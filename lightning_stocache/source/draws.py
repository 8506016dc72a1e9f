"""Which samples the fillers of a rolling cache draw, each its own share, for ever.

Of all draws, filler k of n has those numbered k, k + n, k + 2n and so on. A filler that is started anew leaves out what
the last one has drawn. The draws are:

- of a map-style source, permutation after permutation of its indices; of a very long one each index is computed when
  it is drawn, because a table would take 8 bytes per sample in each filler;
- of a stream of indices, the next index, until it ends;
- of a stream of samples, its next sample, again and again from the beginning. A stream cannot jump: samples that are
  left out are read, and dropped. An IterableDataset finds its filler in `get_worker_info`, as in a DataLoader's worker,
  and divides itself; of other iterables each filler takes every n-th sample.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import count, islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

from lightning_stocache.source.access import iterate

__all__ = ["Draw", "Draws", "EndOfStreamError", "is_iterable_style", "shuffled"]


_LONGEST_TABLE = 1 << 24  # samples; two tables of 128 MiB in each filler
_ROUNDS = 4  # of the Feistel network


class EndOfStreamError(Exception):
    """One pass over a stream has ended."""


@dataclass(frozen=True)
class Draw:
    """One sample to come: its index in the source, or -1, and the function that loads it."""

    index: int
    load: Callable[[], Any]


@dataclass(frozen=True)
class Draws:
    """The draws from a source.

    Args:
        source: map-style, or a stream of samples.
        indices: a stream of indices to draw instead of permutations.
        seed: of the permutations, and of the process-wide generators of fillers.
        shuffle: whether the source's order is changed at all.
        passes: how often the source is drawn in all; None: for ever.
        as_stream: the source is a stream, or a function that makes an iterator, whatever else it is.

    Example:
        >>> draws = Draws("abcd", shuffle=False, passes=1)
        >>> [(draw.index, draw.load()) for draw in draws.share(1, fillers=2)]
        [(1, 'b'), (3, 'd')]
    """

    source: Any
    indices: Iterable[int] | None = None
    seed: int = 0
    shuffle: bool = True
    passes: int | None = None
    as_stream: bool = False

    @property
    def length(self) -> int | None:
        """Number of samples that are drawn before one comes again; None where that is not known."""
        is_known = self.source is not None and self.indices is None and not self.as_stream
        return len(self.source) if is_known and not is_iterable_style(self.source) else None

    def share(self, filler: int, fillers: int, done: int = 0) -> Iterator[Draw]:
        """The draws of one of `fillers` fillers, without its first `done`; of a stream, of its first pass."""
        if self.as_stream or (self.indices is None and is_iterable_style(self.source)):
            yield from self._of_stream(filler, fillers, done)
            return
        first = filler + done * fillers
        length = 0 if self.indices is not None else len(self.source)
        positions = count(first, fillers) if self.passes is None else range(first, self.passes * length, fillers)
        indices = map(self._index, positions) if self.indices is None else islice(self.indices, first, None, fillers)
        for index in map(int, indices):
            yield Draw(index, partial(self.source.__getitem__, index))

    def _index(self, position: int) -> int:
        """The index at a position of all passes over a map-style source."""
        number, position = divmod(position, len(self.source))
        if not self.shuffle:
            return position
        if len(self.source) > _LONGEST_TABLE:
            return shuffled(position, len(self.source), self.seed + number)
        return int(_order(len(self.source), self.seed, number)[position])

    def _of_stream(self, filler: int, fillers: int, done: int) -> Iterator[Draw]:
        for _ in count() if self.passes is None else range(self.passes):
            stream = _Pass(self.source, filler, fillers, done)
            while not stream.over:
                yield Draw(-1, stream.load)
            if not stream.tried or isinstance(self.source, Iterator):
                return  # it is empty, or a generator that will give nothing again
            done = 0


class _Pass:
    """One pass of one filler over a stream: its samples from number `done` on."""

    def __init__(self, source: Any, filler: int, fillers: int, done: int) -> None:
        self._source = source
        self._begin, self._step = filler + done * fillers, fillers
        if isinstance(source, IterableDataset):
            self._begin, self._step = done, 1
        self._iterator: Iterator[Any] | None = None
        self.tried, self.over = done > 0, False

    def load(self) -> Any:
        """The next sample."""
        try:
            if self._iterator is None:  # here, where errors of the source are caught
                self._iterator = islice(iterate(self._source), self._begin, None, self._step)
            sample = next(self._iterator)
        except StopIteration:
            self.over = True
            raise EndOfStreamError from None
        except Exception:
            self.tried, self.over = True, self._iterator is None
            raise
        self.tried = True
        return sample


def is_iterable_style(source: Any) -> bool:
    """Whether samples come one after the other, without an index."""
    return isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__"))


def shuffled(position: int, length: int, seed: int) -> int:
    """The number at a position of a permutation of the numbers below `length` that follows from the seed.

    A Feistel network permutes the numbers of an even number of bits. A result outside is permuted again (Black and
    Rogaway, Ciphers with Arbitrary Finite Domains, 2002).

    Example:
        >>> sorted(shuffled(position, 10, seed=3) for position in range(10)) == list(range(10))
        True
    """
    bits = (length.bit_length() + 1) // 2
    mask = (1 << bits) - 1
    while True:
        left, right = position >> bits, position & mask
        for turn in range(_ROUNDS):
            digest = hashlib.blake2b(b"%d %d %d" % (seed, turn, right), digest_size=8).digest()
            left, right = right, left ^ int.from_bytes(digest, "little") & mask
        position = left << bits | right
        if position < length:
            return position


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> Any:
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).numpy()

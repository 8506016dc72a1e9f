"""Which samples the fillers of a rolling cache draw, each its own share, for ever.

The draws of a source are numbered: filler k of n has the positions k, k + n, k + 2n and so on, so that one that is
started anew goes on behind the draw in which it ended. What lies at a position:

- of a map-style source, permutation after permutation of its indices, without replacement;
- of a stream of indices, the index that comes there, until it ends;
- of a stream of samples, the next that a filler gets out of it, again and again from the beginning. An IterableDataset
  is told its filler as it is told its DataLoader worker (`get_worker_info`), and divides itself; of other iterables
  each filler takes every n-th sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice
from typing import Any

import torch
from torch.utils.data import IterableDataset

__all__ = ["Draw", "Draws", "EndOfStreamError", "is_stream"]


class EndOfStreamError(Exception):
    """A stream has given all that it has, for this time."""


@dataclass(frozen=True)
class Draw:
    """One sample to come.

    Args:
        position: its number among the draws of all fillers.
        index: in the source, -1 where it has none.
        load: gives it; raises what the source raises.
    """

    position: int
    index: int
    load: Callable[[], Any]


@dataclass(frozen=True)
class Draws:
    """The draws from a source.

    Args:
        source: map-style, or a stream of samples.
        indices: a stream of indices to draw instead of permutations.
        seed: of the permutations.
        shuffle: whether the source's order is changed at all.
        passes: how often the source is drawn in all; None: for ever.

    Example:
        >>> draws = Draws("abcd", shuffle=False, passes=1)
        >>> [(draw.position, draw.load()) for draw in draws.share(1, fillers=2)]
        [(1, 'b'), (3, 'd')]
    """

    source: Any
    indices: Iterable[int] | None = None
    seed: int = 0
    shuffle: bool = True
    passes: int | None = None

    def share(self, filler: int, fillers: int, done: int = 0) -> Iterator[Draw]:
        """The draws of one filler of so many, but the first `done`."""
        if self.indices is not None:
            return self._of_indices(self.indices, filler, fillers, done)
        if is_stream(self.source):
            return self._of_stream(filler, fillers, done)
        return self._of_permutations(filler, fillers, done)

    def index(self, position: int) -> int:
        """The index at a position of a map-style source."""
        length = len(self.source)
        if not self.shuffle:
            return position % length
        return int(_order(length, self.seed, position // length)[position % length])

    def _of_permutations(self, filler: int, fillers: int, done: int) -> Iterator[Draw]:
        position = filler + done * fillers
        while self.passes is None or position < self.passes * len(self.source):
            index = self.index(position)
            yield Draw(position, index, partial(self.source.__getitem__, index))
            position += fillers

    def _of_indices(self, indices: Iterable[int], filler: int, fillers: int, done: int) -> Iterator[Draw]:
        for number, index in enumerate(islice(indices, filler + done * fillers, None, fillers), start=done):
            yield Draw(filler + number * fillers, int(index), partial(self.source.__getitem__, int(index)))

    def _of_stream(self, filler: int, fillers: int, done: int) -> Iterator[Draw]:
        position, passes = filler + done * fillers, 0
        while self.passes is None or passes < self.passes:
            passes += 1
            stream = _Pass(self.source, filler, fillers)
            while not stream.over:
                yield Draw(position, -1, stream.load)
                position += fillers
            if not stream.tried or stream.is_source:  # it is empty, or a generator that will give nothing again
                return


class _Pass:
    """A stream once from beginning to end, as one filler gets it."""

    def __init__(self, source: Any, filler: int, fillers: int) -> None:
        self._start = partial(_started, source, filler, fillers)
        self._iterator: Iterator[Any] | None = None
        self.is_source = isinstance(source, Iterator)
        self.over = False
        self.tried = 0

    def load(self) -> Any:
        """The next sample."""
        try:
            if self._iterator is None:  # here, where what it raises is told
                self._iterator = self._start()
            sample = next(self._iterator)
        except StopIteration:
            self.over = True
            raise EndOfStreamError from None
        except Exception:
            self.tried += 1
            self.over = self._iterator is None
            raise
        self.tried += 1
        return sample


def _started(source: Any, filler: int, fillers: int) -> Iterator[Any]:
    return iter(source) if isinstance(source, IterableDataset) else islice(source, filler, None, fillers)


def is_stream(source: Any) -> bool:
    """Whether samples come one after the other, without an index."""
    return isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__"))


@lru_cache(maxsize=2)
def _order(length: int, seed: int, epoch: int) -> Any:
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(length, generator=generator).numpy()

"""A stream: what can only be read from its beginning, as its user has it.

An IterableDataset, a WebDataset, a `datasets.IterableDataset`, any object with `__iter__`, or a function that makes an
iterator: it is read once per epoch, from the start (`iterate`). An iterator itself can be read once, and is refused.

Two things must not be frozen by keeping what a stream gives. What tells them apart from a stream that is only shuffled:

- **Random samples** (augmentation). `DrawsWatch` compares the generators before and after a sample is read: the
  process-wide ones, and those that belong to the source. The first sample is left out: many streams draw their order
  there. Shuffling by WebDataset and by `datasets` draws from generators of their own, which nobody can reach, and is
  not seen. What shuffles by the process-wide generators with every sample cannot be told from augmentation: it is not
  kept (`allow_random=True` says that it may be).
- **Another choice in every epoch**, and random samples that draw from what cannot be seen. When a stream is kept whole,
  every sample that it may give is kept, in whatever order. So the first samples of the stream are read once more, under
  other seeds (`setup.first_samples`): each must be there already, bit for bit. A stream that draws its shards anew for
  each sample (`resampled=True` of WebDataset) is known by its class: its epoch is cut out of something that never ends.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterDataPipe

from lightning_stocache.source.generators import Generators, State, reachable

__all__ = ["DrawsWatch", "check_stream", "draws_shards", "iterate"]

_FIRST = 32  # samples that are watched in any case
_SHARE = 20  # at most this part of the source's time is for watching the others


def check_stream(source: Any, cached: type) -> None:
    """Refuse what is no stream. Nothing is read.

    Args:
        source: what the user gave.
        cached: the class of streams that are cached already.

    Raises:
        TypeError: it is an iterator, which ends after one epoch, or has an index, or is no iterable at all.

    Example:
        >>> check_stream("text", cached=dict)
        Traceback (most recent call last):
            ...
        TypeError: iterable must be a stream of samples, got a str
    """
    kind = type(source).__name__
    if isinstance(source, cached):
        raise TypeError(f"iterable must be the stream itself, got a {kind} that is cached already")
    if isinstance(source, type):
        raise TypeError(f"iterable must be a stream, got the class {source.__name__}: call it first")
    if isinstance(source, Iterator):
        raise TypeError(
            f"iterable must give its samples anew in every epoch, got a {kind}, which can be read once: give the "
            "function that makes it"
        )
    if isinstance(source, str | bytes | torch.Tensor | np.ndarray | Mapping):
        raise TypeError(f"iterable must be a stream of samples, got a {kind}")
    if isinstance(source, IterDataPipe):
        raise TypeError(
            f"iterable must be divided among workers by itself, got the IterDataPipe {kind}, which DataLoader divides"
        )
    if hasattr(source, "__getitem__") and not hasattr(source, "__iter__"):
        raise TypeError(f"iterable must have __iter__, got the map-style {kind}: give it to CachedDataset")
    if not (hasattr(source, "__iter__") or callable(source)):
        raise TypeError(f"iterable must have __iter__, or be a function that makes an iterator; got a {kind}")


def iterate(source: Any) -> Iterator[Any]:
    """A stream from its beginning.

    Example:
        >>> list(iterate(lambda: iter("ab"))), list(iterate([1, 2]))
        (['a', 'b'], [1, 2])
    """
    return iter(source if hasattr(source, "__iter__") else source())


def draws_shards(source: Any) -> bool:
    """Whether a stream draws what it reads next, and never ends: WebDataset's `resampled=True`."""
    return any(
        type(node).__module__.partition(".")[0] == "webdataset" and "Resampled" in type(node).__name__
        for _, node in reachable(source)
    )


class DrawsWatch:
    """Watches whether a stream draws random numbers for its samples, in one process.

    It takes at most a twentieth of the stream's own time, besides that of the first samples: of a fast stream it sees
    some samples only.

    Args:
        source: the stream, whose own generators are watched, too.
    """

    def __init__(self, source: Any) -> None:
        self._generators = Generators(source)
        self._before: State | None = None
        self._seen = self._own_ns = self._source_ns = self._began = 0
        self.moved: str | None = None
        """The generators that moved while a sample was read, in words; None as long as none has."""

    def before(self) -> None:
        """A sample is to be read now."""
        start = time.perf_counter_ns()
        # The first draws what the epoch is made of.
        if self._seen and (self._seen < _FIRST or self._own_ns * _SHARE < self._source_ns):
            self._before = self._generators.state()
        self._began = time.perf_counter_ns()
        self._own_ns += self._began - start

    def after(self) -> int:
        """It has come; the nanoseconds that it took."""
        ended = time.perf_counter_ns()
        self._source_ns += ended - self._began
        self._seen += 1
        before, self._before = self._before, None
        if before is not None:
            if moved := self._generators.moved(before):
                self.moved = " and ".join(moved)
            self._own_ns += time.perf_counter_ns() - ended
        return ended - self._began

"""Notice that a source is random while it is served.

A source that is random in few samples only, and draws from a hidden generator, passes the look at set-up, and its
first draw would be frozen. `Recheck` reads samples of a map-style source again; `StreamReader` watches the generators
while a stream is read.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.source.access import iterate
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.random_split import Probe
from lightning_stocache.source.samples import bits

__all__ = ["Recheck", "StreamReader"]

log = logging.getLogger(__name__)

_FIRST_GAP = 64  # loads before the first second read may come
_MOST_RECHECKS = 8
_WATCHED = 32  # samples of a stream that are watched in any case
_SLOW_NS = 1_000_000  # a sample of a stream that takes so long is watched, too: watching takes 0.05 ms


class Recheck:
    """Reads a few samples a second time while a cache fills, under other seeds, and warns if one is different.

    Of all samples that this process loads, about the 100th is read again, and seven later ones at growing distances.
    All generators are put back.

    Args:
        source: the dataset that is read.
        first_to_tell: returns whether no process of this node has warned yet.
    """

    def __init__(self, source: Dataset[Any], first_to_tell: Callable[[], bool]) -> None:
        self._source, self._first_to_tell = source, first_to_tell
        self._dice = random.Random()  # not a process-wide one, whose draws are the user's
        gaps = (_FIRST_GAP << number for number in range(_MOST_RECHECKS))
        self._due = set(accumulate(gap + self._dice.randrange(gap) for gap in gaps))
        self._loads = 0

    def after(self, index: int, sample: Any) -> bool:
        """Count the load of a sample. Returns whether the sample was read again."""
        self._loads += 1
        if self._loads not in self._due:
            return False
        before = bits(sample)
        try:
            with Probe(self._source) as probe:
                differs = probe.read(self._source, index, self._dice.getrandbits(31)).bits != before
        except Exception:  # the user's code may raise when it is asked twice: the sample has been served
            return True
        if differs:
            self._due.clear()
            if self._first_to_tell():
                log.warning(
                    "sample %d of %s is another one when it is read again: its source is random, and the cache freezes "
                    "its first draw.\nGive its deterministic part to CachedDataset, and the random rest as transform=; "
                    "or leave it uncached (budget=0)",
                    index,
                    type(self._source).__name__,
                )
        return True


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
        is_watched = self._samples > 0 and (self._samples < _WATCHED or self.source_ns > _SLOW_NS)
        generators = self._generators if is_watched else None
        before = None if generators is None else generators.state()
        start = time.perf_counter_ns()
        sample = next(self._stream)
        self.source_ns = time.perf_counter_ns() - start
        if generators is not None and before is not None and (moved := generators.moved(before)):
            self.moved, self._generators = " and ".join(moved), None
        self._samples += 1
        return sample

"""A second read of a few samples while a cache fills: the last chance to find out that a source is random.

The look at set-up reads a handful of samples. A source that is random in few others, and draws from what no look can
find, gets its first draw frozen. So each process that loads samples reads one of them again now and then, under another
seed: the first after about a hundred loads, then ever more rarely, eight at most. All generators are put back, so
nothing else changes; who waits for that batch waits for one more read.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.source.generators import Generators
from lightning_stocache.source.samples import bits

__all__ = ["Recheck"]

log = logging.getLogger(__name__)

_FIRST = 64  # loads before the first may come
_MOST = 8


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

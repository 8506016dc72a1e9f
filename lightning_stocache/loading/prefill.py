"""What a worker does while nobody asks it for anything: it fills slots that have not been asked for yet.

The workers of all ranks of a node divide the indices among themselves. A worker loads one sample at a time, and only
while no request waits. Samples that are filled so count as fills and as seconds of the source, not as served.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

import numpy as np

from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.serve import CachedSource

__all__ = ["Prefill"]

log = logging.getLogger(__name__)

_AT_ONCE = 1024  # indices that are looked up at a time
_MOST_IN_VAIN = 8  # samples for which there was no room, one after the other, after which none is left


class Prefill:
    """Fills the part of one worker.

    Args:
        cached: what serves the source in this process.
        worker: its number.
        workers: how many there are on this rank.
    """

    def __init__(self, cached: CachedSource, worker: int, workers: int) -> None:
        group = cached.opened.group
        self._cached = cached
        self._part, self._parts = group.local_rank * workers + worker, len(group.members) * workers
        self._left = self._empty()
        self._in_vain = 0

    def __call__(self) -> bool:
        """Load one sample that is missing; whether there may be more."""
        index = next(self._left, None)
        if index is None or self._in_vain >= _MOST_IN_VAIN:
            return False
        try:
            self._in_vain = 0 if self._cached.load_ahead(index) else self._in_vain + 1
        except Exception:  # the source's own: who asks for the sample is told
            log.debug("sample %d could not be loaded ahead", index, exc_info=True)
        return True

    def _empty(self) -> Iterator[int]:
        """The indices of this part that have a slot which is not READY, as they are when their turn comes."""
        cache = self._cached.cache
        if cache is None:
            return
        length, spread = cache.length, _spreading(cache.length)
        step = self._parts * _AT_ONCE
        for first in range(self._part, length, step):
            # From the whole dataset: of a sorted folder, a part that fits is to have something of each class.
            indices = np.arange(first, min(first + step, length), self._parts) * spread % length
            if not cache.closed and cache.filled >= cache.capacity:
                return
            for index in indices[cache.lookup(indices) == NO_PLACE].tolist():
                if cache.closed:
                    return
                if cache.has_place(index) and cache.place(index) == NO_PLACE:
                    yield index


def _spreading(length: int) -> int:
    """A number whose multiples visit every index once, and spread over all of them."""
    step = max(int(0.618 * length), 1)
    while math.gcd(step, length) > 1:
        step += 1
    return step

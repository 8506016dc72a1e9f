"""Idle workers load samples ahead into slots that are still empty.

The workers of all ranks of a node divide the indices among themselves. A worker loads one sample at a time, and only
while no request waits. These samples count as fills and as seconds of the source, not as served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.serve import CachedSource

__all__ = ["Prefill"]

log = logging.getLogger(__name__)

_AT_ONCE = 1024  # indices that are looked up at a time
_MOST_IN_VAIN = 8  # samples for which there was no room, one after the other, after which none is left


class Prefill:
    """Fills the slots of one worker's part of the dataset.

    Args:
        cached: the cached source in this process.
        worker: the number of the worker.
        workers: number of workers of this rank.
    """

    def __init__(self, cached: CachedSource, worker: int, workers: int) -> None:
        group = cached.opened.group
        self._cached = cached
        self._part, self._parts = group.local_rank * workers + worker, len(group.members) * workers
        self._left = self._empty()
        self._in_vain = 0

    def __call__(self) -> bool:
        """Load one missing sample. Returns whether more may be missing."""
        index = next(self._left, None)
        if index is None or self._in_vain >= _MOST_IN_VAIN:
            return False
        try:
            self._in_vain = 0 if self._cached.load_ahead(index) else self._in_vain + 1
        except Exception:  # an error of the source, which a request for the sample raises again
            log.debug("sample %d could not be loaded ahead", index, exc_info=True)
        return True

    def _empty(self) -> Iterator[int]:
        """The indices of this part whose slot is not READY at the moment when their turn comes."""
        cache = self._cached.cache
        if cache is None:
            return
        step = self._parts * _AT_ONCE
        # From the end: what a loader without a sampler asks for comes from the beginning.
        for last in range(cache.length - 1 - self._part, -1, -step):
            indices = np.arange(last, max(last - step, -1), -self._parts)
            if not cache.closed and cache.filled >= cache.capacity:
                return
            for index in indices[cache.lookup(indices) == NO_PLACE].tolist():
                if cache.closed:
                    return
                if cache.has_place(index) and cache.place(index) == NO_PLACE:
                    yield index

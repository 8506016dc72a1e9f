"""Idle workers load samples ahead into slots that are still empty.

The workers of all ranks of a node divide the indices among themselves. A worker loads one sample at a time, and only
while no request waits. These samples count as fills and as seconds of the source, not as served.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np

from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.loading.serve import CachedSource

__all__ = ["prefill"]

log = logging.getLogger(__name__)

_AT_ONCE = 1024  # indices that are looked up at a time
_MOST_IN_VAIN = 8  # samples without room, one after the other, after which a worker stops


def prefill(cached: CachedSource, worker: int, workers: int) -> Iterator[None]:
    """Fill the slots of the part of the dataset for one of this rank's workers. Each step loads one sample."""
    group = cached.opened.group
    in_vain = 0
    for index in _empty(cached.cache, group.local_rank * workers + worker, len(group.members) * workers):
        try:
            in_vain = 0 if cached.load_ahead(index) else in_vain + 1
        except Exception:  # an error of the source, which a request for the sample raises again
            log.debug("sample %d could not be loaded ahead", index, exc_info=True)
        if in_vain == _MOST_IN_VAIN:
            return
        yield


def _empty(cache: Store | None, part: int, parts: int) -> Iterator[int]:
    """The indices of a part, without those whose slot is READY when their turn comes."""
    if cache is None:
        return
    step = parts * _AT_ONCE
    # From the end: what a loader without a sampler asks for comes from the beginning.
    for last in range(cache.length - 1 - part, -1, -step):
        indices = np.arange(last, max(last - step, -1), -parts)
        if not cache.closed and cache.filled >= cache.capacity:
            return
        for index in indices[cache.lookup(indices) == NO_SLOT].tolist():
            if cache.closed:
                return
            if cache.has_slot(index) and cache.ready_slot(index) == NO_SLOT:
                yield index

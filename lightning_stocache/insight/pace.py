"""How fast a loader runs: over a few batches, or over whole epochs.

With workers a loader delivers in waves of one batch per worker, so only whole waves after the first are counted; what
the first took longer is what it costs to start the workers.
"""

from __future__ import annotations

import statistics
import time
from itertools import count
from typing import NamedTuple

from lightning_stocache.loading.loader import CachedLoader

__all__ = ["Pace", "epoch_seconds", "pace"]


class Pace(NamedTuple):
    """A loader under way.

    Args:
        batch: seconds per batch.
        start: seconds until the workers were there.
    """

    batch: float
    start: float


def pace(loader: CachedLoader, limit: float) -> Pace:
    """Run a loader for two waves at least, and on until so many seconds are over or it ends."""
    lap = max(loader.num_workers, 1)
    begin, marks = time.perf_counter(), list[float]()
    for _ in loader:
        marks.append(time.perf_counter())
        if len(marks) % lap == 0 and len(marks) > 2 * lap and marks[-1] - begin > limit:
            break
    waves = len(marks) // lap - 1
    if waves < 1:
        return Pace((marks[-1] - begin) / len(marks), 0.0)
    wave = (marks[(waves + 1) * lap - 1] - marks[lap - 1]) / waves
    start = marks[lap - 1] - begin - wave if loader.num_workers else 0.0
    return Pace(wave / lap, max(start, 0.0))


def epoch_seconds(loader: CachedLoader, limit: float) -> float:
    """Run whole epochs, one to warm up and more until so many seconds are over: the median of those."""
    begin, found = time.perf_counter(), list[float]()
    for number in count():
        started = time.perf_counter()
        for _ in loader:
            pass
        ended = time.perf_counter()
        found += [ended - started] * (number > 0)
        if found and ended - begin > limit:
            break
    return statistics.median(found)

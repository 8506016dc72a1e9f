"""Whether storing on a disk keeps up with loading, in one process.

A sample is stored on the disk by the process that has loaded it, so a slow disk delays that process's batches. Where
storing takes longer than loading, the cache costs more than it saves: storing pauses, and samples are served unstored.
"""

from __future__ import annotations

import time

__all__ = ["PAUSE_SECONDS", "Pace"]

PAUSE_SECONDS = 10.0
"""Length of a pause; then storing is tried again."""

_MOST_NS = 500_000_000  # that storing may lag behind loading: of a slow disk, training sees half a second in ten


class Pace:
    """Compares the seconds of storing with those of loading.

    Example:
        >>> pace = Pace()
        >>> pace.note(load_ns=9_000_000, store_ns=1_000_000), pace.note(load_ns=0, store_ns=600_000_000), pace.pauses
        (False, True, True)
    """

    def __init__(self) -> None:
        self._behind_ns = 0
        self._paused_until = 0.0

    @property
    def pauses(self) -> bool:
        """Whether nothing is to be stored now."""
        return time.monotonic() < self._paused_until

    def note(self, load_ns: int, store_ns: int) -> bool:
        """Add what it took to load some samples, and to store them; whether a pause begins now."""
        self._behind_ns = max(self._behind_ns + store_ns - load_ns, 0)
        if self._behind_ns < _MOST_NS:
            return False
        self._behind_ns, self._paused_until = 0, time.monotonic() + PAUSE_SECONDS
        return True

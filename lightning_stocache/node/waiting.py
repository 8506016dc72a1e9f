"""Waiting for another process, which is said to people when it takes long, and again and again."""

from __future__ import annotations

import time
from collections.abc import Iterator

__all__ = ["TOLD_SECONDS", "moments"]

TOLD_SECONDS = 10.0
"""After so many seconds of waiting it is said what is waited for, and again after as many."""


def moments(pause: float) -> Iterator[float]:
    """The moments at which who waits looks again: at once, and after each pause of so many seconds, without end.

    Each is the number of seconds since the first where it is time to say that one waits, else 0.

    Example:
        >>> looks = 0
        >>> for seconds in moments(0.001):
        ...     looks += 1
        ...     if looks == 3:
        ...         break
        ...     if seconds:
        ...         print(f"nothing has come in {seconds:.0f} s")
    """
    begun = time.monotonic()
    due = TOLD_SECONDS
    while True:
        seconds = time.monotonic() - begun
        is_due = seconds >= due
        due += TOLD_SECONDS * is_due
        yield seconds if is_due else 0.0
        time.sleep(pause)

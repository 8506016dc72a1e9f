"""Waiting for another process: look again and again, and tell people whenever it takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator

__all__ = ["REPORT_SECONDS", "poll"]

REPORT_SECONDS = 10.0
"""How often people are told what is waited for."""


def poll(pause: float) -> Iterator[float]:
    """Yield at once, and again after each sleep of `pause` seconds, without end.

    Yields the seconds waited so far whenever a report is due, else 0.
    """
    begin, due = time.monotonic(), REPORT_SECONDS
    while True:
        seconds = time.monotonic() - begin
        is_due = seconds >= due
        due += REPORT_SECONDS * is_due
        yield seconds if is_due else 0.0
        time.sleep(pause)

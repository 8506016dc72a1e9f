"""The order of stores, as other processors see it.

A writer stores bytes, fences, and sets a state; a reader reads the state, fences, and reads the bytes. x86-64 keeps
the order of stores and that of loads by itself, so there the fence is nothing. Elsewhere (arm64) a lock is acquired
and released twice: nothing can pass both the first release and the second acquire, so no store or load crosses (0.2
us). That part follows from the memory model; it has not been run on arm64.
"""

from __future__ import annotations

import platform
import threading

__all__ = ["fence"]

_lock = threading.Lock()


def _fence_by_lock() -> None:
    for _ in range(2):
        with _lock:
            pass


def _fence_by_hardware() -> None:
    pass


fence = _fence_by_hardware if platform.machine().lower() in ("x86_64", "amd64", "i686") else _fence_by_lock
"""Stores and loads before the call are done before those after it."""

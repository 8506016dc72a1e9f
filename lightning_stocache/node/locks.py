"""Byte locks on a file, which the kernel frees when their holder dies.

A lock belongs to a process, not to a thread of it, and is not inherited by fork. Closing *any* descriptor of the file
drops all locks that the process holds on it: so they live on a file of their own. One costs 1.5 us.

Linux keeps `flock` and byte locks apart. BSD and macOS do not: there a file that somebody holds by `flock` has no byte
that can be locked, so the two are never taken on one file (`SEPARATE`).
"""

from __future__ import annotations

import sys

if sys.platform != "win32":
    import fcntl

    _WAIT, _TRY, _FREE = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

__all__ = ["SEPARATE", "give_back", "is_unlocked", "take"]

SEPARATE = sys.platform == "linux"
"""Whether `flock` and byte locks on one file know nothing of each other."""


def take(descriptor: int, byte: int, *, wait: bool = False) -> bool:
    """Take the lock of one byte; whether it is held now. With `wait` it always is."""
    try:
        fcntl.lockf(descriptor, _WAIT if wait else _TRY, 1, byte)
    except (BlockingIOError, PermissionError):
        return False
    return True


def give_back(descriptor: int, byte: int) -> None:
    """Give the lock of one byte back."""
    fcntl.lockf(descriptor, _FREE, 1, byte)


def is_unlocked(descriptor: int) -> bool:
    """Whether no other process holds a lock on any byte; they are all held now, until the descriptor is closed."""
    try:
        fcntl.lockf(descriptor, _TRY)
    except (BlockingIOError, PermissionError):
        return False
    return True

"""Byte locks on a file, which the kernel frees when their holder dies.

A lock belongs to a process, not to a thread of it, and is not inherited by fork. Closing *any* descriptor of the file
drops all locks that the process holds on it: so they live on a file of their own. One costs 1.5 us.

Linux keeps `flock` and byte locks apart. BSD and macOS do not: there a file that somebody holds by `flock` has no byte
that can be locked, so the two are never taken on one file (`SEPARATE`).
"""

from __future__ import annotations

import logging
import os
import re
import struct
import sys
from pathlib import Path

from lightning_stocache.node.waiting import moments

if sys.platform != "win32":
    import fcntl

    _WAIT, _TRY, _FREE = fcntl.LOCK_EX, fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_UN

__all__ = ["SEPARATE", "give_back", "holder", "is_unlocked", "share", "take"]

log = logging.getLogger(__name__)

SEPARATE = sys.platform == "linux"
"""Whether `flock` and byte locks on one file know nothing of each other."""

_FLOCK = struct.Struct("@hhqqi4x")  # Linux: kind, whence, start, length, process


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


def holder(descriptor: int, byte: int) -> int | None:
    """The other process that has the lock of one byte; None if there is none, or it cannot be known."""
    if not sys.platform.startswith("linux"):
        return None
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    return None if kind == fcntl.F_UNLCK or pid <= 0 else int(pid)  # 0: of another pid namespace


def share(descriptor: int, what: str) -> None:
    """Take the shared `flock` of a whole file, as soon as nobody has it alone.

    Args:
        descriptor: of the file.
        what: it is, for messages.
    """
    for seconds in moments(pause=0.002):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if seconds:
                log.warning("%s is waited for: %s has it locked", what, _who_has(os.fstat(descriptor).st_ino))


def _who_has(inode: int) -> str:
    """The process that has a whole file locked, for people."""
    try:
        lines = Path("/proc/locks").read_text()
    except OSError:
        lines = ""
    found = re.search(rf"FLOCK +\w+ +WRITE +(\d+) +\w+:\w+:{inode} ", lines)
    return f"process {found[1]}" if found else "another process"

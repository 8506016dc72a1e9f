"""Locks on the file of a segment.

    bytes    a lock each, of one open file description: seats, and what else the owner of a segment needs
    use      one byte, which all processes share that have the segment open; a process that has it alone may repair or
             remove the file
    opening  one byte, for the time in which a process finds out whether it is alone, and repairs the file
    turn     `flock`, for moments in which numbers of all processes are compared and written

A lock belongs to an open file description, and lasts until the last descriptor of it is closed. So a process opens the
file anew after a fork, and wherever a descriptor arrives (`open_anew`). A mapping keeps its description, in a forked
child, too: it has one that never holds a lock. The kernel frees the locks of a process that dies.

The turn costs 1.3 us, however many bytes are locked: the kernel looks through all locks of bytes for each of them.

macOS, gVisor and a system without /proc have no such locks (`are_exclusive`). There only the process that makes a
segment has its locks, and `use` is a `flock`.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import time
from collections.abc import Callable
from functools import cache

if sys.platform != "win32":
    import fcntl

__all__ = [
    "are_exclusive",
    "begin_opening",
    "end_opening",
    "excludes",
    "is_locked",
    "is_used",
    "lock",
    "open_anew",
    "release",
    "share_use",
    "lock_turn",
    "unlock",
    "use_alone",
]

_USE, _OPENING = (1 << 42) - 1, (1 << 42) - 2  # behind any content
_FLOCK = struct.Struct("hhqqi4x")  # kind, from where, first byte, number of bytes, pid
_FIRST_PAUSE, _LONGEST_PAUSE = 100e-6, 2e-3


def open_anew(descriptor: int, flags: int = os.O_RDWR) -> int:
    """Open the file of a descriptor once more. Returns a descriptor with an open file description of its own.

    Raises:
        OSError: there is no /proc, or no descriptor is left.
    """
    return os.open(f"/proc/self/fd/{descriptor}", flags | os.O_CLOEXEC)


@cache
def are_exclusive() -> bool:
    """Whether two open file descriptions exclude each other on this system.

    Raises:
        OSError: no descriptor is left to find out.
    """
    if not hasattr(os, "memfd_create") or not hasattr(fcntl, "F_OFD_SETLK"):
        return False
    descriptor = os.memfd_create("stocache-locks", os.MFD_CLOEXEC)
    try:
        return excludes(descriptor)
    finally:
        os.close(descriptor)


def excludes(descriptor: int) -> bool:
    """Whether two open file descriptions exclude each other on a file that nobody else has open."""
    try:
        other = open_anew(descriptor)
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):  # says nothing of the system
            raise
        return False
    try:
        return _set(descriptor, fcntl.F_WRLCK, 0) and not _set(other, fcntl.F_WRLCK, 0)
    except OSError:
        return False
    finally:
        os.close(other)


def lock(descriptor: int, byte: int, *, wait: bool = False, shared: bool = False) -> bool:
    """Lock a byte, alone or `shared`. Returns False if another description has its lock; with `wait`, waits for it."""
    return _set(descriptor, fcntl.F_RDLCK if shared else fcntl.F_WRLCK, byte, wait=wait)


def unlock(descriptor: int, byte: int) -> None:
    """Release the lock of a byte."""
    _set(descriptor, fcntl.F_UNLCK, byte)


def is_locked(descriptor: int, byte: int) -> bool:
    """Whether another description has the lock of a byte."""
    answer = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def begin_opening(descriptor: int, seconds: float) -> bool:
    """Exclude other processes that open or remove a file. Returns False if that takes longer than the seconds."""
    return not are_exclusive() or _try(seconds, _set, descriptor, fcntl.F_WRLCK, _OPENING)


def end_opening(descriptor: int) -> None:
    """Let other processes open a file."""
    if are_exclusive():
        unlock(descriptor, _OPENING)


def release(descriptor: int) -> None:
    """Release all bytes before a descriptor is closed: a child that was forked, or a system call, may have it, too."""
    if are_exclusive():
        _set(descriptor, fcntl.F_UNLCK, 0, length=0)


def share_use(descriptor: int) -> bool:
    """Use a file together with others, until the description is closed. Returns False if a process has it alone."""
    return _set(descriptor, fcntl.F_RDLCK, _USE) if are_exclusive() else _flock(descriptor, fcntl.LOCK_SH)


def use_alone(descriptor: int) -> bool:
    """Use a file alone, until `share_use` or until the description is closed. Returns False if another uses it."""
    return _set(descriptor, fcntl.F_WRLCK, _USE) if are_exclusive() else _flock(descriptor, fcntl.LOCK_EX)


def is_used(descriptor: int) -> bool:
    """Whether another process uses a file now."""
    if are_exclusive():
        return is_locked(descriptor, _USE)
    is_free = use_alone(descriptor)
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return not is_free


def lock_turn(descriptor: int, seconds: float) -> bool:
    """Take the turn. Returns False if it is not free within the seconds. `fcntl.flock` with LOCK_UN unlocks it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return seconds > 0 and _try(seconds, _flock, descriptor, fcntl.LOCK_EX)
    return True


def _try(seconds: float, take: Callable[..., bool], *args: int) -> bool:
    """Try to take a lock, at least once, until the seconds are over. Returns whether it was taken."""
    end = time.monotonic() + seconds
    pause = _FIRST_PAUSE
    while not take(*args):
        if time.monotonic() >= end:
            return False
        time.sleep(pause)
        pause = min(1.5 * pause, _LONGEST_PAUSE)
    return True


def _set(descriptor: int, kind: int, byte: int, *, length: int = 1, wait: bool = False) -> bool:
    command = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(descriptor, command, _FLOCK.pack(kind, os.SEEK_SET, byte, length, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _flock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True

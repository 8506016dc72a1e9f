"""Give a forked process open files of its own, so that it changes nothing that its parent uses.

A fork shares each open file with its parent: the position in a regular file, the messages in a pipe, the events of an
epoll. `isolate` runs in the forked process before any other code reads there:

- A regular file is opened anew, at its position, and takes the place of the shared one.
- 0 to 2, directories, devices and the descriptors in `kept` stay as they are.
- Anything else (a pipe, a socket, an epoll, a file that cannot be opened again) is replaced by a descriptor on which
  every read fails, so that the forked process takes no message of its parent's.

Memory that processes share stays shared.

A forked process has no thread of its parent's but one. `end_openmp_threads` ends the pool of OpenMP before the fork; a
parallel loop of the forked process would wait for it for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import TypeAlias

if sys.platform != "win32":
    import fcntl

__all__ = ["STANDARD", "File", "descriptors", "end_openmp_threads", "end_with_creator", "isolate"]

STANDARD = {0, 1, 2}
"""Descriptors that each process shares with its parent."""

File: TypeAlias = tuple[int, int]
"""A file as the system knows it: its device and its inode."""

_DIRECTORY = "/proc/self/fd"
# Others belong to the first opening alone: O_TMPFILE, O_EXCL, O_TRUNC, and the O_NOFOLLOW of sqlite, which would refuse
# the link below /proc.
_OPEN_FLAGS = ("O_APPEND", "O_NONBLOCK", "O_DIRECT", "O_SYNC", "O_DSYNC", "O_NOATIME")
_RUNTIMES = ("libgomp", "libomp", "libiomp")
_END_ALL = 2  # omp_pause_hard
_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG


def descriptors() -> dict[int, File]:
    """The open descriptors of this process, with the file of each; none where the system does not list them."""
    found: dict[int, File] = {}
    try:
        numbers = list(map(int, os.listdir(_DIRECTORY)))
    except OSError:
        return found
    for number in numbers:
        with suppress(OSError):  # that of the listing itself is closed
            status = os.fstat(number)
            found[number] = status.st_dev, status.st_ino
    return found


def isolate(shared: Mapping[int, File], kept: Collection[int] = ()) -> list[str]:
    """In a forked process: replace inherited descriptors by descriptors of this process.

    Args:
        shared: the descriptors that the parent had before the fork. One that was closed since may have another file.
        kept: those of them that stay shared, beside `STANDARD`.

    Returns:
        What the parent can read and this process cannot: pipes, sockets, and files that could not be opened anew.
    """
    if not os.path.isdir(_DIRECTORY):
        return ["any file"]
    others = sorted(set(shared) - STANDARD - set(kept))
    replaced = (_replace(descriptor, shared[descriptor]) for descriptor in others)
    return [name for name in replaced if name is not None]


def _replace(descriptor: int, file: File) -> str | None:
    """Replace a descriptor of a file. Returns its name, if the parent can read from it and this process cannot."""
    try:
        status = os.fstat(descriptor)
    except OSError:  # closed since
        return None
    if (status.st_dev, status.st_ino) != file:  # closed since, and its number is that of another file
        return None
    kind = status.st_mode
    if stat.S_ISDIR(kind) or stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
        return None
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    if flags & os.O_PATH:
        return None
    path, is_file, name = f"{_DIRECTORY}/{descriptor}", stat.S_ISREG(kind), None
    try:
        if not is_file:
            raise OSError
        own = os.open(path, flags & (os.O_ACCMODE | _all_of(_OPEN_FLAGS)))
        os.lseek(own, os.lseek(descriptor, 0, os.SEEK_CUR), os.SEEK_SET)
    except OSError:
        own = os.open(path, os.O_PATH)
        is_read = flags & os.O_ACCMODE != os.O_WRONLY
        if is_read and (is_file or stat.S_ISFIFO(kind) or stat.S_ISSOCK(kind)):
            name = os.readlink(path)
    os.dup2(own, descriptor, inheritable=os.get_inheritable(descriptor))
    os.close(own)
    return name


def _all_of(names: Collection[str]) -> int:
    flags = 0
    for name in names:
        flags |= getattr(os, name, 0)
    return flags


def end_openmp_threads() -> bool:
    """End the threads of OpenMP, which the next parallel loop starts anew (0.3 ms). Returns whether none are left."""
    ended = [pause(_END_ALL) == 0 for pause in map(_pause_of, _loaded(_RUNTIMES)) if pause is not None]
    return bool(ended) and all(ended)


def _pause_of(path: str) -> Callable[[int], int] | None:
    try:
        return getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)  # OpenMP 5.0
    except OSError:
        return None


def _loaded(libraries: Collection[str]) -> set[str]:
    """The paths of loaded libraries by the beginnings of their names; none where the system does not list them."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.rstrip("\n").split(None, 5)[-1] for line in maps if "omp" in line}
    except OSError:
        return set()
    return {path for path in paths if os.path.basename(path).startswith(tuple(libraries))}


def end_with_creator(creator: int) -> bool:
    """Have the kernel end this process with the thread that forked it. Returns False if the system cannot do that."""
    if sys.platform != "linux" or ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL) != 0:
        return False
    if os.getppid() != creator:  # it has ended already
        os.kill(os.getpid(), signal.SIGKILL)
    return True

"""What /proc says of a test run: its processes, the files in memory that they use, and its own pages."""

import ctypes
import fcntl
import glob
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

from tests import names

_MEMORY_FILES = ("/dev/shm/", "/memfd:lightning_stocache", "/lsc-")
_COLLAPSE, _HUGE = 25, 2 << 20  # MADV_COLLAPSE


def descendants() -> set[int]:
    """The children of this process and theirs, without the servants that multiprocessing keeps until the end."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (stat := _read(f"/proc/{entry}/stat")):
            parents[int(entry)] = int(stat.rpartition(")")[2].split()[1])
    found, generation = set[int](), {os.getpid()}
    while generation:
        generation = {pid for pid, parent in parents.items() if parent in generation}
        found |= generation
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    return found - {getattr(server, "_forkserver_pid", None), getattr(tracker, "_pid", None)}


def memory_files(pids: set[int]) -> set[tuple[str, str]]:
    """Files in memory that one of these processes has open or mapped. 2 to 8 ms for a process that knows torch."""
    found: set[tuple[str, str]] = set()
    for pid in pids:
        maps = _read(f"/proc/{pid}/maps")
        for line in maps.splitlines() if _is_memory(maps) else ():
            if _is_memory(line):
                inode, _, path = line.split(None, 4)[4].partition(" ")
                found.add((path.strip(), inode))
        for descriptor in glob.iglob(f"/proc/{pid}/fd/*"):
            try:
                target = os.readlink(descriptor)
                if _is_memory(target):
                    found.add((target, str(os.stat(descriptor).st_ino)))
            except OSError:
                continue
    return found


def unused_names() -> set[tuple[str, str]]:
    """Named files in memory that nobody uses, in the folder of this process of tests."""
    return {("unused", path) for path in glob.glob(f"{names.folder()}/lsc-*") if not _in_use(path)}


def _in_use(path: str) -> bool:
    """Whether somebody holds the lock that says so."""
    try:
        descriptor = os.open(path.removesuffix(".locks"), os.O_RDONLY)
    except FileNotFoundError:
        return not os.path.exists(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def command_of(pid: int) -> str:
    """What a process was started as."""
    return f"{pid}: " + _read(f"/proc/{pid}/cmdline").replace("\0", " ").strip()


def is_alive(pid: int) -> bool:
    stat = _read(f"/proc/{pid}/stat")
    return bool(stat) and stat.rpartition(")")[2].split()[0] != "Z"


def collapse() -> None:
    """Make huge pages of this process's heap and anonymous memory, which takes a second; Linux 6.1 and later. A fork
    copies the page tables: 150 tests that fork much took 55 s instead of 72 s."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for line in _read("/proc/self/maps").splitlines():  # elsewhere than on Linux there are none
        bounds, access, _, _, _, *path = line.split(None, 5)
        if access == "rw-p" and path in ([], ["[heap]"]):
            first, last = (int(bound, 16) for bound in bounds.split("-"))
            for begin in range(-(-first // _HUGE) * _HUGE, last // _HUGE * _HUGE, _HUGE):
                madvise(begin, _HUGE, _COLLAPSE)  # where it is refused, the pages stay as they are


def _is_memory(text: str) -> bool:
    return any(word in text for word in _MEMORY_FILES)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process has ended
        return ""

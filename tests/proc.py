"""What /proc says of a test run: its processes, and the files in memory that they use."""

import fcntl
import glob
import os
from multiprocessing import forkserver, resource_tracker
from typing import Any

from tests import names

__all__ = ["command_of", "descendants", "is_alive", "memory_files", "unused_names"]

_MEMORY_FILES = ("/dev/shm/", "/memfd:lightning_stocache", "/lsc-")


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
    return found - _servants()


def _servants() -> set[int]:
    pids: list[Any] = [
        getattr(forkserver._forkserver, "_forkserver_pid", None),  # type: ignore[attr-defined]
        getattr(resource_tracker._resource_tracker, "_pid", None),  # type: ignore[attr-defined]
    ]
    return {pid for pid in pids if pid is not None}


def memory_files(pids: set[int]) -> set[tuple[str, str]]:
    """Files in memory that one of these processes has open or mapped. 2 to 8 ms for a process that knows torch."""
    found: set[tuple[str, str]] = set()
    for pid in pids:
        maps = _read(f"/proc/{pid}/maps")
        for line in maps.splitlines() if _is_memory(maps) else ():
            if _is_memory(line):
                inode, _, path = line.split(None, 4)[4].partition(" ")
                found.add((path.strip(), inode))
        try:
            descriptors = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for number in descriptors:
            try:
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if _is_memory(target):
                    found.add((target, str(os.stat(f"/proc/{pid}/fd/{number}").st_ino)))
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


def _is_memory(text: str) -> bool:
    return any(word in text for word in _MEMORY_FILES)


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:  # the process has ended
        return ""

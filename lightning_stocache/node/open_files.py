"""Which processes have caches open, and how much memory those caches may still take.

A segment without a name is visible in `/proc/<pid>/fd` alone. The scan looks at every descriptor of the processes that
this user may inspect, and lists this user's files: files in /dev/shm (deleted or named), memfds of this package, and
named caches on a disk. A file that begins with the magic number of a segment is a segment. Other files in /dev/shm
(torch's batches) are listed too, because they take the same memory. Processes that cannot be inspected are counted.

A cache takes its memory while its slots are filled, so more memory is free now than later: four trials of a sweep that
start together would each count on all of it. A segment's file has its full length from the beginning, so its length
less its allocated blocks is what its cache may still take. `promised_to_others` adds that up over the segments that
other processes have open and this process has not. Segments of other users and other containers are invisible, so
`cache.shortage` looks at the free memory again while a cache is filled.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_stocache.node.files import printable, read_text, token_of

__all__ = ["OpenFile", "Process", "Promised", "open_files", "promised_to_others"]

_IN_MEMORY = ("/dev/shm/", "/memfd:lightning_stocache")
_ON_DISK = re.compile(r".*/lsc-[0-9]+-[^/]*")
_COMMAND = 120  # most characters of a command line that are shown
_LEAST = 2**20  # bytes of a promise; smaller differences are the rest of a page, or counters


class Process(NamedTuple):
    """A process: its id and its printable command line."""

    pid: int
    command: str


@dataclass
class OpenFile:
    """A file in memory, or a cache on a disk, with the processes that have it open, by their ids."""

    key: tuple[int, int]  # device and inode
    size: int  # length in bytes
    allocated_bytes: int
    on_disk: bool
    contents: Any = None  # result of `look`; None if the file is no segment
    processes: list[Process] = field(default_factory=list)


def open_files(root: Path = Path("/"), look: Callable[[int], Any] = token_of) -> tuple[list[OpenFile], int]:
    """List the files that processes have open, the largest first, and count the processes that cannot be inspected.

    Args:
        root: the folder that contains `proc`; tests give another one.
        look: reads a segment from a descriptor of its file; raises ValueError if the file is no segment.

    Raises:
        OSError: there is no /proc here.
    """
    files, hidden = dict[tuple[int, int], OpenFile](), 0
    pids = sorted(int(entry) for entry in os.listdir(root / "proc") if entry.isdecimal())
    if not pids:
        raise FileNotFoundError("there is an empty folder in place of /proc")
    for pid in pids:
        folder, seen = f"{root}/proc/{pid}/fd", set[tuple[int, int]]()
        try:
            numbers = os.listdir(folder)
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # the process has ended
            continue
        for number in numbers:
            with contextlib.suppress(OSError):  # the descriptor was closed meanwhile
                path = f"{folder}/{number}"
                name = os.readlink(path)
                in_memory = name.startswith(_IN_MEMORY)
                if not in_memory and not _ON_DISK.fullmatch(name):
                    continue
                facts = os.stat(path)
                key = facts.st_dev, facts.st_ino
                own = facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode)
                if key in seen or not facts.st_blocks or not own:
                    continue
                if key not in files:
                    sizes = facts.st_size, facts.st_blocks * 512
                    files[key] = OpenFile(key, *sizes, not in_memory, _contents(path, look))
                seen.add(key)
                files[key].processes.append(Process(pid, _command(root, pid)))
    return sorted(files.values(), key=lambda file: -file.allocated_bytes), hidden


class Promised(NamedTuple):
    """Bytes that other processes' caches of this user were granted, and have not taken yet."""

    memory: int = 0  # of all caches in memory
    in_cgroup: int = 0  # of the caches with a process in this process's cgroup
    in_directory: int = 0  # of the caches in the filesystem of a directory; a memfd lies in no directory


def promised_to_others(directory: str | None = None, root: Path = Path("/")) -> Promised:
    """Count what other processes were promised.

    Args:
        directory: a directory in memory, whose filesystem `in_directory` counts; not below `root`.
        root: the folder that contains `proc`; tests give another one.
    """
    memory = in_cgroup = in_directory = 0
    with contextlib.suppress(OSError):  # there is no /proc here
        device = None if directory is None else os.stat(directory).st_dev
        for file in open_files(root)[0]:
            size, pids = file.size - file.allocated_bytes, [process.pid for process in file.processes]
            if file.contents is None or file.on_disk or size < _LEAST or os.getpid() in pids:
                continue
            memory += size
            ours = read_text(root / "proc/self/cgroup")
            in_cgroup += size * any(read_text(f"{root}/proc/{pid}/cgroup") == ours for pid in pids)
            in_directory += size * (file.key[0] == device)
    return Promised(memory, in_cgroup, in_directory)


def _contents(path: str, look: Callable[[int], Any]) -> Any:
    """The result of `look`, or None if the file is no segment, or was closed meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return look(descriptor)
    except (ValueError, OSError):
        return None
    finally:
        os.close(descriptor)


def _command(root: Path, pid: int) -> str:
    words = read_text(f"{root}/proc/{pid}/cmdline")[: 4 * _COMMAND].replace("\0", " ").strip()
    return printable(words, _COMMAND) or "(ended)"

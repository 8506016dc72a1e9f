"""Which processes have caches open, and how much memory those may still take: one scan of `/proc/<pid>/fd`.

A segment without a name is seen nowhere else. The scan looks at every descriptor of the processes that this user may
look into: files in /dev/shm, deleted or named, memfds of ours, and named caches on a disk. A file that begins with a
segment's magic number is a segment; its lock file is empty and is left out. Other files in /dev/shm (torch's batches)
are listed too, because they take the same room. Of another user's file (root sees them all) only owner and size are
read. Processes that may not be looked into are counted.

A cache takes its memory when its slots are filled, so what is free now is not what is free later: four trials of a
sweep that begin together would each count on all of it. A segment's file has its full length from the beginning; its
length less its allocated blocks is what its cache may still take. `promised_to_others` adds that up over the segments
that other processes have open and this one has not. What cannot be seen (other users, other containers, no /proc) is
not counted, so `cache.shortage` looks at the free memory again while a cache is filled.
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

from lightning_stocache.node.files import printable, token_of

__all__ = ["OpenFile", "Process", "Promised", "open_files", "promised_to_others"]

_IN_MEMORY = ("/dev/shm/", "/memfd:lightning_stocache")
_ON_DISK = re.compile(r".*/lsc-[0-9]+-[^/]*(?<!\.locks)")
_COMMAND = 120  # characters of a command line that are shown
_LEAST = 2**20  # bytes of a promise; less is the rest of a page, or counters


class Process(NamedTuple):
    """A process: its id and its command line, printable."""

    pid: int
    command: str


@dataclass
class OpenFile:
    """A file in memory, or a cache on a disk, and the processes that have it open, in the order of their ids."""

    key: tuple[int, int]  # device and inode
    owner: int  # the user whose file it is
    size: int  # length in bytes
    allocated_bytes: int
    on_disk: bool
    contents: Any = None  # result of `look`; None if it is no segment of a cache, or another user's
    processes: list[Process] = field(default_factory=list)


def open_files(root: Path = Path("/"), look: Callable[[int], Any] = token_of) -> tuple[list[OpenFile], int]:
    """The files that processes have open, the largest first, and how many processes cannot be looked into.

    Args:
        root: where `proc` is found; another one is for tests.
        look: reads a segment from a descriptor of its file; ValueError if it is no segment.

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
            with contextlib.suppress(OSError):  # closed meanwhile
                path = f"{folder}/{number}"
                name = os.readlink(path)
                in_memory = name.startswith(_IN_MEMORY)
                if not in_memory and not _ON_DISK.fullmatch(name):
                    continue
                facts = os.stat(path)
                key = facts.st_dev, facts.st_ino
                if key in seen or not facts.st_blocks or not stat.S_ISREG(facts.st_mode):
                    continue
                if key not in files:
                    contents = _contents(path, look) if facts.st_uid == os.getuid() else None
                    sizes = facts.st_size, facts.st_blocks * 512
                    files[key] = OpenFile(key, facts.st_uid, *sizes, not in_memory, contents)
                seen.add(key)
                files[key].processes.append(Process(pid, _command(root, pid)))
    return sorted(files.values(), key=lambda file: -file.allocated_bytes), hidden


class Promised(NamedTuple):
    """Bytes that were granted to caches of this user's other processes, and are not taken yet."""

    memory: int = 0  # of all that lie in memory
    in_cgroup: int = 0  # of those with a process in this process's cgroup
    in_directory: int = 0  # of those that lie in the filesystem of a directory; a memfd lies in none


def promised_to_others(directory: str | None = None, root: Path = Path("/")) -> Promised:
    """What other processes were promised.

    Args:
        directory: in memory, whose filesystem is asked for, as it is (not below `root`).
        root: where `proc` is found; another one is for tests.
    """
    memory = in_cgroup = in_directory = 0
    with contextlib.suppress(OSError):  # there is no /proc here
        device = None if directory is None else os.stat(directory).st_dev
        for file in open_files(root)[0]:
            size, pids = file.size - file.allocated_bytes, [process.pid for process in file.processes]
            if file.contents is None or file.on_disk or size < _LEAST or os.getpid() in pids:
                continue
            memory += size
            in_cgroup += size * any(_read(root, pid, "cgroup") == _read(root, "self", "cgroup") for pid in pids)
            in_directory += size * (file.key[0] == device)
    return Promised(memory, in_cgroup, in_directory)


def _contents(path: str, look: Callable[[int], Any]) -> Any:
    """The result of `look`; None if the file is no segment, or was closed meanwhile."""
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
    words = _read(root, pid, "cmdline")[: 4 * _COMMAND].replace(b"\0", b" ").decode(errors="replace")
    return printable(words.strip(), _COMMAND) or "(ended)"


def _read(root: Path, pid: int | str, name: str) -> bytes:
    try:
        return Path(f"{root}/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""

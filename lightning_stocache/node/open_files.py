"""Which processes have caches open, and how much memory those may still take: one scan of `/proc/<pid>/fd`.

A segment without a name is seen nowhere else. The scan examines every descriptor of the processes that this user may
look into: files in /dev/shm, deleted or named, memfds of ours, and named caches on a disk. A file that begins with a
segment's magic number is a segment; its lock file is empty and is left out. Other files in /dev/shm (torch's batches)
are listed too, because they take the same room. Of another user's file (root sees them all) only owner and size are
read. Processes that may not be looked into are counted.

A cache takes its memory when its slots are filled, so what is free now is not what is free later: four trials of a
sweep that begin together would each count on all of it. A segment's file has its full length from the beginning and
takes memory only where something was stored; the difference is what its cache may still take. `promised_to_others` adds
that up over the segments that other processes have open and this one has not. Not counted is what cannot be seen:
another user's processes, those of another container, and all where there is no /proc. So `cache.shortage` looks at the
free memory again while a cache is filled. Nothing is locked: two jobs that ask in the same millisecond do not see each
other.
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

from lightning_stocache.node.header import printable, token_of

__all__ = ["OpenFile", "Process", "Promised", "open_files", "promised_to_others"]

_IN_MEMORY = ("/dev/shm/", "/memfd:lightning_stocache")
_ON_DISK = re.compile(r".*/lsc-[0-9]+-[^/]*(?<!\.locks)")
_COMMAND = 120  # characters of a command line that are shown
_LEAST = 2**20  # bytes of a promise; less is the rest of a page, or counters


@dataclass(frozen=True)
class Process:
    """A process: its id and its command line, printable."""

    pid: int
    command: str


@dataclass
class OpenFile:
    """A file in memory, or a cache on a disk, and the processes that have it open.

    Args:
        name: as the kernel calls it, printable.
        path: to one of its descriptors below /proc.
        facts: result of `stat`.
        pids: of the processes.
        processes: in the order of their ids, with their command lines; only from `open_files`.
        contents: result of `look`; None if it is no segment of a cache, or another user's.
    """

    name: str
    path: str
    facts: os.stat_result
    pids: set[int] = field(default_factory=set)
    processes: tuple[Process, ...] = ()
    contents: Any = None

    @property
    def key(self) -> tuple[int, int]:
        """Device and inode."""
        return self.facts.st_dev, self.facts.st_ino

    @property
    def owner(self) -> int:
        """The user whose file it is."""
        return self.facts.st_uid

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory that it takes, or of a disk."""
        return self.facts.st_blocks * 512

    @property
    def on_disk(self) -> bool:
        """Whether it lies on a disk, and takes no memory."""
        return not self.name.startswith(_IN_MEMORY)


def open_files(root: Path = Path("/"), look: Callable[[int], Any] = token_of) -> tuple[list[OpenFile], int]:
    """The files that processes have open, the largest first, and how many processes cannot be looked into.

    Args:
        root: where `proc` is found; another one is for tests.
        look: reads a segment from a descriptor of its file; ValueError if it is no segment.

    Raises:
        OSError: there is no /proc here.
    """
    files, hidden = _scan(root)
    for file in files:
        file.processes = tuple(Process(pid, _command(root, pid)) for pid in sorted(file.pids))
        file.contents = _contents(file, look)
    return sorted(files, key=lambda file: -file.allocated_bytes), hidden


class Promised(NamedTuple):
    """Bytes that were granted to caches of this user's other processes, and are not taken yet.

    Args:
        memory: of all that lie in memory.
        in_cgroup: of those with a process in this process's cgroup.
        in_directory: of those that lie in the filesystem of a directory; a memfd lies in none.
    """

    memory: int = 0
    in_cgroup: int = 0
    in_directory: int = 0


def promised_to_others(directory: str | None = None, root: Path = Path("/")) -> Promised:
    """What other processes were promised.

    Args:
        directory: in memory, whose filesystem is asked for, as it is (not below `root`).
        root: where `proc` is found; another one is for tests.
    """
    memory = in_cgroup = in_directory = 0
    with contextlib.suppress(OSError):  # there is no /proc here
        device = None if directory is None else os.stat(directory).st_dev
        for file in _scan(root)[0]:
            size = file.facts.st_size - file.allocated_bytes
            others = size >= _LEAST and not file.on_disk and os.getpid() not in file.pids
            if others and _contents(file, token_of) is not None:
                memory += size
                in_cgroup += size * any(_cgroup(root, pid) == _cgroup(root, "self") for pid in file.pids)
                in_directory += size * (file.facts.st_dev == device)
    return Promised(memory, in_cgroup, in_directory)


def _scan(root: Path) -> tuple[list[OpenFile], int]:
    """The open files that hold memory, and how many processes cannot be looked into."""
    files, hidden = dict[tuple[int, int], OpenFile](), 0
    pids = sorted(int(entry) for entry in os.listdir(root / "proc") if entry.isdecimal())
    if not pids:
        raise FileNotFoundError("there is an empty folder in place of /proc")
    for pid in pids:
        folder = f"{root}/proc/{pid}/fd"
        try:
            numbers = os.listdir(folder)
        except PermissionError:
            hidden += 1
            continue
        except OSError:  # the process has ended
            continue
        for number in numbers:
            path = f"{folder}/{number}"
            with contextlib.suppress(OSError):  # closed meanwhile
                name = os.readlink(path)
                if name.startswith(_IN_MEMORY) or _ON_DISK.fullmatch(name):
                    facts = os.stat(path)
                    if facts.st_blocks and stat.S_ISREG(facts.st_mode):
                        file = OpenFile(printable(name), path, facts)
                        files.setdefault(file.key, file).pids.add(pid)
    return list(files.values()), hidden


def _contents(file: OpenFile, look: Callable[[int], Any]) -> Any:
    """The result of `look`; None if the file is no segment, another user's, or was closed meanwhile."""
    if file.owner != os.getuid():
        return None
    try:
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return look(descriptor)
    except (ValueError, OSError):
        return None
    finally:
        os.close(descriptor)


def _command(root: Path, pid: int) -> str:
    try:
        with open(f"{root}/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * _COMMAND)
    except OSError:
        return "(ended)"
    return printable(words.replace(b"\0", b" ").decode(errors="replace").strip(), _COMMAND) or "(ended)"


def _cgroup(root: Path, pid: int | str) -> str:
    try:
        return Path(f"{root}/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""

"""Which processes have caches open, and how much memory those may still take: one scan of `/proc/<pid>/fd`.

A segment without a name is seen nowhere else. Every descriptor of the processes that may be looked into is examined:
files in /dev/shm, deleted or named, memfds of ours, and caches with a name on a disk. A file that begins with a
segment's magic number is a segment; its lock file is empty and is left out. Other files in /dev/shm (torch's batches)
are listed too, because they take the same room. Of another user's file (root sees them all) only owner and size are
read. Processes that may not be looked into are counted.

A cache takes its memory when its slots are filled, so what is free now is not what is free later: four trials of a
sweep that begin together would each count on all of it. A segment's file has its full length from the beginning and
takes memory only where something was stored; the difference is what its cache may still take. `other_promises` adds
that up over the segments that other processes have open and this one has not. What cannot be seen (another user's
processes, those of another container, no /proc) is not counted; `cache.shortage` looks at the free memory again while
a cache is filled. Nothing is locked: two jobs that ask in the same millisecond do not see each other.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.header import printable, token_of

__all__ = ["OpenFile", "Process", "Promise", "Promises", "open_files", "other_promises"]

_IN_MEMORY = ("/dev/shm/", "/memfd:lightning_stocache")
_ON_DISK = re.compile(r".*/lsc-[0-9]+-[^/]*(?<!\.locks)")
_COMMAND = 120  # characters of a command line that are shown
_LEAST = 2**20  # bytes of a promise; what is less is the rest of a page, or counters
_PIDS = 4  # that a message names


@dataclass(frozen=True)
class Process:
    """A process: its id and its command line, printable."""

    pid: int
    command: str


@dataclass(frozen=True)
class OpenFile:
    """A file in memory, or a cache on a disk, and the processes that have it open.

    Args:
        name: as the kernel calls it, printable.
        key: device and inode.
        owner: the user whose file it is.
        allocated_bytes: memory that it takes, or room on a disk.
        contents: the result of `look`; None if it is no segment of a cache, or another user's.
        processes: by process id.
    """

    name: str
    key: tuple[int, int]
    owner: int
    allocated_bytes: int
    contents: Any
    processes: tuple[Process, ...] = ()

    @property
    def on_disk(self) -> bool:
        """Whether it takes no memory, but room on a disk."""
        return not self.name.startswith(_IN_MEMORY)


@dataclass(frozen=True)
class Promise:
    """What caches of other jobs may still take of something.

    Args:
        nbytes: how many bytes.
        jobs: how many jobs these are.
        pids: their processes.
    """

    nbytes: int = 0
    jobs: int = 0
    pids: tuple[int, ...] = ()

    def share(self, free: int) -> int:
        """What is left of free bytes for one more job: what is not promised, but at least an even share.

        Example:
            >>> Promise(70, jobs=1).share(100), Promise(70, jobs=1).share(200)
            (50, 130)
        """
        return max(free - self.nbytes, free // (1 + self.jobs))

    def __str__(self) -> str:
        """What follows the bytes that are free in a message; empty where nothing is promised."""
        if not self.nbytes:
            return ""
        pids = ", ".join(map(str, self.pids[:_PIDS])) + (" and others" if len(self.pids) > _PIDS else "")
        return f", of which caches of process {pids} may take {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class Promises:
    """What caches of other jobs may still take, seen from three sides as `FreeMemory` is.

    Args:
        files: of the filesystem in which caches lie.
        machine: of the machine's memory.
        cgroup: of the memory of this process's cgroup: those of the same one.
    """

    files: Promise = field(default_factory=Promise)
    machine: Promise = field(default_factory=Promise)
    cgroup: Promise = field(default_factory=Promise)


def open_files(root: Path = Path("/"), look: Callable[[int], Any] = token_of) -> tuple[list[OpenFile], int]:
    """The files that processes have open, the largest first, and how many processes cannot be looked into.

    Args:
        root: where `proc` is found; another one is for tests.
        look: reads what is to be known of a segment from a descriptor of its file; ValueError if it is no segment.

    Raises:
        OSError: there is no /proc here.
    """
    descriptors, hidden = _scan(root)
    files = list[OpenFile]()
    for key, opened in _by_file(descriptors).items():
        first = opened[0]
        contents = _contents(first.path, look) if first.facts.st_uid == os.getuid() else None
        processes = tuple(Process(pid, _command(root, pid)) for pid in sorted({one.pid for one in opened}))
        size = first.facts.st_blocks * 512
        files.append(OpenFile(printable(first.file), key, first.facts.st_uid, size, contents, processes))
    return sorted(files, key=lambda file: -file.allocated_bytes), hidden


def other_promises(root: Path = Path("/")) -> Promises:
    """What caches of this user's other processes have been granted and have not taken yet.

    Args:
        root: where `proc` is found; another one is for tests.
    """
    missing, users = dict[tuple[int, int], int](), dict[tuple[int, int], set[int]]()
    with contextlib.suppress(OSError):  # there is no /proc here
        for key, opened in _by_file(_scan(root)[0]).items():
            facts, pids = opened[0].facts, {one.pid for one in opened}
            size = facts.st_size - facts.st_blocks * 512
            ours = facts.st_uid == os.getuid() and opened[0].file.startswith(_IN_MEMORY)
            if ours and size >= _LEAST and os.getpid() not in pids and _contents(opened[0].path, token_of) is not None:
                missing[key], users[key] = size, pids
    if not missing:
        return Promises()
    cgroup, device = _cgroup(root, "self"), os.stat(memory_directory()).st_dev
    same_cgroup = {pid for pid in set[int]().union(*users.values()) if _cgroup(root, str(pid)) == cgroup}

    def sum_of(keys: Iterable[tuple[int, int]]) -> Promise:
        nbytes, jobs = 0, list[set[int]]()
        for key in keys:  # processes that share a segment are of one job
            nbytes += missing[key]
            sharing = [job for job in jobs if not job.isdisjoint(users[key])]
            jobs = [*(job for job in jobs if job not in sharing), users[key].union(*sharing)]
        return Promise(nbytes, len(jobs), tuple(sorted(set[int]().union(*jobs))))

    return Promises(
        sum_of(key for key in missing if key[0] == device),
        sum_of(missing),
        sum_of(key for key in missing if not users[key].isdisjoint(same_cgroup)),
    )


class _Descriptor(NamedTuple):
    """An open file of a process: its id, the path below /proc, what that leads to, and the result of `stat`."""

    pid: int
    path: str
    file: str
    facts: os.stat_result


def _scan(root: Path) -> tuple[list[_Descriptor], int]:
    """Every descriptor of a file that holds memory, and how many processes cannot be looked into."""
    descriptors, hidden = list[_Descriptor](), 0
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
            with contextlib.suppress(OSError):  # closed meanwhile, or another user's
                file = os.readlink(path)
                if file.startswith(_IN_MEMORY) or _ON_DISK.fullmatch(file):
                    facts = os.stat(path)
                    if facts.st_blocks and stat.S_ISREG(facts.st_mode):
                        descriptors.append(_Descriptor(pid, path, file, facts))
    return descriptors, hidden


def _by_file(descriptors: Iterable[_Descriptor]) -> dict[tuple[int, int], list[_Descriptor]]:
    files = dict[tuple[int, int], list[_Descriptor]]()
    for descriptor in descriptors:
        files.setdefault((descriptor.facts.st_dev, descriptor.facts.st_ino), []).append(descriptor)
    return files


def _contents(path: str, look: Callable[[int], Any]) -> Any:
    """What a look makes of an open file; None if it is no segment, or was closed meanwhile."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return look(file)
    except (ValueError, OSError):
        return None
    finally:
        os.close(file)


def _command(root: Path, pid: int) -> str:
    try:
        with open(f"{root}/proc/{pid}/cmdline", "rb") as file:
            words = file.read(4 * _COMMAND)
    except OSError:
        return "(ended)"
    return printable(words.replace(b"\0", b" ").decode(errors="replace").strip(), _COMMAND) or "(ended)"


def _cgroup(root: Path, pid: str) -> str:
    try:
        return (root / "proc" / pid / "cgroup").read_text()
    except OSError:
        return ""

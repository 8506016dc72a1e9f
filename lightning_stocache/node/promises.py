"""What other jobs on this machine have been granted and have not taken yet.

A cache takes its memory when its slots are filled, so what is free now is not what is free later: four trials of a
sweep that begin together would each count on all of it. A segment's file has its full length from the beginning and
holds memory only where something was stored; the difference is what its cache may still take. `promised` finds the
segments of this user's other processes below `/proc/<pid>/fd` and adds these up.

A segment that this process has open is not counted: whose it is, its own bookkeeping knows. Nor is one that nobody has
open: nobody fills it. What cannot be seen (another user's processes, those of another container, no /proc) is not
counted either; it is for the look at the free memory while a cache is filled (`cache.shortage`). Nothing is locked:
two jobs that ask in the same millisecond do not see each other.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import memory_directory, token_of

__all__ = ["Promise", "Promised", "promised"]

_MEMFD = "/memfd:lightning_stocache"
_LEAST = 2**20  # bytes; what is less is the rest of a page, or counters
_PIDS = 4  # that are named


@dataclass(frozen=True)
class Promise:
    """What caches of other jobs may still take of something.

    Args:
        nbytes: How much.
        jobs: How many jobs these are.
        pids: Their processes.
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
        """What stands behind the bytes that are free, for people; empty where nothing is promised."""
        if not self.nbytes:
            return ""
        pids = ", ".join(map(str, self.pids[:_PIDS])) + (" and others" if len(self.pids) > _PIDS else "")
        return f", of which caches of process {pids} may take {format_bytes(self.nbytes)}"


@dataclass(frozen=True)
class Promised:
    """What caches of other jobs may still take.

    Args:
        files: Of the filesystem in which caches lie.
        machine: Of the machine's memory.
        cgroup: Of the memory of this process's cgroup: those of the same one.
    """

    files: Promise = field(default_factory=Promise)
    machine: Promise = field(default_factory=Promise)
    cgroup: Promise = field(default_factory=Promise)


def promised(root: Path = Path("/")) -> Promised:
    """What caches of this user's other processes have been granted and have not taken yet.

    Args:
        root: where `proc` is found; another one is for tests.
    """
    here = {facts.key for facts in _segments(root, "self")}
    found, users = dict[tuple[int, int], _Facts](), dict[tuple[int, int], set[int]]()
    for pid in _processes(root):
        for facts in _segments(root, str(pid)):
            if facts.key not in here and facts.missing >= _LEAST:
                found[facts.key] = facts
                users.setdefault(facts.key, set()).add(pid)
    if not found:
        return Promised()
    cgroup, device = _cgroup(root, "self"), os.stat(memory_directory()).st_dev
    with_us = {pid for pid in set().union(*users.values()) if _cgroup(root, str(pid)) == cgroup}

    def sum_of(keys: Iterable[tuple[int, int]]) -> Promise:
        nbytes, jobs = 0, list[set[int]]()
        for key in keys:  # who shares a segment is of one job
            nbytes += found[key].missing
            sharing = [job for job in jobs if not job.isdisjoint(users[key])]
            jobs = [*(job for job in jobs if job not in sharing), users[key].union(*sharing)]
        return Promise(nbytes, len(jobs), tuple(sorted(set[int]().union(*jobs))))

    return Promised(
        sum_of(key for key in found if key[0] == device),
        sum_of(found),
        sum_of(key for key in found if not users[key].isdisjoint(with_us)),
    )


@dataclass(frozen=True)
class _Facts:
    """A file: device and inode, and the bytes for which it holds no memory yet."""

    key: tuple[int, int]
    missing: int


def _processes(root: Path) -> Iterator[int]:
    """This user's other processes."""
    try:
        entries = os.listdir(root / "proc")
    except OSError:
        return
    for entry in entries:
        if entry.isdecimal() and int(entry) != os.getpid():
            try:
                if os.stat(root / "proc" / entry).st_uid == os.getuid():
                    yield int(entry)
            except OSError:  # it has ended
                continue


def _segments(root: Path, pid: str) -> Iterator[_Facts]:
    """The segments in memory that a process has open."""
    folder = f"{root}/proc/{pid}/fd"
    try:
        descriptors = os.listdir(folder)
    except OSError:  # it has ended, or runs with other rights
        return
    for number in descriptors:
        path = f"{folder}/{number}"
        try:
            if not os.readlink(path).startswith(("/dev/shm/", _MEMFD)):
                continue
            facts = os.stat(path)
            if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and facts.st_blocks and _is_segment(path):
                yield _Facts((facts.st_dev, facts.st_ino), facts.st_size - facts.st_blocks * 512)
        except OSError:  # closed meanwhile
            continue


def _is_segment(path: str) -> bool:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        token_of(file)
        return True
    except ValueError:
        return False
    finally:
        os.close(file)


def _cgroup(root: Path, pid: str) -> str:
    try:
        return (root / "proc" / pid / "cgroup").read_text()
    except OSError:
        return ""

"""The free memory of this node, for caches.

The free memory is the smallest of three numbers: the bytes free in the filesystem of the cache, MemAvailable, and the
headroom of this process's memory cgroup and of all its visible parents. A number that cannot be read limits nothing.

Filesystem and cgroup fail differently. In a full /dev/shm storing a sample is an error. Above a cgroup's limit the
kernel kills (measured: `posix_fallocate` beyond the limit ends in SIGKILL, not in ENOSPC). So the limit cannot be found
by trying: it is read before a cache takes memory (`measure`), and again while the cache is filled (`now`).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lightning_stocache.node.files import read_text
from lightning_stocache.node.open_files import Promised, promised_to_others

__all__ = ["FreeMemory"]

_PROGRAMS = 256 * 2**20  # active page cache that is not counted as free: a training's libraries have 50 to 150 MB


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes by limit; None for a limit that does not exist or is unknown.

    Example:
        >>> free = FreeMemory(filesystem=64 * 2**20, available=8 * 2**30, cgroup=None, directory="/dev/shm")
        >>> free.bytes, free.limited_by
        (67108864, '/dev/shm')
    """

    filesystem: int | None  # free in the cache's filesystem; None for a memfd, which no filesystem limits
    available: int | None  # what the machine can give without swapping (MemAvailable)
    cgroup: int | None  # headroom of this process's cgroup, or of the tightest of its parents
    directory: str | None = None  # a directory in `filesystem`
    cgroup_limit: int | None = None  # the limit of the cgroup with that headroom
    own: int = 0  # this process's anonymous memory; 0 if unknown
    promised: Promised = field(default_factory=Promised)  # to caches of this user's other jobs

    @classmethod
    def now(cls, directory: str | None = None, root: Path = Path("/")) -> FreeMemory:
        """Read what is free now, in 0.1 ms, in the cgroups that `measure` found. Promises are not read.

        Args:
            directory: The directory of the cache's file, not below `root`; None for a memfd.
            root: The folder that contains `proc` and `sys`; tests give another one.
        """
        rooms = [_headroom(version, folder) for version, folder in _limited_cgroups(root)]
        room, limit = min((room for room in rooms if room is not None), default=(None, None))
        return cls(_filesystem_free(directory), _memory_available(root), room, directory, limit)

    @classmethod
    def measure(cls, directory: str | None, root: Path = Path("/")) -> FreeMemory:
        """Read what is free when a cache opens; arguments as in `now`."""
        _limited_cgroups.cache_clear()
        own = _bytes(root / "proc/self/status", "RssAnon") or 0
        return replace(cls.now(directory, root), own=own, promised=promised_to_others(directory, root))

    @property
    def bytes(self) -> int:
        """The smallest known limit, or 0 if none is known: then no memory is safe."""
        return self._tightest[0]

    @property
    def limited_by(self) -> str:
        """The name of the smallest limit."""
        return self._tightest[1]

    @property
    def memory(self) -> tuple[int, str] | None:
        """The smaller limit of memory, without the filesystem, and its name; None if neither limit is known."""
        return min((limit[:2] for limit in self.limits_of_memory), default=None)

    @property
    def limits_of_memory(self) -> list[tuple[int, str, int]]:
        """The known limits of memory: the free bytes, the name, and the bytes that are promised to other jobs."""
        cgroup = (self.cgroup, "the cgroup's memory limit", self.promised.in_cgroup)
        machine = (self.available, "MemAvailable", self.promised.memory)
        return [(size, name, promised) for size, name, promised in (cgroup, machine) if size is not None]

    @property
    def _tightest(self) -> tuple[int, str]:
        limits = [limit[:2] for limit in self.limits_of_memory]
        if self.filesystem is not None:
            limits.insert(0, (self.filesystem, self.directory or "the filesystem"))
        return min(limits, default=(0, "memory that cannot be measured here"))


def _filesystem_free(directory: str | None) -> int | None:
    if directory is None:
        return None
    try:
        usage = shutil.disk_usage(directory)  # for a user without privileges; works on every system
    except OSError:
        return None
    return usage.free if usage.total else None  # a tmpfs that was mounted with size=0 has no limit, and a total of 0


def _memory_available(root: Path) -> int | None:
    available = _bytes(root / "proc/meminfo", "MemAvailable")
    if available is not None:
        return available
    try:  # macOS only says how much memory the machine has. Half of it is a guess that leaves the rest to others.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


class _Cgroups(NamedTuple):
    """One version of cgroups: its mount point, the pattern of its line in /proc/self/cgroup, and its files."""

    mount: str
    line: str
    limits: tuple[str, ...]
    usage: str
    prefix: str  # of the counters in memory.stat


_CGROUPS = (
    # memory.high does not kill, but above it the kernel throttles, for ever if it can reclaim no memory without swap.
    _Cgroups("sys/fs/cgroup", r"^0::/(.*)$", ("memory.max", "memory.high"), "memory.current", ""),
    _Cgroups(  # the counters without "total_" leave out the children, whose pages are in the usage
        "sys/fs/cgroup/memory",
        r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_",
    ),
)


@lru_cache
def _limited_cgroups(root: Path) -> list[tuple[_Cgroups, Path]]:
    """Find this process's cgroups with a limit, or the mount if it does not show them. Cached, because it is slow."""
    found = []
    for version in _CGROUPS:
        line = re.search(version.line, read_text(root / "proc/self/cgroup"), re.MULTILINE)
        mount, path = root / version.mount, PurePosixPath(line[1] if line else "")
        shown = ".." not in path.parts and (mount / path).is_dir()
        found += [(version, mount / folder) for folder in ((path, *path.parents) if shown else ("",))]
    return [(version, folder) for version, folder in found if _headroom(version, folder) is not None]


def _headroom(version: _Cgroups, folder: Path) -> tuple[int, int] | None:
    """The headroom of a cgroup, and its limit; None without a limit."""
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
    # v1 writes the largest multiple of a page below 2**63 for "unlimited".
    limit = min((limit for limit in limits if limit < 2**60), default=None)
    usage = _number(folder / version.usage)
    if limit is None or usage is None:
        return None
    # The kernel drops page cache before it kills: all inactive pages, and the active pages (a data file that is read
    # again and again) beyond what programs need. The pages of a tmpfs are in neither counter: the kernel keeps them on
    # the anonymous lists.
    stat = dict(re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE))
    inactive, active = (int(stat.get(f"{version.prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(0, limit - usage + min(inactive + max(0, active - _PROGRAMS), usage)), limit


def _bytes(path: Path, name: str) -> int | None:
    """The bytes of a line "<name>: <number> kB"."""
    line = re.search(rf"^{name}:\s*([0-9]+) kB", read_text(path), re.MULTILINE)
    return None if line is None else int(line[1]) * 1024


def _number(path: Path) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdecimal() else None  # v2 says "max" where there is no limit

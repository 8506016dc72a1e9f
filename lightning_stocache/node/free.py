"""The memory that a cache on this node may take at all.

What is free is the smallest of three: the bytes free in the filesystem where the cache lies, MemAvailable, and the
headroom of this process's memory cgroup and of all its visible parents. A value that cannot be read limits nothing.

Filesystem and cgroup fail differently. A full /dev/shm is an error of the store of a slot; above a cgroup's limit the
kernel kills (measured: `posix_fallocate` beyond it ends in SIGKILL, not ENOSPC). So a limit cannot be found by trying:
it is read here before any memory is taken (`measure`), and again while a cache is filled (`now`).
"""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lightning_stocache.node.open_files import Promised, promised_to_others

__all__ = ["FreeMemory"]

_PROGRAMS = 256 * 2**20  # page cache in active use that is left alone: the libraries of a training have 50 to 150 MB


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes, by what limits them; None if there is no such limit or it cannot be known.

    Example:
        >>> free = FreeMemory(filesystem=64 * 2**20, available=8 * 2**30, cgroup=None, directory="/dev/shm")
        >>> free.bytes, free.limited_by
        (67108864, '/dev/shm')
    """

    filesystem: int | None  # that holds the cache; None for a memfd, which no filesystem limits
    available: int | None  # what the machine can give without swapping (MemAvailable)
    cgroup: int | None  # what this process's cgroup, or the tightest of its parents, still lets it have
    directory: str | None = None  # of `filesystem`
    cgroup_limit: int | None = None  # the limit itself of that cgroup
    own: int = 0  # this process's anonymous memory; 0 if unknown
    promised: Promised = field(default_factory=Promised)  # to caches of this user's other jobs

    @classmethod
    def now(cls, directory: str | None = None, root: Path = Path("/")) -> FreeMemory:
        """What is free at this moment, without what is promised, in the cgroups that `measure` found: 0.1 ms.

        Args:
            directory: Where the cache's file lies, as it is (not below `root`); None for a memfd.
            root: Where `proc` and `sys` are found; another one is for tests.
        """
        rooms = [_headroom(version, folder) for version, folder in _limited_cgroups(root)]
        room, limit = min((room for room in rooms if room is not None), default=(None, None))
        return cls(_filesystem_free(directory), _memory_available(root), room, directory, limit)

    @classmethod
    def measure(cls, directory: str | None, root: Path = Path("/")) -> FreeMemory:
        """What is free when a cache opens; arguments as in `now`."""
        _limited_cgroups.cache_clear()
        own = _bytes(root / "proc/self/status", "RssAnon") or 0
        return replace(cls.now(directory, root), own=own, promised=promised_to_others(directory, root))

    @property
    def bytes(self) -> int:
        """The smallest of the known limits; 0 if none is known, because nothing is safe then."""
        return self._tightest[0]

    @property
    def limited_by(self) -> str:
        """The smallest limit, in words."""
        return self._tightest[1]

    @property
    def memory(self) -> tuple[int, str] | None:
        """The smaller limit of memory, without the filesystem, and its name; None if neither is known."""
        return min((limit[:2] for limit in self.limits_of_memory), default=None)

    @property
    def limits_of_memory(self) -> list[tuple[int, str, int]]:
        """The known limits of memory: the bytes, the name, and how many of them are promised to other jobs."""
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
        usage = shutil.disk_usage(directory)  # what an unprivileged process may use; exists on every system
    except OSError:
        return None
    return usage.free if usage.total else None  # a tmpfs mounted with size=0 has no limit, and says so by a size of 0


def _memory_available(root: Path) -> int | None:
    available = _bytes(root / "proc/meminfo", "MemAvailable")
    if available is not None:
        return available
    try:  # macOS says only how much memory there is. Half of it is a guess that leaves the rest to everything else.
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf
        return None


class _Cgroups(NamedTuple):
    """One version of cgroups: where it is mounted, the line of /proc/self/cgroup, and its files."""

    mount: str
    line: str
    limits: tuple[str, ...]
    usage: str
    prefix: str  # of the counters in memory.stat


_CGROUPS = (
    # memory.high does not kill, but above it the kernel throttles: for ever, as it can reclaim no cache without swap.
    _Cgroups("sys/fs/cgroup", r"^0::/(.*)$", ("memory.max", "memory.high"), "memory.current", ""),
    _Cgroups(  # without "total_" v1 leaves out the children, whose pages are in the usage
        "sys/fs/cgroup/memory",
        r"^\d+:(?:.*,)?memory(?:,.*)?:/(.*)$",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_",
    ),
)


@lru_cache
def _limited_cgroups(root: Path) -> list[tuple[_Cgroups, Path]]:
    """This process's cgroups that have a limit; in a container that shows no such path, the mount. Kept: it is slow."""
    found = []
    for version in _CGROUPS:
        line = re.search(version.line, _text(root / "proc/self/cgroup"), re.MULTILINE)
        mount, path = root / version.mount, PurePosixPath(line[1] if line else "")
        shown = ".." not in path.parts and (mount / path).is_dir()
        found += [(version, mount / folder) for folder in ((path, *path.parents) if shown else ("",))]
    return [(version, folder) for version, folder in found if _headroom(version, folder) is not None]


def _headroom(version: _Cgroups, folder: Path) -> tuple[int, int] | None:
    """What a cgroup leaves, and its limit; None if it has none."""
    limits = [limit for name in version.limits if (limit := _number(folder / name)) is not None]
    # v1 says "unlimited" by the largest multiple of a page below 2**63.
    limit = min((limit for limit in limits if limit < 2**60), default=None)
    usage = _number(folder / version.usage)
    if limit is None or usage is None:
        return None
    # Page cache is dropped before anybody is killed: what nobody used lately, and of the rest (a data file that is read
    # again and again) what is more than programs need. A tmpfs's pages are in neither: the kernel keeps them on the
    # anonymous lists.
    stat = dict(re.findall(r"^(\w+) (\d+)$", _text(folder / "memory.stat"), re.MULTILINE))
    inactive, active = (int(stat.get(f"{version.prefix}{kind}_file", 0)) for kind in ("inactive", "active"))
    return max(0, limit - usage + min(inactive + max(0, active - _PROGRAMS), usage)), limit


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _bytes(path: Path, name: str) -> int | None:
    """The value of a line "<name>: <number> kB"."""
    line = re.search(rf"^{name}:\s*([0-9]+) kB", _text(path), re.MULTILINE)
    return None if line is None else int(line[1]) * 1024


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None  # v2 says "max" where there is no limit

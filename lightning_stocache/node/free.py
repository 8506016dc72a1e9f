"""The memory that a cache on this node may take at all.

`FreeMemory.measure` asks the kernel when a cache opens: the bytes free in the backend's filesystem, MemAvailable, and
the headroom of this process's memory cgroup and of all its visible parents, v1 and v2. A value that cannot be read
limits nothing. `MemoryGauge` asks again and again while a cache is filled: it finds the files once.

Filesystem and cgroup fail differently. A full /dev/shm is an error of the store of a slot; above a cgroup's limit the
kernel kills (measured: `posix_fallocate` beyond it ends in SIGKILL, not ENOSPC). So a limit cannot be found by trying:
it is read here, before any memory is taken, with the memory that caches of other jobs may still take (`open_files`).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from lightning_stocache.node.disk import mounts
from lightning_stocache.node.open_files import Promise, Promises, other_promises

__all__ = ["FreeMemory", "MemoryGauge"]

_PROGRAMS = 256 * 2**20  # page cache in active use that is left alone: the libraries of a training have 50 to 150 MB


class Limit(NamedTuple):
    """Bytes that are free, the name of their limit, and how many of them are promised to caches of other jobs."""

    size: int
    name: str
    promised: Promise


@dataclass(frozen=True)
class FreeMemory:
    """Free bytes, by what limits them; None if there is no such limit or it cannot be known.

    Args:
        filesystem: Free in the filesystem that holds the cache; None for a memfd, which no filesystem limits.
        available: What the machine can give without swapping (MemAvailable).
        cgroup: What this process's cgroup, or the tightest of its parents, still lets it have.
        directory: The folder of `filesystem`, for messages.
        cgroup_limit: The limit itself of that cgroup.
        own: This process's anonymous memory; 0 if unknown.
        promised: What caches of other jobs may still take.

    Example:
        >>> free = FreeMemory(filesystem=64 * 2**20, available=8 * 2**30, cgroup=None, directory="/dev/shm")
        >>> free.bytes, free.limited_by
        (67108864, '/dev/shm')
    """

    filesystem: int | None
    available: int | None
    cgroup: int | None
    directory: str | None = None
    cgroup_limit: int | None = None
    own: int = 0
    promised: Promises = field(default_factory=Promises)

    @classmethod
    def measure(cls, directory: str | None, root: Path = Path("/")) -> FreeMemory:
        """Ask the kernel.

        Args:
            directory: Where the cache's file will lie, as it is (not below `root`); None for a memfd.
            root: Where `proc` and `sys` are found; another one is for tests.
        """
        own = _bytes(root / "proc/self/status", "RssAnon") or 0
        return replace(MemoryGauge(root).read(directory), own=own, promised=other_promises(root))

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
        return min(((limit.size, limit.name) for limit in self.limits_of_memory), default=None)

    @property
    def limits_of_memory(self) -> list[Limit]:
        """The known limits of memory, each with its promises to others."""
        limits = (
            (self.cgroup, "the cgroup's memory limit", self.promised.cgroup),
            (self.available, "MemAvailable", self.promised.machine),
        )
        return [Limit(size, name, promised) for size, name, promised in limits if size is not None]

    @property
    def _tightest(self) -> tuple[int, str]:
        limits = [] if self.filesystem is None else [(self.filesystem, self.directory or "the filesystem")]
        limits += [] if self.memory is None else [self.memory]
        return min(limits, key=lambda limit: limit[0], default=(0, "memory that cannot be measured here"))


class MemoryGauge:
    """Reads what is free, any number of times: 0.1 ms each, where finding the cgroups' files takes several.

    Args:
        root: Where `proc` and `sys` are found; another one is for tests.

    Example:
        >>> gauge = MemoryGauge()
        >>> gauge.read().bytes > 0
        True
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._cgroups = [
            (kind, folder)
            for kind in _HIERARCHIES
            for folder in _cgroup_folders(kind, root)
            if _headroom(kind, folder) is not None
        ]

    def read(self, directory: str | None = None) -> FreeMemory:
        """What is free now; `directory` is where the cache's file lies, None for a memfd."""
        rooms = (_headroom(kind, folder) for kind, folder in self._cgroups)
        # A hybrid system mounts v1 and v2.
        room, limit = min((room for room in rooms if room is not None), default=(None, None))
        return FreeMemory(_filesystem_free(directory), _memory_available(self._root), room, directory, limit)


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
    # macOS says only how much memory there is. Half of it is a guess that leaves the rest to everything else.
    for name, share in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        try:
            pages, page_bytes = os.sysconf(name), os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, ValueError, OSError):  # Windows has no sysconf, macOS not every name
            continue
        if pages > 0 and page_bytes > 0:
            return pages * page_bytes // share
    return None


class _Hierarchy(NamedTuple):
    """Mount and file names of one version of cgroups."""

    filesystem: str
    usual_mount: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str
    active: str


_HIERARCHIES = (
    # memory.high does not kill, but above it the kernel throttles: for ever, as it can reclaim no cache without swap.
    _Hierarchy(
        "cgroup2", "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file", "active_file"
    ),
    # Without "total_" v1 leaves out the children, whose pages are in the usage.
    _Hierarchy(
        "cgroup",
        "sys/fs/cgroup/memory",
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        "total_inactive_file",
        "total_active_file",
    ),
)


def _headroom(kind: _Hierarchy, folder: Path) -> tuple[int, int] | None:
    limits = [limit for name in kind.limits if (limit := _number(folder / name)) is not None]
    # v1 says "unlimited" by the largest multiple of a page below 2**63.
    limit = min((limit for limit in limits if limit < 2**60), default=None)
    usage = _number(folder / kind.usage)
    if limit is None or usage is None:
        return None
    # Page cache is dropped before anybody is killed: what nobody used lately, and of the rest (a data file that is read
    # again and again) what is more than programs need. A tmpfs's pages are in neither: the kernel keeps them on the
    # anonymous lists.
    stat = dict(line.partition(" ")[::2] for line in _lines(folder / "memory.stat"))
    inactive, active = (int(stat[name]) if stat.get(name, "").isdecimal() else 0 for name in kind[-2:])
    return max(0, limit - usage + min(inactive + max(0, active - _PROGRAMS), usage)), limit


def _cgroup_folders(kind: _Hierarchy, root: Path) -> Iterator[Path]:
    """This process's cgroup and its parents up to the mount; only the mount if it does not show the cgroup's path."""
    mounted = [
        (mount.root, root / mount.folder.lstrip("/"))
        for mount in mounts(root)
        if mount.kind == kind.filesystem and (kind.filesystem == "cgroup2" or "memory" in mount.options.split(","))
    ] or [("/", root / kind.usual_mount)]
    path = _own_path(kind, root)
    for mount_root, mount in mounted:
        # A container on v1 mounts only the subtree that the path begins with; in a cgroup namespace both may have "..".
        if path is None or ".." in path.parts or not path.is_relative_to(mount_root):
            continue
        below = path.relative_to(mount_root)
        if os.path.isdir(mount / below):
            yield from (mount / folder for folder in (below, *below.parents))
            return
    yield mounted[0][1]


def _own_path(kind: _Hierarchy, root: Path) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and ("memory" in controllers.split(",") if kind.filesystem == "cgroup" else not controllers):
            return PurePosixPath(path)
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _bytes(path: Path, name: str) -> int | None:
    """The value of a line "<name>: <number> kB"."""
    for line in _lines(path):
        if found := re.match(rf"{name}:\s*([0-9]+) kB", line):
            return int(found[1]) * 1024
    return None


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None  # v2 says "max" where there is no limit

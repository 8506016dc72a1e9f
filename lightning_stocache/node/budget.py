"""What a cache may take: what the user asked for, no more than is really free.

Three facts, in the order in which they are made, each a frozen dataclass of plain values:

1. `Budget.parse` reads the user's wish ("8GiB", "60%", "60% of free", "auto", bytes, 0) or refuses it in words.
2. `FreeMemory.measure` asks the kernel, once, when a cache opens: the bytes free in the backend's filesystem,
   MemAvailable, and the headroom of this process's memory cgroup and of all its visible parents, v1 and v2.
   What cannot be read is unknown and limits nothing.
3. `grant` takes the smallest: the wish, the dataset, and the free memory less the loader's own batches and a margin.

Filesystem and cgroup fail differently. A full /dev/shm is an error that a slot's reservation reports; above a
cgroup's limit the kernel kills (measured: `posix_fallocate` beyond it ends in SIGKILL, not ENOSPC). So a limit
cannot be found by trying: it is computed, before any memory is taken.

Not promised: that the memory is still free later. Others allocate too, which is why slots are reserved one by one.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Literal, NamedTuple, SupportsIndex

_UNITS = {"B": 1}
for _power, _prefix in enumerate("KMGT", 1):
    _UNITS |= {f"{_prefix}B": 1000**_power, f"{_prefix}iB": 1024**_power}
_FORMS = (
    '"8GiB" or "500MB" (B, KB to TB, KiB to TiB), "60%" (of the dataset\'s cached size), "60% of free" (of the memory '
    'that may safely be used), "auto" (the whole dataset), a whole number of bytes, or 0 (off)'
)
# Digits for any float, but a short exponent (1e999999999 would be computed for hours) and decimals that `str` can keep.
_TEXT = re.compile(
    r"(?P<number>(?:[0-9]{1,400}(?:\.[0-9]{0,9})?|\.[0-9]{1,9})(?:e\+?[0-9]{1,2})?)\s*"
    r"(?:(?P<unit>(?:[kmgt]i?)?b)|(?P<percent>%)(?P<free>\s*of\s+free)?)?",
    re.IGNORECASE | re.ASCII,
)


def _refused(value: object, rule: str) -> str:
    return f"budget {rule}; got {value!r}. Accepted are {_FORMS}."


@dataclass(frozen=True)
class Budget:
    """What the user asked for, per node; made by `parse`.

    Args:
        amount: Bytes, or a percentage from 0 to 100.
        unit: What `amount` counts: bytes, or percent of the dataset's cached size or of what may safely be used.

    Raises:
        ValueError: `amount` is negative, not whole (bytes), or above 100 (percent).

    Example:
        >>> Budget.parse("1.5 GiB").wanted(dataset_bytes=10**10, free_bytes=10**9)
        1610612736
        >>> Budget.parse("60%").wanted(dataset_bytes=1000, free_bytes=500)
        600
        >>> str(Budget.parse(2**33)), str(Budget.parse("60 % of free")), str(Budget.parse("0%"))
        ('8 GiB', '60% of free', '0')
    """

    amount: Fraction
    unit: Literal["bytes", "% of dataset", "% of free"] = "bytes"

    def __post_init__(self) -> None:
        if self.amount < 0:
            raise ValueError(_refused(float(self.amount), "must not be negative"))
        if self.unit == "bytes" and self.amount.denominator != 1:
            raise ValueError(_refused(float(self.amount), "in bytes must be whole"))
        if self.unit != "bytes" and self.amount > 100:
            raise ValueError(_refused(f"{float(self.amount):.12g}{self.unit}", "cannot be more than 100 percent"))

    @classmethod
    def parse(cls, value: int | float | str | Budget) -> Budget:
        """Read a budget as people write it in Python, YAML and on the command line.

        Args:
            value: See the example. Units may be written in any case, with or without a space. An integral float above
                1 is bytes (Hydra reads `8e9` as a float); one in (0, 1] could mean a share or bytes, and is refused.

        Raises:
            ValueError: None of the accepted forms; the message names the value and lists the forms.
            TypeError: None, a bool, or anything that is no number and no string.

        Example:
            >>> [Budget.parse(value).wanted(2000, 1000) for value in ("auto", "25%", "25% of free", 0, "0%")]
            [2000, 500, 250, 0, 0]
            >>> [Budget.parse(value).wanted(2000, 1000) for value in ("1.5KB", "1 kib", 4096, "4096", 8e3)]
            [1500, 1024, 4096, 4096, 8000]
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, float, SupportsIndex)):
            raise TypeError(_refused(value, "must be a number or a string"))
        if isinstance(value, str):
            return cls._of_text(value)
        if not isinstance(value, float):
            return cls._of_number(Fraction(value.__index__()), value)  # NumPy's integers too
        if not math.isfinite(value):
            raise ValueError(_refused(value, "must be finite"))
        return cls._of_number(Fraction(value), value, share_possible=True)

    @classmethod
    def _of_text(cls, value: str) -> Budget:
        text = value.strip()
        if text.lower() == "auto":
            return cls(Fraction(100), "% of dataset")
        match = _TEXT.fullmatch(text)
        if match is None:
            rule = "must not be negative" if text.startswith("-") else "cannot be read"
            raise ValueError(_refused(value, rule))
        number = Fraction(match["number"])
        if match["unit"]:
            return cls(Fraction(math.floor(number * _UNITS[match["unit"].upper().replace("I", "i")])))
        if not match["percent"]:  # the shell or YAML may have made a string of a number: the same rules
            return cls._of_number(number, value, share_possible=not match["number"].isdigit())
        if number > 100:
            raise ValueError(_refused(value, "cannot be more than 100 percent"))
        if number == 0:
            return cls(Fraction(0))  # there is only one way to be off, so that equal budgets are equal
        return cls(number, "% of free" if match["free"] else "% of dataset")

    @classmethod
    def _of_number(cls, number: Fraction, value: object, share_possible: bool = False) -> Budget:
        if number < 0:
            raise ValueError(_refused(value, "must not be negative"))
        if share_possible and 0 < number <= 1:
            share = f'"{float(number * 100):.12g}%"'
            rule = f"is ambiguous: a float in (0, 1] could mean a share or bytes (write {share} for the share)"
            raise ValueError(_refused(value, rule))
        if number.denominator != 1:
            raise ValueError(_refused(value, "without a unit must be a whole number of bytes"))
        return cls(number)

    @property
    def off(self) -> bool:
        """Whether nothing is to be cached at all."""
        return self.amount == 0

    def wanted(self, dataset_bytes: int, free_bytes: int) -> int:
        """The bytes asked for, rounded down; never negative, and not yet limited by anything.

        Args:
            dataset_bytes: What the whole dataset takes in the cache, slot states included.
            free_bytes: What may safely be used, reserve and margin already taken off.
        """
        whole = {"bytes": 100, "% of dataset": dataset_bytes, "% of free": free_bytes}[self.unit]
        return max(0, math.floor(self.amount * whole / 100))

    def __str__(self) -> str:
        """A form that `parse` reads back as an equal budget."""
        if self.unit != "bytes":
            if self.unit == "% of dataset" and self.amount == 100:
                return "auto"
            return f"{float(self.amount):.9f}".rstrip("0").rstrip(".") + self.unit.removesuffix(" of dataset")
        if self.off:
            return "0"
        size, unit = max((size, unit) for unit, size in _UNITS.items() if self.amount % size == 0)
        return f"{self.amount / size} {unit}"


@dataclass(frozen=True)
class FreeMemory:
    """What is free, in bytes, seen from three sides; None where there is no such limit or it cannot be known.

    Args:
        filesystem: Free in the filesystem that holds the cache; None for memory that no filesystem limits (memfd).
        available: What the machine can give without swapping (MemAvailable).
        cgroup: What this process's cgroup, or the tightest of its parents, still lets it have.
        directory: The folder that `filesystem` speaks of, for messages.

    Example:
        >>> free = FreeMemory(filesystem=64 * 2**20, available=8 * 2**30, cgroup=None, directory="/dev/shm")
        >>> free.bytes, free.limited_by
        (67108864, '/dev/shm (64 MiB free)')
    """

    filesystem: int | None
    available: int | None
    cgroup: int | None
    directory: str | None = None

    @classmethod
    def measure(cls, directory: str | None, root: Path = Path("/")) -> FreeMemory:
        """Ask the kernel.

        Args:
            directory: Where the cache's file will lie, as it is (not below `root`); None for memory that no filesystem
                limits (memfd).
            root: Where `proc` and `sys` are found; another one is for tests.
        """
        return cls(_filesystem_free(directory), _memory_available(root), _cgroup_headroom(root), directory)

    @property
    def bytes(self) -> int:
        """The smallest of the limits that are known; 0 if none is, because nothing is then safe."""
        return self._tightest[0]

    @property
    def limited_by(self) -> str:
        """The smallest limit in words, with what it leaves free."""
        return self._tightest[1]

    @property
    def _tightest(self) -> tuple[int, str]:
        limits = (
            (self.filesystem, self.directory or "the filesystem"),
            (self.cgroup, "the cgroup's memory limit"),
            (self.available, "MemAvailable"),
        )
        known = [(size, f"{name} ({format_bytes(size)} free)") for size, name in limits if size is not None]
        return min(known, key=lambda limit: limit[0], default=(0, "free memory that cannot be measured here"))


@dataclass(frozen=True)
class Grant:
    """What a cache gets.

    Args:
        bytes: What it may use, slot states included.
        wanted: What the budget asks for; may be more than the dataset needs.
        limited_by: Which shortage of memory made it less; None if none did (a dataset smaller than the budget is none).
    """

    bytes: int
    wanted: int
    limited_by: str | None


def grant(budget: Budget, dataset_bytes: int, free: FreeMemory, reserve: int) -> Grant:
    """Give what is asked for, but no more than the dataset needs and no more than is safely free.

    Args:
        budget: The user's wish.
        dataset_bytes: What the whole dataset takes in the cache, slot states included.
        free: The node's free memory, measured before the cache takes any.
        reserve: Bytes to leave to the loader, from `loader_reserve`.

    Example:
        >>> free = FreeMemory(filesystem=2**30, available=2**33, cgroup=None, directory="/dev/shm")
        >>> given = grant(Budget.parse("8GiB"), dataset_bytes=2**34, free=free, reserve=2**20)
        >>> format_bytes(given.bytes), given.limited_by
        ('1002.5 MiB', '/dev/shm (1 GiB free)')
    """
    # Kept back besides the reserve, because above a cgroup's limit the kernel kills. Two percent: every process that
    # reads the cache pays page tables for it, 8 bytes per 4 KiB page or 0.2 %, and this covers ten processes. At least
    # 16 MiB: a step of a Python heap or of a collective's buffers, yet little of Docker's 64 MiB /dev/shm.
    margin = max(free.bytes // 50, 16 * 2**20)
    safe = max(0, free.bytes - reserve - margin)
    wanted = budget.wanted(dataset_bytes, safe)
    useful = min(wanted, dataset_bytes)
    return Grant(min(useful, safe), wanted, free.limited_by if safe < useful else None)


def loader_reserve(batch_bytes: int, num_workers: int, prefetch_factor: int | None, ranks: int) -> int:
    """Bytes that finished batches of the loader itself may hold on this node, beside the cache.

    Args:
        batch_bytes: One batch of one rank.
        num_workers: Worker processes of each rank.
        prefetch_factor: Batches that each worker makes ahead; None means DataLoader's own default, 2.
        ranks: Ranks on this node.

    Example:
        >>> loader_reserve(batch_bytes=10, num_workers=4, prefetch_factor=None, ranks=2)
        220
    """
    ahead = num_workers * (2 if prefetch_factor is None else prefetch_factor)
    # Three more than the workers hold: the batch of the running step, the one that Lightning fetches ahead, and the one
    # that is gathered or copied to pinned memory meanwhile.
    return ranks * (ahead + 3) * batch_bytes


def format_bytes(n: int) -> str:
    """Write a number of bytes for people, in powers of 1024 and with at most one decimal.

    Example:
        >>> format_bytes(1_825_361_100), format_bytes(64 * 2**20), format_bytes(0)
        ('1.7 GiB', '64 MiB', '0 B')
    """
    power = 0
    while power < 4 and round(abs(n) / 1024**power, 1) >= 1024:  # after rounding, or 1023.99 MiB would read "1024 MiB"
        power += 1
    return f"{n / 1024**power:.1f}".removesuffix(".0") + (" B", " KiB", " MiB", " GiB", " TiB")[power]


def _filesystem_free(directory: str | None) -> int | None:
    if directory is None:
        return None
    try:
        usage = shutil.disk_usage(directory)  # what an unprivileged process may use; exists on every system
    except OSError:
        return None
    return usage.free if usage.total else None  # a tmpfs mounted with size=0 has no limit, and says so by a size of 0


def _memory_available(root: Path) -> int | None:
    for line in _lines(root / "proc/meminfo"):
        if found := re.match(r"MemAvailable:\s*([0-9]+) kB", line):
            return int(found[1]) * 1024
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
    """How one version of cgroups is mounted and named."""

    filesystem: str
    usual_mount: str
    limits: tuple[str, ...]
    usage: str
    reclaimable: str


_HIERARCHIES = (
    # memory.high does not kill, but above it the kernel throttles: for ever, as it can reclaim no cache without swap.
    _Hierarchy("cgroup2", "sys/fs/cgroup", ("memory.max", "memory.high"), "memory.current", "inactive_file"),
    # Without "total_" v1 leaves out the children, whose pages are in the usage.
    _Hierarchy(
        "cgroup", "sys/fs/cgroup/memory", ("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"
    ),
)


def _cgroup_headroom(root: Path) -> int | None:
    """The minimum over this process's cgroup and its parents, of both versions: a hybrid system mounts both."""
    rooms = (_headroom(kind, folder) for kind in _HIERARCHIES for folder in _cgroup_folders(kind, root))
    return min((room for room in rooms if room is not None), default=None)


def _headroom(kind: _Hierarchy, folder: Path) -> int | None:
    limits = [limit for name in kind.limits if (limit := _number(folder / name)) is not None]
    # v1 says "unlimited" by the largest multiple of a page below 2**63.
    limit = min((limit for limit in limits if limit < 2**60), default=None)
    usage = _number(folder / kind.usage)
    if limit is None or usage is None:
        return None
    # Page cache that nobody used lately is dropped before anybody is killed. A tmpfs's pages are not in it: the kernel
    # keeps them on the anonymous lists.
    stat = dict(line.partition(" ")[::2] for line in _lines(folder / "memory.stat"))
    reclaimable = stat.get(kind.reclaimable, "")
    return max(0, limit - usage + (min(int(reclaimable), usage) if reclaimable.isdecimal() else 0))


def _cgroup_folders(kind: _Hierarchy, root: Path) -> Iterator[Path]:
    """This process's cgroup and its parents up to the mount; only the mount if it does not show the cgroup's path."""
    mounts = list(_mounts(kind, root)) or [("/", root / kind.usual_mount)]
    own = _own_path(kind, root)
    for mount_root, mount in mounts:
        # A container on v1 mounts only the subtree that the path begins with; in a cgroup namespace both may have "..".
        if own is None or ".." in own.parts or not own.is_relative_to(mount_root):
            continue
        below = own.relative_to(mount_root)
        if os.path.isdir(mount / below):
            yield from (mount / folder for folder in (below, *below.parents))
            return
    yield mounts[0][1]


def _own_path(kind: _Hierarchy, root: Path) -> PurePosixPath | None:
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and ("memory" in controllers.split(",") if kind.filesystem == "cgroup" else not controllers):
            return PurePosixPath(path)
    return None


def _mounts(kind: _Hierarchy, root: Path) -> Iterator[tuple[str, Path]]:
    for line in _lines(root / "proc/self/mountinfo"):
        place, _, what = line.partition(" - ")
        fields, kinds = place.split(), what.split()
        if len(fields) < 5 or not kinds or kinds[0] != kind.filesystem:
            continue
        if kind.filesystem == "cgroup2" or "memory" in kinds[-1].split(","):
            # The kernel writes a space in a path as \040.
            mount_root, mount = (re.sub(r"\\([0-7]{3})", lambda c: chr(int(c[1], 8)), path) for path in fields[3:5])
            yield mount_root, root / mount.lstrip("/")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None  # v2 says "max" where there is no limit

"""Who holds memory of caches now: living processes, found by their open files.

A segment without a name is seen nowhere but below `/proc/<pid>/fd`. Every descriptor of this user's processes is looked
at: files in /dev/shm, deleted or named, and memfds of ours. One that begins with a segment's magic number is a segment;
its lock file is empty and says nothing. Other files in /dev/shm (torch's batches) are told too, for they take the same
room. Of a file that belongs to another user (root sees them all) nothing is read, only its owner and its size are told.
Processes of other users cannot be looked into; they are counted. Caches with a name on a disk are known by that.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_stocache.node.files import token_of
from lightning_stocache.node.manifest import printable

__all__ = ["Held", "Holder", "held"]

_MEMFD = "/memfd:lightning_stocache"
_ON_DISK = re.compile(r".*/lsc-[0-9]+-[^/]*(?<!\.locks)")
_COMMAND = 120  # characters of a command line that are shown


@dataclass(frozen=True)
class Holder:
    """A process: its id and its command line, printable."""

    pid: int
    command: str


@dataclass(frozen=True)
class Held:
    """A file in memory and the processes that have it open.

    Args:
        name: as the kernel calls it, printable.
        key: device and inode.
        owner: the user whose file it is.
        allocated_bytes: memory that it holds, or room on a disk.
        contents: what a look made of it; None if it is no segment of a cache, or another user's.
        holders: by process id.
    """

    name: str
    key: tuple[int, int]
    owner: int
    allocated_bytes: int
    contents: Any
    holders: tuple[Holder, ...] = ()

    @property
    def on_disk(self) -> bool:
        """Whether it takes no memory, but room on a disk."""
        return not self.name.startswith(("/dev/shm/", _MEMFD))


def held(root: Path = Path("/"), look: Callable[[int], Any] = token_of) -> tuple[list[Held], int]:
    """The files in memory that processes have open, the largest first, and how many processes cannot be looked into.

    Args:
        root: where `proc` is found; another one is for tests.
        look: what is to be known of a segment, from a descriptor of its file; ValueError if it is none.

    Raises:
        OSError: there is no /proc here.
    """
    files: dict[tuple[int, int], Held] = {}
    pids: dict[tuple[int, int], set[int]] = {}
    closed = 0
    processes = sorted(entry for entry in root.joinpath("proc").iterdir() if entry.name.isdecimal())
    if not processes:
        raise FileNotFoundError("there is an empty folder in place of /proc")
    for entry in processes:
        try:
            descriptors = list(entry.joinpath("fd").iterdir())
        except PermissionError:
            closed += 1
            continue
        except OSError:  # it has ended
            continue
        for descriptor in descriptors:
            if (key := _key(descriptor)) is None:
                continue
            if key not in files and (found := _file(descriptor, key, look)) is not None:
                files[key] = found
            pids.setdefault(key, set()).add(int(entry.name))
    told = [
        replace(file, holders=tuple(Holder(pid, _command(root / f"proc/{pid}/cmdline")) for pid in sorted(pids[key])))
        for key, file in files.items()
    ]
    return sorted(told, key=lambda file: -file.allocated_bytes), closed


def _key(descriptor: Path) -> tuple[int, int] | None:
    """Device and inode of a file in memory that holds any."""
    try:
        file = os.readlink(descriptor)
        if not file.startswith(("/dev/shm/", _MEMFD)) and not _ON_DISK.fullmatch(file):
            return None
        facts = descriptor.stat()
    except OSError:  # closed meanwhile, or another user's
        return None
    return (facts.st_dev, facts.st_ino) if facts.st_blocks and stat.S_ISREG(facts.st_mode) else None


def _file(descriptor: Path, key: tuple[int, int], look: Callable[[int], Any]) -> Held | None:
    try:
        name, facts = printable(os.readlink(descriptor)), descriptor.stat()
        contents = _contents(descriptor, look) if facts.st_uid == os.getuid() else None
    except OSError:  # closed meanwhile
        return None
    return Held(name, key, facts.st_uid, facts.st_blocks * 512, contents)


def _contents(descriptor: Path, look: Callable[[int], Any]) -> Any:
    try:
        file = os.open(descriptor, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return look(file)
    except (ValueError, OSError):
        return None
    finally:
        os.close(file)


def _command(path: Path) -> str:
    try:
        with path.open("rb") as file:
            words = file.read(4 * _COMMAND)
    except OSError:
        return "(ended)"
    return printable(words.replace(b"\0", b" ").decode(errors="replace").strip(), _COMMAND) or "(ended)"

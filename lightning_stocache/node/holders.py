"""Who holds memory of caches now: living processes, found by their open files.

A segment without a name is seen nowhere but below `/proc/<pid>/fd`. Every descriptor of this user's processes is looked
at: files in /dev/shm, deleted or named, and memfds of ours. One that begins with a segment's magic number is a segment;
its lock file is empty and says nothing. Other files in /dev/shm (torch's batches) are told too, for they take the same
room. Processes of other users cannot be looked into; they are counted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stocache.node.files import HEADER_BYTES, token_of
from lightning_stocache.node.manifest import read_manifest

__all__ = ["Contents", "Held", "Holder", "held"]

_MEMFD = "/memfd:lightning_stocache"
_COMMAND = 120  # characters of a command line that are shown


@dataclass(frozen=True)
class Holder:
    """A process: its id and its command line."""

    pid: int
    command: str


@dataclass(frozen=True)
class Contents:
    """What a segment says about itself.

    Args:
        manifest: its own words; empty if it has none.
        filled: slots that are READY, if it says how many it has.
    """

    manifest: dict[str, Any]
    filled: int = 0


@dataclass(frozen=True)
class Held:
    """A file in memory and the processes that have it open.

    Args:
        name: as the kernel calls it.
        allocated_bytes: memory that it holds.
        contents: what it is; None if it is no segment of a cache.
        holders: by process id.
    """

    name: str
    allocated_bytes: int
    contents: Contents | None
    holders: tuple[Holder, ...]


def held(root: Path = Path("/")) -> tuple[list[Held], int]:
    """The files in memory that processes have open, the largest first, and how many processes cannot be looked into.

    Args:
        root: where `proc` is found; another one is for tests.

    Raises:
        OSError: there is no /proc here.
    """
    files: dict[tuple[int, int], tuple[str, int, Contents | None]] = {}
    pids: dict[tuple[int, int], set[int]] = {}
    closed = 0
    for entry in sorted(root.joinpath("proc").iterdir()):
        if not entry.name.isdigit():
            continue
        try:
            descriptors = list(entry.joinpath("fd").iterdir())
        except PermissionError:
            closed += 1
            continue
        except OSError:  # it has ended
            continue
        for descriptor in descriptors:
            found = _look(descriptor)
            if found is not None:
                key, what = found
                files[key] = what
                pids.setdefault(key, set()).add(int(entry.name))
    told = [
        Held(*what, tuple(Holder(pid, _command(root / f"proc/{pid}/cmdline")) for pid in sorted(pids[key])))
        for key, what in files.items()
    ]
    return sorted(told, key=lambda one: -one.allocated_bytes), closed


def _look(descriptor: Path) -> tuple[tuple[int, int], tuple[str, int, Contents | None]] | None:
    """Device and inode, and what lies there, if it is a file in memory that holds any."""
    try:
        name = os.readlink(descriptor)
        if not name.startswith(("/dev/shm/", _MEMFD)):
            return None
        facts = descriptor.stat()
        if not facts.st_blocks:
            return None
        return (facts.st_dev, facts.st_ino), (name, facts.st_blocks * 512, _contents(descriptor))
    except OSError:  # closed meanwhile, or another user's
        return None


def _contents(descriptor: Path) -> Contents | None:
    try:
        file = os.open(descriptor, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        token_of(file)
        try:
            manifest = read_manifest(os.pread(file, HEADER_BYTES, 0))
            slots, *_ = (int(manifest["geometry"][name]) for name in ("slots", "start", "size"))
        except (ValueError, KeyError, TypeError):
            return Contents({})
        return Contents(manifest, slots - os.pread(file, slots, HEADER_BYTES).count(0))  # a state of 0 is EMPTY
    except (ValueError, OSError):
        return None
    finally:
        os.close(file)


def _command(path: Path) -> str:
    try:
        words = path.read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "(ended)"
    return words if len(words) <= _COMMAND else words[: _COMMAND - 3] + "..."

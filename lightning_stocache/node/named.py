"""Segments that are meant to outlive their job.

A named segment is a file `lsc-<uid>-<name>` in the memory directory, whose header carries a manifest: plain values that
say what lies in it. Two jobs of one user may share it. The protocol, by `flock` on the file and by inode:

- Who uses it holds a shared lock, from before the name can be seen until its last process has ended: forked workers
  keep the lock of the rank that they come from, and the kernel drops it when they die.
- Who makes it writes header and manifest first, takes the lock, and only then links the name. A name that can be seen
  is complete; who loses the race opens what the winner made.
- Who removes it must get the exclusive lock, so nobody uses it, and takes away the lock file before the name.
- Whoever has taken a lock looks again whether the name still leads to the same inode: it may have been removed
  meanwhile.

A file of another user is never opened, whatever its name, nor is one that others may write to or that is a link.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_stocache.node.files import (
    HEADER_BYTES,
    make_file,
    memory_directory,
    token_of,
    write_header,
)
from lightning_stocache.node.manifest import read_manifest, write_manifest
from lightning_stocache.node.segment import Segment

if sys.platform != "win32":
    import fcntl

__all__ = ["NamedSegment", "check_name", "clean", "join_named", "named_segments", "open_named"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def check_name(name: str) -> str:
    """A name, if it is one.

    Raises:
        ValueError: it is none.

    Example:
        >>> check_name("photos-256")
        'photos-256'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name.endswith(".locks"):
        raise ValueError(f"name must be letters, digits, dots, dashes and underscores, at most 100, got {name!r}")
    return name


def join_named(name: str) -> tuple[Segment, dict[str, Any]] | None:
    """Open the segment of a name with its manifest, if there is one; errors as in `open_named`.

    It is the same object where this process has it open already; it then has to be closed once more.
    """
    segment = _join(_path(name))
    return None if segment is None else (segment, _manifest_of(segment))


def open_named(name: str, size: int, manifest: dict[str, Any]) -> tuple[Segment, dict[str, Any]]:
    """Open the segment of a name, or make it.

    Args:
        name: letters, digits, dots, dashes and underscores, at most 100.
        size: payload bytes, if it has to be made.
        manifest: what it then says about itself; must fit in the header as JSON.

    Returns:
        The segment, and the manifest that it has: the given one if it was made now. It may differ otherwise, also in
        what it says of the size. It is the same object where this process has it open already, and then has to be
        closed once more.

    Raises:
        ValueError: the name is none, the manifest is too large, or what lies there is no segment.
        PermissionError: the name belongs to another user's file, or to one that others may write to.
        OSError: there is no memory for the header.
    """
    path = _path(name)
    while True:
        segment = _join(path) or _publish(path, size, manifest)
        if segment is not None:
            return segment, _manifest_of(segment)


@dataclass(frozen=True)
class NamedSegment:
    """What lies under a name.

    Args:
        name: the name.
        path: the file.
        allocated_bytes: memory that it holds.
        in_use: whether a living process uses it.
        modified: seconds since the epoch of its last store through a system call.
        manifest: what it says about itself; empty if it cannot be read.
    """

    name: str
    path: str
    allocated_bytes: int
    in_use: bool
    modified: float
    manifest: dict[str, Any]

    @property
    def age_seconds(self) -> float:
        """How long ago that was."""
        return max(0.0, time.time() - self.modified)


def named_segments() -> list[NamedSegment]:
    """The named segments of this user on this node, by name."""
    return list(_inspect(remove=False))


def clean(name: str | None = None) -> list[NamedSegment]:
    """Remove the named segments of this user that nobody uses, or the one of a name.

    Returns:
        What was removed.
    """
    if name is not None:
        check_name(name)
    return [found for found in _inspect(remove=True, only=name) if not found.in_use]


def _inspect(*, remove: bool, only: str | None = None) -> Iterator[NamedSegment]:
    prefix = f"lsc-{os.getuid()}-"
    for path in sorted(Path(memory_directory()).glob(f"{prefix}*")):
        name = path.name.removeprefix(prefix)
        if path.suffix == ".locks" or only not in (None, name):
            continue
        try:
            data = _open_own(str(path))
        except OSError:
            continue
        try:
            in_use = not _locked(data, fcntl.LOCK_EX)
            facts = os.fstat(data)
            manifest: dict[str, Any] = {}
            with contextlib.suppress(ValueError):
                manifest = read_manifest(os.pread(data, HEADER_BYTES, 0))
            if remove and not in_use and _still_there(data, str(path)):
                _remove(str(path))
            yield NamedSegment(name, str(path), facts.st_blocks * 512, in_use, facts.st_mtime, manifest)
        finally:
            os.close(data)


def _path(name: str) -> str:
    return os.path.join(memory_directory(), f"lsc-{os.getuid()}-{check_name(name)}")


def _join(path: str) -> Segment | None:
    """The segment that lies there, used from now on; None if there is none, or none any more."""
    try:
        data = _open_own(path)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(data, fcntl.LOCK_SH)  # waits for a janitor that has just begun
        if not _still_there(data, path):
            os.close(data)
            return None
        if (known := Segment.opened(token_of(data))) is not None:
            os.close(data)  # a second lock file's descriptor would drop the locks of the first when it is closed
            return known.hold()
        return Segment(data, _open_locks(path), os.fstat(data).st_size - HEADER_BYTES, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(data)
        raise


def _publish(path: str, size: int, manifest: dict[str, Any]) -> Segment | None:
    """Make the segment and give it its name; None if another process was first."""
    directory = os.open(memory_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        data, _ = make_file("tmpfile")
        try:
            write_header(data, size)
            write_manifest(data, manifest)
            fcntl.flock(data, fcntl.LOCK_SH)
            # src_dir_fd makes Python call linkat, which follows the link below /proc; link(2) would fail with EXDEV.
            os.link(f"/proc/self/fd/{data}", path, src_dir_fd=directory, follow_symlinks=True)
            return Segment(data, _open_locks(path), size, path)
        except FileExistsError:
            os.close(data)
            return None
        except BaseException:
            with contextlib.suppress(OSError):
                os.close(data)
            raise
    finally:
        os.close(directory)


def _open_own(path: str) -> int:
    """Open a file that is certainly this user's own.

    Raises:
        PermissionError: it is not.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    facts = os.fstat(descriptor)
    if facts.st_uid != os.getuid() or not stat.S_ISREG(facts.st_mode) or facts.st_mode & 0o077:
        os.close(descriptor)
        raise PermissionError(f"{path} is not a file of this user alone; it is not trusted")
    return descriptor


def _open_locks(path: str) -> int:
    """The lock file beside a segment. Only who holds a lock on the segment comes here, so no janitor is at work."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(path + ".locks", flags, 0o600)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _still_there(descriptor: int, path: str) -> bool:
    try:
        return os.stat(path, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    for one in (path + ".locks", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(one)


def _manifest_of(segment: Segment) -> dict[str, Any]:
    return read_manifest(segment.header)

"""Directories on a disk that can hold caches.

Filesystems that may hold a cache are named, and others refused: through a mapping a machine does not see what other
machines write, and there are more network filesystems than anybody can list.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile

from lightning_stocache.node import locks
from lightning_stocache.node.files import printable, read_text

if sys.platform != "win32":
    import fcntl

__all__ = ["DiskError", "check_directory", "filesystem_of"]

_KINDS = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "bcachefs", "f2fs", "tmpfs", "overlay")
"""Filesystems of one machine, by their names in /proc/self/mountinfo, whose mappings show what others write."""

_LISTED = ", ".join(_KINDS)


class DiskError(OSError):
    """A directory cannot hold a cache."""


def check_directory(directory: str) -> str:
    """Check that a directory can hold a cache, and make it if its parent exists. Returns its absolute path.

    Raises:
        DiskError: the directory cannot hold a cache; the message says why, and what to do.
    """
    path = os.path.abspath(os.path.expanduser(directory))
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        if (kind := filesystem_of(path)) and kind not in _KINDS:
            raise OSError(f"its filesystem ({kind}) may not show at once what others write: it is none of {_LISTED}")
        with tempfile.TemporaryFile(dir=path) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            if locks.are_exclusive() and not locks.excludes(file.fileno()):
                raise OSError("its locks do not exclude other processes")
    except OSError as error:
        raise DiskError(
            f"dir={printable(path)!r} cannot hold a cache: {error.strerror or error}. Give a directory on a disk of "
            "this machine, or omit dir= for a cache in memory"
        ) from error
    return path


def filesystem_of(path: str) -> str:
    """The type of the filesystem of a directory, or "" if the system does not tell (there is no mountinfo)."""
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        number = re.search(r"^mnt_id:\s*(\d+)", read_text(f"/proc/self/fdinfo/{directory}"), re.MULTILINE)
    finally:
        os.close(directory)
    mounts = read_text("/proc/self/mountinfo")  # by its number: some filesystems (btrfs) have a device for each part
    line = number and re.search(rf"^{number[1]} .* - (\S+) ", mounts, re.MULTILINE)
    return line[1] if line else ""

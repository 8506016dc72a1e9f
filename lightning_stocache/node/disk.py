"""Directories on a disk that can hold caches.

Network filesystems are refused: a mapping shows a machine only what it has written itself.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

from lightning_stocache.node.header import printable

if sys.platform != "win32":
    import fcntl

__all__ = ["DiskError", "check_directory", "filesystem_of"]

_REMOTE = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "afs", "9p", "glusterfs", "pvfs2"),
    *("orangefs", "panfs", "ocfs2", "gfs2", "virtiofs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"),
    *("fuse.gcsfuse", "fuse.juicefs", "fuse.rclone", "fuse.ceph", "fuse.mount-s3", "fuse.goofys"),
}
"""Network filesystems, as /proc/self/mountinfo calls them."""

_ELSEWHERE = "Give a directory on a disk of this machine, or leave dir= away for a cache in memory"


class DiskError(OSError):
    """A directory cannot hold a cache."""


def check_directory(directory: str) -> str:
    """The absolute path of a directory that can hold a cache; it is made if its parent exists.

    Raises:
        DiskError: it can hold none; the message says why, and what to do.
    """
    path = os.path.abspath(os.path.expanduser(directory))
    shown = printable(path)
    try:
        if not os.path.isdir(path):
            os.mkdir(path, 0o700)
    except FileExistsError:
        if not os.path.isdir(path):
            raise DiskError(f"dir={shown!r} is not a directory. {_ELSEWHERE}") from None
    except OSError as error:
        raise DiskError(f"dir={shown!r} is not there and cannot be made ({error.strerror}). {_ELSEWHERE}") from error
    kind = filesystem_of(path)
    if kind in _REMOTE:
        raise DiskError(
            f"dir={shown!r} lies on another machine ({kind}), where a cache that is mapped would not see what others "
            f"write. {_ELSEWHERE}"
        )
    try:
        with tempfile.TemporaryFile(dir=path) as file:  # segments take both kinds of lock
            descriptor = file.fileno()
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # BSD and macOS: the two kinds exclude each other
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError as error:
        raise DiskError(f"dir={shown!r} cannot hold a cache: {error.strerror or error}. {_ELSEWHERE}") from error
    return path


def filesystem_of(path: str) -> str:
    """The type of filesystem that a directory lies on, by its device; empty if it cannot be known."""
    device = os.stat(path).st_dev
    try:
        mounts = Path("/proc/self/mountinfo").read_text(errors="replace")
    except OSError:
        return ""
    line = re.search(rf"^\d+ \d+ {os.major(device)}:{os.minor(device)} .* - (\S+) ", mounts, re.MULTILINE)
    return line[1] if line else ""

"""Directories on a disk that can hold caches.

Network filesystems are refused: through a mapping a machine does not see what other machines write.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile

from lightning_stocache.node.files import printable, read_text

if sys.platform != "win32":
    import fcntl

__all__ = ["DiskError", "check_directory", "filesystem_of"]

_REMOTE = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "afs", "9p", "glusterfs", "pvfs2"),
    *("orangefs", "panfs", "ocfs2", "gfs2", "virtiofs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"),
    *("fuse.gcsfuse", "fuse.juicefs", "fuse.rclone", "fuse.ceph", "fuse.mount-s3", "fuse.goofys"),
}
"""Network filesystems, by their names in /proc/self/mountinfo."""


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
        if (kind := filesystem_of(path)) in _REMOTE:
            raise OSError(f"it lies on another machine ({kind}), where a mapping does not see what others write")
        with tempfile.TemporaryFile(dir=path) as file:  # segments take both kinds of lock
            fcntl.flock(file, fcntl.LOCK_SH)
            fcntl.flock(file, fcntl.LOCK_UN)  # on BSD and macOS the two kinds of lock exclude each other
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
    except OSError as error:
        raise DiskError(
            f"dir={printable(path)!r} cannot hold a cache: {error.strerror or error}. Give a directory on a disk of "
            "this machine, or leave dir= away for a cache in memory"
        ) from error
    return path


def filesystem_of(path: str) -> str:
    """The type of the filesystem of a directory, found by its device, or "" if it is unknown."""
    device = os.stat(path).st_dev
    mounts = read_text("/proc/self/mountinfo")
    line = re.search(rf"^\d+ \d+ {os.major(device)}:{os.minor(device)} .* - (\S+) ", mounts, re.MULTILINE)
    return line[1] if line else ""

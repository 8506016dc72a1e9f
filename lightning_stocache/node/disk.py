"""Segments whose file lies on a disk, in a directory of the user's.

They are mapped like those in memory, and the kernel keeps what is read and written in its page cache. What is different
is how they fail. A disk can be full, be read only, have a bad block, or take seconds for a page; a file can be cut off.
Through the mapping all of these are a SIGBUS or a wait without an end; through the file they are errors. So what is
stored goes through the file, and so does what has not been read before (`fetch`).

Files on other machines' disks are refused: a mapping shows a machine only what it has written itself.
"""

from __future__ import annotations

import os
import re
import tempfile

import lightning_stocache.node.files as files
from lightning_stocache.node.header import HEADER_BYTES, printable
from lightning_stocache.node.locks import give_back, take
from lightning_stocache.node.segment import Segment

__all__ = ["DiskError", "DiskSegment", "check_directory", "filesystem_of"]

_REMOTE = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "afs", "9p", "glusterfs", "pvfs2"),
    *("orangefs", "panfs", "ocfs2", "gfs2", "virtiofs", "davfs", "fuse.sshfs", "fuse.glusterfs", "fuse.s3fs"),
    *("fuse.gcsfuse", "fuse.juicefs", "fuse.rclone", "fuse.ceph", "fuse.mount-s3", "fuse.goofys"),
}
"""Filesystems of other machines, as /proc/self/mountinfo calls them."""

_OCTAL = re.compile(r"\\([0-7]{3})")
_ELSEWHERE = "Give a directory on a disk of this machine, or leave dir= away for a cache in memory"


class DiskError(OSError):
    """A directory cannot hold a cache."""


class DiskSegment(Segment):
    """A segment in a directory on a disk. See `Segment`.

    Example:
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     segment = DiskSegment.create(8192, directory=directory)
        ...     segment.store(100, memoryview(b"abc"))
        ...     segment.fetch(100, 3), segment.is_whole
        ...     segment.close()
        (b'abc', True)
    """

    @property
    def free_bytes(self) -> int:
        """Bytes that are free on the disk, for a user without privileges.

        Raises:
            ValueError: the segment is closed.
        """
        self._check_open()
        return files.free_beside(self._data) or 0

    @property
    def is_whole(self) -> bool:
        """Whether the file has still the length that it was made with: to read behind its end is a SIGBUS."""
        return not self.closed and os.fstat(self._data).st_size >= HEADER_BYTES + self.size

    def fetch(self, offset: int, length: int) -> bytes:
        """A copy of a range of the payload, read through the file.

        Raises:
            OSError: a block cannot be read, or the file ends before (EIO).
            ValueError: the segment is closed.
        """
        self._check_open()
        return files.fetch(self._data, HEADER_BYTES + offset, length)


def check_directory(directory: str) -> str:
    """The absolute path of a directory that can hold a cache; it is made if its parent is there.

    Raises:
        DiskError: it can hold none; the message says why, and the way out.
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
        _try_locks(path)
    except OSError as error:
        raise DiskError(f"dir={shown!r} cannot hold a cache: {error.strerror or error}. {_ELSEWHERE}") from error
    return path


def filesystem_of(path: str) -> str:
    """The kind of filesystem that a directory lies on, empty where that cannot be known."""
    path, longest, kind = os.path.realpath(path), -1, ""
    try:
        with open("/proc/self/mountinfo", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return ""
    for line in filter(None, lines):
        place, _, what = os.fsdecode(line).partition(" - ")
        mount = _OCTAL.sub(lambda code: chr(int(code[1], 8)), place.split(" ")[4])  # a space in it is written \040
        if len(mount) >= longest and os.path.commonpath([mount, path]) == mount:
            longest, kind = len(mount), what.split()[0]
    return kind


def _try_locks(path: str) -> None:
    """Make a file there, and lock it in both ways that segments do.

    Raises:
        OSError: one of these is refused.
    """
    file, name = tempfile.mkstemp(prefix=f".lsc-{os.getuid()}-", dir=path)
    try:
        os.unlink(name)
        files.hold(file)
        os.ftruncate(file, HEADER_BYTES)
        take(file, 0)
        give_back(file, 0)
    finally:
        os.close(file)

"""The files that segments are made of: where they lie, how their memory is reserved, who may open them.

Kinds: `tmpfile` (O_TMPFILE in /dev/shm) and `memfd` have no name, so nothing collides with them and nothing is left
behind; `file` has a name, and a shared `flock` as long as a process uses it. A segment on a disk lies in a directory
that the user gives; filesystems without O_TMPFILE get a `file` there.

Any user may put anything into /dev/shm under a name that a cache is about to use: a link that leads elsewhere, a pipe
that blocks, a file that stays locked for ever. `open_own` opens every file that has a name, lock files too, and refuses
all of these. The content of a file that passes is trusted.
"""

from __future__ import annotations

import errno
import os
import stat
import struct
import sys
import tempfile
from typing import Literal

from lightning_stocache.node.header import HEADER_BYTES, Manifest, new_header, printable

if sys.platform != "win32":
    import fcntl

__all__ = [
    "LOCKS",
    "Backend",
    "default_backend",
    "get_shm_size",
    "lock_owner",
    "make_file",
    "memory_directory",
    "open_own",
    "prefix",
    "reserve",
    "write_header",
]

Backend = Literal["tmpfile", "memfd", "file"]
LOCKS = ".locks"
"""The end of the name of a lock file."""

_REFUSED = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}
_FLOCK = struct.Struct("@hhqqi4x")  # Linux: kind, whence, start, length, process


def memory_directory() -> str:
    """The directory whose files lie in memory: /dev/shm, or the temp folder where there is none (macOS)."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def get_shm_size() -> int:
    """Size of /dev/shm in whole GiB, 0 where there is none.

    What is free of it may be much less: see the command `doctor`.
    """
    if not os.path.isdir("/dev/shm"):
        return 0
    stats = os.statvfs("/dev/shm")
    return stats.f_frsize * stats.f_blocks // 1024**3


def default_backend() -> Backend:
    """The backend for this system: a file without a name in /dev/shm, if both exist."""
    return "tmpfile" if hasattr(os, "O_TMPFILE") and os.path.isdir("/dev/shm") else "file"


def prefix() -> str:
    """The beginning of the names of this user's files."""
    return f"lsc-{os.getuid()}-"


def make_file(backend: Backend, directory: str | None = None) -> tuple[int, str | None]:
    """Make an empty file. Returns its descriptor, and its path if it has a name.

    Args:
        backend: the kind of file.
        directory: on a disk, where every kind without a name is a `tmpfile`; by default the file lies in memory.

    Raises:
        OSError: the system refuses it, or has no such kind.
    """
    where = directory or memory_directory()
    if backend == "memfd" and directory is None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOTSUP, "this system has no memfd: give backend='auto' or 'file'")
        return os.memfd_create("lightning_stocache", os.MFD_CLOEXEC), None
    if backend != "file" and hasattr(os, "O_TMPFILE"):
        try:
            return os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
        except OSError as error:
            if directory is None or error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    data, path = tempfile.mkstemp(prefix=prefix(), dir=where)
    fcntl.flock(data, fcntl.LOCK_SH)  # the file is in use; the lock goes with the last copy of the descriptor
    return data, path


def open_own(path: str, *, create: bool = False) -> int:
    """Open a regular file that only this user may open, for reading and writing. Returns its descriptor.

    It follows no link, waits for nothing, and refuses a file with a second name.

    Args:
        path: the file.
        create: make it, empty and for this user only, if it does not exist.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: the file is not trusted; the message says what to do.
        OSError: the system has no room for it, or no descriptor left.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    refusal = PermissionError(
        f"{printable(path)} is not trusted, because it is no file that this user alone may open: give another name, or "
        "remove it"
    )
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _REFUSED:
            raise refusal from error
        raise
    facts = os.fstat(descriptor)
    private = facts.st_uid == os.getuid() and not facts.st_mode & 0o077
    if private and stat.S_ISREG(facts.st_mode) and facts.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise refusal


def write_header(data: int, size: int, manifest: Manifest | None = None, reserved: int = 0) -> None:
    """Give a file its full length, and a header with a new token.

    Args:
        data: descriptor of the file.
        size: bytes after the header.
        manifest: the content that the header describes.
        reserved: how many of the `size` bytes are reserved at once.

    Raises:
        ManifestError: the manifest is too large.
        OSError: there is no room for the header and the reserved bytes.
    """
    header = new_header(manifest)
    os.ftruncate(data, HEADER_BYTES + size)
    reserve(data, 0, HEADER_BYTES + reserved)
    os.pwrite(data, header, 0)


def reserve(data: int, offset: int, length: int) -> None:
    """Have the kernel promise the memory of a range, whose contents stay as they are; macOS has no such call.

    Raises:
        OSError: there is no memory left (ENOSPC); nothing has changed.
    """
    if length and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(data, offset, length)


def lock_owner(descriptor: int, byte: int) -> int | None:
    """The other process that has locked a byte of a file; None if there is none, or it cannot be known."""
    if sys.platform != "linux":
        return None
    request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, request))
    return None if kind == fcntl.F_UNLCK or pid <= 0 else int(pid)  # 0: of another pid namespace

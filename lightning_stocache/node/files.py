"""The files that segments are made of: where they lie, how their memory is reserved, who may open them.

Kinds: `tmpfile` (O_TMPFILE in /dev/shm) and `memfd` have no name, so nothing can guess or collide with it, and nothing
is left behind; `file` has a name, and carries a shared `flock` as long as anybody uses it. A directory on a disk takes
the place of /dev/shm where one is given; filesystems that have no O_TMPFILE get a `file` there.

Any user may put anything into /dev/shm under a name that a cache is about to use: a link that leads elsewhere, a pipe
that blocks, a file that stays locked for ever. So `open_own` opens whatever has a name, lock files too: without
following a link, without waiting, and only if it is a regular file of this user, that nobody else may open, and that
has no second name. What lies in such a file is trusted.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import tempfile
from typing import Literal

from lightning_stocache.node.header import HEADER_BYTES, new_header, printable

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Backend",
    "default_backend",
    "get_shm_size",
    "make_file",
    "memory_directory",
    "open_own",
    "overwrite",
    "reserve",
    "write_header",
]

Backend = Literal["tmpfile", "memfd", "file"]
_REFUSED = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}
_ZEROES = bytes(1 << 20)


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
    """The backend for this system: anonymous memory where it exists."""
    return "tmpfile" if hasattr(os, "O_TMPFILE") and os.path.isdir("/dev/shm") else "file"


def make_file(backend: Backend, directory: str | None = None) -> tuple[int, str | None]:
    """A new, empty file of a kind: its descriptor, and its name if it has one.

    Args:
        backend: its kind; on a disk that of a file without a name, where there can be one.
        directory: on a disk; by default where memory is.

    Raises:
        OSError: the system refuses it, or knows no such kind.
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
    data, path = tempfile.mkstemp(prefix=f"lsc-{os.getuid()}-", dir=where)
    fcntl.flock(data, fcntl.LOCK_SH)  # the file is in use; the lock goes with the last copy of the descriptor
    return data, path


def open_own(path: str, *, create: bool = False, exclusive: bool = False) -> int:
    """Open a file of this user alone, for reading and writing; its descriptor.

    Args:
        path: the file.
        create: whether to make it, empty and for this user only, where there is none.
        exclusive: whether to refuse one that is there already; with `create` only.

    Raises:
        FileNotFoundError: there is none.
        PermissionError: it is not trusted; the message says what to do.
        OSError: the system has no room for it, or no descriptor left.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    flags |= (os.O_CREAT if create else 0) | (os.O_EXCL if exclusive else 0)
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


def write_header(data: int, size: int, reserved: int = 0) -> None:
    """Give a file its full length, `size` bytes after the header, and a header with a token of its own.

    Args:
        data: descriptor of the file.
        size: bytes after the header.
        reserved: how many of these are reserved, too.

    Raises:
        OSError: there is no room for the header, and what is reserved.
    """
    os.ftruncate(data, HEADER_BYTES + size)
    reserve(data, 0, HEADER_BYTES + reserved)
    os.pwrite(data, new_header(), 0)


def reserve(data: int, offset: int, length: int) -> None:
    """Have the kernel promise the memory of a range, whose contents stay as they are.

    Raises:
        OSError: there is none left (ENOSPC); nothing has changed.
    """
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(data, offset, length)
    else:  # macOS: storing zeroes allocates the blocks and reports a full disk by an error, too
        _fill_holes(data, offset, offset + length)


def _fill_holes(data: int, start: int, end: int) -> None:
    """Store zeroes where nobody has stored anything yet; who stores has reserved before, so that is nowhere then."""
    while start < end:
        start = _seek(data, start, os.SEEK_HOLE, end)
        stop = min(_seek(data, start, os.SEEK_DATA, end), end)
        overwrite(data, start, stop - start)
        start = stop


def _seek(data: int, start: int, whence: int, end: int) -> int:
    """Where the next hole or the next data begins, `end` where there is none, or holes are not known."""
    try:
        return os.lseek(data, start, whence)
    except OSError:
        return end


def overwrite(data: int, offset: int, length: int) -> None:
    """Store zeroes in a range."""
    while length > 0:
        written = os.pwrite(data, memoryview(_ZEROES)[:length], offset)
        offset, length = offset + written, length - written

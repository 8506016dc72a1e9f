"""The files that segments are made of: where they lie, how their memory is reserved, what their header says.

Kinds: `tmpfile` (O_TMPFILE in /dev/shm) and `memfd` have no name, so nothing can guess or collide with it, and nothing
is left behind; `file` has a name, and carries a shared `flock` as long as anybody uses it. A directory on a disk takes
the place of /dev/shm where one is given; filesystems that have no O_TMPFILE get a `file` there.

The header is 4096 bytes: a magic number (8 bytes), a random token by which an attaching process knows the segment again
(16), the number of this format (4), from byte 48 on two numbers of 8 bytes for whoever fills the segment, and from byte
64 on room for a manifest (`manifest`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import sys
import tempfile
from collections.abc import Sequence
from typing import Literal

if sys.platform != "win32":
    import fcntl

__all__ = [
    "FORMAT",
    "HEADER_BYTES",
    "MANIFEST_OFFSET",
    "NUMBERS_OFFSET",
    "Backend",
    "backend_of",
    "default_backend",
    "fetch",
    "format_of",
    "free_beside",
    "get_shm_size",
    "give_up",
    "hold",
    "make_file",
    "memory_directory",
    "overwrite",
    "reserve",
    "store",
    "sync",
    "token_of",
    "write_header",
]

Backend = Literal["tmpfile", "memfd", "file"]
HEADER_BYTES = 4096
NUMBERS_OFFSET = 48
MANIFEST_OFFSET = 64
FORMAT = 3  # of header, manifest and payload; another one is refused, so change it with any of them
_MAGIC = b"STOCACHE"
_TOKEN_BYTES = 16
_FORMAT = struct.Struct("<I")
_MOST_PARTS = 1024  # that one call takes (IOV_MAX)
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


def backend_of(path: str) -> Backend:
    """The kind of a file, by its name or by that of a descriptor below /proc."""
    if not path.startswith("/proc/"):
        return "file"
    return "memfd" if os.readlink(path).startswith("/memfd:") else "tmpfile"


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
    hold(data)
    return data, path


def hold(data: int) -> None:
    """Take the shared `flock` that says that a named file is in use; it goes with the last copy of the descriptor."""
    fcntl.flock(data, fcntl.LOCK_SH)


def give_up(data: int, locks: int, own_names: Sequence[str], pid: int) -> None:
    """Close a segment's two files, and take away the names that this process, `pid`, has made for them.

    A child that was forked since leaves the names alone.
    """
    os.close(data)
    os.close(locks)
    for name in own_names if os.getpid() == pid else ():
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


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
    os.pwrite(data, _MAGIC + os.urandom(_TOKEN_BYTES) + _FORMAT.pack(FORMAT), 0)


def free_beside(data: int) -> int | None:
    """Bytes that are free in the filesystem of a file, for a user without privileges; None where it has no limit."""
    stats = os.fstatvfs(data)
    return stats.f_frsize * stats.f_bavail if stats.f_blocks else None  # that of memfds has no size


def token_of(data: int) -> bytes:
    """The token of a segment's file.

    Raises:
        ValueError: the file is not a segment.
    """
    header = os.pread(data, len(_MAGIC) + _TOKEN_BYTES, 0)
    if not header.startswith(_MAGIC):
        raise ValueError("the file is not a segment of lightning_stocache: its header has another magic number")
    return header[len(_MAGIC) :]


def format_of(header: bytes) -> int | None:
    """The number of the format that a header has, 0 of one from before there was a number; None if it is no header."""
    place = len(_MAGIC) + _TOKEN_BYTES
    if not header.startswith(_MAGIC) or len(header) < place + _FORMAT.size:
        return None
    (number,) = _FORMAT.unpack_from(header, place)
    return int(number)


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


def store(data: int, offset: int, *parts: memoryview) -> None:
    """Write pieces into a range, one after the other; its memory need not have been reserved.

    Raises:
        OSError: there is no memory left (ENOSPC); a part may have been written.
    """
    several = 1 < len(parts) <= _MOST_PARTS and hasattr(os, "pwritev")  # macOS has it from 11 on
    written = os.pwritev(data, parts, offset) if several else 0
    for part in parts:
        while written < part.nbytes:
            written += os.pwrite(data, part[written:] if written else part, offset + written)
        offset, written = offset + part.nbytes, written - part.nbytes


def sync(data: int) -> None:
    """Have the system write to the disk what was stored, and wait for it.

    Raises:
        OSError: it cannot be written.
    """
    getattr(os, "fdatasync", os.fsync)(data)  # macOS has the latter alone


def fetch(data: int, offset: int, length: int) -> bytes:
    """Read a range.

    Raises:
        OSError: a block cannot be read (EIO), or the file ends before.
    """
    pieces = []
    while length:
        piece = os.pread(data, length, offset)
        if not piece:
            raise OSError(errno.EIO, f"the file ends {length} bytes too early")
        pieces.append(piece)
        offset, length = offset + len(piece), length - len(piece)
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def overwrite(data: int, offset: int, length: int) -> None:
    """Store zeroes in a range."""
    for start in range(0, length, len(_ZEROES)):
        store(data, offset + start, memoryview(_ZEROES)[: length - start])

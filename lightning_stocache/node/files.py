"""The files that segments are made of: where they lie, who may open them, and their header.

Kinds: `tmpfile` (O_TMPFILE in /dev/shm) and `memfd` have no name, so nothing collides with them and nothing is left
behind. A `file` has a name, and a shared `flock` as long as a process uses it. Where there is no O_TMPFILE (macOS, some
disks), a `tmpfile` is a `file`.

A file begins with a header of 4096 bytes:

    byte  0  magic number (8 bytes)
    byte  8  random token, by which an attaching process recognizes the segment (16)
    byte 24  number of this format (4)
    byte 48  two int64 for the owner of the segment (16)
    byte 64  length of the manifest (4), then the manifest as JSON

A named segment needs a manifest. In others it tells people what takes their memory. `open_own` refuses what is not this
user's own file, so what it opens is trusted.
"""

from __future__ import annotations

import errno
import json
import os
import stat
import struct
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal

if sys.platform != "win32":
    import fcntl

__all__ = [
    "FORMAT",
    "HEADER_BYTES",
    "LOCKS",
    "MANIFEST_OFFSET",
    "NUMBERS_OFFSET",
    "Backend",
    "Geometry",
    "Manifest",
    "ManifestError",
    "get_shm_size",
    "make_file",
    "memory_directory",
    "open_own",
    "prefix",
    "printable",
    "read_manifest",
    "reserve",
    "token_of",
    "write_header",
]

Backend = Literal["tmpfile", "memfd", "file"]
LOCKS = ".locks"
"""The end of the name of a lock file."""

HEADER_BYTES = 4096
NUMBERS_OFFSET = 48
MANIFEST_OFFSET = 64
FORMAT = 6  # of header, manifest and payload; another one is refused, so change it with any of them
_MAGIC = b"STOCACHE"
_TOKEN_BYTES = 16
_NUMBER = struct.Struct("<I")  # the format, and the manifest's length
_MANIFEST_START = MANIFEST_OFFSET + _NUMBER.size
_NOT_OURS = {errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}


class ManifestError(ValueError):
    """A header has no manifest that this version can read."""


@dataclass(frozen=True)
class Geometry:
    """Where the samples lie: the numbers of a `cache.placement.Arc`."""

    size: int
    slots: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Manifest:
    """The content of a segment. What only a segment with a name says is empty in others."""

    geometry: Geometry
    dataset: str = ""  # for people
    node: int = 0  # of the job, whose part this is
    nodes: int = 1
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    payload: int = 0  # bytes behind the header, which show whether a file was cut off
    budget: str = ""  # of the job that made it
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)  # what jobs that share it have in common
    found: str = ""  # digest of what set-up found out about the samples


def memory_directory() -> str:
    """The directory whose files lie in memory: /dev/shm, or the temp folder where there is none (macOS)."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def get_shm_size() -> int:
    """Size of /dev/shm in whole GiB, 0 where there is none. The command `doctor` says how much of it is free."""
    if not os.path.isdir("/dev/shm"):
        return 0
    stats = os.statvfs("/dev/shm")
    return stats.f_frsize * stats.f_blocks // 1024**3


def prefix() -> str:
    """The beginning of the names of this user's files."""
    return f"lsc-{os.getuid()}-"


def make_file(backend: Backend, directory: str | None = None) -> tuple[int, str | None]:
    """Make an empty file, in memory or in a directory on a disk. Returns its descriptor, and its path if it has a name.

    Raises:
        OSError: the system refuses it, or has no memfd.
    """
    where = directory or memory_directory()
    if backend == "memfd" and directory is None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOTSUP, "this system has no memfd")
        return os.memfd_create("lightning_stocache", os.MFD_CLOEXEC), None
    if backend != "file" and hasattr(os, "O_TMPFILE"):
        try:
            return os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600), None
        except OSError as error:  # the filesystem of a disk may not have such files
            if directory is None or error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    data, path = tempfile.mkstemp(prefix=prefix(), dir=where)
    fcntl.flock(data, fcntl.LOCK_SH)  # the file is in use; the lock goes with the last copy of the descriptor
    return data, path


def open_own(path: str, *, create: bool = False) -> int:
    """Open a regular file that only this user may open, or make one. Returns its descriptor.

    Any user may put a link, a pipe or a file into /dev/shm under the name of a cache: none of these is opened.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: it is no file of this user alone; the message says what to do.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
    refusal = PermissionError(
        f"{printable(path)} is not trusted, because it is no file that this user alone may open: give another name, or "
        "remove it"
    )
    try:
        descriptor = os.open(path, flags, 0o600)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise refusal from error
        raise
    facts = os.fstat(descriptor)
    if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise refusal


def reserve(data: int, offset: int, length: int) -> None:
    """Have the kernel promise the memory of a range, whose contents stay as they are; macOS has no such call.

    Raises:
        OSError: there is no memory left (ENOSPC); nothing has changed.
    """
    if length and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(data, offset, length)


def write_header(data: int, size: int, manifest: Manifest | None = None, reserved: int = 0) -> None:
    """Give a file a header with a new token, and `size` bytes behind it, of which the first are reserved at once.

    Raises:
        ManifestError: the manifest is too large.
        OSError: there is no room for the header and the reserved bytes.
    """
    header = _MAGIC + os.urandom(_TOKEN_BYTES) + _NUMBER.pack(FORMAT)
    if manifest is not None:
        text = json.dumps(asdict(manifest), ensure_ascii=False).encode()
        if len(text) > HEADER_BYTES - _MANIFEST_START:
            raise ManifestError(f"manifest must fit in {HEADER_BYTES - _MANIFEST_START} bytes, got {len(text)}")
        header = header.ljust(MANIFEST_OFFSET, b"\0") + _NUMBER.pack(len(text)) + text
    os.ftruncate(data, HEADER_BYTES + size)
    reserve(data, 0, HEADER_BYTES + reserved)
    os.pwrite(data, header, 0)


def token_of(data: int) -> bytes:
    """The token of a segment's file.

    Raises:
        ValueError: the file is not a segment.
    """
    header = os.pread(data, len(_MAGIC) + _TOKEN_BYTES, 0)
    if not header.startswith(_MAGIC):
        raise ValueError("the file is not a segment of lightning_stocache: its header has another magic number")
    return header[len(_MAGIC) :]


def read_manifest(header: bytes, payload: int) -> Manifest:
    """The manifest in the header of a segment with so many bytes behind it.

    Raises:
        ManifestError: there is none, or it is damaged or of another version. The message continues "the cache ...".
    """
    if len(header) < HEADER_BYTES:
        raise ManifestError("is damaged: its header is cut off")
    (version,) = _NUMBER.unpack_from(header, len(_MAGIC) + _TOKEN_BYTES)
    if version != FORMAT:
        raise ManifestError(f"is of another version of lightning_stocache (format {version}, this one has {FORMAT})")
    (length,) = _NUMBER.unpack_from(header, MANIFEST_OFFSET)
    if not length:
        raise ManifestError("does not say what it holds")
    try:
        values = json.loads(header[_MANIFEST_START : _MANIFEST_START + length])
        manifest = Manifest(**values | {"geometry": Geometry(**values["geometry"])})
        fits = manifest.geometry.slots <= payload  # a slot has a byte at least, its state
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError("is damaged: what it says of itself cannot be read") from error
    if not fits:
        raise ManifestError(f"is damaged: {manifest.geometry.slots} slots do not fit in its {payload} bytes")
    return manifest


def printable(text: str, longest: int | None = None) -> str:
    r"""The text with every unprintable character escaped, cut to at most `longest` characters.

    File names and command lines can hold terminal codes, or halves of characters that cannot be written at all.

    Example:
        >>> printable("photos\x1b[2J"), printable("a long name", longest=8)
        ('photos\\x1b[2J', 'a lon...')
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."

"""The files of segments: where they lie, who may open them, and their header.

Three kinds:

- `tmpfile` (O_TMPFILE in /dev/shm) and `memfd` have no name: nothing collides with them and no file is left behind.
- `file` has a name. Where O_TMPFILE is missing (macOS, some disks), a `tmpfile` is a `file`.

A file begins with a header of 4096 bytes:

    byte  0  magic number (8 bytes)
    byte  8  random token, by which an attaching process recognizes the segment (16)
    byte 24  number of this format (4)
    byte 48  two int64 for the owner of the segment (16)
    byte 64  length of the manifest (4), then the manifest as JSON

A named segment needs a manifest. In other segments the manifest tells people what takes their memory. `open_own` opens
only files of this user, so their content is trusted.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import stat
import struct
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

__all__ = [
    "FORMAT",
    "HEADER_BYTES",
    "MANIFEST_OFFSET",
    "NUMBERS_OFFSET",
    "Backend",
    "Geometry",
    "Manifest",
    "ManifestError",
    "get_shm_size",
    "make_file",
    "manifest_in",
    "memory_directory",
    "open_own",
    "prefix",
    "printable",
    "punch",
    "read_manifest",
    "read_text",
    "reserve",
    "token_of",
    "unlink",
    "write_header",
]

Backend = Literal["tmpfile", "memfd", "file"]
HEADER_BYTES = 4096
NUMBERS_OFFSET = 48
MANIFEST_OFFSET = 64
FORMAT = 12  # of header, manifest and payload: change it with any of them, and files of other formats are refused
_MAGIC = b"STOCACHE"
_TOKEN_BYTES = 16
_NUMBER = struct.Struct("<I")  # the format, and the manifest's length
_MANIFEST_START = MANIFEST_OFFSET + _NUMBER.size
_PUNCH = 1 | 2  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_NOT_OURS = {errno.EACCES, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EPERM}


class ManifestError(ValueError):
    """A header has no manifest that this version can read."""


@dataclass(frozen=True)
class Geometry:
    """Where the samples lie: the numbers of a `cache.placement.Arc`, without its domain."""

    size: int
    slots: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Manifest:
    """The description of a segment. The fields that only named segments need are empty in other segments."""

    geometry: Geometry
    dataset: str = ""  # the dataset's name, for people
    node: int = 0  # number of the node in its job
    nodes: int = 1
    created: int = field(default_factory=lambda: int(time.time()))  # seconds since the epoch
    payload: int = 0  # bytes behind the header: a shorter file was cut off
    on_disk: bool = False  # samples have checksums, which outlive the job
    budget: str = ""  # budget of the job that made the segment
    fingerprint: Mapping[str, str | int] = field(default_factory=dict)  # equal in all jobs that share the segment
    found: str = ""  # digest of what set-up learned about the samples
    state: str = ""  # digest of the state of the dataset: jobs in which it differs compare more samples


def memory_directory() -> str:
    """The directory of files in memory: /dev/shm, or the temp folder where there is none (macOS)."""
    return "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()


def get_shm_size() -> int:
    """Size of /dev/shm in whole GiB, or 0 without /dev/shm. The command `doctor` shows how much of it is free."""
    if not os.path.isdir("/dev/shm"):
        return 0
    stats = os.statvfs("/dev/shm")
    return stats.f_frsize * stats.f_blocks // 1024**3


def prefix() -> str:
    """The prefix of the names of this user's files."""
    return f"lsc-{os.getuid()}-"


def make_file(backend: Backend, directory: str | None = None) -> tuple[int, str | None]:
    """Make an empty file, in memory or in a directory on a disk. Returns its descriptor, and its path or None.

    Raises:
        OSError: the system refuses the file, or has no memfd.
    """
    _open_standard()
    where = directory or memory_directory()
    if backend == "memfd" and directory is None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOTSUP, "this system has no memfd")
        return os.memfd_create("lightning_stocache", os.MFD_CLOEXEC), None
    if backend != "file" and hasattr(os, "O_TMPFILE"):
        try:
            file = os.open(where, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
            os.fchmod(file, 0o600)  # whatever the umask: processes open the file anew
            return file, None
        except OSError as error:  # some filesystems of disks lack such files
            if directory is None or error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    file, path = tempfile.mkstemp(prefix=prefix(), dir=where)
    os.fchmod(file, 0o600)
    return file, path


def open_own(path: str) -> int:
    """Open a regular file that only this user may open. Returns its descriptor.

    Any user may put a link, a pipe or a file into /dev/shm under the name of a cache. None of these is opened.

    Raises:
        FileNotFoundError: there is no such file.
        PermissionError: other users may open the file, or it is no regular file; the message says what to do.
    """
    _open_standard()
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    refusal = PermissionError(
        f"{printable(path)} is not trusted, because it is no file that this user alone may open: give another name, or "
        "remove it"
    )
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in _NOT_OURS:
            raise refusal from error
        raise
    facts = os.fstat(descriptor)
    if facts.st_uid == os.getuid() and stat.S_ISREG(facts.st_mode) and not facts.st_mode & 0o077:
        return descriptor
    os.close(descriptor)
    raise refusal


def _open_standard() -> None:
    """Open the null device under the numbers of standard streams that are closed: C code writes to these numbers."""
    with contextlib.suppress(OSError):  # there is no /dev
        while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
            pass
        os.close(file)


def reserve(data: int, offset: int, length: int) -> None:
    """Reserve the memory of a range, whose contents stay as they are. Does nothing on macOS, which has no such call.

    Raises:
        OSError: there is no memory left (ENOSPC); nothing has changed.
    """
    if length and hasattr(os, "posix_fallocate"):
        os.posix_fallocate(data, offset, length)


def punch(data: int, offset: int, length: int) -> bool:
    """Zero a range and free its blocks, whatever its length in a few system calls. Returns False if nothing was done.

    Python has no such call. Some filesystems and macOS cannot do it.
    """
    fallocate = getattr(ctypes.CDLL(None), "fallocate", None)
    return fallocate is not None and not fallocate(data, _PUNCH, ctypes.c_long(offset), ctypes.c_long(length))


def write_header(data: int, size: int, manifest: Manifest | None = None, reserved: int = 0) -> None:
    """Write a header with a new token, and give the file `size` bytes behind it. The first `reserved` are reserved.

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


def unlink(path: str) -> None:
    """Remove a file, unless another process was first; of earlier formats the lock file beside it, too."""
    for name in (path + ".locks", path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def manifest_in(data: int, payload: int | None = None) -> Manifest:
    """Read the manifest of a file as `read_manifest` does; `payload` is by default what the file has now."""
    payload = os.fstat(data).st_size - HEADER_BYTES if payload is None else payload
    return read_manifest(os.pread(data, HEADER_BYTES, 0), payload)


def read_manifest(header: bytes, payload: int) -> Manifest:
    """The manifest in a header, given the number of bytes behind the header.

    Raises:
        ManifestError: there is no manifest, or it is damaged or of another version. The message continues "the cache
            ...".
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
        if not all(type(number) is int for number in asdict(manifest.geometry).values()):
            raise TypeError(f"geometry must be whole numbers, got {manifest.geometry}")
        fits = 4 * manifest.geometry.slots <= payload  # a slot has at least four bytes, its word
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ManifestError("is damaged: what it says of itself cannot be read") from error
    if not fits:
        raise ManifestError(f"is damaged: {manifest.geometry.slots} slots do not fit in its {payload} bytes")
    return manifest


def read_text(path: str | Path) -> str:
    """The text of a small file, such as those of /proc and /sys; "" if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def printable(text: str, longest: int | None = None) -> str:
    r"""Escape every unprintable character of a text, and cut the text to at most `longest` characters.

    File names and command lines can contain terminal codes, and halves of characters that cannot be written.

    Example:
        >>> printable("photos\x1b[2J"), printable("a long name", longest=8)
        ('photos\\x1b[2J', 'a lon...')
    """
    shown = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return shown if longest is None or len(shown) <= longest else f"{shown[: longest - 3]}..."

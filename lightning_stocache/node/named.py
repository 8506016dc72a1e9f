"""Segments that are meant to outlive their job.

A named segment is a file `lsc-<uid>-<name>` in the memory directory, or in one of the user's on a disk, whose header
carries a manifest: plain values that say what lies in it. Two jobs of one user may share it. The protocol, by `flock`
on the file and by inode:

- Who uses it holds a shared lock, from before the name can be seen until its last process has ended: forked workers
  keep the lock of the rank that they come from, and the kernel drops it when they die.
- Who makes it writes header and manifest first, takes the lock, and only then links the name. A name that can be seen
  is complete; who loses the race opens what the winner made.
- Who opens one on a disk, and gets the exclusive lock, is the first since a crash that there may have been. He mends
  what it may have left (`mend`), and gives a file that was cut off its length again, before he shares it.
- Who removes it must get the exclusive lock, so nobody uses it, and takes away the lock file before the name.
- Whoever has taken a lock looks again whether the name still leads to the same inode: it may have been removed
  meanwhile.

A file of another user is never opened, whatever its name, nor is one that others may write to or that is a link, a
pipe or a folder (`owned`). What has such a name and is no segment, by its magic number, is never removed.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable

from lightning_stocache.node.disk import DiskSegment
from lightning_stocache.node.files import (
    HEADER_BYTES,
    make_file,
    memory_directory,
    sync,
    token_of,
    write_header,
)
from lightning_stocache.node.locks import SEPARATE, share
from lightning_stocache.node.manifest import Manifest, ManifestError, printable, read_manifest, write_manifest
from lightning_stocache.node.owned import open_own
from lightning_stocache.node.segment import Segment

if sys.platform != "win32":
    import fcntl

__all__ = [
    "LOCKS",
    "Mend",
    "check_name",
    "clean_command",
    "is_name",
    "join_named",
    "open_named",
    "prefix",
    "still_there",
    "try_exclusive",
    "way_out",
]

Mend = Callable[[Segment, Manifest], None]
"""Mends what a crash may have left in a segment on a disk."""

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
LOCKS = ".locks"


def check_name(name: str) -> str:
    """A name, if it is one.

    Raises:
        ValueError: it is none.

    Example:
        >>> check_name("photos-256")
        'photos-256'
    """
    if not isinstance(name, str) or not is_name(name):
        raise ValueError(f"name must be letters, digits, dots, dashes and underscores, at most 100, got {name!r}")
    return name


def is_name(name: str) -> bool:
    """Whether it is the name of a segment."""
    return _NAME.fullmatch(name) is not None and not name.endswith(LOCKS)


def join_named(name: str, directory: str | None = None, mend: Mend | None = None) -> tuple[Segment, Manifest] | None:
    """Open the segment of a name with its manifest, if there is one; errors as in `open_named`.

    It is the same object where this process has it open already; it then has to be closed once more.
    """
    return _join(_path(name, directory), directory, mend)


def open_named(
    name: str, size: int, manifest: Manifest, directory: str | None = None, mend: Mend | None = None
) -> tuple[Segment, Manifest]:
    """Open the segment of a name, or make it.

    Args:
        name: letters, digits, dots, dashes and underscores, at most 100.
        size: payload bytes, if it has to be made.
        manifest: what it then says about itself; must fit in the header as JSON.
        directory: on a disk; by default it lies in memory.
        mend: is called with a segment on a disk, and its manifest, while nobody else has it open. What it raises comes
            through.

    Returns:
        The segment, and the manifest that it has: the given one if it was made now. It may differ otherwise, also in
        what it says of the size. It is the same object where this process has it open already, and then has to be
        closed once more.

    Raises:
        ValueError: the name is none, or the manifest is too large.
        ManifestError: what lies there is no segment, one of another version, or damaged; the message names the way out.
        PermissionError: what lies there, or beside it as its lock file, is not a file of this user alone.
        OSError: there is no memory for the header.
    """
    path = _path(name, directory)
    while True:
        if (joined := _join(path, directory, mend)) is not None:
            return joined
        if (made := _publish(path, size, manifest, directory)) is not None:
            return made, manifest


def _path(name: str, directory: str | None) -> str:
    return os.path.join(directory or memory_directory(), prefix() + check_name(name))


def _join(path: str, directory: str | None, mend: Mend | None) -> tuple[Segment, Manifest] | None:
    """The segment that lies there, used from now on; None if there is none, or none any more."""
    try:
        data = open_own(path)
    except FileNotFoundError:
        return None
    try:
        alone = directory is not None and try_exclusive(data)
        if not alone:
            share(data, path)  # waits for a janitor that has just begun, and for who mends
        if not still_there(data, path):
            return None
        manifest = _checked(data, path, directory)
        if (known := Segment.opened(token_of(data))) is not None:
            return known.hold(), manifest  # a second lock file's descriptor would drop the locks of the first
        if alone and os.fstat(data).st_size < HEADER_BYTES + manifest.payload:
            os.ftruncate(data, HEADER_BYTES + manifest.payload)  # it was cut off; what is missing is empty
        segment = _mapped(data, os.fstat(data).st_size - HEADER_BYTES, path, directory)
        if alone:
            try:
                if mend is not None:
                    mend(segment, manifest)
                fcntl.flock(data, fcntl.LOCK_SH)
            except BaseException:
                segment.close()
                raise
            if not still_there(data, path):  # between two kinds of lock there is none
                segment.close()
                return None
        return segment, manifest
    finally:
        os.close(data)


def _mapped(data: int, size: int, path: str, directory: str | None) -> Segment:
    """The segment in a file that is locked; it has descriptors of its own, which keep the lock."""
    own = os.dup(data)
    try:
        locks = _open_locks(path)
    except BaseException:
        os.close(own)
        raise
    return (Segment if directory is None else DiskSegment)(own, locks, size, path)


def _checked(data: int, path: str, directory: str | None) -> Manifest:
    """What the segment says about itself.

    Raises:
        ManifestError: it is none, or damaged; with the way out.
    """
    name = os.path.basename(path).removeprefix(prefix())
    try:
        token_of(data)
    except ValueError as error:
        raise ManifestError(f"{path} is no cache: give another name, or remove it (rm {path})") from error
    try:
        # What was cut off of a file on a disk gets its length again.
        payload = 2**62 if directory is not None else os.fstat(data).st_size - HEADER_BYTES
        return read_manifest(os.pread(data, HEADER_BYTES, 0), payload)
    except ManifestError as error:
        raise ManifestError(f"the cache {name!r} {error}. {way_out(name, directory)}") from error


def _publish(path: str, size: int, manifest: Manifest, directory: str | None) -> Segment | None:
    """Make the segment and give it its name; None if another process was first."""
    folder = os.open(directory or memory_directory(), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        data, made = make_file("tmpfile", directory)
        try:
            write_header(data, size)
            write_manifest(data, manifest)
            if directory is not None:
                sync(data)  # once, so that no crash leaves a name without a header
            fcntl.flock(data, fcntl.LOCK_SH)
            # src_dir_fd makes Python call linkat, which follows the link below /proc; link(2) would fail with EXDEV.
            os.link(made or f"/proc/self/fd/{data}", path, src_dir_fd=folder, follow_symlinks=True)
            try:
                return _mapped(data, size, path, directory)
            except OSError:
                if try_exclusive(data):  # nobody has joined meanwhile: what cannot be locked is no use
                    os.unlink(path)
                raise
        except FileExistsError:
            return None
        finally:
            os.close(data)
            if made is not None:
                os.unlink(made)
    finally:
        os.close(folder)


def _open_locks(path: str) -> int:
    """The lock file beside a segment, made if there is none.

    Who comes here holds a lock on the segment, so nobody removes both; a lock on this file keeps `clean_locks` away.

    Raises:
        PermissionError: it is not a file of this user alone.
    """
    while True:
        locks = open_own(path + LOCKS, create=True)
        if SEPARATE:  # else nobody could take the lock of a byte
            fcntl.flock(locks, fcntl.LOCK_SH)
        if still_there(locks, path + LOCKS):
            return locks
        os.close(locks)


def prefix() -> str:
    """What the files of this user's segments begin with."""
    return f"lsc-{os.getuid()}-"


def way_out(name: str, directory: str | None = None) -> str:
    """What to do about a cache that cannot be joined, in one sentence."""
    return f"Give another name, or remove it: {clean_command(name, directory)}"


def clean_command(name: str = "", directory: str | None = None) -> str:
    """What removes a cache, or all that nobody uses, as it is typed into a shell.

    Example:
        >>> clean_command("photos"), clean_command("photos", "/local/nvme")
        ('python -m lightning_stocache clean photos', 'python -m lightning_stocache clean photos --dir /local/nvme')
    """
    words = ["python -m lightning_stocache clean", *filter(None, [name])]
    if directory is not None:
        words.append(f"--dir {shlex.quote(printable(directory))}")
    return " ".join(words)


def try_exclusive(descriptor: int) -> bool:
    """Whether nobody else has a lock on a segment; from then on it is locked for this descriptor alone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def still_there(descriptor: int, path: str) -> bool:
    """Whether a name still leads to the file that was opened by it."""
    try:
        return os.stat(path, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False

"""Named segments, which outlive their job: open, join, list, clean.

A named segment is a file `lsc-<uid>-<name>` in the memory directory, or in a directory on a disk. Its header has a
manifest. Several jobs of one user may use it. The protocol uses the locks of `node.locks`, and the file's inode:

- A process that uses the segment shares the lock `use`, from before the name appears until the process ends.
- A process that makes the segment writes header and manifest, takes the lock, and then links the name. So every visible
  segment is complete. If another process has linked the name first, its segment is joined.
- One process at a time opens or removes the segment. If no other process uses it, perhaps after a crash, it has the
  lock alone meanwhile. Then it forgets what earlier jobs have noted for all that fill the segment; on a disk it repairs
  the file (`mend`) and restores its full length.
- With these locks a process checks that the name still leads to the same inode, because another process may have
  removed the segment.

Files of other users, links, pipes and files that others may open are never opened (`files.open_own`). A file without
the magic number of a segment is never removed, unless it has no content: its maker was killed before the header.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lightning_stocache.node import locks
from lightning_stocache.node.files import (
    HEADER_BYTES,
    MANIFEST_OFFSET,
    NUMBERS_OFFSET,
    Manifest,
    ManifestError,
    make_file,
    manifest_in,
    memory_directory,
    open_own,
    prefix,
    printable,
    token_of,
    unlink,
    write_header,
)
from lightning_stocache.node.segment import Segment, warn_without_locks

__all__ = [
    "Mend",
    "NamedSegment",
    "check_name",
    "clean",
    "clean_command",
    "join_named",
    "manifest_of",
    "named_segments",
    "open_named",
    "way_out",
]

Mend = Callable[[Segment, Manifest], None]
"""Repairs what a crash may have damaged in a segment on a disk."""

_MAKING = 60  # seconds between making a file and writing its header, at most
_PATIENCE = 10.0  # seconds to wait while another process opens or removes a segment
_NAME = re.compile(r"(?!.*\.locks$)[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class NamedSegment:
    """An entry in the list of named segments."""

    name: str
    key: tuple[int, int]  # device and inode
    allocated_bytes: int
    in_use: bool  # by a living process
    contents: Any  # result of `look`, see `named_segments`


def check_name(name: str) -> str:
    """Return a valid name.

    Raises:
        ValueError: the name is not valid.

    Example:
        >>> check_name("photos-256")
        'photos-256'
    """
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"name must be letters, digits, dots, dashes and underscores, at most 100, got {name!r}")
    return name


def join_named(name: str, directory: str | None = None, mend: Mend | None = None) -> tuple[Segment, Manifest] | None:
    """Open the segment of a name with its manifest, as `open_named` does. Returns None without such a segment."""
    path = _path(check_name(name), directory)
    try:
        file = open_own(path)
    except FileNotFoundError:
        return None
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, file)
        if not locks.begin_opening(file, _PATIENCE):
            raise ManifestError(
                f"the cache {name!r} cannot be opened: another process has been opening it for {_PATIENCE:.0f} s (is "
                f"it stopped?). {way_out(name, directory)}"
            )
        is_alone = locks.use_alone(file)
        if not is_alone:
            locks.share_use(file)
        if not _leads_to(path, file):
            return None
        manifest = _manifest(file, path, directory)
        if is_alone and directory is not None and os.fstat(file).st_size < HEADER_BYTES + manifest.payload:
            os.ftruncate(file, HEADER_BYTES + manifest.payload)  # the file was cut off; the missing slots are empty
        if is_alone:
            with contextlib.suppress(OSError):  # a full disk: what its last jobs have left free stays free
                os.pwrite(file, bytes(MANIFEST_OFFSET - NUMBERS_OFFSET), NUMBERS_OFFSET)
        undo.pop_all()
        size = os.fstat(file).st_size - HEADER_BYTES
        segment = Segment(file, size, path, on_disk=directory is not None, alone=is_alone)
        undo.callback(segment.close)
        if is_alone:
            if mend is not None and directory is not None:
                mend(segment, manifest)
            locks.share_use(file)
            if not _leads_to(path, file):  # where the lock is a `flock`, it was free for a moment
                return None
        locks.end_opening(file)
        warn_without_locks()
        undo.pop_all()
        return segment, manifest


def open_named(
    name: str, size: int, manifest: Manifest, directory: str | None = None, mend: Mend | None = None
) -> tuple[Segment, Manifest]:
    """Open the segment of a name, or make it.

    Args:
        name: letters, digits, dots, dashes and underscores, at most 100.
        size: payload bytes of a new segment; an existing segment may differ in size and manifest.
        manifest: of a new segment; must fit in the header as JSON.
        directory: a directory on a disk; by default the segment lies in memory.
        mend: called with a segment on a disk and its manifest, while no other process has the segment open.

    Returns:
        The segment and its manifest.

    Raises:
        ValueError: the name is not valid, or the manifest is too large.
        ManifestError: the file is no segment, damaged, or of another version, or another process does not end opening
            it; the message says what to do.
        PermissionError: the file is not a file of this user alone.
        OSError: there is no memory for the header.
    """
    while True:
        if (joined := join_named(name, directory, mend)) is not None:
            return joined
        if (segment := _publish(_path(name, directory), size, manifest, directory)) is not None:
            return segment, manifest


def manifest_of(name: str, directory: str | None = None) -> Manifest | None:
    """Read the manifest of a name without joining the segment. Returns None if it cannot be read."""
    with contextlib.suppress(OSError, ManifestError), _own_file(_path(check_name(name), directory)) as data:
        return manifest_in(data)
    return None


def named_segments(look: Callable[[int], Any] = token_of, directory: str | None = None) -> list[NamedSegment]:
    """List the named segments of this user on this node, by name.

    Args:
        look: reads a segment from a descriptor of its file; raises ValueError if the file is no segment.
        directory: a directory on a disk; by default the segments in memory.
    """
    return list(_named_files(directory, look=look))


def clean(name: str | None = None, directory: str | None = None) -> list[NamedSegment]:
    """Remove the unused named segments of this user, or only that name. Returns the removed segments."""
    only = None if name is None else check_name(name)
    return [segment for segment in _named_files(directory, only, remove=True) if not segment.in_use]


def way_out(name: str, directory: str | None = None) -> str:
    """The advice for a cache that cannot be joined."""
    return f"Give another name, or remove it: {clean_command(name, directory)}"


def clean_command(name: str = "", directory: str | None = None) -> str:
    """The shell command that removes one cache, or all unused caches.

    Example:
        >>> clean_command("photos", "/local/nvme")
        'stocache clean photos --dir /local/nvme'
    """
    where = "" if directory is None else f"--dir {shlex.quote(printable(directory))}"
    return " ".join(filter(None, ["stocache clean", name, where]))


def _publish(path: str, size: int, manifest: Manifest, directory: str | None) -> Segment | None:
    """Make the segment and link its name. Returns None if another process was first."""
    with contextlib.ExitStack() as cleanup:
        folder = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        cleanup.callback(os.close, folder)
        file, temporary = make_file("tmpfile", directory)
        closing_file = cleanup.enter_context(contextlib.ExitStack())
        closing_file.callback(os.close, file)
        if temporary is not None:
            cleanup.callback(os.unlink, temporary)
        write_header(file, size, manifest)
        if directory is not None:
            os.fsync(file)  # once, so that no crash leaves a name without a header
        locks.share_use(file)
        try:
            # src_dir_fd makes Python call linkat, which follows the link below /proc. link(2) would fail with EXDEV.
            os.link(temporary or f"/proc/self/fd/{file}", path, src_dir_fd=folder, follow_symlinks=True)
        except FileExistsError:
            return None
        closing_file.pop_all()
        return Segment(file, size, path, on_disk=directory is not None, made_here=True)


def _manifest(data: int, path: str, directory: str | None) -> Manifest:
    """Read the manifest of a file. Raises ManifestError, with advice, if the file is no segment or damaged."""
    try:
        token_of(data)
    except ValueError as error:
        raise ManifestError(f"{path} is no cache: give another name, or remove it (rm {path})") from error
    try:
        # A file on a disk that was cut off gets its full length again.
        return manifest_in(data, None if directory is None else 2**62)
    except ManifestError as error:
        name = os.path.basename(path).removeprefix(prefix())
        raise ManifestError(f"the cache {name!r} {error}. {way_out(name, directory)}") from error


def _named_files(
    directory: str | None, only: str | None = None, *, remove: bool = False, look: Callable[[int], Any] = token_of
) -> Iterator[NamedSegment]:
    """Yield the named segments of this user, and remove each that is unused, if they are to be removed."""
    folder = directory or memory_directory()
    for file in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        name, path = file.removeprefix(prefix()), os.path.join(folder, file)
        if not file.startswith(prefix()) or only not in (None, name) or not _NAME.fullmatch(name):
            continue
        with contextlib.suppress(OSError, ValueError), _own_file(path) as data:
            if remove and only is None and _is_stump(data) and _is_unused(data) and _leads_to(path, data):
                unlink(path)
            contents = look(data)
            facts = os.fstat(data)
            in_use = not _is_unused(data) if remove else locks.is_used(data)
            if remove and not in_use and _leads_to(path, data):
                unlink(path)
            yield NamedSegment(name, (facts.st_dev, facts.st_ino), facts.st_blocks * 512, in_use, contents)


@contextlib.contextmanager
def _own_file(path: str) -> Iterator[int]:
    """Open a file of this user alone, and close it in the end."""
    descriptor = open_own(path)
    try:
        yield descriptor
    finally:
        locks.release(descriptor)
        os.close(descriptor)


def _is_stump(descriptor: int) -> bool:
    """Whether the maker of a file was killed before it wrote the header; a living one writes it at once."""
    is_old = time.time() - os.fstat(descriptor).st_mtime > _MAKING
    return is_old and not any(os.pread(descriptor, HEADER_BYTES, 0))


def _is_unused(descriptor: int) -> bool:
    """Whether no process uses or opens a file. None begins to before the descriptor is closed."""
    return locks.begin_opening(descriptor, 0) and locks.use_alone(descriptor)


def _path(name: str, directory: str | None) -> str:
    return os.path.join(directory or memory_directory(), prefix() + name)


def _leads_to(path: str, descriptor: int) -> bool:
    """Whether a name still leads to the file that a descriptor has open."""
    try:
        return os.stat(path, follow_symlinks=False).st_ino == os.fstat(descriptor).st_ino
    except FileNotFoundError:
        return False

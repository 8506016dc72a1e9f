"""One file, mapped into memory by every process of a node. It lies in memory, or on a disk.

Layout: a header (`files`), then the payload, whose meaning only the owner of the segment knows. Byte locks lie on a
second, empty file beside it, because closing any descriptor of a file drops all POSIX locks that the process has on it.

1. The leader of a node calls `Segment.create`: the file has its full length at once but takes no memory yet.
2. It sends `segment.handle` to the other ranks, which call `Segment.attach`: they open the same file, through
   `/proc/<pid>/fd/<n>` if it has no name, and check inode and token, so that a recycled pid never leads to foreign
   memory. DataLoader workers inherit the descriptors (fork) or receive them while they start (spawn, forkserver).
3. A process reserves pages before it writes to them, or writes by `store`, through the file: a full filesystem is an
   `OSError(ENOSPC)` then, and a SIGBUS through the mapping. Everything that goes to a disk goes through the file, and
   so do first reads (`fetch`), because a bad block or a file that was cut off is a SIGBUS in the mapping, too.
4. `close` ends this process's mapping. The memory is free when the last process has closed or died.

The order in which other processes see two stores is up to the caller: `fence` keeps it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any

import torch

from lightning_stocache.node.files import (
    HEADER_BYTES,
    LOCKS,
    MANIFEST_OFFSET,
    NUMBERS_OFFSET,
    Backend,
    Manifest,
    make_file,
    open_own,
    reserve,
    token_of,
    write_header,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["Segment", "SegmentHandle", "fence", "fence_of"]

_MOST_PARTS = 1024  # that one call writes (IOV_MAX)
# The segments that this process has open, by token. A second lock descriptor of the same file must not be opened:
# closing either would drop the locks of both.
_open_here: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class SegmentHandle:
    """The address of a segment for other processes of the node, in plain values."""

    data: str  # path of the file's name, or of the creator's descriptor below /proc
    locks: str  # of the lock file, likewise
    inode: int
    token: bytes
    size: int
    on_disk: bool = False


class Segment:
    """A mapped file that the processes of a node share. Make one with `create`, open one with `attach`.

    Args:
        data, locks: descriptors of the mapped file and of the lock file; the segment owns them from now on.
        size: payload bytes, without the header.
        path: the file's name, if it has one.
        on_disk: whether the file lies on a disk.
        owned: whether this process removes the name when it closes the segment or ends.

    Raises:
        ValueError: the file is not a segment, or (methods that need its memory or its files) the segment is closed.

    Example:
        >>> segment = Segment.create(1024)
        >>> segment.reserve(0, 8)
        >>> segment.bytes(0, 8)[:] = 7
        >>> attached = Segment.attach(segment.handle)
        >>> attached.bytes(0, 2).tolist()
        [7, 7]
        >>> attached.close(), segment.close()
        (None, None)
    """

    def __init__(
        self,
        data: int,
        locks: int,
        size: int,
        path: str | None = None,
        *,
        on_disk: bool = False,
        owned: bool = False,
    ) -> None:
        self.size, self.path, self.on_disk, self._data, self._locks = size, path, on_disk, data, locks
        self._own_paths = [path] if owned and path else []
        self._users = 1
        self._map: mmap.mmap | None = None
        self.closed = True  # in this process; an attribute, because a loader looks at it for each batch
        self._finalizer = weakref.finalize(self, _release, data, locks, self._own_paths, os.getpid())
        try:
            self.token = token_of(data)
            self._map = mmap.mmap(data, HEADER_BYTES + size)
            self.closed = False
        except BaseException:
            self._finalizer()
            raise
        _open_here[self.token] = self

    @classmethod
    def create(
        cls,
        size: int,
        backend: Backend | None = None,
        manifest: Manifest | None = None,
        directory: str | None = None,
        *,
        reserved: int = 0,
    ) -> Segment:
        """Make a segment of `size` payload bytes, which takes no memory until it is reserved.

        Args:
            size: payload bytes.
            backend: kind of file; by default `tmpfile` where there is a /dev/shm, else `file`.
            manifest: description for people.
            directory: on a disk; by default the file lies in memory.
            reserved: how many bytes of the payload, from its beginning, are reserved at once.

        Raises:
            ValueError: the manifest does not fit in the header.
            OSError: the system refuses the file, or has no room for the header and the reserved bytes.
        """
        backend = backend or ("tmpfile" if os.path.isdir("/dev/shm") else "file")
        with contextlib.ExitStack() as undo:
            data, path = make_file(backend, directory)
            undo.callback(os.close, data)
            if path is None:
                locks, _ = make_file(backend, directory)
            else:
                undo.callback(os.unlink, path)
                locks = open_own(path + LOCKS, create=True)
                undo.callback(os.unlink, path + LOCKS)
            undo.callback(os.close, locks)
            write_header(data, size, manifest, reserved)
            undo.pop_all()
        return cls(data, locks, size, path, on_disk=directory is not None, owned=True)

    @classmethod
    def attach(cls, handle: SegmentHandle) -> Segment:
        """Open the segment that another process of this node made. It is closed by the caller.

        If this process has it open already, this is the same object, which then takes one more `close`.

        Raises:
            OSError: the file cannot be reached (another pid namespace, another user, or its creator is gone).
            ValueError: another file, or another segment, lies there now.
        """
        if (known := cls.opened(handle.token)) is not None:
            return known.share()
        named = not handle.data.startswith("/proc/")
        with contextlib.ExitStack() as undo:
            data = _open(handle.data)
            undo.callback(os.close, data)
            if os.fstat(data).st_ino != handle.inode or token_of(data) != handle.token:
                raise ValueError(f"{handle.data} is not that segment: its creator has gone, or shares no memory here")
            if named:
                fcntl.flock(data, fcntl.LOCK_SH)
            locks = _open(handle.locks)
            undo.pop_all()
        return cls(data, locks, handle.size, handle.data if named else None, on_disk=handle.on_disk)

    @staticmethod
    def opened(token: bytes) -> Segment | None:
        """The segment with this token, if this process has it open."""
        known = _open_here.get(token)
        return None if known is None or known.closed else known

    @property
    def handle(self) -> SegmentHandle:
        """The address of this segment, valid while this process has it open, or while the name exists."""
        self._check_open()
        here = f"/proc/{os.getpid()}/fd/"
        paths = (self.path, self.path + LOCKS) if self.path else (f"{here}{self._data}", f"{here}{self._locks}")
        return SegmentHandle(*paths, os.fstat(self._data).st_ino, self.token, self.size, self.on_disk)

    @property
    def header(self) -> bytes:
        """The header as it is."""
        return bytes(self._check_open()[:HEADER_BYTES])

    @property
    def numbers(self) -> memoryview:
        """A live view of two int64 in the header, 0 at first. Release it before `close`."""
        return memoryview(self._check_open())[NUMBERS_OFFSET:MANIFEST_OFFSET].cast("q")

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory, or of the disk, that the file takes right now, with its header."""
        return 0 if self.closed else os.fstat(self._data).st_blocks * 512

    @property
    def backend(self) -> Backend:
        """The kind of the file."""
        if self.path is not None:
            return "file"
        return "memfd" if os.readlink(f"/proc/self/fd/{self._data}").startswith("/memfd:") else "tmpfile"

    @property
    def free_bytes(self) -> int | None:
        """Bytes free in the file's filesystem, for a user without privileges; None if it has no limit."""
        self._check_open()
        stats = os.fstatvfs(self._data)
        return stats.f_frsize * stats.f_bavail if stats.f_blocks else None  # the filesystem of memfds has no size

    @property
    def is_whole(self) -> bool:
        """Whether the file has its full length. A read behind its end is a SIGBUS."""
        return not self.closed and os.fstat(self._data).st_size >= HEADER_BYTES + self.size

    def fetch(self, offset: int, length: int) -> bytes:
        """A copy of a range of the payload, read through the file.

        Raises:
            OSError: a block cannot be read, or the file ends before (EIO).
        """
        self._check_open()
        content = b""
        while len(content) < length:
            piece = os.pread(self._data, length - len(content), HEADER_BYTES + offset + len(content))
            if not piece:
                raise OSError(errno.EIO, f"the file ends {length - len(content)} bytes too early")
            content = content + piece if content else piece
        return content

    def bytes(self, offset: int, length: int) -> torch.Tensor:
        """A live view, uint8 `[length]`, of the payload from `offset` on. Drop it before `close`."""
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        # torch releases the buffer, so below a view of the mmap itself `close` would unmap the memory.
        return torch.frombuffer(self.memory(offset, length), dtype=torch.uint8)

    def memory(self, offset: int, length: int) -> memoryview:
        """A live memoryview: reading one byte of it costs 30 ns, of a tensor 1 us. Release it before `close`."""
        return memoryview(self._check_open())[HEADER_BYTES + offset : HEADER_BYTES + offset + length]

    def reserve(self, offset: int, length: int) -> None:
        """Have the kernel promise the pages below a range of the payload, whose contents stay as they are.

        Raises:
            OSError: there is no memory left (ENOSPC); nothing has changed.
        """
        self._check_open()
        reserve(self._data, HEADER_BYTES + offset, length)

    def store(self, offset: int, *parts: memoryview) -> None:
        """Write bytes into the payload, one part after the other, through the file: one call allocates and copies.

        Raises:
            OSError: there is no memory left (ENOSPC); a part may have been written.
        """
        self._check_open()
        offset += HEADER_BYTES
        several = 1 < len(parts) <= _MOST_PARTS and hasattr(os, "pwritev")  # macOS has it from 11 on
        written = os.pwritev(self._data, parts, offset) if several else 0
        for part in parts:
            while written < part.nbytes:
                written += os.pwrite(self._data, part[written:] if written else part, offset + written)
            offset, written = offset + part.nbytes, written - part.nbytes

    def discard(self, offset: int = 0) -> None:
        """Zero the payload from `offset` on, in every process, and give its memory back to the system at once.

        No process may touch that part meanwhile: the file is shorter for a moment.
        """
        self._check_open()
        os.ftruncate(self._data, HEADER_BYTES + offset)
        os.ftruncate(self._data, HEADER_BYTES + self.size)

    def lock(self, byte: int, *, wait: bool = False) -> bool:
        """Take the lock of one byte for this process; False if another process has it (never with `wait`). 1.5 us.

        The threads of a process share a lock, and a forked child has none. The kernel frees it when its process dies.
        """
        self._check_open()
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, byte: int) -> None:
        """Release the lock of one byte; `close` has done so already."""
        if not self.closed:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, byte)

    def unlink(self) -> None:
        """Remove the name, if there is one: from then on the memory goes with the last process that uses it."""
        if self.path is not None:
            _unlink(self.path)
            self.path = None
            self._own_paths.clear()

    def share(self) -> Segment:
        """This segment, which takes one more `close` from now on."""
        self._users += 1
        return self

    def close(self) -> None:
        """Unmap the file in this process, once each of its users here has closed it.

        A view that is still alive keeps the memory. A name goes with its creator.
        """
        if self._map is None:
            return
        self._users -= 1
        if self._users:
            return
        mapped, self._map, self.closed = self._map, None, True
        with contextlib.suppress(BufferError):  # a view of the user's is alive: the mapping goes when that view does
            mapped.close()
        self._finalizer()

    def _check_open(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the segment is closed")
        return self._map

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        # A child that is being started gets the descriptors. Everybody else (a Pool's task) gets the address: DupFd
        # would duplicate and close a descriptor of the lock file here, and with it drop this process's locks.
        self._check_open()
        if context.get_spawning_popen() is None:
            return _attached, (self.handle,)
        descriptors = reduction.DupFd(self._data), reduction.DupFd(self._locks)
        return _inherited, (*descriptors, self.size, self.path, self.on_disk)


def fence_of(machine: str, lock: contextlib.AbstractContextManager[Any]) -> Callable[[], None]:
    """The fence of a kind of processor, as `platform.machine` names it.

    A writer stores bytes, fences, and sets a state; a reader reads the state, fences, and reads the bytes. x86-64 keeps
    that order by itself. Elsewhere (arm64) a lock is acquired and released twice: nothing can pass both the first
    release and the second acquire (0.2 us). That follows from the memory model; it has not been run on arm64.
    """

    def by_lock() -> None:
        for _ in range(2):
            with lock:
                pass

    def by_hardware() -> None:
        pass

    return by_hardware if machine.lower() in ("x86_64", "amd64", "i686") else by_lock


fence = fence_of(platform.machine(), threading.Lock())
"""Stores and loads before the call are done before those after it."""


def _open(path: str) -> int:
    """The descriptor of a file by its name, or by another process's descriptor below /proc."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if path.startswith("/proc/") else open_own(path)


def _unlink(path: str) -> None:
    """Remove the name of a file, and its lock file first, so that a kill in between leaves no lock file alone."""
    for name in (path + LOCKS, path):
        with contextlib.suppress(FileNotFoundError):  # another process was first
            os.unlink(name)


def _release(data: int, locks: int, own_paths: list[str], pid: int) -> None:
    """Close a segment's two files, and remove the names that process `pid` has made, in that process only."""
    os.close(data)
    os.close(locks)
    for path in own_paths if os.getpid() == pid else ():
        _unlink(path)


def _inherited(data: Any, locks: Any, size: int, path: str | None, on_disk: bool) -> Segment:
    return Segment(data.detach(), locks.detach(), size, path, on_disk=on_disk)


def _attached(handle: SegmentHandle) -> Segment:
    return Segment.opened(handle.token) or Segment.attach(handle)  # one copy's `close` closes all of a process

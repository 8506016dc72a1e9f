"""One file, mapped into memory by every process of a node.

Layout: a header (`header`), then the payload, whose meaning only the owner of the segment knows. Byte locks lie on a
second, empty file beside it, because closing *any* descriptor of a file drops all POSIX locks that the process has on
it.

The file lies in memory or on a disk (`files`). A disk can be full or read-only, have a bad block, or take seconds for a
page; a file can be cut off. Through the mapping all of these are a SIGBUS or an endless wait; through the file they are
errors. So everything that goes to a disk goes through the file, and so do first reads (`fetch`).

1. The leader of a node calls `Segment.create`: the file has its full length at once but takes no memory yet.
2. It sends `segment.handle` (plain values) to the other ranks, which call `Segment.attach`: they open the same file,
   through `/proc/<pid>/fd/<n>` if it has no name, and check inode and token, so that a recycled pid never leads to
   foreign memory. DataLoader workers inherit the descriptors (fork) or receive them while they start (spawn,
   forkserver).
3. A process writes to pages that nobody has reserved by `store`, through the file, or reserves them first: then a full
   filesystem is an `OSError(ENOSPC)`. A write, or even a read, through the mapping is a SIGBUS there.
4. `close` ends this process's mapping. The memory is free when the last process has closed or died, by SIGKILL too:
   a file without a name cannot be left behind.

Not promised: that two processes see each other's stores in a given order; that is the caller's protocol.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any

import torch

import lightning_stocache.node.files as files
from lightning_stocache.node.files import LOCKS, Backend, open_own
from lightning_stocache.node.header import HEADER_BYTES, MANIFEST_OFFSET, NUMBERS_OFFSET, Manifest, token_of

if sys.platform != "win32":
    import fcntl

__all__ = ["Segment", "SegmentHandle"]

_MOST_PARTS = 1024  # that one call writes (IOV_MAX)
# A fork server takes 251 descriptors with a process. A segment has two, and torch sends one for each tensor.
_MOST_SENT = 80
_sent: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
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
        data: descriptor of the mapped file; the segment owns it from now on.
        locks: descriptor of the lock file, likewise.
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
            backend: kind of file; by default `tmpfile` where the system has it, else `file`.
            manifest: description for people.
            directory: on a disk; by default the file lies in memory.
            reserved: how many bytes of the payload, from its beginning, are reserved at once.

        Raises:
            ValueError: the manifest does not fit in the header.
            OSError: the system refuses the file, or has no room for the header and the reserved bytes.
        """
        backend = backend or files.default_backend()
        with contextlib.ExitStack() as undo:
            data, path = files.make_file(backend, directory)
            undo.callback(os.close, data)
            if path is None:
                locks, _ = files.make_file(backend, directory)
            else:
                undo.callback(os.unlink, path)
                locks = open_own(path + LOCKS, create=True)
                undo.callback(os.unlink, path + LOCKS)
            undo.callback(os.close, locks)
            files.write_header(data, size, manifest, reserved)
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
        data = _open(handle.data)
        try:
            if os.fstat(data).st_ino != handle.inode:
                raise ValueError(f"{handle.data} is another file by now: the process that made the segment has gone")
            if token_of(data) != handle.token:
                raise ValueError(
                    f"{handle.data} holds another segment (its token differs): these ranks do not share memory"
                )
            if named:
                fcntl.flock(data, fcntl.LOCK_SH)
            locks = _open(handle.locks)
        except BaseException:
            os.close(data)
            raise
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
            ValueError: the segment is closed.
        """
        self._check_open()
        offset += HEADER_BYTES
        content = os.pread(self._data, length, offset)
        while len(content) < length:
            piece = os.pread(self._data, length - len(content), offset + len(content))
            if not piece:
                raise OSError(errno.EIO, f"the file ends {length - len(content)} bytes too early")
            content += piece
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
        files.reserve(self._data, HEADER_BYTES + offset, length)

    def store(self, offset: int, *parts: memoryview) -> None:
        """Write bytes into the payload, one part after the other, and take the memory that they need.

        One system call allocates and copies. Through the mapping, a new page is first zeroed, and then faulted in by
        every process that writes.

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

    def lock_owner(self, byte: int) -> int | None:
        """The other process that has the lock of one byte; None if there is none, or it cannot be known."""
        return None if self.closed else files.lock_owner(self._locks, byte)

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
        if _sends_descriptors():
            descriptors = reduction.DupFd(self._data), reduction.DupFd(self._locks)
            return _inherited, (*descriptors, self.size, self.path, self.on_disk)
        return _attached, (self.handle,)


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


def _sends_descriptors() -> bool:
    """Whether a process is being started that can be sent the descriptors of one more segment, and count them."""
    child = context.get_spawning_popen()
    if child is None:
        return False
    _sent[child] = _sent.get(child, 0) + 1
    return _sent[child] <= _MOST_SENT


def _inherited(data: Any, locks: Any, size: int, path: str | None, on_disk: bool) -> Segment:
    return Segment(data.detach(), locks.detach(), size, path, on_disk=on_disk)


def _attached(handle: SegmentHandle) -> Segment:
    return Segment.opened(handle.token) or Segment.attach(handle)  # one copy's `close` closes all of a process

"""One file in memory or on a disk, mapped by every process of a node.

Layout: a header (`files`), then the payload, whose meaning only the owner of the segment knows. The byte locks lie on a
second, empty file, because closing any descriptor of a file drops all POSIX locks that the process has on that file.

1. The leader of a node calls `Segment.create`. The file has its full length at once, but takes no memory yet.
2. The leader sends `segment.handle` to the other ranks, which call `Segment.attach`. They open the same file, through
   `/proc/<pid>/fd/<n>` if it has no name, and check inode and token: a recycled pid never leads to foreign memory.
   DataLoader workers inherit the descriptors (fork) or receive them while they start (spawn, forkserver).
3. A process reserves pages before it writes to them, or writes through the file (`store`). A full filesystem is then an
   `OSError(ENOSPC)`; through the mapping it would be a SIGBUS. A disk is mapped read-only, so all writes to it go
   through the file, single numbers, too (`numbers_at`). So do first reads (`fetch`), because a bad block or a file
   that was cut off is a SIGBUS in the mapping, too.
4. `close` ends the mapping of this process. The memory is free when the last process has closed the segment or died.

Other processes may see two stores in another order, unless the writer calls `fence` between them.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import context, reduction
from typing import Any, Literal, TypeAlias

import torch

from lightning_stocache.node.files import (
    HEADER_BYTES,
    LOCKS,
    NUMBERS_OFFSET,
    Backend,
    Manifest,
    has_locks,
    make_file,
    open_own,
    punch,
    reserve,
    token_of,
    unlink_with_locks,
    write_header,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["Numbers", "Segment", "SegmentHandle", "fence", "fence_of", "open_descriptors"]

_ZEROES = 1 << 20  # bytes that are written at once where nothing can be freed
_MOST_PARTS = 1024  # that one call writes (IOV_MAX)
# The segments that this process has open, by token. A process opens each lock file once: closing a second descriptor
# would drop the locks of the first.
_open_here: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()


class _Opening:
    """One thread at a time attaches a segment."""

    lock = threading.Lock()

    @classmethod
    def begin_anew(cls) -> None:
        """In a forked child: the thread that had the lock is not there."""
        cls.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_Opening.begin_anew)


@dataclass(frozen=True)
class SegmentHandle:
    """The address of a segment for other processes of the node, in plain values."""

    data: str  # path of the file's name, or of the creator's descriptor below /proc
    locks: str  # path of the lock file, likewise
    inode: int
    token: bytes
    size: int
    on_disk: bool = False


class Segment:
    """A mapped file that the processes of a node share. Make one with `create`, open one with `attach`.

    Args:
        data, locks: descriptors of the mapped file and of the lock file, which the segment closes.
        size: payload bytes, without the header.
        path: the file's name, if it has one.
        on_disk: whether the file lies on a disk.
        owned: whether this process removes the name when it closes the segment or ends.

    Raises:
        ValueError: the file is not a segment, or the segment is closed.

    Example:
        >>> segment = Segment.create(1024)
        >>> segment.reserve(0, 8)
        >>> segment.tensor(0, 8)[:] = 7
        >>> attached = Segment.attach(segment.handle)
        >>> attached.tensor(0, 2).tolist()
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
        self.closed = True  # in this process; an attribute, because a loader reads it for each batch
        self._finalizer = weakref.finalize(self, _release, data, locks, self._own_paths, os.getpid())
        try:
            self.token = token_of(data)
            access = mmap.ACCESS_READ if on_disk else mmap.ACCESS_WRITE
            self._map = mmap.mmap(data, HEADER_BYTES + size, access=access)
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
        """Make a segment of `size` payload bytes. It takes no memory before pages are reserved.

        Args:
            size: payload bytes.
            backend: kind of file; by default `tmpfile` where there is a /dev/shm, else `file`.
            manifest: the description of the content, for people.
            directory: a directory on a disk; by default the file lies in memory.
            reserved: number of payload bytes, from the first on, that are reserved at once.

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
        """Open the segment that another process of this node made. The caller closes it.

        If this process has the segment open already, the same object is returned, and takes one more `close`.

        Raises:
            OSError: the file cannot be reached: another pid namespace, another user, or the creator has ended.
            ValueError: another file, or another segment, lies there now.
        """
        with _Opening.lock:  # two descriptors of the lock file are one too many
            if (known := cls.find_open(handle.token)) is not None:
                return known.retain()
            return cls._opened(handle)

    @classmethod
    def _opened(cls, handle: SegmentHandle) -> Segment:
        named = not handle.data.startswith("/proc/")
        with contextlib.ExitStack() as undo:
            data = _open(handle.data)
            undo.callback(os.close, data)
            if os.fstat(data).st_ino != handle.inode or token_of(data) != handle.token:
                raise ValueError(f"{handle.data} is not that segment: its creator has gone, or shares no memory here")
            if named:
                fcntl.flock(data, fcntl.LOCK_SH)
            locks = _open(handle.locks)
            undo.callback(os.close, locks)
            if not has_locks(data, locks):
                raise ValueError(f"{handle.locks} is another lock file: it was removed while the segment was in use")
            undo.pop_all()
        return cls(data, locks, handle.size, handle.data if named else None, on_disk=handle.on_disk)

    @staticmethod
    def find_open(token: bytes) -> Segment | None:
        """The open segment of this process with that token, or None."""
        known = _open_here.get(token)
        return None if known is None or known.closed else known

    @property
    def handle(self) -> SegmentHandle:
        """The address of this segment, valid while this process has the segment open, or while the name exists."""
        self._check_open()
        here = f"/proc/{os.getpid()}/fd/"
        paths = (self.path, self.path + LOCKS) if self.path else (f"{here}{self._data}", f"{here}{self._locks}")
        return SegmentHandle(*paths, os.fstat(self._data).st_ino, self.token, self.size, self.on_disk)

    @property
    def numbers(self) -> Numbers:
        """Two int64 in the header, 0 at first; see `numbers_at`."""
        return self.numbers_at(NUMBERS_OFFSET - HEADER_BYTES, 2, "q")

    def numbers_at(self, offset: int, count: int, kind: Literal["q", "l", "I"]) -> Numbers:
        """A live view of single numbers of the payload, to read and to write. Release it before `close`.

        `kind` is a format of the module struct. On a disk each write is a system call, and may raise OSError.
        """
        view = self.memory(offset, count * struct.calcsize(kind)).cast(kind)
        return _DiskNumbers(self, offset, view) if self.on_disk else view

    @property
    def descriptors(self) -> tuple[int, int]:
        """The descriptors of the mapped file and of the lock file."""
        return self._data, self._locks

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory, or of the disk, that the file takes now, with its header."""
        return 0 if self.closed else os.fstat(self._data).st_blocks * 512

    @property
    def backend(self) -> Backend:
        """The kind of the file."""
        if self.path is None:
            with contextlib.suppress(FileNotFoundError):  # without /proc (macOS) it is a file whose name is gone
                return "memfd" if os.readlink(f"/proc/self/fd/{self._data}").startswith("/memfd:") else "tmpfile"
        return "file"

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
            OSError: a block cannot be read, or the file ends too early (EIO).
        """
        self._check_open()
        content = os.pread(self._data, length, HEADER_BYTES + offset)
        while len(content) < length:
            piece = os.pread(self._data, length - len(content), HEADER_BYTES + offset + len(content))
            if not piece:
                raise OSError(errno.EIO, f"the file ends {length - len(content)} bytes too early")
            content += piece
        return content

    def next_data(self, offset: int) -> int:
        """An offset of the payload, `offset` or later, before which nothing was written; its size if nothing was."""
        self._check_open()
        try:
            return os.lseek(self._data, HEADER_BYTES + offset, os.SEEK_DATA) - HEADER_BYTES
        except (AttributeError, OSError) as error:  # some systems cannot tell
            return self.size if getattr(error, "errno", 0) == errno.ENXIO else offset

    def tensor(self, offset: int, length: int) -> torch.Tensor:
        """A live view of the payload from `offset` on, uint8 `[length]`. Drop it before `close`."""
        if length == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        # torch would release the buffer of the mmap itself, and `close` would then unmap the memory below the view.
        return torch.frombuffer(self.memory(offset, length), dtype=torch.uint8)

    def memory(self, offset: int, length: int) -> memoryview:
        """A live memoryview. Reading a byte of it costs 30 ns, of a tensor 1 us. Release it before `close`."""
        return memoryview(self._check_open())[HEADER_BYTES + offset : HEADER_BYTES + offset + length]

    def reserve(self, offset: int, length: int) -> None:
        """Reserve the pages below a range of the payload. Their contents stay as they are.

        Raises:
            OSError: there is no memory left (ENOSPC); nothing has changed.
        """
        self._check_open()
        reserve(self._data, HEADER_BYTES + offset, length)

    def store(self, offset: int, *parts: memoryview) -> None:
        """Write parts into the payload, one after the other, through the file. One call allocates memory and copies.

        Raises:
            OSError: there is no memory left (ENOSPC); a part may have been written.
        """
        self._check_open()
        offset += HEADER_BYTES
        if len(parts) == 1 and os.pwrite(self._data, parts[0], offset) == parts[0].nbytes:
            return
        several = 1 < len(parts) <= _MOST_PARTS and hasattr(os, "pwritev")  # macOS has it from 11 on
        written = os.pwritev(self._data, parts, offset) if several else 0
        for part in parts:
            while written < part.nbytes:
                written += os.pwrite(self._data, part[written:] if written else part, offset + written)
            offset, written = offset + part.nbytes, written - part.nbytes

    def put(self, offset: int, content: bytes) -> None:
        """Write a single number through the file. Raises OSError without room."""
        self._check_open()
        os.pwrite(self._data, content, HEADER_BYTES + offset)

    def discard(self, offset: int = 0, end: int | None = None) -> None:
        """Zero the payload from `offset` on, or up to `end`, in every process, and return its memory at once.

        Other processes may read that part meanwhile. Where the system cannot free pages inside a file (macOS, some
        disks), they must not, because the file is shorter for a moment.
        """
        self._check_open()
        first, last = HEADER_BYTES + offset, HEADER_BYTES + (self.size if end is None else end)
        if first == last or punch(self._data, first, last - first):
            return
        if end is None:
            os.ftruncate(self._data, first)
            os.ftruncate(self._data, last)
        for begin in range(first, last if end else first, _ZEROES):
            self.store(begin - HEADER_BYTES, memoryview(bytes(min(last - begin, _ZEROES))))

    def map_writable(self) -> None:
        """Map a disk writable in this process. A filesystem that copies on write must not become full then."""
        if memoryview(self._check_open()).readonly:
            self._map = mmap.mmap(self._data, HEADER_BYTES + self.size)

    def lock(self, byte: int, *, wait: bool = False) -> bool:
        """Take the lock of one byte for this process, in 1.5 us. Returns False if another process has the lock.

        Args:
            byte: the number of the byte.
            wait: whether to wait until the lock is free, and return True.

        All threads of a process share a lock. A forked child has none. The kernel frees a lock when its process dies.
        """
        self._check_open()
        try:
            fcntl.lockf(self._locks, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
        except (BlockingIOError, PermissionError):
            return False
        return True

    def unlock(self, byte: int) -> None:
        """Release the lock of one byte. `close` releases all locks."""
        if not self.closed:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, byte)

    def unlink(self) -> None:
        """Remove the name, if there is one. The memory is free when the last process has closed the segment."""
        if self.path is not None:
            unlink_with_locks(self.path)
            self.path = None
            self._own_paths.clear()

    def retain(self) -> Segment:
        """Count one more user of this segment in this process: it takes one more `close`."""
        self._users += 1
        return self

    def close(self) -> None:
        """Unmap the file in this process, once each user in this process has closed the segment.

        A live view keeps the memory. The creator removes the file's name.
        """
        if self._map is None:
            return
        self._users -= 1
        if self._users:
            return
        mapped, self._map, self.closed = self._map, None, True
        with contextlib.suppress(BufferError):  # a view is alive: the mapping ends with the view
            mapped.close()
        self._finalizer()

    def _check_open(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the segment is closed")
        return self._map

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        # A child that is being started gets the descriptors. A task of a Pool gets the address: DupFd would duplicate
        # and close a descriptor of the lock file in this process, and so drop the locks of this process.
        self._check_open()
        if context.get_spawning_popen() is None:
            return _from_handle, (self.handle,)
        descriptors = reduction.DupFd(self._data), reduction.DupFd(self._locks)
        return _from_descriptors, (*descriptors, self.size, self.path, self.on_disk)


class _DiskNumbers:
    """Numbers on a disk, used as a memoryview: read in the mapping, written through the file."""

    def __init__(self, segment: Segment, offset: int, view: memoryview) -> None:
        self._segment, self._offset, self._view = segment, offset, view
        self._size, self._pack = view.itemsize, struct.Struct(view.format).pack

    def __getitem__(self, number: int) -> Any:
        return self._view[number]

    def __setitem__(self, number: int, value: int) -> None:
        self._segment.put(self._offset + number * self._size, self._pack(value))

    def __enter__(self) -> _DiskNumbers:
        return self

    def __exit__(self, *_: object) -> None:
        self._view.release()


Numbers: TypeAlias = memoryview | _DiskNumbers
"""A live view of numbers in a segment."""


def open_descriptors() -> set[int]:
    """The descriptors of all segments that this process has open."""
    segments = [segment for segment in list(_open_here.values()) if not segment.closed]
    return {descriptor for segment in segments for descriptor in segment.descriptors}


def fence_of(machine: str, lock: contextlib.AbstractContextManager[Any]) -> Callable[[], None]:
    """The fence for a processor, given its name in `platform.machine`.

    A writer stores bytes, fences, and sets a state. A reader reads the state, fences, and reads the bytes. x86-64 keeps
    that order by itself. On other processors (arm64) the fence acquires and releases a lock twice: nothing can pass
    both the first release and the second acquire (0.2 us). That follows from the memory model; nobody ran it on arm64.
    """

    def by_lock() -> None:
        for _ in range(2):
            with lock:
                pass

    def by_hardware() -> None:
        pass

    return by_hardware if machine.lower() in ("x86_64", "amd64", "i686") else by_lock


fence = fence_of(platform.machine(), threading.Lock())
"""Keeps the order of stores and loads: all before the call finish before any after the call begins."""


def _open(path: str) -> int:
    """Open a file by its name, or by another process's descriptor below /proc. Returns the descriptor."""
    return os.open(path, os.O_RDWR | os.O_CLOEXEC) if path.startswith("/proc/") else open_own(path)


def _release(data: int, locks: int, own_paths: list[str], pid: int) -> None:
    """Close the two files of a segment. In process `pid`, which made the names, remove them, too."""
    os.close(data)
    os.close(locks)
    for path in own_paths if os.getpid() == pid else ():
        unlink_with_locks(path)


def _from_descriptors(data: Any, locks: Any, size: int, path: str | None, on_disk: bool) -> Segment:
    return Segment(data.detach(), locks.detach(), size, path, on_disk=on_disk)


def _from_handle(handle: SegmentHandle) -> Segment:
    return Segment.find_open(handle.token) or Segment.attach(handle)  # the first `close` of a copy closes all copies

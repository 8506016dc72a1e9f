"""One file in memory or on a disk, mapped by every process of a node.

Layout: a header (`files`), then the payload, whose meaning only the owner of the segment knows. Locks lie on the file
itself (`locks`).

1. The leader of a node calls `Segment.create`. The file has its full length at once, but takes no memory yet.
2. The leader sends `segment.handle` to the other ranks, which call `Segment.attach`. They open the same file, through
   `/proc/<pid>/fd/<n>` if it has no name, and check inode and token: a recycled pid never leads to foreign memory.
   DataLoader workers inherit the descriptor (fork) or receive it while they start (spawn, forkserver), and open the
   file anew, because locks belong to what a descriptor has opened.
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
import logging
import mmap
import os
import platform
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from multiprocessing import context, reduction
from typing import Any, Literal, TypeAlias, TypeVar

import torch

from lightning_stocache.node import locks
from lightning_stocache.node.files import (
    HEADER_BYTES,
    NUMBERS_OFFSET,
    Backend,
    Manifest,
    make_file,
    open_own,
    punch,
    reserve,
    token_of,
    unlink,
    write_header,
)

if sys.platform != "win32":
    import fcntl

__all__ = [
    "Numbers",
    "Segment",
    "SegmentHandle",
    "fence",
    "fence_of",
    "open_descriptors",
    "view_of",
    "warn_without_locks",
]

_T = TypeVar("_T")

log = logging.getLogger(__name__)

_ZEROES = 1 << 20  # bytes that are written at once where nothing can be freed
_MOST_PARTS = 1024  # that one call writes (IOV_MAX)
_PATIENCE = 1.0  # seconds to wait for the turn, whose holder may have been stopped

_open_here: weakref.WeakSet[Segment] = weakref.WeakSet()
"""The segments that this process has open."""


def _leave_parent() -> None:
    for segment in list(_open_here):
        segment.leave_parent()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parent)


@dataclass(frozen=True)
class SegmentHandle:
    """The address of a segment for other processes of the node, in plain values."""

    path: str  # of the file's name, or of the creator's descriptor below /proc
    inode: int
    token: bytes
    size: int
    on_disk: bool = False


class Segment:
    """A mapped file that the processes of a node share. Make one with `create`, open one with `attach`.

    Args:
        file: a descriptor of the file, which the segment closes. No other process has its open file description.
        size: payload bytes, without the header.
        path: the file's name, if it has one.
        on_disk: whether the file lies on a disk.
        owned: whether this process removes the name when it closes the segment or ends.
        made_here: whether this process has made the file.
        alone: whether this process uses the file alone; it shares the use afterwards (`locks.share_use`).

    `has_locks` says whether this process can lock bytes, and so store samples.

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
        file: int,
        size: int,
        path: str | None = None,
        *,
        on_disk: bool = False,
        owned: bool = False,
        made_here: bool = False,
        alone: bool = False,
    ) -> None:
        self.size, self.path, self.on_disk, self.descriptor = size, path, on_disk, file
        self._file: _File | None = _File(file)
        self._own_paths = [path] if owned and path else []
        self._map: mmap.mmap | None = None
        self.closed = True  # in this process; an attribute, because a loader reads it for each batch
        self._threads = threading.RLock()  # of this process, which share the turn
        self._is_working = False  # in the turn
        self._held_here: dict[int, threading.Lock] = {}  # by byte: `holding` excludes other threads, too
        self._states: dict[type[Any], Any] = {}
        self._is_late = False  # the turn was not free in time, and is tried once a call
        self._finalizer = weakref.finalize(self, _unlink, self._own_paths, os.getpid())
        try:
            self._has_turns = locks.are_exclusive()
            self.has_locks = self._has_turns or made_here
            if made_here:
                warn_without_locks()
            self.token = token_of(file)
            if not alone:
                locks.share_use(file)
            self._map = _mapped(file, HEADER_BYTES + size, writable=not on_disk)
            self.closed = False
        except BaseException:
            self._file = None
            self._finalizer()
            raise
        _open_here.add(self)

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
            file, path = make_file(backend, directory)
            undo.callback(os.close, file)
            if path is not None:
                undo.callback(os.unlink, path)
            write_header(file, size, manifest, reserved)
            undo.pop_all()
        return cls(file, size, path, on_disk=directory is not None, owned=True, made_here=True)

    @classmethod
    def attach(cls, handle: SegmentHandle) -> Segment:
        """Open the segment that another process of this node made. The caller closes it.

        Raises:
            OSError: the file cannot be reached: another pid namespace, another user, or the creator has ended.
            ValueError: another file, or another segment, lies there now.
        """
        has_name = not handle.path.startswith("/proc/")
        file = open_own(handle.path) if has_name else os.open(handle.path, os.O_RDWR | os.O_CLOEXEC)
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, file)
            if os.fstat(file).st_ino != handle.inode or token_of(file) != handle.token:
                raise ValueError(f"{handle.path} is not that segment: its creator has gone, or shares no memory here")
            undo.pop_all()
        return cls(file, handle.size, handle.path if has_name else None, on_disk=handle.on_disk)

    @property
    def handle(self) -> SegmentHandle:
        """The address of this segment, valid while this process has the segment open, or while the name exists."""
        self._check_open()
        path = self.path or f"/proc/{os.getpid()}/fd/{self.descriptor}"
        return SegmentHandle(path, os.fstat(self.descriptor).st_ino, self.token, self.size, self.on_disk)

    @property
    def numbers(self) -> Numbers:
        """Two int64 in the header, 0 at first; see `numbers_at`."""
        return self.numbers_at(NUMBERS_OFFSET - HEADER_BYTES, 2, "q")

    def numbers_at(self, offset: int, count: int, kind: Literal["q", "l", "I", "B"]) -> Numbers:
        """A live view of single numbers of the payload, to read and to write. Release it before `close`.

        `kind` is a format of the module struct. On a disk each write is a system call, and may raise OSError.
        """
        view = self.memory(offset, count * struct.calcsize(kind)).cast(kind)
        return _DiskNumbers(self, offset, view) if self.on_disk else view

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory, or of the disk, that the file takes now, with its header."""
        return 0 if self.closed else os.fstat(self.descriptor).st_blocks * 512

    @property
    def backend(self) -> Backend:
        """The kind of the file."""
        if self.path is None:
            with suppress(FileNotFoundError):  # without /proc (macOS) it is a file whose name is gone
                return "memfd" if os.readlink(f"/proc/self/fd/{self.descriptor}").startswith("/memfd:") else "tmpfile"
        return "file"

    @property
    def free_bytes(self) -> int | None:
        """Bytes free in the file's filesystem, for a user without privileges; None if it has no limit."""
        self._check_open()
        stats = os.fstatvfs(self.descriptor)
        return stats.f_frsize * stats.f_bavail if stats.f_blocks else None  # the filesystem of memfds has no size

    @property
    def is_whole(self) -> bool:
        """Whether the file has its full length. A read behind its end is a SIGBUS."""
        return not self.closed and os.fstat(self.descriptor).st_size >= HEADER_BYTES + self.size

    def fetch(self, offset: int, length: int) -> bytes:
        """A copy of a range of the payload, read through the file.

        Raises:
            OSError: a block cannot be read, or the file ends too early (EIO).
        """
        file = self._open_file()
        content = os.pread(file.number, length, HEADER_BYTES + offset)
        while len(content) < length:
            piece = os.pread(file.number, length - len(content), HEADER_BYTES + offset + len(content))
            if not piece:
                raise OSError(errno.EIO, f"the file ends {length - len(content)} bytes too early")
            content += piece
        return content

    def next_data(self, offset: int) -> int:
        """An offset of the payload, `offset` or later, before which nothing was written; its size if nothing was."""
        self._check_open()
        try:
            return os.lseek(self.descriptor, HEADER_BYTES + offset, os.SEEK_DATA) - HEADER_BYTES
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
        file = self._open_file()
        reserve(file.number, HEADER_BYTES + offset, length)

    def store(self, offset: int, *parts: memoryview) -> None:
        """Write parts into the payload, one after the other, through the file. One call allocates memory and copies.

        Raises:
            OSError: there is no memory left (ENOSPC); a part may have been written.
        """
        file = self._open_file()
        offset += HEADER_BYTES
        if len(parts) == 1 and os.pwrite(file.number, parts[0], offset) == parts[0].nbytes:
            return
        several = 1 < len(parts) <= _MOST_PARTS and hasattr(os, "pwritev")  # macOS has it from 11 on
        written = os.pwritev(file.number, parts, offset) if several else 0
        for part in parts:
            while written < part.nbytes:
                written += os.pwrite(file.number, part[written:] if written else part, offset + written)
            offset, written = offset + part.nbytes, written - part.nbytes

    def put(self, offset: int, content: bytes) -> None:
        """Write a single number through the file. Raises OSError without room."""
        file = self._open_file()
        os.pwrite(file.number, content, HEADER_BYTES + offset)

    def discard(self, offset: int = 0, end: int | None = None) -> None:
        """Zero the payload from `offset` on, or up to `end`, in every process, and return its memory at once.

        Other processes may read that part meanwhile. Where the system cannot free pages inside a file (macOS, some
        disks), they must not, because the file is shorter for a moment.
        """
        file = self._open_file()
        first, last = HEADER_BYTES + offset, HEADER_BYTES + (self.size if end is None else end)
        if first == last or punch(file.number, first, last - first):
            return
        if end is None:
            os.ftruncate(file.number, first)
            os.ftruncate(file.number, last)
        for begin in range(first, last if end else first, _ZEROES):
            self.store(begin - HEADER_BYTES, memoryview(bytes(min(last - begin, _ZEROES))))

    def sync(self) -> None:
        """Wait until the disk has all that was written to the file.

        Raises:
            OSError: the disk has lost some of it. The kernel says so once to each process that had the file open.
        """
        file = self._open_file()
        getattr(os, "fdatasync", os.fsync)(file.number)  # macOS has no fdatasync

    def drop_page_cache(self) -> None:
        """Drop the cached pages of the file, so that later reads ask the disk. Mapped and unwritten pages stay."""
        self._check_open()
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def lock(self, byte: int) -> bool:
        """Take the lock of one byte for this process. Returns False if another process has the lock.

        All threads of a process share a lock. A forked child has none. The kernel frees a lock when its process dies.
        Where locks exclude nobody, only the process that made the segment gets one (`has_locks`).
        """
        self._check_open()
        if not self._has_turns:
            return self.has_locks
        return self.has_locks and locks.lock(self.descriptor, byte)

    def unlock(self, byte: int) -> None:
        """Release the lock of one byte. `close` releases all locks."""
        if not self.closed and self._has_turns and self.has_locks:
            locks.unlock(self.descriptor, byte)

    def is_locked(self, byte: int) -> bool:
        """Whether another process has the lock of one byte."""
        self._check_open()
        return self._has_turns and locks.is_locked(self.descriptor, byte)

    @contextlib.contextmanager
    def holding(self, byte: int, *, shared: bool = False) -> Iterator[None]:
        """Wait for the lock of one byte, and hold it for this thread. Not re-entrant.

        Unlike the turn, the lock may be held for long.

        Args:
            byte: the byte.
            shared: other processes may hold the lock at the same time, if they share it, too. Other threads of this
                process still wait.

        Raises:
            OSError: this process has no locks (ENOLCK).
        """
        self._check_open()
        if not self.has_locks:
            raise OSError(errno.ENOLCK, "this system has no locks between processes, or this process no descriptor")
        with self._held_here.setdefault(byte, threading.Lock()):
            try:
                if self._has_turns:
                    locks.lock(self.descriptor, byte, wait=True, shared=shared)
                yield
            finally:
                self.unlock(byte)

    def in_turn(self, work: Callable[..., _T], *args: object) -> _T | None:
        """The result of `work(*args)`, while no other process or thread works in its turn.

        Nothing in it may wait: not for a disk, not for a sample. Returns None if the turn is not free within a
        second, because its holder was stopped. From then on it is tried once a call, until it is had. A signal's
        handler does not get the turn that its own thread has.
        """
        self._check_open()
        if not self.has_locks and self._has_turns:
            return None
        file = self.descriptor
        with self._threads:
            if self._is_working:
                return None
            try:
                self._is_working = True
                if not self._has_turns:
                    return work(*args)
                self._is_late = not locks.lock_turn(file, 0 if self._is_late else _PATIENCE)
                return None if self._is_late else work(*args)
            finally:
                try:  # no function of Python's, at whose beginning KeyboardInterrupt could come
                    self._is_working = False
                    if self._has_turns:
                        fcntl.flock(file, fcntl.LOCK_UN)
                except BaseException:  # in an audit hook, which is one
                    self._is_working = False
                    if self._has_turns:
                        fcntl.flock(file, fcntl.LOCK_UN)
                    raise

    def state_of(self, kind: type[_T]) -> _T:
        """What all threads of this process share for this segment: one `kind()`, which a forked child makes anew."""
        state: _T = self._states.setdefault(kind, kind())
        return state

    def unlink(self) -> None:
        """Remove the name, if there is one. The memory is free when the last process has closed the segment."""
        if self.path is not None:
            unlink(self.path)
            self.path = None
            self._own_paths.clear()

    def close(self) -> None:
        """Unmap the file in this process. A live view keeps the memory. The creator removes the file's name."""
        if self._map is None:
            return
        is_free = self._threads.acquire(timeout=2 * _PATIENCE)  # a thread in its turn must not write into another file
        try:
            mapped, self._map, self.closed = self._map, None, True
            if self.has_locks:  # else the description may be the parent's
                locks.release(self.descriptor)
            _open_here.discard(self)
            with suppress(BufferError):  # a view is alive: the mapping ends with the view
                mapped.close()
            self._file = None  # another thread may still write into it
            self._finalizer()
        finally:
            if is_free:
                self._threads.release()

    def leave_parent(self) -> None:
        """In a forked child: open the file anew, because what was inherited has the parent's locks."""
        self._threads, self._held_here = threading.RLock(), {}
        self._is_late = self._is_working = False
        for state in self._states.values():
            state.__init__()
        self.has_locks = False
        with suppress(OSError):  # no descriptor is left: this process stores nothing
            anew = locks.open_anew(self.descriptor)
            try:
                locks.share_use(anew)
                os.dup2(anew, self.descriptor, inheritable=False)  # closes what was inherited, and keeps the number
                self.has_locks = self._has_turns
            finally:
                os.close(anew)

    def _check_open(self) -> mmap.mmap:
        if self._map is None:
            raise ValueError("the segment is closed")
        return self._map

    def _open_file(self) -> _File:
        """The file, which stays open while the caller has this object, whoever closes the segment meanwhile."""
        file = self._file
        if file is None:
            raise ValueError("the segment is closed")
        return file

    def __reduce__(self) -> tuple[Callable[..., Segment], tuple[Any, ...]]:
        # A child that is being started gets the descriptor. A task of a Pool gets the address.
        self._check_open()
        if context.get_spawning_popen() is None:
            return Segment.attach, (self.handle,)
        return _from_descriptor, (reduction.DupFd(self.descriptor), self.size, self.path, self.on_disk)


class _File:
    """A descriptor, which is closed when nobody has this object any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        with suppress(OSError):  # somebody has closed it by its number
            close(self.number)


class _DiskNumbers:
    """Numbers on a disk, used as a memoryview: read in the mapping, written through the file."""

    def __init__(self, segment: Segment, offset: int, view: memoryview) -> None:
        self._segment, self._offset, self.view = segment, offset, view
        self._size, self._pack = view.itemsize, struct.Struct(view.format).pack

    def __getitem__(self, number: int) -> Any:
        return self.view[number]

    def __setitem__(self, number: int, value: int) -> None:
        self._segment.put(self._offset + number * self._size, self._pack(value))

    def __enter__(self) -> _DiskNumbers:
        return self

    def __exit__(self, *_: object) -> None:
        self.view.release()


Numbers: TypeAlias = memoryview | _DiskNumbers
"""A live view of numbers in a segment."""


def view_of(numbers: Numbers) -> memoryview:
    """The same numbers to read alone: on a disk that is four times as fast."""
    return numbers if isinstance(numbers, memoryview) else numbers.view


def open_descriptors() -> set[int]:
    """The descriptors of all segments that this process has open."""
    return {segment.descriptor for segment in list(_open_here)}


def fence_of(machine: str, new_lock: Callable[[], contextlib.AbstractContextManager[Any]]) -> Callable[[], None]:
    """The fence for a processor, given its name in `platform.machine`.

    A writer stores bytes, fences, and sets a state. A reader reads the state, fences, and reads the bytes. x86-64 keeps
    that order by itself. On other processors (arm64) the fence acquires and releases a lock twice: nothing can pass
    both the first release and the second acquire (0.2 us). That follows from the memory model; nobody ran it on arm64.
    The lock is a new one each time: a forked child may inherit another thread's locked.
    """

    def by_lock() -> None:
        lock = new_lock()
        for _ in range(2):
            with lock:
                pass

    def by_hardware() -> None:
        pass

    return by_hardware if machine.lower() in ("x86_64", "amd64", "i686") else by_lock


fence = fence_of(platform.machine(), threading.Lock)
"""Keeps the order of stores and loads: all before the call finish before any after the call begins."""


@cache
def warn_without_locks() -> None:
    """Warn where processes have no locks, once in each that makes or joins a segment."""
    if not locks.are_exclusive():
        log.warning(
            "this system has no locks between processes (open file descriptions): only the process that makes a cache "
            "stores samples in it. Load without workers (num_workers=0) to fill it"
        )


def _mapped(file: int, length: int, *, writable: bool) -> mmap.mmap:
    """Map a file by an open file description of its own, which no lock belongs to: a mapping keeps it."""
    access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
    try:
        own = locks.open_anew(file)
    except FileNotFoundError:  # there is no /proc
        return mmap.mmap(file, length, access=access)
    try:
        return mmap.mmap(own, length, access=access)
    finally:
        os.close(own)


def _unlink(own_paths: list[str], pid: int) -> None:
    """In process `pid`, which made the name of a segment, remove it."""
    for path in own_paths if os.getpid() == pid else ():
        unlink(path)


def _from_descriptor(received: Any, size: int, path: str | None, on_disk: bool) -> Segment:
    """The segment in a process that has received a descriptor: what it opened belongs to the sender, too."""
    descriptor: int = received.detach()
    try:
        anew = locks.open_anew(descriptor)
    except FileNotFoundError:  # there is no /proc
        return Segment(descriptor, size, path, on_disk=on_disk)
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return Segment(anew, size, path, on_disk=on_disk)

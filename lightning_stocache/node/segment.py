"""One file, mapped into memory by every process of a node.

Layout: a header (`header`), then the payload, whose meaning only the owner of the segment knows. A second, empty file
beside it carries byte locks; it is separate because closing *any* descriptor of a file drops all POSIX locks that the
process holds on it.

Who does what, in this order:

1. The leader of a node calls `Segment.create`: the file has its full length at once but holds no memory yet.
2. It sends `segment.handle` (plain values) to the other ranks, which call `Segment.attach`: they open the same file,
   through `/proc/<pid>/fd/<n>` where it has no name, and check inode and token, so that a recycled pid can never lead
   to foreign memory. DataLoader workers inherit the descriptors (fork) or are sent them while they are started
   (spawn, forkserver).
3. Whoever stores into pages that nobody has reserved yet does so by `store`, through the file, or calls `reserve`
   first: then a full filesystem is an `OSError(ENOSPC)`. In the middle of a store through the mapping it is a SIGBUS.
4. `close` gives up this process's mapping. The memory is free when the last process has closed or died, by SIGKILL too:
   a file without a name cannot be left behind.

A page that nobody has reserved must not be read through the mapping either: the read takes one, or dies of SIGBUS, too.

Not promised: that two processes see each other's stores in a given order; that is the caller's protocol.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from typing import Any, Self

import torch

import lightning_stocache.node.files as files
from lightning_stocache.node.files import Backend, open_own
from lightning_stocache.node.handle import SegmentHandle, takes_descriptors
from lightning_stocache.node.header import (
    HEADER_BYTES,
    MANIFEST_OFFSET,
    NUMBERS_OFFSET,
    Manifest,
    token_of,
    write_manifest,
)
from lightning_stocache.node.locks import give_back, holder, take

__all__ = ["Segment"]

# The segments that this process has open, by token. Opening one a second time in the same process would make a second
# lock descriptor, and closing either would drop the locks of both.
_open_here: weakref.WeakValueDictionary[bytes, Segment] = weakref.WeakValueDictionary()


class Segment:
    """A mapped file that the processes of a node share. Make one with `create`, open one with `attach`.

    Args:
        data: descriptor of the mapped file; the segment owns it from now on.
        locks: descriptor of the lock file, likewise.
        size: payload bytes, the header not counted.
        path: the file's name, if it has one.
        owned: whether this process takes the name away at the latest when it closes the segment or ends.

    Raises:
        ValueError: the file is not a segment; (whatever needs its memory, or its files) it is closed.

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

    def __init__(self, data: int, locks: int, size: int, path: str | None = None, *, owned: bool = False) -> None:
        self.size, self.path, self._data, self._locks = size, path, data, locks
        self._own_names = [path, path + ".locks"] if owned and path else []
        self._holds = 1
        self._map: mmap.mmap | None = None
        self._finalizer = weakref.finalize(self, files.give_up, data, locks, self._own_names, os.getpid())
        try:
            self.token = token_of(data)
            self._map = mmap.mmap(data, HEADER_BYTES + size)
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
    ) -> Self:
        """Make a segment of `size` payload bytes that holds no memory until it is reserved.

        Args:
            size: payload bytes.
            backend: where the file lies; by default `tmpfile` where the system has it, else `file`.
            manifest: what it says about itself, for people.
            directory: where the file lies; by default in memory.
            reserved: how many bytes of the payload, from its beginning, are reserved at once.

        Raises:
            ValueError: the manifest does not fit in the header.
            OSError: the system refuses the file, or has no room for the header and what is reserved.
        """
        backend = backend or files.default_backend()
        with contextlib.ExitStack() as undo:
            data, path = files.make_file(backend, directory)
            undo.callback(os.close, data)
            if path is None:
                locks, _ = files.make_file(backend, directory)
            else:
                undo.callback(os.unlink, path)
                locks = open_own(path + ".locks", create=True, exclusive=True)
                undo.callback(os.unlink, path + ".locks")
            undo.callback(os.close, locks)
            files.write_header(data, size, reserved)
            if manifest is not None:
                write_manifest(data, manifest)
            undo.pop_all()
        return cls(data, locks, size, path, owned=True)

    @classmethod
    def attach(cls, handle: SegmentHandle) -> Self:
        """Open the segment that another process of this node made; who calls this closes it.

        It is the same object where this process has it open already, and then takes one more `close`.

        Raises:
            OSError: the file cannot be reached (another pid namespace, another user, or its creator is gone).
            ValueError: what lies there now is not that segment.
        """
        if isinstance(known := cls.opened(handle.token), cls):
            return known.hold()
        named = None if handle.data.startswith("/proc/") else handle.data
        data = open_own(named) if named else os.open(handle.data, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(data).st_ino != handle.inode:
                raise ValueError(f"{handle.data} is another file by now: the process that made the segment has gone")
            if token_of(data) != handle.token:
                raise ValueError(
                    f"{handle.data} holds another segment (its token differs): these ranks do not share memory"
                )
            if named is not None:
                files.hold(data)
            locks = open_own(handle.locks) if named else os.open(handle.locks, os.O_RDWR | os.O_CLOEXEC)
        except BaseException:
            os.close(data)
            raise
        return cls(data, locks, handle.size, named)

    @staticmethod
    def opened(token: bytes) -> Segment | None:
        """The segment with this token that this process has open, if it has."""
        known = _open_here.get(token)
        return None if known is None or known.closed else known

    @property
    def handle(self) -> SegmentHandle:
        """The address of this segment for other processes of the node.

        Valid while this process lives, or while the name exists.
        """
        self._check_open()
        here = f"/proc/{os.getpid()}/fd/"
        paths = (self.path, self.path + ".locks") if self.path else (f"{here}{self._data}", f"{here}{self._locks}")
        return SegmentHandle(*paths, os.fstat(self._data).st_ino, self.token, self.size)

    @property
    def header(self) -> bytes:
        """The header as it is."""
        return bytes(self._check_open()[:HEADER_BYTES])

    @property
    def numbers(self) -> memoryview:
        """Two numbers in the header that all processes share, live, int64; zeroes at first. Release before `close`."""
        return memoryview(self._check_open())[NUMBERS_OFFSET:MANIFEST_OFFSET].cast("q")

    @property
    def closed(self) -> bool:
        """Whether this process has given the segment up."""
        return self._map is None

    @property
    def allocated_bytes(self) -> int:
        """Bytes of memory (or of the disk) that the file holds right now, the header included."""
        return 0 if self.closed else os.fstat(self._data).st_blocks * 512

    @property
    def free_bytes(self) -> int | None:
        """Bytes that are free where the file lies; None where its filesystem has no limit."""
        return files.free_beside(self._data)

    def bytes(self, offset: int, length: int) -> torch.Tensor:
        """A live view, uint8 `[length]`, of the payload from `offset` on. Drop it before `close`.

        Reading or writing what has not been reserved takes memory, or dies of SIGBUS where there is none.
        """
        if length == 0:
            return torch.empty(0, dtype=torch.uint8)
        # Through a memoryview: torch keeps its object alive but releases the buffer, and `close` would unmap the memory
        # below a view of the mmap itself.
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
        if length:
            files.reserve(self._data, HEADER_BYTES + offset, length)

    def store(self, offset: int, *parts: memoryview) -> None:
        """Write bytes into the payload, one piece after the other, and take the memory that they need.

        Through the file, not the mapping: one system call allocates and copies, where a page of new memory that is
        written to through the mapping is first zeroed, and then faulted in by every process that writes.

        Raises:
            OSError: there is no memory left (ENOSPC); a part may have been written.
        """
        self._check_open()
        files.store(self._data, HEADER_BYTES + offset, *parts)

    def discard(self, offset: int = 0) -> None:
        """Zero the payload from `offset` on, in every process, and give its whole pages back to the system at once."""
        mapped, start, end = self._check_open(), HEADER_BYTES + offset, HEADER_BYTES + self.size
        first_page = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        if hasattr(mmap, "MADV_REMOVE") and first_page < end:
            mapped.madvise(mmap.MADV_REMOVE, first_page, end - first_page)
            end = first_page
        files.overwrite(self._data, start, end - start)

    def lock(self, byte: int, *, wait: bool = False) -> bool:
        """Take the lock of one byte for this process; whether it is held now. See `node.locks`."""
        self._check_open()
        return take(self._locks, byte, wait=wait)

    def unlock(self, byte: int) -> None:
        """Give the lock of one byte back; `close` has done so already."""
        if not self.closed:
            give_back(self._locks, byte)

    def holder(self, byte: int) -> int | None:
        """The other process that has the lock of one byte; None if there is none, or it cannot be known."""
        return None if self.closed else holder(self._locks, byte)

    def unlink(self) -> None:
        """Take the name away, if there is one: from then on the memory goes with the last process that uses it."""
        if self.path is not None:
            for name in (self.path, self.path + ".locks"):
                with contextlib.suppress(FileNotFoundError):  # another process was first
                    os.unlink(name)
            self.path = None
            self._own_names.clear()

    def hold(self) -> Self:
        """This segment for one more user in this process: it takes one more `close`."""
        self._holds += 1
        return self

    def close(self) -> None:
        """Give up this process's mapping, for every copy of this object in the process, once nobody else holds it.

        Views should have been dropped before: the memory of others goes with the last. A name goes with its creator.
        """
        if self._map is None:
            return
        self._holds -= 1
        if self._holds:
            return
        mapped, self._map = self._map, None
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
        if takes_descriptors():
            descriptors = reduction.DupFd(self._data), reduction.DupFd(self._locks)
            return _inherit, (type(self), *descriptors, self.size, self.path)
        return _reached, (type(self), self.handle)


def _inherit(kind: type[Segment], data: Any, locks: Any, size: int, path: str | None) -> Segment:
    return kind(data.detach(), locks.detach(), size, path)


def _reached(kind: type[Segment], handle: SegmentHandle) -> Segment:
    # A copy of an object that this process has open is closed with it.
    known = kind.opened(handle.token)
    return kind.attach(handle) if known is None else known

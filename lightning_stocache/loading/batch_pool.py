"""The memory in which a batch is put together: lent, and taken back when nobody holds it or a view of it.

A fresh buffer of a few megabytes costs its page faults, more than the gather that fills it (8 GB/s where a warm one
takes 15 to 17). So the same memory is used again. It is private where this process makes the whole batch, and shared
where workers write rows of it: what DataLoader sends is fresh shared memory each time, with page faults in the worker,
a descriptor in the message, a mapping and page faults again here. A gather into shared memory that is used again is as
fast as into private.

Private memory goes back to its field, last in, first out, because three buffers in rotation stay in the processor's
cache and ten do not. All are as large as the largest batch that the field has had; a smaller batch takes a part of one.
So batches of every size (a last one, a sampler's buckets) share them, and no size keeps memory for itself. Pinned
batches come from torch's own caching host allocator instead: a copy to the device may still be reading a tensor that
nobody holds, and only that allocator knows.

Shared memory is a number of segments, each as large as the largest batch so far. A segment belongs, in turn, to the
pool, to this process and the one worker that was asked for rows, and to the trainer. It lies in a memfd where the
system has that, not in /dev/shm: that one may be small (Docker's 64 MiB), and what is left of it belongs to the cache
and to torch, which dies of SIGBUS where it finds it full. A memfd is limited by nothing but the machine's memory and
the cgroup's, above which the kernel kills; so these are looked at before any is taken. What a cache has been granted
but has not filled yet counts as taken: it will be, and it is not asked again. Where there is no memory for one more
segment, batches do without for a while, with one warning.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.loading.interrupts import held_back
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Attached", "BatchPool", "SharedBatch", "fields_of"]

log = logging.getLogger(__name__)

_SMALL = 1 << 14  # below this (labels) a fresh tensor costs less than the bookkeeping
_KEPT = 8  # private buffers per field; a consumer that lets go of batches in bursts needs no more
_KEPT_OF_A_SIZE = 2  # of samples of many sizes
_PAUSE_SECONDS = 10.0  # after memory was refused


class BatchPool:
    """Lends memory for batches.

    Args:
        pinned: whether private memory is page-locked, for copies to a device that overlap with compute.
        shared: how many batches may lie in shared memory at once.
        promised: says how many bytes of free memory are somebody else's.

    Example:
        >>> pool = BatchPool()
        >>> address = pool.take([1 << 20])[0].ctypes.data  # given back at once: nobody holds it
        >>> pool.take([1 << 20])[0].ctypes.data == address
        True
    """

    def __init__(self, *, pinned: bool = False, shared: int = 0, promised: Callable[[], int] = int) -> None:
        self._pinned, self._promised = pinned, promised
        self._private: dict[int, list[torch.Tensor]] = {}  # free buffers by field, or by size (negative)
        self._largest: dict[int, int] = {}
        self._free = list(range(shared))
        self._segments: dict[int, Segment] = {}
        self._size = 0
        self._refused_until: float | None = None

    @property
    def pinned(self) -> bool:
        """Whether private memory is page-locked: each array is then that of a tensor, its `base`."""
        return self._pinned

    def take(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Private memory of undefined content, uint8 `[size]` per field, aligned to 64 bytes where it is large."""
        return [self._take(field, nbytes) for field, nbytes in enumerate(sizes)]

    def lend(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Private memory for samples of many sizes, uint8 `[size]` each, that come and go one by one.

        Sizes are rounded up by an eighth at most, so that memory that has come back fits the next ones, and few of each
        size are kept.
        """
        return [self._take(-(step := _size_class(nbytes)), step, _KEPT_OF_A_SIZE)[:nbytes] for nbytes in sizes]

    def take_shared(self, sizes: Sequence[int] = ()) -> SharedBatch | None:
        """Shared memory for fields of those sizes, or for any batch so far; None if there is none to be had."""
        self.expect(sum(map(aligned, sizes)))
        if not self._size or not self._free:
            return None
        number = self._free.pop()
        segment = self._segments.get(number)
        if segment is None or segment.size < self._size:
            with held_back():  # between a file's opening and its registration Ctrl-C would leave the file open for ever
                if segment is not None:
                    self._segments.pop(number).close()
                if (segment := self._reserved()) is None:
                    self._free.insert(0, number)  # those that have memory come first
                    return None
                self._segments[number] = segment
        return SharedBatch(segment, self._free, number)

    def _reserved(self) -> Segment | None:
        """One more segment, all of it reserved; None without memory beside what is promised, or a moment ago."""
        if self._refused_until is not None and time.monotonic() < self._refused_until:
            return None
        backend: Backend | None = "memfd" if hasattr(os, "memfd_create") else None
        free, size = FreeMemory.now(memory_directory() if backend is None else None), self._size
        try:
            if size > (left := max(free.bytes - self._promised(), 0)):
                raise OSError(errno.ENOMEM, f"{size} bytes are more than the {left} that {free.limited_by} leaves")
            return Segment.create(size, backend, reserved=size)
        except OSError as error:
            if self._refused_until is None:
                log.warning(
                    "workers send batches in messages, which is slower, for want of shared memory: %s", str(error)
                )
            self._refused_until = time.monotonic() + _PAUSE_SECONDS
            return None

    def expect(self, nbytes: int) -> None:
        """Batches are as large as that: shared memory is, from now on."""
        self._size = max(self._size, nbytes)

    @property
    def may_lend(self) -> bool:
        """Whether shared memory is left for the next batch, if the trainer keeps this one."""
        return self.shared_left > 0

    @property
    def shared_left(self) -> int:
        """How many batches shared memory can still be lent to; after it was refused, those that have some."""
        return len(self._free) if self._refused_until is None else sum(map(self._segments.__contains__, self._free))

    @property
    def shared_bytes(self) -> int:
        """Bytes of shared memory that have been taken."""
        return sum(segment.size for segment in self._segments.values())

    @property
    def idle_bytes(self) -> int:
        """Bytes of private memory that are kept for batches to come."""
        return sum(memory.nbytes for free in self._private.values() for memory in free)

    def trim(self) -> None:
        """Give up the shared memory that is free; more may be taken later."""
        for number in list(self._free):
            if (segment := self._segments.pop(number, None)) is not None:
                segment.close()

    def close(self) -> None:
        """Give shared memory up; a batch that is still held keeps its own."""
        self._free.clear()
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._size = 0  # what comes back later is lent no more

    def _take(self, key: int, nbytes: int, kept: int = _KEPT) -> npt.NDArray[np.uint8]:
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        if nbytes < _SMALL:
            return torch.empty(nbytes, dtype=torch.uint8).numpy()
        free = self._private.setdefault(key, [])
        # Two threads may be here at once: each list operation is atomic, and what was popped is looked at.
        if nbytes > self._largest.get(key, 0):
            self._largest[key] = nbytes
            free.clear()
        try:
            memory = free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.shape[0] < nbytes:
            memory = torch.empty(max(self._largest[key], nbytes), dtype=torch.uint8)
        # An array of its own each time. It is the base of every view of it, and so goes with the last of them.
        whole = memory.numpy()
        lent = _Lent(whole, _give_back)
        lent.memory, lent.free, lent.kept = memory, free, kept
        _lent[id(lent)] = lent
        return whole[:nbytes]


class SharedBatch:
    """Shared memory for one batch. It is free again when this object and all tensors over its memory are gone.

    Args:
        segment: where it lies.
        free: the pool's list, to which the number goes back.
        number: in the pool.
    """

    def __init__(self, segment: Segment, free: list[int], number: int) -> None:
        self.handle = segment.handle
        self._memory = segment.memory(0, segment.size)
        # May run in any thread, at any moment: it only appends, which is atomic.
        weakref.finalize(self._memory, free.append, number).atexit = False

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over a part of the memory."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def fields(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """The memory of a batch of rows, uint8 `[size]` per field."""
        return [self.tensor(start, torch.uint8, (size,)).numpy() for start, size in _starts(sizes)]


class Attached:
    """In a worker: the shared memory that it has been told of."""

    def __init__(self) -> None:
        self._segments: dict[bytes, Segment] = {}

    def __len__(self) -> int:
        """Number of segments that are mapped."""
        return len(self._segments)

    def segment(self, handle: SegmentHandle | None) -> Segment | None:
        """The segment of a handle; None if there is none, or it cannot be reached from this process."""
        if handle is None:
            return None
        if (known := self._segments.get(handle.token)) is not None:
            return known
        try:
            segment = Segment.attach(handle)
        except (OSError, ValueError):  # no descriptor is left, or the main process may not be looked into
            return None
        for token, other in list(self._segments.items()):
            if other.size < segment.size:  # outgrown: it will be asked for no more
                self._segments.pop(token).close()
        self._segments[handle.token] = segment
        return segment

    def __getstate__(self) -> dict[str, Any]:
        return {"_segments": {}}


def fields_of(segment: Segment, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """The memory of a batch of rows in a worker, uint8 `[size]` per field."""
    return [segment.bytes(start, size).numpy() for start, size in _starts(sizes)]


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each field begins, and its size."""
    starts, end = [], 0
    for size in sizes:
        starts.append((end, size))
        end += aligned(size)
    return starts


class _Lent(weakref.ref[Any]):
    """Private memory that has been given out; `_give_back` is called with it when the last view is gone.

    (`weakref.finalize` can do more, and costs three times as much.)
    """

    __slots__ = ("free", "kept", "memory")
    memory: torch.Tensor
    kept: int
    free: list[torch.Tensor]


_lent: dict[int, _Lent] = {}  # a weak reference that nobody holds calls nothing


def _give_back(lent: _Lent) -> None:
    # May run in any thread, at any moment: each of these operations is atomic.
    del _lent[id(lent)]
    last = lent.free[-1:]
    # Not into a list of larger ones: then `take` would throw it away.
    if len(lent.free) < lent.kept and (not last or last[0].shape[0] <= lent.memory.shape[0]):
        lent.free.append(lent.memory)


def _size_class(nbytes: int) -> int:
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step

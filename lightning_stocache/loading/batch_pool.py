"""The memory of batches: lent, and taken back when neither it nor a view of it is referred to any more.

The page faults of a fresh buffer of a few megabytes cost more than the gather that fills it: 8 GB/s instead of 15 to
17. So the same memory is used again.

Private memory is for batches that this process makes alone. It goes back to its field, last in, first out: few buffers
in rotation stay in the processor's cache. All are as large as the field's largest batch so far. Pinned batches come
from torch's caching host allocator, which alone knows whether a copy to the device is still reading.

Shared memory is for batches whose rows workers write: a few segments, each as large as the largest batch so far. A
segment belongs, in turn, to the pool, to this process and one worker, and to the trainer. It lies in a memfd where the
system has that: /dev/shm may be small, and torch dies of SIGBUS where it is full. Free memory is looked at before a
segment is made, and memory that a cache was granted and has not filled yet counts as taken. Without memory for
another segment, workers send batches in messages for a while, with one warning.
"""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.loading.prefetch import held_back
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Attached", "BatchPool", "SharedBatch", "fields_of"]

log = logging.getLogger(__name__)

_SMALL = 1 << 14  # bytes; below this (labels) fresh memory costs less than the bookkeeping
_PER_FIELD = 8  # buffers kept; a consumer that lets go of batches in bursts needs no more
_PER_SIZE = 2  # buffers kept of each size of single samples
_PAUSE_SECONDS = 10.0  # after memory was refused


class BatchPool:
    """Lends memory for batches.

    Args:
        pinned: whether private memory is page-locked, for copies to a device that overlap with compute.
        shared: how many batches may lie in shared memory at once.
        promised: returns the number of free bytes that are promised to caches.

    Example:
        >>> pool = BatchPool()
        >>> address = pool.take([1 << 20])[0].ctypes.data  # given back at once: nothing refers to it
        >>> pool.take([1 << 20])[0].ctypes.data == address
        True
    """

    def __init__(self, *, pinned: bool = False, shared: int = 0, promised: Callable[[], int] = int) -> None:
        self._pinned, self._promised = pinned, promised
        self._private: dict[int, _Buffers] = {}  # by field, or by size (negative)
        self._free: list[Segment | None] = [None] * shared  # None: not made yet
        self._segments: set[Segment] = set()  # free or lent
        self._size = 0
        self._refused_until: float | None = None

    def take(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Private memory of undefined content, uint8 `[size]` per field, aligned to 64 bytes where it is large.

        If the memory is pinned, the `base` of each array is a pinned tensor.
        """
        return [self._take(number, nbytes, _PER_FIELD) for number, nbytes in enumerate(sizes)]

    def lend(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Private memory for single samples of many sizes, uint8 `[size]` each.

        Sizes are rounded up by an eighth at most, so that memory that has come back fits the next samples.
        """
        return [self._take(-(step := _size_class(nbytes)), step, _PER_SIZE)[:nbytes] for nbytes in sizes]

    def _take(self, key: int, nbytes: int, most: int) -> npt.NDArray[np.uint8]:
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True).numpy()
        if nbytes < _SMALL:
            return np.empty(nbytes, dtype=np.uint8)
        buffers = self._private.get(key) or self._private.setdefault(key, _Buffers(most))
        # Two threads may be here at once: each list operation is atomic, and the size of what was popped is checked.
        if nbytes > buffers.size:
            buffers.size = nbytes
            buffers.free.clear()
        try:
            memory = buffers.free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.shape[0] < nbytes:
            memory = torch.empty(max(buffers.size, nbytes), dtype=torch.uint8, device="cpu")
        whole = memory.numpy()  # an array of its own each time: it is the base of every view, and goes with the last
        loan = _Loan(whole, _give_back)
        loan.memory, loan.buffers = memory, buffers
        _loans[id(loan)] = loan
        return whole[:nbytes]

    def take_shared(self, sizes: Sequence[int] = ()) -> SharedBatch | None:
        """Shared memory for fields of these sizes, or for the largest batch so far; None if there is no memory."""
        self.expect(sum(map(aligned, sizes)))
        if not self._size or not self._free:
            return None
        segment = self._free.pop()
        if segment is None or segment.size < self._size:
            with held_back():  # between a file's opening and its registration Ctrl-C would leave the file open for ever
                if segment is not None:
                    self._drop(segment)
                if (segment := self._reserved()) is None:
                    self._free.insert(0, None)  # segments that exist are taken first
                    return None
                self._segments.add(segment)
        return SharedBatch(segment, self._free)

    def _reserved(self) -> Segment | None:
        """A new segment, all of it reserved; None if memory is short, or was short a moment ago."""
        if self._refused_until is not None and time.monotonic() < self._refused_until:
            return None
        memfd, size = hasattr(os, "memfd_create"), self._size
        free = FreeMemory.now(None if memfd else memory_directory())
        try:
            if size > (left := max(free.bytes - self._promised(), 0)):
                raise OSError(errno.ENOMEM, f"{size} bytes are more than the {left} that {free.limited_by} leaves")
            return Segment.create(size, "memfd" if memfd else None, reserved=size)
        except OSError as error:
            if self._refused_until is None:
                log.warning(
                    "workers send batches in messages, which is slower: no shared memory for them (%s)", str(error)
                )
            self._refused_until = time.monotonic() + _PAUSE_SECONDS
            return None

    def expect(self, nbytes: int) -> None:
        """Make later segments at least that large."""
        self._size = max(self._size, nbytes)

    @property
    def shared_left(self) -> int:
        """Number of batches to which shared memory can still be lent; after a refusal, only by existing segments."""
        return len(self._free) - (0 if self._refused_until is None else self._free.count(None))

    def trim(self) -> None:
        """Close the free segments; new ones may be made later."""
        for number, segment in enumerate(self._free):
            if segment is not None:
                self._free[number] = None
                self._drop(segment)

    def close(self) -> None:
        """Close all segments; a batch that is still referred to keeps its memory."""
        self._free.clear()
        for segment in list(self._segments):
            self._drop(segment)
        self._size = 0  # nothing is lent any more

    def _drop(self, segment: Segment) -> None:
        self._segments.discard(segment)
        segment.close()


@dataclass
class _Buffers:
    """Free private memory: at most `most` tensors, uint8 `[size]`, where `size` is the largest request so far."""

    most: int
    size: int = 0
    free: list[torch.Tensor] = field(default_factory=list)


class _Loan(weakref.ref[Any]):
    """Private memory that is lent; its end calls `_give_back`. `weakref.finalize` costs three times as much."""

    __slots__ = ("buffers", "memory")
    memory: torch.Tensor
    buffers: _Buffers


_loans: dict[int, _Loan] = {}  # a weak reference that nobody holds calls nothing


def _give_back(loan: _Loan) -> None:
    # May run in any thread, at any moment: each of these operations is atomic.
    del _loans[id(loan)]
    buffers = loan.buffers
    if len(buffers.free) < buffers.most and loan.memory.shape[0] >= buffers.size:
        buffers.free.append(loan.memory)


def _size_class(nbytes: int) -> int:
    step = 1 << max(nbytes.bit_length() - 4, 0)
    return -(-nbytes // step) * step


class SharedBatch:
    """Shared memory for one batch. It is free again when this object and all tensors over its memory are gone.

    Args:
        segment: the segment of the memory.
        free: the pool's list, to which the segment goes back.
    """

    def __init__(self, segment: Segment, free: list[Segment | None]) -> None:
        self.handle = segment.handle
        self._memory = segment.memory(0, segment.size)
        # May run in any thread, at any moment: it only appends, which is atomic.
        weakref.finalize(self._memory, free.append, segment).atexit = False

    def tensor(self, offset: int, length: int) -> torch.Tensor:
        """A part of the memory, uint8 `[length]`."""
        if length == 0:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=length, offset=offset)


class Attached(dict[bytes, Segment]):
    """The shared memory that a worker has attached, by token."""

    def segment(self, handle: SegmentHandle | None) -> Segment | None:
        """The segment of a handle; None without a handle, or if this process cannot reach the segment."""
        if handle is None:
            return None
        if handle.token in self:
            return self[handle.token]
        try:
            segment = Segment.attach(handle)
        except (OSError, ValueError):  # no descriptor is left, or the main process may not be looked into
            return None
        for token in [token for token, other in self.items() if other.size < segment.size]:
            self.pop(token).close()  # outgrown, so no request will name it
        self[handle.token] = segment
        return segment


def fields_of(memory: SharedBatch | Segment, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
    """The memory of a batch of rows, uint8 `[size]` per field, in the main process or in a worker."""
    fields, end = [], 0
    for size in sizes:
        fields.append(memory.tensor(end, size).numpy())
        end += aligned(size)
    return fields

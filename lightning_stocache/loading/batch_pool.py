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

Shared memory is a number of segments, each as large as the largest batch so far. One belongs, in turn, to the pool, to
this process and the one worker that was asked for rows, and to the trainer. It lies in a memfd where the system has
that, not in /dev/shm: that one may be small (Docker's 64 MiB), and what is left of it belongs to the cache and to
torch, which dies of SIGBUS where it finds it full. A memfd is limited by nothing but the machine's memory and the
cgroup's, above which the kernel kills; so these are looked at before any is taken. What a cache has been granted but
has not filled yet counts as taken: it will be, and it is not asked again.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Attached", "BatchPool", "Place", "SharedBatch", "aligned"]

Bytes = npt.NDArray[np.uint8]

_SMALL = 1 << 14  # below this (labels) a fresh tensor costs less than the bookkeeping
_KEPT = 8  # private buffers per field; a consumer that lets go of batches in bursts needs no more
_ALIGNMENT = 64  # bytes, for the reason that `cache.slots` gives


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
        self._private: dict[int, list[torch.Tensor]] = {}  # free buffers by field
        self._largest: dict[int, int] = {}
        self._free = list(range(shared))
        self._segments: dict[int, Segment] = {}
        self._size = 0

    @property
    def pinned(self) -> bool:
        """Whether private memory is page-locked: each array is then that of a tensor, its `base`."""
        return self._pinned

    def take(self, sizes: Sequence[int]) -> list[Bytes]:
        """Private memory of undefined content, uint8 `[size]` per field, aligned to 64 bytes where it is large."""
        return [self._take(field, nbytes) for field, nbytes in enumerate(sizes)]

    def take_shared(self, sizes: Sequence[int] = ()) -> SharedBatch | None:
        """Shared memory for fields of those sizes, or for any batch so far; None if there is none to be had."""
        self.expect(sum(map(aligned, sizes)))
        while self._size and self._free:
            number = self._free.pop()
            segment = self._segments.get(number)
            if segment is not None and segment.size < self._size:
                self._segments.pop(number).close()
                segment = None
            if segment is None:
                try:
                    segment = self._segments[number] = reserved_segment(self._size, self._promised())
                except OSError:  # from now on there is one less
                    continue
            return SharedBatch(number, segment, self._free)
        return None

    def expect(self, nbytes: int) -> None:
        """Batches are as large as that: shared memory is, from now on."""
        self._size = max(self._size, nbytes)

    @property
    def may_lend(self) -> bool:
        """Whether shared memory is left for the next batch, if the trainer keeps this one."""
        return bool(self._free)

    @property
    def shared_left(self) -> int:
        """How many batches shared memory can still be lent to."""
        return len(self._free)

    @property
    def shared_count(self) -> int:
        """For how many batches shared memory has been taken."""
        return len(self._segments)

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

    def _take(self, field: int, nbytes: int) -> Bytes:
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
        if nbytes < _SMALL:
            return torch.empty(nbytes, dtype=torch.uint8).numpy()
        free = self._private.setdefault(field, [])
        # Two threads may be here at once: each list operation is atomic, and what was popped is looked at.
        if nbytes > self._largest.get(field, 0):
            self._largest[field] = nbytes
            free.clear()
        try:
            memory = free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.shape[0] < nbytes:
            memory = torch.empty(max(self._largest[field], nbytes), dtype=torch.uint8)
        # An array of its own each time. It is the base of every view of it, and so goes with the last of them.
        whole = memory.numpy()
        lent = _Lent(whole, _give_back)
        lent.memory, lent.free = memory, free
        _lent[id(lent)] = lent
        return whole[:nbytes]


class Place(NamedTuple):
    """Shared memory of a batch, as a worker is told of it."""

    number: int
    handle: SegmentHandle


class SharedBatch:
    """Shared memory for one batch. It is free again when this object and all tensors over its memory are gone.

    Args:
        number: in the pool.
        segment: where it lies.
        free: the pool's list, to which the number goes back.
    """

    def __init__(self, number: int, segment: Segment, free: list[int]) -> None:
        self.place = Place(number, segment.handle)
        self._memory = segment.memory(0, segment.size)
        # May run in any thread, at any moment: it only appends, which is atomic.
        weakref.finalize(self._memory, free.append, number).atexit = False

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """A tensor over a part of the memory."""
        count = torch.Size(shape).numel()
        if not count:
            return torch.empty(tuple(shape), dtype=dtype)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(tuple(shape))

    def fields(self, sizes: Sequence[int]) -> list[Bytes]:
        """The memory of a batch of rows, uint8 `[size]` per field."""
        return [self.tensor(start, torch.uint8, (size,)).numpy() for start, size in _starts(sizes)]


class Attached:
    """In a worker: the shared memory that it has been told of."""

    def __init__(self) -> None:
        self._segments: dict[int, Segment] = {}

    def __len__(self) -> int:
        """Number of segments that are mapped."""
        return len(self._segments)

    def segment(self, place: Place | None) -> Segment | None:
        """The segment of a place; None if there is none, or it cannot be reached from this process."""
        if place is None:
            return None
        known = self._segments.get(place.number)
        if known is None or known.token != place.handle.token:
            try:
                known = Segment.attach(place.handle)
            except (OSError, ValueError):  # no descriptor is left, or the main process may not be looked into
                return None
            for number, other in list(self._segments.items()):
                if other.size < known.size:  # outgrown: it will be asked for no more
                    self._segments.pop(number).close()
            self._segments[place.number] = known
        return known

    def fields(self, place: Place | None, sizes: Sequence[int]) -> list[Bytes] | None:
        """The memory of a batch of rows at a place, uint8 `[size]` per field; None where `segment` is None."""
        segment = self.segment(place)
        return None if segment is None else [segment.bytes(start, size).numpy() for start, size in _starts(sizes)]

    def __getstate__(self) -> dict[str, Any]:
        return {"_segments": {}}


def aligned(size: int) -> int:
    """Bytes that so many take up, with what is left free behind them."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _starts(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Where each field begins, and its size."""
    starts, end = [], 0
    for size in sizes:
        starts.append((end, size))
        end += aligned(size)
    return starts


def reserved_segment(size: int, promised: int) -> Segment:
    """A segment, all of it reserved.

    Raises:
        OSError: there is no memory for it besides what is promised to others.
    """
    backend: Backend | None = "memfd" if hasattr(os, "memfd_create") else None
    free = FreeMemory.measure(memory_directory() if backend is None else None)
    if size > free.bytes - promised:
        left = max(free.bytes - promised, 0)
        raise OSError(errno.ENOMEM, f"{size} bytes are more than the {left} that {free.limited_by} leaves")
    segment = Segment.create(size, backend)
    try:
        segment.reserve(0, size)
    except OSError:
        segment.close()
        raise
    return segment


class _Lent(weakref.ref[Any]):
    """Private memory that has been given out; `_give_back` is called with it when the last view is gone.

    (`weakref.finalize` can do more, and costs three times as much.)
    """

    __slots__ = ("free", "memory")
    memory: torch.Tensor
    free: list[torch.Tensor]


_lent: dict[int, _Lent] = {}  # a weak reference that nobody holds calls nothing


def _give_back(lent: _Lent) -> None:
    # May run in any thread, at any moment: each of these operations is atomic.
    del _lent[id(lent)]
    last = lent.free[-1:]
    # Not into a list of larger ones: then `take` would throw it away.
    if len(lent.free) < _KEPT and (not last or last[0].shape[0] <= lent.memory.shape[0]):
        lent.free.append(lent.memory)

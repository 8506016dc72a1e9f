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

Shared memory is a number of segments, each as large as the largest batch so far (`shared_batch`). Where there is no
memory for one more, batches do without for a while, with one warning.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.loading.interrupts import held_back
from lightning_stocache.loading.shared_batch import SharedBatch, reserved_segment
from lightning_stocache.node.segment import Segment

__all__ = ["BatchPool"]

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
                segment = self._reserved()
                if segment is None:
                    self._free.insert(0, number)  # those that have memory come first
                    return None
                self._segments[number] = segment
        return SharedBatch(number, segment, self._free)

    def _reserved(self) -> Segment | None:
        """One more segment; None where there is no memory for it, or there was none a moment ago."""
        if self._refused_until is not None and time.monotonic() < self._refused_until:
            return None
        try:
            segment = reserved_segment(self._size, self._promised())
        except OSError as error:
            if self._refused_until is None:
                log.warning(
                    "workers send batches in messages, which is slower, for want of shared memory: %s", str(error)
                )
            self._refused_until = time.monotonic() + _PAUSE_SECONDS
            return None
        return segment

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

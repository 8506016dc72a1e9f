"""Private memory of batches: lent, and taken back when neither it nor a view of it is referred to any more.

The page faults of a fresh buffer of a few megabytes cost more than the gather that fills it: 8 GB/s instead of 15 to
17. So the same memory is used again. It goes back to its field, last in, first out: few buffers in rotation stay in the
processor's cache. All are as large as the field's largest batch so far. Pinned batches come from torch's caching host
allocator, which alone knows whether a copy to the device is still reading.

Batches that workers make lie elsewhere (`arena`).
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BatchPool"]

_SMALL = 1 << 14  # bytes; below this (labels) fresh memory costs less than the bookkeeping
_PER_FIELD = 8  # buffers kept; a consumer that lets go of batches in bursts needs no more
_PER_SIZE = 2  # buffers kept of each size of single samples
_MOST_BYTES = 4 << 20  # of such a buffer: with two of each size, a process keeps at most 100 MiB


class BatchPool:
    """Lends memory for batches.

    Args:
        pinned: whether the memory is page-locked, for copies to a device that overlap with compute.

    Example:
        >>> pool = BatchPool()
        >>> address = pool.take([1 << 20])[0].ctypes.data  # given back at once: nothing refers to it
        >>> pool.take([1 << 20])[0].ctypes.data == address
        True
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._private: dict[int, _Buffers] = {}  # by field, or by size (negative)

    def take(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Memory of undefined content, uint8 `[size]` per field, aligned to 64 bytes where it is large.

        If the memory is pinned, the `base` of each array is a pinned tensor.
        """
        return [self._take(number, nbytes, _PER_FIELD) for number, nbytes in enumerate(sizes)]

    def lend(self, sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        """Memory for single samples of many sizes, uint8 `[size]` each.

        Sizes are rounded up by an eighth at most, so that memory that has come back fits the next samples.
        """
        return [self._sample_memory(nbytes) for nbytes in sizes]

    def _sample_memory(self, nbytes: int) -> npt.NDArray[np.uint8]:
        step = 1 << max(nbytes.bit_length() - 4, 0)
        size = -(-nbytes // step) * step
        most = _PER_SIZE if size <= _MOST_BYTES else 0
        return self._take(-size, size, most)[:nbytes]

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

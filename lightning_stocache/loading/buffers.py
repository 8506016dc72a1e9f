"""Memory for batches, used again once nobody holds it.

A fresh buffer of a few megabytes costs its page faults, more than the gather that fills it (8 GB/s where a warm one
takes 15 to 17). So a buffer goes back when the batch that lies in it, and every view of it, NumPy's included, is
gone: the tensor is made over a NumPy array, and a weak reference to that array returns the memory. Last in, first
out, because three buffers in rotation stay in the processor's cache and ten do not.

Each field has buffers of its own, all as large as the largest batch that it has had; a smaller batch takes a part of
one. So batches of every size (a last one, a sampler's buckets) share them, and no size keeps memory for itself.

Pinned batches come from torch's own caching host allocator instead: a copy to the device may still be reading a tensor
that nobody holds, and only that allocator knows.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

__all__ = ["Buffers"]

_SMALL = 1 << 14  # below this (labels) a fresh tensor costs less than the bookkeeping
_KEPT = 8  # per field; a consumer that lets go of batches in bursts needs no more


class Buffers:
    """Gives out uint8 memory.

    Args:
        pinned: whether it is page-locked memory, for copies to a device that overlap with compute.

    Example:
        >>> buffers = Buffers()
        >>> address = buffers.take(0, 1 << 20).data_ptr()  # given back at once: nobody holds it
        >>> buffers.take(0, 1 << 20).data_ptr() == address
        True
    """

    def __init__(self, pinned: bool = False) -> None:
        self._pinned = pinned
        self._free: dict[int, list[torch.Tensor]] = {}
        self._largest: dict[int, int] = {}

    def take(self, field: int, nbytes: int) -> torch.Tensor:
        """A uint8 tensor `[nbytes]` of undefined content, aligned to 64 bytes, for a field of the sample."""
        if self._pinned:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        if nbytes < _SMALL:
            return torch.empty(nbytes, dtype=torch.uint8)
        free = self._free.setdefault(field, [])
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
        view = memory.numpy()[:nbytes]
        lent = _Lent(view, _give_back)
        lent.memory, lent.free = memory, free
        _lent[id(lent)] = lent
        return torch.from_numpy(view)


class _Lent(weakref.ref[Any]):
    """What has been given out; `_give_back` is called with it when the last view is gone.

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

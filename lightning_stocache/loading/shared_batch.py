"""Shared memory for one batch, which the main process and one worker write to.

A segment belongs, in turn, to the pool, to this process and the one worker that was asked for rows, and to the trainer.
It lies in a memfd where the system has that, not in /dev/shm: that one may be small (Docker's 64 MiB), and what is left
of it belongs to the cache and to torch, which dies of SIGBUS where it finds it full. A memfd is limited by nothing but
the machine's memory and the cgroup's, above which the kernel kills; so these are looked at before any is taken. What a
cache has been granted but has not filled yet counts as taken: it will be, and it is not asked again.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["Attached", "Place", "SharedBatch", "reserved_segment"]

Bytes = npt.NDArray[np.uint8]


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
    free = FreeMemory.now(memory_directory() if backend is None else None)
    if size > free.bytes - promised:
        left = max(free.bytes - promised, 0)
        raise OSError(errno.ENOMEM, f"{size} bytes are more than the {left} that {free.limited_by} leaves")
    return Segment.create(size, backend, reserved=size)

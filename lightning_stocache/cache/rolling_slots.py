"""How the rows of a rolling store lie in its segment, and how they are written.

Behind the ring (`rolling_ring`) lies one array of rows per field, aligned to 64 bytes, as in any store of rows.

Memory is taken where it can fail: the first sample of a slot is stored through the file (`pwrite`), and a lack of
memory is an answer. Later ones are copied through the mapping, whose pages exist by then: writes through the file
exclude each other (the inode's lock), these do not (two writers of rows of 1 MiB: 4.3 GB/s each through the file, 10
so).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rolling_ring import RollingRing, Taken
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.node.segment import Segment

__all__ = ["RollingSlots"]


class RollingSlots:
    """The rows of a rolling store.

    Args:
        segment: where they lie, behind the ring.
        ring: who writes which slot.
        row_bytes: bytes of one sample in each field.
    """

    def __init__(self, segment: Segment, ring: RollingRing, row_bytes: Sequence[int]) -> None:
        self._segment, self._ring, self._row_bytes = segment, ring, tuple(row_bytes)
        count = ring.count
        self._starts = list(_starts(row_bytes, count))[:-1]
        self._rows = [
            segment.bytes(start, count * nbytes).numpy().reshape(count, nbytes)
            for start, nbytes in zip(self._starts, row_bytes, strict=True)
        ]
        self._shortage = Shortage(segment)

    @staticmethod
    def bytes_for(row_bytes: Sequence[int], count: int) -> int:
        """Bytes of a segment with so many slots, the ring included."""
        return list(_starts(row_bytes, count))[-1]

    def take(self, contents: Sequence[memoryview]) -> Taken | None:
        """A slot for a sample; None where there is none at this moment."""
        return self._ring.take()

    def store(self, taken: Taken, contents: Sequence[memoryview]) -> str | None:
        """Write a sample, bytes `[nbytes]` per field; or what memory is short, in words. Or raise OSError (ENOSPC)."""
        if taken.held:
            for rows, content in zip(self._rows, contents, strict=True):
                rows[taken.slot] = np.frombuffer(content, dtype=np.uint8)
            return None
        if (short := self._shortage.comes_with(sum(self._row_bytes))) is not None:
            return short
        for start, nbytes, content in zip(self._starts, self._row_bytes, contents, strict=True):
            if nbytes:
                self._segment.store(start + taken.slot * nbytes, content)
        return None

    def end_at(self, taken: Taken) -> bool:
        """Use no slot from this one on; whether any is left."""
        self._ring.drop(taken, limit=taken.slot > 0)
        return taken.slot > 0

    def gather(self, slots: Integers, columns: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Copy many samples out, uint8 `[samples, nbytes]` per field."""
        for rows, column in zip(self._rows, columns, strict=True):
            rows.take(slots, 0, column, "clip")

    def copy(self, slots: Integers, columns: Sequence[npt.NDArray[np.uint8]], places: Integers) -> None:
        """Copy a few samples to their places among many."""
        for rows, column in zip(self._rows, columns, strict=True):
            column[places] = rows[slots]

    def close(self) -> None:
        """Drop all views."""
        self._rows = []


def _starts(row_bytes: Sequence[int], count: int) -> Iterator[int]:
    """Where the array of each field begins, and where the last one ends."""
    offset = RollingRing.bytes_for(count)
    for nbytes in row_bytes:
        yield offset
        offset = aligned(offset + count * nbytes)
    yield offset

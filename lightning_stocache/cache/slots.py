"""How samples lie in a segment: one array per field.

Layout of the memory: `count` state bytes, then for each field an array of `count` rows. Every array starts at a
multiple of 64 bytes: rows copied from or to less aligned memory cost up to 1.6 times as much. One array per field,
and not one record per sample, because then one `take` per field gives a whole batch that is already collated. It is
NumPy's: torch's `index_select` divides the copy among OpenMP threads, which spin while they wait for each other: with
workers on the same cores, a batch of 64 photographs took 7.7 ms where one thread takes 0.8.

States are EMPTY and READY and nothing between: a writer that is killed half-way leaves EMPTY. This class only moves
bytes; who may write a slot, and when it becomes READY, is the cache's protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import Memory, aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.segment import Segment

__all__ = ["EMPTY", "READY", "FieldSlots"]

EMPTY, READY = 0, 1


class FieldSlots:
    """The slots of a cache, as one array per field of the sample.

    Args:
        segment: where they lie; at least `bytes_for(row_bytes, count)` long.
        row_bytes: bytes of one sample in each field.
        count: number of slots.
    """

    def __init__(self, segment: Segment, row_bytes: Sequence[int], count: int) -> None:
        self.count = count
        self._segment = segment
        self._row_bytes = tuple(row_bytes)
        self.nbytes = sum(row_bytes)
        self._starts = list(_starts(row_bytes, count))
        self.states = segment.bytes(0, count)
        self.state_bytes = segment.memory(0, count)
        self._tables = [
            segment.bytes(start, count * nbytes) for start, nbytes in zip(self._starts, row_bytes, strict=True)
        ]
        self._ready = self.states.numpy()
        self._rows = [
            table.numpy().reshape(count, nbytes) for table, nbytes in zip(self._tables, row_bytes, strict=True)
        ]

    @staticmethod
    def bytes_for(row_bytes: Sequence[int], count: int) -> int:
        """Bytes of address space that `count` slots need, states and alignment included."""
        return list(_starts([*row_bytes, 0], count))[-1]

    def reserve(self, slot: int) -> None:
        """Have the kernel promise the memory of a slot's rows; that of the states was promised when the cache was made.

        Raises:
            OSError: there is none left (ENOSPC).
        """
        for start, nbytes in zip(self._starts, self._row_bytes, strict=True):
            if nbytes:
                self._segment.reserve(start + slot * nbytes, nbytes)

    def reserve_states(self, begin: int, end: int) -> None:
        """Have the kernel promise the memory of some states, where that was not done when the store was made.

        Raises:
            OSError: there is none left (ENOSPC).
        """
        self._segment.reserve(begin, end - begin)

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes that a sample takes: all take the same."""
        return self.nbytes

    def store(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Copy one sample in, bytes `[nbytes]` per field, and take the memory that it needs; there is room for each.

        Raises:
            OSError: there is none left (ENOSPC); a part may have been written.
        """
        store = self._segment.store
        for start, nbytes, content in zip(self._starts, self._row_bytes, contents, strict=True):
            if nbytes:
                store(start + slot * nbytes, content)
        return True

    def read(self, slot: int) -> list[torch.Tensor]:
        """Copy one sample out, uint8 `[nbytes]` per field."""
        return [
            table[slot * nbytes : (slot + 1) * nbytes].clone()
            for table, nbytes in zip(self._tables, self._row_bytes, strict=True)
        ]

    def fetch(self, slot: int) -> list[bytes] | None:
        """Read one sample through the file of a store on a disk, bytes `[nbytes]` per field.

        Raises:
            OSError: it cannot be read (EIO).
        """
        segment = self._segment
        return [
            segment.fetch(start + slot * nbytes, nbytes)
            for start, nbytes in zip(self._starts, self._row_bytes, strict=True)
        ]

    def ready(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of those slots are READY, bool of the same shape; what is no slot is as the first one."""
        ready: npt.NDArray[np.bool_] = self._ready.take(slots, mode="clip") == READY
        return ready

    def gather(self, slots: Integers, into: Memory) -> None:
        """Copy many samples out.

        Args:
            slots: int64 `[samples]`, each in `[0, count)`.
            into: where to, uint8 `[samples * nbytes]` per field, aligned to 64 bytes. Fresh memory costs as much again
                in page faults.
        """
        for rows, nbytes, memory in zip(self._rows, self._row_bytes, into, strict=True):
            # The mode is any but "raise", which makes a copy first, to leave the memory as it was after an error.
            rows.take(slots, 0, memory.reshape(len(slots), nbytes), "clip")

    def table(self, field: int) -> torch.Tensor:
        """The live array of one field, uint8 `[count * nbytes]`."""
        return self._tables[field]

    def clear(self) -> None:
        """Empty all slots and give their memory back."""
        self.states.zero_()
        self._segment.discard(self.count)

    def close(self) -> None:
        """Drop all views, without which the segment cannot be unmapped."""
        self.state_bytes.release()
        self.states = torch.empty(0, dtype=torch.uint8)
        self._ready = np.empty(0, dtype=np.uint8)
        self._tables, self._rows = [], []


def _starts(row_bytes: Sequence[int], count: int) -> Iterator[int]:
    """Where the array of each field begins."""
    offset = count
    for nbytes in row_bytes:
        offset = aligned(offset)
        yield offset
        offset += count * nbytes

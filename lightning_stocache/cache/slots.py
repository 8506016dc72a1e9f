"""How samples lie in a segment: one array per field.

Layout of the memory: `count` state bytes, then for each field an array of `count` rows. Every array starts at a
multiple of 64 bytes: rows copied from or to less aligned memory cost up to 1.6 times as much. One array per field,
and not one record per sample, because then one `index_select` per field gives a whole batch that is already collated.
Rows are copied as the widest integers that divide them: 8-byte words copy fastest.

States are EMPTY and READY and nothing between: a writer that is killed half-way leaves EMPTY. This class only moves
bytes; who may write a slot, and when it becomes READY, is the cache's protocol.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_stocache.node.segment import Segment

__all__ = ["EMPTY", "READY", "FieldSlots"]

EMPTY, READY = 0, 1
_ALIGNMENT = 64
_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


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
        self._words = [_as_words(table, count, nbytes) for table, nbytes in zip(self._tables, row_bytes, strict=True)]
        self._dtypes = [words.dtype for words in self._words]
        self._widths = [words.shape[1] if words.ndim > 1 else 1 for words in self._words]

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

    def store(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Copy one sample in, bytes `[nbytes]` per field, and take the memory that it needs.

        Raises:
            OSError: there is none left (ENOSPC); a part may have been written.
        """
        store = self._segment.store
        for start, nbytes, content in zip(self._starts, self._row_bytes, contents, strict=True):
            if nbytes:
                store(start + slot * nbytes, content)

    def read(self, slot: int) -> list[torch.Tensor]:
        """Copy one sample out, uint8 `[nbytes]` per field."""
        return [
            table[slot * nbytes : (slot + 1) * nbytes].clone()
            for table, nbytes in zip(self._tables, self._row_bytes, strict=True)
        ]

    def gather(self, slots: torch.Tensor, into: Sequence[torch.Tensor]) -> None:
        """Copy many samples out.

        Args:
            slots: int64 `[samples]`, each in `[0, count)`.
            into: where to, uint8 `[samples * nbytes]` per field, aligned to 64 bytes. Fresh memory costs as much again
                in page faults.
        """
        samples = slots.shape[0]
        for words, dtype, width, memory in zip(self._words, self._dtypes, self._widths, into, strict=True):
            out = memory.view(dtype)
            torch.index_select(words, 0, slots, out=out.view(samples, width) if width > 1 else out)

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
        self._tables, self._words = [], []


def _starts(row_bytes: Sequence[int], count: int) -> Iterator[int]:
    """Where the array of each field begins."""
    offset = count
    for nbytes in row_bytes:
        offset = -(-offset // _ALIGNMENT) * _ALIGNMENT
        yield offset
        offset += count * nbytes


def _as_words(table: torch.Tensor, count: int, nbytes: int) -> torch.Tensor:
    """The table `[count, words]` in the widest word that divides a row; `[count]` where a row is a single word."""
    width, dtype = next((width, dtype) for width, dtype in _WORDS if nbytes % width == 0)
    words = table.view(dtype)
    return words if nbytes == width else words.reshape(count, nbytes // width)

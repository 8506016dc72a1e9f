"""Samples of a fixed size in a segment: one array per field, `[slots, nbytes]`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from lightning_stocache.cache.codec import BatchRows, Codec, Lend, Memory, aligned
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.head import CLEARS, ONCE, Head
from lightning_stocache.cache.layout import Layout, Verifier
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.segment import Segment

__all__ = ["Rows"]

_SMALL_ROW = 1024  # bytes; to copy a smaller row costs less than a system call
_MANY = 8  # from so many small rows on, one copy of all costs less than a system call for each
_PAGE = 1 << 12  # bytes of small rows that are reserved together; most of a larger block would stay empty


class Rows(Layout):
    """One array per field."""

    codec: SampleSpec

    def __init__(self, segment: Segment, codec: Codec, count: int, head: Head = ONCE) -> None:
        super().__init__(segment, codec, count, head)
        self._row_bytes = self.codec.row_bytes
        self._nbytes: int = sum(self._row_bytes)
        *self._fields, self._end = _starts_of_fields(self._row_bytes, count, self.begin)
        self.fields = [
            np.frombuffer(segment.memory(start, count * nbytes), np.uint8).reshape(count, nbytes)
            if count * nbytes
            else np.empty((count, nbytes), np.uint8)
            for start, nbytes in zip(self._fields, self._row_bytes, strict=False)
        ]
        """The array of each field, live, uint8 `[slots, nbytes]`."""
        self.granted_bytes = count * (self._nbytes + head.slot_bytes)
        self._is_small = not segment.on_disk and 0 < self._nbytes < _SMALL_ROW and hasattr(os, "posix_fallocate")
        self._clears = 0
        self._reserved = np.zeros(0, dtype=np.bool_)
        """Which pages this process has reserved since clear number `_clears`, bool `[pages]`."""

    @classmethod
    def bytes_for(cls, codec: Codec, count: int, granted: int = 0, head: Head = ONCE) -> int:
        """Size of a segment for `count` slots. `granted` does not matter."""
        return _starts_of_fields(cast(SampleSpec, codec).row_bytes, count, head.nbytes(count))[-1] + 1

    @classmethod
    def slots_for(cls, granted: int, codec: Codec, most: int, head: Head = ONCE) -> int:
        """The number of slots that fill so many bytes, at most `most`."""
        return min(cls.expected_slots(granted, codec, head), most)

    def fill_fraction(self, filled: int) -> float:
        """Share of the slots that are ready."""
        return filled / max(self.count, 1)

    def capacity(self, filled: int) -> int:
        """Number of slots."""
        return self.count

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes of a sample, equal for all samples."""
        return self._nbytes

    def has_room(self, nbytes: int) -> bool:
        """Always true: every slot has its row."""
        return True

    def write(self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Write samples, bytes `[nbytes]` per field. Returns True for each."""
        if self._is_small and len(slots) >= _MANY:
            numbers = np.array(slots)
            self._reserve_pages(numbers)
            if type(samples) is BatchRows:
                memory = samples.columns()
            else:
                memory = [np.frombuffer(b"".join(contents), np.uint8) for contents in zip(*samples, strict=True)]
            self.scatter(numbers, memory)
            return [True] * len(slots)
        for slot, contents in zip(slots, samples, strict=True):
            self.store(slot, contents)
            self.seal(slot, 0, self._nbytes, contents)
        return [True] * len(slots)

    def store(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Write one sample through the file, without its entry. Raises OSError without room."""
        for start, nbytes, content in zip(self._fields, self._row_bytes, contents, strict=True):
            if nbytes:
                self._segment.store(start + slot * nbytes, content)

    def gather(self, slots: Integers, into: Memory, pool: GatherPool = ALONE, verifier: Verifier | None = None) -> None:
        """Copy many samples into the memory of a batch.

        Args:
            slots: int64 `[samples]`, each in `[0, count)`.
            into: uint8 `[samples * nbytes]` per field, aligned to 64 bytes. Fresh memory costs as much again in page
                faults.
            pool: the threads that copy.
            verifier: compares copies that may be lost. After a loss `Store.changes` differs.
        """
        unsafe = [] if verifier is None else verifier.unsafe(slots)
        for rows, nbytes, memory in zip(self.fields, self._row_bytes, into, strict=True):
            pool.take(rows, slots, memory.reshape(len(slots), nbytes))
        if verifier is not None and unsafe:
            copies = self.codec.rows(into, len(slots))
            for number in unsafe:
                verifier.agrees(int(slots[number]), [field[number] for field in copies])

    def read(self, slots: Integers, lend: Lend | None, verifier: Verifier) -> list[Any]:
        """Copy the samples of ready slots into memory that they share."""
        memory = self._memory(len(slots)) if lend is None else lend(self.codec.sizes(len(slots)))
        self.gather(slots, memory, ALONE, verifier)
        return self.codec.split(memory, len(slots))

    def copy_from(self, other: Rows, theirs: Integers, mine: Integers) -> list[bool]:
        """Copy rows into slots whose memory is reserved. Returns True for each."""
        memory = self._memory(len(theirs))
        other.gather(theirs, memory)
        self.scatter(mine, memory)
        return [True] * len(mine)

    def _memory(self, samples: int) -> Memory:
        return [np.empty(size, dtype=np.uint8) for size in self.codec.sizes(samples)]

    def _reserve_pages(self, slots: Integers) -> None:
        """Reserve the pages of slots. Raises OSError (ENOSPC) without memory."""
        if self._clears != self.numbers[CLEARS] or not len(self._reserved):
            self._clears = self.numbers[CLEARS]
            self._reserved = np.zeros(self._end // _PAGE + 1, dtype=np.bool_)
        for start, nbytes in zip(self._fields, self._row_bytes, strict=True):
            if not nbytes:
                continue
            begins = start + slots * nbytes
            pages = np.concatenate([begins, begins + nbytes - 1]) // _PAGE
            for page in np.unique(pages[~self._reserved[pages]]).tolist():
                first = page * _PAGE
                self._segment.reserve(first, min(_PAGE, self._end - first))
                self._reserved[page] = True

    def reserve_all(self) -> None:
        """Reserve the memory of all rows. Raises OSError (ENOSPC) without it."""
        self._segment.reserve(self.begin, self._end - self.begin)

    def reuse_room(self) -> None:
        """Do nothing: an emptied slot has its row."""

    def scatter(self, slots: Integers, memory: Memory) -> None:
        """Write many rows at once, from memory as `gather` fills it, into slots whose memory is reserved."""
        for rows, content in zip(self.fields, memory, strict=True):
            rows[slots] = content.reshape(len(slots), rows.shape[1])

    def fetch(self, slot: int) -> list[bytes]:
        """Read the row of a slot through the file, bytes `[nbytes]` per field; zeroes where no sample was written."""
        pairs = zip(self._fields, self._row_bytes, strict=True)
        return [self._segment.fetch(start + slot * nbytes, nbytes) for start, nbytes in pairs]

    def stored_bytes(self, slots: Integers) -> int:
        """Bytes of the rows of ready slots."""
        return len(slots) * self._nbytes

    def close(self) -> None:
        """Drop all views."""
        super().close()
        self.fields = []


def _starts_of_fields(row_bytes: Sequence[int], count: int, begin: int) -> list[int]:
    """The offset of each field's array, and the end of all."""
    starts = [begin]
    for nbytes in row_bytes:
        starts.append(aligned(starts[-1] + count * nbytes))
    return starts

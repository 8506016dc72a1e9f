"""Samples of many sizes in a segment: records one behind the other, in one run of bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np

from lightning_stocache.cache.codec import Codec, Lend, aligned
from lightning_stocache.cache.head import FREE, LEFT, ONCE, Head
from lightning_stocache.cache.layout import UNREADABLE, Layout, Verifier
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.seats import EMPTY, are_stored
from lightning_stocache.node.segment import Segment, view_of

__all__ = ["KNOWN", "Records"]

KNOWN = 32
"""With so many records, their mean size replaces the estimate of set-up."""

_DIRECTORY_SHARE = 28  # the columns of slots that may find no room take at most 1/28 of the granted bytes
_LOST_SHARE = 1 / 4  # of the run, which then begins anew: less costs more loads, more leaves more samples out
_SMALL = 8  # alignment of records with one part
_GAP = memoryview(bytes(64))  # lies between two records
_PLACE = struct.Struct("<qq")
_STEP = 1 << 20  # slots whose entries are read together


class Records(Layout):
    """One run of bytes, from which all processes of a node take room.

    The room of an emptied slot is used again for a record that is no larger; see `reuse_room`.

    Example:
        >>> codec, segment = RecordCodec.infer(["a"]), Segment.create(13000)
        >>> records = Records(segment, codec, 3)
        >>> records.reserve(0, 3)
        >>> records.write([0, 1], [[memoryview(bytes(5000))], [memoryview(bytes(5000))]])
        [True, False]
        >>> records.free - records.begin, records.record(0).nbytes
        (5000, 5000)
        >>> records.close(), segment.close()
        (None, None)
    """

    codec: RecordCodec

    def __init__(self, segment: Segment, codec: Codec, count: int, head: Head = ONCE) -> None:
        super().__init__(segment, codec, count, self.whole(head))
        self.end, self.fixed_bytes = segment.size - 1, head.fixed_bytes
        self.granted_bytes = segment.size - self.fixed_bytes
        self._begins, self._sizes = self.columns["begin"].data, self.columns["nbytes"].data
        self._numbers_view = view_of(self.numbers)
        self._run = segment.memory(0, segment.size)

    @classmethod
    def whole(cls, head: Head) -> Head:
        """A head with the places of records."""
        return head.of_records

    @classmethod
    def bytes_for(cls, codec: Codec, count: int, granted: int = 0, head: Head = ONCE) -> int:
        """Size of a segment: all granted bytes, and at least the columns of `count` slots."""
        return max(cls.reserved_bytes(count, head) + 1, granted + head.fixed_bytes)

    @classmethod
    def slots_for(cls, granted: int, codec: Codec, most: int, head: Head = ONCE) -> int:
        """The number of slots, given the bytes that they and the records may take.

        At least as many slots as records are expected to find room, and more while their columns take a small part of
        the bytes. So a store of large records has a slot for every index, and a store for a small part of a dataset of
        small records has not.
        """
        expected = cls.expected_slots(granted, codec, head)
        return min(max(expected, granted // _DIRECTORY_SHARE // head.of_records.slot_bytes), most)

    def fill_fraction(self, filled: int) -> float:
        """Share of the bytes that are taken; 1 when every slot is ready, because no slot is left to fill."""
        if filled == self.count:
            return 1.0
        return min(max(self.free - self.fixed_bytes, 0) / max(self.granted_bytes, 1), 1.0)

    def capacity(self, filled: int) -> int:
        """Number of samples for which there is room, if the next samples are as large as those before."""
        mean = (self.free - self.begin) / filled if filled >= KNOWN else self.codec.slot_bytes
        return min(filled + int((self.end - self.free) / max(mean, 1)), self.count)

    @property
    def free(self) -> int:
        """The offset of the free part of the run."""
        return max(self._numbers_view[FREE], self.begin)

    def has_room(self, nbytes: int) -> bool:
        """Whether a record may find room."""
        return bool(nbytes <= self.end - self.free or self._numbers_view[LEFT])

    def write(self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Write records one behind the other, all at once, and their places.

        Returns:
            Whether each record was written: there was room, and the turn was free.
        """
        sizes = [self.size(contents) for contents in samples]
        if not any(map(self.has_room, sizes)):
            return [False] * len(slots)
        if self._numbers_view[LEFT]:
            return [self._write_again(slot, contents) for slot, contents in zip(slots, samples, strict=True)]
        return self._append(slots, samples, sizes)

    def reuse_room(self) -> None:
        """Let records be written into the room that emptied slots have left.

        No slot keeps the rest of a room when its record gets smaller, nor a room that is too small for it. When a
        quarter of the run is lost so, all slots are emptied, and the run begins anew, unless somebody stores.
        """
        self.numbers[LEFT] = 1
        lost = self.free - self.begin - int(self.columns["nbytes"].sum())
        is_worn = lost > _LOST_SHARE * (self.end - self.begin) and lost > self.end - self.free
        if not is_worn and self.state.any():
            return
        stored = np.asarray(are_stored(self.state))
        if (stored | (self.state == EMPTY)).all():
            self.empty(np.flatnonzero(stored))
            self._begin_anew()

    def _write_again(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Write one record into the room that its slot had before, or else behind the others."""
        nbytes = self.size(contents)
        begin, room = self._begins[slot], self._sizes[slot]
        alignment = _SMALL if len(contents) == 1 else aligned(1)
        if nbytes > room or begin % alignment:
            if room:
                self.set_place(slot, 0, 0)
            return self._append([slot], [contents], [nbytes])[0]
        self._segment.store(begin, *contents)
        self._note(slot, begin, nbytes, contents)
        return True

    def _append(
        self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]], sizes: Sequence[int]
    ) -> list[bool]:
        alignments = [_SMALL if len(contents) == 1 else aligned(1) for contents in samples]
        found = self._find_free() if self._head.entry and not self._numbers_view[FREE] else 0
        taken = self._segment.in_turn(self._take_room, sizes, alignments, found)
        if taken is None:
            return [False] * len(slots)
        before, end, begins = taken
        parts: list[memoryview] = []
        written = before
        for contents, begin, nbytes in zip(samples, begins, sizes, strict=True):
            if begin:
                parts += (_GAP[: begin - written], *contents)
                written = begin + nbytes
        try:
            self._segment.store(before, *parts)
        except BaseException:
            with suppress(OSError):  # a full disk: the room is lost
                self._segment.in_turn(self._return_room, before, end)
            raise
        for slot, begin, contents, nbytes in zip(slots, begins, samples, sizes, strict=True):
            if begin:
                self._note(slot, begin, nbytes, contents)
        return [begin > 0 for begin in begins]

    def _note(self, slot: int, begin: int, nbytes: int, contents: Sequence[memoryview]) -> None:
        """Note where the record of a slot lies; on a disk with its checksum."""
        if self._head.entry:
            self.seal(slot, begin, nbytes, contents)
        else:
            self.set_place(slot, begin, nbytes)

    def set_place(self, slot: int, begin: int, nbytes: int) -> None:
        """Note where the record of a slot lies, without its checksum. Raises OSError if a disk has no room for that."""
        if self._head.entry:
            self._segment.store(self.offset_in("begin", slot), memoryview(_PLACE.pack(begin, nbytes)))
            return
        self._sizes[slot] = 0  # first: a writer that is killed here must not leave an old size with a new begin
        self._begins[slot] = begin
        self._sizes[slot] = nbytes

    def _begin_anew(self) -> None:
        """Use all room again: all slots are empty, and nobody fills one."""
        if self._head.entry:  # a write through the mapping could find no room on the disk
            self._segment.discard(self.scratch_bytes, self.begin)
        else:
            self.columns["nbytes"][:] = 0
        self.numbers[FREE] = self.begin
        self.numbers[LEFT] = 0

    def clear(self) -> None:
        """Empty all slots, forget where records lay, and return the memory of the records."""
        if not self._head.entry:
            self.columns["nbytes"][:] = 0
        super().clear()

    def begin_of(self, slot: int) -> int:
        """Where the record of a slot begins."""
        return int(self._begins[slot])

    def record(self, slot: int) -> memoryview:
        """The record of a ready slot, as a live, read-only view."""
        begin = self._begins[slot]
        return self._run[begin : begin + self._sizes[slot]].toreadonly()

    def read(self, slots: Integers, lend: Lend | None, verifier: Verifier) -> Iterator[Any]:
        """Decode records one by one as the caller iterates, from memory that stays while they are read.

        After a change of samples (`Seats.change`) all others are UNREADABLE: their room may be written again.
        """
        changes = view_of(self.changes)  # this generator may outlast the store
        seen = changes[0]
        numbers = slots.tolist()
        records: list[memoryview | None] = list(map(self.record, numbers))
        for number in verifier.unsafe(slots):
            copied = memoryview(bytes(self.record(numbers[number])))
            records[number] = copied if verifier.agrees(numbers[number], [copied]) else None
        return (UNREADABLE if record is None else self._decoded(record, lend, changes, seen) for record in records)

    def _decoded(self, record: memoryview, lend: Lend | None, changes: memoryview, seen: int) -> Any:
        try:
            sample = self.codec.decode(record, lend)
        except Exception:  # the class may have another name by now, and its code may raise anything
            return UNREADABLE
        return sample if changes[0] == seen else UNREADABLE

    def reserve_all(self) -> None:
        """Do nothing: records take their memory as they are written."""

    def copy_from(self, other: Records, theirs: Integers, mine: Integers) -> list[bool]:
        """Write copies of records. Returns which found room."""
        return self.write(mine.tolist(), [[other.record(slot)] for slot in theirs.tolist()])

    def fetch(self, slot: int) -> list[bytes] | None:
        """Read the record of a slot through the file. Returns None if the record lies outside of the run."""
        begin, nbytes = self._begins[slot], self._sizes[slot]
        if not self.begin <= begin < self.end or not 0 < nbytes <= self.end - begin:
            return None
        return [self._segment.fetch(begin, nbytes)]

    def stored_bytes(self, slots: Integers) -> int:
        """Bytes of the records of ready slots."""
        return int(self.columns["nbytes"].take(slots).sum())

    def mend(self) -> None:
        """Also find the free part of the run. On a full disk that cannot be noted, so who writes finds it again."""
        super().mend()
        with suppress(OSError):
            self.numbers[FREE] = self._find_free()

    def _find_free(self) -> int:
        """Where the last sound record ends. Empties slots with a record outside of the run."""
        free, below = self.begin, self.end
        while free == self.begin and len(last := self._last_records(below)):
            for begin, slot, end in last.tolist():
                below = begin
                if cast(Callable[[int], bool], self.is_sound)(slot):
                    free = end
                    break
                self._leave_out(slot)
        return free

    def _last_records(self, below: int) -> Integers:
        """The last records that begin before an offset: begin, slot and end, int64 `[records, 3]`, the last one first.

        A table of all records would take 24 GB for 10^9 of them.
        """
        found = np.empty((0, 3), dtype=np.int64)
        first = 0
        while (first := self.next_stored(first)) < self.count:
            last = min(first + _STEP, self.count)
            entries = self._entries(first, last)
            begin, nbytes = entries["begin"], entries["nbytes"]
            inside = (begin >= self.begin) & (begin < self.end) & (nbytes > 0) & (nbytes <= self.end - begin)
            stored = entries["sum"] != 0
            for number in np.flatnonzero(stored & ~inside).tolist():
                self._leave_out(first + number)
            numbers = np.flatnonzero(stored & inside & (begin < below))
            rows = np.stack([begin[numbers], first + numbers, begin[numbers] + nbytes[numbers]], axis=1)
            found = np.concatenate([found, rows])
            found = found[found[:, 0].argsort()[::-1][:_STEP]]
            first = last
        return found

    def _leave_out(self, slot: int) -> None:
        """Empty a slot whose record is not sound, unless another process has found the free part, and may fill it."""
        if not self._numbers_view[FREE]:
            self.forget(slot)

    def close(self) -> None:
        """Drop all views."""
        super().close()
        self._begins = self._sizes = self._numbers_view = memoryview(b"")
        self._run.release()

    def _take_room(self, sizes: Sequence[int], alignments: Sequence[int], found: int) -> tuple[int, int, list[int]]:
        """Move the free offset, which was `found` if nobody has noted it.

        Returns:
            Where it was, where it is, and the begin of each record; 0 without room.
        """
        if found and not self._numbers_view[FREE]:
            self.numbers[FREE] = found
        before = end = self.free
        begins = []
        for nbytes, alignment in zip(sizes, alignments, strict=True):
            begin = -(-end // alignment) * alignment
            if begin + nbytes > self.end:
                begins.append(0)
                continue
            begins.append(begin)
            end = begin + nbytes
        self.numbers[FREE] = end
        return before, end, begins

    def _return_room(self, before: int, end: int) -> None:
        """Move the free offset back, unless another process has moved it since."""
        if self.free == end:
            self.numbers[FREE] = before

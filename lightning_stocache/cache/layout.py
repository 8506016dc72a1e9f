"""How samples lie in a segment: aligned arrays, one behind the other.

    state        per slot, uint32: empty, stored, or who has claimed it (`seats`)
    ...          what the policy of the store needs per slot: a mark, a time
    words        a few int64 for all slots: where the free part of the run of records begins; the number of changes, odd
                 while a change is under way; whether emptied slots have left room; how often all was cleared; the
                 rounds of `disk_sync`; the lives of seats
    entries      per slot: on a disk the checksum, else of records alone; where the record begins; its size; int64 each
    rows         one array per field, `[slots, nbytes]`; or
    records      one run of bytes

Every array starts at a multiple of 64 bytes. Rows have one array per field, so one `take` per field gives a whole batch
that is already collated (`gather_pool`: NumPy takes, by several threads where rows are large and cores are idle).

What lies before the samples is the head. In memory its pages are reserved when the store is made, or block by block,
and it is written through the mapping. Samples are written through the file (`Segment.store`), where a lack of memory is
an error. Small rows are written through the mapping, many at once, because a system call for each would cost more than
its copy. Their pages are reserved before, and there a lack of memory is an error, too. A killed writer leaves no
sample.

A disk is written through the file alone. Two parts of its head differ in what they mean. An entry outlives its job: a
slot has a sample if its checksum is not zero. Columns and words before the entries say what is known while the file is
open: a slot is ready if a process has verified or stored it. Who opens the file alone clears them (`mend`), so nothing
that a crash or a copy has left there means anything. One hole does that, whatever the number of slots.

Records lie one behind the other. A writer moves the free offset behind its records in its turn, and writes without
the turn, so records never overlap. An emptied slot keeps its room, for a record that is no larger. The room of a killed
writer stays unused. If a write fails, and no process has taken room since, the offset goes back. A record begins at a
multiple of 8, and of 64 if it has several parts.

These classes only move bytes. The store decides who may write a slot, and when it is ready (`store`).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import BatchRows, Memory, aligned
from lightning_stocache.cache.disk_sync import ROUNDS
from lightning_stocache.cache.gather_pool import GatherPool
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.seats import EMPTY, READY, SEATS, are_stored
from lightning_stocache.node.files import HEADER_BYTES, Manifest, ManifestError, manifest_in, token_of
from lightning_stocache.node.segment import Numbers, Segment

__all__ = [
    "EMPTY",
    "ENTRY",
    "KNOWN",
    "ONCE",
    "ON_DISK",
    "READY",
    "ROLLING",
    "Contents",
    "Head",
    "Layout",
    "Records",
    "Rows",
    "columns",
    "contents_of",
    "is_complete",
    "layout_of",
    "offsets",
]

ROLLING: Mapping[str, str | int] = {"form": "rolling"}
"""In the fingerprint of a rolling store, whose states are int64."""

ENTRY = np.dtype([("sum", np.uint64), ("begin", np.int64), ("nbytes", np.int64)])
"""What outlives a job on a disk, per slot: the checksum, zero without a sample; where the record begins; its size."""

_ENTRY = struct.Struct("<Qqq")
_BLOCK = 1 << 16  # the largest page or filesystem block; entries begin at one, so one hole frees all before them
_END = ""
_SMALL = 8  # alignment of records with one part
_SMALL_ROW = 1024  # bytes; to copy a smaller row costs less than a system call
_MANY = 8  # from so many small rows on, one copy of all costs less than a system call for each
_PAGE = 1 << 12  # bytes of small rows that are reserved together; most of a larger block would stay empty
_GAP = memoryview(bytes(64))  # lies between two records
KNOWN = 32  # with so many records, their mean size replaces the estimate of set-up
_STEP = 1 << 20  # slots whose states are read together


def is_complete(generation: Integers | int) -> Any:
    """Whether a slot of this generation has a complete sample (`rolling`); for an array, each of them."""
    return (generation > 0) & (generation & 1 == 0)


def offsets(dtypes: Mapping[str, npt.DTypeLike], count: int, begin: int = 0) -> dict[str, int]:
    """The offset of each column's array; under the name "", the end of all arrays."""
    starts = {}
    for name, dtype in dtypes.items():
        starts[name] = begin
        begin = aligned(begin + count * np.dtype(dtype).itemsize)
    return starts | {_END: begin}


def columns(
    segment: Segment, dtypes: Mapping[str, npt.DTypeLike], count: int, begin: int = 0
) -> dict[str, npt.NDArray[Any]]:
    """Make live, aligned arrays `[count]` over a segment. Drop them before the segment is closed.

    Args:
        segment: must be long enough.
        dtypes: dtypes by name; a dtype with a shape makes an array of more dimensions.
        count: length of each array.
        begin: offset of the first array, a multiple of 64.

    Example:
        >>> segment = Segment.create(256)
        >>> arrays = columns(segment, {"state": "u1", "begin": "i8", "pixels": "3u1"}, 5)
        >>> [array.shape for array in arrays.values()], offsets({"state": "u1", "begin": "i8"}, 5)
        ([(5,), (5,), (5, 3)], {'state': 0, 'begin': 64, '': 128})
    """
    starts = offsets(dtypes, count, begin)
    arrays = {}
    for name, dtype in dtypes.items():
        kind = np.dtype(dtype)
        if count * kind.itemsize:  # `frombuffer` keeps a reference to the buffer, `ndarray` does not
            array = np.frombuffer(segment.memory(starts[name], count * kind.itemsize), kind.base)
        else:
            array = np.empty(0, kind.base)
        arrays[name] = array.reshape(count, *kind.shape)
    return arrays


@dataclass(frozen=True)
class Head:
    """The part of a segment before the samples: columns with a number per slot, and a few words for all slots."""

    columns: Mapping[str, npt.DTypeLike]
    words: int = 8
    has_entries: bool = False

    def plus(self, columns: Mapping[str, npt.DTypeLike]) -> Head:
        """This head with more columns."""
        return replace(self, columns={**self.columns, **columns})

    @property
    def of_records(self) -> Head:
        """This head with the places of records; entries have them."""
        return self if self.has_entries else self.plus({"begin": np.int64, "nbytes": np.int64})

    def scratch_bytes(self, count: int) -> int:
        """Bytes of columns and words."""
        size = aligned(offsets(self.columns, count)[_END] + 8 * self.words)
        if not self.has_entries:
            return size
        return -(-(HEADER_BYTES + size) // _BLOCK) * _BLOCK - HEADER_BYTES

    def nbytes(self, count: int) -> int:
        """Bytes of the head for `count` slots."""
        return aligned(self.scratch_bytes(count) + count * ENTRY.itemsize * self.has_entries)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in all columns."""
        return sum(np.dtype(dtype).itemsize for dtype in self.columns.values()) + ENTRY.itemsize * self.has_entries

    @property
    def fixed_bytes(self) -> int:
        """Bytes of the words, and the most that alignment wastes. The number of slots does not matter."""
        return 8 * self.words + 256 + _BLOCK * self.has_entries


_FREE, _CHANGES, _LEFT, _CLEARS, _ROUNDS = range(5)
_OWN_WORDS = _ROUNDS + ROUNDS.size // 8
ONCE = Head({"state": np.uint32}, _OWN_WORDS + SEATS // 2)
"""The head of a store whose slots are written once. Behind its first words lie the lives of seats."""


ON_DISK = replace(ONCE, has_entries=True)
"""The head of such a store on a disk."""


class _Slots:
    """The live head of a store: the columns of `head` for `count` slots. One column is `state`."""

    def __init__(self, segment: Segment, count: int, head: Head) -> None:
        self.count, self.begin = count, head.nbytes(count)
        self.scratch_bytes = head.scratch_bytes(count)
        """Bytes at the beginning that mean nothing to the next job on a disk."""
        self._segment, self._head = segment, head
        starts = offsets(head.columns, count)
        self._words_start = starts[_END]
        self.columns = columns(segment, head.columns, count)
        self._places = {name: (starts[name], column.itemsize) for name, column in self.columns.items()}
        if head.has_entries:
            entries = columns(segment, {"entry": ENTRY}, count, self.scratch_bytes)["entry"]
            for name, (_, offset) in cast(Any, ENTRY.fields).items():
                self.columns[name] = entries[name]
                self._places[name] = self.scratch_bytes + offset, ENTRY.itemsize
        self.words = columns(segment, {"words": np.int64}, head.words, self._words_start)["words"]
        self.state = self.columns["state"]
        self.states: Numbers = segment.numbers_at(starts["state"], count, cast(Any, self.state.dtype.char))
        """The states to look at one and to change it: one look costs 30 ns in memory, through the array 100 ns."""
        self.lives: Numbers = segment.numbers_at(self._words_start + 8 * _OWN_WORDS, SEATS, "I")
        """The life of each seat."""
        self.numbers: Numbers = segment.numbers_at(self._words_start, head.words, "q")
        """The words, to look at one and to change it."""
        self.changes: Numbers = segment.numbers_at(self._words_start + 8 * _CHANGES, 1, "q")
        """The number of changes (`seats`)."""
        self.rounds_offset = self._words_start + 8 * _ROUNDS
        """Where the numbers of `disk_sync` are."""
        self.is_kept = head.has_entries and segment.path is not None
        """Whether entries of earlier jobs count: a file without a name has none."""
        self.checksum: Callable[[int, int, int, Iterable[Any]], int] | None = None
        """On a disk: makes the checksum of a sample, given its slot, where it begins, its bytes, and its parts."""
        self.is_sound: Callable[[int], bool] | None = None
        """On a disk: whether the sample of a slot is the one that was stored."""

    @classmethod
    def whole(cls, head: Head) -> Head:
        """A head with what a layout needs besides the columns of the policy."""
        return head

    @classmethod
    def reserved_bytes(cls, count: int, head: Head = ONCE) -> int:
        """Bytes of the head of `count` slots, before the samples."""
        return cls.whole(head).nbytes(count)

    def reserve(self, first: int, last: int) -> None:
        """Reserve the memory of the columns of some slots, and of the words. Raises OSError (ENOSPC) without it."""
        for name, column in self.columns.items():
            self._segment.reserve(self.offset_in(name, first), (last - first) * column.itemsize)
        self._segment.reserve(self._words_start, self.begin - self._words_start)

    def offset_in(self, column: str, slot: int) -> int:
        """The offset of a slot's number in a column."""
        start, step = self._places[column]
        return start + slot * step

    def seal(self, slot: int, begin: int, nbytes: int, contents: Iterable[Any]) -> None:
        """Write the checksum of a sample on a disk, whose bytes are in their slot; rows begin at 0."""
        if self.checksum is not None:
            entry = _ENTRY.pack(self.checksum(slot, begin, nbytes, contents), begin, nbytes)
            if not self._head.has_entries:
                entry = entry[:8]
            self._segment.store(self.offset_in("sum", slot), memoryview(entry))

    def empty(self, slots: Integers) -> None:
        """Empty slots. Raises OSError if a disk has no room for a word."""
        if self._segment.on_disk:
            for slot in slots.tolist():
                self.states[slot] = EMPTY
        else:
            self.state[slots] = EMPTY

    def sum(self, slot: int) -> int:
        """The checksum of a slot, read through the file with the rest of its entry. Raises OSError for a bad block."""
        nbytes = ENTRY.itemsize if self._head.has_entries else 8
        return int.from_bytes(self._segment.fetch(self.offset_in("sum", slot), nbytes)[:8], "little")

    def forget(self, slot: int) -> None:
        """Empty a slot on a disk for this job and all later ones."""
        with suppress(OSError):  # who reads it next finds out again that it is damaged
            self._segment.store(self.offset_in("sum", slot), memoryview(bytes(8)))

    def stored(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        """Which of some slots have a sample, bool `[slots]`, whether or not it can be read now."""
        stored = np.asarray(are_stored(self.state[first:last]))
        if self.is_kept and not stored.all():
            with suppress(OSError):  # a bad block: what cannot be read does not count
                stored |= self._entries(first, min(last, self.count))["sum"] != 0
        return stored

    def next_stored(self, first: int) -> int:
        """A slot, `first` or later, before which none from `first` on has a sample on a disk."""
        if not self.is_kept or first >= self.count:
            return first
        start, step = self._places["sum"]
        return max(first, (self._segment.next_data(start + first * step) - start) // step)

    def mend(self) -> None:
        """Forget what earlier jobs knew, while no other process has the store on a disk open."""
        self._segment.discard(0, self.scratch_bytes)

    def clear(self) -> None:
        """Empty all slots, and return the memory of the samples. The head keeps its memory, and seats their lives."""
        self._segment.store(self.offset_in("state", 0), memoryview(bytes(self.state.nbytes)))
        self._segment.store(self._words_start, memoryview(bytes(8 * _CLEARS)))
        self.numbers[_CLEARS] += 1
        self._segment.discard(self.scratch_bytes if self._head.has_entries else self.begin)

    def note_left(self) -> None:
        """Let emptied slots be filled again: each has its row."""

    def begin_anew(self) -> None:
        """Use all room again: all slots are empty, and nobody fills one."""

    def close(self) -> None:
        """Drop all views. Before that the segment cannot be unmapped."""
        self.state = self.words = np.empty(0, dtype=np.int64)
        self.states = self.lives = self.numbers = self.changes = memoryview(b"")
        self.checksum = self.is_sound = None
        self.columns = {}

    def _entries(self, first: int, last: int) -> npt.NDArray[Any]:
        """The entries of some slots, read through the file."""
        content = self._segment.fetch(self.offset_in("sum", first), (last - first) * ENTRY.itemsize)
        return np.frombuffer(content, ENTRY)


class Rows(_Slots):
    """One array per field."""

    fixed_bytes = 0
    """Bytes that every store has and budgets do not count."""

    def __init__(self, segment: Segment, codec: Any, count: int, head: Head = ONCE) -> None:
        super().__init__(segment, count, head)
        self._row_bytes: tuple[int, ...] = codec.row_bytes
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
        """Bytes that all slots take when they are filled."""
        self._is_small = not segment.on_disk and 0 < self._nbytes < _SMALL_ROW and hasattr(os, "posix_fallocate")
        self._clears = 0
        self._reserved = np.zeros(0, dtype=np.bool_)
        """Which pages this process has reserved since clear number `_clears`, bool `[pages]`."""

    @staticmethod
    def bytes_for(codec: Any, count: int, granted: int = 0, head: Head = ONCE) -> int:
        """Size of a segment for `count` slots. `granted` does not matter.

        No write reaches the last byte: it would lengthen a file that was cut off, and `is_whole` would not notice.
        """
        return _starts_of_fields(codec.row_bytes, count, head.nbytes(count))[-1] + 1

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
        store = self._segment.store
        for slot, contents in zip(slots, samples, strict=True):
            for start, nbytes, content in zip(self._fields, self._row_bytes, contents, strict=True):
                if nbytes:
                    store(start + slot * nbytes, content)
            self.seal(slot, 0, self._nbytes, contents)
        return [True] * len(slots)

    def gather(self, slots: Integers, into: Memory, pool: GatherPool) -> None:
        """Copy many samples into the memory of a batch.

        Args:
            slots: int64 `[samples]`, each in `[0, count)`.
            into: uint8 `[samples * nbytes]` per field, aligned to 64 bytes. Fresh memory costs as much again in page
                faults.
            pool: the threads that copy.
        """
        for rows, nbytes, memory in zip(self.fields, self._row_bytes, into, strict=True):
            pool.take(rows, slots, memory.reshape(len(slots), nbytes))

    def _reserve_pages(self, slots: Integers) -> None:
        """Reserve the pages of slots. Raises OSError (ENOSPC) without memory."""
        if self._clears != self.numbers[_CLEARS] or not len(self._reserved):
            self._clears = self.numbers[_CLEARS]
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

    def scatter(self, slots: Integers, memory: Memory) -> None:
        """Write many rows at once, from memory as `gather` fills it, into slots whose memory is reserved."""
        for rows, content in zip(self.fields, memory, strict=True):
            rows[slots] = content.reshape(len(slots), rows.shape[1])

    def begin_of(self, slot: int) -> int:
        """0 for every slot, as in its checksum."""
        return 0

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


class Records(_Slots):
    """One run of bytes, from which all processes of a node take room. Room is never returned.

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

    def __init__(self, segment: Segment, codec: Any, count: int, head: Head = ONCE) -> None:
        super().__init__(segment, count, self.whole(head))
        # No write reaches the last byte, as in `Rows.bytes_for`.
        self.end, self.fixed_bytes = segment.size - 1, head.fixed_bytes
        self.granted_bytes = segment.size - self.fixed_bytes
        """Bytes that slots and records may take."""
        self._begins, self._sizes = self.columns["begin"].data, self.columns["nbytes"].data
        self._run = segment.memory(0, segment.size)
        self._expected: int = codec.slot_bytes

    @classmethod
    def whole(cls, head: Head) -> Head:
        """A head with the places of records."""
        return head.of_records

    @staticmethod
    def bytes_for(codec: Any, count: int, granted: int = 0, head: Head = ONCE) -> int:
        """Size of a segment: all granted bytes, and at least the columns of `count` slots."""
        return max(Records.reserved_bytes(count, head) + 1, granted + head.fixed_bytes)

    def fill_fraction(self, filled: int) -> float:
        """Share of the bytes that are taken; 1 when every slot is ready, because no slot is left to fill."""
        if filled == self.count:
            return 1.0
        return min(max(self.free - self.fixed_bytes, 0) / max(self.granted_bytes, 1), 1.0)

    def capacity(self, filled: int) -> int:
        """Number of samples for which there is room, if the next samples are as large as those before."""
        mean = (self.free - self.begin) / filled if filled >= KNOWN else self._expected
        return min(filled + int((self.end - self.free) / max(mean, 1)), self.count)

    @property
    def free(self) -> int:
        """The offset of the free part of the run."""
        return max(int(self.numbers[_FREE]), self.begin)

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes of a record, given its parts."""
        return sum(part.nbytes for part in contents)

    def has_room(self, nbytes: int) -> bool:
        """Whether a record may find room."""
        return bool(nbytes <= self.end - self.free or self.numbers[_LEFT])

    def write(self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Write records one behind the other, all at once, and their places.

        Returns:
            Whether each record was written: there was room, and the turn was to be had.
        """
        sizes = [self.size(contents) for contents in samples]
        if not any(map(self.has_room, sizes)):
            return [False] * len(slots)
        if self.numbers[_LEFT]:
            return [self._write_again(slot, contents) for slot, contents in zip(slots, samples, strict=True)]
        return self._append(slots, samples, sizes)

    def note_left(self) -> None:
        """Let records be written into the room that emptied slots have left."""
        self.numbers[_LEFT] = 1

    def _write_again(self, slot: int, contents: Sequence[memoryview]) -> bool:
        """Write one record into the room that its slot had before, or else behind the others."""
        nbytes = self.size(contents)
        begin = self._begins[slot]
        alignment = _SMALL if len(contents) == 1 else aligned(1)
        if nbytes > self._sizes[slot] or begin % alignment:
            return self._append([slot], [contents], [nbytes])[0]
        self._segment.store(begin, *contents)
        self._note(slot, begin, nbytes, contents)
        return True

    def _append(
        self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]], sizes: Sequence[int]
    ) -> list[bool]:
        alignments = [_SMALL if len(contents) == 1 else aligned(1) for contents in samples]
        taken = self._segment.in_turn(self._take_room, sizes, alignments)
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
        if self._head.has_entries:
            self.seal(slot, begin, nbytes, contents)
            return
        self._sizes[slot] = 0  # first: a writer that is killed here must not leave an old size with a new begin
        self._begins[slot] = begin
        self._sizes[slot] = nbytes

    def begin_anew(self) -> None:
        """Use all room again: all slots are empty, and nobody fills one."""
        if self._head.has_entries:  # its places cannot be forgotten at once
            self.note_left()
            return
        self.columns["nbytes"][:] = 0
        self.numbers[_FREE] = self.begin
        self.numbers[_LEFT] = 0

    def clear(self) -> None:
        """Empty all slots, forget their places, and return the memory of the records."""
        if not self._head.has_entries:
            self.columns["nbytes"][:] = 0
        super().clear()

    def begin_of(self, slot: int) -> int:
        """Where the record of a slot begins."""
        return int(self._begins[slot])

    def record(self, slot: int) -> memoryview:
        """The record of a ready slot, as a live, read-only view."""
        begin = self._begins[slot]
        return self._run[begin : begin + self._sizes[slot]].toreadonly()

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
            self._find_free()

    def _find_free(self) -> None:
        """Let the free part begin behind the last sound record. Empties slots with a record outside of the run."""
        if self.next_stored(0) >= self.count:
            self.numbers[_FREE] = self.begin
            return
        entries = self._entries(0, self.count)
        begin, nbytes = entries["begin"], entries["nbytes"]
        inside = (begin >= self.begin) & (begin < self.end) & (nbytes > 0) & (nbytes <= self.end - begin)
        stored = entries["sum"] != 0
        for slot in np.flatnonzero(stored & ~inside).tolist():
            self.forget(slot)
        slots, free = np.flatnonzero(stored & inside), self.begin
        for slot in slots[np.argsort(begin[slots])[::-1]].tolist():
            if cast(Callable[[int], bool], self.is_sound)(slot):
                free = int(begin[slot] + nbytes[slot])
                break
            self.forget(slot)
        self.numbers[_FREE] = free

    def close(self) -> None:
        """Drop all views."""
        super().close()
        self._begins = self._sizes = memoryview(b"")
        self._run.release()

    def _take_room(self, sizes: Sequence[int], alignments: Sequence[int]) -> tuple[int, int, list[int]]:
        """Move the free offset. Returns where it was, where it is, and the begin of each record; 0 without room."""
        if self._head.has_entries and not self.numbers[_FREE]:
            self._find_free()
        before = end = self.free
        begins = []
        for nbytes, alignment in zip(sizes, alignments, strict=True):
            begin = -(-end // alignment) * alignment
            if begin + nbytes > self.end:
                begins.append(0)
                continue
            begins.append(begin)
            end = begin + nbytes
        self.numbers[_FREE] = end
        return before, end, begins

    def _return_room(self, before: int, end: int) -> None:
        """Move the free offset back, unless another process has moved it since."""
        if self.free == end:
            self.numbers[_FREE] = before


Layout: TypeAlias = Rows | Records
"""A layout of samples."""


def layout_of(codec: SampleCodec) -> type[Layout]:
    """The layout for samples of a codec."""
    return Records if isinstance(codec, RecordCodec) else Rows


def _starts_of_fields(row_bytes: Sequence[int], count: int, begin: int) -> list[int]:
    """The offset of each field's array, and the end of all."""
    starts = [begin]
    for nbytes in row_bytes:
        starts.append(aligned(starts[-1] + count * nbytes))
    return starts


# ---- the description of a segment, for people ----


@dataclass(frozen=True)
class Contents:
    """The description of a segment: its manifest, or its damage in words, and the number of its filled slots."""

    manifest: Manifest | None
    damage: str = ""
    filled: int = 0


def contents_of(file: int) -> Contents:
    """Read the description of a segment's file without mapping it. Another process may be filling it.

    Raises:
        ValueError: the file is no segment.
        OSError: the file cannot be read.
    """
    token_of(file)
    try:
        manifest = manifest_in(file)
    except ManifestError as error:
        return Contents(None, str(error))
    rolls = manifest.fingerprint.items() >= ROLLING.items()
    filled, slots, begin, dtype = 0, manifest.geometry.slots, HEADER_BYTES, np.dtype(np.int64 if rolls else np.uint32)
    if manifest.on_disk and not rolls:
        begin, dtype = HEADER_BYTES + ON_DISK.scratch_bytes(slots), ENTRY
    for first in range(0, slots, _STEP):  # one read has at most 2 GiB
        length = min(slots - first, _STEP) * dtype.itemsize
        content = os.pread(file, length, begin + first * dtype.itemsize)
        found = np.frombuffer(content, dtype, len(content) // dtype.itemsize)  # the file may be cut off anywhere
        if rolls:
            filled += int(np.count_nonzero(is_complete(found)))
        else:
            filled += int(np.count_nonzero(found["sum"] if manifest.on_disk else found == READY))
    return Contents(manifest, "", filled)

"""How samples lie in a segment: aligned arrays, one behind the other.

    state        per slot, uint32: empty, stored, or who has claimed it (`seats`); int64 in a rolling store
    ...          what the policy of the store needs per slot: a mark, a time; of records in memory their begin and size
    numbers      a few int64 for all slots: where the free part of the run of records begins; the number of changes, odd
                 while a change is under way; whether emptied slots have left room; how often all was cleared; the
                 rounds of `disk_sync`; the lives of seats
    entries      on a disk, per slot: the checksum, where the record begins, its size; int64 each; of a rolling store
                 also index and time of the sample
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
slot has a sample if its checksum is not zero. Columns and numbers before the entries say what is known while the file
is open: a slot is ready if a process has verified or stored it. Who opens the file alone clears them (`mend`), so
nothing that a crash or a copy has left there means anything. One hole does that, whatever the number of slots.

Records lie one behind the other. A writer moves the free offset behind its records in its turn, and writes without the
turn, so records never overlap. An emptied slot keeps its room, for a record that is no larger. The room of a killed
writer stays unused. When a quarter of the run is lost, the next change empties all slots, and the run begins anew. If a
write fails, and no process has taken room since, the offset goes back. A record begins at a multiple of 8, and of 64 if
it has several parts.

A layout only moves bytes. The store decides who may write a slot, and when it is ready (`store`).
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Codec, Lend, Memory
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.head import (
    CHANGES,
    CLEARS,
    END,
    ONCE,
    OWN_NUMBERS,
    ROUNDS_BEGIN,
    Head,
    columns,
    offsets,
)
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.seats import EMPTY, SEATS, are_stored
from lightning_stocache.node.segment import Numbers, Segment

__all__ = ["UNREADABLE", "Layout", "Verifier"]

UNREADABLE: Any = object()
"""Stands for a sample that another job has stored and this job cannot decode."""


class Verifier(Protocol):
    """Says which copies must be compared with what was stored."""

    def unsafe(self, slots: Integers) -> list[int]:
        """The numbers of those slots (int64 `[samples]`) whose copies must be compared."""

    def agrees(self, slot: int, contents: Sequence[Any]) -> bool:
        """Whether a copy of a sample, given in its parts as bytes, is what was stored in a slot."""


class Layout(ABC):
    """The samples of a store in its segment, and the live head before them. One column is `state`.

    Args:
        segment: must be as long as `bytes_for` says.
        codec: what a sample looks like.
        count: number of slots.
        head: what lies before the samples.
    """

    fixed_bytes = 0
    """Bytes that every store has and budgets do not count."""

    granted_bytes: int
    """Bytes that all slots and samples may take."""

    def __init__(self, segment: Segment, codec: Codec, count: int, head: Head = ONCE) -> None:
        self.codec = codec
        self.count, self.begin = count, head.nbytes(count)
        self.scratch_bytes = head.scratch_bytes(count)
        """Bytes at the beginning that mean nothing to the next job on a disk."""
        self._segment, self._head = segment, head
        starts = offsets(head.columns, count)
        self._numbers_start = starts[END]
        self.columns = columns(segment, head.columns, count)
        self._places = {name: (starts[name], column.itemsize) for name, column in self.columns.items()}
        self.entries: npt.NDArray[Any] = np.empty(0)
        """The entries on a disk, live, `[slots]`."""
        if head.entry is not None:
            self.entries = columns(segment, {"entry": head.entry}, count, self.scratch_bytes)["entry"]
            for name, (_, offset) in cast(Any, head.entry.fields).items():
                self.columns[name] = self.entries[name]
                self._places[name] = self.scratch_bytes + offset, head.entry_bytes
        self.state = self.columns["state"]
        self.states: Numbers = segment.numbers_at(starts["state"], count, cast(Any, self.state.dtype.char))
        """The states to look at one and to change it: one look costs 30 ns in memory, through the array 100 ns."""
        self.lives: Numbers = segment.numbers_at(self._numbers_start + 8 * OWN_NUMBERS, SEATS, "I")
        """The life of each seat."""
        self.numbers: Numbers = segment.numbers_at(self._numbers_start, head.numbers, "q")
        """The numbers, to look at one and to change it."""
        self.changes: Numbers = segment.numbers_at(self._numbers_start + 8 * CHANGES, 1, "q")
        """The number of changes (`seats`)."""
        self.rounds_offset = self._numbers_start + 8 * ROUNDS_BEGIN
        """Where the numbers of `disk_sync` are."""
        self.is_kept = head.entry is not None and segment.path is not None
        """Whether entries of earlier jobs count: a file without a name has none."""
        self.checksum: Callable[..., int] | None = None
        """On a disk: makes the checksum of a sample, given its slot, where it begins, its bytes, its parts, and its
        index if the entry does not have it yet."""
        self.is_sound: Callable[[int], bool] | None = None
        """On a disk: whether the sample of a slot is the one that was stored."""

    # ---- sizes ----

    @classmethod
    def whole(cls, head: Head) -> Head:
        """A head with what a layout needs besides the columns of the policy."""
        return head

    @classmethod
    def reserved_bytes(cls, count: int, head: Head = ONCE) -> int:
        """Bytes of the head of `count` slots, before the samples."""
        return cls.whole(head).nbytes(count)

    @classmethod
    @abstractmethod
    def bytes_for(cls, codec: Codec, count: int, granted: int = 0, head: Head = ONCE) -> int:
        """Size of a segment for `count` slots, in which samples without a fixed size have `granted` bytes.

        No write reaches the last byte: it would lengthen a file that was cut off, and `is_whole` would not notice.
        """

    @classmethod
    @abstractmethod
    def slots_for(cls, granted: int, codec: Codec, most: int, head: Head = ONCE) -> int:
        """The number of slots of a store that may take so many bytes, at most `most`."""

    @staticmethod
    def expected_slots(granted: int, codec: Codec, head: Head) -> int:
        """How many samples, with their columns, are expected to find room in so many bytes."""
        return granted // (codec.slot_bytes + head.slot_bytes - ONCE.slot_bytes)

    @abstractmethod
    def fill_fraction(self, filled: int) -> float:
        """Share of the room that is taken when so many slots have a sample."""

    @abstractmethod
    def capacity(self, filled: int) -> int:
        """Number of samples for which there is room, when so many slots have a sample."""

    @abstractmethod
    def has_room(self, nbytes: int) -> bool:
        """Whether a sample of so many bytes may find room."""

    @abstractmethod
    def stored_bytes(self, slots: Integers) -> int:
        """Bytes of the samples of ready slots."""

    def size(self, contents: Sequence[memoryview]) -> int:
        """Bytes of a sample, given its parts."""
        return sum(part.nbytes for part in contents)

    # ---- samples ----

    @abstractmethod
    def write(self, slots: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> list[bool]:
        """Write samples, given in their parts, into claimed slots.

        Returns:
            Which of them found room.

        Raises:
            OSError: the system has no room (ENOSPC).
        """

    @abstractmethod
    def read(self, slots: Integers, lend: Lend | None, verifier: Verifier) -> Iterable[Any]:
        """Copy the samples of ready slots (int64 `[samples]`) into lent or new memory; see `Store.read`."""

    def gather(self, slots: Integers, into: Memory, pool: GatherPool = ALONE, verifier: Verifier | None = None) -> None:
        """Copy ready samples of a fixed size into the memory of a batch, uint8 `[samples * nbytes]` per field."""
        raise NotImplementedError("samples of many sizes are read one by one")

    @abstractmethod
    def copy_from(self, other: Any, theirs: Integers, mine: Integers) -> list[bool]:
        """Copy samples of another layout of this class, from slots `theirs` into slots `mine`. Returns as `write`."""

    @abstractmethod
    def reserve_all(self) -> None:
        """Reserve the memory of all samples of a fixed size. Raises OSError (ENOSPC) without it."""

    @abstractmethod
    def fetch(self, slot: int) -> list[bytes] | None:
        """Read the parts of a slot's sample through the file; None if it cannot be one."""

    def begin_of(self, slot: int) -> int:
        """Where the sample of a slot begins, as in its checksum."""
        return 0

    # ---- slots ----

    def reserve(self, first: int, last: int) -> None:
        """Reserve the memory of the columns of some slots, and of the numbers. Raises OSError (ENOSPC) without it."""
        for name, column in self.columns.items():
            self._segment.reserve(self.offset_in(name, first), (last - first) * column.itemsize)
        self._segment.reserve(self._numbers_start, self.begin - self._numbers_start)

    def offset_in(self, column: str, slot: int) -> int:
        """The offset of a slot's number in a column."""
        start, step = self._places[column]
        return start + slot * step

    def seal(self, slot: int, begin: int, nbytes: int, contents: Iterable[Any], *more: int) -> None:
        """Write the entry of a sample on a disk, whose bytes are in their slot; rows begin at 0.

        `more` are index and time of a sample in a rolling store.
        """
        if self.checksum is not None:
            number = self.checksum(slot, begin, nbytes, contents, *more[:1])
            entry = struct.pack(f"<Q{2 + len(more)}q", number, begin, nbytes, *more)
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
        return int.from_bytes(self._segment.fetch(self.offset_in("sum", slot), self._head.entry_bytes)[:8], "little")

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
        self._segment.store(self._numbers_start, memoryview(bytes(8 * CLEARS)))
        self.numbers[CLEARS] += 1
        self._segment.discard(self.scratch_bytes if self._head.entry else self.begin)

    @abstractmethod
    def reuse_room(self) -> None:
        """Let the room of emptied slots be used again, in a change (`seats`). It may empty the other slots, too."""

    def close(self) -> None:
        """Drop all views. Before that the segment cannot be unmapped."""
        self.state = np.empty(0, dtype=np.int64)
        self.states = self.lives = self.numbers = self.changes = memoryview(b"")
        self.checksum = self.is_sound = None
        self.columns, self.entries = {}, np.empty(0)

    def _entries(self, first: int, last: int) -> npt.NDArray[Any]:
        """The entries of some slots, read through the file."""
        content = self._segment.fetch(self.offset_in("sum", first), (last - first) * self._head.entry_bytes)
        return np.frombuffer(content, self._head.entry)

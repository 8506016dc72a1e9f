"""The policy of stores to which processes append while others read: the oldest samples leave first.

Every sample that is appended gets a ticket, the next number from 1 on, and the slots take turns. The state of a slot
(int64, its generation) says what the slot has:

    0                 nothing
    2 * ticket        the sample of that ticket can be read
    2 * ticket + 1    that sample is being written, or was dropped, or its writer was killed

A second column has the time of the last sample (nanoseconds of the wall clock, which goes on after a reboot); in
memory 0 if it was dropped. Behind the numbers of every store lie those of `rolling_draws`, and control numbers.

A writer

    [turn: next slot, its byte locked, generation odd] > bytes written > fence > generation even > byte unlocked

and a reader (`rolling_reader`) looks at the generation, fences, copies, fences and looks again (a seqlock; Lameter,
"Effective Synchronization on Linux/NUMA Systems", 2005). Readers take no lock and wait for no writer. Another sample
replaces a sample that leaves during an epoch: all are draws from one source, and the number of batches stays. Between
the odd generation and the bytes is a system call, which no store instruction crosses.

A slot that is still being written is never taken over: the next writer tries again. A killed writer leaves an odd
generation, which readers skip. The kernel frees its lock, and writers take that slot again when its turn comes.

How the samples of a kind find room, and where the next one goes, is in `rolling_room`. A reader of records decodes its
own copy, never bytes that a writer may change.

On a disk the store outlives its job, and one job at a time has it open. The disk is mapped read-only: samples and
numbers are written through the file. A reader may see such a number when only some of its bytes are written, so a
writer first notes in memory that the slot cannot be read (`rolling_slots`). The last bit of the generation is cleared
without a change of another byte. Each slot has an entry (`ROLLING_ENTRY`), which is written at once after its sample:
the time, the index of the sample in the source (-1: unknown), where a record lies, and a checksum (`checksums`), which
covers the ticket and the index, too. The process that opens the file (`repair`) finds the order of the samples from
their columns alone, because after a power cut any page may be old. After a sync that has failed nothing is stored any
more.

When memory ends while the store grows, it stops growing, with one warning per node, and rolls within the memory that it
has. Where the system refuses a sample otherwise (a full disk that copies on write refuses each write), the writer goes
on as if it had been killed at that line: it releases the slot, warns once, and stores nothing for a while.
"""

from __future__ import annotations

import errno
import itertools
import logging
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Codec, Lend, Memory
from lightning_stocache.cache.disk_sync import ROUNDS
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.head import ONCE, ROLLING, ROLLING_ENTRY, Head, is_complete
from lightning_stocache.cache.layout import Layout
from lightning_stocache.cache.medium import Disk
from lightning_stocache.cache.placement import Arc, Domain, Integers
from lightning_stocache.cache.rolling_draws import DRAWS_NUMBERS, RollingDraws
from lightning_stocache.cache.rolling_reader import RollingReader
from lightning_stocache.cache.rolling_room import Room, room_for
from lightning_stocache.cache.rolling_slots import UNVERIFIED, Control, RollingSlots, live_bytes
from lightning_stocache.cache.shortage import refused
from lightning_stocache.cache.store import NO_SLOT, RETRY_SECONDS, Store, layout_of
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import HEADER_BYTES, Backend, Geometry, Manifest
from lightning_stocache.node.segment import Segment

__all__ = ["RollingStore"]

log = logging.getLogger(__name__)

_CONTROL = ONCE.numbers + DRAWS_NUMBERS  # the first control number of a store in memory
_LATEST = 1 << 60  # generations above are damaged


class RollingStore(Store):
    """A store whose oldest samples leave when it is full. An index is the number of a slot, whatever sample it has.

    Raises:
        RuntimeError: (when reading) no sample is resident, or writers overtake every copy.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> store = RollingStore.empty(SampleSpec.infer(0), 3)
        >>> [store.append(number) for number in range(5)]
        [True, True, True, True, True]
        >>> sorted(store.read(store.lookup(np.arange(3)))), store.evicted
        ([2, 3, 4], 2)
        >>> store.close()
    """

    head = Head({"state": np.int64, "time": np.int64}, _CONTROL + len(Control))
    stores_misses = False

    def __init__(self, segment: Segment, codec: Codec, arc: Arc, companion: Segment | None = None) -> None:
        super().__init__(segment, codec, arc, companion)
        self.count = arc.slots
        self._slots = RollingSlots(segment, self.layout, _CONTROL, companion)
        self._control = self._slots.control
        self._room: Room = room_for(codec)(segment, cast(Any, self.layout), self._slots)
        disk = cast(Disk, self._medium) if segment.on_disk else None
        self._reader = RollingReader(segment, self.layout, self._slots, self._room, disk)
        self.draws = RollingDraws(self.layout.numbers, ONCE.numbers)
        """What the fillers of this store draw, and how far they are."""
        self._has_left_out = False  # a sample, since the store has stopped growing

    @classmethod
    def empty(
        cls,
        codec: Codec,
        count: int = 0,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
        *,
        granted: int = 0,
    ) -> RollingStore:
        """Make an empty store with `count` slots for rows, or with `granted` bytes for records; see `Store.create`."""
        count, granted = cls.fit(codec, count, granted)
        whose = {"fingerprint": ROLLING, **(whose or {})}
        return cast(RollingStore, cls.create(codec, Arc(count, count), backend, whose, granted=granted))

    @classmethod
    def fit(cls, codec: Codec, count: int = 0, granted: int = 0, file_bytes: int | None = None) -> tuple[int, int]:
        """The number of slots, and the bytes for records, of a store. Arguments as in `empty`.

        `file_bytes` limits the whole file on a disk; None: the store lies in memory.
        """
        head = cls._head(file_bytes is not None)
        most = sys.maxsize if file_bytes is None else file_bytes - HEADER_BYTES - head.fixed_bytes
        return room_for(codec).fit(codec, count, granted, most, head)

    @classmethod
    def slot_bytes(cls, codec: Codec, *, on_disk: bool = False) -> int:
        """Bytes of a sample with its columns; of records, of a sample of the expected size."""
        return room_for(codec).slot_bytes(codec, cls._head(on_disk))

    @classmethod
    def _head(cls, on_disk: bool) -> Head:
        """On a disk there are entries, and no control numbers."""
        return Head({"state": np.int64}, _CONTROL, ROLLING_ENTRY) if on_disk else cls.head

    @classmethod
    def mend(cls, codec: Codec, segment: Segment, manifest: Manifest, domain: Domain | None = None) -> None:
        """Do nothing: one job at a time has a file open, and `open` finds the samples of earlier jobs."""

    @classmethod
    def _in_segment(cls, segment: Segment, codec: Codec, arc: Arc) -> Store:
        """Open the store in a segment, and reserve its columns, on a disk, too: then there is room for its numbers."""
        segment.reserve(0, layout_of(codec).reserved_bytes(arc.slots, cls._head(segment.on_disk)))
        if not segment.on_disk:
            return cls(segment, codec, arc)
        size = live_bytes(arc.slots)
        manifest = Manifest(Geometry(0, 0), "the control numbers of a rolling cache on a disk", payload=size)
        live = Segment.create(size, "file", manifest, reserved=size)
        try:
            store = cls(segment, codec, arc, live)
            store.repair()
        except BaseException:
            live.close()
            raise
        return store

    @staticmethod
    def _identity(layout: Layout, arc: Arc, slot: int, index: int | None = None) -> tuple[int, ...]:
        """The ticket of a slot's sample, which may still be written, and its index, by default as in its entry."""
        return int(layout.states[slot]) >> 1, int(layout.columns["index"][slot]) if index is None else index

    # ---- after a crash ----

    def repair(self) -> None:
        """Find the samples of earlier jobs on a disk, and their order, while no other process has the store open.

        Verifies the newest sample, and of records each that does not end where the next one begins. The others are
        verified when they are read. All tickets to come are larger than any sound ticket in the file.
        """
        self._medium.drop_lost_pages()
        self.segment.store(self.layout.rounds_offset, memoryview(bytes(ROUNDS.size)))
        entries = self.layout.entries.copy()
        states = self._slots.generations.copy()
        is_sound = cast(Disk, self._medium).checksums.is_sound
        slots = np.flatnonzero(is_complete(states) & (states <= _LATEST))
        newest_first = slots[np.argsort(states[slots])[::-1]].tolist()
        found = list(itertools.dropwhile(lambda slot: not is_sound(slot), newest_first))
        latest = (int(states[found[0]]) if found else 0) + 2 * self.count + 2  # later generations are damaged
        last = int(states[states <= latest].max(initial=0)) // 2
        found, control = self._room.in_order(found, is_sound)
        control |= {Control.APPENDED: last, Control.EPOCH: last, Control.BEFORE: last, Control.FOUND: len(found)}
        is_found = np.zeros(self.count, dtype=np.bool_)
        is_found[found] = True
        now = time.time_ns()
        entries["nbytes"][~is_found] = 0
        entries["time"][is_found & ((entries["time"] <= 0) | (entries["time"] > now))] = now
        self._rewrite("state", self._slots.generations, states * is_found)
        self._rewrite("sum", self.layout.entries, entries)
        for name, number in control.items():
            self._control[name] = number
        cast(Any, self._slots.rounds)[is_found] = UNVERIFIED  # from here on these samples can be read

    def _rewrite(self, name: str, old: npt.NDArray[Any], new: npt.NDArray[Any]) -> None:
        """Write the numbers that begin with a column, from the first that differs to the last one.

        Killed in it, a process leaves old and new numbers, which mend again.
        """
        differ = np.flatnonzero(old != new)
        if len(differ):
            part = new[differ[0] : differ[-1] + 1]
            self.segment.store(self.layout.offset_in(name, int(differ[0])), memoryview(part.tobytes()))

    # ---- storing ----

    def append(self, sample: Any, index: int = -1) -> bool | None:
        """Check a sample, and replace the oldest sample by it.

        Returns False if it is not stored, because its slot is being written, or because the system refuses to store
        samples for a while (`refuses`); None if it is left out, because it is larger than what a store may use that has
        stopped growing.

        Args:
            sample: matches the codec.
            index: of the sample in its source, for messages, and on a disk for the next job; -1 without one.

        Raises:
            SampleMismatchError: the sample does not match the codec.
            ValueError: the sample is larger than the whole store.
            OSError: the system refuses the very first sample, or this process has no locks.
        """
        contents = self.codec.contents(self.codec.encode(sample, None if index < 0 else index))
        if not self.segment.has_locks:
            raise OSError(errno.ENOLCK, "this system has no locks between processes, or this process no descriptor")
        nbytes = self.layout.size(contents)
        if not self._has_room_for(nbytes):
            return None
        is_stored = False
        try:
            while not (is_stored or self.refuses):
                self._medium.note_write()
                slot = self.take(nbytes)
                if slot is None:
                    break
                is_stored = self._store_in(slot, contents, index)
        except OSError as error:
            if not self.filled:
                raise
            self._stop(refused(error, on_disk=self.segment.on_disk))
        except BaseException:
            self._slots.end_all()
            raise
        if is_stored:
            self._medium.note_stored()
        return is_stored

    def _has_room_for(self, nbytes: int) -> bool:
        """Whether a sample can find room. Warns once per node if it could, had the store not stopped growing."""
        room, needed = self._room, self._room.needed(nbytes)
        if needed <= room.most:
            return True
        sample, most, total = map(format_bytes, (nbytes, room.most, room.total))
        if needed > room.total:
            raise ValueError(f"a sample of {sample} is larger than the whole rolling cache of {total}")
        if not self._has_left_out and self.segment.lock(self.count + 2):  # kept until this process ends
            log.warning(
                "a sample of %s is not stored: the rolling cache has stopped growing at %s. Larger samples than that "
                "are left out",
                sample,
                most,
            )
        self._has_left_out = True
        return False

    def _store_in(self, slot: int, contents: Sequence[memoryview], index: int) -> bool:
        """Write a sample into a slot that was taken, and release it. Returns False if the store stops growing here."""
        short: str | None = ""
        try:
            short = self._write_sample(slot, contents, index)
            if short is not None:
                self._stop_growing(slot, short)
        finally:
            self.finish(slot, is_whole=short is None)
        return short is None

    def take(self, nbytes: int = 0) -> int | None:
        """Take the next slot, with room for a record of `nbytes`, until `finish`.

        Returns None if a writer has the slot, or the turn is not free.
        """
        return self.segment.in_turn(self._take, nbytes)

    def _take(self, nbytes: int) -> int | None:
        slots, control = self._slots, self._control
        turn = int(control[Control.NEXT] % max(self.limit, 1))
        slot = self._room.next_slot(turn)
        if not slots.lock(slot):
            return None
        is_taken = False
        try:
            if not self._room.make(slot, nbytes):
                return None
            leaves = slots.is_readable(slot)
            ticket = control[Control.APPENDED] + 1
            control[Control.APPENDED] = ticket
            slots.begin(slot, ticket)
            control[Control.EVICTED] += leaves
            if slot == turn:
                control[Control.NEXT] += 1
            is_taken = True
        finally:
            if not is_taken:
                slots.end(slot)
        return slot

    def finish(self, slot: int, *, is_whole: bool = True) -> None:
        """Release a slot. Readers may read its sample, if `is_whole`; else the sample is dropped."""
        slots = self._slots
        try:
            if is_whole:
                slots.publish(slot, self._medium.stored_word())
            else:
                with suppress(OSError):  # as if the writer had been killed
                    slots.drop(slot)
        finally:
            slots.end(slot)

    def _write_sample(self, slot: int, contents: Sequence[memoryview], index: int) -> str | None:
        """Write a sample. If memory is short while the store grows, return the reason in words."""
        room, grows = self._room, not self._control[Control.LAPPED]
        if grows and room.takes_memory(slot):  # afterwards the store takes no more memory
            short = self._shortage.comes_with(self.layout.size(contents))
            if short is not None:
                return short
        try:
            room.write(slot, contents)
            now, begin, nbytes = time.time_ns(), self.layout.begin_of(slot), self.layout.size(contents)
            self.layout.seal(slot, begin, nbytes, contents, index, now)
            if not self.segment.on_disk:
                self.layout.columns["time"][slot] = now
        except OSError as error:
            if not grows:
                self._control[Control.HOLES] = 1  # the next sample comes here, and no other leaves for it
                raise
            return refused(error, on_disk=self.segment.on_disk)
        return None

    def _stop_growing(self, slot: int, short: str) -> None:
        """From now on, use only the slots, or the bytes, before those of a slot. Warn once per node."""
        used = self._room.before(slot)
        if not used:
            needed = format_bytes(self.codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")
        self.segment.in_turn(self._room.limit_to, used)
        if self.segment.lock(self.count + 1):  # this process keeps the lock until it ends
            log.warning(
                "the rolling cache stops growing at %s samples: %s.\nIt rolls within these. A lower budget has no such "
                "warning",
                f"{self.filled:,}",
                short,
            )

    def _stop(self, short: str) -> None:
        """Store nothing for a while, and warn once per node."""
        if not self._retry_at and self.segment.lock(self.count):  # this process keeps the lock until it ends
            log.warning(
                "the rolling cache takes no new samples for now: %s.\nIts %s samples stay, and are served",
                short,
                f"{self.filled:,}",
            )
        self._retry_at = time.monotonic() + RETRY_SECONDS

    @property
    def refuses(self) -> bool:
        """Whether nothing is stored for a while, because the system has just refused a sample, or lost one."""
        return self._rests or self._medium.has_failed

    # ---- reading ----

    def has_slot(self, index: int) -> bool:
        """Whether there is a slot with this number."""
        return 0 <= index < self.count

    def ready_slot(self, index: int, *, verify: bool = False) -> int:
        """The slot with this number, whatever sample it has; NO_SLOT without such a slot."""
        return index if self.has_slot(index) else NO_SLOT

    def lookup(self, indices: Integers, *, verify: bool = False) -> Integers:
        """The slots with these numbers, int64 `[samples]`, whatever samples they have; NO_SLOT without such a slot."""
        return np.where((indices >= 0) & (indices < self.count), indices, NO_SLOT)

    def gather(self, slots: Integers, into: Memory, pool: GatherPool = ALONE) -> None:
        """Copy whole rows into the memory of a batch, without waiting for writers."""
        self._reader.gather(slots, into, self.codec.rows(into, len(slots)), pool)

    def read(self, slots: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copy whole samples from these slots, or from others. Records are copied as the caller iterates."""
        if self.codec.is_fixed:
            sizes = self.codec.sizes(len(slots))
            memory = [np.empty(size, dtype=np.uint8) for size in sizes] if lend is None else lend(sizes)
            self.gather(slots, memory)
            return cast(Iterable[Any], self.codec.split(memory, len(slots)))
        return (self.codec.decode(self._reader.record(slot), lend) for slot in slots.tolist())

    def readable_slots(self) -> Integers:
        """The slots that can be read now, int64."""
        return self._reader.readable_slots()

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read. A damaged sample of an earlier job is dropped."""
        return self._reader.is_sound(slot)

    @property
    def renewed(self) -> int:
        """Number of samples that this process has read that were newer than the epoch."""
        return self._reader.renewed

    @property
    def substituted(self) -> int:
        """Number of samples that this process has read in place of others that could not be read."""
        return self._reader.substituted

    def resident(self) -> Integers:
        """The slots with a sample, int64, in rising order. A slot whose sample is being replaced counts, too."""
        return np.flatnonzero(self._slots.have_samples(self.limit))

    def slots_by_index(self, length: int) -> tuple[Integers, Integers]:
        """The indices below `length` whose samples can be read, in rising order, and their slots; on a disk only."""
        column = self.layout.columns.get("index")
        if column is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        slots = self.readable_slots()
        indices, first = np.unique(column[slots], return_index=True)
        inside = slice(*np.searchsorted(indices, [0, length]))
        return indices[inside], slots[first[inside]]

    def begin_epoch(self) -> None:
        """Begin an epoch: samples that come from now on are newer than the epoch."""
        self._control[Control.EPOCH] = self._control[Control.APPENDED]

    # ---- size ----

    @property
    def appended(self) -> int:
        """Number of samples that came in this job, with the samples that are being written."""
        return int(self._control[Control.APPENDED] - self._control[Control.BEFORE])

    @property
    def found(self) -> int:
        """Number of samples of earlier jobs that this job has found."""
        return int(self._control[Control.FOUND])

    @property
    def evicted(self) -> int:
        """Number of samples that left for newer samples."""
        return int(self._control[Control.EVICTED])

    @property
    def limit(self) -> int:
        """Number of slots for which there is memory, as far as that is known."""
        return self._room.limit

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest sample that can be read; 0 without samples."""
        slots = self.readable_slots()
        return max(time.time_ns() - int(self.layout.columns["time"][slots].min()), 0) / 1e9 if len(slots) else 0.0

    @property
    def filled(self) -> int:
        """Number of slots with a sample."""
        return len(self.resident())

    @property
    def full(self) -> bool:
        """Whether every index gives a sample. One resident sample is enough, because it replaces any other."""
        return not self.closed and self.filled > 0

    @property
    def fill_fraction(self) -> float:
        """Share of the slots that have a sample."""
        return self.filled / max(self.limit, 1)

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room; of records, if the next are as large as those before."""
        if self.refuses or self.segment.is_locked(self.count):
            return max(self.filled, 1)
        return self._room.capacity(self.codec.nbytes)

    def close(self) -> None:
        """Close the store in this process."""
        super().close()
        if self._companion is not None:
            self._companion.close()

    def drop_views(self) -> None:
        """Stop using the segment, which stays open."""
        self._slots.close()
        self.draws.close()
        self._control = memoryview(b"")
        super().drop_views()

"""The policy of stores to which processes append while others read: the oldest samples leave first.

Every sample that is appended gets a ticket, the next number from 1 on, and the slots take turns. The state of a slot
(int64, its generation) says what the slot has:

    0                 nothing
    2 * ticket        the sample of that ticket can be read
    2 * ticket + 1    that sample is being written, or was dropped, or its writer was killed

A second column has the time of the last sample (nanoseconds of the wall clock, which goes on after a reboot), 0 if it
was dropped. Behind the words of every store lie control words, and how many samples each of `FILLERS` fillers has
drawn. A writer

    [turn: next slot, its byte locked, generation odd] > bytes written > fence > generation even > byte unlocked

and a reader looks at the generation, fences, copies, fences and looks again. If the generation is the same even number,
the copy is whole (a seqlock; Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005). Readers take no lock
and wait for no writer. What changed during the copy is copied again, and another slot is read in place of a slot that
is being written. So another sample replaces a sample that leaves during an epoch: all are draws from one source, and
the number of batches stays. Between the odd generation and the bytes is a system call, which no store instruction
crosses.

A slot that is still being written is never taken over: the next writer tries again. A killed writer leaves an odd
generation, which readers skip. The kernel frees its lock, and writers take that slot again when its turn comes.

Of rows, the first sample of a slot is written through the file, where a lack of memory is an error. Later samples are
copied through the mapping, whose pages exist by then: writes through the file exclude each other (two writers of rows
of 1 MiB reach 4.3 GB/s each through the file, and 10 GB/s through the mapping).

Records lie one behind the other in the run of bytes. A record that does not fit at the end begins at the beginning
again. A writer that takes a slot first ends the samples whose bytes it needs, the oldest first, in its turn. Records
are always written through the file, because the gap of a killed writer has no memory yet. A reader decodes its own
copy, never bytes that a writer may change.

On a disk the store outlives its job, and one job at a time has it open. The disk is mapped read-only: samples and
numbers are written through the file. A reader may see such a number when only some of its bytes are written, so the
last bit of a generation is set before the others are written and cleared after them, each time without a change of
another byte. Each slot also has the index of its sample in the source (-1: unknown) and a checksum (`checksums`), which
covers the ticket and the index, too. What this job has written is read at once. A sample of an earlier job has a ticket
up to `_BEFORE`: it is verified before its first read, and dropped if it is damaged. The process that opens the file
first (`repair`) finds the order of the samples from their columns alone, because after a power cut any page may be old.

When memory ends while the store grows, it stops growing, with one warning per node, and rolls within the memory that it
has. Where the system refuses a sample otherwise (a full disk that copies on write refuses each write), the writer goes
on as if it had been killed at that line: it releases the slot, warns once, and stores nothing for a while.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.checksums import Checksums
from lightning_stocache.cache.codec import Codec, Lend, Memory, aligned
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.head import ONCE, ROLLING, Head, is_complete
from lightning_stocache.cache.layout import Layout
from lightning_stocache.cache.layout_records import KNOWN, Records
from lightning_stocache.cache.layout_rows import Rows
from lightning_stocache.cache.medium import OnDisk
from lightning_stocache.cache.placement import Arc, Integers
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.shortage import refused
from lightning_stocache.cache.store import NO_PLACE, RETRY_SECONDS, Store, layout_of
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Numbers, Segment, fence

__all__ = ["FILLERS", "RollingStore"]

log = logging.getLogger(__name__)

FILLERS = 64
"""The most fillers of a store."""

# Control words. _APPENDED is the last ticket, _BEFORE the last of earlier jobs, _EPOCH the last when the epoch began.
# _MOST is how many slots, or bytes of records, the store may use; 0: all. _FOUND counts the samples that this job has
# found; _HOLES says whether a row may be empty whose turn is not next. _PLAN says what the fillers draw.
_CONTROL = range(ONCE.words, ONCE.words + 12)
_APPENDED, _NEXT, _MOST, _EVICTED, _EPOCH, _END, _TAIL, _LAPPED, _BEFORE, _FOUND, _HOLES, _PLAN = _CONTROL
_DRAWN = _CONTROL.stop
_HEAD = Head({"state": np.int64, "time": np.int64}, _DRAWN + FILLERS)
_LATEST = 1 << 60  # generations above are damaged

_MOST_TRIES = 1000  # then the writers are faster than any copy
_SMALLER = 4  # there are slots enough for records that are this much smaller than expected
_TOO_FAST = "a rolling cache is overwritten faster than it can be read: give it a larger budget, or fewer fillers"


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

    head = _HEAD
    stores_misses = False

    def __init__(self, segment: Segment, codec: Codec, arc: Arc, companion: Segment | None = None) -> None:
        super().__init__(segment, codec, arc, companion)
        layout, self.count = self.layout, arc.slots
        self._room = layout.end - layout.begin if isinstance(layout, Records) else self.count
        self.generations: npt.NDArray[np.int64] = layout.state
        """The state of each slot, int64 `[slots]`, to look at many; not to be written."""
        # To look at one, and to write it:
        self._states, self._words = layout.states, layout.numbers
        self._columns = {name: self._numbers_of(name) for name in layout.columns}
        self._written_here: set[tuple[int, int]] = set()  # process and slot, because a forked child inherits the set
        self.renewed = self.substituted = 0  # samples that were read: newer than the epoch; in place of others
        self._chance = np.random.default_rng()

    @property
    def checksums(self) -> Checksums:
        """The checksums of a store on a disk."""
        return cast(OnDisk, self._medium).checksums

    def _numbers_of(self, name: str) -> Numbers:
        """The numbers of a column, to look at one and to write it."""
        start = self.layout.offset_in(name, 0)
        kind = self.layout.columns[name].dtype.char
        return self.segment.numbers_at(start, self.count, cast(Any, kind))

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
        room = sys.maxsize if file_bytes is None else file_bytes - HEADER_BYTES - head.fixed_bytes
        if isinstance(codec, RecordCodec):
            granted, columns = min(granted, room), head.of_records
            return max(granted // (codec.nbytes // _SMALLER + columns.slot_bytes), 8), granted
        room -= aligned(1) * len(cast(Any, codec).row_bytes) + 1  # alignment, and the last byte
        return min(count, max(room, 0) // cls.slot_bytes(codec, on_disk=file_bytes is not None)), granted

    @classmethod
    def slot_bytes(cls, codec: Codec, *, on_disk: bool = False) -> int:
        """Bytes of a sample with its columns; of records, of a sample of the expected size."""
        head = cls._head(on_disk)
        if isinstance(codec, RecordCodec):
            return aligned(codec.nbytes) + head.of_records.slot_bytes
        return codec.nbytes + head.slot_bytes

    @classmethod
    def _head(cls, on_disk: bool) -> Head:
        """On a disk also the checksum of a sample, its index in the source, and whether this job has verified it."""
        return cls.head.plus({"sum": np.uint64, "index": np.int64, "verified": np.uint8}) if on_disk else cls.head

    @classmethod
    def _in_segment(cls, segment: Segment, codec: Codec, arc: Arc) -> Store:
        """Open the store in a segment, and reserve its columns, on a disk, too: then there is room for its numbers."""
        segment.reserve(0, layout_of(codec).reserved_bytes(arc.slots, cls._head(segment.on_disk)))
        return cls(segment, codec, arc)

    @staticmethod
    def _identity(layout: Layout, arc: Arc, slot: int) -> tuple[int, ...]:
        """The ticket of a slot's sample, which may still be written, and its index."""
        return int(layout.states[slot]) >> 1, int(layout.columns["index"][slot])

    # ---- after a crash ----

    def repair(self) -> None:
        """Find the samples of earlier jobs, and their order, while no other process has the store open.

        Verifies the newest sample, and of records each that does not end where the next one begins. The others are
        verified when they are read. All tickets to come are larger than any sound ticket in the file.
        """
        columns = self.layout.columns
        states = self.generations.copy()
        is_sound = self.checksums.is_sound
        slots = np.flatnonzero(is_complete(states) & (states <= _LATEST))
        newest_first = slots[np.argsort(states[slots])[::-1]].tolist()
        found = list(itertools.dropwhile(lambda slot: not is_sound(slot), newest_first))
        latest = (int(states[found[0]]) if found else 0) + 2 * self.count + 2  # later generations are damaged
        last = int(states[states <= latest].max(initial=0)) // 2
        if isinstance(self.layout, Records):
            found, words = self._in_run(found, is_sound)
        else:
            words = self._turn_of_rows(found)
        words |= {_APPENDED: last, _EPOCH: last, _BEFORE: last, _FOUND: len(found)}
        is_found = np.zeros(self.count, dtype=np.bool_)
        is_found[found] = True
        times = columns["time"]
        now = time.time_ns()
        self._rewrite("state", states * is_found)
        self._rewrite("time", np.where((times > 0) & (times <= now), times, now) * is_found)
        self._rewrite("verified", np.zeros_like(columns["verified"]))
        if isinstance(self.layout, Records):
            self._rewrite("nbytes", columns["nbytes"] * is_found)
        for word in _CONTROL:
            if word != _PLAN:
                self._words[word] = words.get(word, 0)

    def _rewrite(self, name: str, numbers: npt.NDArray[Any]) -> None:
        """Write a column, if it differs. Killed in it, a process leaves old and new numbers, which mend again."""
        if not np.array_equal(self.layout.columns[name], numbers):
            self.segment.store(self.layout.offset_in(name, 0), numbers.data.cast("B"))

    def _turn_of_rows(self, newest_first: Sequence[int]) -> dict[int, int]:
        """The control words that say which slot is next, given the slots with rows."""
        newest = newest_first[0] if newest_first else -1
        is_full = (newest + 1) % self.count in newest_first  # up to the oldest sample
        return {
            _NEXT: newest_first[-1] if is_full else newest + 1,
            _LAPPED: is_full or max(newest_first, default=-1) > newest,
            _HOLES: len(newest_first) < self.count,
        }

    def _in_run(self, newest_first: Sequence[int], is_sound: Callable[[int], bool]) -> tuple[list[int], dict[int, int]]:
        """The records that lie one before the other in the run, and whose slots do, so that no two overlap.

        From the newest on, first the records before it, then those above it, which the run has not reached again:

            begin of the run | older <- older <- newest | free | oldest <- older <- older | end of the run
                           floor                low    top   then floor                 low

        Returns:
            The slots of these records, newest first, and the control words from which the next writer goes on.
        """
        begins = self.layout.columns["begin"]
        sizes = self.layout.columns["nbytes"]
        start = self.layout.begin
        found: list[int] = []
        low = top = floor = start
        for slot in newest_first:
            begin = int(begins[slot])
            end = begin + aligned(int(sizes[slot]))
            if not found:
                found.append(slot)
                low, top = begin, end
                continue
            is_above = floor == start and begin >= top
            is_before = floor <= begin <= end <= low
            is_next = is_before and end == low
            is_later_slot = (found[0] - slot) % self.count <= (found[0] - found[-1]) % self.count  # a damaged ticket
            if is_later_slot or not (is_next or ((is_before or is_above) and is_sound(slot))):
                continue
            found.append(slot)
            low = begin
            if is_above:
                floor = top
        if not found:
            return found, {}
        following = found[0] + 1 + self.count
        words = {
            _NEXT: following,
            _TAIL: following - 1 - (found[0] - found[-1]) % self.count,
            _END: top - start,
            _LAPPED: floor == top,
        }
        return found, words

    # ---- storing ----

    def append(self, sample: Any, index: int = -1) -> bool:
        """Check a sample, and replace the oldest sample by it.

        Returns False if it is not stored, because its slot is being written, or because the system refuses to store
        samples for a while (`refuses`).

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
        is_stored = False
        try:
            while not (is_stored or self.refuses):
                slot = self.take(self.layout.size(contents))
                if slot is None:
                    break
                is_stored = self._store_in(slot, contents, index)
        except OSError as error:
            if not self.filled:
                raise
            self._stop(refused(error, on_disk=self.segment.on_disk))
        return is_stored

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

        Returns None if a writer has the slot, or the turn is not to be had.
        """
        if isinstance(self.layout, Records) and aligned(nbytes) > self._most:
            room, sample = format_bytes(self._most), format_bytes(nbytes)
            raise ValueError(f"a sample of {sample} is larger than the whole rolling cache of {room}")
        return self.segment.in_turn(self._take, nbytes)

    def _take(self, nbytes: int) -> int | None:
        words = self._words
        turn = words[_NEXT] % max(self.limit, 1)
        slot = self._chosen_slot(turn)
        if (os.getpid(), slot) in self._written_here or not self.segment.lock(slot):
            return None
        is_taken = False
        try:
            if isinstance(self.layout, Records):
                if not self._make_room(slot, nbytes):
                    return None
            elif slot == 0 and words[_NEXT]:
                words[_LAPPED] = 1
            if slot == turn:
                words[_NEXT] += 1
            if is_complete(self._states[slot]):
                words[_EVICTED] += 1
            ticket = words[_APPENDED] + 1
            words[_APPENDED] = ticket
            self._states[slot] |= 1  # before the rest of the number
            self._states[slot] = 2 * ticket + 1
            self._written_here.add((os.getpid(), slot))
            is_taken = True
        finally:
            if not is_taken:
                self.segment.unlock(slot)
        return slot

    def _chosen_slot(self, turn: int) -> int:
        """The slot whose turn is next. If that slot has a sample and a row is empty: the empty row."""
        words = self._words
        if words[_HOLES] and isinstance(self.layout, Rows) and is_complete(self._states[turn]):
            is_empty = ~is_complete(self.generations[: self.limit]) & (self.layout.columns["time"][: self.limit] == 0)
            holes = np.flatnonzero(is_empty).tolist()
            if not holes:
                words[_HOLES] = 0
            return next(itertools.filterfalse(self._is_being_written, holes), turn)
        return turn

    def _is_being_written(self, slot: int) -> bool:
        """Whether a living writer has a slot: another thread of this process, or another process."""
        return (os.getpid(), slot) in self._written_here or self.segment.is_locked(slot)

    def _drop(self, slot: int) -> None:
        """Let no reader find the sample of a slot any more."""
        self._states[slot] |= 1
        self._columns["time"][slot] = 0

    def finish(self, slot: int, *, is_whole: bool = True) -> None:
        """Release a slot. Readers may read its sample, if `is_whole`; else the sample is dropped."""
        try:
            if is_whole:
                self._columns["time"][slot] = time.time_ns()
                fence()
                self._states[slot] &= ~1
            else:
                with suppress(OSError):  # as if the writer had been killed
                    self._drop(slot)
        finally:
            self.segment.unlock(slot)  # first: else another thread could take the slot, and lose its lock
            self._written_here.discard((os.getpid(), slot))

    def _write_sample(self, slot: int, contents: Sequence[memoryview], index: int) -> str | None:
        """Write a sample. If memory is short while the store grows, return the reason in words."""
        layout, grows = self.layout, not self._words[_LAPPED]
        if (
            isinstance(layout, Rows) and layout.columns["time"][slot] and not self.segment.on_disk
        ):  # it had a sample before
            for rows, content in zip(layout.fields, contents, strict=True):
                rows[slot] = np.frombuffer(content, dtype=np.uint8)
            return None
        if grows:  # afterwards the store takes no more memory
            short = self._shortage.comes_with(layout.size(contents))
            if short is not None:
                return short
        try:
            if self.segment.on_disk:
                self._columns["index"][slot] = index
            if isinstance(layout, Rows):
                layout.write([slot], [contents])
            else:
                begin = layout.begin_of(slot)
                self.segment.store(begin, *contents)
                layout.seal(slot, begin, layout.size(contents), contents)
        except OSError as error:
            if not grows:
                with suppress(OSError):
                    self._words[_HOLES] = 1  # the next sample comes here, and no other leaves for it
                raise
            return refused(error, on_disk=self.segment.on_disk)
        return None

    def _stop_growing(self, slot: int, short: str) -> None:
        """From now on, use only the slots, or the bytes, before those of a slot. Warn once per node."""
        rows = isinstance(self.layout, Rows)
        used = slot if rows else self._columns["begin"][slot] - self.layout.begin
        if not used:
            needed = format_bytes(self.codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")

        def limit() -> None:
            if used < self._most:
                self._words[_MOST] = used
                if rows:
                    self._words[_NEXT] = 0
                    self._words[_LAPPED] = 1

        self.segment.in_turn(limit)
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
        """Whether nothing is stored for a while, because the system has just refused a sample."""
        return self._rests

    # ---- room for records ----

    def _make_room(self, slot: int, nbytes: int) -> bool:
        """Find bytes for the record of a slot, and end the samples that lie there. In a turn."""
        words, need = self._words, aligned(nbytes)
        begin, size = words[_END], self._most
        if need > size:
            return False
        if begin + need > size:
            if not self._free(begin, max(size, begin), slot):
                return False
            begin = words[_END] = 0
            words[_LAPPED] = 1
        if not self._free(begin, begin + need, slot):
            return False
        if self._live == self.count and not self._end_oldest(slot):  # the oldest sample is in this very slot
            return False
        self._columns["begin"][slot] = self.layout.begin + begin
        self._columns["nbytes"][slot] = nbytes
        words[_END] = begin + need
        return True

    def _free(self, begin: int, end: int, slot: int) -> bool:
        """End the oldest samples until no sample lies in these bytes, or behind the end of the run."""
        begins, sizes = self._columns["begin"], self._columns["nbytes"]
        while self._live:
            oldest = self._words[_TAIL] % self.count
            first = begins[oldest] - self.layout.begin
            last = first + aligned(sizes[oldest])
            is_outside = first >= end or last <= begin
            if sizes[oldest] and is_outside and last <= self._most:
                return True
            if not self._end_oldest(slot):
                return False
        return True

    def _end_oldest(self, mine: int) -> bool:
        """Drop the oldest sample. Returns False if a writer of another slot than `mine` is still writing it."""
        slot = self._words[_TAIL] % self.count
        generation = self._states[slot]
        if generation & 1 and slot != mine and self._is_being_written(slot):
            return False
        if is_complete(generation):
            self._words[_EVICTED] += 1
        self._drop(slot)
        self._words[_TAIL] += 1
        return True

    @property
    def _live(self) -> int:
        """Number of slots with bytes. It follows from two counts, because a writer may be killed between two steps."""
        return int(self._words[_NEXT] - self._words[_TAIL])

    # ---- reading ----

    def has_place(self, index: int) -> bool:
        """Whether there is a slot with this number."""
        return 0 <= index < self.count

    def place(self, index: int, *, verify: bool = False) -> int:
        """The slot with this number, whatever sample it has; NO_PLACE without such a slot."""
        return index if self.has_place(index) else NO_PLACE

    def lookup(self, indices: Integers, *, verify: bool = False) -> Integers:
        """The slots with these numbers, int64 `[samples]`, whatever samples they have; NO_PLACE without such a slot."""
        return np.where((indices >= 0) & (indices < self.count), indices, NO_PLACE)

    def gather(self, places: Integers, into: Memory, pool: GatherPool = ALONE) -> None:
        """Copy whole rows into the memory of a batch, without waiting for writers."""
        rows: Any = self.layout
        slots, seen = self._whole(places)
        rows.gather(slots, into, pool)
        fence()
        torn = np.flatnonzero(self.generations.take(slots) != seen)
        for _ in range(_MOST_TRIES):
            if not len(torn):
                break
            again, generations = self._whole(slots[torn])
            for fields, memory in zip(rows.fields, into, strict=True):
                memory.reshape(len(slots), fields.shape[1])[torn] = fields[again]
            fence()
            seen[torn] = generations
            torn = torn[self.generations.take(again) != generations]
        else:
            raise RuntimeError(_TOO_FAST)
        self.renewed += self._count_newer(seen)

    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copy whole samples from these slots, or from others. Records are copied as the caller iterates."""
        if isinstance(self.layout, Rows):
            sizes = self.codec.sizes(len(places))
            memory = [np.empty(size, np.uint8) for size in sizes] if lend is None else lend(sizes)
            self.gather(places, memory)
            return cast(Iterable[Any], self.codec.split(memory, len(places)))
        return (self.codec.decode(self._record(place), lend) for place in places.tolist())

    def _record(self, place: int) -> memoryview:
        """Copy a whole record from this slot, or from another resident slot."""
        records: Any = self.layout
        for _ in range(_MOST_TRIES):
            seen = self._states[place]
            if is_complete(seen) and (not self.segment.on_disk or self.is_sound(place)):
                fence()
                live = records.record(place)
                fence()
                if self._states[place] == seen:  # then begin and size belong to that generation
                    record = memoryview(bytes(live))
                    fence()
                    if self._states[place] == seen:
                        self.renewed += self._count_newer(np.array([seen]))
                        return record
            place = int(self._random_slots(1)[0])
            self.substituted += 1
        raise RuntimeError(_TOO_FAST)

    def readable_slots(self) -> Integers:
        """The slots that can be read now, int64."""
        return np.flatnonzero(is_complete(self.generations[: self.limit]))

    def resident(self) -> Integers:
        """The slots with a sample, int64, in rising order. A slot whose sample is being replaced counts, too."""
        generations = self.generations[: self.limit].copy()  # one look, because generations change meanwhile
        is_replaced = (generations & 1 == 1) & (self.layout.columns["time"][: self.limit] > 0)
        resident: Integers = np.flatnonzero(is_complete(generations) | is_replaced)
        return resident

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read. A damaged sample of an earlier job is dropped."""
        generation = self._states[slot]
        if not self.segment.on_disk or generation > 2 * self._words[_BEFORE] or not is_complete(generation):
            return bool(is_complete(generation))
        verified = self._columns["verified"]
        if verified[slot]:
            return True
        is_sound = self.checksums.is_sound(slot)
        with suppress(OSError):  # a full disk: it is verified again
            if is_sound:
                verified[slot] = 1  # right for a newer sample of the slot, too: this job has written it
            else:
                self.segment.in_turn(self._drop_damaged, slot, generation)
        return is_sound

    def _drop_damaged(self, slot: int, generation: int) -> None:
        """In a turn: drop a damaged sample, unless another one has its slot by now."""
        if self._states[slot] == generation:
            self._drop(slot)
            self._words[_HOLES] = 1

    def slots_by_index(self, length: int) -> Integers:
        """The slot of each index of a source, int64 `[length]`, or NO_PLACE; known on a disk only."""
        found, slots = np.full(length, NO_PLACE, dtype=np.int64), self.readable_slots()
        if (column := self.layout.columns.get("index")) is not None:
            indices = column[slots]
            is_inside = (indices >= 0) & (indices < length)
            found[indices[is_inside]] = slots[is_inside]
        return found

    def begin_epoch(self) -> None:
        """Begin an epoch: samples that come from now on are newer than the epoch."""
        with suppress(OSError):  # a full disk: only `renewed` is wrong
            self._words[_EPOCH] = self._words[_APPENDED]

    def _count_newer(self, generations: Integers) -> int:
        """Number of samples that came after the epoch had begun."""
        return int(np.count_nonzero(generations > 2 * self._words[_EPOCH]))

    def _whole(self, slots: Integers) -> tuple[Integers, Integers]:
        """These slots, with readable slots in place of those that cannot be read now, and their generations."""
        generations = self.generations.take(slots)
        whole = self._are_sound(slots, generations)
        if not whole.all():
            slots = slots.copy()
            while len(missing := np.flatnonzero(~whole)):
                slots[missing] = self._random_slots(len(missing))
                generations[missing] = self.generations.take(slots[missing])
                whole = self._are_sound(slots, generations)
                self.substituted += len(missing)
        fence()
        return slots, generations

    def _are_sound(self, slots: Integers, generations: Integers) -> npt.NDArray[np.bool_]:
        """Which of these slots, with these generations, have a sample that can be read."""
        sound: npt.NDArray[np.bool_] = is_complete(generations)
        if self.segment.on_disk:
            found = sound & (generations <= 2 * self._words[_BEFORE])
            for number in np.flatnonzero(found & (self.layout.columns["verified"].take(slots) == 0)).tolist():
                sound[number] = self.is_sound(int(slots[number]))
        return sound

    def _random_slots(self, count: int) -> Integers:
        """Random slots that can be read now."""
        # A few random slots: a look at a hundred thousand slots takes half a millisecond.
        slots = self._chance.integers(0, self.count, 64 + 8 * count)
        slots = slots[is_complete(self.generations.take(slots))]
        if len(slots) < count:
            for seconds in poll(pause=0.001):
                if len(slots := self.readable_slots()):
                    break
                if seconds or not self.appended + self.found:  # at first, writers may have all slots
                    raise RuntimeError(
                        "the rolling cache is empty: no sample has been appended yet, or all are being written"
                    )
            slots = slots[self._chance.integers(0, len(slots), count)]
        return slots[:count]

    # ---- size ----

    @property
    def appended(self) -> int:
        """Number of samples that came in this job, with the samples that are being written."""
        return int(self._words[_APPENDED] - self._words[_BEFORE])

    @property
    def found(self) -> int:
        """Number of samples of earlier jobs that this job has found."""
        return int(self._words[_FOUND])

    @property
    def evicted(self) -> int:
        """Number of samples that left for newer samples."""
        return int(self._words[_EVICTED])

    @property
    def limit(self) -> int:
        """Number of slots for which there is memory, as far as that is known."""
        return self._most if isinstance(self.layout, Rows) else self.count

    @property
    def _most(self) -> int:
        """Number of slots, or bytes of records, that the store may use."""
        return int(self._words[_MOST]) or self._room

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
        if isinstance(self.layout, Rows):
            return self.limit
        live = self._live
        if live and self._words[_LAPPED]:
            return live
        mean = self._words[_END] / live if live >= KNOWN else aligned(max(self.codec.nbytes, 1))
        return max(min(int(self._most / max(mean, 1)), self.count), 1)

    # ---- fillers ----

    def plan_draws(self, plan: int, *, goes_on: bool) -> bool:
        """Note the plan of the fillers' draws. The counts of the last job stay only if its plan is equal and `goes_on`.

        Args:
            plan: a digest of everything that decides the draws.
            goes_on: whether the fillers go on behind the draws of the last job.

        Returns:
            Whether the fillers cannot go on, because the last job had another plan.
        """
        words = self._words
        is_equal = words[_PLAN] == plan
        is_other = goes_on and not is_equal and words[_PLAN] != 0
        with suppress(OSError):  # a full disk
            if not (goes_on and is_equal):
                for filler in filter(self.drawn, range(FILLERS)):
                    words[_DRAWN + filler] = 0
            words[_PLAN] = plan
        return is_other

    def drawn(self, filler: int) -> int:
        """The number of samples that a filler has drawn; of a stream, since its beginning."""
        return int(self._words[_DRAWN + filler])

    def note_drawn(self, filler: int, count: int) -> None:
        """Note how many samples a filler has drawn, on a disk for the next job, too."""
        with suppress(OSError):  # a full disk: some are drawn again
            self._words[_DRAWN + filler] = count

    def drop_views(self) -> None:
        """Stop using the segment, which stays open."""
        self.generations = np.empty(0, dtype=np.int64)
        self._states = self._words = memoryview(b"")
        self._columns = {}
        super().drop_views()

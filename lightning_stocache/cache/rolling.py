"""The policy of stores to which processes append while others read: the oldest samples leave first.

Every sample that is appended gets a ticket, the next number, and the slots take turns. The state of a slot (int64, its
generation) says what the slot has: 0 nothing; `2 * ticket + 1` the sample of that ticket is being written; `2 * ticket
+ 2` the sample can be read; a negative number: the sample was dropped. A second column has the time of the sample
(nanoseconds of the wall clock, which goes on after a reboot). The words of the layout are control words, then a row of
notes for each of `FILLERS` processes, which define their notes themselves. A writer

    takes the lock of the tickets -> claims the next slot -> generation odd -> releases the lock of the tickets
    -> writes the bytes -> fence -> generation even -> releases the slot

and a reader looks at the generation, fences, copies, fences and looks again. If the generation is the same even number,
the copy is whole (a seqlock; Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005). Readers take no lock
and wait for no writer. What changed during the copy is copied again, and another slot is read in place of a slot that
is being written. So another sample replaces a sample that leaves during an epoch: all are draws from one source, and
the number of batches stays. Between the odd generation and the bytes is a system call, which no store instruction
crosses.

A slot that is still being written is never taken over: the next writer waits. A killed writer leaves an odd generation,
which readers skip. The kernel frees its lock, and writers take that slot again when its turn comes.

Of rows, the first sample of a slot is written through the file, where a lack of memory is an error. Later samples are
copied through the mapping, whose pages exist by then: writes through the file exclude each other (two writers of rows
of 1 MiB reach 4.3 GB/s each through the file, and 10 GB/s through the mapping).

Records lie one behind the other in the run of bytes. A record that does not fit at the end begins at the beginning
again. A writer that takes a slot first ends the samples whose bytes it needs, the oldest first, under the lock of the
tickets. Records are always written through the file, because the gap of a killed writer has no memory yet. A reader
decodes its own copy, never bytes that a writer may change.

On a disk the store outlives its job, and one job at a time has it open. All samples are written through the file, the
numbers of slots through the mapping (which is a SIGBUS on a full disk that copies on write). Each
slot also has the index of its sample in the source (-1: unknown) and a checksum (`checksums`), which covers the ticket
and the index, too. What this job has written is read at once. A sample of an earlier job has a smaller ticket than
`_FIRST`: it is verified before its first read, and dropped if it is damaged. The process that opens the file first
(`repair`) finds the order of the samples from their columns alone, because after a power cut any page may be old.

When memory ends, the store stops growing, with one warning per node, and rolls within the memory that it has.
"""

from __future__ import annotations

import errno
import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import dropwhile
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.checksums import Checksums
from lightning_stocache.cache.codec import Lend, Memory, aligned
from lightning_stocache.cache.gather_pool import ALONE, GatherPool
from lightning_stocache.cache.layout import KNOWN, ROLLING, Head, Layout, Records, Rows, is_complete
from lightning_stocache.cache.placement import Arc, Integers
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.shortage import refused
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Segment, fence

__all__ = ["FILLERS", "RollingStore"]

log = logging.getLogger(__name__)

FILLERS = 64
"""The most processes that have notes in a store."""

_CONTROL, _NOTES = 64, 8
# Control words. _FIRST is the first ticket of this job; _FOUND counts the samples that this job has found; _HOLES says
# whether a row may be empty whose turn is not next.
_APPENDED, _NEXT, _MOST, _EVICTED, _EPOCH, _END, _TAIL, _LAPPED, _FIRST, _FOUND, _HOLES = range(1, 12)
_HEAD = Head({"state": np.int64, "time": np.int64}, _CONTROL + FILLERS * _NOTES)
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

    def __init__(self, segment: Segment, codec: SampleCodec, arc: Arc, companion: Segment | None = None) -> None:
        if segment.on_disk:
            segment.map_writable()
        super().__init__(segment, codec, arc, companion)
        layout, self.count = self.layout, arc.slots
        self._room = layout.end - layout.begin if isinstance(layout, Records) else self.count
        self.generations: npt.NDArray[np.int64] = layout.state
        self._times, self._words = layout.columns["time"], layout.words[:_CONTROL]
        self.notes = layout.words[_CONTROL:].reshape(FILLERS, _NOTES)
        if not self._words[_MOST]:
            self._words[_MOST] = self._room
        self.renewed = self.substituted = 0  # samples that were read: newer than the epoch; in place of others
        self._chance = np.random.default_rng()

    @classmethod
    def empty(
        cls,
        codec: SampleCodec,
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
    def fit(
        cls, codec: SampleCodec, count: int = 0, granted: int = 0, file_bytes: int | None = None
    ) -> tuple[int, int]:
        """The number of slots, and the bytes for records, of a store. Arguments as in `empty`.

        `file_bytes` limits the whole file on a disk; None: the store lies in memory.
        """
        head = cls._head(file_bytes is not None)
        room = sys.maxsize if file_bytes is None else file_bytes - HEADER_BYTES - head.fixed_bytes
        if isinstance(codec, RecordCodec):
            granted, columns = min(granted, room), head.of_records
            return max(granted // (codec.nbytes // _SMALLER + columns.slot_bytes), 8), granted
        room -= aligned(1) * len(codec.row_bytes) + 1  # wasted by alignment, and the byte that no write reaches
        return min(count, max(room, 0) // cls.slot_bytes(codec, on_disk=file_bytes is not None)), granted

    @classmethod
    def slot_bytes(cls, codec: SampleCodec, *, on_disk: bool = False) -> int:
        """Bytes of a sample with its columns; of records, of a sample of the expected size."""
        head = cls._head(on_disk)
        if isinstance(codec, RecordCodec):
            return aligned(codec.nbytes) + head.of_records.slot_bytes
        return codec.nbytes + head.slot_bytes

    @classmethod
    def _head(cls, on_disk: bool) -> Head:
        """On a disk also the checksum of a sample, its index in the source, and whether this job has verified it."""
        return cls.head.plus({"sum": np.uint64, "index": np.int64, "verified": np.uint8}) if on_disk else cls.head

    @staticmethod
    def _identity(layout: Layout, arc: Arc, slot: int) -> tuple[int, ...]:
        """The ticket of a slot's sample, which may still be written, and its index."""
        return (int(layout.state[slot]) - 1) // 2, int(layout.columns["index"][slot])

    # ---- after a crash ----

    def repair(self) -> None:
        """Find the samples of earlier jobs, and their order, while no other process has the store open.

        Verifies the newest sample, and of records each that does not end where the next one begins. The others are
        verified when they are read. All tickets to come are larger than any sound ticket in the file.
        """
        layout, words, states = self.layout, self._words, self.generations
        tickets, is_sound = np.abs(states), cast(Checksums, self._checksums).is_sound
        slots = np.flatnonzero(is_complete(states) & (states <= _LATEST))
        newest_first = slots[np.argsort(states[slots])[::-1]].tolist()
        found = list(dropwhile(lambda slot: not is_sound(slot), newest_first))
        latest = (int(states[found[0]]) if found else 0) + 2 * self.count + 2  # later generations are damaged
        first = int(tickets[tickets <= latest].max(initial=0)) // 2 + 1
        words[:] = 0
        layout.columns["verified"][:] = 0
        words[[_APPENDED, _EPOCH, _FIRST]], words[_MOST] = first, self._room
        if isinstance(layout, Records):
            found = self._in_run(found, is_sound)
            for column in layout.columns.values():  # the oldest record gets the first slot
                column[: len(found)] = column[found[::-1]]
                column[len(found) :] = 0
            words[_NEXT] = len(found)
        else:
            states[np.setdiff1d(np.arange(self.count), found)] = 0
            newest = found[0] if found else -1
            is_full = bool(states[(newest + 1) % self.count])  # up to the oldest sample
            words[_NEXT] = found[-1] if is_full else newest + 1
            words[_LAPPED], words[_HOLES] = is_full or max(found, default=-1) > newest, len(found) < self.count
        words[_FOUND], now = len(found), time.time_ns()
        self._times[:] = np.where((self._times > 0) & (self._times <= now), self._times, now) * (states > 0)

    def _in_run(self, newest_first: Sequence[int], is_sound: Callable[[int], bool]) -> list[int]:
        """The records that lie one before the other in the run, from the newest on, so that no two overlap."""
        begins, sizes, words = self.layout.columns["begin"], self.layout.columns["nbytes"], self._words
        found: list[int] = []
        low = top = floor = self.layout.begin
        for slot in newest_first:
            begin = int(begins[slot])
            end = begin + aligned(int(sizes[slot]))
            laps = floor < top <= begin  # written before the run began at its beginning again
            is_next, may_be_next = floor <= begin and end == low, laps or floor <= begin <= end <= low
            if not found:
                top = end
            elif not is_next and not (may_be_next and is_sound(slot)):
                continue
            low, floor = begin, top if laps else floor
            found.append(slot)
        words[_END], words[_LAPPED] = top - self.layout.begin, floor == top > self.layout.begin
        return found

    # ---- storing ----

    def append(self, sample: Any, index: int = -1) -> bool:
        """Check a sample, and replace the oldest sample by it. Returns False while that slot is being written.

        Args:
            sample: matches the codec.
            index: of the sample in its source, for messages, and on a disk for the next job; -1 without one.

        Raises:
            SampleMismatchError: the sample does not match the codec.
            ValueError: the sample is larger than the whole store.
            OSError: there is no memory for a single sample.
        """
        contents = self.codec.contents(self.codec.encode(sample, None if index < 0 else index))
        while (slot := self.take(self.layout.size(contents))) is not None:
            try:
                short = self._write_sample(slot, contents, index)
            except BaseException:
                self.finish(slot, is_whole=False)
                raise
            if short is None:
                self.finish(slot)
                return True
            self._stop_growing(slot, short)
        return False

    def take(self, nbytes: int = 0) -> int | None:
        """Take the next slot, with room for a record of `nbytes`, until `finish`. None if a writer has the slot."""
        words, rows = self._words, isinstance(self.layout, Rows)
        if not rows and aligned(nbytes) > words[_MOST]:
            room, sample = format_bytes(int(words[_MOST])), format_bytes(nbytes)
            raise ValueError(f"a sample of {sample} is larger than the whole rolling cache of {room}")
        with self._claims.waiting(self.count):
            slot = turn = int(words[_NEXT]) % max(self.limit, 1)
            if words[_HOLES] and rows and is_complete(int(self.generations[slot])):
                holes = np.flatnonzero(self.generations[: self.limit] <= 0)
                slot, words[_HOLES] = (int(holes[0]), 1) if len(holes) else (slot, 0)
            if not self._claims.take(slot):
                return None
            if rows and slot == 0 and words[_NEXT]:
                words[_LAPPED] = 1
            if not rows and not self._make_room(slot, nbytes):
                self._claims.release(slot)
                return None
            words[_NEXT] += slot == turn
            ticket = int(words[_APPENDED])
            words[_EVICTED] += is_complete(int(self.generations[slot]))
            words[_APPENDED] += 1
            self.generations[slot] = 2 * ticket + 1
        return slot

    def finish(self, slot: int, *, is_whole: bool = True) -> None:
        """Release a slot. Readers may read its sample, if `is_whole`; else the sample is dropped."""
        generation = int(self.generations[slot]) + 1
        if is_whole:
            self._times[slot] = time.time_ns()
        fence()
        self.generations[slot] = generation if is_whole else -generation
        self._claims.release(slot)

    def _write_sample(self, slot: int, contents: Sequence[memoryview], index: int) -> str | None:
        """Write a sample. If memory is short, return the reason in words."""
        layout, checksums, grows = self.layout, self._checksums, not self._words[_LAPPED]
        if isinstance(layout, Rows) and self._times[slot] and checksums is None:  # it had a sample before
            for rows, content in zip(layout.fields, contents, strict=True):
                rows[slot] = np.frombuffer(content, dtype=np.uint8)
            return None
        if grows:  # afterwards the store takes no more memory
            short = self._shortage.comes_with(layout.size(contents))
            if short is not None:
                return short
        try:
            if checksums is not None:
                layout.columns["index"][slot] = index
            if isinstance(layout, Rows):
                layout.write([slot], [contents])
            else:
                begin = layout.begin_of(slot)
                self.segment.store(begin, *contents)
                layout.seal(slot, begin, layout.size(contents), contents)
        except OSError as error:
            if checksums is not None and not grows:
                raise
            return refused(error, on_disk=checksums is not None)
        return None

    def _stop_growing(self, slot: int, short: str) -> None:
        """From now on, roll within the slots or bytes that are in use. Warn once per node."""
        layout, rows = self.layout, isinstance(self.layout, Rows)
        used = slot if rows else int(layout.columns["begin"][slot]) - layout.begin
        if used:
            with self._claims.waiting(self.count):
                if used < self._words[_MOST]:
                    self._words[_MOST] = used
                    if rows:
                        self._words[_NEXT], self._words[_LAPPED] = 0, 1
        self.finish(slot, is_whole=False)
        if not used:
            needed = format_bytes(self.codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")
        if self.segment.lock(self.count + 1):  # this process keeps the lock until it ends
            log.warning(
                "the rolling cache stops growing at %s samples: %s.\nIt rolls within these. A lower budget has no such "
                "warning",
                f"{self.filled:,}",
                short,
            )

    # ---- room for records ----

    def _make_room(self, slot: int, nbytes: int) -> bool:
        """Find bytes for the record of a slot, and end the samples that lie there. Needs the lock of the tickets."""
        words, need = self._words, aligned(nbytes)
        begin, size = int(words[_END]), int(words[_MOST])
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
        columns = self.layout.columns
        columns["begin"][slot], columns["nbytes"][slot] = self.layout.begin + begin, nbytes
        words[_END] = begin + need
        return True

    def _free(self, begin: int, end: int, slot: int) -> bool:
        """End the oldest samples until no sample lies in these bytes, or behind the end of the run."""
        columns = self.layout.columns
        while self._live:
            oldest = int(self._words[_TAIL]) % self.count
            first = int(columns["begin"][oldest]) - self.layout.begin
            last = first + aligned(int(columns["nbytes"][oldest]))
            if (first >= end or last <= begin) and last <= int(self._words[_MOST]):
                return True
            if not self._end_oldest(slot):
                return False
        return True

    def _end_oldest(self, mine: int) -> bool:
        """Drop the oldest sample. Returns False if a writer of another slot than `mine` is still writing it."""
        slot = int(self._words[_TAIL]) % self.count
        generation = int(self.generations[slot])
        if generation & 1 and slot != mine:
            if not self._claims.take(slot):
                return False
            self._claims.release(slot)  # the writer was killed
        self._words[_EVICTED] += is_complete(generation)
        self.generations[slot] = -abs(generation) & ~1
        self._times[slot] = 0
        self._words[_TAIL] += 1
        return True

    @property
    def _live(self) -> int:
        """Number of slots with bytes. It follows from two counts, because a writer may be killed between two steps."""
        return int(self._words[_NEXT]) - int(self._words[_TAIL])

    # ---- reading ----

    @property
    def changes(self) -> int:
        """Always 0: no sample is ever invalidated."""
        return 0

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
            return super().read(places, lend)
        return (self.codec.decode(self._record(place), lend) for place in places.tolist())

    def _record(self, place: int) -> memoryview:
        """Copy a whole record from this slot, or from another resident slot."""
        records: Any = self.layout
        for _ in range(_MOST_TRIES):
            seen = int(self.generations[place])
            if is_complete(seen) and (self._checksums is None or self.is_sound(place)):
                fence()
                live = records.record(place)
                fence()
                if int(self.generations[place]) == seen:  # then begin and size belong to that generation
                    record = memoryview(bytes(live))
                    fence()
                    if int(self.generations[place]) == seen:
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
        is_replaced = (generations & 1 == 1) & (self._times[: self.limit] > 0)
        resident: Integers = np.flatnonzero(is_complete(generations) | is_replaced)
        return resident

    def is_sound(self, slot: int) -> bool:
        """Whether the sample of a slot can be read. A damaged sample of an earlier job is dropped."""
        generation, checksums = int(self.generations[slot]), self._checksums
        if checksums is None or generation > 2 * self._words[_FIRST] or not is_complete(generation):
            return bool(is_complete(generation))
        verified = self.layout.columns["verified"]
        if verified[slot] or checksums.is_sound(slot):
            verified[slot] = 1  # also right if another sample has come meanwhile: this job has written it
            return True
        if self._claims.take(slot):
            if self.generations[slot] == generation:
                self.generations[slot], self._words[_HOLES] = -generation, 1
            self._claims.release(slot)
        return False

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
        self._words[_EPOCH] = self._words[_APPENDED]

    def _count_newer(self, generations: Integers) -> int:
        """Number of samples that came after the epoch had begun."""
        return int(np.count_nonzero(generations > 2 * int(self._words[_EPOCH])))

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
        if self._checksums is not None:
            found = sound & (generations <= 2 * self._words[_FIRST])
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
        return int(self._words[_APPENDED] - self._words[_FIRST])

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
        return int(self._words[_MOST]) if isinstance(self.layout, Rows) else self.count

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest sample that can be read; 0 without samples."""
        slots = self.readable_slots()
        return max(time.time_ns() - int(self._times[slots].min()), 0) / 1e9 if len(slots) else 0.0

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
        if isinstance(self.layout, Rows):
            return self.limit
        live = self._live
        if live and self._words[_LAPPED]:
            return live
        mean = int(self._words[_END]) / live if live >= KNOWN else aligned(max(self.codec.nbytes, 1))
        return max(min(int(self._words[_MOST] / max(mean, 1)), self.count), 1)

    def drop_views(self) -> None:
        """Stop using the segment, which stays open."""
        self.notes = np.empty((0, 0), dtype=np.int64)
        self._words = self.generations = self._times = np.empty(0, dtype=np.int64)
        super().drop_views()

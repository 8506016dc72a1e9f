"""The policy of stores to which processes append while others read: the oldest samples leave first.

Every sample that is appended gets a ticket, the next number, and the slots take turns. The state of a slot (int64, its
generation) says what the slot has: 0 nothing; `2 * ticket + 1` the sample of that ticket is being written; `2 * ticket
+ 2` the sample can be read; a negative number: the sample was dropped. A second column has the time of the sample
(nanoseconds of the monotonic clock). The words of the layout are control words, then a row of notes for each of
`FILLERS` processes, which define their notes themselves. A writer

    takes the lock of the tickets -> claims the next slot -> generation odd -> releases the lock of the tickets
    -> writes the bytes -> fence -> generation even -> releases the slot

and a reader looks at the generation, fences, copies, fences and looks again. If the generation is the same even number,
the copy is whole (a seqlock; Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005). Readers take no lock
and wait for no writer. What changed during the copy is copied again, after a few tries from another slot. So another
sample replaces a sample that leaves during an epoch: all are draws from one source, and the number of batches stays.
Between the odd generation and the bytes is a system call, which no store instruction crosses.

A slot that is still being written is never taken over: the next writer waits. A killed writer leaves an odd generation,
which readers skip. The kernel frees its lock, and writers take that slot again when its turn comes.

Of rows, the first sample of a slot is written through the file, where a lack of memory is an error. Later samples are
copied through the mapping, whose pages exist by then: writes through the file exclude each other (two writers of rows
of 1 MiB reach 4.3 GB/s each through the file, and 10 GB/s through the mapping).

Records lie one behind the other in the run of bytes. A record that does not fit at the end begins at the beginning
again. A writer that takes a slot first ends the samples whose bytes it needs, the oldest first, under the lock of the
tickets. Records are always written through the file, because the gap of a killed writer has no memory yet. A reader
decodes its own copy, never bytes that a writer may change.

When memory ends, the store stops growing, with one warning per node, and rolls within the memory that it has.
"""

from __future__ import annotations

import errno
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Lend, Memory, aligned
from lightning_stocache.cache.layout import LARGEST, ROLLING, Head, Records, Rows, is_complete, layout_of
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.shortage import refused
from lightning_stocache.cache.store import Store
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import Backend, Geometry, Manifest
from lightning_stocache.node.processes import poll
from lightning_stocache.node.segment import Segment, fence

__all__ = ["FILLERS", "RollingStore", "Turn"]

log = logging.getLogger(__name__)

FILLERS = 64
_CONTROL, _NOTES = 64, 8
_APPENDED, _NEXT, _MOST, _EVICTED, _EPOCH, _END, _TAIL, _LAPPED = range(1, 9)  # control words
_HEAD = Head({"state": np.int64, "time": np.int64}, _CONTROL + FILLERS * _NOTES)
_COLUMN_BYTES = _HEAD.plus(Records.own_columns).slot_bytes  # of a slot, besides its record

_TRIES = 3  # of one slot, before another slot is read
_MOST_TRIES = 1000  # in all; then the writers are faster than any copy
_SMALLER = 4  # there are slots enough for records that are this much smaller than expected
_KNOWN = 32  # with so many records, their mean size replaces the estimate of set-up
_TOO_FAST = "is overwritten faster than it can be read: give it a larger budget, or fewer fillers"


class Turn(NamedTuple):
    """A slot that a writer has claimed, and the ticket of its sample. `is_new`: the slot had no sample before."""

    slot: int
    ticket: int
    is_new: bool


class RollingStore(Store):
    """A store whose oldest samples leave when it is full. An index is the number of a slot, whatever sample it has.

    Raises:
        RuntimeError: (when reading) no sample is resident, or writers overtake every copy.

    Example:
        >>> from lightning_stocache import SampleSpec
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
        super().__init__(segment, codec, arc, companion)
        layout, self.count = self.layout, arc.slots
        self.generations: npt.NDArray[np.int64] = layout.state
        self._times, self._words = layout.columns["time"], layout.words[:_CONTROL]
        self.notes = layout.words[_CONTROL:].reshape(FILLERS, _NOTES)
        if not self._words[_MOST]:
            self._words[_MOST] = layout.end - layout.begin if isinstance(layout, Records) else self.count
        self.renewed = self.substituted = 0  # samples that this process served in place of others: newer ones, or any
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
        layout = layout_of(codec)
        if isinstance(codec, RecordCodec):
            count = max(granted // (codec.nbytes // _SMALLER + _COLUMN_BYTES), 8)
        manifest = Manifest(Geometry(size=count, slots=count), fingerprint=ROLLING, **(whose or {}))
        size, reserved = layout.bytes_for(codec, count, granted, _HEAD), layout.reserved_bytes(count, _HEAD)
        return cls(Segment.create(size, backend, manifest, reserved=reserved), codec, Arc(count, count))

    @staticmethod
    def slot_bytes(codec: SampleCodec) -> int:
        """Bytes of a sample with its columns; of records, of a sample of the expected size."""
        if isinstance(codec, RecordCodec):
            return aligned(codec.nbytes) + _COLUMN_BYTES
        return codec.nbytes + _HEAD.slot_bytes

    # ---- in ----

    def append(self, sample: Any, index: int = -1) -> bool:
        """Check a sample, and replace the oldest sample by it. Returns False while that slot is being written.

        Args:
            sample: matches the codec.
            index: of the sample in its source, for messages; -1 without one.

        Raises:
            SampleMismatchError: the sample does not match the codec.
            ValueError: the sample is larger than the whole store.
            OSError: there is no memory for a single sample.
        """
        contents = self.codec.contents(self.codec.encode(sample, None if index < 0 else index))
        while (turn := self.take(self.layout.size(contents))) is not None:
            try:
                short = self._write_sample(turn, contents)
            except BaseException:
                self.finish(turn, is_whole=False)
                raise
            if short is None:
                self.finish(turn)
                return True
            self._stop_growing(turn, short)
        return False

    def take(self, nbytes: int = 0) -> Turn | None:
        """Take the next slot, with room for a record of `nbytes`, until `finish`. None if a writer has the slot."""
        words, rows = self._words, isinstance(self.layout, Rows)
        if not rows and (aligned(nbytes) > words[_MOST] or nbytes >= LARGEST):
            room, sample = format_bytes(int(words[_MOST])), format_bytes(nbytes)
            raise ValueError(f"a sample of {sample} is larger than the whole rolling cache of {room}")
        with self._claims.waiting(self.count):
            slot = int(words[_NEXT]) % max(self.limit, 1)
            if not self._claims.take(slot):
                return None
            if not rows and not self._make_room(slot, nbytes):
                self._claims.release(slot)
                return None
            words[_NEXT] += 1
            ticket, is_evicted = self.appended, is_complete(int(self.generations[slot]))
            words[_EVICTED] += is_evicted
            words[_APPENDED] += 1
            self.generations[slot] = 2 * ticket + 1
        return Turn(slot, ticket, not is_evicted)

    def finish(self, turn: Turn, *, is_whole: bool = True) -> None:
        """Release a slot. Readers may read its sample, if `is_whole`; else the sample is dropped."""
        generation = 2 * turn.ticket + 2
        if is_whole:
            self._times[turn.slot] = time.monotonic_ns()
        fence()
        self.generations[turn.slot] = generation if is_whole else -generation
        self._claims.release(turn.slot)

    def _write_sample(self, turn: Turn, contents: Sequence[memoryview]) -> str | None:
        """Write a sample. If memory is short, return the reason in words."""
        layout = self.layout
        if isinstance(layout, Rows) and not turn.is_new:
            for rows, content in zip(layout.fields, contents, strict=True):
                rows[turn.slot] = np.frombuffer(content, dtype=np.uint8)
            return None
        if not self._words[_LAPPED]:  # afterwards the store takes no more memory
            short = self._shortage.comes_with(layout.size(contents))
            if short is not None:
                return short
        try:
            if isinstance(layout, Rows):
                layout.write(turn.slot, contents)
            else:
                self.segment.store(int(layout.columns["begin"][turn.slot]), *contents)
        except OSError as error:
            if (short := refused(error)) is None:
                raise
            return short
        return None

    def _stop_growing(self, turn: Turn, short: str) -> None:
        """From now on, roll within the slots or bytes that are in use. Warn once per node."""
        layout, rows = self.layout, isinstance(self.layout, Rows)
        used = turn.slot if rows else int(layout.columns["begin"][turn.slot]) - layout.begin
        if used:
            with self._claims.waiting(self.count):
                if used < self._words[_MOST]:
                    self._words[_MOST] = used
                    if rows:
                        self._words[_NEXT] = 0
        self.finish(turn, is_whole=False)
        if not used:
            needed = format_bytes(self.codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")
        if self.segment.lock(self.count + 1):  # this process keeps the lock until it ends
            log.warning(
                "the rolling cache stops growing at %s samples: %s.\nIt rolls within these. Give the job more memory, "
                "or lower the budget to have no such warning",
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

    # ---- out ----

    def place(self, index: int, *, verify: bool = False) -> int:
        """The slot with this number, whatever sample it has; NO_PLACE without such a slot."""
        return index if 0 <= index < self.count else NO_SLOT

    def lookup(self, indices: Integers, *, verify: bool = False) -> Integers:
        """The slots with these numbers, int64 `[samples]`, whatever samples they have; NO_PLACE without such a slot."""
        return np.where((indices >= 0) & (indices < self.count), indices, NO_SLOT)

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy whole rows into the memory of a batch, without waiting for writers."""
        rows: Any = self.layout
        slots, seen = self._whole(places)
        rows.gather(slots, into)
        fence()
        torn = np.flatnonzero(self.generations.take(slots) != seen)
        tries = 0
        while len(torn):
            tries += 1
            if tries > _MOST_TRIES:
                raise RuntimeError(f"a rolling cache of {self.limit} samples {_TOO_FAST}")
            again, generations = self._whole(slots[torn] if tries < _TRIES else self._random_slots(len(torn)))
            for fields, memory in zip(rows.fields, into, strict=True):
                memory.reshape(len(slots), fields.shape[1])[torn] = fields[again]
            fence()
            seen[torn] = generations
            torn = torn[self.generations.take(again) != generations]
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
            if self.closed:
                raise RuntimeError("the rolling cache was closed while samples were read from it")
            seen = int(self.generations[place])
            if is_complete(seen):
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
        raise RuntimeError(f"a rolling cache {_TOO_FAST}")

    def readable(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of these slots can be read now, bool of the same shape."""
        readable: npt.NDArray[np.bool_] = is_complete(self.generations.take(slots, mode="clip"))
        return readable

    def readable_slots(self) -> Integers:
        """The slots that can be read now, int64."""
        return np.flatnonzero(is_complete(self.generations[: self.limit]))

    def resident(self) -> Integers:
        """The slots with a sample, int64, in rising order. A slot whose sample is being replaced counts, too."""
        generations = self.generations[: self.limit].copy()  # one look, because generations change meanwhile
        is_replaced = (generations & 1 == 1) & (self._times[: self.limit] > 0)
        resident: Integers = np.flatnonzero(is_complete(generations) | is_replaced)
        return resident

    def begin_epoch(self) -> None:
        """Begin an epoch: samples that come from now on are newer than the epoch."""
        self._words[_EPOCH] = self._words[_APPENDED]

    def _count_newer(self, generations: Integers) -> int:
        """Number of samples that came after the epoch had begun."""
        return int(np.count_nonzero(generations > 2 * int(self._words[_EPOCH])))

    def _whole(self, slots: Integers) -> tuple[Integers, Integers]:
        """These slots, with readable slots in place of those that cannot be read now, and their generations."""
        generations = self.generations.take(slots)
        whole = is_complete(generations)
        if not whole.all():
            slots = slots.copy()
            while len(missing := np.flatnonzero(~whole)):
                slots[missing] = self._random_slots(len(missing))
                generations[missing] = self.generations.take(slots[missing])
                whole = is_complete(generations)
                self.substituted += len(missing)
        fence()
        return slots, generations

    def _random_slots(self, count: int) -> Integers:
        """Random slots that can be read now."""
        # A few random slots: a look at a hundred thousand slots takes half a millisecond.
        slots = self._chance.integers(0, self.count, 64 + 8 * count)
        slots = slots[self.readable(slots)]
        if len(slots) < count:
            for seconds in poll(pause=0.001):
                if len(slots := self.readable_slots()):
                    break
                if seconds or not self.appended:  # at first, all of few slots may be in the hands of writers
                    raise RuntimeError(
                        "the rolling cache is empty: no sample has been appended yet, or all are being written"
                    )
            slots = slots[self._chance.integers(0, len(slots), count)]
        return slots[:count]

    # ---- what there is ----

    @property
    def appended(self) -> int:
        """Number of samples that came, with the samples that are being written."""
        return int(self._words[_APPENDED])

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
        return (time.monotonic_ns() - int(self._times[slots].min())) / 1e9 if len(slots) else 0.0

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
        mean = int(self._words[_END]) / live if live >= _KNOWN else aligned(max(self.codec.nbytes, 1))
        return max(min(int(self._words[_MOST] / max(mean, 1)), self.count), 1)

    def close(self) -> None:
        """Close the store in this process. The memory is free when all processes have closed the store."""
        self.notes = np.empty((0, 0), dtype=np.int64)
        self._words = self.generations = self._times = np.empty(0, dtype=np.int64)
        super().close()

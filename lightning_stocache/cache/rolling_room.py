"""The room that the samples of a rolling store take in turns: slots of rows, bytes of records.

Rows: each slot has its row, and the slots take turns. Of rows in memory, the first sample of a slot is written through
the file, where a lack of memory is an error. Later samples are copied through the mapping, whose pages exist by then:
writes through the file exclude each other (two writers of rows of 1 MiB reach 4.3 GB/s each through the file, and 10
GB/s through the mapping).

Records lie one behind the other in the run of bytes. A record that does not fit at the end begins at the beginning
again. A writer that takes a slot first ends the samples whose bytes it needs, the oldest first, in its turn. Records
are always written through the file, because the gap of a killed writer has no memory yet.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lightning_stocache.cache.codec import Codec, aligned
from lightning_stocache.cache.head import Head, is_complete
from lightning_stocache.cache.layout_records import KNOWN, Records
from lightning_stocache.cache.layout_rows import Rows
from lightning_stocache.cache.rolling_slots import Control, RollingSlots
from lightning_stocache.node.segment import Segment

__all__ = ["Room", "RecordRoom", "RowRoom", "room_for"]

_SMALLER = 4  # there are slots enough for records that are this much smaller than expected

Order = tuple[list[int], dict[Control, int]]
"""Slots with samples, newest first, and the control numbers with which the next writer goes on."""


class RowRoom:
    """Room for rows, which is measured in slots."""

    def __init__(self, segment: Segment, layout: Rows, slots: RollingSlots) -> None:
        self._layout, self._slots = layout, slots
        self._maps = not segment.on_disk
        self.total = slots.count

    @staticmethod
    def slot_bytes(codec: Any, head: Head) -> int:
        """Bytes of a sample with its columns."""
        return int(codec.nbytes + head.slot_bytes)

    @staticmethod
    def fit(codec: Any, count: int, granted: int, most: int, head: Head) -> tuple[int, int]:
        """The number of slots in at most `most` bytes, and the bytes for records, which do not matter."""
        most -= aligned(1) * len(codec.row_bytes) + 1  # wasted by alignment, and the byte that no write reaches
        return min(count, max(most, 0) // RowRoom.slot_bytes(codec, head)), granted

    @property
    def most(self) -> int:
        """How much the store may use."""
        return int(self._slots.control[Control.MOST]) or self.total

    @property
    def limit(self) -> int:
        """Number of slots for which there is memory, as far as that is known."""
        return self.most

    def capacity(self, expected: int) -> int:
        """Number of samples for which there is room."""
        return self.limit

    def needed(self, nbytes: int) -> int:
        """How much a sample of `nbytes` needs."""
        return 1

    def next_slot(self, turn: int) -> int:
        """The slot for the next sample: the slot whose turn it is, or, if that has a sample, an empty slot."""
        slots, control = self._slots, self._slots.control
        if control[Control.HOLES] and is_complete(slots.states[turn]):
            holes = np.flatnonzero(~slots.have_samples(self.limit)).tolist()
            if not holes:
                control[Control.HOLES] = 0
            return next(itertools.filterfalse(slots.is_being_written, holes), turn)
        return turn

    def make(self, slot: int, nbytes: int) -> bool:
        """Make room for the sample of a locked slot. In a turn. Returns False while another writer has that room."""
        control = self._slots.control
        if slot == 0 and control[Control.NEXT]:
            control[Control.LAPPED] = 1
        return True

    def takes_memory(self, slot: int) -> bool:
        """Whether writing a sample into a slot may take memory."""
        return not self._maps or not self._layout.columns["time"][slot]  # it had no sample before

    def write(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Write a sample into its room. Raises OSError if the system refuses it."""
        if self.takes_memory(slot):
            self._layout.store(slot, contents)
            return
        for rows, content in zip(self._layout.fields, contents, strict=True):
            rows[slot] = np.frombuffer(content, dtype=np.uint8)

    def before(self, slot: int) -> int:
        """How much room lies before that of a slot."""
        return slot

    def limit_to(self, most: int) -> None:
        """Use only so much room from now on. In a turn."""
        control = self._slots.control
        if most < self.most:
            control[Control.MOST] = most
            control[Control.NEXT] = 0
            control[Control.LAPPED] = 1

    def in_order(self, newest_first: Sequence[int], is_sound: Callable[[int], bool]) -> Order:
        """The slots of a job before, and where the next writer goes on."""
        count = self.total
        newest = newest_first[0] if newest_first else -1
        is_full = (newest + 1) % count in newest_first  # up to the oldest sample
        control = {
            Control.NEXT: newest_first[-1] if is_full else newest + 1,
            Control.LAPPED: int(is_full or max(newest_first, default=-1) > newest),
            Control.HOLES: int(len(newest_first) < count),
        }
        return list(newest_first), control


class RecordRoom:
    """Room for records, which is measured in bytes of their run."""

    def __init__(self, segment: Segment, layout: Records, slots: RollingSlots) -> None:
        self._segment, self._layout, self._slots = segment, layout, slots
        self.total = layout.end - layout.begin
        self._begins, self._sizes = layout.columns["begin"].data, layout.columns["nbytes"].data

    @staticmethod
    def slot_bytes(codec: Any, head: Head) -> int:
        """Bytes of a sample of the expected size with its columns."""
        return int(aligned(codec.nbytes) + head.of_records.slot_bytes)

    @staticmethod
    def fit(codec: Any, count: int, granted: int, most: int, head: Head) -> tuple[int, int]:
        """The number of slots, and the bytes for records, in at most `most` bytes."""
        granted, columns = min(granted, most), head.of_records
        return max(granted // (codec.nbytes // _SMALLER + columns.slot_bytes), 8), granted

    @property
    def most(self) -> int:
        """How much the store may use."""
        return int(self._slots.control[Control.MOST]) or self.total

    @property
    def limit(self) -> int:
        """Number of slots for which there is memory, as far as that is known."""
        return self._slots.count

    def capacity(self, expected: int) -> int:
        """Number of samples for which there is room, if the next are as large as those before, or as expected."""
        live, control = self._live, self._slots.control
        if live and control[Control.LAPPED]:
            return live
        mean = control[Control.END] / live if live >= KNOWN else aligned(max(expected, 1))
        return max(min(int(self.most / max(mean, 1)), self._slots.count), 1)

    def needed(self, nbytes: int) -> int:
        """How much a sample of `nbytes` needs."""
        return aligned(nbytes)

    def next_slot(self, turn: int) -> int:
        """The slot for the next sample, given the slot whose turn it is."""
        return turn

    def make(self, slot: int, nbytes: int) -> bool:
        """Find bytes for the record of a locked slot, and end the samples that lie there. In a turn.

        Returns False while another writer has that room.
        """
        control, need = self._slots.control, aligned(nbytes)
        begin, size = control[Control.END], self.most
        if need > size:
            return False
        if begin + need > size:
            if not self._free(begin, max(size, begin), slot):
                return False
            begin = control[Control.END] = 0
            control[Control.LAPPED] = 1
        if not self._free(begin, begin + need, slot):
            return False
        if self._live == self._slots.count and not self._end_oldest(slot):  # the oldest sample is in this very slot
            return False
        self._layout.set_place(slot, self._layout.begin + begin, nbytes)
        control[Control.END] = begin + need
        return True

    def _free(self, begin: int, end: int, slot: int) -> bool:
        """End the oldest samples until no sample lies in these bytes, or beyond the end of the run."""
        begins, sizes = self._begins, self._sizes
        while self._live:
            oldest = self._oldest
            first = begins[oldest] - self._layout.begin
            last = first + aligned(sizes[oldest])
            is_outside = first >= end or last <= begin
            if sizes[oldest] and is_outside and last <= self.most:
                return True
            if not self._end_oldest(slot):
                return False
        return True

    def _end_oldest(self, mine: int) -> bool:
        """Drop the oldest sample. Returns False if a writer of another slot than `mine` is still writing it."""
        slots, slot = self._slots, self._oldest
        generation = slots.states[slot]
        if generation & 1 and slot != mine and slots.is_being_written(slot):
            return False
        if is_complete(generation):
            slots.control[Control.EVICTED] += 1
        slots.drop(slot)
        slots.control[Control.TAIL] += 1
        return True

    @property
    def _oldest(self) -> int:
        """The slot of the oldest sample."""
        return int(self._slots.control[Control.TAIL] % self._slots.count)

    @property
    def _live(self) -> int:
        """Number of slots with bytes. It follows from two counts, because a writer may be killed between two steps."""
        return int(self._slots.control[Control.NEXT] - self._slots.control[Control.TAIL])

    def takes_memory(self, slot: int) -> bool:
        """Whether writing a sample into a slot may take memory."""
        return True

    def write(self, slot: int, contents: Sequence[memoryview]) -> None:
        """Write a sample into its room. Raises OSError if the system refuses it."""
        self._segment.store(self._layout.begin_of(slot), *contents)

    def before(self, slot: int) -> int:
        """How much room lies before that of a slot."""
        return int(self._begins[slot] - self._layout.begin)

    def limit_to(self, most: int) -> None:
        """Use only so much room from now on. In a turn."""
        if most < self.most:
            self._slots.control[Control.MOST] = most

    def in_order(self, newest_first: Sequence[int], is_sound: Callable[[int], bool]) -> Order:
        """The records that lie one before the other in the run, and whose slots do, so that no two overlap.

        From the newest on, first the records before it, then those above it, which the run has not reached again:

            begin of the run | older <- older <- newest | free | oldest <- older <- older | end of the run
                           floor                low    top   then floor                 low

        Returns:
            The slots of these records, newest first, and where the next writer goes on.
        """
        begins, sizes = self._layout.columns["begin"], self._layout.columns["nbytes"]
        start, count = self._layout.begin, self._slots.count
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
            is_later_slot = (found[0] - slot) % count <= (found[0] - found[-1]) % count  # a damaged ticket
            if is_later_slot or not (is_next or ((is_before or is_above) and is_sound(slot))):
                continue
            found.append(slot)
            low = begin
            if is_above:
                floor = top
        if not found:
            return found, {}
        following = found[0] + 1 + count
        control = {
            Control.NEXT: following,
            Control.TAIL: following - 1 - (found[0] - found[-1]) % count,
            Control.END: top - start,
            Control.LAPPED: int(floor == top),
        }
        return found, control


Room = RowRoom | RecordRoom
"""Room for samples of a kind."""


def room_for(codec: Codec) -> type[RowRoom] | type[RecordRoom]:
    """The kind of room for samples of a codec."""
    return RowRoom if codec.is_fixed else RecordRoom

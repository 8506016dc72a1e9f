"""A store of records: samples of any kind and size, whose bytes are budgeted, not their number.

An index may have a slot and find no room: the arena is filled until it is full, by whoever comes first. Then its sample
is loaded every time, as if it had no slot.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import Lend
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.record_slots import RecordSlots
from lightning_stocache.cache.records import HEAD, RecordCodec
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.store import UNREADABLE
from lightning_stocache.node.header import HEADER_BYTES

__all__ = ["RecordStore", "slots_for"]

_KNOWN = 32  # samples, of which the mean is believed rather than that of those looked at
_FIXED = 192  # bytes, for the number of the arena, and what alignment wastes around it
_DIRECTORY_SHARE = 28  # at most this part of the bytes granted is for slots that may find no room


class RecordStore(SegmentStore[RecordCodec]):
    """Records in a segment.

    Args:
        segment: where they lie; its size is what they and their slots may take.
        codec: between samples and records.
        arc: which indices have a slot, and where.

    Example:
        >>> from lightning_stocache.cache.placement import Arc
        >>> store = RecordStore.create(RecordCodec.infer(["a", "bc"]), Arc(size=10, slots=10), granted=2**20)
        >>> store.fill(4, "some text"), store.get(4), store.get(5), store.filled
        (True, 'some text', None, 1)
        >>> store.close()
    """

    slots: RecordSlots

    def read(self, places: Integers, lend: Lend | None = None) -> Iterator[Any]:
        """Copies of the samples of READY slots (int64 `[samples]`), or UNREADABLE, each made when it is asked for.

        They may be asked for when the store has been closed: who has begun to read goes on.
        """
        codec, records = self.codec, [self.slots.record(place) for place in places.tolist()]
        return (_decoded(codec, record, lend) for record in records)

    def contents(self, place: int) -> list[memoryview]:
        """A copy of the record in a READY slot; in two parts if it has buffers, which lie at multiples of 64 bytes."""
        record = memoryview(bytearray(self.slots.record(place)))
        buffers = HEAD.unpack_from(record)[3]
        return [record[:64], record[64:]] if buffers else [record]

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the records in READY slots (int64 `[samples]`)."""
        return self.slots.record(int(places[0])).nbytes if len(places) == 1 else self.slots.nbytes(places)

    def has_room(self, sample: Any) -> bool:
        """Whether a sample may find room; who asks is spared to encode what is too large in any case."""
        return self.slots.has_room(self.codec.least_bytes(sample))

    @property
    def granted_bytes(self) -> int:
        """Bytes that slots and records may take; what is as large in every store is header."""
        return self.segment.size - _FIXED

    @property
    def memory_bytes(self) -> int:
        """Bytes of them that the store holds on this node right now."""
        return min(max(self.segment.allocated_bytes - HEADER_BYTES - _FIXED, 0), self.granted_bytes)

    @property
    def fill_fraction(self) -> float:
        """Share of the bytes that are taken; 1 as soon as every slot is READY, and nothing is left to be filled."""
        if self.filled == len(self):
            return 1.0
        return min(max(self.slots.used_bytes - _FIXED, 0) / max(self.granted_bytes, 1), 1.0)

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room, if those to come are as large as those that have come."""
        filled, used = self.filled, self.slots.used_bytes - self.reserved_bytes(len(self))
        mean = used / filled if filled >= _KNOWN else self.codec.slot_bytes
        return min(filled + int((self.slots.end - self.slots.used_bytes) / max(mean, 1)), len(self))

    @classmethod
    def bytes_for(cls, codec: RecordCodec, slots: int, granted: int = 0) -> int:
        """All that is granted, but no less than so many slots take without any record."""
        return max(RecordSlots.bytes_for(slots), granted + _FIXED)

    @staticmethod
    def reserved_bytes(slots: int) -> int:
        """Bytes of the states, the directory and the number of the arena."""
        return RecordSlots.bytes_for(slots)

    @classmethod
    def fits(cls, size: int, codec: RecordCodec, slots: int) -> bool:
        """Whether a segment of so many bytes can hold a store of so many slots."""
        return size >= cls.bytes_for(codec, slots)

    def _open_slots(self, claims: Claims) -> RecordSlots:
        return RecordSlots(self.segment, self.arc.slots, claims)


def _decoded(codec: RecordCodec, record: memoryview, lend: Lend | None) -> Any:
    try:
        return codec.decode(record, lend)
    except Exception:  # of a class that has another name by now, for instance; its own code may raise anything
        return UNREADABLE


def slots_for(granted: int, codec: RecordCodec, length: int) -> int:
    """How many slots a store of records gets, that may take so many bytes.

    Every index, unless the directory would take much of them: of a dataset of small records that fits in small part.
    Never fewer than will find room.
    """
    expected = granted // codec.slot_bytes
    return min(max(expected, granted // _DIRECTORY_SHARE // RecordSlots.slot_bytes), length)

"""A store of records that other processes append to while it is read: a ring of bytes, from which the oldest leave.

Layout of the segment: the ring of slots (`rolling_ring`), then for each slot where its record begins and its bytes,
then control words, then the arena. Records lie one behind the other; one that does not fit at the end begins at the
beginning again. Who takes a slot first ends the samples whose bytes it needs, the oldest first, all under the lock of
the tickets; then it writes, and publishes. A record that is still being written is never taken over: who comes to it
waits.

A reader copies the bytes out between two looks at the generation, and decodes its own copy: a pickle is never read
where somebody may write. A sample that has left meanwhile is replaced by another resident one.

Bytes are always written through the file (`pwrite`): holes that a killed writer left have no memory yet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Lend, aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling_ring import RollingRing, Taken, manifest_of
from lightning_stocache.cache.rolling_store import RollingStore
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment

__all__ = ["RollingRecords"]

_WORDS = 8
_SIZE, _END, _TAIL, _LAPPED = range(4)
_MOST_TRIES = 1000
_SMALLER = 4  # slots for records this much smaller than the mean that is expected
_DIRECTORY_BYTES = 4 * 8  # of a slot: generation, time, begin, bytes


class RollingRecords(RollingStore[RecordCodec]):
    """Records in a ring of bytes.

    Args:
        segment: where they lie.
        codec: between samples and records.
        count: number of slots.

    Example:
        >>> store = RollingRecords.create(RecordCodec.infer(["a"]), granted=2**15)
        >>> all(store.append("text " * number) for number in range(100))
        True
        >>> max(store.read(store.ring.readable_slots())) == "text " * 99, store.ring.evicted > 50
        (True, True)
        >>> store.close()
    """

    _slots: _Arena

    @classmethod
    def create(
        cls,
        codec: RecordCodec,
        granted: int,
        *,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make an empty store that may take so many bytes.

        Raises:
            OSError: there is no memory.
        """
        count = max(granted // (codec.nbytes // _SMALLER + _DIRECTORY_BYTES), 8)
        begin = _Arena.begin(count)
        size = max(granted + _Arena.begin(0), begin + 64)
        return cls(Segment.create(size, backend, manifest_of(count, whose), reserved=begin), codec, count)

    @staticmethod
    def slot_bytes(codec: RecordCodec) -> int:
        """Bytes that a sample of the expected size costs."""
        return aligned(codec.nbytes) + _DIRECTORY_BYTES

    def read(self, places: Integers, lend: Lend | None = None) -> Iterator[Any]:
        """Copies of the samples in those slots (int64 `[samples]`), each made when it is asked for."""
        return (self.codec.decode(self._copied(place), lend) for place in places.tolist())

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the records that lie in those slots now."""
        return int(self._slots.nbytes.take(places).sum())

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room, if those to come are as large as those that have come."""
        return self._slots.capacity(max(self.codec.nbytes, 1))

    @property
    def granted_bytes(self) -> int:
        """Bytes that slots and records may take."""
        return self.segment.size - _Arena.begin(0)

    def _copied(self, place: int) -> memoryview:
        """The bytes of a whole record: of that slot, or of another resident one."""
        generations = self.ring.generations
        for _ in range(_MOST_TRIES):
            if self.closed:
                raise RuntimeError("the rolling cache was closed while samples were read from it")
            seen = int(generations[place])
            if seen > 0 and not seen & 1:
                fence()
                where = self._slots.where(place)
                fence()
                if int(generations[place]) == seen:  # then that is where it lies, or lay
                    record = self._slots.copied(*where)
                    fence()
                    if int(generations[place]) == seen:
                        self.renewed += self.ring.newer(np.array([seen]))
                        return record
            place = int(self.others(1)[0])
            self.substituted += 1
        raise RuntimeError(
            "a rolling cache is overwritten faster than it can be read: give it a larger budget, or fewer fillers"
        )

    def _open_slots(self) -> _Arena:
        return _Arena(self.segment, self.ring)


class _Arena:
    """Where records lie: a ring of bytes behind the directory."""

    def __init__(self, segment: Segment, ring: RollingRing) -> None:
        self._segment, self._ring, count = segment, ring, ring.count
        start, self._begin = RollingRing.bytes_for(count), self.begin(count)
        numbers = segment.bytes(start, (2 * count + _WORDS) * 8).numpy().view(np.int64)
        self._offsets, self.nbytes, self._words = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        self._bytes: npt.NDArray[np.uint8] = segment.bytes(self._begin, segment.size - self._begin).numpy()
        if not self._words[_SIZE]:
            self._words[_SIZE] = len(self._bytes)
        self._shortage = Shortage(segment)

    @staticmethod
    def begin(count: int) -> int:
        """Bytes before the arena."""
        return RollingRing.bytes_for(count) + aligned((2 * count + _WORDS) * 8)

    def take(self, contents: Sequence[memoryview]) -> Taken | None:
        """A slot, and so many bytes, for a record; None where what lies there is still being written."""
        nbytes = sum(part.nbytes for part in contents)
        if aligned(nbytes) > int(self._words[_SIZE]):
            room = format_bytes(int(self._words[_SIZE]))
            raise ValueError(f"a sample of {format_bytes(nbytes)} is larger than the whole rolling cache of {room}")
        return self._ring.take_in_turn(lambda slot: self._make_room(slot, nbytes))

    def store(self, taken: Taken, contents: Sequence[memoryview]) -> str | None:
        """Write a record; or what memory is short, in words. Or raise OSError (ENOSPC)."""
        nbytes = sum(part.nbytes for part in contents)
        if not self._words[_LAPPED] and (short := self._shortage.comes_with(nbytes)) is not None:
            return short
        self._segment.store(self._begin + int(self._offsets[taken.slot]), *contents)
        return None

    def end_at(self, taken: Taken) -> bool:
        """Use no bytes from this record on; whether any are left."""
        offset = int(self._offsets[taken.slot])
        if offset:
            self._words[_SIZE] = min(int(self._words[_SIZE]), offset)
        self._ring.drop(taken)
        return offset > 0

    def where(self, slot: int) -> tuple[int, int]:
        """Where the record of a slot begins, and its bytes."""
        return int(self._offsets[slot]), int(self.nbytes[slot])

    def copied(self, offset: int, nbytes: int) -> memoryview:
        """The bytes that lie there now, which may be those of two records."""
        return self._bytes[offset : offset + nbytes].copy().data

    def capacity(self, expected: int) -> int:
        """Samples that fit, from the mean of those that lie there, or what was expected of them."""
        live = self._live
        if live and self._words[_LAPPED]:
            return live
        mean = int(self._words[_END]) / live if live >= 32 else aligned(expected)
        return max(min(int(self._words[_SIZE] / max(mean, 1)), self._ring.count), 1)

    def close(self) -> None:
        """Drop all views."""
        self._offsets = self.nbytes = self._words = np.empty(0, dtype=np.int64)
        self._bytes = np.empty(0, dtype=np.uint8)

    def _make_room(self, slot: int, nbytes: int) -> bool:
        """Find bytes for a record, end the samples that lie there, and note it as the slot's; under the ticket lock."""
        words, need = self._words, aligned(nbytes)
        begin, size = int(words[_END]), int(words[_SIZE])
        if need > size:
            return False
        if begin + need > size:
            if not self._free(begin, max(size, begin), slot):
                return False
            begin = words[_END] = 0
            words[_LAPPED] = 1
        if not self._free(begin, begin + need, slot):
            return False
        if self._live == self._ring.count and not self._end_oldest(slot):  # that is this very slot
            return False
        self._offsets[slot], self.nbytes[slot] = begin, nbytes
        words[_END] = begin + need
        return True

    def _free(self, begin: int, end: int, slot: int) -> bool:
        """End the oldest samples until none of them lies there, nor behind the end of the arena's bytes."""
        while self._live:
            oldest = int(self._words[_TAIL]) % self._ring.count
            first = int(self._offsets[oldest])
            last = first + aligned(int(self.nbytes[oldest]))
            if (first >= end or last <= begin) and last <= int(self._words[_SIZE]):
                return True
            if not self._end_oldest(slot):
                return False
        return True

    def _end_oldest(self, slot: int) -> bool:
        oldest = int(self._words[_TAIL]) % self._ring.count
        if not self._ring.end(oldest, claimed=oldest == slot):
            return False
        self._words[_TAIL] += 1
        return True

    @property
    def _live(self) -> int:
        """How many slots have bytes. One number per end, each moved by one step: a writer may be killed between two."""
        return self._ring.turns - int(self._words[_TAIL])

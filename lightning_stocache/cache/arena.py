"""Memory for records, which every process of a node may take, and none gives back.

The arena is a range of a segment. What has been taken of it ends at `free`; everything behind is untouched. A writer
has a lane: a lock, which the kernel frees when its holder dies, and two numbers, `cursor` and `end`, between which the
lane has room of its own. To store a record it

1. takes the lock of a lane (`claims`), the one that it had last if that is free;
2. where the record does not fit between `cursor` and `end`, takes just as many bytes as it needs from `free` on, under
   one more lock, which is held for two microseconds;
3. writes the record at `cursor`;
4. moves `cursor` behind it.

So a writer that is killed in the middle leaves its lane with room, which the next writer in this lane uses; and lanes
have no tails, because no more is taken than is written. What a writer that dies between 4 and the moment at which the
slot is READY has written is lost.

`free` is never behind the end of a lane: it is healed from the lanes by who takes next, should its writer have died
before it was moved.

All numbers are uint64 in the segment: `free`, then `cursor` and `end` of every lane, in bytes from the start of the
segment. A record begins at a multiple of 8, and of 64 if it has a buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from lightning_stocache.cache.claims import Claims
from lightning_stocache.node.fence import fence
from lightning_stocache.node.segment import Segment

__all__ = ["LANES", "LEDGER_BYTES", "Arena"]

LANES = 64
LEDGER_BYTES = (1 + 2 * LANES) * 8
"""Bytes of the numbers of an arena."""

_BUSY = -1
_TRIES, _PAUSE = 200, 50e-6  # who holds the lock of `free` for longer than 10 ms was stopped while it had it


class Arena:
    """The memory of the records in a segment.

    Args:
        segment: where it lies.
        ledger: where its numbers begin, a multiple of 8; they are reserved, and zero in a new segment.
        begin: where it begins, a multiple of 64.
        end: where it ends.
        claims: of the segment's locks.
        locks: the first of `LANES + 1` bytes of the lock file that are its own.

    Example:
        >>> segment = Segment.create(8192)
        >>> segment.reserve(0, 2048)
        >>> arena = Arena(segment, 0, 2048, 8192, Claims(segment), 0)
        >>> arena.store(5000, 8, lambda offset: None), arena.store(5000, 8, lambda offset: None), arena.room
        (2048, None, 1144)
        >>> arena.close()
        >>> segment.close()
    """

    def __init__(self, segment: Segment, ledger: int, begin: int, end: int, claims: Claims, locks: int) -> None:
        self._numbers = segment.memory(ledger, LEDGER_BYTES).cast("Q")
        self._begin, self._end = begin, end
        self._claims, self._locks = claims, locks
        self._last = 0  # the lane that was used last
        self._room: int | None = None

    @property
    def used_bytes(self) -> int:
        """Bytes that records take, alignment included."""
        left = sum(max(end - cursor, 0) for cursor, end in zip(self._numbers[1::2], self._numbers[2::2], strict=True))
        return max(self._numbers[0] - self._begin - left, 0)

    def mend(self, free: int) -> None:
        """Have memory taken from `free` on, and none that a lane had left. Nobody else may use the arena meanwhile."""
        for number in range(1, len(self._numbers)):
            self._numbers[number] = 0
        self._numbers[0] = free

    @property
    def room(self) -> int:
        """Bytes of the largest record for which there is room, its alignment apart."""
        free = max(self._numbers[0], self._begin)
        rests = zip(self._numbers[1::2], self._numbers[2::2], strict=True)
        return max(self._end - free, *((self._end if end == free else end) - cursor for cursor, end in rests), 0)

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of so many bytes may find room; what has become too large once remains so."""
        if self._room is not None and nbytes > self._room:
            return False
        if self._end - max(self._numbers[0], self._begin) >= nbytes:
            return True
        self._room = self.room
        return nbytes <= self._room

    def store(self, nbytes: int, alignment: int, write: Callable[[int], None]) -> int | None:
        """Take memory for a record and have it written there.

        Args:
            nbytes: of the record.
            alignment: of its beginning, a power of two.
            write: is given the beginning. What it raises comes through, and the memory can be taken again.

        Returns:
            Where it begins; None if there is no room.
        """
        for last_resort in (False, True):
            for lane in self._lanes_for(nbytes):
                if not self._claims.take(self._locks + lane):
                    continue
                try:
                    offset = self._taken(lane, nbytes, alignment, last_resort)
                    if offset == _BUSY:
                        return None
                    if offset is None:
                        continue
                    write(offset)
                    fence()
                    self._numbers[1 + 2 * lane] = offset + nbytes
                    self._last = lane
                    return offset
                finally:
                    self._claims.give_up(self._locks + lane)
        return None

    def close(self) -> None:
        """Drop the view, without which the segment cannot be unmapped."""
        self._numbers.release()

    def _lanes_for(self, nbytes: int) -> Iterator[int]:
        """The lanes in which a record may find room, the one that was used last first."""
        numbers = self._numbers
        for number in range(LANES):
            lane = (self._last + number) % LANES
            cursor, end = numbers[1 + 2 * lane], numbers[2 + 2 * lane]
            if end - cursor >= nbytes or self._end - max(numbers[0], self._begin) >= nbytes or end == numbers[0]:
                yield lane

    def _taken(self, lane: int, nbytes: int, alignment: int, last_resort: bool) -> int | None:
        """Where a record of this lane can be written, with its end in the lane's room; None if nowhere, or _BUSY."""
        numbers, at = self._numbers, 1 + 2 * lane
        cursor, end = numbers[at], numbers[at + 1]
        offset = _up(cursor, alignment)
        if self._begin <= offset and offset + nbytes <= min(end, self._end):
            return offset
        for _ in range(_TRIES):
            if self._claims.take(self._locks + LANES):
                break
            time.sleep(_PAUSE)
        else:
            return _BUSY
        try:
            free = max(numbers[0], self._begin, *numbers[2::2])
            at_the_end = end == free
            if end > cursor and not at_the_end and not last_resort:
                return None  # what a killed writer has left is for smaller records
            start = cursor if at_the_end else free
            offset = _up(start, alignment)
            if offset + nbytes > self._end:
                return None
            # In this order: a lane whose end lies before its cursor has no room, whoever comes to it.
            numbers[at] = start
            fence()
            numbers[at + 1] = offset + nbytes
            fence()
            numbers[0] = offset + nbytes
            return offset
        finally:
            self._claims.give_up(self._locks + LANES)


def _up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment

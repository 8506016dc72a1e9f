"""Memory for records, which every process of a node may take, and none gives back.

The arena is a range of a segment. Everything in front of `free` (a uint64 in the segment) has been taken; everything
behind is untouched. Who stores a record moves `free` behind it under one lock, and writes then, without the lock. So
records never overlap. The room of a writer that is killed before its slot is READY stays unused. Where a write fails
and nobody has taken memory since, `free` goes back.

A record begins at a multiple of 8, and of 64 if it has a buffer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from lightning_stocache.cache.claims import Claims
from lightning_stocache.node.segment import Segment

__all__ = ["LEDGER_BYTES", "Arena"]

LEDGER_BYTES = 8
"""Bytes of `free`."""

_TRIES, _PAUSE = 200, 50e-6  # who holds the lock for longer than 10 ms was stopped while it had it


class Arena:
    """The memory of the records in a segment.

    Args:
        segment: where it lies.
        ledger: where `free` lies, a multiple of 8; it is reserved, and zero in a new segment.
        begin: where it begins, a multiple of 64.
        end: where it ends.
        claims: of the segment's locks.
        lock: the byte of the lock file that is its own.

    Example:
        >>> segment = Segment.create(8192)
        >>> segment.reserve(0, 64)
        >>> arena = Arena(segment, 0, 64, 8192, Claims(segment), 0)
        >>> arena.store(5000, 8, lambda offset: None), arena.store(5000, 8, lambda offset: None), arena.used_bytes
        (64, None, 5000)
        >>> arena.close()
        >>> segment.close()
    """

    def __init__(self, segment: Segment, ledger: int, begin: int, end: int, claims: Claims, lock: int) -> None:
        self._numbers = segment.memory(ledger, LEDGER_BYTES).cast("Q")
        self._begin, self._end = begin, end
        self._claims, self._lock = claims, lock

    @property
    def free(self) -> int:
        """Where untouched memory begins."""
        return max(self._numbers[0], self._begin)

    @free.setter
    def free(self, offset: int) -> None:
        self._numbers[0] = offset

    @property
    def used_bytes(self) -> int:
        """Bytes that have been taken, alignment included."""
        return self.free - self._begin

    def has_room(self, nbytes: int) -> bool:
        """Whether a record of so many bytes may find room."""
        return self._end - self.free >= nbytes

    def store(self, nbytes: int, alignment: int, write: Callable[[int], None]) -> int | None:
        """Take memory for a record and have it written there.

        Args:
            nbytes: of the record.
            alignment: of its beginning, a power of two.
            write: is given the beginning. What it raises comes through.

        Returns:
            Where it begins; None if there is no room, or somebody was stopped who takes some.
        """
        with self._locked() as mine:
            before = self.free
            offset = -(-before // alignment) * alignment
            if not mine or offset + nbytes > self._end:
                return None
            self.free = offset + nbytes
        try:
            write(offset)
        except BaseException:
            with self._locked() as mine:
                if mine and self.free == offset + nbytes:
                    self.free = before
            raise
        return offset

    def close(self) -> None:
        """Drop the view, without which the segment cannot be unmapped."""
        self._numbers.release()

    @contextmanager
    def _locked(self) -> Iterator[bool]:
        """Take the lock for as long as it takes to move `free`; whether it could be had."""
        for _ in range(_TRIES):
            if self._claims.take(self._lock):
                break
            time.sleep(_PAUSE)
        else:
            yield False
            return
        try:
            yield True
        finally:
            self._claims.give_up(self._lock)

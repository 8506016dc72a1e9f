"""Seats: each process that stores has one, and its claims on slots stand in the words of the slots.

A seat is the lock of one byte, which its process has until it ends, and a number, its life, which rises each time a
process takes the seat. The word of a slot (uint32) says all that is known of it:

    0                         empty
    2                         stored (`layout.READY`)
    CLAIMED | seat | life     claimed: 10 bits for the seat, 20 for the life

A claim is void if its seat has another life by now, or if the lock of its seat is free: its process has ended. So a
claim costs no lock, and a killed process leaves nothing behind. Claims are taken for a whole call in one turn
(`Segment.in_turn`): which slots are free is found before it, and in it they are only compared and written. Without the
turn samples are served unstored. Whoever has claimed a slot sets it stored (in memory), or empty, without the turn,
because nobody else writes the word of a living claim.

All threads of a process write the same claim; a dict says which thread has a slot. A forked child empties the dict, and
takes a seat of its own when it stores. KeyboardInterrupt may leave a slot claimed: the thread's next use of it ends
that. 1,024 processes have seats; one more stores nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from lightning_stocache.node.segment import Segment

__all__ = ["EMPTY", "READY", "SEATS", "Seats"]

log = logging.getLogger(__name__)

EMPTY, READY = 0, 2
"""Words of a slot that nobody fills."""

SEATS = 1024
"""The most processes of a node that store into one segment."""

_CLAIMED = 1 << 31
_LIFE_BITS = 20
_LIFE = (1 << _LIFE_BITS) - 1
_SEAT = 1 << 42  # the first byte of the seats, behind all others
_LOOK = 0.01  # seconds between two looks at the lock of one seat


class _Process:
    """What all threads and all stores of this process share, by segment."""

    def __init__(self) -> None:
        self.claim = 0  # the word of this process's claims; 0 without a seat
        self.is_full = False  # no seat was free
        self.owners: dict[int, int] = {}  # by claimed slot, the thread
        self.dead: set[int] = set()  # claims whose process has ended
        self.looked: dict[int, float] = {}  # by claim, when the lock of its seat was looked at


_processes: weakref.WeakKeyDictionary[Segment, _Process] = weakref.WeakKeyDictionary()


def _begin_anew() -> None:
    for process in _processes.values():
        process.__init__()  # type: ignore[misc]  # a forked child has no seat, and one of the threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Seats:
    """The claims of this process on the slots of a segment.

    Args:
        segment: has the locks of the seats, and the turn.
        words: the words of the slots, uint32.
        lives: the life of each seat, uint32 `[SEATS]`; zeroes at first.

    Example:
        >>> words, lives = np.zeros(4, np.uint32), np.zeros(SEATS, np.uint32)
        >>> seats = Seats(Segment.create(64), words.data, lives)
        >>> seats.take([1, 3]), seats.take([3]), seats.is_mine(3)
        ([1, 3], [], True)
        >>> words[3] = READY
        >>> seats.release([1, 3]), words.tolist()
        (None, [0, 0, 0, 2])
    """

    def __init__(self, segment: Segment, words: memoryview, lives: npt.NDArray[np.uint32]) -> None:
        self._segment, self._words, self._lives = segment, words, lives
        self._process = _processes.setdefault(segment, _Process())

    def take(self, slots: Sequence[int], word: int = EMPTY) -> list[int]:
        """Claim those of the slots that are free, for this thread. Returns them.

        Args:
            slots: each at most once.
            word: READY claims slots that are stored, which are empty then.
        """
        process, words = self._process, self._words
        seen = {slot: words[slot] for slot in slots}
        free = [slot for slot, now in seen.items() if now == word or self._is_void(now)]
        if not free or process.is_full or not self._segment.has_locks:
            return []
        return self._segment.in_turn(self._take, free, seen) or []

    def is_mine(self, slot: int) -> bool:
        """Whether this thread has claimed a slot."""
        process = self._process
        return process.owners.get(slot) == threading.get_ident() and self._words[slot] == process.claim

    def release(self, slots: Iterable[int]) -> None:
        """Release slots that this thread has claimed. A slot that is not stored is empty then."""
        process, words, thread = self._process, self._words, threading.get_ident()
        for slot in slots:
            if process.owners.get(slot) == thread:
                if words[slot] == process.claim:
                    words[slot] = EMPTY
                process.owners.pop(slot, None)

    def publish(self, slots: Sequence[int], verified: npt.NDArray[np.uint8]) -> bool:
        """Set claimed slots on a disk stored, and verified. Returns False if the turn was not to be had.

        `empty` must not come between: a slot that is verified and empty would be read while it is filled again.
        """

        def change() -> bool:
            for slot in slots:
                self._words[slot] = READY
                verified[slot] = READY
            return True

        return self._segment.in_turn(change) is True

    def empty(self, slot: int, unless: Callable[[], bool]) -> None:
        """Empty a stored slot, which nobody reads, unless something holds by then."""

        def change() -> None:
            if self._words[slot] == READY and not unless():
                self._words[slot] = EMPTY

        self._segment.in_turn(change)

    def close(self) -> None:
        """Drop the views. The claims of this process go with its descriptors."""
        self._words, self._lives = memoryview(b""), np.empty(0, dtype=np.uint32)

    def _take(self, free: Collection[int], seen: dict[int, int]) -> list[int]:
        process, words, thread = self._process, self._words, threading.get_ident()
        if not process.claim:
            self._take_seat()
        claim, taken = process.claim, []
        for slot in free if claim else ():
            if words[slot] == seen[slot]:
                process.owners[slot] = thread  # before the word: KeyboardInterrupt must not leave a claim to nobody
                words[slot] = claim
                taken.append(slot)
        return taken

    def _take_seat(self) -> None:
        for seat in range(SEATS):
            if self._segment.lock(_SEAT + seat):
                life = (int(self._lives[seat]) + 1) & _LIFE
                self._lives[seat] = life
                self._process.claim = _CLAIMED | seat << _LIFE_BITS | life
                return
        self._process.is_full = True
        log.warning("this process stores nothing: %d others have the cache open and store", SEATS)

    def _is_void(self, claim: int) -> bool:
        """Whether a word is the claim of an ended process, or damaged."""
        process = self._process
        if claim in (EMPTY, READY, process.claim):
            return False
        if not claim & _CLAIMED:
            return True
        if claim in process.dead:
            return True
        seat, life = claim >> _LIFE_BITS & (SEATS - 1), claim & _LIFE
        if self._lives[seat] != life:
            process.dead.add(claim)
            return True
        now = time.monotonic()
        if now - process.looked.get(claim, -_LOOK) >= _LOOK:
            process.looked[claim] = now
            if not self._segment.is_locked(_SEAT + seat):
                process.dead.add(claim)
        return claim in process.dead

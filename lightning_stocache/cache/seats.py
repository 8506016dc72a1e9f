"""Seats: each process that stores has one, and its claims on slots stand in the words of the slots.

A seat is the lock of one byte, which its process has until it ends, and a number, its life, which rises each time a
process takes the seat. The word of a slot (uint32) says all that is known of it:

    0                         empty
    2                         stored (`layout.READY`)
    seat | life | CLAIMED     claimed: 10 bits for the seat, 20 for the life

The last byte tells the three apart, so a word of which a reader sees some bytes before the others (on a disk, where it
is written by a system call) never looks stored.

A claim is void if its seat has another life by now, or if the lock of its seat is free: its process has ended. So a
claim costs no lock, and a killed process leaves nothing behind. Claims are taken for a whole call under one lock, the
turn: which slots are free is found before it, and under it they are only compared and written. Nothing that could
wait for a disk or for a sample happens there. Whoever has claimed a slot sets it stored, or empty, without the turn,
because nobody else writes the word of a living claim. On a disk a word cannot be written where there is no room: then
the slot stays claimed, until its thread uses it again or its process ends.

The turn is tried, never waited for without end: its holder may have been stopped. After a second samples are served
unstored, and from then on the turn is tried once a call, until it is got.

All threads of a process write the same claim; a dict says which thread has a slot. A forked child empties the dict, and
takes a seat of its own when it stores. KeyboardInterrupt may leave a slot claimed: the thread's next use of it ends
that. 1,024 processes have seats; one more stores nothing.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import TypeVar

from lightning_stocache.node.segment import Numbers, Segment

if sys.platform != "win32":
    import fcntl

_T = TypeVar("_T")

__all__ = ["EMPTY", "READY", "SEATS", "Seats"]

log = logging.getLogger(__name__)

EMPTY, READY = 0, 2
"""Words of a slot that nobody fills."""

SEATS = 1024
"""The most processes of a node that store into one segment."""

_CLAIMED, _KIND = 1, 3  # the last two bits of a word
_LIFE_BITS = 20
_LIFE = (1 << _LIFE_BITS) - 1
_TURN, _SEAT = 1 << 42, (1 << 42) + 1  # bytes of the lock file, behind all others
_PATIENCE, _FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 100e-6, 2e-3
_LOOK = 0.01  # seconds between two looks at the lock of one seat


class _Process:
    """What all threads and all stores of this process share, by segment."""

    def __init__(self) -> None:
        self.threads = threading.Lock()
        self.claim = 0  # the word of this process's claims; 0 without a seat
        self.is_late = False  # the turn was not to be had, and is tried once a call
        self.is_full = False  # no seat was free
        self.owners: dict[int, int] = {}  # by claimed slot, the thread
        self.dead: set[int] = set()  # claims whose process has ended
        self.looked: dict[int, float] = {}  # by claim, when the lock of its seat was looked at


_processes: weakref.WeakKeyDictionary[Segment, _Process] = weakref.WeakKeyDictionary()


def _begin_anew() -> None:
    for process in _processes.values():
        process.__init__()  # type: ignore[misc]  # a forked child has no lock, and one of the threads


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)


class Seats:
    """The claims of this process on the slots of a segment.

    Args:
        segment: its lock file has the locks of the seats and of the turn.
        words: the words of the slots, uint32.
        lives: the life of each seat, uint32 `[SEATS]`; zeroes at first.

    Raises:
        OSError: (`take`) the disk has no room for the words; the caller releases the slots.

    Example:
        >>> words, lives = (memoryview(bytearray(4 * count)).cast("I") for count in (4, SEATS))
        >>> seats = Seats(Segment.create(64), words, lives)
        >>> seats.take([1, 3]), seats.take([3]), seats.is_mine(3)
        ([1, 3], [], True)
        >>> words[3] = READY
        >>> seats.release([1, 3]), words.tolist()
        (None, [0, 0, 0, 2])
    """

    def __init__(self, segment: Segment, words: Numbers, lives: Numbers) -> None:
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
        if not free or process.is_full:
            return []
        return self._in_turn(self._take, free, seen) or []

    def is_mine(self, slot: int) -> bool:
        """Whether this thread has claimed a slot."""
        process = self._process
        return process.owners.get(slot) == threading.get_ident() and self._words[slot] == process.claim

    def release(self, slots: Iterable[int]) -> None:
        """Release slots that this thread has claimed. A slot that is not stored is empty then."""
        process, words, thread = self._process, self._words, threading.get_ident()
        for slot in slots:
            if process.owners.get(slot) == thread:
                with suppress(OSError):
                    if words[slot] == process.claim:
                        words[slot] = EMPTY
                    process.owners.pop(slot, None)

    def close(self) -> None:
        """Drop the views. The claims of this process go with its descriptors."""
        self._words = self._lives = memoryview(b"")

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
                life = (self._lives[seat] + 1) & _LIFE
                self._lives[seat] = life
                self._process.claim = (seat << _LIFE_BITS | life) << 2 | _CLAIMED
                return
        self._process.is_full = True
        log.warning("this process stores nothing: %d others have the cache open and store", SEATS)

    def _is_void(self, claim: int) -> bool:
        """Whether a word is the claim of an ended process, or damaged."""
        process = self._process
        if claim in (EMPTY, READY, process.claim):
            return False
        if claim & _KIND != _CLAIMED:
            return True
        if claim in process.dead:
            return True
        seat, life = claim >> 2 >> _LIFE_BITS, claim >> 2 & _LIFE
        if self._lives[seat] != life:
            process.dead.add(claim)
            return True
        now = time.monotonic()
        if now - process.looked.get(claim, -_LOOK) >= _LOOK:
            process.looked[claim] = now
            with process.threads:
                if self._segment.lock(_SEAT + seat):
                    self._segment.unlock(_SEAT + seat)
                    process.dead.add(claim)
        return claim in process.dead

    def _in_turn(self, work: Callable[..., _T], *args: object) -> _T | None:
        """The result of `work` under the turn; None if the turn was not to be had."""
        process, locks = self._process, self._segment.descriptors[1]
        with process.threads:
            try:
                return work(*args) if self._wait_for_turn() else None
            finally:  # no function of Python's, at whose beginning KeyboardInterrupt could come
                fcntl.lockf(locks, fcntl.LOCK_UN, 1, _TURN)

    def _wait_for_turn(self) -> bool:
        process, pause = self._process, _FIRST_PAUSE
        end = time.monotonic() + _PATIENCE
        while not self._segment.lock(_TURN):
            if process.is_late or time.monotonic() > end:
                process.is_late = True
                return False
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE)
        process.is_late = False
        return True

"""Seats: each process that stores has one, and its claims on slots stand in the words of the slots.

A seat is the lock of one byte, which its process has until it ends, and a number, its life, which rises each time a
process takes the seat. The word of a slot (uint32) says all that is known of it:

    0                         empty
    round | STORED            stored; on a disk in this round (`disk_sync`), in memory in round 0 (`READY`)
    seat | life | CLAIMED     claimed: 10 bits for the seat, 20 for the life

The last byte tells the three apart (`are_stored`), so a word of which a reader sees some bytes before the others (on a
disk, where it is written by a system call) never looks stored too early.

A claim is void if its seat has another life by now, or if the lock of its seat is free: its process has ended. So a
claim costs no lock, and a killed process leaves nothing behind. Claims are taken for a whole call in one turn
(`Segment.in_turn`): which slots are free is found before it, and in it they are only compared and written. Without the
turn samples are served unstored. Slots are set stored in a turn, too. On a disk a word cannot be written where there is
no room: then the slot stays claimed, until its thread uses it again or its process ends.

A user may say that samples have changed (`change`): their slots are emptied in one turn. The number of changes is odd
meanwhile; a process that gets the turn and finds it odd makes it even, because its maker has died. A reader that finds
the same number before its look-up and after its copy has samples from before or from after the change, whole; else it
looks up again. A sample that was looked up before a change is not stored after it.

All threads of a process write the same claim; a dict says which thread has a slot. A forked child empties the dict, and
takes a seat of its own when it stores. A signal's handler may raise at any line (a timeout, Ctrl-C), so the `finally`
that releases slots begins before they are claimed. 1,024 processes have seats; one more stores nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from lightning_stocache.node.segment import Numbers, Segment, fence, view_of

__all__ = ["EMPTY", "READY", "SEATS", "Seats", "are_stored"]

log = logging.getLogger(__name__)

EMPTY, READY = 0, 2
"""Words of a slot that nobody fills: without a sample, and with one that was stored in round 0."""

SEATS = 1024
"""The most processes of a node that store into one segment."""

_CLAIMED, _STORED, _KIND = 1, READY, 3  # the last two bits of a word
_LIFE_BITS = 20
_LIFE = (1 << _LIFE_BITS) - 1
_SEAT = 1 << 42  # the first byte of the seats, after all others
_LOOK = 0.01  # seconds between two looks at the lock of one seat


def are_stored(words: Any) -> Any:
    """Whether a word says that its slot is stored, in any round; for an array, each of them."""
    return words & _KIND == _STORED


class _Claims:
    """The seat and the claims of this process in a segment."""

    def __init__(self) -> None:
        self.claim = 0  # the word of this process's claims; 0 without a seat
        self.is_full = False  # no seat was free
        self.owners: dict[int, int] = {}  # by claimed slot, the thread
        self.dead: set[int] = set()  # claims whose process has ended
        self.looked: dict[int, float] = {}  # by claim, when the lock of its seat was looked at


class Seats:
    """The claims of this process on the slots of a segment.

    Args:
        segment: has the locks of the seats, and the turn.
        words: the words of the slots, uint32.
        lives: the life of each seat, uint32 `[SEATS]`; zeroes at first.
        changes: the number of changes, int64 `[1]`, 0 at first.
        stored_word: the word of a slot that is stored now, asked in the turn; by default READY.

    Raises:
        OSError: the disk has no room for a word. After `take` or `publish` the caller releases the slots.

    Example:
        >>> words, lives = (memoryview(bytearray(4 * count)).cast("I") for count in (4, SEATS))
        >>> seats = Seats(Segment.create(64), words, lives, memoryview(bytearray(8)).cast("q"))
        >>> seats.take([1, 3]), seats.take([3]), seats.is_mine(3)
        ([1, 3], [], True)
        >>> seats.publish([3])
        [3]
        >>> seats.release([1, 3]), words.tolist()
        (None, [0, 0, 0, 2])
    """

    def __init__(
        self,
        segment: Segment,
        words: Numbers,
        lives: Numbers,
        changes: Numbers,
        stored_word: Callable[[], int] | None = None,
    ) -> None:
        self._segment, self._words, self._lives, self._changes = segment, words, lives, changes
        self._words_view, self._changes_view = view_of(words), view_of(changes)  # the same, to read
        self._stored_word = stored_word
        self._process = segment.state_of(_Claims)

    @property
    def changes(self) -> int:
        """The number of changes so far."""
        return int(self._changes_view[0])

    def take(self, slots: Iterable[int], word: int = EMPTY) -> list[int]:
        """Claim those of the slots that are free, for this thread. Returns them.

        Args:
            slots: each at most once.
            word: READY claims slots that are stored, which are empty then.
        """
        words, free = self._words_view, dict[int, int]()  # by slot, its word
        for slot in slots:
            now = words[slot]
            if now == word or self._is_void(now):
                free[slot] = now
        if not free or self._process.is_full or not self._segment.has_locks:
            return []
        return self._segment.in_turn(self._take, free) or []

    def is_mine(self, slot: int) -> bool:
        """Whether this thread has claimed a slot."""
        process = self._process
        return process.owners.get(slot) == threading.get_ident() and self._words_view[slot] == process.claim

    def mine(self, slots: Iterable[int]) -> set[int]:
        """The slots among these that this thread has claimed."""
        return set(filter(self.is_mine, slots)) if self._process.owners else set()

    @property
    def has_claims(self) -> bool:
        """Whether this thread has claimed any slot."""
        return threading.get_ident() in self._process.owners.values()

    def release(self, slots: Iterable[int]) -> None:
        """Release slots that this thread has claimed. A slot that is not stored is empty then."""
        words, view, thread = self._words, self._words_view, threading.get_ident()
        owners, claim = self._process.owners, self._process.claim
        for slot in slots if owners else ():
            if owners.get(slot) == thread:
                try:
                    if view[slot] == claim:
                        words[slot] = EMPTY
                except OSError:  # a disk without room: the slot stays claimed
                    continue
                owners.pop(slot, None)

    def publish(self, slots: Sequence[int], seen: int | None = None) -> list[int]:
        """Set slots that this thread has claimed stored. Returns those that are stored now.

        None is if the turn was not free, or if there was a change since their samples were looked up (`seen`).
        """

        def set_stored() -> list[int]:
            if seen is not None and self._changes_view[0] != seen:
                return []
            word = READY if self._stored_word is None else self._stored_word()
            words, owners = self._words, self._process.owners
            for slot in slots:
                words[slot] = word
                owners.pop(slot, None)
            return list(slots)

        return self._segment.in_turn(set_stored) or []

    def publish_found(self, slots: Sequence[int], word: Callable[[], int]) -> list[int] | None:
        """Set slots stored that have a sample of an earlier job, unless another process has claimed them.

        Args:
            slots: their samples were verified.
            word: of these slots, asked in the turn.

        Returns:
            The slots that are stored now; None if the turn was not free.
        """
        found = {slot: self._words_view[slot] for slot in slots}
        free = [slot for slot, now in found.items() if now == EMPTY or self._is_void(now) or self.is_mine(slot)]

        def set_stored() -> list[int]:
            unchanged = [slot for slot in free if self._words_view[slot] == found[slot]]
            number = word()
            for slot in unchanged:
                self._words[slot] = number
            return unchanged

        return self._segment.in_turn(set_stored)

    def change(self, work: Callable[[], None]) -> int:
        """Change what is stored, by `work`, in one turn. Returns the number of changes then, 0 if no turn was free."""

        def change() -> int:
            self._end_change()
            self._changes[0] += 1
            fence()
            work()
            fence()
            self._changes[0] += 1
            return self.changes

        return self._segment.in_turn(change) or 0

    def _end_change(self) -> None:
        """In a turn: end the change of a process that has died in it."""
        if self._changes_view[0] & 1:
            self._changes[0] += 1

    def close(self) -> None:
        """Drop the views. The claims of this process go with its descriptors."""
        self._words = self._words_view = self._lives = memoryview(b"")
        self._changes = self._changes_view = memoryview(bytes(8)).cast("q")

    def _take(self, free: Mapping[int, int]) -> list[int]:
        process, words, view, thread = self._process, self._words, self._words_view, threading.get_ident()
        self._end_change()
        if not process.claim:
            self._take_seat()
        claim, taken = process.claim, []
        for slot, word in free.items() if claim else ():
            if view[slot] == word:
                process.owners[slot] = thread  # before the word: KeyboardInterrupt must not leave a claim to nobody
                words[slot] = claim
                taken.append(slot)
        return taken

    def _take_seat(self) -> None:
        first = os.getpid() % SEATS  # from 0 on, a process beside 500 others would try 500 seats, for milliseconds
        for seat in chain(range(first, SEATS), range(first)):
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
        if claim == EMPTY or claim == process.claim or are_stored(claim):
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
            if not self._segment.is_locked(_SEAT + seat):
                process.dead.add(claim)
        return claim in process.dead

"""Who writes which slot of a rolling store next, and which sample lies in each.

Layout of the first bytes of the segment, all of them 64-bit numbers: `_WORDS` control words, a row of notes for each of
`FILLERS` processes (what the numbers mean is their business), then for each slot its generation, and the time of its
sample (nanoseconds of the monotonic clock, which the processes of a machine share).

Every sample that is appended gets a ticket, the next number. The generation of a slot says what lies there: 0 nothing,
`2 * ticket + 1` the sample of that ticket is being written, `2 * ticket + 2` it can be read, a negative number it could
not be had. A writer

    takes the lock of the tickets -> next slot, whose own lock it claims -> generation odd -> gives the ticket lock back
    -> writes the bytes -> fence -> generation even -> gives the slot back

and a reader looks at the generation, fences, copies, fences and looks again: if it is the same even number, what was
copied is whole (a seqlock; Lameter, "Effective Synchronization on Linux/NUMA Systems", 2005). Readers take no lock.
Between the odd generation and the bytes lies a system call (the ticket lock is given back), which no store crosses.

A slot that somebody is still writing to is left out; a writer that was killed leaves an odd generation, which readers
pass over, and whose lock the kernel has freed: the next writer that looks (once a second) takes that slot first.

Slots are taken in turn, so the oldest sample leaves first. Records, which lie one behind the other in a ring of bytes,
take theirs strictly in turn, and end the samples whose bytes they take (`take_in_turn`, `end`).

Not promised: that ages are in the order of tickets; writers that began at the same time end in any order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.fence import fence
from lightning_stocache.node.header import Geometry, Manifest
from lightning_stocache.node.segment import Segment

__all__ = ["FILLERS", "FORM", "GENERATIONS", "ROLLING", "RollingRing", "Taken", "is_even", "manifest_of"]

FILLERS = 64
_WORDS, _NOTES = 64, 8
_HEAD = _WORDS + FILLERS * _NOTES
GENERATIONS = _HEAD * 8  # bytes of the payload before them
FORM, ROLLING = "form", "rolling"  # what a manifest says, so that nobody looks for the states of another store
_APPENDED, _NEXT, _LIMIT, _EVICTED, _EPOCH, _REACHED = range(6)
_LOOK_SECONDS = 1.0  # between two looks for slots of killed writers: one takes 1 ms per million slots


class Taken(NamedTuple):
    """A slot that a writer has for itself, with the ticket of its sample, and whether it held a sample before."""

    slot: int
    ticket: int
    held: bool


class RollingRing:
    """The order in which the slots of a segment are written, and their generations.

    Args:
        segment: where they lie; at least `bytes_for(count)` long, reserved.
        count: number of slots.

    Example:
        >>> segment = Segment.create(RollingRing.bytes_for(2))
        >>> segment.reserve(0, segment.size)
        >>> ring = RollingRing(segment, 2)
        >>> for _ in range(3):
        ...     ring.publish(ring.take())
        >>> ring.appended, ring.evicted, ring.readable(np.arange(2)).tolist(), ring.generations.tolist()
        (3, 1, [True, True], [6, 4])
        >>> ring.close(), segment.close()
        (None, None)
    """

    def __init__(self, segment: Segment, count: int) -> None:
        self.count = count
        self._claims = Claims(segment)
        columns = segment.bytes(0, self.bytes_for(count)).numpy().view(np.int64)
        self._words = columns[:_WORDS]
        self.generations: npt.NDArray[np.int64]
        self.generations, self._times = columns[_HEAD : _HEAD + 2 * count].reshape(2, count)
        self.notes = columns[_WORDS:_HEAD].reshape(FILLERS, _NOTES)
        if not self._words[_LIMIT]:
            self._words[_LIMIT] = count
        self._looked = 0.0

    @staticmethod
    def bytes_for(count: int) -> int:
        """Bytes of the control words, notes, generations and times of so many slots."""
        return aligned((_HEAD + 2 * count) * 8)

    # ---- writers ----

    def take(self) -> Taken | None:
        """The next slot, for this process alone; None where all are being written. It is to be published or dropped."""
        free = self._abandoned()
        with self._claims.waiting(self.count):
            slot = self._next() if free is None else free
            return None if slot is None else self._begin(slot)

    def take_in_turn(self, make_room: Callable[[int], bool]) -> Taken | None:
        """The slot after the last one, once `make_room` has made room for it; None where one of both is being written.

        It is called under the lock of the tickets, with a slot that is this process's own.
        """
        with self._claims.waiting(self.count):
            slot = self.turns % self.count
            if not self._claims.take(slot):
                return None
            if not make_room(slot):
                self._claims.give_up(slot)
                return None
            self._words[_NEXT] += 1
            return self._begin(slot)

    @property
    def in_the_way(self) -> int | None:
        """The process for which a writer has to wait; None if there is none, or it cannot be known."""
        slots = [self.count, self.turns % self.count, *np.flatnonzero(self.generations & 1).tolist()]
        return next(filter(None, map(self._claims.holder, slots)), None)

    @property
    def turns(self) -> int:
        """How many slots have been taken in turn."""
        return int(self._words[_NEXT])

    def end(self, slot: int, *, claimed: bool) -> bool:
        """Have a slot not be read any more; False where it is being written. `claimed`: who asks has it.

        For who has the lock of the tickets.
        """
        generation = int(self.generations[slot])
        if generation & 1 and not claimed:
            if not self._claims.take(slot):
                return False
            self._claims.give_up(slot)  # its writer was killed
        self._words[_EVICTED] += generation > 0 and not generation & 1
        self.generations[slot] = -abs(generation) & ~1
        self._times[slot] = 0
        return True

    def publish(self, taken: Taken) -> None:
        """Have a slot read whose bytes have been written."""
        self._times[taken.slot] = time.monotonic_ns()
        self._end(taken, 2 * taken.ticket + 2)

    def drop(self, taken: Taken, *, limit: bool = False) -> None:
        """Give a slot up whose sample could not be written; `limit`: there is no memory for it, nor for those after."""
        if limit:
            with self._claims.waiting(self.count):
                self._words[_LIMIT] = min(int(self._words[_LIMIT]), taken.slot)
        self._end(taken, -2 * taken.ticket - 2)

    def _next(self) -> int | None:
        limit = max(int(self._words[_LIMIT]), 1)
        for _ in range(limit):
            slot = int(self._words[_NEXT])
            slot = slot if slot < limit else 0
            self._words[_NEXT] = slot + 1
            if self._claims.take(slot):
                return slot
        return None

    def _begin(self, slot: int) -> Taken:
        words, generation = self._words, int(self.generations[slot])
        ticket = int(words[_APPENDED])
        held = generation > 0 and not generation & 1
        words[_EVICTED] += held
        words[_APPENDED] = ticket + 1
        words[_REACHED] = max(int(words[_REACHED]), slot + 1)
        self.generations[slot] = 2 * ticket + 1
        return Taken(slot, ticket, held)

    def _end(self, taken: Taken, generation: int) -> None:
        fence()
        self.generations[taken.slot] = generation
        self._claims.give_up(taken.slot)

    def _abandoned(self) -> int | None:
        """A slot that a writer was killed in, claimed."""
        now = time.monotonic()
        if now < self._looked + _LOOK_SECONDS:
            return None
        self._looked = now
        limit = int(self._words[_LIMIT])
        for slot in np.flatnonzero(self.generations[:limit] & 1).tolist():
            if self._claims.take(slot):
                if self.generations[slot] & 1:
                    return int(slot)
                self._claims.give_up(slot)
        return None

    # ---- readers ----

    def readable(self, slots: Integers) -> npt.NDArray[np.bool_]:
        """Which of those slots can be read now."""
        return is_even(self.generations.take(slots, mode="clip"))

    def resident(self) -> Integers:
        """The slots that hold a sample, rising; also where a newer one is being written over it."""
        slots = self._used()
        generations = self.generations.take(slots)  # one look: what is written now may be whole at the next
        whole = is_even(generations) | ((generations & 1 == 1) & (self._times.take(slots) > 0))
        resident: Integers = slots[whole]
        return resident

    def readable_slots(self) -> Integers:
        """The slots that can be read at this moment."""
        while True:
            appended = self.appended
            slots = self._used()
            if len(slots := slots[self.readable(slots)]) or self.appended == appended:
                return slots  # else what had been written at first has left since: this process was kept waiting

    def begin_epoch(self) -> None:
        """Note what is resident: what comes from now on is newer than the epoch."""
        self._words[_EPOCH] = self._words[_APPENDED]

    def newer(self, generations: Integers) -> int:
        """How many of these samples came after the epoch had begun."""
        return int(np.count_nonzero(generations > 2 * int(self._words[_EPOCH])))

    def _used(self) -> Integers:
        """The slots that have been written to."""
        return np.arange(min(int(self._words[_REACHED]), self.limit))

    # ---- what there is ----

    @property
    def appended(self) -> int:
        """Samples that came, those being written included."""
        return int(self._words[_APPENDED])

    @property
    def evicted(self) -> int:
        """Samples that left for newer ones."""
        return int(self._words[_EVICTED])

    @property
    def limit(self) -> int:
        """Number of slots that there is memory for, as far as that is known."""
        return int(self._words[_LIMIT])

    @property
    def oldest_seconds(self) -> float:
        """Age of the oldest sample that can be read; 0 without any."""
        slots = self.readable_slots()
        return (time.monotonic_ns() - int(self._times[slots].min())) / 1e9 if len(slots) else 0.0

    def close(self) -> None:
        """Drop all views."""
        self.notes = np.empty((0, 0), dtype=np.int64)
        self._words = self.generations = self._times = np.empty(0, dtype=np.int64)


def manifest_of(count: int, whose: Mapping[str, Any] | None = None) -> Manifest:
    """What the segment of a rolling store says about itself."""
    return Manifest(Geometry(size=count, slots=count), fingerprint={FORM: ROLLING}, **(whose or {}))


def is_even(generations: Integers) -> npt.NDArray[np.bool_]:
    """Whether a sample lies there, whole."""
    whole: npt.NDArray[np.bool_] = (generations > 0) & (generations & 1 == 0)
    return whole

"""The slots of a rolling store: the generation of each, who writes it, and whether its sample is safe (`rolling`).

On a disk the control numbers and the rounds of slots lie in memory that the processes of the job share (`live_bytes`),
because a disk may lose what it has taken: then a page has what it had before, and a slot the generation of a sample
that was overwritten since. That memory is a file with a name in /dev/shm, so a process in another container can attach
to it, as to the file on the disk. So a slot that a writer takes loses its round first, and gets one when its sample is
whole. The round is a word of `disk_sync`, or one of

    EMPTY         no sample: dropped, never written, or not found when the file was opened
    REPLACED      a sample that a newer one replaces at this moment
    UNVERIFIED    a sample that must be verified before it is read
"""

from __future__ import annotations

import os
import threading
from enum import IntEnum
from typing import cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.head import is_complete
from lightning_stocache.cache.layout import Layout
from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.segment import Numbers, Segment, fence

__all__ = ["EMPTY", "UNVERIFIED", "RollingSlots", "Control", "live_bytes"]

EMPTY, REPLACED, UNVERIFIED = range(3)
"""Rounds of slots whose sample has none; those of `disk_sync` are larger."""


class Control(IntEnum):
    """The control numbers of a rolling store, int64 each, 0 at first."""

    APPENDED = 0  # the last ticket
    BEFORE = 1  # the last ticket of earlier jobs
    EPOCH = 2  # the last ticket when the epoch began
    FOUND = 3  # samples that this job has found
    EVICTED = 4  # samples that left for newer samples
    NEXT = 5  # the slot whose turn is next; of records it grows for ever
    TAIL = 6  # of records: the slot of the oldest sample, as `NEXT`
    END = 7  # of records: where the next record begins in the run
    LAPPED = 8  # whether the store has begun at its beginning again
    HOLES = 9  # whether a row may be empty whose turn is not next
    MOST = 10  # slots, or bytes of records, that the store may use; 0: all


def live_bytes(count: int) -> int:
    """Bytes of the control numbers, and of the rounds of `count` slots."""
    return aligned(8 * len(Control)) + 4 * count


class RollingSlots:
    """The generations of slots, and the slots that this process writes.

    Args:
        segment: has the slots, and their locks.
        layout: the layout of the samples.
        first_number: the first control number of a store in memory, among the numbers of its layout.
        live: the memory of the control numbers and rounds of a store on a disk.
    """

    def __init__(self, segment: Segment, layout: Layout, first_number: int, live: Segment | None) -> None:
        self.count = layout.count
        self.rounds: npt.NDArray[np.uint32] | None = None
        """On a disk: the round of each slot, uint32 `[slots]`."""
        if live is None:
            self.control: Numbers = cast(memoryview, layout.numbers)[first_number:]
        else:
            self.control = live.numbers_at(0, len(Control), "q")
            start = aligned(8 * len(Control))
            self.rounds = np.frombuffer(live.memory(start, 4 * self.count), np.uint32)
        self.generations: npt.NDArray[np.int64] = layout.state
        """The state of each slot, int64 `[slots]`, to look at many; not to be written."""
        self.states = layout.states
        """To look at one generation, and to write it."""
        self._segment, self._layout = segment, layout
        # By process, because a forked child inherits it, and slot: the thread that writes it.
        self._written_here = dict[tuple[int, int], int]()

    def lock(self, slot: int) -> bool:
        """Lock a slot that no living writer has. In a turn."""
        key = os.getpid(), slot
        if key in self._written_here:
            return False
        self._written_here[key] = threading.get_ident()  # first: Ctrl-C must not leave a lock that nobody knows of
        if self._segment.lock(slot):
            return True
        del self._written_here[key]
        return False

    def begin(self, slot: int, ticket: int) -> None:
        """Let no reader read a locked slot, until `publish`. In a turn. Raises OSError if a disk has no room."""
        before = EMPTY if self.rounds is None else self.rounds[slot]
        self.set_round(slot, EMPTY if before == EMPTY else REPLACED)  # first: a reader may see half of the generation
        fence()
        try:
            self.states[slot] = 2 * ticket + 1
        except OSError:
            self.set_round(slot, before)
            raise

    def publish(self, slot: int, word: int) -> None:
        """Let readers read the sample of a slot, which has this round."""
        self.set_round(slot, word)
        fence()
        self.states[slot] &= ~1

    def end(self, slot: int) -> None:
        """Unlock a slot."""
        self._segment.unlock(slot)  # first: else another thread could take the slot, and lose its lock
        self._written_here.pop((os.getpid(), slot), None)

    def end_all(self) -> None:
        """Unlock the slots that this thread has, as if it had been killed: Ctrl-C has broken a write off."""
        mine = os.getpid(), threading.get_ident()
        for (pid, slot), thread in list(self._written_here.items()):
            if (pid, thread) == mine:
                self.end(slot)

    def is_being_written(self, slot: int) -> bool:
        """Whether a living writer has a slot: another thread of this process, or another process."""
        return (os.getpid(), slot) in self._written_here or self._segment.is_locked(slot)

    def drop(self, slot: int) -> None:
        """Let no reader find the sample of a slot any more. Raises OSError if a disk has no room for that."""
        self.states[slot] |= 1
        if self.rounds is None:
            self._layout.columns["time"][slot] = 0
        self.set_round(slot, EMPTY)

    def set_round(self, slot: int, word: int) -> None:
        """Set the round of a slot on a disk."""
        if self.rounds is not None:
            self.rounds[slot] = word

    def is_readable(self, slot: int) -> bool:
        """Whether a slot has a sample that can be read, verified or not."""
        return bool(is_complete(self.states[slot])) and (self.rounds is None or self.rounds[slot] >= UNVERIFIED)

    def are_readable(self, slots: Integers | slice) -> npt.NDArray[np.bool_]:
        """Which of these slots have a sample that can be read, verified or not."""
        readable: npt.NDArray[np.bool_] = is_complete(self.generations[slots])
        if self.rounds is not None:
            readable &= self.rounds[slots] >= UNVERIFIED
        return readable

    def have_samples(self, last: int) -> npt.NDArray[np.bool_]:
        """Which slots before `last` have a sample, also if it is being replaced."""
        if self.rounds is not None:
            return np.asarray(self.rounds[:last] != EMPTY)
        generations = self.generations[:last].copy()  # one look, because generations change meanwhile
        is_replaced = (generations & 1 == 1) & (self._layout.columns["time"][:last] > 0)
        return np.asarray(is_complete(generations) | is_replaced)

    def close(self) -> None:
        """Drop all views."""
        self.generations = np.empty(0, dtype=np.int64)
        self.states = self.control = memoryview(b"")
        self.rounds = None

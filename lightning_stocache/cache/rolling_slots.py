"""The slots of a rolling store: the generation of each, and who writes it (`rolling`)."""

from __future__ import annotations

import os
from enum import IntEnum
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.layout import ONCE, Layout
from lightning_stocache.node.segment import Numbers, Segment

__all__ = ["RollingSlots", "Word"]


_FIRST = ONCE.words


class Word(IntEnum):
    """The control words of a rolling store, int64 each, 0 at first."""

    APPENDED = _FIRST  # the last ticket
    BEFORE = _FIRST + 1  # the last ticket of earlier jobs
    EPOCH = _FIRST + 2  # the last ticket when the epoch began
    FOUND = _FIRST + 3  # samples that this job has found
    EVICTED = _FIRST + 4  # samples that left for newer samples
    NEXT = _FIRST + 5  # the slot whose turn is next; of records it grows for ever
    TAIL = _FIRST + 6  # of records: the slot of the oldest sample, as `NEXT`
    END = _FIRST + 7  # of records: where the next record begins in the run
    LAPPED = _FIRST + 8  # whether the store has begun at its beginning again
    HOLES = _FIRST + 9  # whether a row may be empty whose turn is not next
    MOST = _FIRST + 10  # slots, or bytes of records, that the store may use; 0: all
    PLAN = _FIRST + 11  # what the fillers draw


class RollingSlots:
    """The generations of slots, and the slots that this process writes.

    Args:
        segment: has the slots, and their locks.
        layout: the layout of the samples.
        words: the control words.
    """

    def __init__(self, segment: Segment, layout: Layout, words: Numbers) -> None:
        self.count = layout.count
        self.generations: npt.NDArray[np.int64] = layout.state
        """The state of each slot, int64 `[slots]`, to look at many; not to be written."""
        self.states, self.words = layout.states, words
        """To look at one generation, and to write it."""
        self._segment, self._layout = segment, layout
        self._columns: dict[str, Numbers] = {}
        self._written_here: set[tuple[int, int]] = set()  # process and slot, because a forked child inherits the set

    def numbers(self, column: str) -> Numbers:
        """The numbers of a column, to look at one and to write it."""
        if column not in self._columns:
            start = self._layout.offset_in(column, 0)
            kind = self._layout.columns[column].dtype.char
            self._columns[column] = self._segment.numbers_at(start, self.count, cast(Any, kind))
        return self._columns[column]

    def lock(self, slot: int) -> bool:
        """Lock a slot that no living writer has. In a turn."""
        return (os.getpid(), slot) not in self._written_here and self._segment.lock(slot)

    def begin(self, slot: int, ticket: int) -> None:
        """Let no reader read a locked slot, until `end`. In a turn."""
        self.states[slot] |= 1  # before the rest of the number
        self.states[slot] = 2 * ticket + 1
        self._written_here.add((os.getpid(), slot))

    def end(self, slot: int) -> None:
        """Unlock a slot."""
        self._segment.unlock(slot)  # first: else another thread could take the slot, and lose its lock
        self._written_here.discard((os.getpid(), slot))

    def is_being_written(self, slot: int) -> bool:
        """Whether a living writer has a slot: another thread of this process, or another process."""
        return (os.getpid(), slot) in self._written_here or self._segment.is_locked(slot)

    def drop(self, slot: int) -> None:
        """Let no reader find the sample of a slot any more."""
        self.states[slot] |= 1
        self.numbers("time")[slot] = 0

    def close(self) -> None:
        """Drop all views."""
        self.generations = np.empty(0, dtype=np.int64)
        self.states = self.words = memoryview(b"")
        self._columns = {}

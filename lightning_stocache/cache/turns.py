"""Who loads which sample, where several jobs fill one cache at the same time.

Without more ado two processes that miss the same sample both load it, and one stores it. Within a job that is rare:
each index is drawn once an epoch. Four trials of a sweep draw the same indices in the same order. So they take turns: a
slot is claimed before its sample is loaded, not only before it is stored, and who finds it claimed loads something
else, and waits for it then. Nobody waits while he has a claim himself, so nobody waits for ever; a claim goes with its
process. Who has waited in vain for one (its process was stopped, takes very long, or writes to a disk that stands
still) loads the sample too, and does not wait again for a while, which is twice as long each time.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.cache.slots import READY
from lightning_stocache.node.segment import Segment

__all__ = ["PATIENCE", "Turns"]

log = logging.getLogger(__name__)

PATIENCE, _REST = 30.0, 60.0  # seconds that one waits for others, and for which one does not after the first time
_NOBODY = (0, 0)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01


class StatedSlots(Protocol):
    """Slots whose states can be looked at."""

    state_bytes: memoryview


class Turns:
    """The turns of this process at loading samples.

    Args:
        segment: of the store; one without a name no other job can open, and turns are not taken there.
        claims: on the slots.
        slots: of the store.
        arc: which indices have a slot, and where.
    """

    def __init__(self, segment: Segment, claims: Claims, slots: StatedSlots, arc: Arc) -> None:
        self.are_taken = segment.path is not None
        self._claims, self._slots, self._slot_of = claims, slots, arc.slot_within
        self._mine: dict[int, tuple[int, int]] = {}  # by slot, the process and the thread whose turn it is
        self._impatient_until, self._rest = 0.0, _REST

    def take(self, indices: Iterable[int]) -> list[int]:
        """Those of the indices that no other process is loading: they are to be stored now, or given up."""
        return [index for index in indices if self._take(self._slot_of(index))]

    def give_up(self, indices: Iterable[int]) -> None:
        """Have others load what was not stored."""
        for index in indices if self._mine else ():
            if self.ends(slot := self._slot_of(index)):
                self._claims.give_up(slot)

    def ends(self, slot: int) -> bool:
        """Whether it is this thread's turn at a slot, which ends now; the claim is still there."""
        return bool(self._mine) and self._mine.get(slot) == _here() and self._mine.pop(slot, None) is not None

    def wait(self, indices: Sequence[int]) -> bool:
        """Wait until nobody is loading those indices; False if that takes too long."""
        if time.monotonic() < self._impatient_until:
            return False
        end, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
        for slot in map(self._slot_of, indices):
            while slot != NO_SLOT and self._slots.state_bytes[slot] != READY and not self._is_free(slot):
                if time.monotonic() > end:
                    self._impatient_until = time.monotonic() + self._rest
                    self._rest *= 2
                    log.warning(
                        "another process has been loading a sample for %.0f s (is it stopped, or its disk slow?): "
                        "it is loaded here, too",
                        PATIENCE,
                    )
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _take(self, slot: int) -> bool:
        if slot == NO_SLOT or self._slots.state_bytes[slot] == READY or self._mine.get(slot, _NOBODY)[0] == os.getpid():
            return True
        if not self._claims.take(slot):
            return False
        self._mine[slot] = _here()
        return True

    def _is_free(self, slot: int) -> bool:
        if not self._claims.take(slot):
            return False
        self._claims.give_up(slot)
        return True


def _here() -> tuple[int, int]:
    """This process and this thread: a forked child has the numbers of its parent's turns, and none of its claims."""
    return os.getpid(), threading.get_ident()

"""Who may write a slot: one process, and one thread of it, at a time.

Processes are told apart by a byte lock on the segment's lock file. It costs 1.5 us, works between ranks that were
started separately, and the kernel frees it when its holder dies (a `multiprocessing.Lock` would stay locked for
ever). POSIX locks do not tell threads apart; inside a process the dict does, whose `setdefault` is atomic. A fork may
copy an entry of a thread that does not exist in the child: the child then leaves that slot to others.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_stocache.node.segment import Segment

__all__ = ["Claims"]


class Claims:
    """The claims of this process on the slots of a segment.

    Args:
        segment: whose lock file is used; slot k is byte k.

    Example:
        >>> claims = Claims(Segment.create(64))
        >>> with claims.trying(3) as mine, claims.trying(3) as mine_too:
        ...     mine, mine_too
        (True, False)
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._taken: dict[int, object] = {}

    @contextmanager
    def trying(self, slot: int) -> Iterator[bool]:
        """Claim a slot if nobody else has; yields whether it is ours."""
        taken = self._take(slot, wait=False)
        try:
            yield taken
        finally:
            if taken:
                self._give_up(slot)

    @contextmanager
    def waiting(self, slot: int) -> Iterator[None]:
        """Claim a slot as soon as nobody else has it."""
        while not self._take(slot, wait=True):
            time.sleep(0)  # another thread of this process has it
        try:
            yield
        finally:
            self._give_up(slot)

    def _take(self, slot: int, *, wait: bool) -> bool:
        mine = object()
        if self._taken.setdefault(slot, mine) is not mine:
            return False
        if self._segment.lock(slot, wait=wait):
            return True
        del self._taken[slot]
        return False

    def _give_up(self, slot: int) -> None:
        self._segment.unlock(slot)
        del self._taken[slot]

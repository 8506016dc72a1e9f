"""Who may write a slot: one process, and one thread of it, at a time.

Processes are told apart by a byte lock on the segment's lock file. It costs 1.5 us, works between ranks that were
started separately, and the kernel frees it when its holder dies (a `multiprocessing.Lock` would stay locked for
ever). POSIX locks do not tell threads apart; inside a process the dict does, whose `setdefault` is atomic. The dict
belongs to the segment, so that two caches that were unpickled over one segment exclude each other, too. A forked child
empties it: it has none of the locks, and none of the threads but one.

A claim is taken and given up slot by slot, also where many are filled: the kernel looks through all locks of the file
for each, which costs 10 ns per lock that anybody holds.
"""

from __future__ import annotations

import errno
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_stocache.node.segment import Segment

__all__ = ["Claims"]

_taken_here: weakref.WeakKeyDictionary[Segment, dict[int, object]] = weakref.WeakKeyDictionary()


def _forget() -> None:
    for taken in _taken_here.values():
        taken.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Claims:
    """The claims of this process on the slots of a segment.

    Args:
        segment: whose lock file is used; slot k is byte k.

    Example:
        >>> claims = Claims(Segment.create(64))
        >>> claims.take(3), claims.take(3)
        (True, False)
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._taken = _taken_here.setdefault(segment, {})

    @contextmanager
    def waiting(self, slot: int) -> Iterator[None]:
        """Claim a slot as soon as nobody else has it."""
        while not self.take(slot, wait=True):
            time.sleep(0)  # another thread of this process has it, or see `take`
        try:
            yield
        finally:
            self.give_up(slot)

    def take(self, slot: int, *, wait: bool = False) -> bool:
        """Claim a slot; whether it is ours now. Who has it gives it up (`waiting` does both)."""
        mine = object()
        if self._taken.setdefault(slot, mine) is not mine:
            return False
        locked = False
        try:
            locked = self._segment.lock(slot, wait=wait)
        except OSError as error:
            # The kernel takes the threads of a process for one: one waits for another process, which waits for another
            # thread, and that is no deadlock.
            if error.errno != errno.EDEADLK:
                raise
        finally:
            if not locked:
                del self._taken[slot]
        return locked

    def holder(self, slot: int) -> int | None:
        """The other process that has a slot; None if there is none, or it cannot be known."""
        return self._segment.holder(slot)

    def give_up(self, slot: int) -> None:
        """Give a slot up that is ours."""
        self._segment.unlock(slot)
        self._taken.pop(slot, None)  # gone in the child of a fork

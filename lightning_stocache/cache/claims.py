"""Claims: one thread of one process at a time may write a slot.

The lock of a byte excludes other processes (`Segment.lock`), also ranks that were started separately. The kernel frees
it when its process dies; a `multiprocessing.Lock` would stay locked for ever. Threads of a process share it, so a dict
excludes them; its `setdefault` is atomic. A forked child empties the dict, because it has none of the locks, and only
one of the threads.

KeyboardInterrupt may leave a claim of a thread, whole or in halves. The thread's next use of the slot ends it.
"""

from __future__ import annotations

import errno
import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager

from lightning_stocache.node.segment import Segment

__all__ = ["Claims"]

_owners_here: weakref.WeakKeyDictionary[Segment, dict[int, list[int]]] = weakref.WeakKeyDictionary()


def _forget() -> None:
    for owners in _owners_here.values():
        owners.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


class Claims:
    """The claims of this process on the slots of a segment; slot k is byte k.

    Example:
        >>> claims = Claims(Segment.create(64))
        >>> claims.take(3), claims.take(3)
        (True, False)
    """

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._owners = _owners_here.setdefault(segment, {})

    @contextmanager
    def waiting(self, slot: int) -> Iterator[None]:
        """Claim a slot as soon as it is free, and release it in the end. Not re-entrant.

        Raises:
            OSError: this process has no locks (ENOLCK).
        """
        if not self._segment.has_locks:
            raise OSError(errno.ENOLCK, "this system has no locks between processes, or this process no descriptor")
        while not (self.take(slot, wait=True) or self.is_mine(slot)):
            time.sleep(0)  # another thread of this process has the slot
        try:
            yield
        finally:
            self.release(slot)

    def take(self, slot: int, *, wait: bool = False) -> bool:
        """Claim a slot. Returns whether this thread has the claim now, and must release it (`waiting` does both)."""
        mine = [threading.get_ident()]
        if self._owners.setdefault(slot, mine) is not mine:
            return False
        locked = False
        try:
            locked = self._segment.lock(slot, wait=wait)
        finally:
            if not locked:
                self._segment.unlock(slot)  # KeyboardInterrupt may have come behind the system call
                del self._owners[slot]
        return locked

    def is_mine(self, slot: int) -> bool:
        """Whether this thread has claimed a slot. A claim that KeyboardInterrupt has left is whole again."""
        return self._owners.get(slot) == [threading.get_ident()] and self._segment.lock(slot)

    def release(self, slot: int) -> None:
        """Release a slot that this thread has claimed."""
        self._segment.unlock(slot)
        self._owners.pop(slot, None)  # missing in a forked child

"""Who may write a slot: one process, and one thread of it, at a time; and who loads which sample.

A byte lock on the segment's lock file excludes other processes. It costs 1.5 us, works between ranks that were started
separately, and the kernel frees it when its process dies (a `multiprocessing.Lock` would stay locked for ever). POSIX
locks do not exclude other threads of the process; a dict does, whose `setdefault` is atomic. The dict belongs to the
segment, so that two stores that were unpickled over one segment exclude each other, too. A forked child empties it: it
has none of the locks, and none of the threads but one.

A claim is taken and released slot by slot, also where many are filled: the kernel looks through all locks of the file
for each, which costs 10 ns per lock.

Turns: two processes that miss the same sample both load it, and one of them stores it. Within a job that is rare: each
index is drawn once an epoch. Four trials of a sweep draw the same indices in the same order. So they take turns: a slot
is claimed before its sample is loaded, not only before it is stored, and a thread that finds it claimed loads other
samples first and waits then. No thread waits while it has a claim, so none waits for ever; a claim goes with its
process. A process that has waited in vain (the other one was stopped, or writes to a disk that hangs) loads all samples
by itself from then on.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.node.segment import Segment

__all__ = ["PATIENCE", "Claims", "Turns"]

log = logging.getLogger(__name__)

PATIENCE = 30.0  # seconds that a process waits for others, once
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.01

_taken_here: weakref.WeakKeyDictionary[Segment, dict[int, list[int]]] = weakref.WeakKeyDictionary()


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
        """Claim a slot as soon as it is free, and release it in the end."""
        while not self.take(slot, wait=True):
            time.sleep(0)  # another thread of this process has it, or see `take`
        try:
            yield
        finally:
            self.release(slot)

    def take(self, slot: int, *, wait: bool = False) -> bool:
        """Claim a slot. Returns whether this thread has it now and must release it (`waiting` does both)."""
        mine = [threading.get_ident()]
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

    def is_mine(self, slot: int) -> bool:
        """Whether this thread has claimed a slot."""
        return self._taken.get(slot) == [threading.get_ident()]

    def release(self, slot: int) -> None:
        """Release a slot that this thread has claimed."""
        self._segment.unlock(slot)
        self._taken.pop(slot, None)  # gone in the child of a fork


class Turns:
    """The turns of this process at loading samples: claims on slots that are taken before their samples are loaded.

    Args:
        claims: on the slots of the store.
        arc: which indices have a slot, and where.
        is_stored: whether a slot of the store has a sample.
        are_taken: whether another job can open the store.
    """

    def __init__(self, claims: Claims, arc: Arc, is_stored: Callable[[int], bool], *, are_taken: bool) -> None:
        self._claims, self._arc, self._is_stored = claims, arc, is_stored
        self.are_taken = self._were_taken = are_taken

    def take(self, indices: Iterable[int]) -> list[int]:
        """Take the turns at some indices. Returns those that nobody else is loading, to be stored or released."""
        return [index for index in indices if self._take(self._arc.slot(index))]

    def release(self, indices: Iterable[int]) -> None:
        """Release the turns at some indices: others may load what was not stored."""
        for index in indices if self._were_taken else ():
            if self._claims.is_mine(slot := self._arc.slot(index)):
                self._claims.release(slot)

    def wait(self, indices: Sequence[int]) -> bool:
        """Wait until nobody is loading those indices; False if that takes too long."""
        end, pause = time.monotonic() + PATIENCE, _FIRST_PAUSE
        for index in indices if self.are_taken else ():
            while not self.take([index]):
                if time.monotonic() > end:
                    log.warning(
                        "another process has been loading a sample for %.0f s (is it stopped, or its disk slow?): "
                        "from now on all samples are loaded here, too",
                        PATIENCE,
                    )
                    self.are_taken = False
                    return False
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            self.release([index])
        return self.are_taken

    def _take(self, slot: int) -> bool:
        claims = self._claims
        return slot == NO_SLOT or self._is_stored(slot) or claims.is_mine(slot) or claims.take(slot)

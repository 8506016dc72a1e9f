"""Samples on their way to a disk: a thread of each process stores them, so that no batch waits for a disk.

What waits is copied, because who loaded a sample may change it, and is bounded. Where the disk is slower than the
source, or stands still, the queue is full: who comes then waits for a tenth of a second, at most once a second, and
then goes on without. So does who wants a sample that is still waiting. Such a sample is loaded again. A process that
ends gives the thread a few seconds for what is left; so does who closes the store.

A forked child begins with an empty queue, for the thread is its parent's. The thread ends with the store.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from multiprocessing import util
from queue import SimpleQueue

__all__ = ["LAST_SECONDS", "QUEUE_BYTES", "WriteBehind"]

log = logging.getLogger(__name__)

QUEUE_BYTES = 32 * 2**20
"""Bytes that may wait, in each process; one sample may always."""

_PATIENCE, _REST = 0.1, 1.0  # seconds that who fills waits for room, and for which nobody waits after that
LAST_SECONDS = 4.0
"""For what is left when the process, or the store, ends; DataLoader ends a worker that takes 5 s."""

_Sample = tuple[int, list[memoryview], int]


class WriteBehind:
    """Stores samples by a thread, in the order in which they come.

    Args:
        store: is called by the thread with a number and the parts of a sample, which it owns. It must raise nothing.
            No number comes twice at a time.

    Example:
        >>> stored = []
        >>> behind = WriteBehind(lambda number, parts: stored.append((number, bytes(parts[0]))))
        >>> behind.put(3, [memoryview(b"abc")]), behind.flush(), stored
        (True, True, [(3, b'abc')])
    """

    def __init__(self, store: Callable[[int, Sequence[memoryview]], None]) -> None:
        self._store = store
        self._pid = os.getpid()
        self._samples: SimpleQueue[_Sample | None] = SimpleQueue()
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._waiting_bytes = 0
        self._thread: threading.Thread | None = None
        self._slow_until = 0.0

    def put(self, number: int, contents: Sequence[memoryview]) -> bool:
        """Have a sample stored, soon; False if too much is waiting already, and the disk does not get on."""
        if self._pid != os.getpid():
            WriteBehind.__init__(self, self._store)
        nbytes = sum(part.nbytes for part in contents)
        with self._changed:
            if not self._has_room(nbytes):
                return False
            sample = number, [memoryview(bytearray(part)) for part in contents], nbytes
            self._waiting.add(number)
            self._waiting_bytes += nbytes
            self._samples.put(sample)
            if self._thread is None:
                self._start()
        return True

    def flush(self) -> bool:
        """Wait until all is stored, but no longer than a few seconds; whether it is."""
        if self._pid != os.getpid() or self._thread is None:
            return True
        end = time.monotonic() + LAST_SECONDS
        with self._changed:
            while self._waiting and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            if self._waiting:
                words = "the disk did not take the last %d samples in %.0f s: the next job loads them again"
                log.warning(words, len(self._waiting), LAST_SECONDS)
            return not self._waiting

    def wait_for(self, numbers: Iterable[int]) -> bool:
        """Wait for a moment, at most once a second, until none of those is waiting to be stored; whether one was."""
        if self._pid != os.getpid() or not self._waiting or self._waiting.isdisjoint(wanted := set(numbers)):
            return False
        with self._changed:
            self._waited(lambda: self._waiting.isdisjoint(wanted))
        return True

    def _has_room(self, nbytes: int) -> bool:
        """Whether so many bytes may wait, too; a disk that is only busy for a moment is waited for."""
        if not self._waiting or self._waiting_bytes + nbytes <= QUEUE_BYTES:
            return True
        return self._waited(lambda: self._waiting_bytes + nbytes <= QUEUE_BYTES or not self._waiting)

    def _waited(self, enough: Callable[[], bool]) -> bool:
        """Wait for a moment until the thread has got on enough; not again soon after it was in vain."""
        now = time.monotonic()
        if now < self._slow_until:
            return enough()
        if self._changed.wait_for(enough, _PATIENCE):
            return True
        self._slow_until = now + _REST
        return False

    def _start(self) -> None:
        this = weakref.ref(self)
        self._thread = threading.Thread(target=_work, args=(this, self._samples), name="write-behind", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._samples.put, None)
        # At the end of a process of multiprocessing, too, for which atexit does nothing.
        util.Finalize(None, _flush, args=(this,), exitpriority=10)

    def store(self, sample: _Sample) -> None:
        """Store what has waited, on the thread."""
        number, contents, nbytes = sample
        try:
            self._store(number, contents)
        finally:
            with self._changed:
                self._waiting.remove(number)
                self._waiting_bytes -= nbytes
                self._changed.notify_all()


def _work(behind: weakref.ref[WriteBehind], samples: SimpleQueue[_Sample | None]) -> None:
    """Store what comes, for one that may go meanwhile."""
    while (sample := samples.get()) is not None:
        if (this := behind()) is not None:
            this.store(sample)
        del this


def _flush(behind: weakref.ref[WriteBehind]) -> None:
    if (this := behind()) is not None:
        this.flush()

"""The next batch, gathered on a thread.

While the trainer computes, a thread gathers the next batch; what the trainer waits for falls from 640 to 36 us per
batch of 64 photographs. Without workers it gathers the hits of a batch while its misses are loaded. It only copies
memory, and makes batches of it: it draws no index, takes no claim and counts nothing, and runs no code of the user's
but to make a namedtuple. Where it has not begun, the consumer gathers itself. A consumer that comes back sooner than a
thread wakes (an empty loop) is left alone: handing the interpreter to and fro would cost it 90 us per batch. The thread
must be started after worker processes were forked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

from lightning_stocache.loading.interrupts import held_back

__all__ = ["Prefetcher", "Job", "WORTHWHILE_NS"]

WORTHWHILE_NS = 200_000  # a consumer that is away for less is left alone: a thread wakes in 40 to 90 us


class Job:
    """Work that the thread does, or who wants the result: whoever begins first.

    Args:
        work: what is to be done. Where it fails on the thread, it is done again by who wants the result.
    """

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work, self._result = work, None
        self._begun, self._done = threading.Lock(), threading.Lock()
        self._done.acquire()

    def run(self) -> None:
        """On the thread: do it, unless somebody has begun."""
        if self._begun.acquire(blocking=False):
            try:
                self._result = self._work()
            except Exception:  # raised where the result is wanted
                pass
            finally:
                self._done.release()

    def result(self) -> Any:
        """The result: made now if nobody has begun, else waited for."""
        if self._begun.acquire(blocking=False):
            self._done.release()
        with self._done:
            if self._result is None:
                self._result = self._work()
            return self._result


class Prefetcher:
    """The thread. It holds nothing but its queue, so what offers jobs can be collected; `stop` ends it."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def offer(self, job: Job) -> None:
        """Have a job begun as soon as the thread can."""
        if self._thread is None:
            with held_back():
                self._thread = threading.Thread(target=_run, args=(self._jobs,), name="stocache-prefetch", daemon=True)
                self._thread.start()
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread, after the copy that is under way."""
        thread, self._thread = self._thread, None
        if thread is not None:
            self._jobs.put(None)
            if thread is not threading.current_thread():
                thread.join()


def _run(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # and with it the result, which is memory that is to be used again

"""Child processes: waiting for another process, ending with the parent, and why a child did not start; other threads.

A killed process tells nobody, but its children get another parent. So a child looks at its parent's id now and then.
Under forkserver the parent is the server, which ends with the process that uses it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator

__all__ = ["REPORT_SECONDS", "THREAD_PREFIX", "end_with_parent", "other_threads", "poll", "why_not_begun"]

REPORT_SECONDS = 10.0
"""Seconds between two reports about a wait."""

THREAD_PREFIX = "stocache-"
"""The names of this package's threads begin with it. They run no code of the user's."""

# They send and receive batches, and move them to page-locked memory.
_LIBRARIES = ("multiprocessing.queues", "multiprocessing.resource_sharer", "torch.utils.data._utils.pin_memory")
_LOOK_SECONDS = 0.5
_FORK = 'say multiprocessing_context="fork" (Linux\'s default until Python 3.13)'


def poll(pause: float) -> Iterator[float]:
    """Yield at once, and again after each sleep of `pause` seconds, without end.

    Yields the seconds waited so far whenever a report is due, else 0.
    """
    begin, due = time.monotonic(), REPORT_SECONDS
    while True:
        seconds = time.monotonic() - begin
        is_due = seconds >= due
        due += REPORT_SECONDS * is_due
        yield seconds if is_due else 0.0
        time.sleep(pause)


def end_with_parent() -> None:
    """End this process when its parent has ended, even in the middle of a load. A thread does so."""
    name = f"{THREAD_PREFIX}parent"
    threading.Thread(target=_end_without, args=(os.getppid(),), name=name, daemon=True).start()
    # A spawned process imports for seconds before this call. If its creator has ended by now, it has another parent.
    creator = multiprocessing.parent_process()
    if creator is not None and not creator.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def other_threads() -> list[threading.Thread]:
    """The threads of Python that may run code of the user's beside the calling thread.

    Left out are the threads of this package, of DataLoader and its queues, and tqdm's monitor.
    """
    threads = (thread for thread in threading.enumerate() if thread is not threading.current_thread())
    return [thread for thread in threads if not _is_of_library(thread)]


def _is_of_library(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None)  # without this name a thread counts as the user's
    module = str(getattr(target, "__module__", "") if type(thread) is threading.Thread else type(thread).__module__)
    return thread.name.startswith(THREAD_PREFIX) or module in _LIBRARIES or module.startswith("tqdm.")


def why_not_begun(method: str) -> str:
    """The likely reason why a process with this start method ended before it did anything; "" for a forked process.

    Example:
        >>> why_not_begun("spawn").partition(":")[0]
        "A process that is started by 'spawn' imports what it is sent"
    """
    if method == "fork":
        return ""
    return (
        f"A process that is started by {method!r} imports what it is sent: it finds no class or function that a "
        'notebook\'s cell has made, and runs a script again that has no `if __name__ == "__main__":`. Move them into '
        f"a module, or {_FORK}"
    )

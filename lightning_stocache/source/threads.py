"""Whether other threads of this process may run the user's code.

Generators belong to the process. Where other threads run, a generator that has moved during a read says nothing about
the read, and nobody may put it back. Some threads are known to draw nothing: those that send the replies of workers,
page-lock batches, gather ahead, and redraw a progress bar.
"""

from __future__ import annotations

import threading

__all__ = ["has_other_threads"]

_KNOWN = ("QueueFeederThread", "stocache-", "TMonitor", "_pin_memory_loop", "_heartbeat_loop")


def has_other_threads() -> bool:
    """Whether a thread besides this one runs that may draw random numbers."""
    if threading.active_count() == 1:
        return False
    here = threading.current_thread()
    others = [thread for thread in threading.enumerate() if thread is not here]
    return any(not _is_known(thread) for thread in others)


def _is_known(thread: threading.Thread) -> bool:
    """Whether a thread is one of those that draw nothing, by its name or its class."""
    return any(known in f"{thread.name} {type(thread).__name__}" for known in _KNOWN)

"""Steps that no signal interrupts: starting and ending workers, sending them a request, and taking shared memory.

KeyboardInterrupt between a worker's start and its registration leaves a process that nobody ends. Torch's handler of
SIGCHLD raises where a worker was killed; in the middle of a request it leaves the queue's lock taken, and ending the
workers waits for that lock for ever. Elsewhere both may come at any moment: they end the epoch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["held_back"]


@contextmanager
def held_back(number: int = signal.SIGINT) -> Iterator[None]:
    """Call the Python handler of a signal at the end of the block. Handlers run in the main thread alone."""
    handler, came, process = signal.getsignal(number), list[FrameType | None](), os.getpid()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return

    def note(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            came.append(frame)
        else:  # a worker that was forked in the block
            handler(number, frame)

    try:
        signal.signal(number, note)
        yield
    finally:
        signal.signal(number, handler)
    if came:
        handler(number, came[0])

"""Steps that Ctrl-C does not interrupt."""

from __future__ import annotations

import inspect
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["held_back"]


@contextmanager
def held_back() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block, not in it. Handlers of signals run in the main thread alone.

    Between a worker's start and its registration, it would leave a process that nobody ends.
    """
    handler = signal.getsignal(signal.SIGINT)
    process = os.getpid()
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    is_held = True
    has_come = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal has_come  # the frame is not kept: if `note` stays the handler, it would keep the frame's objects alive
        if is_held and os.getpid() == process:
            has_come = True
        else:  # in a worker that was forked in the block, or after the end of the block was interrupted
            handler(number, frame)

    try:
        signal.signal(signal.SIGINT, note)
        yield
    finally:
        try:
            signal.signal(signal.SIGINT, handler)
        finally:
            is_held = False
    if has_come:
        handler(signal.SIGINT, inspect.currentframe())

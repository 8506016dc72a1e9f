"""When Ctrl-C may interrupt.

A KeyboardInterrupt may come after any call: also when a worker's answer has been taken out of its queue and nobody has
it yet, and that batch is lost. So SIGINT is held back while a batch passes from hand to hand (`HeldBack`) and let
through where the loader waits for workers or runs the user's source (`LetThrough`). What came in between is raised at
the next of these places, or at the end. Nothing that is held back takes long, but for a user's sampler: after a second
SIGINT is held back no more.

Python runs signal handlers in the main thread only: in other threads there is nothing to hold back.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["HeldBack", "LetThrough", "forget_hold"]


PATIENCE_SECONDS = 1.0


class _Sigint:
    """The handler of SIGINT, which can be kept waiting."""

    def __init__(self) -> None:
        self._waiting: Callable[[int, FrameType | None], Any] | None = None
        self._came: FrameType | None = None
        self._came_at: float | None = None

    @property
    def is_held(self) -> bool:
        return self._waiting is not None

    def hold(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else nothing is raised
            self._came_at = None
            signal.signal(signal.SIGINT, self._note)  # from here on none is raised
            self._waiting = handler

    def release(self) -> None:
        handler, self._waiting = self._waiting, None
        if handler is None:
            return
        signal.signal(signal.SIGINT, handler)
        frame, self._came = self._came, None
        if self._came_at is not None:
            handler(signal.SIGINT, frame)

    def forget(self) -> None:
        self._came_at = None
        self.release()

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._came_at is None:
            self._came, self._came_at = frame, now
        elif now - self._came_at > PATIENCE_SECONDS and self._waiting is not None:
            self._waiting(number, frame)


_sigint = _Sigint()


class HeldBack:
    """SIGINT waits until the end of the block; inside another such block this one does nothing.

    Example:
        >>> from signal import SIGINT, raise_signal
        >>> try:
        ...     with HeldBack():
        ...         raise_signal(SIGINT)
        ...         print("whole")
        ... except KeyboardInterrupt:
        ...     print("interrupted")
        whole
        interrupted
    """

    def __enter__(self) -> None:
        self._outermost = not _sigint.is_held and _in_main_thread()
        if self._outermost:
            _sigint.hold()

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _sigint.release()


class LetThrough:
    """Inside a `HeldBack` block: SIGINT is raised again, first of all the one that waits."""

    def __enter__(self) -> None:
        self._held = _sigint.is_held and _in_main_thread()
        if self._held:
            try:
                _sigint.release()
            except BaseException:
                _sigint.hold()
                raise

    def __exit__(self, *_: object) -> None:
        if self._held:
            _sigint.hold()


def forget_hold() -> None:
    """In a process that was forked while SIGINT was held back: it comes as it did before."""
    _sigint.forget()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

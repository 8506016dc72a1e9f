"""When Ctrl-C may interrupt, and the death of a worker.

A KeyboardInterrupt may come after any call: also when a worker's answer has been taken out of its queue and nobody has
it yet, and that batch is lost. So SIGINT is held back while a batch passes from hand to hand (`HeldBack`) and let
through where the loader waits for workers or runs the user's source (`LetThrough`). What came in between is raised at
the next of these places, or at the end. Nothing that is held back takes long, but for a user's sampler: after a second
SIGINT is held back no more.

The same holds for torch's handler of SIGCHLD, which raises where a worker was killed: in the middle of a request it
would leave the queue's lock taken, and who ends the workers would wait for that for ever.

Python runs signal handlers in the main thread only: in other threads there is nothing to hold back.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

__all__ = ["HeldBack", "LetThrough", "forget_hold", "hold_back_deaths"]


PATIENCE_SECONDS = 1.0


class _Sigint:
    """The handler of SIGINT, which can be kept waiting."""

    def __init__(self) -> None:
        self.is_held = False
        self._waiting: Callable[[int, FrameType | None], Any] | None = None
        self._came: FrameType | None = None
        self._came_at: float | None = None

    def hold(self) -> None:
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else nothing is raised
            self._came_at = None
            signal.signal(signal.SIGINT, self._note)  # from here on none is raised
            self._waiting = handler
        self.is_held = True

    def release(self) -> None:
        self.is_held = False
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


class _Sigchld:
    """Stands before the handler of SIGCHLD, once there is one that may raise, and can keep it waiting."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._held, self._came = False, False

    def stand_before(self) -> None:
        handler = signal.getsignal(signal.SIGCHLD)
        if self._handler is None and callable(handler):
            self._handler = handler
            signal.signal(signal.SIGCHLD, self._run)

    def hold(self) -> None:
        self._held = True

    def release(self) -> None:
        self._held = False
        if self._came:
            self._run(signal.SIGCHLD, None)

    def forget(self) -> None:
        self._held, self._came = False, False

    def _run(self, number: int, frame: FrameType | None) -> None:
        self._came = self._held
        if not self._held and self._handler is not None:
            self._handler(number, frame)


_sigint, _sigchld = _Sigint(), _Sigchld()


def _hold() -> None:
    _sigchld.hold()
    try:
        _sigint.hold()
    except BaseException:
        _sigchld.release()
        raise


def _release() -> None:
    try:
        _sigint.release()  # first: what SIGCHLD raises could keep it from putting the handler back
    finally:
        _sigchld.release()


class HeldBack:
    """SIGINT waits until the end of the block, and so does torch's handler of SIGCHLD (`hold_back_deaths`).

    Inside another such block this one does nothing.

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
            _hold()

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _release()


class LetThrough:
    """Inside a `HeldBack` block: what is held back is raised again, first of all what waits."""

    def __enter__(self) -> None:
        self._held = _sigint.is_held and _in_main_thread()
        if self._held:
            try:
                _release()
            except BaseException:
                _hold()
                raise

    def __exit__(self, *_: object) -> None:
        if self._held:
            _hold()


def hold_back_deaths() -> None:
    """Once a loader with workers has its iterator: from now on `HeldBack` knows torch's handler of SIGCHLD."""
    if hasattr(signal, "SIGCHLD") and _in_main_thread():
        _sigchld.stand_before()


def forget_hold() -> None:
    """In a process that was forked while signals were held back: they come as they did before."""
    _sigchld.forget()
    _sigint.forget()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()

"""The stall: how long training waited for data, how long it computed, and how long its loop took in all.

Three sums on the host's clock. Waiting and computing are contexts: the profiler of a Trainer enters them where
Lightning says that it does either, so these are the seconds that its own profilers show; `CacheMeter` enters them
itself. What the loop does besides (callbacks, logging, moving a batch to the device) is in the loop alone. `StepClock`
is another clock: it knows parts that lie in each other, and on a GPU reads the device's time.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

__all__ = ["Seconds", "Stall"]


class Seconds(NamedTuple):
    """What has been added up.

    Args:
        waited: for data; NaN if the loop has run and was never heard to wait, or to compute.
        computed: from the beginning to the end of a batch's forward, backward and optimiser step; NaN likewise.
        looped: waited, computed, and everything between, up to the last step's end.
    """

    waited: float = 0.0
    computed: float = 0.0
    looped: float = 0.0


class Stall:
    """Adds up seconds.

    Example:
        >>> stall = Stall()
        >>> stall.resume()  # the epoch begins
        >>> with stall.waiting:
        ...     batch = [1, 2]
        >>> with stall.computing:
        ...     loss = sum(batch)
        >>> stall.end()
        >>> seconds = stall.take()
        >>> 0 < seconds.waited + seconds.computed < seconds.looped
        True
    """

    def __init__(self) -> None:
        self.waiting, self.computing = _Sum(), _Sum()
        self._looped = 0.0
        self._resumed: float | None = None

    def resume(self) -> None:
        """The loop counts from now on: an epoch begins, or something that is not of it (validation) has ended."""
        self._resumed = time.perf_counter()

    def end(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        if self._resumed is not None:
            self._looped += now - self._resumed
        self._resumed = now

    def peek(self) -> Seconds:
        """The seconds so far."""
        if self._looped and not (self.waiting.seconds and self.computing.seconds):
            return Seconds(math.nan, math.nan, self._looped)
        return Seconds(self.waiting.seconds, self.computing.seconds, self._looped)

    def take(self) -> Seconds:
        """The seconds, which are then forgotten."""
        seconds = self.peek()
        self.waiting.seconds = self.computing.seconds = self._looped = 0.0
        return seconds


class _Sum:
    """The seconds that were spent in this context; an end that has no beginning is passed over."""

    __slots__ = ("_begun", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self._begun: float | None = None

    def __enter__(self) -> None:
        self._begun = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        if self._begun is not None:
            self.seconds += time.perf_counter() - self._begun
            self._begun = None

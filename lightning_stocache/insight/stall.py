"""The stall: how long training waited for data, and how long it computed.

A plain clock, fed with moments: a step begins, a step ends, and something else comes between two steps (validation).
Waiting is what lies between the end of a step and the beginning of the next; it includes what other callbacks do there,
and the copy to the device if the trainer makes it before the step.
"""

from __future__ import annotations

__all__ = ["Stall"]


class Stall:
    """Adds up waiting and computing.

    Example:
        >>> stall = Stall()
        >>> stall.resume(10.0)  # the epoch begins
        >>> stall.begin(10.5)
        >>> stall.end(12.0)
        >>> stall.take()
        (0.5, 1.5)
    """

    def __init__(self) -> None:
        self._waited = self._computed = 0.0
        self._ended: float | None = None
        self._begun: float | None = None

    def resume(self, now: float) -> None:
        """Waiting counts from now on: an epoch begins, or something that is not a step has ended."""
        self._ended, self._begun = now, None

    def begin(self, now: float) -> None:
        """A step begins: its batch is there."""
        if self._ended is not None:
            self._waited += now - self._ended
        self._ended, self._begun = None, now

    def end(self, now: float) -> None:
        """A step has ended."""
        if self._begun is not None:
            self._computed += now - self._begun
        self._ended, self._begun = now, None

    def peek(self) -> tuple[float, float]:
        """Seconds waited and computed so far."""
        return self._waited, self._computed

    def take(self) -> tuple[float, float]:
        """Seconds waited and computed, which are then forgotten."""
        seconds = self.peek()
        self._waited = self._computed = 0.0
        return seconds

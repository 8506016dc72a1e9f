"""The stall: how long training waited for data, how long it computed, and how long its loop took in all.

A plain clock, fed with the moments at which the trainer starts and stops something, by the names that Lightning's
profilers know: so these are the seconds that they show. What the loop does besides (callbacks, logging, moving a batch
to the device) is in the loop alone.
"""

from __future__ import annotations

import math
from typing import NamedTuple

__all__ = ["ACTIONS", "WAITING", "Seconds", "Stall"]

WAITING = "[_TrainingEpochLoop].train_dataloader_next"
"""The name of what the loop does while it waits for a training batch."""

_COMPUTING = "run_training_batch"
ACTIONS = frozenset({WAITING, _COMPUTING})
"""What is heard; all else is passed over."""


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
        >>> stall.resume(10.0)  # the epoch begins
        >>> stall.start("[_TrainingEpochLoop].train_dataloader_next", 10.0)
        >>> stall.stop("[_TrainingEpochLoop].train_dataloader_next", 10.5)
        >>> stall.start("run_training_batch", 10.75)
        >>> stall.stop("run_training_batch", 12.0)
        >>> stall.end(12.25)
        >>> stall.take()
        Seconds(waited=0.5, computed=1.25, looped=2.25)
    """

    def __init__(self) -> None:
        self._waited = self._computed = self._looped = 0.0
        self._started: dict[str, float] = {}
        self._heard: set[str] = set()
        self._resumed: float | None = None

    def start(self, action: str, now: float) -> None:
        """The trainer starts something."""
        if action in ACTIONS:
            self._started[action] = now
            self._heard.add(action)

    def stop(self, action: str, now: float) -> None:
        """The trainer has done something."""
        started = self._started.pop(action, None)
        if started is None:
            return
        if action == _COMPUTING:
            self._computed += now - started
        else:
            self._waited += now - started

    def resume(self, now: float) -> None:
        """The loop counts from now on: an epoch begins, or something that is not of it (validation) has ended."""
        self._resumed = now

    def end(self, now: float) -> None:
        """A step has ended."""
        if self._resumed is not None:
            self._looped += now - self._resumed
        self._resumed = now

    def peek(self) -> Seconds:
        """The seconds so far."""
        if self._looped and self._heard != ACTIONS:
            return Seconds(math.nan, math.nan, self._looped)
        return Seconds(self._waited, self._computed, self._looped)

    def take(self) -> Seconds:
        """The seconds, which are then forgotten."""
        seconds = self.peek()
        self._waited = self._computed = self._looped = 0.0
        return seconds

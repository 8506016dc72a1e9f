"""A profiler that also tells clocks what the Trainer's loop does.

No hook says when the loop begins to wait for a batch. Its profiler is told (by a Trainer without one, too), so a
profiler that passes everything on to the user's is put in its place while training runs.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any, Protocol

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_stocache.insight.stall import ACTIONS

__all__ = ["Clock", "listen", "log_every", "stop_listening"]


class Clock(Protocol):
    """What is told when the loop begins and ends something."""

    def start(self, action: str, now: float) -> None:
        """Something starts."""

    def stop(self, action: str, now: float) -> None:
        """Something has been done."""


def listen(trainer: Trainer, clock: Clock) -> None:
    """Tell a clock from now on when the Trainer waits for a training batch and computes one (`time.perf_counter`)."""
    untyped: Any = trainer  # the attribute is set where no type checker sees it
    if not isinstance(untyped.profiler, _ClockedProfiler):
        untyped.profiler = _ClockedProfiler(untyped.profiler)
    untyped.profiler.clocks.append(clock)


def stop_listening(trainer: Trainer, clock: Clock) -> None:
    """Tell it no more; the last one gives the Trainer its profiler back."""
    untyped: Any = trainer
    profiler = untyped.profiler
    if not isinstance(profiler, _ClockedProfiler) or clock not in profiler.clocks:
        return
    profiler.clocks.remove(clock)
    if not profiler.clocks:
        untyped.profiler = profiler.users


def log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; a barebones Trainer has 0, and no loggers."""
    return int(getattr(trainer, "log_every_n_steps", 0)) or 1


class _Nothing(ContextDecorator):
    """What a PassThroughProfiler does, in a quarter of the time."""

    def __init__(self, action_name: str) -> None:
        self._name = action_name

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        pass


class _ClockedProfiler(Profiler):
    """The user's profiler, and clocks beside it. It has no state of the base class: all else is asked of the user's."""

    def __init__(self, users: Profiler) -> None:
        self.users = users
        self.clocks: list[Clock] = []

    def start(self, action_name: str) -> None:
        self.users.start(action_name)
        self._tell_start(action_name)

    def stop(self, action_name: str) -> None:
        self._tell_stop(action_name)
        self.users.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        if action_name in ACTIONS:  # two of some forty per step
            return self._told(action_name)
        if type(self.users) is PassThroughProfiler:
            return _Nothing(action_name)
        return self.users.profile(action_name)

    @contextmanager
    def _told(self, action: str) -> Generator[Any, None, None]:
        with self.users.profile(action) as name:
            self._tell_start(action)
            try:
                yield name
            finally:
                self._tell_stop(action)

    def summary(self) -> str:
        return self.users.summary()

    def describe(self) -> None:
        self.users.describe()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.users.setup(*args, **kwargs)

    def teardown(self, stage: str | None) -> None:
        self.users.teardown(stage)

    def _tell_start(self, action: str) -> None:
        if action in ACTIONS:
            for clock in self.clocks:
                clock.start(action, time.perf_counter())

    def _tell_stop(self, action: str) -> None:
        if action in ACTIONS:
            for clock in self.clocks:
                clock.stop(action, time.perf_counter())

    def __getattr__(self, name: str) -> Any:
        if name == "users":  # a copy that has not been filled yet
            raise AttributeError(name)
        return getattr(self.users, name)

    def __del__(self) -> None:
        """The base class would tear down here, and with it the user's."""

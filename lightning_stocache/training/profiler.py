"""A profiler that also tells clocks what the Trainer's loop does.

No hook says when the loop begins to wait for a batch. Its profiler is told (by a Trainer without one, too), so a
profiler that passes everything on to the user's is put in its place while training runs.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator
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


def listen(trainer: Trainer, clock: Clock, actions: Collection[str] | None = None) -> None:
    """Tell a clock from now on what the Trainer does, with `time.perf_counter`.

    Args:
        trainer: gets a profiler that tells it, until `stop_listening`.
        clock: is told.
        actions: their names; by default when the Trainer waits for a training batch and when it computes one.
    """
    untyped: Any = trainer  # the attribute is set where no type checker sees it
    if not isinstance(untyped.profiler, _ClockedProfiler):
        untyped.profiler = _ClockedProfiler(untyped.profiler)
    untyped.profiler.add(clock, ACTIONS if actions is None else actions)


def stop_listening(trainer: Trainer, clock: Clock) -> None:
    """Tell it no more; the last one gives the Trainer its profiler back."""
    untyped: Any = trainer
    profiler = untyped.profiler
    if not isinstance(profiler, _ClockedProfiler):
        return
    profiler.remove(clock)
    if not profiler.told:
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


class _Told:
    """What is heard of an action where the user's profiler does nothing: it has no state, so one serves all steps."""

    __slots__ = ("_clocks", "_name")

    def __init__(self, action_name: str, clocks: list[Clock]) -> None:
        self._name, self._clocks = action_name, clocks

    def __enter__(self) -> str:
        for clock in self._clocks:
            clock.start(self._name, time.perf_counter())
        return self._name

    def __exit__(self, *_: object) -> None:
        for clock in self._clocks:
            clock.stop(self._name, time.perf_counter())


class _ClockedProfiler(Profiler):
    """The user's profiler, and clocks beside it. It has no state of the base class: all else is asked of the user's.

    `told` has the clocks of each action that is heard.
    """

    def __init__(self, users: Profiler) -> None:
        self.users = users
        self.told: dict[str, list[Clock]] = {}
        self._quick: dict[str, _Told] = {}  # where the user's does nothing

    def add(self, clock: Clock, actions: Collection[str]) -> None:
        """Tell a clock of these actions."""
        for action in actions:
            self.told.setdefault(action, []).append(clock)
        self._prepare()

    def remove(self, clock: Clock) -> None:
        """Tell a clock nothing more."""
        told = {action: [other for other in clocks if other is not clock] for action, clocks in self.told.items()}
        self.told = {action: clocks for action, clocks in told.items() if clocks}
        self._prepare()

    def _prepare(self) -> None:
        idle = type(self.users) is PassThroughProfiler
        self._quick = {action: _Told(action, clocks) for action, clocks in self.told.items()} if idle else {}

    def start(self, action_name: str) -> None:
        self.users.start(action_name)
        self._tell_start(action_name)

    def stop(self, action_name: str) -> None:
        self._tell_stop(action_name)
        self.users.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        if (quick := self._quick.get(action_name)) is not None:  # a few of some forty per step
            return quick
        if action_name in self.told:
            return self._beside(action_name)
        if type(self.users) is PassThroughProfiler:
            return _Nothing(action_name)
        return self.users.profile(action_name)

    @contextmanager
    def _beside(self, action: str) -> Generator[Any, None, None]:
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
        for clock in self.told.get(action, ()):
            clock.start(action, time.perf_counter())

    def _tell_stop(self, action: str) -> None:
        for clock in self.told.get(action, ()):
            clock.stop(action, time.perf_counter())

    def __getattr__(self, name: str) -> Any:
        if name == "users":  # a copy that has not been filled yet
            raise AttributeError(name)
        return getattr(self.users, name)

    def __del__(self) -> None:
        """The base class would tear down here, and with it the user's."""

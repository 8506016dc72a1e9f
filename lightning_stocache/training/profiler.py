"""A profiler that also enters contexts of ours where the Trainer's loop does something.

No hook says when the loop begins to wait for a batch. Its profiler is told (by a Trainer without one, too), so a
profiler that passes everything on to the user's is put in its place while training runs. It is asked some thirty times
a step: where the user's does nothing it has the context at hand, and costs less than Lightning's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, ContextDecorator
from functools import lru_cache, reduce
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

__all__ = ["Contexts", "listen", "log_every", "stop_listening"]

Contexts = Mapping[str, AbstractContextManager[Any]]
"""What is entered where the Trainer does something, by the name that it has for it; may be entered again and again."""


def listen(trainer: Trainer, contexts: Contexts) -> None:
    """Enter contexts from now on where the Trainer does what they are for.

    Args:
        trainer: gets a profiler that enters them, until `stop_listening`.
        contexts: by the names of the actions.
    """
    untyped: Any = trainer  # the attribute is set where no type checker sees it
    if not isinstance(untyped.profiler, _Listener):
        untyped.profiler = _Listener(untyped.profiler)
    untyped.profiler.add(contexts)


def stop_listening(trainer: Trainer, contexts: Contexts) -> None:
    """Enter them no more; the last ones give the Trainer its profiler back."""
    untyped: Any = trainer
    profiler = untyped.profiler
    if not isinstance(profiler, _Listener):
        return
    profiler.remove(contexts)
    if not profiler.heard:
        untyped.profiler = profiler.users


def log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; a barebones Trainer has 0, and no loggers."""
    return int(getattr(trainer, "log_every_n_steps", 0)) or 1


@lru_cache(maxsize=256)  # a Trainer has some fifty names for what it does; a user's own may be any number
class _Nothing(ContextDecorator):
    """What a PassThroughProfiler does, in a quarter of the time."""

    def __init__(self, action_name: str) -> None:
        self._name = action_name

    def __enter__(self) -> str:
        return self._name

    def __exit__(self, *_: object) -> None:
        pass


class _Beside:
    """One context in another, which says what comes out of them."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> Any:
        entered = self._outer.__enter__()
        self._inner.__enter__()
        return entered

    def __exit__(self, *error: Any) -> bool | None:
        self._inner.__exit__(*error)
        return self._outer.__exit__(*error)


class _Listener(Profiler):
    """The user's profiler, and contexts beside it. It has no state of the base class: all else is asked of the user's.

    `heard` has the contexts of each action.
    """

    def __init__(self, users: Profiler) -> None:
        self.users = users
        self.heard: dict[str, list[AbstractContextManager[Any]]] = {}
        self._idle = type(users) is PassThroughProfiler
        self._joined: dict[str, AbstractContextManager[Any]] = {}  # all that are heard of an action, as one

    def add(self, contexts: Contexts) -> None:
        """Enter these, too."""
        for action, context in contexts.items():
            self.heard.setdefault(action, []).append(context)
        self._join()

    def remove(self, contexts: Contexts) -> None:
        """Enter these no more."""
        for action, context in contexts.items():
            others = [other for other in self.heard.pop(action, []) if other is not context]
            if others:
                self.heard[action] = others
        self._join()

    def _join(self) -> None:
        self._joined = {action: reduce(_Beside, contexts) for action, contexts in self.heard.items()}

    def start(self, action_name: str) -> None:
        self.users.start(action_name)
        if (context := self._joined.get(action_name)) is not None:
            context.__enter__()

    def stop(self, action_name: str) -> None:
        if (context := self._joined.get(action_name)) is not None:
            context.__exit__(None, None, None)
        self.users.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        context = self._joined.get(action_name)
        if self._idle:
            return _Nothing(action_name) if context is None else context
        users = self.users.profile(action_name)
        return users if context is None else _Beside(users, context)

    def summary(self) -> str:
        return self.users.summary()

    def describe(self) -> None:
        self.users.describe()

    def setup(self, *args: Any, **kwargs: Any) -> None:
        self.users.setup(*args, **kwargs)

    def teardown(self, stage: str | None) -> None:
        self.users.teardown(stage)

    def __getattr__(self, name: str) -> Any:
        if name == "users":  # a copy that has not been filled yet
            raise AttributeError(name)
        return getattr(self.users, name)

    def __del__(self) -> None:
        """The base class would tear down here, and with it the user's."""

"""Random number generators: the process-wide ones, and those that belong to a source.

A state consists of plain values: `==` compares it (`states_of`, `restore`), and JSON writes it, with bytes and arrays
as hexadecimal digits, so a checkpoint holds text, which is never unpickled (`as_text`, `put_back`).

`Generators` says which generators draw inside a `with` (`watch`), seeds them, and puts them back. In a process with
several threads it says and seeds nothing: any of them may draw.

`owned_generators` finds those that the code of a source can reach (`walk`): NumPy's Generator and RandomState,
`random.Random`, `torch.Generator`. albumentations and MONAI draw from such.
"""

from __future__ import annotations

import inspect
import json
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from lightning_stocache.node.processes import other_threads
from lightning_stocache.source.walk import GENERATORS, reachable

__all__ = [
    "ASKED",
    "PROCESS_WIDE",
    "Generators",
    "State",
    "as_text",
    "are_draws_evidence",
    "claim_threads",
    "owned_generators",
    "put_back",
    "restore",
    "states_of",
    "watch_entropy",
]

State: TypeAlias = dict[str, Any]

PROCESS_WIDE: Mapping[str, Any] = {"torch": torch.default_generator, "numpy.random": np.random, "random": random}
"""The generators that all code of a process draws from; a module stands for its own generator."""

ASKED = "another process"
"""Stands for the answers of another process, which may change at any time."""


# ---- states ----


def states_of(generators: Mapping[str, Any]) -> State:
    """The state of each generator, by its name; None for `random.SystemRandom`, which has none.

    Args:
        generators: objects of `GENERATORS`, or the modules of `PROCESS_WIDE`.
    """
    return {name: _state_of(generator) for name, generator in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put generators into states that `states_of` gave. A name that only one side has is skipped.

    Raises:
        ValueError, TypeError, KeyError: a value is not a state, or is the state of another kind of generator.
    """
    for name in generators.keys() & states.keys():
        _restore(generators[name], states[name])


def as_text(states: Mapping[str, Any]) -> dict[str, str]:
    """The states of generators as text, for a checkpoint.

    Example:
        >>> generators = {"mine": random.Random(7)}
        >>> state = as_text(states_of(generators))
        >>> drawn = generators["mine"].random()
        >>> put_back(generators, state)
        >>> generators["mine"].random() == drawn
        True
    """
    return {name: json.dumps(state) for name, state in states.items()}


def put_back(generators: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Put generators into states that `as_text` gave, as `restore` does."""
    restore(generators, {name: json.loads(texts[name]) for name in generators.keys() & texts.keys()})


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if hasattr(generator, "get_state"):
        return _plain(generator.get_state(legacy=False))
    try:
        return generator.getstate()
    except NotImplementedError:  # random.SystemRandom and its subclasses
        return None


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(_with_arrays(state))
    elif state is not None and not isinstance(generator, random.SystemRandom):
        version, words, spare = state  # text has lists where the state has tuples
        generator.setstate((version, tuple(words), spare))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "bytes": value.tobytes().hex()}
    return value.item() if isinstance(value, np.generic) else value


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"dtype", "bytes"}:
        return np.frombuffer(bytes.fromhex(state["bytes"]), state["dtype"])
    return {key: _with_arrays(item) for key, item in state.items()}


# ---- of a process and of a source ----


_are_threads_of_source = False


def claim_threads() -> None:
    """Declare that this process only reads a source: each thread that starts from now on is the source's."""
    global _are_threads_of_source
    _are_threads_of_source = True


def are_draws_evidence() -> bool:
    """Whether a generator that has moved was moved by the source that is read: no other thread could have drawn."""
    return _are_threads_of_source or not other_threads()


class Generators:
    """The process-wide generators, and those of a source if there is one. A `with` puts all of them back at its end.

    In a process with several threads no generator counts as moved, and none is seeded (`are_draws_evidence`).

    Example:
        >>> generators = Generators()
        >>> with generators.watch() as moved:
        ...     drawn = torch.rand(2)
        >>> moved
        ['torch']
    """

    def __init__(self, source: Any = None) -> None:
        cuda = cast(Any, torch.cuda)
        # Looked at once: a later generator has no state to return to.
        self._cuda = cuda.default_generators if cuda.is_initialized() else ()
        named = {f"torch.cuda:{device}": generator for device, generator in enumerate(self._cuda)}
        self._process_wide = {**PROCESS_WIDE, **named}
        self._source = source
        self._owned = {} if source is None else owned_generators(source)
        self._started: dict[int, State] = {}  # states of the source's generators, by seed
        self._begun: State = {}

    def __enter__(self) -> Generators:
        self._begun = self.state()
        return self

    def __exit__(self, *_: object) -> None:
        restore(self._process_wide | self._owned, self._begun)

    def find_new(self) -> None:
        """Include generators that the source has made meanwhile."""
        self._owned = owned_generators(self._source) | self._owned

    def state(self) -> State:
        """The state of every generator, by name; `==` compares it."""
        return {**states_of(self._process_wide), **_questions, **states_of(self._owned)}

    def moved(self, before: State, after: State | None = None) -> list[str]:
        """The names of generators that have drawn between two states; `after` is by default that of now."""
        return self.changed(before, after) if are_draws_evidence() else []

    def changed(self, before: State, after: State | None = None) -> list[str]:
        """The names of generators that have drawn between two states, for whatever thread."""
        now = self.state() if after is None else after
        return [name for name in before if before[name] != now.get(name)]

    @contextmanager
    def watch(self) -> Iterator[list[str]]:
        """Give a list. At the end of the `with` it gets the names of the generators that drew inside."""
        moved: list[str] = []
        before = self.state()
        try:
            yield moved
        finally:
            moved += self.moved(before)

    def seed(self, seed: int) -> None:
        """Seed the process-wide generators. The source's go on; a repeated seed restarts them as at its first use."""
        if not are_draws_evidence():
            return
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue the seed for a CUDA that starts later
        np.random.seed(seed % 2**32)  # the seed of an index above 2**31 is larger
        random.seed(seed)
        for generator in self._cuda:
            generator.manual_seed(seed)
        restore(self._owned, self._started.get(seed, {}))
        self._started[seed] = states_of(self._owned)


# Numbers of questions to the system. `multiprocessing` asks it when it connects, for instance to a manager.
_questions = {"the system": 0, ASKED: 0}


@contextmanager
def watch_entropy() -> Iterator[None]:
    """Count questions to the system for entropy as draws: a generator made anew in each read has no earlier state.

    Those of modules that a read imports do not count: it imports them once.
    """

    def ask(size: int) -> bytes:
        askers = _callers()
        if "importlib._bootstrap" not in askers:
            _questions[ASKED if askers[0].startswith("multiprocessing.") else "the system"] += 1
        return original(size)

    original = os.urandom
    modules = ((os, "urandom"), (random, "_urandom"))  # NumPy asks the second, by `secrets`
    for module, name in modules:
        setattr(module, name, ask)
    try:
        yield
    finally:
        for module, name in modules:
            setattr(module, name, original)


def _callers() -> list[str]:
    """The modules of the code that called the caller, the nearest first, up to this package, which calls all reads."""
    names = list[str]()
    frame: Any = cast(Any, inspect.currentframe()).f_back.f_back
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("lightning_stocache."):
            break
        names.append(name)
        frame = frame.f_back
    return names or [""]


# ---- that belong to a source ----


def owned_generators(source: Any) -> dict[str, Any]:
    """The generators that can be reached from a source, by where they lie; without the process-wide ones.

    Example:
        >>> class Noisy:
        ...     def __init__(self):
        ...         self.draws = {"noise": np.random.default_rng(0)}
        >>> list(owned_generators(Noisy()))
        ["Noisy.draws['noise']"]
    """
    # The process-wide ones: torch's, and those whose methods are the functions of NumPy's and Python's modules.
    functions: tuple[Any, ...] = (np.random.get_state, random.seed)
    common = {id(torch.default_generator), *(id(function.__self__) for function in functions)}
    found = ((path, node) for path, node in reachable(source) if issubclass(type(node), GENERATORS))
    return {path: node for path, node in found if id(node) not in common}

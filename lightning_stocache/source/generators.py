"""Random number generators: the process-wide ones, and those that belong to a source.

A state consists of plain values: `==` compares it (`states_of`, `restore`), and JSON writes it, with bytes and arrays
as hexadecimal digits, so a checkpoint holds text, which is never unpickled (`as_text`, `put_back`).

`Generators` says which generators draw inside a `with` (`watch`), seeds them, and puts them back. In a process with
several threads it says and seeds nothing: any of them may draw.

`reachable` walks from a source to the objects that its code can reach: attributes, containers, closures and defaults of
functions, and the globals that those functions name. `owned_generators` picks the generators among them: NumPy's
Generator and RandomState, `random.Random`, `torch.Generator`. albumentations and MONAI draw from such.
"""

from __future__ import annotations

import inspect
import json
import os
import random
import sys
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, islice
from typing import Any, TypeAlias, cast

import numpy as np
import torch

from lightning_stocache.node.processes import other_threads

__all__ = [
    "ASKED",
    "KINDS",
    "PROCESS_WIDE",
    "WRAPPED",
    "Generators",
    "State",
    "as_text",
    "are_draws_evidence",
    "attributes_of",
    "claim_threads",
    "is_of_library",
    "named_globals",
    "names_in",
    "node_dict",
    "owned_generators",
    "put_back",
    "reachable",
    "restore",
    "states_of",
    "watch_entropy",
]

State: TypeAlias = dict[str, Any]

PROCESS_WIDE: Mapping[str, Any] = {"torch": torch.default_generator, "numpy.random": np.random, "random": random}
"""The generators that all code of a process draws from; a module stands for its own generator."""

ASKED = "another process"
"""Stands for the answers of another process, which may change at any time."""

KINDS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""The classes of generators."""


# ---- states ----


def states_of(generators: Mapping[str, Any]) -> State:
    """The state of each generator, by its name; None for `random.SystemRandom`, which has none.

    Args:
        generators: objects of `KINDS`, or the modules of `PROCESS_WIDE`.
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
        questions = {"the system": repr(_entropy), ASKED: repr(_connections)}
        return {**states_of(self._process_wide), **questions, **states_of(self._owned)}

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
        np.random.seed(seed)
        random.seed(seed)
        for generator in self._cuda:
            generator.manual_seed(seed)
        restore(self._owned, self._started.get(seed, {}))
        self._started[seed] = states_of(self._owned)


_entropy = count()  # its next value moves with each question
_connections = count()  # `multiprocessing` asks the system when it connects, for instance to a manager


@contextmanager
def watch_entropy() -> Iterator[None]:
    """Count questions to the system for entropy as draws: a generator made anew in each read has no earlier state.

    Those of modules that a read imports do not count: it imports them once.
    """

    def ask(size: int) -> bytes:
        askers = _callers()
        if "importlib._bootstrap" not in askers:
            next(_connections if askers[0].startswith("multiprocessing.") else _entropy)
        return original(size)

    original, modules = os.urandom, ((os, "urandom"), (random, "_urandom"))  # NumPy asks the second, by `secrets`
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
    while frame is not None and not (name := str(frame.f_globals.get("__name__"))).startswith("lightning_stocache."):
        names.append(name)
        frame = frame.f_back
    return names or [""]


# ---- that belong to a source ----

_MOST = 20_000  # objects that are looked at
_FIRST = 256  # items of a container that are: a list of a million paths has no generator
# Packages whose functions draw from the process-wide generators, or from one that an object or a class of theirs has:
# their code is not followed, which would take a quarter of a second in albumentations alone.
_KNOWN = sys.stdlib_module_names | {
    *("PIL", "albucore", "albumentations", "cv2", "datasets", "h5py", "hydra", "kornia", "lightning"),
    *("lightning_stocache", "lmdb", "monai", "numpy", "omegaconf", "pandas", "polars", "pyarrow"),
    *("pydantic", "pytorch_lightning", "scipy", "skimage", "sklearn", "tensordict", "timm", "torch"),
    *("torch_geometric", "torchaudio", "torchvision", "transformers", "webdataset", "zarr"),
}
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), torch.Tensor, np.ndarray, np.generic)
_ARRAYS = (bytearray, torch.Tensor, np.ndarray)
WRAPPED: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
"""The attributes of objects that stand for a function or a method."""


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
    return {
        where: found for where, found in reachable(source) if issubclass(type(found), KINDS) and id(found) not in common
    }


def reachable(source: Any, *, skip: Iterable[Any] = (), arrays: bool = False) -> Iterator[tuple[str, Any]]:
    """The first 20,000 objects that can be reached from a source, with their places: no numbers, strings or arrays.

    Args:
        source: where the walk begins.
        skip: objects that are given, and not entered.
        arrays: whether arrays and tensors are given, too.
    """
    known, skipped = {id(source)}, set(map(id, skip))
    leaves = tuple(kind for kind in _LEAVES if not (arrays and kind in _ARRAYS))
    waiting = deque([(type(source).__name__, source)])
    for _ in range(_MOST):
        if not waiting:
            return
        where, node = waiting.popleft()
        yield where, node
        if id(node) in skipped:
            continue
        for step, child in _children(node):
            if not issubclass(type(child), leaves) and id(child) not in known:
                known.add(id(child))
                waiting.append((where + step if step[0] in ".[" else step, child))


def _children(node: Any) -> Iterator[tuple[str, Any]]:
    """The objects that an object leads to, with the step: an attribute, a key, or a name."""
    kind = type(node)  # never isinstance: a proxy may load what it stands for to answer
    if issubclass(kind, (*KINDS, types.ModuleType)):
        return
    if issubclass(kind, type):
        yield from _of_class(node)
        return
    if issubclass(kind, dict):
        yield from ((f"[{key!r}]", child) for key, child in islice(dict.items(node), _FIRST))
    elif issubclass(kind, list | tuple | set | frozenset | deque):
        yield from ((f"[{number}]", child) for number, child in enumerate(islice(kind.__iter__(node), _FIRST)))
    elif kind is types.FunctionType:
        yield from _of_function(node)
    elif kind in WRAPPED:
        yield from ((f".{name}", getattr(node, name)) for name in WRAPPED[kind])
    if kind.__module__ != "builtins":  # also of a subclass of a container
        yield from ((f".{name}", value) for name, value in list(attributes_of(node).items()))
        yield f".{kind.__name__}", kind


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes in an object's `__dict__` and slots. The object itself is not asked: a proxy might load."""
    slots = {}
    for base in type(node).__mro__:
        if "__slots__" not in vars(base):
            continue
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType:
                with suppress(AttributeError):
                    slots[name] = member.__get__(node)
    named = node_dict(node)
    if named is None:
        return slots
    return slots | named if slots else named


def node_dict(node: Any) -> dict[str, Any] | None:
    """The `__dict__` of an object, or None. The object itself is not asked."""
    try:
        attributes = object.__getattribute__(node, "__dict__")
    except AttributeError:
        return None
    return attributes if type(attributes) is dict else None


def is_of_library(owner: Any) -> bool:
    """Whether a class, function or module belongs to a library whose code need not be followed."""
    name = getattr(owner, "__name__" if isinstance(owner, types.ModuleType) else "__module__", None)
    return isinstance(name, str) and _top(name) in _KNOWN


def _of_class(kind: type) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        known = _top(base.__module__) in _KNOWN
        for name, value in list(vars(base).items()):
            if not known or issubclass(type(value), KINDS):
                yield f".{name}", value


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The objects in a function's closure and defaults, and the globals that it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # not filled yet
            yield name, cell.cell_contents
    yield ".__kwdefaults__", function.__kwdefaults__
    yield ".__defaults__", function.__defaults__
    if is_of_library(function):
        return
    names = list(names_in(function.__code__))
    for name in names:
        value = function.__globals__.get(name)
        if not isinstance(value, types.ModuleType):
            yield f"{function.__module__}.{name}", value
        elif _top(value.__name__) not in _KNOWN:
            yield from ((f"{value.__name__}.{inner}", vars(value).get(inner)) for inner in names)


def named_globals(function: types.FunctionType) -> list[str]:
    """The names in a function's code that may be globals; none for a library's."""
    return [] if is_of_library(function) else list(dict.fromkeys(names_in(function.__code__)))


def names_in(code: types.CodeType) -> Iterator[str]:
    """The names of attributes and globals in some code, also in the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a lambda, a comprehension
            yield from names_in(constant)


def _top(module: str | None) -> str:
    return (module or "").partition(".")[0]

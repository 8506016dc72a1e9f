"""The objects that the code of a source can reach.

An object leads to its class and its attributes, a container to its items, a class to its members, and a function to its
closure, its defaults and the globals that its code loads, also those of modules that it names. The code of libraries is
not followed. Each set of named values on the way is a `Variables`, which can be read and written.

No attribute of an object is asked for, because a proxy might load what it stands for: `__dict__`, slots and the class
tell.
"""

from __future__ import annotations

import datetime
import decimal
import dis
import enum
import fractions
import os
import pathlib
import random
import sys
import types
import uuid
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stocache.cache.codec import module_name

__all__ = [
    "CONTAINERS",
    "GENERATORS",
    "MISSING",
    "SCALARS",
    "VALUES",
    "WRAPPED",
    "Code",
    "Variables",
    "attributes_of",
    "class_name",
    "has_slots",
    "inside",
    "is_method",
    "is_of_library",
    "items_of",
    "node_dict",
    "reachable",
    "read_code",
    "same_object",
    "scopes_of",
    "variables_of",
]

MISSING = object()
"""Stands for the value of a name or key that is not there."""

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
"""The classes of random generators."""

SCALARS = frozenset((int, float, complex, str, bytes, bool, type(None)))

VALUES: Any = (
    *SCALARS,
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, range, slice, enum.Enum, type(...)),
    *(np.generic, np.dtype, torch.device, torch.dtype, torch.layout, torch.memory_format),
)
"""Classes of immutable values without a state of their own."""

CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)

WRAPPED: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    partial: ("func", "args", "keywords"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    property: ("fget",),
}
"""The attributes of objects that stand for a function or a method."""

_NOT_ENTERED = (*GENERATORS, types.ModuleType)
_ARRAYS = (bytearray, torch.Tensor, np.ndarray)
_MOST = 20_000  # objects that are looked at
_FIRST = 256  # items of a container that are: a list of a million paths has no generator
_METHODS = (types.FunctionType, staticmethod, classmethod, property)
_LOADS = {
    dis.opmap[name]: int(name == "LOAD_GLOBAL" and sys.version_info >= (3, 11))  # bits of the argument that are flags
    for name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "LOAD_FROM_DICT_OR_GLOBALS")
    if name in dis.opmap
}
_STORE_ATTR = dis.opmap["STORE_ATTR"]
_EXTENDED_ARG = dis.opmap["EXTENDED_ARG"]
_INSTALLED = frozenset(("site-packages", "dist-packages"))
# Packages whose functions draw from the process-wide generators, or from one that an object or a class of theirs has:
# their code is not followed, which would take a quarter of a second in albumentations alone.
_LIBRARIES = sys.stdlib_module_names | {
    *("PIL", "albucore", "albumentations", "cv2", "datasets", "h5py", "hydra", "kornia", "lightning"),
    *("lightning_stocache", "lmdb", "monai", "numpy", "omegaconf", "pandas", "polars", "pyarrow"),
    *("pydantic", "pytorch_lightning", "scipy", "skimage", "sklearn", "tensordict", "timm", "torch"),
    *("torch_geometric", "torchaudio", "torchvision", "transformers", "webdataset", "zarr"),
}


def reachable(source: Any, *, skip: Iterable[Any] = (), arrays: bool = False) -> Iterator[tuple[str, Any]]:
    """The first 20,000 objects that can be reached from a source, with their places: no plain values and no arrays.

    Args:
        source: where the walk begins.
        skip: objects that are given, and not entered.
        arrays: whether arrays and tensors are given, too.
    """
    known, skipped = {id(source)}, set(map(id, skip))
    leaves = VALUES if arrays else (*VALUES, *_ARRAYS)
    is_leaf = dict[type, bool]()
    waiting = deque([(type(source).__name__, source)])
    for _ in range(_MOST):
        if not waiting:
            return
        path, node = waiting.popleft()
        yield path, node
        if id(node) in skipped:
            continue
        for inner, child in _children(path, node):
            kind = type(child)
            if kind not in is_leaf:
                is_leaf[kind] = issubclass(kind, leaves)
            if not is_leaf[kind] and id(child) not in known:
                known.add(id(child))
                waiting.append((inner, child))


def _children(path: str, node: Any) -> Iterator[tuple[str, Any]]:
    kind = type(node)  # never isinstance: a proxy may load what it stands for to answer
    if issubclass(kind, _NOT_ENTERED):
        return
    if issubclass(kind, CONTAINERS):
        yield from ((inside(path, key, is_item=True), child) for key, child in islice(items_of(node), _FIRST))
    elif kind in WRAPPED:
        yield from ((f"{path}.{name}", getattr(node, name)) for name in WRAPPED[kind])
    elif kind is types.FunctionType:
        yield f"{path}.__kwdefaults__", node.__kwdefaults__
        yield f"{path}.__defaults__", node.__defaults__
    elif issubclass(kind, type):
        members = ((name, member) for base in node.__mro__ for name, member in list(vars(base).items()))
        yield from ((inside(path, name), member) for name, member in members if issubclass(type(member), GENERATORS))
    for variables in variables_of(path, node):
        values = list(variables.read().items())
        yield from ((inside(variables.prefix, name), value) for name, value in values)
    if kind.__module__ != "builtins":
        yield f"{path}.{kind.__name__}", kind


# ---- values by name ----


@dataclass(frozen=True)
class Variables:
    """Values that code reaches by name: the attributes of an object or a class, a closure, or globals.

    Args:
        path: names all of them together.
        prefix: the path before each name.
        read: returns the values by name, without a copy where possible.
        write: sets the value of a name; `MISSING` removes the name.
    """

    path: str
    prefix: str
    read: Callable[[], dict[str, Any]]
    write: Callable[[str, Any], None]

    def __getitem__(self, name: str) -> Any:
        return self.read().get(name, MISSING)

    def __setitem__(self, name: str, value: Any) -> None:
        self.write(name, value)

    def only(self, names: Collection[str]) -> Variables:
        """Those with some names alone."""
        return replace(self, read=lambda: {name: value for name, value in self.read().items() if name in names})


def variables_of(path: str, node: Any) -> Iterator[Variables]:
    """The values that an object, a class or a function reaches by name."""
    kind = type(node)
    is_builtin = kind.__module__ == "builtins" and kind not in (type, types.FunctionType)
    if is_builtin or issubclass(kind, _NOT_ENTERED):
        return
    if issubclass(kind, type):
        for base in node.__mro__:
            if not is_of_library(base):
                name = class_name(base)
                yield Variables(name, name, partial(_class_attributes, base), partial(_set_attribute, base))
        return
    attributes = node_dict(node)
    if has_slots(kind):
        yield Variables(path, path, partial(attributes_of, node), partial(_set_attribute, node))
    elif attributes is not None:
        yield Variables(path, path, partial(same_object, attributes), partial(_set_item, attributes))
    if kind is types.FunctionType:
        yield from scopes_of(path, node)


def scopes_of(path: str, function: types.FunctionType) -> Iterator[Variables]:
    """The closure of a function and the globals that it names; of a library's function the closure alone."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if cells:
        yield Variables(f"{path}()", f"{path}()", partial(_contents_of, cells), partial(_set_cell, cells))
    if is_of_library(function):
        return
    code, namespace = read_code(function.__code__), function.__globals__
    where = f"the globals of {function.__qualname__} at {path}"
    module = module_name(function.__module__)
    home = _installed_package(function)
    loaded = partial(_picked, namespace, code.globals, home)
    yield Variables(where, module, loaded, partial(_set_item, namespace))
    imported = {name: sys.modules[name] for name in code.names & sys.modules.keys()}  # perhaps in the function itself
    for inner in (imported | loaded()).values():
        if type(inner) is types.ModuleType and not is_of_library(inner) and not _is_elsewhere(inner, home):
            read = partial(_picked, vars(inner), code.names, home)
            yield Variables(f"{where} in {inner.__name__}", inner.__name__, read, partial(_set_item, vars(inner)))


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes in an object's `__dict__` and slots. The object itself is not asked: a proxy might load."""
    slots = {}
    for base in type(node).__mro__:
        members = vars(base).items() if "__slots__" in vars(base) else ()
        for name, member in members:
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


def has_slots(kind: type) -> bool:
    """Whether objects of a class have attributes in slots."""
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _class_attributes(kind: type) -> dict[str, Any]:
    """The methods and the other attributes of a class, without those that Python itself adds."""
    return {
        name: value
        for name, value in list(vars(kind).items())
        if is_method(value) or not ((name.startswith("__") and name.endswith("__")) or name == "_abc_impl")
    }


def is_method(value: Any) -> bool:
    """Whether an attribute of a class is a method or a property."""
    return type(value) in _METHODS or "__wrapped__" in (node_dict(value) or ())


def _contents_of(cells: dict[str, types.CellType]) -> dict[str, Any]:
    contents = {}
    for name, cell in cells.items():
        with suppress(ValueError):  # not filled yet
            contents[name] = cell.cell_contents
    return contents


def _picked(namespace: dict[str, Any], names: frozenset[str], home: str = "") -> dict[str, Any]:
    picked = {name: namespace[name] for name in sorted(names & namespace.keys())}
    return {name: value for name, value in picked.items() if not _is_elsewhere(value, home)} if home else picked


def _installed_package(function: types.FunctionType) -> str:
    """The package of a function that pip has installed; "" for code of the user's own folders."""
    is_installed = not _INSTALLED.isdisjoint(function.__code__.co_filename.split(os.sep))
    return str(function.__module__).partition(".")[0] if is_installed else ""


def _is_elsewhere(owner: Any, home: str) -> bool:
    """Whether a function, class or module belongs to another package than the code that names it, if that is installed.

    Installed packages lead to further ones, for instance to one that draws charts: thousands of objects, of which no
    sample is made.
    """
    if not home or not isinstance(owner, types.FunctionType | types.ModuleType | type):
        return False
    name: Any = owner.__name__ if isinstance(owner, types.ModuleType) else owner.__module__
    return str(name).partition(".")[0] != home


def same_object(node: Any) -> Any:
    """The object itself."""
    return node


def _set_item(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _set_attribute(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)


def _set_cell(cells: dict[str, types.CellType], name: str, value: Any) -> None:
    _set_attribute(cells[name], "cell_contents", value)


def items_of(container: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values, or positions and items, by the methods of the builtin class: a subclass may make items anew."""
    kind = type(container)
    base = kind if kind in CONTAINERS else next(base for base in CONTAINERS if issubclass(kind, base))
    return iter(dict.items(container)) if base is dict else enumerate(base.__iter__(container))


# ---- code ----


class Code(NamedTuple):
    """What stands in some code, and in the functions inside it.

    Args:
        globals: the global names that it loads.
        names: its names of attributes, globals and variables of functions around it.
        texts: its texts.
        written: the names of attributes that it sets.
    """

    globals: frozenset[str]
    names: frozenset[str]
    texts: frozenset[str]
    written: frozenset[str]


@lru_cache(4_096)
def read_code(code: types.CodeType) -> Code:
    """The names and texts in some code."""
    names, raw = code.co_names, code.co_code
    found = [
        {names[number >> flags] for operation, flags in _LOADS.items() for number in _arguments(raw, operation)},
        {*code.co_names, *code.co_freevars},
        {constant for constant in code.co_consts if isinstance(constant, str)},
        {names[number] for number in _arguments(raw, _STORE_ATTR)},
    ]
    inner = [read_code(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return Code(*(frozenset(ours).union(*theirs) for ours, *theirs in zip(found, *inner, strict=True)))


def _arguments(raw: bytes, operation: int) -> Iterator[int]:
    """The arguments of each such operation in some code. `dis` would take many times as long, on all operations."""
    operations = raw[::2]
    place = operations.find(operation)
    while place >= 0:
        argument = raw[2 * place + 1]
        before = place - 1
        while before >= 0 and operations[before] == _EXTENDED_ARG:
            argument |= raw[2 * before + 1] << 8 * (place - before)
            before -= 1
        yield argument
        place = operations.find(operation, place + 1)


# ---- classes ----


def class_name(kind: type) -> str:
    """A class with its module, in words that are the same in other processes."""
    return f"{module_of(kind)}.{kind.__qualname__}"


def module_of(kind: type) -> str:
    """The module of a class, by its name in the user's process; "" if the class has no text there, as SWIG's have."""
    module: Any = kind.__module__
    return module_name(module) if isinstance(module, str) else ""


def package_of(kind: type) -> str:
    """The package of a class."""
    return module_of(kind).partition(".")[0]


def is_of_library(owner: Any) -> bool:
    """Whether a class, function or module belongs to a library whose code need not be followed."""
    name = getattr(owner, "__name__" if isinstance(owner, types.ModuleType) else "__module__", None)
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def inside(path: str, name: Any, is_item: bool = False) -> str:
    """The path of an attribute, or of an item, of the object at a path."""
    if is_item:
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else str(name)

"""The walk from a source to the places where its state lies.

The walk follows what the code of a read can reach: the attributes and containers of the dataset and its transforms; the
closures and defaults of functions, and the globals that their instructions load; helper functions, decorators,
partials, properties and class attributes; environment variables whose names are texts in that code. A method is
followed when its name is used, so that the code of a logger or a sampler does not count.

Not entered: generators, handles, locks, loggers, devices and C objects. Of an object of Lightning only the
attributes that the code names count. The code of libraries is not followed.

The walk ends after 4,000 objects, and copies of at most 64 MiB are kept.
"""

from __future__ import annotations

import enum
import os
import types
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset

from lightning_stocache.cache.records import is_image
from lightning_stocache.source.places import (
    ITEMS,
    SMALL,
    Around,
    Array,
    ArrowColumn,
    Attributes,
    Content,
    Handle,
    Items,
    Mapped,
    Place,
    Tensors,
    Tree,
    array_in,
    is_loaded,
    is_plain_value,
    tensor_parts,
    tensors_in,
    values_of,
)
from lightning_stocache.source.samples import is_masked
from lightning_stocache.source.walk import (
    CONTAINERS,
    GENERATORS,
    MISSING,
    VALUES,
    WRAPPED,
    Variables,
    attributes_of,
    class_name,
    has_slots,
    inside,
    is_method,
    is_of_library,
    module_of,
    node_dict,
    package_of,
    read_code,
    same_object,
    scopes_of,
    variables_of,
)

__all__ = ["Reach", "covers", "is_handle"]

COPIED_BYTES = 64 << 20
OBJECTS = 4_000
WATCHED = 64
"""Datasets and transforms whose attributes are compared before each batch, at about 0.1 us each."""

_PREFIX = 3  # characters of a text that may begin the name of an environment variable
_ROWS = 1 << 17  # of a frame's column of objects that are compared
_NOT_READ = ("init", "new", "repr", "str", "reduce", "reduce_ex", "getstate", "setstate", "del", "len", "copy")
_UNUSED = frozenset(f"__{name}__" for name in _NOT_READ)  # methods that a read does not call
_BLIND = frozenset(("getattr", "__dict__", "vars", "eval", "exec", "attrgetter"))  # such code may use any name
_MACHINES = (
    *("lightning", "pytorch_lightning", "torch.optim", "logging", "threading", "_thread", "_io", "io", "concurrent"),
    *("queue", "multiprocessing", "socket", "ssl", "tqdm"),
)
_PROGRESS = ("current_epoch", "global_step")  # properties of a Trainer and of its model
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_HOOKS = frozenset(torch.nn.Module().__dict__) - {"training"}
Node: TypeAlias = tuple[str, Any, Around]
"""Where an object lies, the object, and the dataset around it."""


class Reach:
    """The places that the code of a read of a source can reach, without those in the `tail`."""

    def __init__(self, source: Any, length: int, tail: Collection[Any] = ()) -> None:
        self.places: dict[str, Place] = {}
        self.watched: list[str] = []
        """Paths of the datasets and transforms, and of the lists that hold them."""
        self.names = {"forward"}
        """The names that the code of a read uses."""
        self.written = set[str]()
        """The names of attributes that the code of a read sets."""
        self._source, self._tail = source, tail
        self._bytes = self._objects = 0
        self._known: dict[int, Any] = {}
        self._methods: dict[str, list[Node]] = defaultdict(list)  # of classes, until their names are used
        self._machines: list[Node] = []  # objects of Lightning, until all names are known
        self._texts: set[str] = set()
        around = Around(length, list)
        self.walk([("", source, around)])
        if not self.names.isdisjoint(("environ", "getenv")):
            texts = sorted(filter(str.isidentifier, self._texts))
            self.add("environ", Attributes(partial(_environment, texts), around, prefix="environ"))

    @property
    def is_blind(self) -> bool:
        """Whether the code of a read may use names that do not stand in it."""
        return not _BLIND.isdisjoint(self.names)

    def walk(self, nodes: Iterable[Node]) -> None:
        """Walk to the places of the source, or of an object that has replaced another one."""
        self._known = {id(node): node for node in self._tail}
        self._walk(nodes)
        machines, self._machines = self._machines, []
        for path, node, around in machines:
            self._walk(self._of_machine(path, node, around))
        self._known = {}

    def add(self, path: str, place: Place, nbytes: int = 0) -> None:
        """Add a place. `nbytes` is the size of the copy of its content."""
        place.nbytes = nbytes
        self._bytes += nbytes
        self.places[path] = place
        place.keep(place.read())

    def take(self, path: str) -> dict[str, Place]:
        """Remove the places of an object and of what lies in it, and return them."""
        taken = {inner: place for inner, place in self.places.items() if covers((path,), inner)}
        for inner, place in taken.items():
            del self.places[inner]
            self._bytes -= place.nbytes
        self._objects -= len(taken)
        return taken

    def _walk(self, nodes: Iterable[Node]) -> None:
        waiting = deque(nodes)
        while waiting:
            path, node, around = waiting.popleft()
            if issubclass(type(node), VALUES) or id(node) in self._known:
                continue
            if self._objects >= OBJECTS:
                return
            self._known[id(node)] = node  # held, so that no id is used again
            self._objects += 1
            with suppress(Exception):  # of an object of the user's that only looks like one of these
                waiting.extend(self._visit(path, node, around))

    def _visit(self, path: str, node: Any, around: Around) -> Iterator[Node]:
        """Add the places of an object, and yield the objects that it leads to."""
        kind = type(node)  # never isinstance: a proxy may load what it stands for to answer
        if issubclass(kind, (*GENERATORS, types.ModuleType)):
            return
        is_user_class = not is_of_library(kind)
        package = package_of(kind)
        is_data = issubclass(kind, torch.nn.Module | Dataset)
        is_machine = any(map(_is_machine, kind.__mro__))
        if kind is types.FunctionType:
            yield from self._of_function(path, node, around)
        elif issubclass(kind, type):
            yield from self._of_class(node, around)
        elif kind in WRAPPED:
            children = ((name, getattr(node, name)) for name in WRAPPED[kind])
            yield from ((f"{path}.{name}", child, around) for name, child in children if child is not None)
        elif array_in(node) is not None:
            self._add_array(path, partial(array_in, node), around)
            if is_masked(kind):
                self._add_array(inside(path, "mask"), lambda: array_in(np.ma.getmaskarray(node)), around)
        elif issubclass(kind, np.ndarray) and node.dtype == object:
            yield from self._of_container(path, lambda: node.reshape(-1).tolist(), around)
        elif issubclass(kind, torch.Tensor):
            for number in range(len(tensor_parts(node))):  # it is sparse, nested, jagged or quantised
                self._add_array(inside(path, f"part {number}"), partial(_part_of_tensor, node, number), around)
        elif issubclass(kind, np.ndarray):  # in a file
            self.add(path, Mapped(partial(same_object, node), around, len(node) if node.ndim else None))
            self.add(inside(path, "file"), Handle(partial(_file_of_map, node), around))
        elif kind.__name__ in ("DataFrame", "Series") and package in ("pandas", "polars"):
            yield from self._of_frame(path, node, around)
        elif package == "pandas" and any(base.__name__ == "Index" for base in kind.__mro__):
            # As a column, not by its attributes: in `_cache` an Index keeps results of its methods.
            self._add_column(path, partial(_index, node), around, len(node))
        elif package == "pyarrow" and hasattr(kind, "slice"):
            self.add(path, ArrowColumn(partial(same_object, node), around, len(node)))
        elif package == "h5py":
            self.add(path, Handle(partial(_name_in_file, node), around))
        elif issubclass(kind, CONTAINERS):
            yield from self._of_container(path, partial(same_object, node), around)
            if is_user_class:
                yield from self._of_object(f"{path}.__dict__", node, around)
        elif is_machine and is_user_class and not _is_machine(kind):
            self._machines.append((path, node, around))
            yield f"{path}.class", kind, around
        elif is_machine and all(hasattr(kind, name) for name in _PROGRESS):  # a Trainer
            self._machines.append((path, node, around))
        elif is_machine or (hasattr(kind, "close") and not is_user_class and not is_data):
            return
        elif node_dict(node) is not None or has_slots(kind):
            yield from self._of_object(path, node, around)
        if (function := attributes_of(node).get("__wrapped__")) is not None:
            yield f"{path}.__wrapped__", function, around

    # ---- objects ----

    def _of_object(self, path: str, node: Any, around: Around) -> Iterator[Node]:
        kind = type(node)
        is_known = is_of_library(kind)
        is_module = issubclass(kind, torch.nn.Module) and "_parameters" in vars(node)
        self._watch(path, node)
        attributes = attributes_of(node)
        read = next(variables_of(path, node)).read
        hidden = _HOOKS if is_module else frozenset[str]()
        self.add(path, Attributes(read, around, None, path, kind, is_known, hidden))
        if module_of(kind) == "datasets.table":
            return  # the fingerprint of the dataset around it tells
        if is_module:
            yield from self._of_module(path, node, around)
        for name, child in list(attributes.items()):
            if name in hidden:
                continue
            inner = around if is_known else around.inside(name)
            if kind is ConcatDataset and name == "datasets":
                self.add(inside(path, name), Items(partial(same_object, child), around, len(child), False))
                yield from _parts_of(path, node, inner)
            else:
                yield inside(path, name), child, _around_child(node, name, child, inner)
        if not is_known:
            yield f"{path}.class", kind, around

    def _of_module(self, path: str, module: Any, around: Around) -> Iterator[Node]:
        """Of a network: its tensors and the modules inside it."""
        self.add(inside(path, "tensors"), Tensors(partial(tensors_in, module), around))
        length = (around.length,)
        buffers = vars(module)["_buffers"].items()  # one may hold an item for each sample
        of_samples = ((name, buffer) for name, buffer in buffers if buffer is not None and buffer.shape[:1] == length)
        yield from ((inside(path, name), buffer, around) for name, buffer in of_samples)
        modules = vars(module)["_modules"]
        if modules:
            self._watch(inside(path, "modules"), module)
            place = Attributes(partial(same_object, modules), around, prefix=path, is_known=True)
            self.add(inside(path, "modules"), place)
        yield from ((inside(path, name), child, around) for name, child in modules.items() if child is not None)

    def _of_machine(self, path: str, node: Any, around: Around) -> Iterator[Node]:
        """Of an object of Lightning, the attributes that the code of a read names; of a Trainer its progress alone."""
        names = frozenset() if is_of_library(type(node)) else frozenset(self.names)
        progress = [name for name in _PROGRESS if name in self.names and hasattr(type(node), name)]

        def read() -> dict[str, Any]:
            attributes = {name: value for name, value in attributes_of(node).items() if name in names}
            return attributes | {name: getattr(node, name) for name in progress}

        self.add(path, Attributes(read, around, prefix=path, kind=type(node)))
        yield from ((inside(path, name), child, around.inside(name)) for name, child in read().items())
        if issubclass(type(node), torch.nn.Module):
            self.add(inside(path, "tensors"), Tensors(partial(tensors_in, node), around))
            modules = vars(node)["_modules"].items()
            yield from ((inside(path, name), child, around) for name, child in modules if name in names)

    def _watch(self, path: str, node: Any) -> None:
        """Compare a dataset or transform before each batch, too."""
        if len(self.watched) < WATCHED and (node is self._source or _has_state(node)):
            self.watched.append(path)

    # ---- containers and arrays ----

    def _of_container(self, path: str, read: Callable[[], Any], around: Around) -> Iterator[Node]:
        node = read()
        values = values_of(node)
        length, nbytes = len(values), node.__sizeof__()
        kinds = set(map(type, values))
        tuples = (value for value in values if type(value) is tuple) if tuple in kinds else ()
        leaves = (kinds - {tuple}) | set(map(type, chain.from_iterable(tuples)))
        is_plain = all(issubclass(kind, VALUES) for kind in leaves)
        is_set = issubclass(type(node), set | frozenset)
        if length > SMALL and not is_set and not is_plain:
            with suppress(ValueError):
                tree = Tree(read, around, COPIED_BYTES - self._bytes)
                self.add(path, tree, tree.nbytes)
                return
        self.add(path, Items(read, around, length, is_plain), nbytes)
        if is_plain:
            return
        if length <= SMALL and not is_set and any(map(_has_state, values)) and len(self.watched) < WATCHED:
            self.watched.append(path)
        step = max(1, -(-length // ITEMS))
        keys = list(node) if isinstance(node, dict) else range(length)
        is_of_samples = length == around.length and around.sample is None
        for number in range(0, length, step):
            key, index = keys[number], around.sample
            if is_of_samples:
                index = key if isinstance(key, int) else number
            name = key if type(key) in (int, str) else number
            yield inside(path, name, is_item=True), values[number], replace(around, sample=index)

    def _add_array(self, path: str, read: Callable[[], Any], around: Around) -> None:
        content = read()
        nbytes = content.memory.nbytes
        in_full = self._bytes + nbytes <= COPIED_BYTES
        self.add(path, Array(read, around, content.length, in_full), nbytes if in_full else 0)

    def _add_column(self, path: str, read: Callable[[], Any], around: Around, length: int) -> None:
        content = read()
        if isinstance(content, Content):
            self._add_array(path, read, around)
        elif isinstance(content, list):
            place: Place = Items(read, around, len(content), True)
            if not all(map(is_plain_value, content)):
                with suppress(ValueError):
                    place = Tree(read, around, COPIED_BYTES - self._bytes)
            self.add(path, place, place.nbytes or content.__sizeof__())
        else:
            self.add(path, ArrowColumn(read, around, length))

    def _of_frame(self, path: str, frame: Any, around: Around) -> Iterator[Node]:
        """Of a frame of pandas or polars: its columns, which are read anew because a frame replaces them; its index."""
        reads: dict[str, Callable[[], Any]] = {}
        if hasattr(frame, "columns"):
            names = list(frame.columns)
            self.add(inside(path, "columns"), Items(lambda: list(frame.columns), around, len(names), True))
            reads = {inside(path, name, is_item=True): partial(_column, frame, k) for k, name in enumerate(names)}
        else:
            reads = {path: partial(_column, frame, None)}
        if hasattr(frame, "index"):
            reads[inside(path, "index")] = lambda: _index(frame.index)
        for where, read in reads.items():
            self._add_column(where, read, around, len(frame))
        if hasattr(frame, "attrs"):
            yield inside(path, "attrs"), frame.attrs, around

    # ---- code ----

    def _of_class(self, kind: type, around: Around) -> Iterator[Node]:
        around = replace(around, names=())
        yield "", type(kind), around
        for member in kind if issubclass(kind, enum.Enum) else ():
            path = inside(class_name(kind), member.name)
            self.add(path, Attributes(partial(attributes_of, member), around, prefix=path))
        for variables in variables_of("", kind):
            path = variables.path
            if path not in self.places:
                self.add(path, Attributes(variables.read, around, prefix=path))
            for name, value in variables.read().items():
                if not is_method(value):
                    yield inside(path, name), value, around.inside(name)
                    continue
                method = (inside(path, name), value, around)
                is_called = name.startswith("__") and name.endswith("__") and name not in _UNUSED
                if name in self.names or is_called:
                    yield method
                else:
                    self._methods[name].append(method)

    def _of_function(self, path: str, function: types.FunctionType, around: Around) -> Iterator[Node]:
        if is_of_library(function):
            return
        around = replace(around, names=())
        code = read_code(function.__code__)
        self.written |= code.written
        self._texts |= code.texts
        for name in code.names - self.names:
            self.names.add(name)
            yield from self._methods.pop(name, ())
        for scope in scopes_of(path, function):
            yield from self._of_scope(scope, around)
        defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        yield from ((f"{path} default {k}", value, around) for k, value in enumerate(defaults))

    def _of_scope(self, scope: Variables, around: Around) -> Iterator[Node]:
        if scope.path not in self.places:
            self.add(scope.path, Attributes(scope.read, around, prefix=scope.prefix))
        for name, value in scope.read().items():
            path = inside(scope.prefix, name)
            is_class = isinstance(value, type)
            if is_class and is_of_library(value):
                continue
            if is_class:  # the function may make an object of it
                inits = (vars(base).get("__init__") for base in value.__mro__)
                yield from ((f"{path}.__init__", init, around) for init in inits if is_method(init))
            yield path, value, around.inside(name)


def covers(paths: Collection[str], path: str) -> bool:
    """Whether a path is one of several, or lies inside one."""
    return path in paths or any(path.startswith(outer) and path[len(outer)] in ".[(" for outer in paths)


def is_handle(value: Any) -> bool:
    """Whether it is an open file or the like, a generator that may be seeded anew, or nothing yet."""
    kind = type(value)
    if value is None or value is MISSING or issubclass(kind, GENERATORS):
        return True
    if issubclass(kind, Dataset | torch.nn.Module) or (is_image(kind) and is_loaded(value)):
        return False
    return any("close" in vars(base) and is_of_library(base) for base in kind.__mro__)


def _is_machine(kind: type) -> bool:
    """Whether a class is of a library that trains, logs, waits or talks, so that its objects change by themselves."""
    module = module_of(kind)
    return any(module == name or module.startswith(f"{name}.") for name in _MACHINES)


def _has_state(node: Any) -> bool:
    """Whether it is a dataset or a transform: an object whose attributes decide what samples are."""
    decides = issubclass(type(node), Dataset) or (callable(node) and not isinstance(node, _FUNCTIONS))
    return decides and node_dict(node) is not None


def _around_child(node: Any, name: str, child: Any, around: Around) -> Around:
    """What is around an attribute: if it is a dataset with other samples, that dataset."""
    if not issubclass(type(child), Dataset):
        return around
    if type(node) is Subset and name == "dataset":
        return replace(around, length=len(child), outer=partial(_outside_subset, node, around))
    with suppress(Exception):  # a dataset that has no length yet
        if len(child) == around.length:
            return around
        return replace(around, length=len(child), outer=lambda indices: [])
    return around


def _outside_subset(subset: Any, around: Around, indices: Iterable[int]) -> list[int]:
    """Indices of the source, given indices of the dataset inside a Subset."""
    inner = subset.indices
    if isinstance(inner, range):  # perhaps a long one
        return around.outer([inner.index(index) for index in indices if index in inner])
    wanted = set(indices)
    return around.outer([number for number, index in enumerate(inner) if int(index) in wanted])


def _parts_of(path: str, node: Any, around: Around) -> Iterator[Node]:
    begin = 0
    for number, (part, end) in enumerate(zip(node.datasets, node.cumulative_sizes, strict=True)):
        outer = partial(_outside_part, begin, around)
        where = inside(inside(path, "datasets"), number, is_item=True)
        yield where, part, replace(around, length=end - begin, outer=outer)
        begin = end


def _outside_part(begin: int, around: Around, indices: Iterable[int]) -> list[int]:
    return around.outer([begin + index for index in indices])


def _environment(texts: Collection[str]) -> dict[str, str | None]:
    """The environment variables with these names, and with longer ones that begin with them."""
    prefixes = tuple(text for text in texts if len(text) >= _PREFIX)
    longer = {name: value for name, value in os.environ.items() if name.startswith(prefixes)}
    return {text: os.environ.get(text) for text in texts} | longer


def _part_of_tensor(tensor: torch.Tensor, number: int) -> Content:
    return tensor_parts(tensor)[number]


def _file_of_map(array: Any) -> str:
    return str(getattr(array, "filename", None) or getattr(array.base, "filename", None))


def _name_in_file(node: Any) -> tuple[str, ...]:
    """The file of an object of h5py, and its name there."""
    with suppress(Exception):  # closed
        return str(node.file.filename), str(node.name)
    return ()


def _index(index: Any) -> Any:
    if type(index).__name__ == "RangeIndex":
        return [index.start, index.stop, index.step]
    return _column(index, None)


def _column(frame: Any, number: int | None) -> Any:
    """A column of a frame, or a series: a `Content`, a list, or Arrow's own array."""
    series = frame
    if number is not None:
        series = frame.iloc[:, number] if hasattr(frame, "iloc") else frame.to_series(number)
    values: Any = getattr(series, "array", None)
    if "Arrow" in type(values).__name__:
        return values.__arrow_array__()
    whole = series.to_numpy()
    content = array_in(whole)
    return whole[:_ROWS].tolist() if content is None else content

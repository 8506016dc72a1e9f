"""The state that reading a source moves: attributes, containers, globals, arrays, and positions in files.

`Snapshot` notes it before a read, and puts it back afterwards. Copies are shallow, because each container that can be
reached is noted by itself. Not seen are memory that processes share, and the state of libraries in C, but for the
positions of files.

`Counters` finds the numbers that grow with each read (`self.calls += 1`), and sets them far ahead.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CellType, FunctionType, ModuleType
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.node.isolation import STANDARD, descriptors
from lightning_stocache.source.generators import is_of_library, named_globals, reachable

if sys.platform != "win32":
    import fcntl

__all__ = ["Counters", "Snapshot"]

_MOST_BYTES = 64 << 20  # of copies of arrays
_MOST_ITEMS = 100_000  # of a container in which counters are looked for
_MOST_NUMBERS = 64  # of an array in which they are
_MOST_RISE = 1_000  # of a counter in one read; a clock rises more
_EPOCHS_AHEAD = 1_000_003  # a prime, so that no cycle of a few epochs hides a difference
_MISSING = object()
_OF_FILES = {"_compression", "_io", "bz2", "compression", "gzip", "io", "lzma"}  # their objects move with a file
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)  # a subclass may do more when it is filled
_UNSEEKABLE = (AttributeError, OSError, ValueError)  # a pipe, a closed file, a text file in the middle of an iteration

_Place: TypeAlias = tuple[Any, Any]
"""An object that holds a value, and the key or name of the value."""


class Snapshot:
    """The state of a source at one moment.

    Args:
        source: the user's dataset or stream.

    Example:
        >>> class Counted:
        ...     def __init__(self):
        ...         self.reads, self.seen = 0, []
        >>> source = Counted()
        >>> snapshot = Snapshot(source)
        >>> source.reads += 1
        >>> source.seen.append(3)
        >>> snapshot.put_back()
        >>> source.reads, source.seen
        (0, [])
    """

    def __init__(self, source: Any) -> None:
        nodes = list(reachable(source))
        self._containers = [(live, live.copy()) for _, node in nodes for live in _containers_of(node)]
        self._values = [(place, _value_at(place)) for _, node in nodes for place in _places_of(node)]
        held = [value for _, content in self._containers for value in _items(content).values()]
        self._arrays = _copies([*held, *(value for _, value in self._values)])
        files = [(where, node) for where, node in nodes if issubclass(type(node), io.IOBase)]
        outer = tuple(f"{where}." for where, _ in files)
        # A compressed file moves the file inside it, which must stay where the decompressor expects it.
        self._files = [(where, file, _position(file)) for where, file in files if not where.startswith(outer)]
        self._descriptors = {_descriptor(file) for _, file in files}
        self._offsets = _offsets()

    def put_back(self) -> str | None:
        """Put all back. Returns where a state differs that cannot be put back; None if there is none."""
        for live, before in self._containers:
            if not _is_same(live, before):
                _refill(live, before)
        for place, value in self._values:
            if _value_at(place) is not value:
                _put(place, value)
        for array, copy in self._arrays:
            array[...] = copy
        for _, file, position in self._files:
            if position is not None and _position(file) != position:
                with suppress(*_UNSEEKABLE):
                    file.seek(position)
        return self._moved_file()

    def _moved_file(self) -> str | None:
        """The file whose position differs."""
        for where, file, position in self._files:
            if _position(file) != position:
                return f"the position of {where}"
        now = _offsets()
        for descriptor, before in self._offsets.items():
            # Python's files read ahead of their position.
            if descriptor not in self._descriptors and now.get(descriptor, before) != before:
                return f"the position in {os.readlink(f'/proc/self/fd/{descriptor}')}"
        return None


class Counters:
    """The numbers of a source that grow with each read.

    Args:
        source: the user's dataset.

    Example:
        >>> class Counted:
        ...     def __init__(self):
        ...         self.calls = self.epoch = 3
        >>> source = Counted()
        >>> counters = Counters(source)
        >>> source.calls += 1
        >>> counters.look()
        ['Counted.calls']
        >>> with counters.ahead(length=100):
        ...     source.calls // 100, source.epoch
        (1000003, 3)
        >>> source.calls
        4
    """

    def __init__(self, source: Any) -> None:
        self._places = list(_number_places(source))
        self._values = self._read()
        self._risen = set(self._values)

    def look(self, reads: int = 1) -> list[str]:
        """Look at the numbers after so many reads. Returns where they have grown, in this look and in all before."""
        before, self._values = self._values, self._read()
        rises = {number: value - before[number] for number, value in self._values.items() if number in before}
        self._risen &= {number for number, rise in rises.items() if 0 < rise <= reads * _MOST_RISE}
        return [self._places[number][0] for number in sorted(self._risen)]

    @contextmanager
    def ahead(self, length: int) -> Iterator[None]:
        """Set the numbers ahead by a million epochs of a dataset of that length, and put them back at the end."""
        before = {number: self._values[number] for number in self._risen}
        for number, value in before.items():
            _put(self._places[number][1], value + _EPOCHS_AHEAD * length)
        try:
            yield
        finally:
            for number, value in before.items():
                _put(self._places[number][1], value)

    def _read(self) -> dict[int, int]:
        """The values of those places that hold whole numbers now, by the number of the place."""
        values = (_value_at(place) for _, place in self._places)
        return {number: int(value) for number, value in enumerate(values) if type(value) in (int, np.int64)}


def _number_places(source: Any) -> Iterator[tuple[str, _Place]]:
    """Where the code of a source can hold whole numbers that it counts with."""
    for where, node in reachable(source):
        places = list(_places_of(node))
        for live in _containers_of(node):
            if len(live) <= _MOST_ITEMS and not isinstance(live, set | deque):
                places += ((live, key) for key in _items(live))
        for place in places:
            value = _value_at(place)
            if type(value) is int:
                yield _words(where, node, place), place
            elif (array := _flat(value)) is not None and array.size <= _MOST_NUMBERS and array.dtype == np.int64:
                yield from ((_words(where, node, place), (array, position)) for position in range(array.size))


# ---- places ----


def _containers_of(node: Any) -> Iterator[Any]:
    """The containers whose content is part of a source: an object's attributes, or the object itself."""
    kind = type(node)
    if issubclass(kind, (type, FunctionType, ModuleType, io.IOBase)) or kind.__module__.partition(".")[0] in _OF_FILES:
        return
    if kind in _CONTAINERS:
        yield node
    with suppress(AttributeError):
        attributes = object.__getattribute__(node, "__dict__")
        if type(attributes) is dict:
            yield attributes


def _places_of(node: Any) -> Iterator[_Place]:
    """Single values that a source's code sets: globals and closures of its functions, attributes of its classes."""
    if type(node) is FunctionType:
        yield from ((cell, "cell_contents") for cell in node.__closure__ or ())
        yield from ((node.__globals__, name) for name in named_globals(node))
    elif issubclass(type(node), type) and not is_of_library(node):
        yield from ((node, name) for name in list(vars(node)) if not name.startswith("__"))


def _value_at(place: _Place) -> Any:
    owner, key = place
    if isinstance(owner, CellType | type):
        try:
            return vars(owner).get(key, _MISSING) if isinstance(owner, type) else owner.cell_contents
        except ValueError:  # an empty cell
            return _MISSING
    if isinstance(owner, dict):
        return owner.get(key, _MISSING)
    return owner[key] if key < len(owner) else _MISSING


def _put(place: _Place, value: Any) -> None:
    owner, key = place
    if isinstance(owner, CellType | type):
        setattr(owner, key, value) if value is not _MISSING else delattr(owner, key)
    elif value is _MISSING:
        owner.pop(key, None)
    else:
        owner[key] = value


def _items(container: Any) -> dict[Any, Any]:
    return container if isinstance(container, dict) else dict(enumerate(container))


def _is_same(live: Any, before: Any) -> bool:
    """By identity: two arrays that are compared have no single truth value."""
    if isinstance(live, set):
        return bool(live == before)
    if len(live) != len(before):
        return False
    if isinstance(live, dict):
        return all(key in live and live[key] is value for key, value in before.items())
    return all(value is other for value, other in zip(live, before, strict=True))


def _refill(live: Any, before: Any) -> None:
    if isinstance(live, dict | set):
        live.clear()
        live.update(before)
    elif isinstance(live, deque):
        live.clear()
        live.extend(before)
    else:
        live[:] = before


def _words(where: str, node: Any, place: _Place) -> str:
    owner, key = place
    if isinstance(owner, CellType):
        return f"a variable of {where}"
    return f"{where}[{key!r}]" if owner is node and isinstance(node, dict | list) else f"{where}.{key}"


# ---- arrays ----


def _copies(values: list[Any]) -> list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]:
    """Arrays among some values with their copies, which take 64 MiB together at most."""
    found, left = dict[int, tuple[npt.NDArray[Any], npt.NDArray[Any]]](), _MOST_BYTES
    for value in values:
        array = _flat(value)
        if array is not None and id(value) not in found and array.nbytes <= left:
            found[id(value)] = array, array.copy()
            left -= array.nbytes
    return list(found.values())


def _flat(value: Any) -> npt.NDArray[Any] | None:
    """A live view of an array or a tensor of this process, `[size]`; None for anything else.

    Other processes may write to shared memory at any time, so it is left alone.
    """
    if type(value) is torch.Tensor and value.layout is torch.strided and value.device.type == "cpu":
        try:
            value = None if cast(Any, value).is_shared() else value.detach().numpy()
        except (TypeError, RuntimeError):  # bfloat16, a quantised tensor
            return None
    if type(value) is not np.ndarray or not value.flags.c_contiguous or not value.flags.writeable:
        return None
    owner: Any = value
    while type(owner) is np.ndarray and owner.base is not None:
        owner = owner.base
    return value.reshape(-1) if type(owner) in (np.ndarray, torch.Tensor) else None


# ---- files ----


def _position(file: io.IOBase) -> int | None:
    try:
        return file.tell()
    except _UNSEEKABLE:
        return None


def _descriptor(file: io.IOBase) -> int | None:
    try:
        return file.fileno()
    except _UNSEEKABLE:
        return None


def _offsets() -> dict[int, tuple[int, int]]:
    """The inode and the position of each regular file that this process reads, by its descriptor."""
    found = dict[int, tuple[int, int]]()
    for descriptor in descriptors().keys() - STANDARD:
        with suppress(OSError):  # closed since
            status = os.fstat(descriptor)
            is_read = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            if is_read and stat.S_ISREG(status.st_mode):  # others may write to a log
                found[descriptor] = status.st_ino, os.lseek(descriptor, 0, os.SEEK_CUR)
    return found

"""The state that reading a source moves: attributes, containers, globals, arrays, and positions in files.

`Snapshot` notes it before a read, and puts it back afterwards. Not seen are memory that processes share, and the state
of libraries in C, but for the positions of files.

`Copies` holds the copies: of containers, of arrays, and of single values. They are shallow, because each container
that can be reached is noted by itself.

`CommonState` finds what a sampler, a batch sampler or a `collate_fn` reaches, too.

`MovedNumbers` finds the numbers that each read moves (`self.calls += 1`), and sets them far ahead.
"""

from __future__ import annotations

import ctypes
import io
import os
import stat
import sys
from ast import literal_eval
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from types import FunctionType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.node.isolation import STANDARD, descriptors
from lightning_stocache.source.places import array_of, same_value
from lightning_stocache.source.walk import (
    GENERATORS,
    MISSING,
    SCALARS,
    Variables,
    inside,
    items_of,
    module_of,
    node_dict,
    package_of,
    reachable,
    read_code,
    variables_of,
)

if sys.platform != "win32":
    import fcntl

__all__ = ["CommonState", "MovedNumbers", "Snapshot"]

_MOST_BYTES = 64 << 20  # of copies of arrays
_MOST_ITEMS = 100_000  # of a container in which counters are looked for
_MOST_COMMON = 1 << 20  # items of a container that others reach, too
_MOST_NUMBERS = 64  # of an array that one read moves
_MOST_LENGTH = 1 << 20  # of a list that is made longer
_MOST_STEP = 1e300
_EPOCHS_AHEAD = 1_000_003  # a prime, so that no cycle of a few epochs hides a difference
_OF_FILES = {"_compression", "_io", "bz2", "compression", "gzip", "io", "lzma"}  # their objects move with a file
_CONTAINERS = (dict, OrderedDict, defaultdict, Counter, list, set, deque)  # a subclass may do more when it is filled
_CTYPE: Any = ctypes.c_int.__base__  # the number of a `multiprocessing.Value`
_UNSEEKABLE = (AttributeError, OSError, ValueError)  # a pipe, a closed file, a text file in the middle of an iteration


class Copies:
    """Copies of variables, of containers and of arrays.

    Args:
        nodes: containers and arrays, with the places where they lie. The copies of arrays take 64 MiB at most.
        variables: values by name.
    """

    def __init__(self, nodes: Iterable[tuple[str, Any]], variables: Iterable[Variables]) -> None:
        self._copies = list[tuple[str, Any, Any]]()
        left = _MOST_BYTES
        for path, node in nodes:
            live = _live_content(node)
            nbytes = live.nbytes if isinstance(live, np.ndarray) else 0
            if nbytes <= left:
                left -= nbytes
                self._copies.append((path, node, live.copy()))
        self._variables = [(variables, dict(variables.read())) for variables in variables]

    def put_back(self) -> str | None:
        """Put back what differs. Returns the first place that differed; None if there is none."""
        moved = list[str]()
        for path, node, before in self._copies:
            live = _live_content(node)
            if live is not None and not _is_same(live, before):
                moved.append(path)
                with suppress(Exception):  # what cannot be put back stays as the read has left it
                    _refill(live, before)
        for variables, values in self._variables:
            for name in {**values, **variables.read()}:
                value = values.get(name, MISSING)
                if not same_value(variables[name], value):
                    moved.append(inside(variables.prefix, name))
                    with suppress(Exception):
                        variables[name] = value
        return moved[0] if moved else None


class Snapshot:
    """The state of a source at one moment.

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
        containers = [(path, node) for path, node in nodes if type(node) in _CONTAINERS]
        variables = [found for path, node in nodes if not _is_of_file(node) for found in variables_of(path, node)]
        held = [(path, value) for path, node in containers for _, value in items_of(node)]
        held += [(found.path, value) for found in variables for value in list(found.read().values())]
        arrays = {id(value): (path, value) for path, value in held if _own_array(value) is not None}
        self._contents = Copies([*containers, *arrays.values()], variables)
        files = [(where, node) for where, node in nodes if issubclass(type(node), io.IOBase)]
        outer = tuple(f"{where}." for where, _ in files)
        # A compressed file moves the file inside it, which must stay where the decompressor expects it.
        self._files = [(where, file, _answer(file.tell)) for where, file in files if not where.startswith(outer)]
        self._descriptors = {_answer(file.fileno) for _, file in files}
        self._offsets = _offsets()

    def put_back(self) -> str | None:
        """Put all back. Returns where a state differs that cannot be put back; None if there is none."""
        self._contents.put_back()
        for _, file, position in self._files:
            if position is not None and _answer(file.tell) != position:
                with suppress(*_UNSEEKABLE):
                    file.seek(position)
        return self._moved_file()

    def _moved_file(self) -> str | None:
        for where, file, position in self._files:
            if _answer(file.tell) != position:
                return f"the position of {where}"
        now = _offsets()
        for descriptor, before in self._offsets.items():
            # Python's files read ahead of their position.
            if descriptor not in self._descriptors and now.get(descriptor, before) != before:
                return f"the position in {os.readlink(f'/proc/self/fd/{descriptor}')}"
        return None


class CommonState:
    """The arrays, containers and objects that a source and other code of the training both reach.

    A read may write there (`self.visits[index] += 1`, for a sampler that draws what was seldom seen). A hit reads
    nothing, so it would write nothing, and the other code would do something else than without a cache.

    Args:
        source: the dataset.
        others: samplers and functions. Of an object's attributes, only those count that the code of these samplers and
            functions names. A dataset to which they refer is entered through such attributes only.
        datasets: the wrappers around the dataset.

    Example:
        >>> class Counting:
        ...     def __init__(self, visits):
        ...         self.visits = visits
        >>> visits = [0, 0]
        >>> state = CommonState(Counting(visits), [Counting(visits)])
        >>> before = state.content()
        >>> visits[1] += 1
        >>> before.put_back()
        'Counting.visits'
        >>> visits
        [0, 0]
    """

    def __init__(self, source: Any, others: Sequence[Any], datasets: Sequence[Any] = ()) -> None:
        self._nodes: list[tuple[str, Any]] = []
        known = set[int]()
        named = set[str]()
        wrappers = [source, *datasets]
        holds_source = False
        for other in others:
            for _, node in reachable(other, skip=wrappers, arrays=True):
                if any(node is wrapper for wrapper in wrappers):
                    holds_source = True
                elif type(node) is FunctionType:
                    named.update(read_code(node.__code__).names)
                elif _can_be_written(node) and not module_of(type(node)).startswith("torch.utils.data"):
                    known.add(id(node))
        self._named = named
        attributes = node_dict(source) or {}
        if holds_source:
            known.update(id(attributes[name]) for name in named & attributes.keys())
        if known:
            nodes = reachable(source, arrays=True)
            self._nodes = [(path, node) for path, node in nodes if id(node) in known and _can_be_written(node)]

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def content(self) -> Copies:
        """Copies of what is there now."""
        nodes = list[tuple[str, Any]]()
        variables = list[Variables]()
        for path, node in self._nodes:
            live = _live_content(node)
            if isinstance(live, np.ndarray) or (live is not None and len(live) <= _MOST_COMMON):
                nodes.append((path, node))
            variables += (found.only(self._named) for found in variables_of(path, node))
        return Copies(nodes, variables)


class MovedNumbers:
    """The numbers of a source that each read moves by the same step: counts of reads, of samples, of epochs.

    Numbers are plain ones, those in arrays and in memory that processes share, the next number of `itertools.count`,
    and the length of a list that reads append numbers or texts to.

    Example:
        >>> class Counted:
        ...     def __init__(self):
        ...         self.calls = self.epoch = 3
        >>> source = Counted()
        >>> counters = MovedNumbers(source)
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
        self._source = source
        self._copies = self._first = _number_copies(source)
        self._moves: dict[Any, _Move] | None = None

    def look(self) -> list[str]:
        """Look at the numbers after a read. Returns what has moved in this look and by the same step in all before."""
        before, self._copies = self._copies, _number_copies(self._source)
        moves = dict(_moves(before, self._copies))
        earlier = moves if self._moves is None else self._moves
        self._moves = {key: move for key, move in moves.items() if key in earlier and _is_step(earlier[key], move)}
        return [move.words for move in self._moves.values()]

    @contextmanager
    def ahead(self, length: int) -> Iterator[None]:
        """Set the numbers ahead by a million epochs of a dataset of that length, and put them back at the end."""
        moves = list((self._moves or {}).values())
        before = [move.owner[move.key] for move in moves]
        for move, value in zip(moves, before, strict=True):
            move.owner[move.key] = _advanced(value, move.step * _EPOCHS_AHEAD * length)
        try:
            yield
        finally:
            for move, value in zip(moves, before, strict=True):
                move.owner[move.key] = value

    def put_shared_back(self) -> None:
        """Put back what reads have moved in each `multiprocessing.Value`: the trainer sees it, too."""
        for _, move in _moves(self._first, _number_copies(self._source)):
            value = move.owner[move.key]
            if issubclass(type(value), _CTYPE):
                value.value = move.before


class _Move(NamedTuple):
    """A number that has moved: its place in words, its owner and its key there, its value before, and by how much."""

    words: str
    owner: Any
    key: Any
    before: Any
    step: Any


class _Copy(NamedTuple):
    """The numbers by key in a container, in variables, or in an array, whose `owner` is its `flat`."""

    path: str
    owner: Any
    content: Any


class _Length:
    """The length of a list as its only item. The list grows by repetition of its last item."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def __getitem__(self, key: int) -> int:
        return len(self._items)

    def __setitem__(self, key: int, length: int) -> None:
        more = min(length, _MOST_LENGTH) - len(self._items)
        self._items[:] = self._items[:length] + self._items[-1:] * more


def _number_copies(source: Any) -> dict[Any, _Copy]:
    """Copies of all that can hold numbers that a source counts with, by identity. Arrays take 64 MiB at most."""
    copies, left = dict[Any, _Copy](), _MOST_BYTES
    for path, node in reachable(source, arrays=True):
        array = _own_array(node)
        if array is not None and array.dtype.kind in "iuf" and array.nbytes <= left:
            left -= array.nbytes
            copies[id(node)] = _Copy(path, array.flat, array.flatten())
        if type(node) in _CONTAINERS and isinstance(node, dict | list) and len(node) <= _MOST_ITEMS:
            copies[id(node)] = _Copy(path, node, {key: _number_in(value) for key, value in items_of(node)})
        for variables in () if _is_of_file(node) else variables_of(path, node):
            content = {name: _number_in(value) for name, value in list(variables.read().items())}
            copies[variables.path] = _Copy(path, variables, content)
    return copies


def _moves(before: dict[Any, _Copy], now: dict[Any, _Copy]) -> Iterator[tuple[Any, _Move]]:
    """The numbers that have moved between two copies, by identity."""
    for identity, (path, owner, content) in now.items():
        if identity not in before:
            continue
        earlier = before[identity].content
        if isinstance(content, np.ndarray):
            keys = np.flatnonzero(content != earlier)[:_MOST_NUMBERS].tolist()
        else:
            keys = [key for key, value in content.items() if earlier.get(key, 0) is not value]
        for key in keys:
            old = earlier[key] if isinstance(content, np.ndarray) else earlier.get(key, 0)
            step = _step(old, content[key])
            if step is not None:
                yield (identity, key), _Move(_words(path, owner, key), owner, key, old, step)
        grown = len(content) - len(earlier)
        if type(owner) is list and grown > 0 and all(type(value) in SCALARS for value in owner[-grown:]):
            yield (identity, "length"), _Move(f"the length of {path}", _Length(owner), 0, len(earlier), grown)


def _words(path: str, owner: Any, key: Any) -> str:
    if isinstance(owner, Variables):
        if owner.path.endswith("()"):
            return f"a variable of {owner.path.removesuffix('()')}"
        return inside(owner.prefix, key).removesuffix("._obj")
    return inside(path, key, is_item=True) if isinstance(owner, dict | list) else path


def _step(old: Any, new: Any) -> int | float | None:
    """By how much a number has moved; None if it has not, or is none."""
    old = 0 if old is MISSING else old
    old, new = (value.item() if issubclass(type(value), np.generic) else value for value in (old, new))
    if type(old) not in (int, float) or type(new) not in (int, float):
        return None
    step: int | float = new - old
    return step if step and -_MOST_STEP < step < _MOST_STEP else None


def _is_step(before: _Move, now: _Move) -> bool:
    """Whether a number moves by the same step, unlike a clock."""
    return bool(abs(now.step - before.step) <= abs(before.step) / 1_000)


def _number_in(value: Any) -> Any:
    """The number of an object that counts; any other object itself."""
    if type(value) is count:
        start = literal_eval(repr(value).removeprefix("count"))
        return start[0] if type(start) is tuple else start
    return value.value if issubclass(type(value), _CTYPE) else value


def _advanced(value: Any, step: Any) -> Any:
    """An object with a number that is higher by a step; where its type has fewer bits, half of the highest."""
    kind = type(value)
    number = _number_in(value) + step if not issubclass(kind, np.generic) else value.item() + step
    if kind is count:
        return count(number)
    if not issubclass(kind, (np.generic, _CTYPE)):
        return number
    dtype = np.dtype(kind)
    limits: Any = np.iinfo(dtype) if dtype.kind in "iu" else np.finfo(dtype)
    most, least = float(limits.max) / 2, float(limits.min) / 2
    number = min(max(number, least), most)
    return kind(int(number) if dtype.kind in "iu" else number)


# ---- contents ----


def _live_content(node: Any) -> Any:
    """A container itself, or a view of the memory of an array; None for an object that has neither."""
    kind = type(node)
    if issubclass(kind, dict | list | set | deque):
        return node
    with suppress(Exception):  # of a buffer that is released, or a tensor without memory
        live = np.asarray(node) if issubclass(kind, np.ndarray) else array_of(node)
        return live if live is not None and live.flags.writeable else None
    return None


def _can_be_written(node: Any) -> bool:
    kind = type(node)
    if issubclass(kind, (type, FunctionType, *GENERATORS)):
        return False
    return _live_content(node) is not None or (module_of(kind) != "builtins" and node_dict(node) is not None)


def _own_array(value: Any) -> npt.NDArray[Any] | None:
    """A view of an array or a tensor of this process; None for anything else.

    Other processes may write to shared memory at any time, so it is left alone.
    """
    kind = type(value)
    if kind not in (np.ndarray, torch.Tensor):
        return None
    live: npt.NDArray[Any] | None = _live_content(value)
    if live is None or (kind is torch.Tensor and value.is_shared()):
        return None
    owner: Any = live
    while type(owner) is np.ndarray and owner.base is not None:
        owner = owner.base
    return live if type(owner) in (np.ndarray, torch.Tensor) else None


def _is_same(live: Any, before: Any) -> bool:
    if isinstance(live, np.ndarray):
        return bool(live.shape == before.shape and live.tobytes() == before.tobytes())
    if isinstance(live, set):
        return bool(live == before)
    if isinstance(live, dict):
        return live.keys() == before.keys() and all(same_value(live[key], value) for key, value in before.items())
    return len(live) == len(before) and all(map(same_value, live, before))


def _refill(live: Any, before: Any) -> None:
    if isinstance(live, np.ndarray):
        live[...] = before
    elif isinstance(live, list):
        live[:] = before
    else:
        live.clear()
        live.extend(before) if isinstance(live, deque) else live.update(before)


# ---- files ----


def _is_of_file(node: Any) -> bool:
    kind = type(node)
    return issubclass(kind, io.IOBase) or package_of(kind) in _OF_FILES


def _answer(question: Callable[[], int]) -> int | None:
    """The answer of a file; None if the file has none."""
    with suppress(*_UNSEEKABLE):
        return question()
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

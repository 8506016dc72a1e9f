"""Places where the state of a source lies: the attributes of an object, the items of a container, an array.

A `Place` reads its content anew each time, because the object itself may have been replaced, and compares it with a
copy of its earlier content. There is a class for each form of content:

- `Attributes`: names and values. Values are compared by identity first, `==` decides for plain values alone.
- `Items`: a container. A container of plain values is compared with one `==`, at 2 to 5 ns an item.
- `Tree`: a long container of containers of plain values, as one string of bytes (50 ns a number).
- `Array`: the bytes of an array or tensor; of a large one checksums of 256 spread pages.
- `Tensors`: of a network, the version and the first 64 bytes of each tensor.
- `Column`: a column of a frame that Arrow holds, compared by its `equals`.
"""

from __future__ import annotations

import array
import ctypes
import datetime
import decimal
import enum
import fractions
import marshal
import operator
import pathlib
import types
import uuid
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import memory_of, module_name
from lightning_stocache.source.generators import is_of_library
from lightning_stocache.torch_internals import version_of

try:
    import xxhash

    checksum_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
except ImportError:
    checksum_of = zlib.crc32

__all__ = [
    "CONTAINERS",
    "ITEMS",
    "MISSING",
    "SMALL",
    "VALUES",
    "Around",
    "Array",
    "Attributes",
    "Column",
    "Content",
    "Items",
    "Place",
    "Tensors",
    "Tree",
    "array_in",
    "attributes_of",
    "checksum_of",
    "is_plain_value",
    "node_dict",
    "same_value",
    "values_of",
]

MISSING = object()
"""Stands for the value of a name or key that is not there."""

SMALL = 64
"""Items of a container that may hold settings; a longer one holds data."""

ITEMS = 1_024
"""Items of a longer container of objects that are looked at, spread evenly."""

SCALARS = frozenset((int, float, complex, str, bytes, bool, type(None)))
VALUES: Any = (
    *SCALARS,
    *(pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo, decimal.Decimal),
    *(fractions.Fraction, uuid.UUID, range, slice, enum.Enum, type(...)),
    *(np.generic, np.dtype, torch.device, torch.dtype, torch.layout, torch.memory_format),
)
"""Classes of immutable values without a state of their own."""

CONTAINERS: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)

_BUILTIN = (dict, list, tuple, set, frozenset)
_WRITTEN = {*SCALARS, *_BUILTIN, np.ndarray, torch.Tensor}  # what `marshal` writes; of arrays their bytes
_CTYPES: Any = (ctypes.c_int.__base__, ctypes.Array, ctypes.Structure, ctypes.Union)
_POINTERS = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.py_object)
_PAGE_BYTES, _PAGES = 4_096, 256
_TENSOR_BYTES = 64  # of each tensor of a network: every sample depends on all of it


@dataclass(frozen=True)
class Around:
    """The dataset around a place.

    Args:
        length: number of samples of the dataset.
        outer: given indices of that dataset, those of the source.
        names: the attributes on the way to the place.
        sample: index of the sample to which the place belongs, in a list with an item for each sample.
    """

    length: int
    outer: Callable[[Iterable[int]], list[int]]
    names: tuple[str, ...] = ()
    sample: int | None = None

    def inside(self, name: str) -> Around:
        """Around the value of an attribute."""
        return replace(self, names=(*self.names, name))


class Content(NamedTuple):
    """The bytes of an array.

    Args:
        form: dtype and shape, or another description of the bytes.
        memory: uint8 `[nbytes]`, the memory of the array itself where possible.
        length: size of the first dimension; None for a single number.
    """

    form: str
    memory: npt.NDArray[np.uint8]
    length: int | None


class _Columns(NamedTuple):
    """Keys and values of a container, or positions and items."""

    keys: Sequence[Any]
    values: list[Any]


class Place:
    """A place where state lies.

    Args:
        read: returns the content of the place now.
        around: the dataset around it.
        length: number of items, if it is a container.
    """

    earlier: Any = None
    """A copy of the earlier content."""

    nbytes = 0
    """Bytes of that copy."""

    def __init__(self, read: Callable[[], Any], around: Around, length: int | None = None) -> None:
        self.read, self.around, self.length = read, around, length

    nbytes = 0
    """Bytes of that copy."""

    @property
    def is_of_samples(self) -> bool:
        """Whether it has an item for each sample."""
        return self.length is not None and self.length == self.around.length

    def keep(self, content: Any) -> None:
        """Keep a copy of the content, for the next comparison."""
        self.earlier = content

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        return bool(self.earlier == content)

    def changed(self, earlier: Any, content: Any) -> tuple[list[Any], bool]:
        """The keys of items that have changed, and whether there are more items than before."""
        return [], False

    def values(self, content: Any) -> dict[Any, Any]:
        """The values of a content, or of its copy, by name or key."""
        return {}

    def missing(self, name: Any) -> Any:
        """What stands for the value of a name that is not there."""
        return MISSING

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes.

        Args:
            content: result of `read`.
            length: leave out the items from this one on, of a place with an item for each sample.
        """
        yield content


class Attributes(Place):
    """The attributes of an object, the variables of a function, or the names of a module.

    Args:
        read: returns a dict by name.
        around: the dataset around it.
        prefix: the path before the names.
        kind: class of the object, whose attributes stand for those that the object lacks.
        is_known: whether a library defines that class: its names are not those of the user's code.
        hidden: names that do not count.
    """

    def __init__(
        self,
        read: Callable[[], Any],
        around: Around,
        prefix: str = "",
        kind: type | None = None,
        is_known: bool = False,
        hidden: frozenset[str] = frozenset(),
    ) -> None:
        super().__init__(read, around)
        self.prefix, self.kind, self.is_known, self.hidden = prefix, kind, is_known, hidden

    def keep(self, content: Any) -> None:
        """Keep a copy of the content."""
        self.earlier = dict(content)

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        earlier = self.earlier
        return earlier.keys() == content.keys() and all(map(operator.is_, earlier.values(), content.values()))

    def values(self, content: Any) -> dict[Any, Any]:
        """The values of a content, or of its copy, by name."""
        return {name: value for name, value in content.items() if name not in self.hidden}

    def missing(self, name: Any) -> Any:
        """What the object's class has for a name that the object lacks."""
        if self.kind is not None:
            for base in self.kind.__mro__:
                if name in vars(base):
                    return vars(base)[name]
        return MISSING

    def described(self, value: Any) -> bytes:
        """A value as bytes that are equal in other processes."""
        if is_plain_value(value):
            return _text(value, self.around.length).encode(errors="replace")
        if type(value) is types.FunctionType:
            return value.__qualname__.encode(errors="replace") + _code_bytes(value.__code__)
        kind = value if isinstance(value, type) else type(value)
        return f"{module_name(kind.__module__)}.{kind.__qualname__}".encode(errors="replace")


class Items(Place):
    """The items of a container.

    Args:
        read: returns the container.
        around: the dataset around it.
        length: number of its items.
        is_plain: whether all items are plain values, which `==` compares.
    """

    def __init__(self, read: Callable[[], Any], around: Around, length: int, is_plain: bool) -> None:
        super().__init__(read, around, length)
        self.is_plain = is_plain

    def keep(self, content: Any) -> None:
        """Keep a copy of the content."""
        self.earlier = frozenset(content) if isinstance(content, set | frozenset) else _keys_and_values(content)
        if not self.is_of_samples:
            self.length = len(content)

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        if isinstance(content, set | frozenset):
            return bool(self.earlier == content)
        now = _keys_and_values(content)
        if self.is_plain:
            return bool(now == self.earlier)
        return all(
            len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
            for ours, theirs in zip(now, self.earlier, strict=True)
        )

    def values(self, content: Any) -> dict[Any, Any]:
        """The values of a content, or of its copy, by key."""
        keys, values = content if type(content) is _Columns else _keys_and_values(content)
        return dict(zip(keys, values, strict=True))

    def changed(self, earlier: Any, content: Any) -> tuple[list[Any], bool]:
        """The keys of items that have changed, and whether there are more items than before."""
        if isinstance(content, set | frozenset):
            return list(earlier - content), len(content) > len(earlier)
        (keys, values), (now_keys, now_values) = earlier, _keys_and_values(content)
        if keys == now_keys[: len(keys)]:
            pairs = zip(keys, values, now_values, strict=False)
            changed = [key for key, old, new in pairs if old is not new and not same_value(old, new)]
        else:
            now = dict(zip(now_keys, now_values, strict=True))
            pairs = zip(keys, values, (now.get(key, MISSING) for key in keys), strict=True)
            changed = [key for key, old, new in pairs if old is not new and not same_value(old, new)]
        return changed + list(keys[len(now_keys) :]), len(now_keys) > len(keys)

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        if isinstance(content, set | frozenset):
            yield "\0".join(sorted(map(_repr, content))).encode(errors="replace")
            return
        keys, values = _keys_and_values(content)
        length = length if self.is_of_samples else None
        for column in (keys[:length], values[:length]):
            if self.is_plain:
                try:
                    yield marshal.dumps(list(column), 2)
                except ValueError:  # paths, enums
                    yield "\0".join(map(_repr, column)).encode(errors="replace")
            else:
                for number, item in enumerate(column):
                    if is_plain_value(item):
                        yield f"{number}={_text(item, self.around.length)}".encode(errors="replace")


class Tree(Place):
    """A long container of containers of plain values and arrays, or of objects of one class with such attributes.

    Args:
        container: the container.
        around: the dataset around it.
        room: bytes that a copy may take.

    Raises:
        ValueError: it holds something else.
    """

    def __init__(self, container: Any, around: Around, room: int) -> None:
        columns = _keys_and_values(container)
        count = len(columns.values)
        sparse = max(count // SMALL, 1)
        kinds = kinds_in(columns.values[::sparse])
        if not kinds <= _WRITTEN:
            raise ValueError(f"items of the classes {kinds - _WRITTEN} cannot be written")
        self._has_arrays = not kinds.isdisjoint((torch.Tensor, np.ndarray))
        self.nbytes = len(written(container, sparse, self._has_arrays)) * sparse
        self.step = max(-(-count // ITEMS), 1) if self._has_arrays or self.nbytes > room else 1
        self.nbytes //= self.step
        super().__init__(lambda: written(container, self.step, self._has_arrays), around, count)

    def changed(self, earlier: Any, content: Any) -> tuple[list[Any], bool]:
        """The keys of items that have changed, and whether there are more items than before."""
        (keys, values), (new_keys, new_values) = marshal.loads(earlier), marshal.loads(content)
        now = dict(zip(new_keys, new_values, strict=True))
        changed = [key for key, value in zip(keys, values, strict=True) if now.get(key, MISSING) != value]
        return changed, len(new_keys) > len(keys)

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        if length is not None:
            keys, values = marshal.loads(content)
            count = -(-length // self.step)
            content = marshal.dumps((keys[:count], values[:count]), 2)
        yield content  # `marshal` sorts the items of a set


class Array(Place):
    """The bytes of an array.

    Args:
        read: returns its `Content`.
        around: the dataset around it.
        content: the content now.
        in_full: whether to keep a copy of all bytes, or checksums of spread pages.
    """

    def __init__(self, read: Callable[[], Content], around: Around, content: Content, in_full: bool) -> None:
        super().__init__(read, around, content.length)
        self.in_full = in_full

    def keep(self, content: Any) -> None:
        """Keep a copy of the content."""
        self.earlier = content.form, bytearray(content.memory) if self.in_full else _pages(content.memory)

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        form, earlier = self.earlier
        if form != content.form:
            return False
        if self.in_full:
            return bytearray.__eq__(earlier, content.memory) is True  # one memcmp
        return bool(earlier == _pages(content.memory))

    def changed(self, earlier: Any, content: Any) -> tuple[list[Any], bool]:
        """The keys of items that have changed, and whether there are more items than before."""
        (form, memory), length = earlier, content.length
        if form != content.form or not self.in_full or not length:
            return [], False
        rows = np.frombuffer(memory, dtype=np.uint8).reshape(length, -1) != content.memory.reshape(length, -1)
        return np.flatnonzero(rows.any(axis=1)).tolist(), False

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        memory = content.memory
        if length is not None and self.is_of_samples and content.length:
            memory = memory[: memory.nbytes // content.length * min(length, content.length)]
        yield content.form.partition(" ")[0].encode()
        if not self.in_full:
            yield _pages(memory)
        else:
            yield memory.data if memory.nbytes else b""


class Tensors(Place):
    """The tensors of a network, without those of the modules inside it."""

    def __init__(self, module: Any, around: Around) -> None:
        super().__init__(lambda: dict(_tensors_in(module)), around)

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        for name, (_, first) in content.items():
            yield name.encode() + (first or b"")


class Column(Place):
    """A column of a frame that Arrow holds."""

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        return bool(self.earlier.equals(content))

    def parts(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        length = length if self.is_of_samples else None
        yield "\0".join(map(_repr, content.to_pylist()[:length])).encode(errors="replace")


# ---- content ----


def attributes_of(node: Any) -> dict[str, Any]:
    """The attributes in an object's `__dict__` and slots. The object itself is not asked: a proxy might load."""
    slots = {}
    for base in type(node).__mro__:
        if "__slots__" in vars(base):
            members = ((name, member) for name, member in vars(base).items())
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


def values_of(container: Any) -> list[Any]:
    """The items of a container, or the values of a dict, in their order."""
    return list(_keys_and_values(container)[1])


def array_in(node: Any) -> Content | None:
    """The bytes of an array, tensor or ctypes object; None for an object without bytes that this process can read."""
    kind = type(node)
    if issubclass(kind, torch.Tensor):
        if node.device.type != "cpu" or node.layout is not torch.strided or node.is_quantized or node.is_nested:
            return None
        plain = node.detach().as_subclass(torch.Tensor)
        length = plain.shape[0] if plain.dim() else None
        return Content(f"{plain.dtype} {tuple(plain.shape)}", memory_of(plain), length)
    if issubclass(kind, np.ndarray):
        is_mapped = issubclass(kind, np.memmap) or issubclass(type(node.base), np.memmap)
        if is_mapped or node.dtype.hasobject:
            return None
        live = np.asarray(node)
        length = len(live) if live.ndim else None
        memory = np.ascontiguousarray(live).reshape(-1).view(np.uint8) if live.nbytes else np.empty(0, np.uint8)
        return Content(f"{live.dtype} {live.shape}", memory, length)
    if kind.__module__ == "multiprocessing.sharedctypes" and hasattr(kind, "get_obj"):
        node = node.get_obj()  # without its lock
        kind = type(node)
    if issubclass(kind, bytearray | array.array) or (issubclass(kind, _CTYPES) and not issubclass(kind, _POINTERS)):
        memory = np.frombuffer(node, dtype=np.uint8)
        length = None if issubclass(kind, _CTYPES) and not issubclass(kind, ctypes.Array) else len(node)
        return Content(f"{kind.__name__} {memory.nbytes}", memory, length)
    return None


def _keys_and_values(container: Any) -> _Columns:
    """Keys and values, by the methods of the builtin class: a user's subclass may make its items anew."""
    if isinstance(container, dict):
        return _Columns(list(dict.keys(container)), list(dict.values(container)))
    for base in CONTAINERS[1:]:
        if isinstance(container, base):
            values = list(base.__iter__(container))
            return _Columns(range(len(values)), values)
    raise TypeError(f"{type(container).__name__} is no container")


def _tensors_in(module: Any) -> Iterator[tuple[str, tuple[int, bytes | None]]]:
    attributes = vars(module)
    for name, tensor in chain(attributes["_parameters"].items(), attributes["_buffers"].items()):
        if tensor is None or tensor.is_meta:
            continue
        is_readable = tensor.is_cpu and tensor.layout is torch.strided and tensor.data_ptr()
        first = ctypes.string_at(tensor.data_ptr(), min(_TENSOR_BYTES, tensor.nbytes)) if is_readable else None
        yield name, (version_of(tensor), first)


def _pages(memory: npt.NDArray[np.uint8]) -> bytes:
    """Checksums of spread pages."""
    step = max(_PAGE_BYTES, memory.nbytes // _PAGES)
    sums = (checksum_of(memory[at : at + _PAGE_BYTES].data) for at in range(0, memory.nbytes, step))
    return b"".join(number.to_bytes(8, "little") for number in sums)


# ---- plain values ----


def is_plain_value(value: Any) -> bool:
    """Whether it is an immutable value, or a tuple of such."""
    kind = type(value)
    if kind in SCALARS:
        return True
    if kind is tuple or kind is frozenset:
        return len(value) <= SMALL and all(map(is_plain_value, value))
    return issubclass(kind, VALUES)


def same_value(old: Any, new: Any) -> bool:
    """Whether two values are the same object, or equal plain values, or small containers of such."""
    if old is new:
        return True
    if type(old) is not type(new):
        return False
    if type(old) in (list, dict, set) and len(old) == len(new):
        parts = chain.from_iterable(values_of(node) for node in (old, new))
        if not all(map(is_plain_value, parts)):
            return False
    elif not is_plain_value(old):
        return False
    with suppress(Exception):  # of classes of values with an odd `__eq__`
        return bool(old == new) or (old != old and new != new)
    return False


def written(container: Any, step: int, has_arrays: bool) -> bytes:
    """Every `step`-th item of a container as bytes, with their keys, at the speed of C if no item holds arrays.

    Raises:
        ValueError: an item holds something else than plain values in builtin containers.
    """
    keys, values = _keys_and_values(container)
    keys, values = list(keys[::step]), values[::step]
    kinds = set(map(type, values))
    if len(kinds) == 1 and _has_plain_attributes(kind := kinds.pop()):
        values = [attributes_of(value) for value in values]
        values.append(kind.__qualname__)
        keys.append("class")
    return marshal.dumps((keys, list(map(_with_bytes, values)) if has_arrays else values), 2)


def _with_bytes(node: Any) -> Any:
    """Builtin containers with the bytes of arrays in place of the arrays."""
    kind = type(node)
    if kind is torch.Tensor and node.is_cpu and node.is_contiguous() and node.layout is torch.strided:
        return (
            str(node.dtype),
            tuple(node.shape),
            ctypes.string_at(node.data_ptr(), node.nbytes) if node.nbytes else b"",
        )
    if kind in (list, tuple):
        return list(map(_with_bytes, node))
    if kind is dict:
        return {key: _with_bytes(value) for key, value in node.items()}
    if kind in (torch.Tensor, np.ndarray):
        content = array_in(node)
        if content is None:
            raise ValueError("an array cannot be read")
        return content.form, content.memory.tobytes()
    return node


def _has_plain_attributes(kind: type) -> bool:
    """Whether objects of a class may be described by their attributes: a class of the user's that holds data."""
    others = (*CONTAINERS, torch.Tensor, np.ndarray, torch.nn.Module, torch.utils.data.Dataset, type)
    return not (issubclass(kind, (*VALUES, *others)) or is_of_library(kind) or hasattr(kind, "close"))


def kinds_in(values: Iterable[Any], deep: int = 6) -> set[type]:
    """The classes of some items of a container, and of the items inside them."""
    kinds = set[type]()
    for value in islice(values, SMALL):
        kind = type(value)
        if kind in _BUILTIN and deep:
            kinds |= kinds_in(values_of(value), deep - 1) | {kind}
        elif deep and _has_plain_attributes(kind) and (attributes := attributes_of(value)):
            kinds |= kinds_in(attributes.values(), deep - 1)
        else:
            kinds.add(kind)
    return kinds


def _text(value: Any, length: int) -> str:
    """A value, for a digest. The length of the dataset is a word, because a dataset may grow."""
    return "the length" if type(value) is int and value == length else _repr(value)


def _repr(value: Any) -> str:
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_repr, value)))}}}"
    if type(value) is tuple:
        return f"({', '.join(map(_repr, value))})"
    if isinstance(value, VALUES):
        with suppress(Exception):
            return repr(value)
    return type(value).__qualname__


def _code_bytes(code: types.CodeType) -> bytes:
    """The instructions of a function, their names and constants, without the file and line where they stand."""
    inner = b"".join(_code_bytes(part) for part in code.co_consts if isinstance(part, types.CodeType))
    constants = [_repr(part) for part in code.co_consts if not isinstance(part, types.CodeType)]
    return code.co_code + repr((code.co_names, constants)).encode(errors="replace") + inner

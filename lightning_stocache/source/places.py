"""Places where the state of a source lies: the attributes of an object, the items of a container, an array.

A `Place` reads its content anew each time, because the object itself may have been replaced, and compares it with a
copy of its earlier content. There is a class for each form of content.
"""

from __future__ import annotations

import array
import ctypes
import marshal
import operator
import types
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.records import is_image
from lightning_stocache.source.samples import parts_of_tensor
from lightning_stocache.source.walk import (
    CONTAINERS,
    MISSING,
    SCALARS,
    VALUES,
    attributes_of,
    class_name,
    is_of_library,
)
from lightning_stocache.torch_internals import version_of

try:
    import xxhash

    _checksum_of: Callable[[Any], int] = xxhash.xxh3_64_intdigest
except ImportError:
    _checksum_of = zlib.crc32

__all__ = [
    "ITEMS",
    "SMALL",
    "Around",
    "Array",
    "Attributes",
    "ArrowColumn",
    "Content",
    "Handle",
    "Items",
    "Mapped",
    "Place",
    "Tensors",
    "Tree",
    "array_in",
    "array_of",
    "is_loaded",
    "is_plain_value",
    "same_value",
    "tensor_parts",
    "tensors_in",
    "values_of",
]

SMALL = 64
"""Items of a container that may hold settings; a longer one holds data."""

ITEMS = 1_024
"""Items of a longer container of objects that are looked at, spread evenly."""

_BUILTIN = (dict, list, tuple, set, frozenset)
_WRITTEN = {*SCALARS, *_BUILTIN, np.ndarray, torch.Tensor}  # what `marshal` writes; of arrays their bytes
_BUFFERS: Any = (
    *(bytearray, array.array, memoryview),
    *(ctypes.c_int.__base__, ctypes.Array, ctypes.Structure, ctypes.Union),
)
_POINTERS = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_wchar_p, ctypes.py_object)
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes
_PAGE_BYTES, _PAGES = 4_096, 256
_BUFFER_PAGES, _PARAMETER_PAGES = _PAGES, 16  # of a network's tensors: every sample depends on all of a parameter
_BLOCK_ROWS, _ROW_BYTES = 16, 64 << 20
_DEEP = 6  # containers in containers
_MOST_KINDS = 4_096  # items whose classes are looked at


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


@dataclass(eq=False)
class Place:
    """A place where state lies.

    Args:
        read: returns the content of the place now.
        around: the dataset around it.
        length: number of items, if it is a container.

    Attributes:
        earlier: a copy of the earlier content.
        nbytes: bytes of that copy.
    """

    read: Callable[[], Any]
    around: Around
    length: int | None = None
    earlier: Any = field(default=None, init=False)
    nbytes: int = field(default=0, init=False)

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

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes.

        Args:
            content: result of `read`.
            length: leave out the items from this one on, of a place with an item for each sample.
        """
        yield content


@dataclass(eq=False)
class Attributes(Place):
    """The attributes of an object, the variables of a function, or the names of a module: a dict by name.

    Values are compared by identity first; `==` decides for plain values alone.

    Args:
        prefix: the path before the names.
        kind: class of the object, whose attributes stand for those that the object lacks.
        is_known: whether a library defines that class: its names are not those of the user's code.
        hidden: names that do not count.
    """

    prefix: str = ""
    kind: type = object
    is_known: bool = False
    hidden: frozenset[str] = frozenset()

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
        return next((vars(base)[name] for base in self.kind.__mro__ if name in vars(base)), MISSING)

    def described(self, value: Any) -> bytes:
        """A value as bytes that are equal in other processes."""
        if is_plain_value(value):
            return _text(value, self.around.length).encode(errors="replace")
        if type(value) is types.FunctionType:
            return value.__qualname__.encode(errors="replace") + _code_bytes(value.__code__)
        kind = value if isinstance(value, type) else type(value)
        return class_name(kind).encode(errors="replace")


@dataclass(eq=False)
class Items(Place):
    """The items of a container: values by key or position, or the members of a set.

    Args:
        is_plain: whether all items are plain values, which one `==` compares, at 2 to 5 ns an item.
    """

    is_plain: bool = False

    def keep(self, content: Any) -> None:
        """Keep a copy of the content."""
        self.earlier = _keys_and_values(content)
        if not self.is_of_samples:
            self.length = len(content)

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        now = _keys_and_values(content)
        if self.is_plain:
            return bool(now == self.earlier) and (len(now.values) > ITEMS or _is_alike(now.values, self.earlier.values))
        return all(
            len(ours) == len(theirs) and all(map(operator.is_, ours, theirs))
            for ours, theirs in zip(now, self.earlier, strict=True)
        )

    def values(self, content: Any) -> dict[Any, Any]:
        """The values of a content, or of its copy, by key."""
        keys, values = content if type(content) is _Columns else _keys_and_values(content)
        return dict(zip(keys, values, strict=True))

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        if isinstance(content, set | frozenset):
            yield "\0".join(sorted(map(_repr, content))).encode(errors="replace")
            return
        for column in _keys_and_values(content):
            items = list(column)[: length if self.is_of_samples else None]
            if not self.is_plain:
                items = [_text(item, self.around.length) if is_plain_value(item) else None for item in items]
            try:
                yield marshal.dumps(items, 2)
            except ValueError:  # paths, enums
                yield "\0".join(map(_repr, items)).encode(errors="replace")


class Tree(Place):
    """A long container of containers of plain values and arrays, or of objects of one class with such attributes.

    It is compared as one string of bytes, at 50 ns a number.

    Args:
        read: returns the container.
        around: the dataset around it.
        room: bytes that a copy may take.

    Raises:
        ValueError: it holds something else.
    """

    def __init__(self, read: Callable[[], Any], around: Around, room: int) -> None:
        values = values_of(read())
        count = len(values)
        sparse = max(count // SMALL, 1)
        kinds = _kinds_in(values[::sparse])
        if not kinds <= _WRITTEN:
            raise ValueError(f"items of the classes {kinds - _WRITTEN} cannot be written")
        self._has_arrays = not kinds.isdisjoint((torch.Tensor, np.ndarray))
        nbytes = len(_written(read(), sparse, self._has_arrays)) * sparse
        self.step = max(-(-count // ITEMS), 1) if self._has_arrays or nbytes > room else 1
        super().__init__(lambda: _written(read(), self.step, self._has_arrays), around, count)
        self.nbytes = nbytes // self.step

    def changed(self, earlier: Any, content: Any) -> tuple[list[Any], bool]:
        """The keys of items that have changed, and whether there are more items than before."""
        (keys, values), (new_keys, new_values) = marshal.loads(earlier), marshal.loads(content)
        now = dict(zip(new_keys, new_values, strict=True))
        changed = [key for key, value in zip(keys, values, strict=True) if now.get(key, MISSING) != value]
        return changed, len(new_keys) > len(keys)

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        if length is not None:
            keys, values = marshal.loads(content)
            count = -(-length // self.step)
            content = marshal.dumps((keys[:count], values[:count]), 2)
        yield content  # `marshal` sorts the items of a set


@dataclass(eq=False)
class Array(Place):
    """The bytes of an array, a `Content`.

    Args:
        in_full: whether to keep a copy of all bytes, or checksums of 256 spread pages.
    """

    in_full: bool = True

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

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
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
    """The tensors of a network, without those of the modules inside it: version and spread pages of each."""

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        for name, (_, pages) in content.items():
            yield name.encode() + (pages or b"")


class ArrowColumn(Place):
    """A table or a column of Arrow. In a digest stand 4,096 rows in 256 spread blocks, up to 64 MiB of them."""

    def is_same(self, content: Any) -> bool:
        """Whether the content equals the copy."""
        return self.earlier is content or bool(self.earlier.equals(content))

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        count = len(content) if length is None or not self.is_of_samples else min(length, len(content))
        rows = min(_BLOCK_ROWS, max(_ROW_BYTES * len(content) // max(content.nbytes, 1) // _PAGES, 1))
        step = max(rows, count // _PAGES)
        yield str(getattr(content, "schema", getattr(content, "type", ""))).encode(errors="replace")
        for begin in range(0, count, step):
            yield repr(content.slice(begin, min(rows, count - begin)).to_pylist()).encode(errors="replace")


class Mapped(Place):
    """An array that lies in a file. Of the same array nothing is compared; of another one spread pages are."""

    def is_same(self, content: Any) -> bool:
        """Whether it is the same array, or one of equal pages."""
        return self.earlier is content or list(self.chunks(self.earlier, None)) == list(self.chunks(content, None))

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        array = content[:length] if length is not None and self.is_of_samples else content
        yield f"{array.dtype} {array.shape[1:]}".encode()
        if array.flags.c_contiguous and array.nbytes and not array.dtype.hasobject:
            yield _pages(np.asarray(array).reshape(-1).view(np.uint8))


class Handle(Place):
    """A handle of a file: its name counts. A closed one has none."""

    def is_same(self, content: Any) -> bool:
        """Whether both are of one file, or one is closed."""
        return not self.earlier or not content or bool(self.earlier == content)

    def chunks(self, content: Any, length: int | None) -> Iterator[bytes]:
        """The content as bytes that are equal in other processes."""
        yield repr(content).encode(errors="replace")


# ---- content ----


def values_of(container: Any) -> list[Any]:
    """The items of a container, or the values of a dict, in their order."""
    return list(_keys_and_values(container)[1])


def array_of(node: Any) -> npt.NDArray[Any] | None:
    """The memory of an array, tensor or buffer as an array of NumPy; None if there is none that this process can read.

    Numbers of a class that NumPy does not know are integers of the same bits.
    """
    kind = type(node)
    if issubclass(kind, torch.Tensor):
        if node.device.type != "cpu" or node.layout is not torch.strided or node.is_quantized or node.is_nested:
            return None
        plain: torch.Tensor = node.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
        try:
            return plain.numpy()
        except TypeError:
            return plain.view(_INTEGERS[plain.element_size()]).numpy()
    if issubclass(kind, np.ndarray):
        is_in_file = issubclass(kind, np.memmap) or issubclass(type(node.base), np.memmap)
        return None if is_in_file or node.dtype.hasobject else np.asarray(node)
    if kind.__module__ == "multiprocessing.sharedctypes" and hasattr(kind, "get_obj"):
        node = node.get_obj()  # without its lock
    elif kind.__module__ == "multiprocessing.shared_memory" and kind.__name__ == "SharedMemory":
        node = vars(node)["_buf"]  # None once it is closed
    kind = type(node)
    if not issubclass(kind, _BUFFERS) or issubclass(kind, _POINTERS):
        return None
    if hasattr(kind, "__len__"):
        return np.frombuffer(node, dtype=f"V{memoryview(node).nbytes // len(node)}")
    return np.frombuffer(node, dtype=f"V{ctypes.sizeof(node)}").reshape(())


def array_in(node: Any) -> Content | None:
    """The bytes of an array, tensor, buffer or image; None for an object without bytes that this process can read."""
    if is_image(type(node)) and is_loaded(node):
        return Content(f"{node.mode} {node.size} {node.getpalette()}", np.frombuffer(node.tobytes(), np.uint8), None)
    live = array_of(node)
    if live is None:
        return None
    memory = np.ascontiguousarray(live).reshape(-1).view(np.uint8) if live.nbytes else np.empty(0, np.uint8)
    return Content(f"{getattr(node, 'dtype', live.dtype)} {live.shape}", memory, len(live) if live.ndim else None)


def tensor_parts(tensor: torch.Tensor) -> list[Content]:
    """The bytes of a sparse, nested, jagged or quantised tensor; none of one on a device."""
    if tensor.device.type != "cpu":
        return []
    if tensor.is_nested and tensor.layout is torch.strided:
        form: tuple[Any, ...] = ()
        tensors = [tensor.values()]
    else:
        form, tensors = parts_of_tensor(tensor) or ((), [])
    contents = filter(None, map(array_in, tensors))
    words = "".join(repr(form).split())
    return [content._replace(form=content.form.replace(" ", f"{words} ", 1)) for content in contents]


def is_loaded(image: Any) -> bool:
    """Whether an image of PIL is in memory, not still a file."""
    return getattr(image, "fp", None) is None


def _keys_and_values(container: Any) -> _Columns:
    """Keys and values, by the methods of the builtin class: a user's subclass may make its items anew."""
    if isinstance(container, dict):
        return _Columns(list(dict.keys(container)), list(dict.values(container)))
    base = next(base for base in CONTAINERS if isinstance(container, base))
    values = list(base.__iter__(container))
    return _Columns(values if base in (set, frozenset) else range(len(values)), values)


def tensors_in(module: Any) -> dict[str, tuple[int, bytes | None]]:
    """Version and checksums of spread pages of each tensor of a network itself, by name."""
    attributes, found = vars(module), {}
    for kind, most in (("_parameters", _PARAMETER_PAGES), ("_buffers", _BUFFER_PAGES)):
        for name, tensor in attributes[kind].items():
            if tensor is None or tensor.is_meta:
                continue
            content = array_in(tensor)
            found[name] = version_of(tensor), None if content is None else _pages(content.memory, most)
    return found


def _pages(memory: npt.NDArray[np.uint8], most: int = _PAGES) -> bytes:
    step = max(_PAGE_BYTES, memory.nbytes // most)
    sums = (_checksum_of(memory[at : at + _PAGE_BYTES].data) for at in range(0, memory.nbytes, step))
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
        return (bool(old == new) and _is_alike(old, new)) or (old != old and new != new)
    return False


def _is_alike(old: Any, new: Any) -> bool:
    """Whether equal plain values have equal classes and signs, too, unlike 1, 1.0 and True, or 0.0 and -0.0."""
    try:
        return marshal.dumps(old, 2) == marshal.dumps(new, 2)
    except ValueError:  # paths, enums
        return True


def _written(container: Any, step: int, has_arrays: bool) -> bytes:
    """Every `step`-th item of a container as bytes, with their keys, at the speed of C if no item holds arrays.

    Raises:
        ValueError: an item holds something else than plain values in builtin containers.
    """
    keys, values = _keys_and_values(container)
    keys, values = list(keys[::step]), values[::step]
    kinds = set(map(type, values))
    kind = kinds.pop() if len(kinds) == 1 else dict
    if _has_plain_attributes(kind):
        values = [*map(attributes_of, values), kind.__qualname__]
        keys.append("class")
    return marshal.dumps((keys, list(map(_with_bytes, values)) if has_arrays else values), 2)


def _with_bytes(node: Any) -> Any:
    """Builtin containers with the bytes of arrays in place of the arrays."""
    kind = type(node)
    if kind in (list, tuple):
        return list(map(_with_bytes, node))
    if kind is dict:
        return {key: _with_bytes(value) for key, value in node.items()}
    if kind is torch.Tensor:
        with suppress(TypeError, RuntimeError):  # of another device, layout or dtype, or in a graph
            live = node.numpy()
            return live.dtype.str, live.shape, live.tobytes()
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


def _kinds_in(values: Iterable[Any]) -> set[type]:
    """The classes of some items of a container, and of the items inside them: of 4,096 at most."""
    kinds = set[type]()
    waiting = deque([(value, _DEEP) for value in islice(values, SMALL)])
    for _ in range(_MOST_KINDS):
        if not waiting:
            break
        value, deep = waiting.popleft()
        kind = type(value)
        inner: Iterable[Any] = ()
        if kind in _BUILTIN and deep:
            inner = values_of(value)
            kinds.add(kind)
        elif deep and _has_plain_attributes(kind):
            inner = attributes_of(value).values()
        if not inner:
            kinds.add(kind)
        waiting.extend((part, deep - 1) for part in islice(inner, SMALL))
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

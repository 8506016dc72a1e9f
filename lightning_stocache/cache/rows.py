"""Samples of fixed fields: what a sample looks like, and how its bytes are read and written.

A sample is any nesting of dict, OrderedDict, tuple, list and namedtuple around leaves. A leaf (`Field`) is a tensor (of
a subclass, too, but without attributes), a NumPy array or number, a Python int, float, complex or bool, or None. The
first sample gives the spec (`SampleSpec`), which all other samples must match. `encode` checks a sample and gives its
leaves, `contents` gives their bytes in row order. `put_many` writes samples into the memory of a batch, one array per
field, and `split` makes samples from it.

Samples come out as they went in, bit for bit: structure, types, dtypes and values. A dict has the key order of the
first sample. Nothing is ever cast, broadcast or cut to fit. Two things change: tensors and arrays become contiguous,
and a `numpy.memmap` becomes a plain array. A sample whose leaves have bytes in common is refused; a record keeps views.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import (
    BatchRows,
    Memory,
    Parts,
    SampleMismatchError,
    UnsupportedSampleError,
    memory_of,
    named,
    overlaps,
    tensor_over,
    type_name,
)
from lightning_stocache.node.errors import text_of

__all__ = ["Field", "SampleSpec"]

_NUMBERS: dict[type, np.dtype[Any]] = {
    bool: np.dtype(np.bool_),
    int: np.dtype(np.int64),
    float: np.dtype(np.float64),
    complex: np.dtype(np.complex128),
}
_ATTRIBUTES: dict[type, dict[str, Any]] = {
    torch.Tensor: {"is_cpu": True, "layout": torch.strided, "requires_grad": False},
    np.ndarray: {},
}
_PACKED = {bool: struct.Struct("=?"), int: struct.Struct("=q"), float: struct.Struct("=d")}  # a third of NumPy's time


@dataclass(frozen=True)
class Field:
    """One leaf of a sample: its place, its type, and how its bytes are read and written.

    Args:
        path: its place in the sample, as Python code: `['image']`.
        kind: its type.
        dtype: torch's dtype for tensors, NumPy's dtype for arrays and numbers, None for None.
        shape: empty for numbers.

    Example:
        >>> field = Field.describing("[0]", torch.zeros(2, dtype=torch.int16))
        >>> field.nbytes, str(field)
        (4, 'Tensor of dtype torch.int16 and shape (2,)')
    """

    path: str
    kind: type[Any]
    dtype: torch.dtype | np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()

    @cached_property  # read for every batch
    def nbytes(self) -> int:
        """Bytes of one sample's leaf."""
        return 0 if self.dtype is None else self.dtype.itemsize * math.prod(self.shape)

    @classmethod
    def describing(cls, path: str, leaf: Any) -> Field:
        """Describe a leaf. Raises UnsupportedSampleError, with advice, for a leaf without a fixed size."""
        kind = type(leaf)
        if leaf is None:
            return cls(path, kind)
        if kind in _NUMBERS:
            if kind is int and not -(2**63) <= leaf < 2**63:
                raise UnsupportedSampleError(f"{named(path)} is an int of more than 64 bits: {leaf}")
            return cls(path, kind, _NUMBERS[kind])
        if isinstance(leaf, torch.Tensor):
            is_dense = leaf.layout is torch.strided and not leaf.is_quantized and not leaf.is_nested
            if not (is_dense and leaf.is_cpu) or leaf.requires_grad or leaf.__dict__:
                raise UnsupportedSampleError(
                    f"{named(path)} must be a dense tensor on the CPU without grad and attributes, got a "
                    f"{type_name(kind)} of layout {leaf.layout} on {leaf.device}; "
                    "return it with .detach().cpu().to_dense()"
                )
            return cls(path, kind, leaf.dtype, tuple(leaf.shape))
        is_array = kind is np.ndarray or isinstance(leaf, np.memmap | np.generic)
        if is_array and leaf.dtype.kind not in "OSTUV":
            return cls(path, np.ndarray if isinstance(leaf, np.ndarray) else kind, leaf.dtype, leaf.shape)
        came = f" of dtype {leaf.dtype}" if is_array else ""
        raise UnsupportedSampleError(
            f"{named(path)} is a {type_name(kind)}{came}, which cannot be cached; return tensors, arrays of numbers or "
            "numbers (pil_to_tensor for images, the index of a class), in plain dicts, tuples or lists"
        )

    def agrees(self, leaf: Any) -> bool:
        """Whether a leaf matches this field. Raises UnsupportedSampleError if the leaf matches no field at all."""
        if leaf.__class__ is self.kind:  # a fast check of plain tensors and numbers, which are nearly all leaves
            if self.kind is torch.Tensor:
                if (
                    leaf.dtype == self.dtype  # so the tensor is not quantized
                    and leaf.shape == self.shape
                    and leaf.is_cpu
                    and leaf.layout is torch.strided
                    and not (leaf.requires_grad or leaf.__dict__)
                ):
                    return True
            elif self.kind is int:
                if -(2**63) <= leaf < 2**63:
                    return True
            elif self.kind in _NUMBERS or leaf is None:
                return True
        return Field.describing(self.path, leaf) == self

    def agree(self, leaves: Sequence[Any]) -> bool:
        """Whether all leaves match this field, checked together. False if each leaf must be checked by itself."""
        if set(map(type, leaves)) != {self.kind}:
            return False
        if self.kind is int:
            return bool(min(leaves) >= -(2**63) and max(leaves) < 2**63)
        if self.kind is torch.Tensor and any(map(attrgetter("__dict__"), leaves)):
            return False
        if self.kind in _ATTRIBUTES:  # by attribute, not by leaf: a third of the time
            attributes = {"dtype": self.dtype, "shape": self.shape, **_ATTRIBUTES[self.kind]}
            return all(set(map(attrgetter(name), leaves)) == {value} for name, value in attributes.items())
        return self.kind in _NUMBERS or self.dtype is None

    def content(self, leaf: Any) -> memoryview:
        """The bytes of a leaf that matches this field; of a contiguous tensor or array, its own memory."""
        if (packed := _PACKED.get(self.kind)) is not None:
            return memoryview(packed.pack(leaf))
        if isinstance(leaf, torch.Tensor):
            return memory_of(leaf if leaf.__class__ is torch.Tensor else leaf.as_subclass(torch.Tensor)).data
        if leaf is None:
            return memoryview(b"")
        return np.ascontiguousarray(leaf).reshape(-1).view(np.uint8).data

    def stack(self, leaves: Sequence[Any], rows: npt.NDArray[np.uint8]) -> None:
        """Copy leaves that match this field into contiguous rows, uint8 `[leaves, nbytes]`."""
        if not self.nbytes:
            return
        batch = self.over(rows, len(leaves))
        if self.kind in _NUMBERS:
            batch[:] = leaves
        elif isinstance(batch, np.ndarray):
            np.stack(leaves, out=batch)
        else:
            plain = leaves if self.kind is torch.Tensor else [leaf.as_subclass(torch.Tensor) for leaf in leaves]
            torch.stack(list(plain), out=batch)

    def decode(self, memory: npt.NDArray[np.uint8], samples: int) -> Sequence[Any]:
        """Make the leaves of many samples over their bytes, uint8 `[samples * nbytes]`, which the leaves then own."""
        if self.dtype is None:
            return [None] * samples
        batch = self.over(memory, samples)
        if self.kind in _NUMBERS:
            return list(batch.tolist())
        if isinstance(batch, np.ndarray):
            is_array = self.kind is np.ndarray and not self.shape
            return [batch[number, ...] for number in range(samples)] if is_array else list(batch)
        leaves = batch.unbind(0)
        return leaves if self.kind is torch.Tensor else [leaf.as_subclass(self.kind) for leaf in leaves]

    def over(self, memory: npt.NDArray[np.uint8], samples: int) -> Any:
        """The leaves of many samples as one tensor or array `[samples, *shape]` over their bytes."""
        shape = (samples, *self.shape)
        if isinstance(self.dtype, torch.dtype):
            return tensor_over(memory, self.dtype, shape)
        return np.ndarray(shape, self.dtype, memory)

    def __str__(self) -> str:
        if self.dtype is None or self.kind in _NUMBERS:
            return type_name(self.kind)
        return f"{type_name(self.kind)} of dtype {self.dtype} and shape {self.shape}"


@dataclass(frozen=True)
class _Branch:
    """A container of a sample: its path, type and keys (of a dict), its branches and the numbers of its fields."""

    path: str
    kind: type[Any]
    keys: tuple[Any, ...] | None
    children: tuple[_Branch | int, ...]

    @cached_property
    def is_flat(self) -> bool:
        """Whether all children are leaves."""
        return not any(isinstance(child, _Branch) for child in self.children)

    @cached_property
    def key_kinds(self) -> dict[Any, type]:
        """The types of the keys of a dict."""
        return {key: type(key) for key in self.keys or ()}

    def difference(self, node: Any) -> tuple[str, str] | None:
        """What was expected and what came, in words; None if a node matches this container."""
        if node.__class__ is not self.kind:
            return f"a {type_name(self.kind)} of {len(self.children)}", f"a {type_name(type(node))}"
        if self.keys is None:
            if len(node) != len(self.children):
                return f"a {type_name(self.kind)} of {len(self.children)}", f"one of {len(node)}"
            if attributes := getattr(node, "__dict__", None):
                return f"a {type_name(self.kind)} without attributes", f"one with {', '.join(attributes)}"
        # True equals 1. Two OrderedDicts are not equal if their keys come in another order.
        elif {key: type(key) for key in node} != self.key_kinds or (
            self.kind is OrderedDict and tuple(node) != self.keys
        ):
            return f"a {type_name(self.kind)} with the keys {list(self.keys)}", f"the keys {list(node)}"
        return None


@dataclass(frozen=True)
class SampleSpec:
    """The structure and the fields of all samples of a cached source. Make it from a sample with `infer`.

    Raises:
        UnsupportedSampleError: (`infer`) a leaf has no fixed size: images of PIL, strings, objects.
        SampleMismatchError: (`encode`) a sample differs; the message names its index, the field, what was
            expected and what came.

    Example:
        >>> spec = SampleSpec.infer({"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": 7})
        >>> spec.nbytes
        200
        >>> leaves = spec.encode({"image": torch.ones(3, 8, 8, dtype=torch.uint8), "label": 5})
        >>> spec.decoded(spec.contents(leaves))["label"]
        5
    """

    tree: _Branch | int
    fields: tuple[Field, ...]
    is_fixed: ClassVar[bool] = True

    @classmethod
    def infer(cls, sample: Any) -> SampleSpec:
        """The spec of a sample."""
        fields: list[Field] = []
        tree = _tree(sample, "", fields)
        return cls(tree, tuple(fields))

    # ---- what samples cost ----

    @cached_property  # read once per batch
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one sample in each field."""
        return tuple(field.nbytes for field in self.fields)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(self.row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a sample and its word."""
        return self.nbytes + 4

    @property
    def most_slot_bytes(self) -> int:
        """Upper estimate of the bytes of a slot; all slots are equal."""
        return self.slot_bytes

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return self.nbytes

    def least_bytes(self, sample: Any) -> int:
        """Least bytes of a sample; all samples are equal."""
        return self.nbytes

    def for_bytes(self, granted: int, samples: int) -> SampleSpec:
        """This spec: rows have one size."""
        return self

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Bytes of the memory for a batch of `samples`, per field."""
        return tuple(nbytes * samples for nbytes in self.row_bytes)

    @property
    def title(self) -> str:
        """The fields, in words that two jobs can compare."""
        return "; ".join(f"{field.path or 'sample'}: {field}" for field in self.fields)

    # ---- from samples to bytes ----

    def encode(self, sample: Any, index: int | None = None) -> list[Any]:
        """Check a sample and return its leaves as they are, in the order of the fields. Errors name `index`."""
        leaves: list[Any] = []
        _collect(self.tree, sample, index, leaves)
        for field, leaf in zip(self.fields, leaves, strict=True):
            try:
                if field.agrees(leaf):
                    continue
                came = str(Field.describing(field.path, leaf))
            except Exception as error:  # the code of a tensor subclass may raise anything
                came = f"something else: {text_of(error)}"
            raise _mismatch(index, field.path, str(field), came)
        if overlaps(leaves):
            title = "a sample" if index is None else f"sample {index}"
            raise UnsupportedSampleError(f"{title} has tensors or arrays that are views of the same bytes")
        return leaves

    def encode_all(self, samples: Sequence[Any]) -> list[Parts] | None:
        """Encode many samples field by field, in a third of the time. Returns None if each must be encoded by itself.

        Example:
            >>> spec = SampleSpec.infer((1, 2.0))
            >>> spec.encode_all([(3, 4.0), (5, 6.0)]), spec.encode_all([(3, 4.0), (5, 6)])
            ([(3, 4.0), (5, 6.0)], None)
        """
        leaves = self._leaves_of_all(samples)
        if leaves is None:
            return None
        try:
            if not all(map(Field.agree, self.fields, zip(*leaves, strict=True))):
                return None
        except Exception:  # the code of a tensor subclass may raise anything
            return None
        if self._has_several_arrays and any(map(overlaps, leaves)):
            return None
        return leaves

    def _leaves_of_all(self, samples: Sequence[Any]) -> list[Parts] | None:
        """The leaves of each sample. None if samples are nested deeper than one tuple, list or dict."""
        tree = self.tree
        if isinstance(tree, int):
            return [(sample,) for sample in samples]
        if not tree.is_flat or set(map(type, samples)) != {tree.kind}:
            return None
        if tree.kind in (tuple, list) and set(map(len, samples)) == {len(tree.children)}:
            return list(samples)
        if tree.kind is dict and set(map(type, chain(tree.key_kinds, *samples))) == {str}:
            keys = tree.key_kinds.keys()
            if all(sample.keys() == keys for sample in samples):
                return [[sample[key] for key in keys] for sample in samples]
        return None

    @cached_property
    def _has_several_arrays(self) -> bool:
        """Whether leaves may have bytes in common."""
        return sum(field.kind not in _NUMBERS and field.dtype is not None for field in self.fields) > 1

    def contents(self, parts: Sequence[Any]) -> list[memoryview]:
        """The bytes of an encoded sample, `[nbytes]` per field; of a contiguous tensor, its own memory."""
        return [field.content(leaf) for field, leaf in zip(self.fields, parts, strict=True)]

    def rows(self, memory: Memory, samples: int) -> Memory:
        """The memory of a batch of `samples` as uint8 `[samples, nbytes]` per field."""
        return [field.reshape(samples, nbytes) for field, nbytes in zip(memory, self.row_bytes, strict=True)]

    def put_many(self, rows: Memory, places: Sequence[int], samples: Sequence[Parts]) -> BatchRows:
        r"""Copy encoded samples into as many rows of a batch at once: 0.2 us per sample and field, one by one 1.5 us.

        Args:
            rows: the memory of the batch, as `rows` gives it.
            places: the row of each sample.
            samples: the leaves of each sample.

        Returns:
            The rows of the samples.

        Example:
            >>> spec, memory = SampleSpec.infer(torch.zeros(2, dtype=torch.int16)), np.zeros(3 * 4, dtype=np.uint8)
            >>> spec.put_many(spec.rows([memory], 3), [1], [[torch.tensor([1, 2], dtype=torch.int16)]])[0][0].tobytes()
            b'\x01\x00\x02\x00'
            >>> memory.tolist()
            [0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0]
        """
        numbers = np.asarray(places)
        first, count = places[0], len(places)
        in_a_row = bool((numbers == np.arange(first, first + count)).all())
        for field, column, leaves in zip(self.fields, rows, zip(*samples, strict=True), strict=True):
            if in_a_row:
                field.stack(leaves, column[first : first + count])
            else:
                stacked = np.empty((count, field.nbytes), dtype=np.uint8)
                field.stack(leaves, stacked)
                column[numbers] = stacked
        return BatchRows(rows, numbers)

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample has the same containers and types of leaves; dtypes and shapes may differ."""
        try:
            other = SampleSpec.infer(sample)
        except Exception:  # the code of a tensor subclass may raise anything
            return False
        kinds = [[field.kind for field in spec.fields] for spec in (self, other)]
        return other.tree == self.tree and kinds[0] == kinds[1]

    # ---- from bytes to samples ----

    def split(self, memory: Memory, samples: int) -> list[Any]:
        """Make samples over the memory of a batch, uint8 `[samples * nbytes]` per field, which they own together."""
        columns = zip(self.fields, memory, strict=True)
        return list(_assemble(self.tree, [field.decode(column, samples) for field, column in columns], samples))

    def decoded(self, contents: Sequence[bytes | memoryview]) -> Any:
        """The sample of its bytes in each field, in memory of its own."""
        return self.split([np.frombuffer(bytearray(field), dtype=np.uint8) for field in contents], 1)[0]


def _tree(node: Any, path: str, fields: list[Field]) -> _Branch | int:
    """The structure of a part of a sample. Appends the part's leaves to `fields`."""
    kind, keys = type(node), None
    if kind in (dict, OrderedDict):
        keys = tuple(node)
        parts = [(f"[{key!r}]", node[key]) for key in keys]
    elif isinstance(node, tuple) and hasattr(kind, "_fields"):
        if attributes := getattr(node, "__dict__", None):
            raise UnsupportedSampleError(
                f"{named(path)} is a {type_name(kind)} with attributes of its own: {', '.join(attributes)}"
            )
        parts = [(f".{name}", part) for name, part in zip(kind._fields, node, strict=True)]
    elif kind in (tuple, list):
        parts = [(f"[{number}]", part) for number, part in enumerate(node)]
    else:
        fields.append(Field.describing(path, node))
        return len(fields) - 1
    return _Branch(path, kind, keys, tuple(_tree(part, path + step, fields) for step, part in parts))


def _collect(node: _Branch | int, sample: Any, index: int | None, leaves: list[Any]) -> None:
    """Append the leaves of a part of a sample to `leaves`, in the order of the fields."""
    if isinstance(node, int):
        leaves.append(sample)
        return
    if difference := node.difference(sample):
        raise _mismatch(index, node.path, *difference)
    parts = sample if node.keys is None else [sample[key] for key in node.keys]
    if node.is_flat:
        leaves.extend(parts)
        return
    for child, part in zip(node.children, parts, strict=True):
        _collect(child, part, index, leaves)


def _assemble(node: _Branch | int, leaves: Sequence[Sequence[Any]], samples: int) -> Sequence[Any]:
    """Make the same part of many samples, from the leaves of all samples in each field."""
    if isinstance(node, int):
        return leaves[node]
    children = [_assemble(child, leaves, samples) for child in node.children]
    rows = list(zip(*children, strict=True)) if children else [()] * samples
    if node.keys is not None:
        return [node.kind(zip(node.keys, row, strict=True)) for row in rows]
    if hasattr(node.kind, "_fields"):
        return [tuple.__new__(node.kind, row) for row in rows]  # a constructor may change its arguments
    return rows if node.kind is tuple else [list(row) for row in rows]


def _mismatch(index: int | None, path: str, expected: str, came: str) -> SampleMismatchError:
    sample = "a sample" if index is None else f"sample {index}"
    return SampleMismatchError(
        f"{sample}: {named(path)} must be {expected}, as in all rows of this cache; got {came}. "
        "Rows have one structure, dtype and shape: convert, resize or pad them in the source, or keep records: "
        'layout="records" of CachedDataset, CachedStream or RollingCache'
    )

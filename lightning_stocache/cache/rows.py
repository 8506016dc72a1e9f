"""Samples of fixed fields: what a sample looks like, and how its bytes are read and written.

A sample is any nesting of dict, OrderedDict, tuple, list and namedtuple around leaves. A leaf (`Field`) is a tensor (of
a subclass, too, but without attributes), a NumPy array or number, a Python int, float, complex or bool, or None. The
first sample gives the spec (`SampleSpec`), which all others must match. `encode` checks a sample and gives its leaves
as they are, `contents` their bytes in row order; `split` makes samples anew from the memory of a batch, one array per
field. `FieldRows` is that memory, open to single samples and to many at once.

What comes out has the structure, types, dtypes and values of what went in, bit for bit; a dict has the key order of the
first sample. Nothing is ever cast, broadcast or cut to fit: a sample that differs is an error which names the index and
the field. Not promised: strides (what comes out is contiguous), and `numpy.memmap`, which comes out as a plain array.
"""

from __future__ import annotations

import collections
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import (
    Memory,
    Parts,
    SampleMismatchError,
    UnsupportedSampleError,
    named,
    type_name,
)

__all__ = ["Field", "FieldRows", "SampleSpec", "bytes_of", "memory_of"]

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_PACKED = {bool: struct.Struct("=?"), int: struct.Struct("=q"), float: struct.Struct("=d")}  # what torch has for them


@dataclass(frozen=True)
class Field:
    """One leaf of a sample: its place, its type, and how its bytes are read.

    Args:
        path: where in the sample it is, as one would write it in Python: `['image']`.
        kind: its type.
        dtype: of torch or NumPy; None for None.
        shape: empty for numbers.

    Example:
        >>> field = Field.of("[0]", torch.zeros(2, dtype=torch.int16))
        >>> field.nbytes, str(field)
        (4, 'Tensor of dtype torch.int16 and shape (2,)')
    """

    path: str
    kind: type[Any]
    dtype: torch.dtype | np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()

    @cached_property  # asked for with every batch
    def nbytes(self) -> int:
        """Bytes of one sample's leaf."""
        return 0 if self.dtype is None else self.dtype.itemsize * int(np.prod(self.shape))

    @classmethod
    def of(cls, path: str, leaf: Any) -> Field:
        """Describe a leaf.

        Raises:
            UnsupportedSampleError: it cannot be kept in a slot of fixed size; the message says what to return instead.
        """
        kind = type(leaf)
        if leaf is None:
            return cls(path, kind)
        if kind in _NUMBERS:
            if kind is int and not -(2**63) <= leaf < 2**63:
                raise UnsupportedSampleError(f"{named(path)} is an int of more than 64 bits: {leaf}")
            return cls(path, kind, _NUMBERS[kind])
        if isinstance(leaf, torch.Tensor):
            if advice := _tensor_trouble(leaf):
                raise UnsupportedSampleError(f"{named(path)} is a tensor that {advice}")
            return cls(path, kind, leaf.dtype, tuple(leaf.shape))
        if kind is np.ndarray or isinstance(leaf, (np.memmap, np.generic)):
            if leaf.dtype.kind in "OSUV":
                raise UnsupportedSampleError(
                    f"{named(path)} is a NumPy array of dtype {leaf.dtype}; return numbers instead"
                )
            return cls(path, np.ndarray if isinstance(leaf, np.ndarray) else kind, leaf.dtype, leaf.shape)
        raise UnsupportedSampleError(f"{named(path)} is a {type_name(kind)}, which cannot be cached; {_advice(kind)}")

    def agrees(self, leaf: Any) -> bool:
        """Whether a leaf is of this field.

        Raises:
            UnsupportedSampleError: it could be of no field.
        """
        if leaf.__class__ is self.kind:  # quickly, what nearly all samples are: a plain tensor or a number
            if self.kind is torch.Tensor:
                if (
                    leaf.dtype == self.dtype  # which is not a quantized one
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
        return Field.of(self.path, leaf) == self

    def plain(self, leaf: Any) -> torch.Tensor:
        """A leaf that agrees with this field as a plain tensor, of any strides; bytes where NumPy has the dtype."""
        if isinstance(leaf, torch.Tensor):
            plain = leaf if leaf.__class__ is torch.Tensor else leaf.as_subclass(torch.Tensor)
            return plain.resolve_conj().resolve_neg() if plain.is_conj() or plain.is_neg() else plain
        if self.dtype is None:
            return torch.empty(0, dtype=torch.uint8)
        if isinstance(self.dtype, torch.dtype):
            return torch.scalar_tensor(leaf, dtype=self.dtype)
        array = np.array(leaf, order="C", ndmin=1)  # a copy: torch warns about arrays that cannot be written to
        return torch.from_numpy(array.reshape(-1).view(np.uint8))

    def content(self, leaf: Any) -> memoryview:
        """The bytes of a leaf that agrees with this field; those of a contiguous tensor are its own memory."""
        packed = _PACKED.get(self.kind)
        return memory_of(bytes_of(self.plain(leaf))).data if packed is None else memoryview(packed.pack(leaf))

    def stack(self, leaves: Sequence[Any], rows: torch.Tensor) -> None:
        """Copy leaves that agree with this field into contiguous rows, uint8 `[leaves, nbytes]`."""
        if not self.nbytes:
            return
        if isinstance(self.dtype, np.dtype):
            array = rows.numpy().reshape(-1).view(self.dtype).reshape(len(leaves), *self.shape)
            np.stack(leaves, out=array)
        elif self.kind in _NUMBERS:
            self.batch(rows).copy_(torch.tensor(leaves, dtype=self.dtype))
        else:
            plain = leaves if self.kind is torch.Tensor else [leaf.as_subclass(torch.Tensor) for leaf in leaves]
            torch.stack(list(plain), out=self.batch(rows))

    def decode(self, rows: torch.Tensor) -> list[Any]:
        """The leaves of many samples from their bytes, uint8 `[samples, nbytes]`, which they then own."""
        samples = len(rows)
        if self.dtype is None:
            return [None] * samples
        if isinstance(self.dtype, np.dtype):
            array = rows.numpy().reshape(-1).view(self.dtype).reshape(samples, *self.shape)
            return list(array) if self.shape or self.kind is not np.ndarray else [array[i, ...] for i in range(samples)]
        batch = self.batch(rows)
        if self.kind in _NUMBERS:
            return batch.tolist()
        leaves = batch.unbind(0)
        return list(leaves) if self.kind is torch.Tensor else [leaf.as_subclass(self.kind) for leaf in leaves]

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """The leaves of many samples as one tensor `[samples, *shape]` over their bytes, if torch has the dtype."""
        assert isinstance(self.dtype, torch.dtype)
        return rows.reshape(-1).view(self.dtype).reshape(len(rows), *self.shape)

    def __str__(self) -> str:
        if self.dtype is None or self.kind in _NUMBERS:
            return type_name(self.kind)
        return f"{type_name(self.kind)} of dtype {self.dtype} and shape {self.shape}"


def bytes_of(leaf: torch.Tensor) -> torch.Tensor:
    """The bytes of a plain tensor in row order, uint8 and contiguous; those of a contiguous one are its own memory."""
    if leaf.numel() == 1:  # contiguous to torch, whatever its strides, which a view as bytes would mind
        return leaf.as_strided((1,), (1,)).view(torch.uint8)
    row = leaf.contiguous().view(-1)
    return row if row.dtype == torch.uint8 else row.view(torch.uint8)


class _Memory:
    """The bytes of a tensor, which live as long as this does."""

    __slots__ = ("__array_interface__", "tensor")

    def __init__(self, row: torch.Tensor) -> None:
        self.tensor = row
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (row.numel(),),
            "data": (row.data_ptr(), False),
        }


def memory_of(row: torch.Tensor) -> npt.NDArray[np.uint8]:
    """A uint8 tensor `[nbytes]` as an array. `numpy()` would keep the user's storage from being resized ever after."""
    return np.asarray(_Memory(row)) if row.numel() else np.empty(0, dtype=np.uint8)


def _tensor_trouble(leaf: torch.Tensor) -> str | None:
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        return "is not dense; return it with .to_dense()"
    if leaf.device.type != "cpu":
        return f"lies on {leaf.device}; return it with .cpu() and move batches to the device instead"
    if leaf.requires_grad:
        return "requires grad; return it with .detach()"
    return "has attributes; return them as fields of their own" if leaf.__dict__ else None


def _advice(kind: type) -> str:
    if kind.__module__.split(".")[0] == "PIL":
        return "return a tensor of one size, for instance by torchvision.transforms.v2.functional.pil_to_tensor"
    if issubclass(kind, str | bytes):
        return "return a number for it (the class index), or a tensor of fixed length"
    if issubclass(kind, int | float | complex):
        return f"return a plain {next(base.__name__ for base in kind.__mro__ if base in _NUMBERS)} instead"
    if issubclass(kind, dict):
        return "return a plain dict instead"
    return "return tensors, NumPy arrays or numbers, in dicts, tuples, lists or namedtuples"


class FieldRows:
    r"""The rows of a batch, open to single samples.

    Args:
        fields: of a sample.
        memory: gives that of the batch when the first sample has come, uint8 `[samples * nbytes]` per field.
        samples: how many.

    Example:
        >>> field, memory = Field.of("", torch.zeros(2, dtype=torch.int16)), np.zeros(3 * 4, dtype=np.uint8)
        >>> rows = FieldRows([field], lambda: [memory], 3)
        >>> rows.put_many([1], [[torch.tensor([1, 2], dtype=torch.int16)]])[0][0].tobytes()
        b'\x01\x00\x02\x00'
        >>> memory.tolist()
        [0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0]
    """

    def __init__(self, fields: Sequence[Field], memory: Callable[[], Memory], samples: int) -> None:
        self._fields, self._memory, self._samples = fields, memory, samples

    def put_many(self, places: Sequence[int], samples: Sequence[Parts]) -> list[list[memoryview]]:
        """Copy encoded samples to their places at once: 0.2 us each and field, where one by one costs 1.5.

        Args:
            places: one or more, all different.
            samples: as many.

        Returns:
            The bytes of each there, per field.
        """
        columns, contents = self._open
        first, count = places[0], len(places)
        together = list(places) == list(range(first, first + count))
        for field, column, leaves in zip(self._fields, columns, zip(*samples, strict=True), strict=True):
            if together:
                field.stack(leaves, column[first : first + count])
            else:
                rows = torch.empty(count, field.nbytes, dtype=torch.uint8, device="cpu")
                field.stack(leaves, rows)
                column.numpy()[places] = rows.numpy()  # torch's own ways to do this are nine times as slow
        return [[content[place * nbytes : (place + 1) * nbytes] for content, nbytes in contents] for place in places]

    def write(self, place: int, contents: Sequence[memoryview | npt.NDArray[np.uint8]]) -> None:
        """Copy the bytes of a sample to its place, per field."""
        for (memory, nbytes), content in zip(self._open[1], contents, strict=True):
            part: Any = content  # NumPy's stubs know of no buffers before Python 3.12
            memory[place * nbytes : (place + 1) * nbytes] = part

    @cached_property
    def _open(self) -> tuple[list[torch.Tensor], list[tuple[memoryview, int]]]:
        """The columns of the fields, uint8 `[samples, nbytes]`, and their bytes."""
        columns, contents = [], []
        for field, row in zip(self._fields, self._memory(), strict=True):
            columns.append(torch.from_numpy(row).view(self._samples, field.nbytes))
            contents.append((row.data, field.nbytes))
        return columns, contents


@dataclass(frozen=True)
class _Branch:
    """A container of a sample, with its keys if it is a dict; children are branches or places in the list of fields."""

    kind: type[Any]
    keys: tuple[Any, ...] | None
    children: tuple[_Branch | int, ...] = ()

    @cached_property
    def is_flat(self) -> bool:
        """Whether only leaves hang below it."""
        return not any(isinstance(child, _Branch) for child in self.children)

    def parts(self, node: Any) -> Sequence[Any]:
        """What hangs below a container of this kind."""
        return node if self.keys is None else [node[key] for key in self.keys]

    def steps(self, parts: int) -> list[str]:
        """How one goes to each of them in Python."""
        if self.keys is not None:
            return [f"[{key!r}]" for key in self.keys]
        names = getattr(self.kind, "_fields", None)
        return [f"[{number}]" for number in range(parts)] if names is None else [f".{name}" for name in names]

    def difference(self, node: Any) -> tuple[str, str] | None:
        """What was expected and what came, unless they agree."""
        if node.__class__ is not self.kind:
            return f"a {type_name(self.kind)} of {len(self.children)}", f"a {type_name(type(node))}"
        if self.keys is not None:
            ordered = self.kind is collections.OrderedDict  # two of them with another order are not equal
            if tuple(node) != self.keys if ordered else node.keys() != set(self.keys):
                return f"a {type_name(self.kind)} with the keys {list(self.keys)}", f"the keys {list(node)}"
        elif len(node) != len(self.children):
            return f"a {type_name(self.kind)} of {len(self.children)}", f"one of {len(node)}"
        return None

    def build(self, children: list[Any]) -> Any:
        if self.keys is not None:
            return self.kind(zip(self.keys, children, strict=True))
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)


@dataclass(frozen=True)
class SampleSpec:
    """The structure and fields that all samples of a cached source have. Make it from a sample with `infer`.

    Raises:
        UnsupportedSampleError: (`infer`) a leaf has no fixed size: images of PIL, strings, objects.
        SampleMismatchError: (`flatten`, `encode`) a sample differs; the message names index, field, what was expected
            and what came.

    Example:
        >>> spec = SampleSpec.infer({"image": torch.zeros(3, 8, 8, dtype=torch.uint8), "label": 7})
        >>> spec.nbytes
        200
        >>> spec.unflatten(spec.flatten({"image": torch.ones(3, 8, 8, dtype=torch.uint8), "label": 5}))["label"]
        5
    """

    tree: _Branch | int
    fields: tuple[Field, ...]

    @classmethod
    def infer(cls, sample: Any) -> SampleSpec:
        """The spec of a sample."""
        fields: list[Field] = []

        def grow(node: Any, path: str) -> _Branch | int:
            kind = type(node)
            if kind in (dict, collections.OrderedDict):
                branch = _Branch(kind, tuple(node))
            elif kind in (tuple, list) or (isinstance(node, tuple) and hasattr(kind, "_fields")):
                branch = _Branch(kind, None)
            else:
                branch = None
            if branch is not None:
                children = zip(branch.steps(len(node)), branch.parts(node), strict=True)
                return replace(branch, children=tuple(grow(child, path + step) for step, child in children))
            fields.append(Field.of(path, node))
            return len(fields) - 1

        return cls(grow(sample, ""), tuple(fields))

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(self.row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot costs: one sample and its state."""
        return self.nbytes + 1

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return self.nbytes

    @property
    def title(self) -> str:
        """The fields, in words that two jobs can compare."""
        return "; ".join(f"{field.path or 'sample'}: {field}" for field in self.fields)

    @property
    def most_slot_bytes(self) -> int:
        """Upper estimate of the bytes that a sample costs: all cost the same."""
        return self.slot_bytes

    @cached_property  # asked for once per batch
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one sample in each field."""
        return tuple(field.nbytes for field in self.fields)

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Bytes of the memory for a batch of so many samples, in each field."""
        return tuple(nbytes * samples for nbytes in self.row_bytes)

    def rows(self, memory: Callable[[], Memory], samples: int) -> FieldRows:
        """Open the memory of a batch, uint8 `[samples * nbytes]` per field; it is asked for when it is needed."""
        return FieldRows(self.fields, memory, samples)

    def flatten(self, sample: Any, index: int | None = None) -> list[torch.Tensor]:
        """Check a sample and give the bytes of its leaves, one uint8 tensor per field. `index` is named in errors."""
        return [
            bytes_of(field.plain(leaf)) for field, leaf in zip(self.fields, self.encode(sample, index), strict=True)
        ]

    def encode(self, sample: Any, index: int | None = None) -> list[Any]:
        """Check a sample and give its leaves as they are, in the order of the fields."""
        leaves: list[Any] = []
        self._walk(self.tree, sample, (), index, leaves)
        for field_, leaf in zip(self.fields, leaves, strict=True):
            try:
                if field_.agrees(leaf):
                    continue
                came = str(Field.of(field_.path, leaf))
            except Exception as error:  # also what is raised by the code of a tensor subclass
                came = f"something else: {error}"
            raise SampleMismatchError(_mismatch(index, field_.path, str(field_), came))
        return leaves

    def contents(self, parts: Sequence[Any]) -> list[memoryview]:
        """The bytes of an encoded sample, `[nbytes]` per field; those of a contiguous tensor are its own memory."""
        return [field.content(leaf) for field, leaf in zip(self.fields, parts, strict=True)]

    def least_bytes(self, sample: Any) -> int:
        """Least bytes of a sample: all have the same."""
        return self.nbytes

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample has the same containers and types of leaves, of whatever dtypes and shapes."""
        try:
            other = SampleSpec.infer(sample)
        except Exception:  # as in `encode`
            return False
        return other.tree == self.tree and [field.kind for field in other.fields] == [
            field.kind for field in self.fields
        ]

    def unflatten(self, rows: Sequence[torch.Tensor]) -> Any:
        """Make a sample from the bytes of its leaves, which it then owns."""
        return self.split([row.numpy() for row in rows], 1)[0]

    def split(self, memory: Memory, samples: int) -> list[Any]:
        """Make samples from the memory of a batch, uint8 `[samples * nbytes]` per field, which they own together."""
        sized = zip(self.fields, memory, self.row_bytes, strict=True)
        leaves = [field.decode(torch.from_numpy(column).view(samples, nbytes)) for field, column, nbytes in sized]
        return list(map(_maker(self.tree, leaves), range(samples)))

    def _walk(
        self,
        node: _Branch | int,
        sample: Any,
        above: tuple[tuple[_Branch, int], ...],
        index: int | None,
        leaves: list[Any],
    ) -> None:
        """Collect the leaves below a node, which has come by these branches and the numbers of their children."""
        if isinstance(node, int):
            leaves.append(sample)
            return
        if difference := node.difference(sample):
            path = "".join(branch.steps(len(branch.children))[number] for branch, number in above)
            raise SampleMismatchError(_mismatch(index, path, *difference))
        if node.is_flat:
            leaves.extend(node.parts(sample))
            return
        for number, (branch, child) in enumerate(zip(node.children, node.parts(sample), strict=True)):
            self._walk(branch, child, (*above, (node, number)), index, leaves)


def _maker(node: _Branch | int, leaves: Sequence[Any]) -> Callable[[int], Any]:
    """Makes the n-th sample of many from their leaves.

    Not a function inside `split`: a closure that calls itself would keep the leaves, and the memory of the batch, alive
    until the garbage collector runs.
    """
    if isinstance(node, int):
        make: Callable[[int], Any] = leaves[node].__getitem__
        return make
    makers = [_maker(child, leaves) for child in node.children]
    if node.kind is tuple and len(makers) == 2:  # (image, label), by far the most common
        first, second = makers
        return lambda i: (first(i), second(i))
    return lambda i: node.build([make(i) for make in makers])


def _mismatch(index: int | None, path: str, expected: str, came: str) -> str:
    sample = "a sample" if index is None else f"sample {index}"
    return (
        f"{sample}: {named(path)} must be {expected}, as in the first sample; got {came}. "
        "Rows have one structure, dtype and shape: convert, resize or pad them in the source, or keep records "
        '(layout="records")'
    )

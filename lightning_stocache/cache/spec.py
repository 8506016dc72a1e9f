"""What a sample looks like: the fields of the first one, to which all others are held.

A sample is any nesting of dict, tuple, list and namedtuple around leaves. A leaf is a tensor (subclasses with their
attributes included), a NumPy array or number, a Python int, float, complex or bool, or None. `flatten` checks a
sample against the spec and gives the bytes of each leaf, uint8 and contiguous; `unflatten` makes the sample anew from
such bytes, `split` makes many at once from the rows of a gather. What comes out has the structure, types, dtypes and
values of what went in. Strides do not survive: what comes out is contiguous.

Nothing is ever cast, broadcast or cut to fit: a sample that differs is an error which names the index and the field.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

__all__ = ["Field", "SampleMismatchError", "SampleSpec", "UnsupportedSampleError"]

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}


class UnsupportedSampleError(TypeError):
    """A sample holds something that has no fixed number of bytes."""


class SampleMismatchError(ValueError):
    """A sample differs from the spec in structure, type, dtype, shape or attributes."""


@dataclass(frozen=True)
class Field:
    """One leaf of a sample: its place, its type, and how its bytes are read."""

    path: str
    kind: type[Any]
    dtype: torch.dtype | np.dtype[Any] | None = None
    shape: tuple[int, ...] = ()
    attributes: dict[str, Any] = field(
        default_factory=dict
    )  # of a tensor subclass: the format of bounding boxes, for instance

    @property
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
            return cls(path, kind, _NUMBERS[kind])
        if isinstance(leaf, torch.Tensor):
            if advice := _tensor_trouble(leaf):
                raise UnsupportedSampleError(f"{_named(path)} is a tensor that {advice}")
            return cls(path, kind, leaf.dtype, tuple(leaf.shape), dict(leaf.__dict__))
        if kind is np.ndarray or isinstance(leaf, (np.memmap, np.generic)):
            if leaf.dtype.kind in "OSUV":
                raise UnsupportedSampleError(
                    f"{_named(path)} is a NumPy array of dtype {leaf.dtype}; return numbers instead"
                )
            return cls(path, np.ndarray if isinstance(leaf, np.ndarray) else kind, leaf.dtype, leaf.shape)
        raise UnsupportedSampleError(
            f"{_named(path)} is a {_type_name(kind)}, which has no fixed size; {_advice(kind)}"
        )

    def encode(self, leaf: Any) -> torch.Tensor:
        """The bytes of a leaf that agrees with this field, uint8 `[nbytes]`."""
        if isinstance(leaf, torch.Tensor):
            plain = leaf.as_subclass(torch.Tensor).resolve_conj().resolve_neg()
            return plain.contiguous().reshape(-1).view(torch.uint8)
        if self.dtype is None:
            return torch.empty(0, dtype=torch.uint8)
        if isinstance(self.dtype, torch.dtype):
            return torch.tensor([leaf], dtype=self.dtype).view(torch.uint8)
        array = np.array(leaf, order="C", ndmin=1)  # a copy: torch warns about arrays that cannot be written to
        return torch.from_numpy(array.reshape(-1).view(np.uint8))

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
        return (
            list(leaves)
            if self.kind is torch.Tensor and not self.attributes
            else [self._dress(leaf) for leaf in leaves]
        )

    def batch(self, rows: torch.Tensor) -> torch.Tensor:
        """The same as one tensor `[samples, *shape]` over the same memory; for fields with a torch dtype."""
        assert isinstance(self.dtype, torch.dtype)
        return rows.reshape(-1).view(self.dtype).reshape(len(rows), *self.shape)

    def _dress(self, leaf: torch.Tensor) -> torch.Tensor:
        dressed: torch.Tensor = leaf.as_subclass(self.kind)
        dressed.__dict__.update(self.attributes)
        return dressed

    def __str__(self) -> str:
        if self.dtype is None or self.kind in _NUMBERS:
            return _type_name(self.kind)
        attributes = "".join(f", {name}={value!r}" for name, value in self.attributes.items())
        return f"{_type_name(self.kind)} of dtype {self.dtype} and shape {self.shape}{attributes}"


@dataclass(frozen=True)
class _Branch:
    """A container of a sample, with its keys if it is a dict; children are branches or places in the list of fields."""

    kind: type[Any]
    keys: tuple[Any, ...] | None
    children: tuple[_Branch | int, ...]

    def build(self, children: list[Any]) -> Any:
        if self.keys is not None:
            return self.kind(zip(self.keys, children, strict=True))
        return self.kind(*children) if hasattr(self.kind, "_fields") else self.kind(children)


@dataclass(frozen=True)
class SampleSpec:
    """The structure and fields that all samples of a cached source have. Make it from a sample with `infer`.

    Raises: UnsupportedSampleError: (`infer`) a leaf has no fixed size: images of PIL, strings, objects.
        SampleMismatchError: (`flatten`) a sample differs; the message names index, field, what was expected and what
        came.

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
                children = tuple(grow(child, f"{path}[{key!r}]") for key, child in node.items())
                return _Branch(kind, tuple(node), children)
            if kind in (tuple, list) or (isinstance(node, tuple) and hasattr(kind, "_fields")):
                names = (
                    [f".{name}" for name in kind._fields]
                    if hasattr(kind, "_fields")
                    else [f"[{i}]" for i in range(len(node))]
                )
                return _Branch(
                    kind, None, tuple(grow(child, path + name) for name, child in zip(names, node, strict=True))
                )
            fields.append(Field.of(path, node))
            return len(fields) - 1

        return cls(grow(sample, ""), tuple(fields))

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return sum(self.row_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a slot costs: one sample and its state."""
        return self.nbytes + 1

    @property
    def row_bytes(self) -> tuple[int, ...]:
        """Bytes of one sample in each field."""
        return tuple(field.nbytes for field in self.fields)

    def flatten(self, sample: Any, index: int | None = None) -> list[torch.Tensor]:
        """Check a sample and give the bytes of its leaves, one uint8 tensor per field. `index` is named in errors."""
        rows: list[torch.Tensor] = []
        for field_, leaf in zip(self.fields, self._leaves(self.tree, sample, "", index), strict=True):
            try:
                same = _agrees(field_, leaf) or Field.of(field_.path, leaf) == field_
            except UnsupportedSampleError as error:
                raise SampleMismatchError(_mismatch(index, field_.path, str(field_), str(error))) from None
            if not same:
                raise SampleMismatchError(_mismatch(index, field_.path, str(field_), str(Field.of(field_.path, leaf))))
            try:
                rows.append(field_.encode(leaf))
            except (OverflowError, RuntimeError) as error:
                raise SampleMismatchError(
                    _mismatch(index, field_.path, "an int of 64 bits", f"{leaf} ({error})")
                ) from None
        return rows

    def unflatten(self, rows: Sequence[torch.Tensor]) -> Any:
        """Make a sample from the bytes of its leaves, which it then owns."""
        return self.split([row.reshape(1, -1) for row in rows], 1)[0]

    def split(self, columns: Sequence[torch.Tensor], samples: int) -> list[Any]:
        """Make many samples from uint8 `[samples, nbytes]` per field, which they then own together."""
        leaves = [field.decode(column) for field, column in zip(self.fields, columns, strict=True)]

        def build(node: _Branch | int) -> Callable[[int], Any]:
            if isinstance(node, int):
                return leaves[node].__getitem__
            makers, branch = [build(child) for child in node.children], node
            if branch.kind is tuple and len(makers) == 2:  # (image, label), by far the most common
                first, second = makers
                return lambda i: (first(i), second(i))
            return lambda i: branch.build([make(i) for make in makers])

        return list(map(build(self.tree), range(samples)))

    def _leaves(self, node: _Branch | int, sample: Any, path: str, index: int | None) -> Iterator[Any]:
        if isinstance(node, int):
            yield sample
            return
        if sample.__class__ is not node.kind or len(sample) != len(node.children):
            expected = f"a {_type_name(node.kind)} of {len(node.children)}"
            came = f"a {_type_name(type(sample))}" + (f" of {len(sample)}" if hasattr(sample, "__len__") else "")
            raise SampleMismatchError(_mismatch(index, path, expected, came))
        if node.keys is not None:
            if missing := [key for key in node.keys if key not in sample]:
                raise SampleMismatchError(
                    _mismatch(index, path, f"the keys {list(node.keys)}", f"{list(sample)} (without {missing})")
                )
            children: Sequence[Any] = [sample[key] for key in node.keys]
        else:
            children = sample
        for number, (branch, child) in enumerate(zip(node.children, children, strict=True)):
            yield from self._leaves(
                branch, child, f"{path}[{number if node.keys is None else repr(node.keys[number])}]", index
            )


def _agrees(field_: Field, leaf: Any) -> bool:
    """The quick yes for what nearly all samples are: the same plain tensor or number again."""
    if leaf.__class__ is not field_.kind:
        return False
    if field_.kind is torch.Tensor:
        plain = (
            leaf.layout is torch.strided and leaf.device.type == "cpu" and not leaf.requires_grad and not leaf.__dict__
        )
        return plain and leaf.dtype == field_.dtype and leaf.shape == field_.shape and not field_.attributes
    return field_.kind in _NUMBERS or leaf is None


def _tensor_trouble(leaf: torch.Tensor) -> str | None:
    if leaf.layout is not torch.strided or leaf.is_quantized or leaf.is_nested:
        return "is not dense; return it with .to_dense()"
    if leaf.device.type != "cpu":
        return f"lies on {leaf.device}; return it with .cpu() and move batches to the device instead"
    if leaf.requires_grad:
        return "requires grad; return it with .detach()"
    if any(isinstance(value, torch.Tensor | np.ndarray) for value in leaf.__dict__.values()):
        return "carries other tensors as attributes; return them as fields of their own"
    return None


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


def _mismatch(index: int | None, path: str, expected: str, came: str) -> str:
    sample = "a sample" if index is None else f"sample {index}"
    return (
        f"{sample}: {_named(path)} must be {expected}, as in the first sample; got {came}. "
        "All samples of a cached source have one structure, dtype and shape: convert, resize or pad them in the source"
    )


def _named(path: str) -> str:
    return f"field {path}" if path else "the sample"


def _type_name(kind: type) -> str:
    return (
        kind.__name__ if kind.__module__ in ("builtins", "torch", "numpy") else f"{kind.__module__}.{kind.__qualname__}"
    )

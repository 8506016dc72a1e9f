"""One leaf of a sample: what it is, and how its bytes are read and written.

A leaf is a tensor (of a subclass, too, but without attributes), a NumPy array or number, a Python int, float, complex
or bool, or None. Its bytes are those of its values in row order; dtype, shape and type are the same for all samples and
lie in the `Field`. What comes out has the type, dtype and values of what went in, bit for bit. Not promised: strides
(what comes out is contiguous), and `numpy.memmap`, which comes out as the array that it is.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["Field", "UnsupportedSampleError", "bytes_of", "memory_of", "module_name", "named", "type_name"]

_NUMBERS: dict[type, torch.dtype] = {
    bool: torch.bool,
    int: torch.int64,
    float: torch.float64,
    complex: torch.complex128,
}
_PACKED = {bool: struct.Struct("=?"), int: struct.Struct("=q"), float: struct.Struct("=d")}  # what torch has for them


class UnsupportedSampleError(TypeError):
    """A sample holds something that has no fixed number of bytes."""


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


def named(path: str) -> str:
    """A place in a sample, for messages."""
    return f"field {path}" if path else "the sample"


def type_name(kind: type) -> str:
    """A type as its user knows it, for messages."""
    module = module_name(kind.__module__)
    return kind.__name__ if module in ("builtins", "torch", "numpy") else f"{module}.{kind.__qualname__}"


def module_name(module: str) -> str:
    """What a module is called in the process that a user starts: a script is `__mp_main__` in processes not forked.

    Both names lead to the script in either.

    Example:
        >>> module_name("__mp_main__"), module_name("torch")
        ('__main__', 'torch')
    """
    return "__main__" if module == "__mp_main__" else module

"""What turns samples into bytes, and back (`Codec`), and what `rows` and `records` share: errors, tensors, names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from itertools import combinations
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

__all__ = [
    "BatchRows",
    "Codec",
    "Lend",
    "Memory",
    "Parts",
    "SampleMismatchError",
    "Span",
    "UnsupportedSampleError",
    "aligned",
    "array_dtype",
    "chosen",
    "memory_of",
    "module_name",
    "named",
    "nbytes_of",
    "overlaps",
    "tensor_over",
    "type_name",
]


class SampleMismatchError(ValueError):
    """A sample differs from the spec in structure, type, dtype or shape."""


class UnsupportedSampleError(TypeError):
    """A sample holds a part that cannot be stored: it has no fixed number of bytes, or cannot be pickled."""


Parts = Sequence[Any]
"""An encoded sample: the leaves of rows as they came (tensors, arrays, numbers), or the bytes of a record."""

Memory = Sequence[npt.NDArray[np.uint8]]
"""The memory of a batch, uint8 `[size]` per field, writable, aligned to 64 bytes where it is large."""

Lend = Callable[[Sequence[int]], Memory]
"""Gives memory of undefined content, uint8 `[size]` for each size."""


class BatchRows(Sequence[Sequence[memoryview]]):
    r"""The bytes of some rows of a batch: a memoryview per row and field if they are asked for, or one array per field.

    Args:
        fields: the memory of the batch, uint8 `[rows, nbytes]` per field.
        places: which rows, int64 `[samples]`.

    Example:
        >>> rows = BatchRows([np.arange(6, dtype=np.uint8).reshape(3, 2)], np.array([2, 0]))
        >>> [[bytes(field) for field in row] for row in rows]
        [[b'\x04\x05'], [b'\x00\x01']]
        >>> chosen(rows, [1]).columns()
        [array([[0, 1]], dtype=uint8)]
    """

    def __init__(self, fields: Memory, places: npt.NDArray[np.int64]) -> None:
        self.fields, self.places = fields, places

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: Any) -> Any:
        place = self.places[number]
        return [field[place].data for field in self.fields]

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        widths: list[int] = [field.shape[1] for field in self.fields]
        return len(self) * sum(widths)

    def columns(self) -> Memory:
        """A copy of the rows, uint8 `[samples, nbytes]` per field."""
        return [field.take(self.places, 0) for field in self.fields]


def chosen(contents: Sequence[Sequence[memoryview]], numbers: Sequence[int]) -> Any:
    """The bytes of some of the samples."""
    if type(contents) is BatchRows:
        return BatchRows(contents.fields, contents.places[numbers])
    return [contents[number] for number in numbers]


def nbytes_of(contents: Sequence[Sequence[memoryview]]) -> int:
    """Bytes of all samples together."""
    if type(contents) is BatchRows:  # `isinstance` of an abstract class takes four times as long
        return contents.nbytes
    return sum(part.nbytes for parts in contents for part in parts)


class Codec(Protocol):
    """Turns samples into bytes, and back. Nothing outside this room looks into the bytes.

    There are two: `SampleSpec` (rows: fields of a fixed size) and `RecordCodec` (records: any sample).
    """

    is_fixed: ClassVar[bool]
    """Whether all samples have the same fields, each of a fixed size. Such samples are gathered field by field."""

    @property
    def nbytes(self) -> int:
        """Bytes of one sample; of samples of many sizes, their mean."""

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot: a sample and its columns."""

    @property
    def most_slot_bytes(self) -> int:
        """Upper estimate of the mean bytes of a slot."""

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""

    @property
    def title(self) -> str:
        """What samples look like, in words that two jobs can compare."""

    def least_bytes(self, sample: Any) -> int:
        """Least bytes of a sample, found without encoding it."""

    def for_bytes(self, granted: int, samples: int) -> Codec:
        """This codec, or one of smaller samples if so many samples may not fit into the granted bytes otherwise."""

    def encode(self, sample: Any, index: int | None = None) -> Parts:
        """Check a sample, and take it apart: the leaves of rows as they are, or the bytes of records.

        Raises:
            SampleMismatchError: the sample does not match; the message names `index`.
            UnsupportedSampleError: the sample cannot be kept as bytes.
        """

    def encode_all(self, samples: Sequence[Any]) -> list[Parts] | None:
        """Encode many samples together. Returns None if each must be encoded by itself."""

    def contents(self, parts: Parts) -> Sequence[memoryview]:
        """The bytes of an encoded sample."""

    def decoded(self, contents: Sequence[bytes | memoryview]) -> Any:
        """The sample of the bytes that `contents` has given, in memory of its own."""

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample is of the same kind: with the same containers, or with all required values."""


_MOST_WORK: Any = 10_000  # of NumPy's search for a common byte
_ALIGNMENT = 64  # bytes; rows copied from or to less aligned memory cost up to 1.6 times as much


def aligned(size: int) -> int:
    """Round a number of bytes up to the next multiple of the alignment."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# ---- tensors and bytes ----


class _Bytes:
    """The bytes of a contiguous tensor, for NumPy. `tensor.numpy()` would forbid the user to resize the storage."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (tensor.nbytes,),
            "data": (tensor.data_ptr(), False),
        }


def memory_of(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    """The bytes of a dense tensor in row order, uint8 `[nbytes]`: its own memory if it is contiguous, else a copy."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return np.asarray(_Bytes(tensor.contiguous())) if tensor.numel() else np.empty(0, dtype=np.uint8)


class Span:
    """The memory of a dense tensor or array.

    Args:
        leaf: the tensor or array, which has at least one element.
    """

    def __init__(self, leaf: torch.Tensor | npt.NDArray[Any]) -> None:
        if isinstance(leaf, torch.Tensor):
            self.itemsize = leaf.element_size()
            self.address = leaf.data_ptr()
            self.strides = tuple(stride * self.itemsize for stride in leaf.stride())
        else:
            self.itemsize = leaf.itemsize
            self.address = leaf.__array_interface__["data"][0]
            self.strides = leaf.strides
        self.shape, self.leaf = tuple(leaf.shape), leaf
        steps = [(size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)]
        self.begin = self.address + sum(step for step in steps if step < 0)
        self.end = self.address + sum(step for step in steps if step > 0) + self.itemsize

    def shares_bytes(self, other: Span) -> bool:
        """Whether two leaves have bytes in common, not only an object that owns their memory."""
        try:
            return np.shares_memory(self._bytes, other._bytes, max_work=_MOST_WORK)
        except RuntimeError:  # NumPy's TooHardError
            return True

    @property
    def _bytes(self) -> npt.NDArray[Any]:
        interface = {"version": 3, "typestr": f"|V{self.itemsize}", "shape": self.shape, "strides": self.strides}
        return np.asarray(SimpleNamespace(__array_interface__=interface | {"data": (self.address, False)}))


def overlaps(leaves: Iterable[Any]) -> list[list[Span]]:
    """Groups of tensors and arrays that have bytes in common, in the order of their memory. Mostly there are none."""
    dense = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor | np.ndarray) and leaf.nbytes]
    if len(dense) < 2:
        return []
    groups: list[list[Span]] = []
    end = 0
    for span in sorted(map(Span, dense), key=attrgetter("begin")):
        if span.begin >= end:
            groups.append([])
        groups[-1].append(span)
        end = max(end, span.end)
    return [group for group in groups if any(left.shares_bytes(right) for left, right in combinations(group, 2))]


def tensor_over(memory: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor over memory, without a copy.

    Args:
        memory: a writable, contiguous buffer of the tensor's bytes.
        dtype: of the tensor.
        shape: of the tensor.
    """
    if (known := array_dtype(dtype)) is not None:  # twice as fast as torch's own way
        return torch.from_numpy(np.ndarray(shape, known, memory))
    if 0 in shape:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype).view(shape)


@cache
def array_dtype(dtype: torch.dtype) -> np.dtype[Any] | None:
    """NumPy's dtype for a dtype of torch; None for bfloat16 and other dtypes that NumPy lacks."""
    try:
        return torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    except TypeError:
        return None


# ---- names in messages ----


def named(path: str) -> str:
    """The name of a place in a sample."""
    return f"field {path}" if path else "the sample"


def type_name(kind: type) -> str:
    """The name of a type, as its user writes it."""
    module = module_name(kind.__module__)
    return kind.__name__ if module in ("builtins", "torch", "numpy") else f"{module}.{kind.__qualname__}"


def module_name(module: str) -> str:
    """The name of a module in the user's process: a spawned process calls the script `__mp_main__`.

    Both names lead to the script in both processes.

    Example:
        >>> module_name("__mp_main__"), module_name("torch")
        ('__main__', 'torch')
    """
    return "__main__" if module == "__mp_main__" else module

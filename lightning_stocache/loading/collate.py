"""The batch that `default_collate` would make, made from gathered fields.

A field that was gathered for a whole batch is collated already: it only needs its dtype, its shape and its place in the
structure. Which structure that is, `default_collate` itself is asked once, with two samples made of zeroes; where its
answer is anything but plain tensors that hold the fields' bytes (a field that it refuses, a subclass that it keeps),
there is no short cut, and the loader collates samples as DataLoader does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.rows import SampleSpec

__all__ = ["Collator"]


class Collator:
    """How the rows of a batch become what `default_collate` returns.

    Args:
        codec: what a sample looks like.
        pinned: whether rows are page-locked memory, which torch's allocator has to find again in what is made of them.

    Raises:
        TypeError: `default_collate` makes something else of such samples than one plain tensor per field.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> spec = SampleSpec.infer((torch.zeros(2, dtype=torch.uint8), 7))
        >>> rows = [np.array([1, 2, 3, 4], dtype=np.uint8), np.array([5, 6]).view(np.uint8)]
        >>> Collator(spec).batch(rows, 2)
        [tensor([[1, 2],
                [3, 4]], dtype=torch.uint8), tensor([5, 6])]
    """

    def __init__(self, codec: SampleSpec, pinned: bool = False) -> None:
        zeroes = [np.zeros(size, dtype=np.uint8) for size in codec.sizes(2)]
        pattern = default_collate(codec.split(zeroes, 2))
        self._fields: list[_Column] = []
        self._build = self._builder(pattern)
        if not self._fields or tuple(field.nbytes for field in self._fields) != codec.sizes(1):
            raise TypeError("default_collate does not keep the bytes of these samples")
        self._pinned = pinned

    def batch(self, rows: Memory, samples: int) -> Any:
        """The batch from uint8 `[samples * nbytes]` per field, over the same memory."""
        return self._part(rows, 0, samples)

    def batches(self, rows: Memory, samples: int, size: int) -> list[Any]:
        """Several batches of `size` samples each, but the last, whose rows lie one after the other."""
        if samples <= size or self._pinned:
            return [self._part(rows, first, min(first + size, samples)) for first in range(0, samples, size)]
        columns = [column.split(row, samples, size) for row, column in zip(rows, self._fields, strict=True)]
        return [self._build(fields) for fields in zip(*columns, strict=True)]

    def _part(self, rows: Memory, first: int, end: int) -> Any:
        fields = zip(rows, self._fields, strict=True)
        if self._pinned:  # an array of pinned memory is that of a tensor
            return self._build([column.of_tensor(cast(Any, row).base, first, end) for row, column in fields])
        return self._build([column.of_array(row, first, end) for row, column in fields])

    def _builder(self, pattern: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """A function from fields, in the order of the spec, to the structure of the pattern."""
        if type(pattern) is torch.Tensor:
            place = len(self._fields)
            self._fields.append(_Column(pattern.dtype, tuple(pattern.shape[1:])))
            return lambda fields: fields[place]
        kind = type(pattern)
        if isinstance(pattern, dict):
            named = {key: self._builder(value) for key, value in pattern.items()}
            return lambda fields: kind((key, build(fields)) for key, build in named.items())
        if isinstance(pattern, list | tuple):
            first = len(self._fields)
            builders = [self._builder(value) for value in pattern]
            if kind in (list, tuple) and all(
                type(value) is torch.Tensor for value in pattern
            ):  # quickly, what most are
                last = len(self._fields)
                return lambda fields: kind(fields[first:last])
            if hasattr(kind, "_fields"):
                return lambda fields: kind(*(build(fields) for build in builders))
            return lambda fields: kind(build(fields) for build in builders)
        raise TypeError(f"default_collate makes a {kind.__name__} of a field, not a plain tensor")


class _Column:
    """A field of the batch: how its rows are a tensor `[samples, *shape]`, without a copy.

    A tensor of its own each time, not a view of another: to change one batch in place is no change of others to
    autograd, and who pickles it pickles no other.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype, self._shape = dtype, shape
        self.nbytes = dtype.itemsize * torch.Size(shape).numel()
        self._array_dtype: np.dtype[Any] | None
        try:
            self._array_dtype = torch.empty(0, dtype=dtype).numpy().dtype
        except TypeError:  # bfloat16 and others that NumPy has not
            self._array_dtype = None

    def of_array(self, row: npt.NDArray[np.uint8], first: int, end: int) -> torch.Tensor:
        """The samples from `first` to `end` of a field's memory, which are made without torch as far as possible."""
        if self._array_dtype is None or not self.nbytes:
            return self.of_tensor(torch.from_numpy(row[first * self.nbytes : end * self.nbytes]), 0, end - first)
        shape = (end - first, *self._shape)
        return torch.from_numpy(np.ndarray(shape, self._array_dtype, row, first * self.nbytes))

    def split(self, row: npt.NDArray[np.uint8], samples: int, size: int) -> list[torch.Tensor]:
        """The samples of a field's memory in tensors of `size`, but the last."""
        firsts = range(0, samples, size)
        if self._array_dtype is None or not self.nbytes:
            return [self.of_array(row, first, min(first + size, samples)) for first in firsts]
        whole = np.ndarray((samples, *self._shape), self._array_dtype, row)
        return [torch.from_numpy(whole[first : first + size]) for first in firsts]

    def of_tensor(self, row: torch.Tensor, first: int, end: int) -> torch.Tensor:
        """The samples from `first` to `end` of a field's memory, which stays the tensor's."""
        if not self.nbytes:
            return torch.empty(end - first, *self._shape, dtype=self._dtype)
        part = row[first * self.nbytes : end * self.nbytes]
        return part.view(self._dtype).view(end - first, *self._shape).data

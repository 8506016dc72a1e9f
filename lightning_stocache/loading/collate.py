"""The batch that `default_collate` would make, made in place: from gathered fields, or row by row as samples come.

A field that was gathered for a whole batch only needs its dtype, its shape and its place in the structure (`Collator`).
That structure comes from `default_collate` itself, asked once with two samples of zeroes.

A worker that makes a whole batch stacks in place (`BatchRows`): `torch.stack` wants all samples first, and 64
transformed photographs are fresh memory, page faults and one more copy. The first sample says what tensors the batch
will have, and every sample's tensors are copied to their rows at once. `collate` then finds that nothing is left to do.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import Memory, array_dtype
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.arena import Slot
from lightning_stocache.source.samples import is_namedtuple, is_plain, rebuilt

__all__ = ["BatchRows", "Collator", "is_dense"]


class Collator:
    """Makes the batch that `default_collate` would return from the rows of its fields.

    Args:
        codec: the codec of the samples.
        pinned: whether rows are page-locked memory, which torch's allocator must recognise in the batch.

    Raises:
        TypeError: `default_collate` makes something else of such samples than one plain tensor per field.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> spec = SampleSpec.infer((torch.zeros(2, dtype=torch.uint8), 7))
        >>> rows = [np.array([1, 2, 3, 4], dtype=np.uint8), np.array([5, 6]).view(np.uint8)]
        >>> Collator(spec).batch(rows, 2)
        [tensor([[1, 2],
                [3, 4]], dtype=torch.uint8), tensor([5, 6])]
    """

    def __init__(self, codec: SampleSpec, pinned: bool = False) -> None:
        zeroes = [np.zeros(size, dtype=np.uint8) for size in codec.sizes(2)]
        pattern = default_collate(codec.split(zeroes, 2))
        self._columns: list[_Column] = []
        self._build = self._builder(pattern)
        if not self._columns or self.sizes(1) != codec.sizes(1):
            raise TypeError("default_collate does not keep the bytes of these samples")
        self._pinned = pinned

    def sizes(self, samples: int) -> tuple[int, ...]:
        """Bytes of each field for a batch of so many samples."""
        return tuple([column.nbytes * samples for column in self._columns])

    def batch(self, rows: Memory, samples: int) -> Any:
        """The batch from uint8 `[samples * nbytes]` per field, over the same memory."""
        return self.batches(rows, samples, samples)[0]

    def batches(self, rows: Memory, samples: int, size: int) -> list[Any]:
        """Several batches whose rows lie one after the other, of `size` samples each; the last may be smaller."""
        columns = [
            column.split(row, samples, size, self._pinned) for row, column in zip(rows, self._columns, strict=True)
        ]
        return [self._build(fields) for fields in zip(*columns, strict=True)]

    def _builder(self, pattern: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """A function from fields, in the order of the spec, to the structure of the pattern."""
        kind = type(pattern)
        if kind is torch.Tensor:
            if not pattern.is_cpu:  # numbers collate to tensors on torch's default device
                raise TypeError(f"default_collate makes a tensor on {pattern.device} of a field")
            place = len(self._columns)
            self._columns.append(_Column(pattern.dtype, tuple(pattern.shape[1:])))
            return lambda fields: fields[place]
        if isinstance(pattern, dict):
            named = {key: self._builder(value) for key, value in pattern.items()}
            return lambda fields: kind((key, build(fields)) for key, build in named.items())
        if isinstance(pattern, list | tuple):
            first = len(self._columns)
            builders = [self._builder(value) for value in pattern]
            last = len(self._columns)
            if kind in (list, tuple) and all(type(value) is torch.Tensor for value in pattern):
                return lambda fields: kind(fields[first:last])  # a fast way for most batches
            if hasattr(kind, "_fields"):
                if not is_namedtuple(kind):
                    raise TypeError(f"the constructor of {kind.__name__} may change its fields")
                return lambda fields: kind(*(build(fields) for build in builders))
            return lambda fields: kind(build(fields) for build in builders)
        raise TypeError(f"default_collate makes a {kind.__name__} of a field, not a plain tensor")


class _Column:
    """A field of the batch: makes tensors `[samples, *shape]` over its rows, without a copy.

    No tensor is a view of another one: a change of one batch in place is no change of other batches to autograd, and
    the pickle of a batch has no other batch in it.
    """

    def __init__(self, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self._dtype = dtype
        self._shape = shape
        self._array_dtype = array_dtype(dtype)
        self.nbytes = dtype.itemsize * torch.Size(shape).numel()

    def split(self, row: npt.NDArray[np.uint8], samples: int, size: int, pinned: bool) -> list[torch.Tensor]:
        """The samples of a field's memory in tensors of `size` samples; the last may be smaller. NumPy is faster."""
        firsts = range(0, samples, size)
        if pinned or self._array_dtype is None or not self.nbytes:
            memory: Any = row.base if pinned else row  # pinned memory is that of a tensor
            return [self._tensor(memory, first, min(first + size, samples)) for first in firsts]
        whole = np.ndarray((samples, *self._shape), self._array_dtype, row)
        return [torch.from_numpy(whole[first : first + size]) for first in firsts]

    def _tensor(self, memory: Any, first: int, end: int) -> torch.Tensor:
        """The samples from `first` to `end` of a tensor or array of bytes, over the same memory."""
        if not self.nbytes:
            return torch.empty(end - first, *self._shape, dtype=self._dtype, device="cpu")
        part = torch.as_tensor(memory[first * self.nbytes : end * self.nbytes], device="cpu")
        return part.view(self._dtype).view(end - first, *self._shape).data


class BatchRows:
    """The memory of a batch as its tensors, each with a row for every sample."""

    def __init__(self, slot: Slot, samples: int) -> None:
        self._slot, self._samples = slot, samples
        # For each leaf of the first sample, the rows of its tensor; the whole tensor comes first.
        self._rooms: list[tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None] = []

    def put(self, number: int, sample: Any) -> Any:
        """The sample, with its tensors copied to their rows where a row fits."""
        if number >= self._samples or not is_plain(sample):
            return sample
        if number == 0:
            rebuilt(sample, self._open)
        rooms = itertools.chain(self._rooms, itertools.repeat(None))

        def placed(leaf: Any) -> Any:
            if (room := next(rooms)) is None:
                return leaf
            row = room[1][number]
            fits = is_dense(leaf) and leaf.dtype == row.dtype and leaf.shape == row.shape
            return row.copy_(leaf) if fits else leaf

        return rebuilt(sample, placed)

    def stack(self, leaves: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """The stacked leaves, in the memory of the batch if there is room. `collate` calls it by its map."""
        first = leaves[0]
        if not all(is_dense(leaf) and leaf.dtype == first.dtype and leaf.shape == first.shape for leaf in leaves):
            return default_collate(leaves)
        if len(leaves) == self._samples:
            for whole, rows in filter(None, self._rooms):
                if all(leaf.data_ptr() == row.data_ptr() for leaf, row in zip(leaves, rows, strict=True)):
                    return whole  # they lie there already
        whole_room = self._room(first.dtype, (len(leaves), *first.shape))
        return torch.stack(leaves) if whole_room is None else torch.stack(leaves, out=whole_room)

    def _room(self, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor | None:
        room = self._slot.room(dtype.itemsize * torch.Size(shape).numel())
        return None if room is None else room.view(dtype).view(shape)

    def _open(self, leaf: Any) -> None:
        room = self._room(leaf.dtype, (self._samples, *leaf.shape)) if is_dense(leaf) else None
        self._rooms.append(None if room is None else (room, room.unbind(0)))


def is_dense(leaf: Any) -> bool:
    """Whether a leaf is a tensor that its bytes, dtype and shape describe completely."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg())
    )

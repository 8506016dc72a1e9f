"""Stacking samples in place: a batch whose tensors are filled row by row as the samples come.

`torch.stack` wants all samples first: 64 transformed photographs are fresh memory, page faults and one more copy. Here
the first sample says what tensors the batch will have; each is made in the memory that is there, and every sample's
tensors are copied to their rows at once. `collate` then finds that nothing is left to do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import aligned
from lightning_stocache.node.segment import Segment
from lightning_stocache.source.samples import is_plain, rebuilt

__all__ = ["InMemory", "Rows", "Stack", "is_dense"]


@dataclass(frozen=True)
class InMemory:
    """A tensor that lies in the memory of the batch."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class Room(NamedTuple):
    """A place in that memory for one tensor of the batch.

    Args:
        place: where it lies.
        rows: one for each sample, `[*shape]`.
    """

    place: InMemory
    rows: tuple[torch.Tensor, ...]

    def put(self, number: int, leaf: Any) -> Any:
        """A leaf of that sample, in its row if it fits there."""
        row = self.rows[number]
        fits = is_dense(leaf) and leaf.dtype == row.dtype and leaf.shape == row.shape
        return row.copy_(leaf) if fits else leaf


class Rows:
    """The memory of a batch as its tensors, each with a row for every sample.

    Args:
        segment: where it lies, if there is any.
        samples: of the batch.
    """

    def __init__(self, segment: Segment | None, samples: int) -> None:
        self._segment, self._samples, self._end = segment, samples, 0
        self._rooms: list[Room | None] = []  # for each leaf of the first sample

    def put(self, number: int, sample: Any) -> Any:
        """The sample, with its tensors in their rows as far as there are rows that fit."""
        if self._segment is None or number >= self._samples or not is_plain(sample):
            return sample
        if number == 0:
            rebuilt(sample, self._open)
        rooms = itertools.chain(self._rooms, itertools.repeat(None))
        return rebuilt(sample, lambda leaf: leaf if (room := next(rooms)) is None else room.put(number, leaf))

    def make(self, first: Any, samples: int) -> tuple[InMemory, torch.Tensor] | None:
        """Memory for so many tensors such as this one; None if it is full, or if this is no dense tensor."""
        if not is_dense(first):
            return None
        return self._make(first.dtype, (samples, *first.shape), first.nbytes * samples)

    def keep(self, tensor: torch.Tensor) -> InMemory | None:
        """Where a copy of a dense tensor lies now; None if there is no room left."""
        made = self._make(tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        if made is None:
            return None
        made[1].copy_(tensor)
        return made[0]

    def found(self, leaves: list[torch.Tensor]) -> InMemory | None:
        """Where these tensors lie, if they are the rows of one."""
        if len(leaves) != self._samples:
            return None
        for room in filter(None, self._rooms):
            if all(leaf.data_ptr() == row.data_ptr() for leaf, row in zip(leaves, room.rows, strict=True)):
                return room.place
        return None

    def _make(self, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> tuple[InMemory, torch.Tensor] | None:
        if self._segment is None or not size or self._end + size > self._segment.size:
            return None
        place = InMemory(self._end, dtype, shape)
        self._end += aligned(size)
        return place, self._segment.bytes(place.offset, size).view(dtype).view(shape)

    def _open(self, leaf: Any) -> None:
        made = self.make(leaf, self._samples)
        self._rooms.append(None if made is None else Room(made[0], made[1].unbind(0)))


class Stack:
    """Stacks tensors, into the memory of the batch as long as they fit; those that lie there already are left."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows

    def __call__(self, leaves: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """Where the leaves lie now in the memory of the batch, or the stacked tensor. `collate` calls it by its map."""
        first = leaves[0]
        if not all(is_dense(leaf) and leaf.dtype == first.dtype and leaf.shape == first.shape for leaf in leaves):
            return default_collate(leaves)
        if (place := self._rows.found(leaves)) is not None:
            return place
        made = self._rows.make(first, len(leaves))
        if made is None:
            return torch.stack(leaves)
        place, tensor = made
        torch.stack(leaves, out=tensor)
        return place


def is_dense(leaf: Any) -> bool:
    """Whether it is a tensor that is its bytes, dtype and shape, and nothing else."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg())
    )

"""Stacking samples in place: a batch whose tensors are filled row by row as the samples come.

`torch.stack` wants all samples first: 64 transformed photographs are fresh memory, page faults and one more copy. Here
the first sample says what tensors the batch will have; each is made in the memory that is there, and every sample's
tensors are copied to their rows at once. `collate` then finds that nothing is left to do.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import aligned
from lightning_stocache.node.segment import Segment
from lightning_stocache.source.samples import is_plain, rebuilt

__all__ = ["Packed", "Rows", "is_dense"]


@dataclass(frozen=True)
class Packed:
    """Stands for a tensor of a batch.

    Args:
        content: where it begins in the memory of the batch, or its bytes.
        dtype: of the tensor.
        shape: of the tensor.
    """

    content: int | npt.NDArray[np.uint8]
    dtype: torch.dtype
    shape: tuple[int, ...]


class Rows:
    """The memory of a batch as its tensors, each with a row for every sample.

    Args:
        segment: where it lies, if there is any.
        samples: of the batch.
    """

    def __init__(self, segment: Segment | None, samples: int) -> None:
        self._segment, self._samples, self._end = segment, samples, 0
        # For each leaf of the first sample: what stands for its tensor, and that tensor's rows.
        self._rooms: list[tuple[Packed, tuple[torch.Tensor, ...]] | None] = []

    def put(self, number: int, sample: Any) -> Any:
        """The sample, with its tensors in their rows as far as there are rows that fit."""
        if self._segment is None or number >= self._samples or not is_plain(sample):
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

    def keep(self, tensor: torch.Tensor) -> Packed | None:
        """Where a copy of a dense tensor lies now; None if there is no room left."""
        made = self._make(tensor.dtype, tuple(tensor.shape), tensor.nbytes)
        if made is None:
            return None
        made[1].copy_(tensor)
        return made[0]

    def stack(self, leaves: list[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        """What stands for the tensor of these leaves, or the stacked tensor. `collate` calls it by its map."""
        first = leaves[0]
        if not all(is_dense(leaf) and leaf.dtype == first.dtype and leaf.shape == first.shape for leaf in leaves):
            return default_collate(leaves)
        if len(leaves) == self._samples:
            for place, rows in filter(None, self._rooms):
                if all(leaf.data_ptr() == row.data_ptr() for leaf, row in zip(leaves, rows, strict=True)):
                    return place  # they lie there already
        made = self._make(first.dtype, (len(leaves), *first.shape), first.nbytes * len(leaves))
        if made is None:
            return torch.stack(leaves)
        torch.stack(leaves, out=made[1])
        return made[0]

    def _make(self, dtype: torch.dtype, shape: tuple[int, ...], size: int) -> tuple[Packed, torch.Tensor] | None:
        """Memory for a tensor; None if it is full."""
        if self._segment is None or not size or self._end + size > self._segment.size:
            return None
        start = self._end
        self._end += aligned(size)
        return Packed(start, dtype, shape), self._segment.bytes(start, size).view(dtype).view(shape)

    def _open(self, leaf: Any) -> None:
        samples, made = self._samples, None
        if is_dense(leaf):
            made = self._make(leaf.dtype, (samples, *leaf.shape), leaf.nbytes * samples)
        self._rooms.append(None if made is None else (made[0], made[1].unbind(0)))


def is_dense(leaf: Any) -> bool:
    """Whether it is a tensor that is its bytes, dtype and shape, and nothing else."""
    return (
        type(leaf) is torch.Tensor
        and leaf.layout is torch.strided
        and leaf.device.type == "cpu"
        and not (leaf.requires_grad or leaf.is_quantized or leaf.is_nested or leaf.is_conj() or leaf.is_neg())
    )

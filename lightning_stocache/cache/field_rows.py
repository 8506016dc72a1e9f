"""A batch whose samples are put where they belong as they come: rows of fixed fields, in memory lent for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lightning_stocache.cache.codec import Parts
from lightning_stocache.cache.field import Field

__all__ = ["FieldRows"]


class FieldRows:
    r"""The rows of a batch, open to single samples.

    Args:
        fields: of a sample.
        memory: gives that of the batch when the first sample has come, uint8 `[samples * nbytes]` per field.
        samples: how many.

    Example:
        >>> field, memory = Field.of("", torch.zeros(2, dtype=torch.int16)), torch.zeros(3 * 4, dtype=torch.uint8)
        >>> rows = FieldRows([field], lambda: [memory], 3)
        >>> [bytes(content) for content in rows.put(1, [torch.tensor([1, 2], dtype=torch.int16)])]
        [b'\x01\x00\x02\x00']
        >>> memory.tolist()
        [0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0]
    """

    def __init__(self, fields: Sequence[Field], memory: Callable[[], Sequence[torch.Tensor]], samples: int) -> None:
        self._fields, self._memory, self._samples = fields, memory, samples

    def put(self, place: int, parts: Parts) -> list[memoryview]:
        """Copy an encoded sample to its place; its bytes there, per field."""
        columns, contents = self._open
        for column, part in zip(columns, parts, strict=True):
            column[place].copy_(part)
        return [content[place * nbytes : (place + 1) * nbytes] for content, nbytes in contents]

    def write(self, place: int, contents: Sequence[memoryview | npt.NDArray[np.uint8]]) -> None:
        """Copy the bytes of a sample to its place, per field."""
        for (memory, nbytes), content in zip(self._open[1], contents, strict=True):
            part: Any = content  # NumPy's stubs know of no buffers before Python 3.12
            memory[place * nbytes : (place + 1) * nbytes] = part

    @cached_property
    def _open(self) -> tuple[list[torch.Tensor], list[tuple[memoryview, int]]]:
        """The field's columns, as tensors of its dtype where torch has it, and their bytes."""
        columns, contents = [], []
        for field, row in zip(self._fields, self._memory(), strict=True):
            column = row.view(self._samples, field.nbytes)
            columns.append(field.batch(column) if isinstance(field.dtype, torch.dtype) else column)
            contents.append((row.numpy().data, field.nbytes))
        return columns, contents

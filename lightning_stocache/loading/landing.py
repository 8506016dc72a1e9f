"""A batch whose samples are put where they belong as they come from the source."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from lightning_stocache.cache.spec import SampleSpec

__all__ = ["Landing"]


class Landing:
    r"""The rows of a batch, open to single samples.

    Args:
        spec: what a sample looks like.
        rows: gives those of the batch when the first sample has come, uint8 `[samples * nbytes]` per field.
        samples: how many.

    Example:
        >>> spec = SampleSpec.infer((torch.zeros(2, dtype=torch.int16), 7))
        >>> rows = [torch.zeros(3 * 4, dtype=torch.uint8), torch.zeros(3 * 8, dtype=torch.uint8)]
        >>> landing = Landing(spec, lambda: rows, 3)
        >>> [bytes(content)[:4] for content in landing.put(1, (torch.tensor([1, 2], dtype=torch.int16), 5))]
        [b'\x01\x00\x02\x00', b'\x05\x00\x00\x00']
        >>> rows[0].tolist()
        [0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0]
    """

    def __init__(self, spec: SampleSpec, rows: Callable[[], Sequence[torch.Tensor]], samples: int) -> None:
        self._spec, self._rows, self._samples = spec, rows, samples

    def put(self, place: int, sample: Any, index: int | None = None) -> list[memoryview]:
        """Check a sample and copy it to its place; the bytes of its fields there. `index` is named in errors."""
        leaves = self._spec.leaves(sample, index)
        columns, memory = self._open
        for column, leaf in zip(columns, leaves, strict=True):
            column[place].copy_(leaf)
        return [content[place * nbytes : (place + 1) * nbytes] for content, nbytes in memory]

    @cached_property
    def _open(self) -> tuple[list[torch.Tensor], list[tuple[memoryview, int]]]:
        """The field's columns, as tensors of its dtype where torch has it, and their bytes."""
        rows, columns = self._rows(), []
        for field, row, nbytes in zip(self._spec.fields, rows, self._spec.row_bytes, strict=True):
            column = row.view(self._samples, nbytes)
            columns.append(field.batch(column) if isinstance(field.dtype, torch.dtype) else column)
        return columns, [(row.numpy().data, nbytes) for row, nbytes in zip(rows, self._spec.row_bytes, strict=True)]

"""A batch whose samples are put where they belong as they come from the source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lightning_stocache.cache.spec import SampleSpec

__all__ = ["Landing"]


class Landing:
    r"""The rows of a batch, open to single samples.

    Args:
        spec: what a sample looks like.
        rows: of the batch, uint8 `[samples * nbytes]` per field.
        samples: how many.

    Example:
        >>> spec = SampleSpec.infer((torch.zeros(2, dtype=torch.int16), 7))
        >>> rows = [torch.zeros(3 * 4, dtype=torch.uint8), torch.zeros(3 * 8, dtype=torch.uint8)]
        >>> [
        ...     bytes(content)[:4]
        ...     for content in Landing(spec, rows, 3).put(1, (torch.tensor([1, 2], dtype=torch.int16), 5))
        ... ]
        [b'\x01\x00\x02\x00', b'\x05\x00\x00\x00']
        >>> rows[0].tolist()
        [0, 0, 0, 0, 1, 0, 2, 0, 0, 0, 0, 0]
    """

    def __init__(self, spec: SampleSpec, rows: Sequence[torch.Tensor], samples: int) -> None:
        self._spec = spec
        columns = [row.view(samples, nbytes) for row, nbytes in zip(rows, spec.row_bytes, strict=True)]
        typed = zip(spec.fields, columns, strict=True)
        self._leaves = [
            (field.batch(own) if isinstance(field.dtype, torch.dtype) else own).unbind(0) for field, own in typed
        ]
        self._memory = [(row.numpy().data, nbytes) for row, nbytes in zip(rows, spec.row_bytes, strict=True)]

    def put(self, place: int, sample: Any, index: int | None = None) -> list[memoryview]:
        """Check a sample and copy it to its place; the bytes of its fields there. `index` is named in errors."""
        for field, leaf in zip(self._leaves, self._spec.leaves(sample, index), strict=True):
            field[place].copy_(leaf)
        return [memory[place * nbytes : (place + 1) * nbytes] for memory, nbytes in self._memory]

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
        self.write(place, [field.content(part) for field, part in zip(self._fields, parts, strict=True)])
        return [content[place * nbytes : (place + 1) * nbytes] for content, nbytes in self._open[1]]

    def put_many(self, places: Sequence[int], samples: Sequence[Parts]) -> list[list[memoryview]]:
        """Copy encoded samples to their places at once: 0.2 us each and field, where one by one costs 1.5.

        Args:
            places: one or more, all different.
            samples: as many.

        Returns:
            The bytes of each there, per field.
        """
        columns, contents = self._open
        first, count = places[0], len(places)
        together = list(places) == list(range(first, first + count))
        for field, column, leaves in zip(self._fields, columns, zip(*samples, strict=True), strict=True):
            if together:
                field.stack(leaves, column[first : first + count])
            else:
                rows = torch.empty(count, field.nbytes, dtype=torch.uint8, device="cpu")
                field.stack(leaves, rows)
                column.numpy()[places] = rows.numpy()  # torch's own ways to do this are nine times as slow
        return [[content[place * nbytes : (place + 1) * nbytes] for content, nbytes in contents] for place in places]

    def write(self, place: int, contents: Sequence[memoryview | npt.NDArray[np.uint8]]) -> None:
        """Copy the bytes of a sample to its place, per field."""
        for (memory, nbytes), content in zip(self._open[1], contents, strict=True):
            part: Any = content  # NumPy's stubs know of no buffers before Python 3.12
            memory[place * nbytes : (place + 1) * nbytes] = part

    @cached_property
    def _open(self) -> tuple[list[torch.Tensor], list[tuple[memoryview, int]]]:
        """The columns of the fields, uint8 `[samples, nbytes]`, and their bytes."""
        memory = self._memory()
        columns = [row.view(self._samples, field.nbytes) for field, row in zip(self._fields, memory, strict=True)]
        return columns, [(row.numpy().data, field.nbytes) for field, row in zip(self._fields, memory, strict=True)]

"""The batch that `default_collate` would make, made from gathered fields.

A field that was gathered for a whole batch is collated already: it only needs its dtype, its shape and its place in the
structure. Which structure that is, `default_collate` itself is asked once, with two samples made of zeroes; where its
answer is anything but plain tensors that hold the fields' bytes (a field that it refuses, a subclass that it keeps),
there is no short cut, and the loader collates samples as DataLoader does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import SampleCodec

__all__ = ["Collation"]


class Collation:
    """How the rows of a batch become what `default_collate` returns.

    Args:
        codec: what a sample looks like.

    Raises:
        TypeError: `default_collate` makes something else of such samples than one plain tensor per field.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> spec = SampleSpec.infer((torch.zeros(2, dtype=torch.uint8), 7))
        >>> rows = [torch.tensor([1, 2, 3, 4], dtype=torch.uint8), torch.tensor([5, 6]).view(torch.uint8)]
        >>> Collation(spec).batch(rows, 2)
        [tensor([[1, 2],
                [3, 4]], dtype=torch.uint8), tensor([5, 6])]
    """

    def __init__(self, codec: SampleCodec) -> None:
        pattern = default_collate(codec.split([torch.zeros(size, dtype=torch.uint8) for size in codec.sizes(2)], 2))
        self._dtypes: list[torch.dtype] = []
        self._shapes: list[tuple[int, ...]] = []
        self._build = self._builder(pattern)
        bytes_per_row = [
            dtype.itemsize * torch.Size(shape).numel() for dtype, shape in zip(self._dtypes, self._shapes, strict=True)
        ]
        if not bytes_per_row or tuple(bytes_per_row) != codec.sizes(1):
            raise TypeError("default_collate does not keep the bytes of these samples")

    def batch(self, rows: Sequence[torch.Tensor], samples: int) -> Any:
        """The batch from uint8 `[samples * nbytes]` per field, over the same memory."""
        return self._build(self._typed(rows, samples))

    def batches(self, rows: Sequence[torch.Tensor], samples: int, size: int) -> list[Any]:
        """The same as several batches of `size` samples each, but the last."""
        if samples <= size:
            return [self.batch(rows, samples)]
        # Without .data they would be views of one tensor to autograd: changing one in place would be refused, or count
        # as changes of all.
        parts = ([part.data for part in torch.split(field, size)] for field in self._typed(rows, samples))
        return [self._build(fields) for fields in zip(*parts, strict=True)]

    def _typed(self, rows: Sequence[torch.Tensor], samples: int) -> list[torch.Tensor]:
        return [
            row.view(dtype).view(samples, *shape).data if row.shape[0] else torch.empty(samples, *shape, dtype=dtype)
            for row, dtype, shape in zip(rows, self._dtypes, self._shapes, strict=True)
        ]

    def _builder(self, pattern: Any) -> Callable[[Sequence[torch.Tensor]], Any]:
        """A function from fields, in the order of the spec, to the structure of the pattern."""
        if type(pattern) is torch.Tensor:
            place = len(self._dtypes)
            self._dtypes.append(pattern.dtype)
            self._shapes.append(tuple(pattern.shape[1:]))
            return lambda fields: fields[place]
        kind = type(pattern)
        if isinstance(pattern, dict):
            named = {key: self._builder(value) for key, value in pattern.items()}
            return lambda fields: kind((key, build(fields)) for key, build in named.items())
        if isinstance(pattern, list | tuple):
            first = len(self._dtypes)
            builders = [self._builder(value) for value in pattern]
            if kind in (list, tuple) and all(
                type(value) is torch.Tensor for value in pattern
            ):  # quickly, what most are
                last = len(self._dtypes)
                return lambda fields: kind(fields[first:last])
            if hasattr(kind, "_fields"):
                return lambda fields: kind(*(build(fields) for build in builders))
            return lambda fields: kind(build(fields) for build in builders)
        raise TypeError(f"default_collate makes a {kind.__name__} of a field, not a plain tensor")

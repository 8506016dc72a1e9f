"""The limit: what one thread needs to copy the rows of a batch out of shared memory, and nothing else.

One `index_select` of wide words per field into three buffers in rotation (a loader that hands out one batch, has one
ready and makes one needs no fewer); indices drawn beforehand. First epochs are left out: they touch cold pages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import torch

__all__ = ["gather_seconds"]

_COLD_EPOCHS = 2


def gather_seconds(samples: int, shape: Sequence[int], batch_size: int, epochs: int = 5) -> list[float]:
    """Seconds per epoch for uint8 images and int labels, of several epochs."""
    # Memory that processes share comes in small pages; private memory may come in huge ones, which no loader has.
    images = torch.empty(samples, math.prod(shape), dtype=torch.uint8).share_memory_().random_(256)
    fields = [images.view(torch.int64), torch.arange(samples).share_memory_().view(samples, 1)]
    buffers = [[torch.empty(batch_size, field.shape[1], dtype=torch.int64) for field in fields] for _ in range(3)]
    found = []
    for _ in range(_COLD_EPOCHS + epochs):
        batches = torch.randperm(samples).split(batch_size)
        start = time.perf_counter()
        for number, indices in enumerate(batches):
            for field, buffer in zip(fields, buffers[number % 3], strict=True):
                torch.index_select(field, 0, indices, out=buffer[: len(indices)])
        found.append(time.perf_counter() - start)
    return found[_COLD_EPOCHS:]

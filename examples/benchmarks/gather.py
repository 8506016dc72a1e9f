"""The limit: what one thread needs to copy the rows of a batch out of shared memory, and nothing else.

One `take` per field into three buffers in rotation (a loader that hands out one batch, has one ready and makes one
needs no fewer); indices drawn beforehand. NumPy's, which is the fastest way found: torch's `index_select` takes a
microsecond more per call on one thread. First epochs are left out: they touch cold pages.
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
    fields = [images.view(samples, -1).numpy(), torch.arange(samples).share_memory_().numpy()]
    # torch's memory is aligned to 64 bytes, NumPy's to 16
    sizes = [batch_size * field[0].nbytes for field in fields]
    memory = [[torch.empty(size, dtype=torch.uint8).numpy() for size in sizes] for _ in range(3)]
    buffers = [
        [row.view(field.dtype).reshape(batch_size, *field.shape[1:]) for row, field in zip(rows, fields, strict=True)]
        for rows in memory
    ]
    found = []
    for _ in range(_COLD_EPOCHS + epochs):
        batches = [batch.numpy() for batch in torch.randperm(samples).split(batch_size)]
        start = time.perf_counter()
        for number, indices in enumerate(batches):
            for field, buffer in zip(fields, buffers[number % 3], strict=True):
                field.take(indices, 0, buffer[: len(indices)], "clip")
        found.append(time.perf_counter() - start)
    return found[_COLD_EPOCHS:]

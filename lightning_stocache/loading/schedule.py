"""When indices are drawn.

A loader that draws its indices at other moments than DataLoader does gives other batches: samplers, the worker seed and
the user's own code draw from the same generators. So every draw is made on the caller's thread, at the moment at which
DataLoader makes it:

- `iter(loader)`: `iter(sampler)`; the base seed of the workers; with workers, `iter(sampler)` once more, and the first
  `prefetch_factor * num_workers` batches. A persistent loader's later epochs draw no base seed and call `iter` once.
- `next(iterator)`: with workers, one batch, after the current one has come; without, the current one.

Without workers a batch may be drawn ahead only if nobody can notice: samplers that draw from a generator of their own.
RandomSampler with a generator of the user's is not one: it draws a second permutation when the first runs out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

__all__ = ["Schedule"]


class Schedule:
    """Draws the index batches of one epoch.

    Args:
        loader: whose sampler and generator are drawn from.
        first: whether this is the first epoch of a persistent loader, or any epoch of another one.
    """

    def __init__(self, loader: DataLoader[Any], first: bool) -> None:
        sampler: Any = loader.batch_sampler
        plain = type(sampler) is BatchSampler
        inner: Any = loader.sampler
        private = type(inner) is RandomSampler and inner.generator is None
        self.ahead_unseen = plain and (
            private or type(inner) is SequentialSampler or isinstance(inner, DistributedSampler)
        )
        self.seed_state: torch.Tensor | None = None
        drawing = iter(sampler)
        if first:
            generator = torch.default_generator if loader.generator is None else loader.generator
            self.seed_state = generator.get_state()
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if loader.num_workers:
                drawing = iter(sampler)
        quick = plain and (
            type(inner) is SequentialSampler or (private and not inner.replacement and inner._num_samples is None)
        )
        self.trusted = quick  # no index can lie outside the dataset
        self._drawing = _slices(loader) if quick else map(_as_indices, drawing)

    def draw(self) -> torch.Tensor | None:
        """The next batch of indices, int64 `[samples]`; None when the epoch is over."""
        return next(self._drawing, None)


def _slices(loader: DataLoader[Any]) -> Iterator[torch.Tensor]:
    """The batches of a shuffled or sequential loader without a list in between, which would cost 30 us each."""
    length = len(loader.sampler)  # type: ignore[arg-type]
    assert isinstance(loader.batch_size, int)
    if type(loader.sampler) is RandomSampler:  # draws its seed here, with the first batch, as the sampler does
        private = torch.Generator()
        private.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(length, generator=private)
    else:
        order = torch.arange(length)
    end = length - length % loader.batch_size if loader.drop_last else length
    for start in range(0, end, loader.batch_size):
        yield order[start : min(start + loader.batch_size, end)]


def _as_indices(batch: Any) -> torch.Tensor:
    """A sampler's batch as a tensor.

    Raises:
        TypeError: it holds something that is not a whole number.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(torch.int64)
    indices = np.asarray(batch)
    if indices.ndim != 1 or (indices.dtype.kind not in "iu" and indices.size):
        raise TypeError(f"a CachedLoader's batch_sampler must give lists of whole numbers, got {batch!r:.80}")
    return torch.from_numpy(indices.astype(np.int64, copy=False))

"""When indices are drawn.

A loader that draws its indices at other moments than DataLoader does gives other batches: samplers, the worker seed and
the user's own code draw from the same generators. So every draw is made on the caller's thread, at the moment at which
DataLoader makes it:

- `iter(loader)`: `iter(sampler)`; the base seed of the workers; with workers, `iter(sampler)` once more, and the first
  `prefetch_factor * num_workers` batches. A persistent loader's later epochs draw no base seed and call `iter` once.
- `next(iterator)`: with workers, one batch, after the current one has come; without, the current one.

Without workers a batch may be drawn ahead only if nobody can notice: samplers that draw from a generator of their own.
RandomSampler with a generator of the user's is not one: it draws a second permutation when the first runs out. Nor is a
subclass that has a way of its own to draw.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.position import LoaderState, ResumableBatches
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.rolling_sampler import RollingSampler
from lightning_stocache.sampling.stream_deal import StreamBatches
from lightning_stocache.source.generators import states_of
from lightning_stocache.torch_internals import draws_all_once

__all__ = ["IndexStream"]

GROUP = 4096  # indices that a LocalitySampler deals at a time
_ROLLED = 16  # batches of a RollingSampler at a time


class IndexStream:
    """Draws the index batches of one epoch.

    Args:
        loader: whose sampler and generator are drawn from.
        first: whether this is the first epoch of a persistent loader, or any epoch of another one.
        state: of the loader, whose epoch has begun; it notes what the order is drawn from.
    """

    def __init__(self, loader: DataLoader[Any], first: bool, state: LoaderState) -> None:
        batches: Any = loader.batch_sampler
        plain = type(batches) is BatchSampler
        inner: Any = batches.sampler if plain else None  # not the loader's: the user may have given the BatchSampler
        sequential = type(inner) is SequentialSampler
        private = type(inner) is RandomSampler and inner.generator is None
        drawing_by_itself = (DistributedSampler.__iter__, LocalitySampler.__iter__, RollingSampler.__iter__)
        distributed = getattr(type(inner), "__iter__", None) in drawing_by_itself
        self.ahead_unseen = sequential or private or distributed or type(batches) is StreamBatches
        self.seed_state: torch.Tensor | None = None
        kept = type(batches) is StreamBatches
        resumable = batches if kept else ResumableBatches(batches, state)
        drawing = iter(resumable)
        if first:
            generator = torch.default_generator if loader.generator is None else loader.generator
            self.seed_state = generator.get_state()
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if loader.num_workers:
                drawing = iter(resumable)
        whole = state.origin is None and (sequential or (private and draws_all_once(inner)))
        dealt = type(inner) is LocalitySampler and inner.draws is None and inner.batch_size == batches.batch_size
        drawn_from = inner.dataset if dealt else inner
        rolling = type(inner) is RollingSampler  # what it draws is resident, however long the epoch is to be
        # No index lies outside the dataset, and every batch but the last is of the same size.
        self.trusted = kept or rolling or ((whole or dealt) and len(drawn_from) <= len(cast(Any, loader.dataset)))
        self._size = batches.batch_size if plain or kept else 0
        in_groups = StreamBatches.groups if kept else _of_pool if rolling else _in_groups
        groups = in_groups(batches) if kept or rolling or dealt else None
        self._groups = _in_one(batches, state) if whole else groups
        self._rest: Integers = np.empty(0, dtype=np.int64)  # of a group that has been begun
        self._drawing = None if self._groups is not None else map(_as_indices, drawing)

    def draw(self) -> Any:
        """The next batch of indices, int64 `[samples]`; None when the epoch is over.

        Keys that only the source understands come as the sampler gave them.
        """
        if self._drawing is not None:
            return next(self._drawing, None)
        return self.draw_many(1)

    def draw_many(self, batches: int) -> Integers | None:
        """The indices of the next batches, one after the other; of a stream that can be trusted.

        Fewer than asked for may come, and fewer samples only in the last batch of the epoch.
        """
        assert self._groups is not None
        if not len(self._rest) and (group := next(self._groups, None)) is not None:
            self._rest = group
        count = batches * self._size
        drawn, self._rest = self._rest[:count], self._rest[count:]
        return drawn if len(drawn) else None


def _in_one(batches: BatchSampler, state: LoaderState) -> Iterator[Integers]:
    """The epoch of a shuffled or sequential loader at once: as lists of numbers, batches would cost 30 us each."""
    sampler, size = batches.sampler, batches.batch_size
    length = len(cast(Any, sampler))
    if type(sampler) is RandomSampler:  # draws its seed here, with the first batch, as the sampler does
        state.drawn = states_of({"torch": torch.default_generator})
        private = torch.Generator()
        private.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order = torch.randperm(length, generator=private).numpy()
    else:
        order = np.arange(length)
    yield order[: length - length % size] if batches.drop_last else order


def _in_groups(batches: BatchSampler) -> Iterator[Integers]:
    """The epoch of a LocalitySampler that makes whole batches, some of them at a time."""
    each, size = cast(LocalitySampler, batches.sampler).batches(), batches.batch_size
    while group := list(islice(each, max(GROUP // size, 1))):
        if batches.drop_last and len(group[-1]) < size:
            group.pop()
        if group:
            yield np.concatenate(group)


def _of_pool(batches: BatchSampler) -> Iterator[Integers]:
    """The epoch of a RollingSampler, a few batches at a time: between them it looks after those who fill its pool."""
    size = batches.batch_size
    for group in cast(RollingSampler, batches.sampler).groups(_ROLLED * size):
        whole = len(group) - len(group) % size if batches.drop_last else len(group)
        if whole:
            yield group[:whole]


def _as_indices(batch: Any) -> Any:
    """A sampler's batch as an array of its own, for the sampler may go on to change what it gave."""
    try:
        indices = np.array(batch.numpy() if isinstance(batch, torch.Tensor) else batch)
    except (TypeError, ValueError, RuntimeError):  # what is no list of numbers
        return batch
    if indices.ndim != 1 or indices.dtype.kind not in "iu":
        return batch
    return indices.astype(np.int64, copy=False)

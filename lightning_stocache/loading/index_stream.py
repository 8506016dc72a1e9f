"""The draws of an epoch's indices, at the moments at which DataLoader makes them.

A loader that draws its indices at other moments than DataLoader does gives other batches: samplers, the worker seed and
the user's own code draw from the same generators. So every draw is made on the caller's thread, at the moment at which
DataLoader makes it:

- `iter(loader)`: `iter(sampler)`; the base seed of the workers; with workers, `iter(sampler)` once more, and the first
  `prefetch_factor * num_workers` batches. A persistent loader's later epochs draw no base seed and call `iter` once.
- `next(iterator)`: with workers, one batch, after the current one has come; without, the current one.

Without workers a batch may be drawn ahead only if nobody can notice: samplers that draw from a generator of their own.
Not among them are a RandomSampler with a generator of the user's, which draws a second permutation when the first runs
out, and a subclass with an `__iter__` of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.loader_sampler import draws_unseen
from lightning_stocache.loading.position import LoaderState, ResumableBatches
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler, StreamBatches
from lightning_stocache.source.generators import states_of
from lightning_stocache.torch_internals import draws_all_once

__all__ = ["IndexStream"]

GROUP = 4096  # indices of all ranks that a LocalitySampler deals at a time
_IN_ORDER = 1 << 20  # indices of a SequentialSampler that are made at a time
_ROLLING_BATCHES = 16  # batches that a RollingSampler draws at a time


class IndexStream:
    """Draws the index batches of one epoch.

    Args:
        loader: the loader, whose sampler and generator are drawn from.
        first: whether a base seed is drawn: in a persistent loader's first epoch, and in each epoch of another loader.
        state: the position of the loader. Its epoch has begun; it notes the states of the generators.

    Attributes:
        ahead_unseen: whether nobody can notice that a batch is drawn ahead.
        seed_state: state of the generator before the base seed was drawn; None without a base seed.
        trusted: whether `draw_many` may be called: all indices are known to lie in the dataset.
    """

    def __init__(self, loader: DataLoader[Any], first: bool, state: LoaderState) -> None:
        batches: Any = loader.batch_sampler
        stream, plain = type(batches) is StreamBatches, type(batches) is BatchSampler
        sampler: Any = batches.sampler if plain else None  # not the loader's: the user may have given the BatchSampler
        self.ahead_unseen = stream or draws_unseen(sampler)
        self.seed_state: torch.Tensor | None = None
        resumable = batches if stream else ResumableBatches(batches, state)
        drawing = iter(resumable)
        if first:
            generator = torch.default_generator if loader.generator is None else loader.generator
            self.seed_state = generator.get_state()
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if loader.num_workers:
                drawing = iter(resumable)
        self._size = size = batches.batch_size if stream or plain else 0
        self._groups: Iterator[Integers] | None
        self._groups, length = (batches.groups(), 0) if stream else _groups(sampler, size, state)
        self.trusted = self._groups is not None and length <= len(cast(Any, loader.dataset))
        if plain and batches.drop_last and self._groups is not None:
            self._groups = (group[: len(group) - len(group) % size] for group in self._groups)
        self._rest: Integers = np.empty(0, dtype=np.int64)  # of the current group
        self._drawing = map(_as_indices, drawing) if self._groups is None else None

    def draw(self) -> Any:
        """The next batch of indices, int64 `[samples]`; None when the epoch is over.

        Keys that only the source understands come as the sampler gave them.
        """
        if self._drawing is not None:
            return next(self._drawing, None)
        return self.draw_many(1)

    def draw_many(self, batches: int) -> Integers | None:
        """The indices of the next batches, one after the other. Only for a `trusted` stream.

        There may be fewer batches than asked for. Only the last batch of the epoch may have fewer samples.
        """
        assert self._groups is not None
        if not len(self._rest) and (group := next(self._groups, None)) is not None:
            self._rest = group
        count = batches * self._size
        drawn, self._rest = self._rest[:count], self._rest[count:]
        return drawn if len(drawn) else None


def _groups(sampler: Any, size: int, state: LoaderState) -> tuple[Iterator[Integers] | None, int]:
    """The indices of an epoch in large arrays, or None, and the length of the dataset that the sampler draws from."""
    if type(sampler) is RollingSampler:  # it draws resident samples only, whatever the length
        return sampler.groups(_ROLLING_BATCHES * size), 0
    shuffled = type(sampler) is RandomSampler and sampler.generator is None and draws_all_once(sampler)
    if state.origin is None and (shuffled or type(sampler) is SequentialSampler):
        return _in_one(sampler, size, state), len(sampler)
    if type(sampler) is LocalitySampler and sampler.draws is None and sampler.batch_size == size:
        return _dealt(sampler, size), len(cast(Any, sampler.dataset))
    return None, 0


def _in_one(sampler: Any, size: int, state: LoaderState) -> Iterator[Integers]:
    """The epoch of a shuffled or sequential sampler. Batches as lists of numbers would cost 30 us each."""
    if type(sampler) is SequentialSampler:
        step = size * max(_IN_ORDER // size, 1)
        for first in range(0, len(sampler), step):
            yield np.arange(first, min(first + step, len(sampler)))
        return
    state.drawn = states_of({"torch": torch.default_generator})  # drawn from with the first batch, as the sampler does
    private = torch.Generator()
    private.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    yield torch.randperm(len(sampler), generator=private).numpy()


def _dealt(sampler: LocalitySampler, size: int) -> Iterator[Integers]:
    """The epoch of a LocalitySampler, several whole batches at a time."""
    batches = sampler.batches()
    while group := list(islice(batches, max(GROUP // (size * sampler.num_replicas), 1))):
        yield np.concatenate(group)


def _as_indices(batch: Any) -> Any:
    """A sampler's batch, which it may change later: a list of numbers as an array, other keys as a copy."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return list(batch.copy())  # its items are numpy's own numbers, which the source gets as they are
    if type(batch) is list and set(map(type, batch)) == {int}:
        with suppress(OverflowError):
            return np.array(batch, dtype=np.int64)
    return batch if isinstance(batch, tuple | str) else list(batch)

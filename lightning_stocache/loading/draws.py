"""Replacements for a loader's batch sampler, which note and resume positions.

The user's own samplers draw the order of an epoch, at the moments at which DataLoader draws (`plans`). The replacements
note the states of the generators before the first draw, and leave out the beginning of a resumed epoch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from itertools import chain, islice
from typing import Any, cast

import numpy as np
import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.loader_sampler import drawn_from
from lightning_stocache.loading.position import LoaderState, batches_left_out, samples_left_out
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.source.generators import as_text, put_back, states_of
from lightning_stocache.torch_internals import draws_all_once

__all__ = ["ArrayBatches", "ResumableBatches", "as_indices"]


class ArrayBatches:
    """The batches of a SequentialSampler, or of a RandomSampler that draws each index once, as arrays.

    Lists would cost 3 us per batch of 64, and a list of 10^8 numbers 4 GB.
    """

    def __init__(self, batches: BatchSampler, state: LoaderState) -> None:
        self._batches, self._state = batches, state

    @staticmethod
    def can_draw(sampler: Any, state: LoaderState) -> bool:
        """Whether this class draws the same batches as a sampler in the epoch that has begun."""
        if type(sampler) is RandomSampler:
            return state.origin is None and sampler.generator is None and draws_all_once(sampler)
        return state.origin is None and type(sampler) is SequentialSampler

    def __iter__(self) -> Iterator[Integers]:
        size = self._batches.batch_size
        samples = length = len(cast(Any, self._batches.sampler))
        if self._batches.drop_last:
            length -= length % size
        if type(self._batches.sampler) is SequentialSampler:
            for first in range(0, length, size):
                yield np.arange(first, min(first + size, length))
            return
        self._state.drawn = states_of({"torch": torch.default_generator})
        private = torch.Generator()
        private.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
        order: Integers = torch.randperm(samples, generator=private).numpy()
        for first in range(0, length, size):
            yield order[first : min(first + size, length)]


class ResumableBatches:
    """Replaces a loader's batch sampler, or its sampler if it makes no batches, and notes the generators' states.

    Args:
        batches: the user's batch sampler or sampler.
        state: the position of the loader. A resumed epoch is drawn without its beginning.
        check: called with what is drawn.
    """

    def __init__(self, batches: Any, state: LoaderState, check: Callable[[Any], None] | None = None) -> None:
        self._batches = batches
        self._state = state
        self._check = check

    def __iter__(self) -> Iterator[Any]:
        drawing = self._drawn()
        return drawing if self._check is None else map(self._checked, drawing)

    def _checked(self, drawn: Any) -> Any:
        cast(Any, self._check)(drawn)
        return drawn

    def _drawn(self) -> Iterator[Any]:
        # A loader with workers calls this twice, and reads the second: nothing may be lost with the first.
        if self._state.origin is not None:
            return self._rest(self._state.origin)
        generators = drawn_from(self._batches)
        if not generators:
            return iter(self._batches)
        if type(self._batches) is BatchSampler:  # draws nothing before it is asked for its first batch
            return self._noted(generators, iter(self._batches))
        before = states_of(generators)
        drawing: Iterator[Any] = iter(self._batches)
        if states_of(generators) == before:
            return self._noted(generators, drawing)
        self._state.drawn = before
        return self._noted(None, drawing)

    def __len__(self) -> int:
        return len(self._batches)

    def _noted(self, generators: Mapping[str, Any] | None, batches: Iterator[Any]) -> Iterator[Any]:
        """Count the batches of an epoch as they are drawn. The order may be drawn with the first of them."""
        self._state.drawn = states_of(generators) if generators else self._state.drawn
        for batch in batches:
            self._state.asked += 1
            yield batch
        self._state.asked += 1

    def _rest(self, origin: Mapping[str, Any]) -> Iterator[Any]:
        """The rest of a resumed epoch: its order is drawn again, and what was handed out is left out.

        The generators are put into the states in which that order was drawn. Once it is drawn, they get the states that
        they had at the position; those of which the position knows nothing stay as they are.
        """
        generators = drawn_from(self._batches)
        here = as_text(states_of(generators))
        states = origin.get("generators", {})
        put_back(generators, states.get("drawn", {}))
        self._state.drawn = states_of(generators)
        asked = max(origin["batches"], states.get("asked", 0))
        drawing = self._after(origin, {**origin, "batches": asked})
        at_position = states.get("now", {})
        if asked:
            put_back(generators, here | at_position)
        else:  # the order is drawn with the first index, as by the loader whose position this is
            drawing = chain(list(islice(drawing, 1)), drawing)
            put_back(generators, {name: state for name, state in here.items() if name not in at_position})
        yield from self._noted(None, drawing)

    def _after(self, origin: Mapping[str, Any], drawn: Mapping[str, Any]) -> Iterator[Any]:
        """The batches after a position. Those before the position `drawn` are drawn at once."""
        batches = self._batches
        if type(batches) is not BatchSampler:
            return _without_first(iter(batches), batches_left_out(origin, batches), batches_left_out(drawn, batches))
        left_out = samples_left_out(origin, batches)
        indices: Iterator[Any]
        if isinstance(batches.sampler, LocalitySampler):  # it deals the rest in batches of the new size
            batches.sampler.skip = left_out
            indices = iter(batches.sampler)
        else:
            indices = _without_first(iter(batches.sampler), left_out, samples_left_out(drawn, batches))
        return iter(BatchSampler(cast(Any, indices), batches.batch_size, batches.drop_last))


def _without_first(drawing: Iterator[Any], left_out: int, drawn: int) -> Iterator[Any]:
    """What is drawn after `left_out` items. The first `drawn` items are drawn at once."""
    begun = islice(drawing, drawn)
    deque(islice(begun, left_out), maxlen=0)
    return chain([deepcopy(item) for item in begun], drawing)  # the sampler may change a batch later


def as_indices(batch: Any) -> Any:
    """A sampler's batch, which it may change later: a list of numbers as an array, other keys as a copy."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return list(batch.copy())  # its items are numpy's own numbers, which the source gets as they are
    if type(batch) is list and set(map(type, batch)) == {int}:
        with suppress(OverflowError):
            return np.array(batch, dtype=np.int64)
    return batch if batch is None or isinstance(batch, tuple | str) else list(batch)

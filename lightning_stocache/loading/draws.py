"""The draws of an epoch's indices, at the moments at which DataLoader makes them.

A loader that draws its indices at other moments than DataLoader does gives other batches: samplers, the worker seed and
the user's own code draw from the same generators. So every draw is made on the caller's thread, at the moment at which
DataLoader makes it:

- `iter(loader)`: `iter(sampler)`; the base seed of the workers; with workers, `iter(sampler)` once more, and the first
  `prefetch_factor * num_workers` batches. A persistent loader's later epochs draw no base seed and call `iter` once.
- `next(iterator)`: with workers, one batch, after the current one has come; without, the current one.

A batch may be drawn ahead only if nobody can notice: by samplers that draw from a generator of their own. Not among
them are a RandomSampler with a generator of the user's, which draws a second permutation when the first runs out, and a
subclass with an `__iter__` of its own.
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
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.loader_sampler import drawn_from, draws_unseen
from lightning_stocache.loading.position import LoaderState, batches_left_out, samples_left_out
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler, StreamBatches
from lightning_stocache.source.generators import as_text, put_back, states_of
from lightning_stocache.torch_internals import draws_all_once

__all__ = ["END", "EpochDraws", "ResumableBatches"]

END = object()
"""What is drawn when an epoch is over: a sampler may give None."""

DRAWN = 4096  # indices that are drawn, and looked up, at a time, where nobody can notice
_ROLLING_BATCHES = 16  # batches of a RollingSampler, whose samples are replaced meanwhile


class EpochDraws:
    """EpochDraws the index batches of one epoch.

    Args:
        loader: the loader, whose batch sampler is drawn from.
        state: the position of the loader. Its epoch has begun; it notes the states of the generators.

    Attributes:
        are_unseen: whether nobody can notice that a batch is drawn ahead.
        size: samples of a batch, of which the last may have fewer; 0 for a batch sampler of the user's own.
    """

    def __init__(self, loader: DataLoader[Any], state: LoaderState) -> None:
        batches: Any = loader.batch_sampler
        is_stream = type(batches) is StreamBatches
        is_plain = type(batches) is BatchSampler
        sampler = batches.sampler if is_plain else None  # not the loader's: the user may have given the BatchSampler
        self.are_unseen = is_stream or draws_unseen(sampler)
        self.size = batches.batch_size if is_stream or is_plain else 0
        is_permutation = type(sampler) is RandomSampler and sampler.generator is None and draws_all_once(sampler)
        self._makes_arrays = state.origin is None and (is_permutation or type(sampler) is SequentialSampler)
        self._batches: Any = batches
        if not is_stream:
            self._batches = (_ArrayBatches if self._makes_arrays else ResumableBatches)(batches, state)
        dealt = sampler.num_replicas if isinstance(sampler, LocalitySampler) else 1  # each rank deals for all
        self._most = max(DRAWN // max(self.size * dealt, 1), 1)
        if type(sampler) is RollingSampler:
            self._most = _ROLLING_BATCHES
        self._drawing: Iterator[Any] = iter(())
        self._ahead: list[Any] = []  # drawn together with the batches before

    def begin(self) -> None:
        """Begin the sampler, as DataLoader does, perhaps twice."""
        self._drawing = iter(self._batches)

    def begin_alone(self, loader: DataLoader[Any], *, draws_seed: bool) -> None:
        """Begin the sampler where no worker runs. A DataLoader would draw the base seed of its workers all the same."""
        self.begin()
        if draws_seed:
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
            if loader.num_workers:
                self.begin()

    def draw(self) -> Any:
        """The next batch of indices, int64 `[samples]`; END when the epoch is over.

        Keys that only the source understands come as the sampler gave them.
        """
        batch = self._ahead.pop(0) if self._ahead else next(self._drawing, END)
        return batch if batch is END or self._makes_arrays else _as_indices(batch)

    def draw_many(self) -> Integers | None:
        """The indices of the next batches, one after the other. Only where draws `are_unseen`.

        Only the last batch may have fewer samples than `size`. None when the epoch is over.
        """
        drawn = self._ahead or list(islice(self._drawing, self._most))
        if not drawn:
            return None
        smaller = next((number for number, batch in enumerate(drawn, 1) if len(batch) < self.size), len(drawn))
        self._ahead = drawn[smaller:]
        return np.concatenate(drawn[:smaller]).astype(np.int64, copy=False)


class _ArrayBatches:
    """The batches of a SequentialSampler, or of a RandomSampler that draws each index once, as arrays.

    Lists would cost 3 us per batch of 64, and a list of 10^8 numbers 4 GB.
    """

    def __init__(self, batches: BatchSampler, state: LoaderState) -> None:
        self._batches, self._state = batches, state

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


def _as_indices(batch: Any) -> Any:
    """A sampler's batch, which it may change later: a list of numbers as an array, other keys as a copy."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, np.ndarray):
        return list(batch.copy())  # its items are numpy's own numbers, which the source gets as they are
    if type(batch) is list and set(map(type, batch)) == {int}:
        with suppress(OverflowError):
            return np.array(batch, dtype=np.int64)
    return batch if batch is None or isinstance(batch, tuple | str) else list(batch)

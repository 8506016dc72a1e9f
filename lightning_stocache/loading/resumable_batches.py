"""The batches of an epoch that may begin in its middle, and an iterator that counts them.

The order of an epoch is drawn again from the states that its generators had, and its beginning is left out
(`loader_state` has the protocol).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import BatchSampler

from lightning_stocache.loading.loader_sampler import drawn_from
from lightning_stocache.loading.loader_state import LoaderState, batches_left_out, samples_left_out
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.source.generators import as_text, put_back, states_of

__all__ = ["CountedBatches", "ResumableBatches"]


class ResumableBatches:
    """Stands for a loader's batch sampler (without batches, for its sampler), and notes what an epoch is drawn from.

    Args:
        batches: the user's own.
        state: of the loader; an epoch that goes on is drawn without its beginning.
    """

    def __init__(self, batches: Any, state: LoaderState) -> None:
        self._batches, self._state = batches, state

    def __iter__(self) -> Iterator[Any]:
        # A loader with workers calls this twice, and reads the second: nothing may be lost with the first.
        if self._state.origin is not None:
            return self._rest(self._state.origin)
        generators = drawn_from(self._batches)
        if not generators:
            return iter(self._batches)
        if type(self._batches) is BatchSampler:  # draws nothing before it is asked for its first batch
            return self._noted(generators, iter(self._batches))
        before, drawing = states_of(generators), cast(Iterator[Any], iter(self._batches))
        if states_of(generators) == before:
            return self._noted(generators, drawing)
        self._state.drawn = before
        return self._noted(None, drawing)

    def __len__(self) -> int:
        return len(self._batches)

    def _noted(self, generators: Mapping[str, Any] | None, batches: Iterator[Any]) -> Iterator[Any]:
        """The batches of an epoch, counted; of one whose order is drawn with the first of them."""
        self._state.drawn = states_of(generators) if generators else self._state.drawn
        for batch in batches:
            self._state.asked += 1
            yield batch
        self._state.asked += 1

    def _rest(self, origin: Mapping[str, Any]) -> Iterator[Any]:
        """What is left of the epoch."""
        generators = drawn_from(self._batches)
        states, before = origin.get("generators", {}), as_text(states_of(generators))
        put_back(generators, states.get("drawn", {}))
        self._state.drawn = states_of(generators)
        plain, asked = type(self._batches) is BatchSampler, max(origin["batches"], states.get("asked", 0))
        count = samples_left_out if plain else batches_left_out
        if plain and isinstance(self._batches.sampler, LocalitySampler):  # it deals what is left in batches of now
            self._batches.sampler.skip = samples_left_out(origin, self._batches)
            drawing: Iterator[Any] = iter(self._batches.sampler)
        else:
            drawing = iter(self._batches.sampler if plain else self._batches)
            drawn = islice(drawing, count({**origin, "batches": asked}, self._batches))
            drawing = chain(list(drawn)[count(origin, self._batches) :], drawing)
        if plain:
            drawing = iter(BatchSampler(cast(Any, drawing), self._batches.batch_size, self._batches.drop_last))
        now = states.get("now", {})
        if asked:
            put_back(generators, before | now)
            yield from self._noted(None, drawing)
        else:  # the order is drawn with the first index, as it will have been then
            first = list(islice(drawing, 1))
            put_back(generators, {name: state for name, state in before.items() if name not in now})
            yield from self._noted(None, chain(first, drawing))


class CountedBatches:
    """An iterator of DataLoader's own that counts what it hands out; all else is the iterator's."""

    def __init__(self, iterator: Any, state: LoaderState) -> None:
        self._iterator, self._state = iterator, state

    def __iter__(self) -> CountedBatches:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._state.ended = True
            raise
        self._state.batches += 1
        return batch

    def __len__(self) -> int:
        return len(self._iterator)

    def __getattr__(self, name: str) -> Any:
        if name == "_iterator":  # a copy that is not filled yet
            raise AttributeError(name)
        return getattr(self._iterator, name)

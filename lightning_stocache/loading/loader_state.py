"""Where in its epoch a loader stands, and from where it goes on after a break.

The order of an epoch follows from the epoch's number (samplers that are told it), or from the states of the generators
that it was drawn from. So a state is the number of batches that were handed out, the sampler's epoch and seed, and the
generators' states at the moment at which the epoch's first index was drawn. To go on, the generators are put into these
states, the order is drawn again, and what was handed out is left out; then the generators get the states that they had
when the state was taken. Reading ahead plays no part in it: what workers have under way is loaded again.

A position counts samples of all ranks together, so that another batch size or another number of ranks goes on after the
same samples. (Where their number does not divide by the ranks of now, fewer than one per rank come twice.)

The interface is that of torchdata's StatefulDataLoader. A state is plain values: numbers, strings, lists and dicts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.source.generator_state import PROCESS_WIDE, as_text, put_back, states_of
from lightning_stocache.source.generators import KINDS

__all__ = ["CountedBatches", "LoaderState", "ResumableBatches", "batches_of", "set_epoch"]

_VERSION = 1
_DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_DRAW_NOTHING = (DistributedSampler.__iter__, LocalitySampler.__iter__, SequentialSampler.__iter__)


class LoaderState:
    """The position of one loader: a CachedLoader asks for it, and keeps it up to date.

    Attributes:
        batches: handed out in the epoch under way, those of the time before a break included.
        ended: whether the epoch has been read to its end.
        then: where the epoch that begins goes on, if not at its beginning.
        drawn: states of the generators when the first index of the epoch was drawn.
        asked: batches that were drawn since then, which workers have under way; one more when there were no others.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.ended = False
        self.then: Mapping[str, Any] | None = None
        self.drawn: dict[str, Any] | None = None
        self.asked = 0
        self._next: Mapping[str, Any] | None = None  # where the next epoch is to go on
        self._under_way = False
        self._begun: Mapping[str, Any] | None = None  # where the epoch under way has gone on
        self._left_out = 0  # batches, at its beginning
        self._offset = 0  # of the sampler's epochs, where the caller counts from zero again
        self._resumed: int | None = None  # epoch, until the caller names another

    def of(self, loader: DataLoader[Any], batches: int | None = None, *, ended: bool | None = None) -> dict[str, Any]:
        """The position of a loader, as plain values.

        Args:
            loader: whose position it is.
            batches: how many of the epoch have been dealt with, where the caller knows better than this state.
            ended: whether that were all.
        """
        if self._next is not None:
            return dict(self._next)
        drawing = batches_of(loader)
        sampler = _sampler_of(drawing)
        ended = self.ended if ended is None else ended
        batches = self.batches if batches is None else batches
        state: dict[str, Any] = {"version": _VERSION, "batches": 0 if ended else batches} | self.now(loader)
        names = [name for name in ("epoch", "seed") if isinstance(getattr(sampler, name, None), int)]
        state |= {name: getattr(sampler, name) for name in names}
        if ended and "epoch" in state:
            state["epoch"] += 1
        if generators := drawn_from(drawing):
            now = as_text(states_of(generators))
            state["generators"] = {"now": now}
            if self._under_way and not ended:
                drawn = now if self.drawn is None else as_text(self.drawn)
                state["generators"] |= {"drawn": drawn, "asked": self.asked}
            elif self._under_way and loader.persistent_workers:  # which draw no seed before their next order
                state["generators"]["drawn"] = now
        return state

    @staticmethod
    def now(loader: DataLoader[Any]) -> dict[str, Any]:
        """What a position of a loader is counted in: `batch_size`, `replicas` and the dataset's `length`."""
        drawing = batches_of(loader)
        size, replicas = _batch_size(drawing), _replicas(_sampler_of(drawing))
        return {"batch_size": size, "replicas": replicas, "length": len(loader.dataset)}  # type: ignore[arg-type]

    def load(self, state: Mapping[str, Any], *, alone: bool = True) -> None:
        """Have the next epoch go on where a state was taken.

        Args:
            state: what `of` gave.
            alone: whether the process-wide generators go on, too, as they were when the state was taken. Not where it
                is another rank's, or another loader has put them back.

        Raises:
            ValueError: it is no state, or one of another version.
        """
        numbers = [state.get(name) for name in ("version", "batches", "replicas")]
        whole = all(isinstance(number, int) and number >= 0 for number in numbers)
        if not whole or numbers[0] != _VERSION or not numbers[2]:
            found = ", ".join(map(str, state)) or "nothing"
            raise ValueError(f"state_dict must be what the state_dict of a CachedLoader gave, got one with {found}")
        self._next = dict(state)
        if not alone and (generators := state.get("generators")):
            now = {name: text for name, text in generators["now"].items() if name not in PROCESS_WIDE}
            self._next["generators"] = generators | {"now": now}

    def begin(self, loader: DataLoader[Any]) -> None:
        """A new epoch begins, or the rest of one; again the same where nothing of it was handed out, if asked twice."""
        again = self._begun if self.batches == self._left_out and not self.ended else None
        loaded, self._next, self._under_way = self._next, None, True
        self.then = self._begun = loaded or again
        self.batches, self._left_out, self.ended, self.drawn, self.asked = 0, 0, False, None, 0
        drawing = batches_of(loader)
        sampler = _sampler_of(drawing)
        if not again and hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            self._set_epoch(sampler, None if loaded is None else loaded.get("epoch"))
        if self.then is None:
            return
        self.batches = self._left_out = self.asked = _batches_left_out(self.then, drawing)
        states = self.then.get("generators", {})
        if "drawn" not in states:  # between two epochs
            put_back(drawn_from(drawing), states.get("now", {}))
        if isinstance(sampler, LocalitySampler):
            sampler.seed = self.then.get("seed", sampler.seed)
            sampler.skip = _samples_left_out(self.then, drawing)
            self.then = None
        elif not self.then["batches"] and "drawn" not in states:
            self.then = None

    def _set_epoch(self, sampler: Any, epoch: int | None) -> None:
        """Set the epoch that is resumed, and later ones where the caller counts from zero again, as Fabric does."""
        if epoch is not None:
            self._resumed, self._offset = epoch, epoch - sampler.epoch
        elif self._resumed is not None:
            if sampler.epoch > self._resumed:  # the caller counts on from there
                self._offset = 0
            self._resumed = None
        if self._offset:
            sampler.set_epoch(sampler.epoch + self._offset)


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
        if self._state.then is not None:
            return self._rest(self._state.then)
        generators = drawn_from(self._batches)
        if not generators:
            return iter(self._batches)
        if type(self._batches) is BatchSampler:  # draws nothing before it is asked for its first batch
            return self._noted(generators, iter(self._batches))
        before, drawing = states_of(generators), cast(Iterator[Any], iter(self._batches))
        if as_text(states_of(generators)) == as_text(before):
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

    def _rest(self, then: Mapping[str, Any]) -> Iterator[Any]:
        """What is left of the epoch."""
        generators = drawn_from(self._batches)
        states, before = then.get("generators", {}), as_text(states_of(generators))
        put_back(generators, states.get("drawn", {}))
        self._state.drawn = states_of(generators)
        plain, asked = type(self._batches) is BatchSampler, max(then["batches"], states.get("asked", 0))
        count = _samples_left_out if plain else _batches_left_out
        drawing: Iterator[Any] = iter(self._batches.sampler if plain else self._batches)
        drawn = islice(drawing, count({**then, "batches": asked}, self._batches))
        drawing = chain(list(drawn)[count(then, self._batches) :], drawing)
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
        return getattr(self._iterator, name)


def batches_of(loader: DataLoader[Any]) -> Any:
    """What a loader draws its batches from; without batches, its samples."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Tell a loader's sampler which epoch the next one is; one that is not interested is left alone."""
    for drawing in (loader.sampler, _sampler_of(batches_of(loader))):
        if callable(tell := getattr(drawing, "set_epoch", None)):
            tell(epoch)


def drawn_from(batches: Any) -> dict[str, Any]:
    """The generators that the order of an epoch may be drawn from, by name; none for samplers that draw from none."""
    sampler, plain = _sampler_of(batches), type(batches) is BatchSampler or _sampler_of(batches) is batches
    if plain and getattr(type(sampler), "__iter__", None) in _DRAW_NOTHING:
        return {}
    around = getattr(getattr(sampler, "dataset", None), "__dict__", {})  # Lightning's wrapper reads the user's sampler
    inner = [value for value in around.values() if isinstance(value, Sampler)]
    generators = {
        f"{number}.{name}": value
        for number, drawing in enumerate((batches, sampler, *inner))
        for name, value in getattr(drawing, "__dict__", {}).items()
        if isinstance(value, KINDS)
    }
    if plain and type(sampler) in _DRAW_FROM_TORCH:
        return generators or {"torch": PROCESS_WIDE["torch"]}
    return {**PROCESS_WIDE, **generators}


def _sampler_of(batches: Any) -> Any:
    """What says which samples come: of a batch sampler, the sampler within."""
    return getattr(batches, "sampler", None) or batches


def _replicas(sampler: Any) -> int:
    replicas = getattr(sampler, "num_replicas", 1)
    return replicas if isinstance(replicas, int) else 1


def _batch_size(batches: Any) -> int | None:
    """Samples per batch; None where only the user's own batch sampler knows."""
    return batches.batch_size if type(batches) is BatchSampler else None


def _samples_left_out(then: Mapping[str, Any], batches: Any) -> int:
    """Samples of this rank that a sampler leaves out."""
    samples = then["batches"] * (then["batch_size"] or 1) * then["replicas"]
    return int(samples // _replicas(_sampler_of(batches)))


def _batches_left_out(then: Mapping[str, Any], batches: Any) -> int:
    """Of the epoch's batches, as many as do not come; of a batch sampler whose sizes nobody knows, as many as then."""
    if type(batches) is not BatchSampler or then["batch_size"] is None or not hasattr(batches.sampler, "__len__"):
        return int(then["batches"])
    left = max(len(cast(Any, batches.sampler)) - _samples_left_out(then, batches), 0)
    return len(batches) - (left // batches.batch_size if batches.drop_last else -(-left // batches.batch_size))

"""The position of a loader in its epoch, and how the next epoch resumes there.

The order of an epoch follows from the epoch's number (samplers with `set_epoch`), or from the states of the generators
that it was drawn from. So a position is the number of batches that were handed out, the sampler's epoch and seed, and
the generators' states when the epoch's first index was drawn. To resume, the generators are put into these states, the
order is drawn again, and the batches that were handed out are left out; then the generators get the states that they
had when the position was taken. Batches that workers were loading at that moment are loaded again.

A position counts samples of all ranks together, so a job with another batch size or number of ranks resumes after the
same samples. (If their number is no multiple of the new number of ranks, fewer samples than ranks come twice.) The
interface is that of torchdata's StatefulDataLoader.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

from torch.utils.data import BatchSampler, DataLoader

from lightning_stocache.loading.loader_sampler import batches_of, drawn_from, replicas_of, sampler_of
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.source.generators import PROCESS_WIDE, as_text, put_back, states_of

__all__ = ["Given", "Ledger", "LoaderState", "batches_left_out", "samples_left_out"]

_VERSION = 1
_KEYS = {"batches", "batch_size", "replicas", "length"}


class Given(NamedTuple):
    """What a loader has given to its consumer so far, of all epochs together.

    Args:
        batches: number of batches.
        hits: samples of them that came from their slot.
        misses: samples that have a slot here, and had to be loaded.
        bypasses: samples that have no slot here.
        waited_ns: nanoseconds for which the consumer has waited in `__iter__` and `__next__`.
        away_ns: nanoseconds between two batches, in which a plain loop computes.
    """

    batches: int = 0
    hits: int = 0
    misses: int = 0
    bypasses: int = 0
    waited_ns: int = 0
    away_ns: int = 0

    def since(self, other: Given) -> Given:
        """What has been given since an earlier moment."""
        return Given(*map(operator.sub, self, other))

    def later(self, more: Given) -> Given:
        """This, and what was given besides."""
        return Given(*map(operator.add, self, more))


class Ledger:
    """Counts what a loader gives to its consumer, and times how long the consumer waits.

    A context around each `__next__` of the loader's iterator.

    Attributes:
        begun: what had been given when the epoch under way began.
        begun_at: when that was, in seconds of `time.perf_counter`.
        is_known: whether it is known where the samples of this epoch's batches come from.
        last_away_ns: nanoseconds between the call under way and the one before; 0 in the first call of an epoch.
    """

    def __init__(self) -> None:
        self.begun = Given()
        self.begun_at = 0.0
        self.is_known = False
        self.last_away_ns = 0
        self._sums = [0, 0, 0, 0]  # batches, hits, misses, bypasses
        self._newest = (0, 0, 0, 0)
        self._waited_ns = self._away_ns = 0
        self._entered_ns = 0
        self._left_ns: int | None = None

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Begin an epoch, around `__iter__`, which starts workers. The time since the last call belongs to no epoch."""
        self.begun = self.given()
        self.begun_at = time.perf_counter()
        self._newest = (0, 0, 0, 0)
        self._left_ns = None
        entered_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self._waited_ns += time.perf_counter_ns() - entered_ns

    def __enter__(self) -> Ledger:
        self._entered_ns = now = time.perf_counter_ns()
        self.last_away_ns = 0 if self._left_ns is None else now - self._left_ns
        self._away_ns += self.last_away_ns
        return self

    def __exit__(self, error: object, *_: object) -> None:
        now = time.perf_counter_ns()
        self._waited_ns += now - self._entered_ns
        self._left_ns = now if error is None else None

    def add(self, hits: int, misses: int, bypasses: int) -> None:
        """Count a batch that is handed out."""
        sums = self._sums
        sums[0] += 1
        sums[1] += hits
        sums[2] += misses
        sums[3] += bypasses
        self._newest = 1, hits, misses, bypasses

    def given(self, *, without_newest: bool = False) -> Given:
        """What has been given; perhaps without the newest batch, which the consumer has only fetched ahead."""
        left_out = self._newest if without_newest else (0, 0, 0, 0)
        batches, hits, misses, bypasses = map(operator.sub, self._sums, left_out)
        return Given(batches, hits, misses, bypasses, self._waited_ns, self._away_ns)


class LoaderState:
    """The position of one loader. A CachedLoader keeps it up to date.

    Attributes:
        batches: number of batches handed out in this epoch, including those before it was resumed.
        ended: whether the epoch has been read to its end.
        origin: the position at which the epoch resumes, or None if it starts at its beginning.
        drawn: states of the generators when the first index of the epoch was drawn.
        asked: number of batches drawn since then, including those under way; one more at the end of the sampler.
        ledger: counts what was handed out. Copies of this state share it.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.ended = False
        self.origin: Mapping[str, Any] | None = None
        self.drawn: dict[str, Any] | None = None
        self.asked = 0
        self.ledger = Ledger()
        self._next: Mapping[str, Any] | None = None  # the position at which the next epoch resumes
        self._under_way = False
        self._resumed_at: Mapping[str, Any] | None = None  # the position at which the epoch under way has resumed
        self._left_out = 0  # batches left out at its beginning
        self._offset = 0  # added to the caller's epochs, if the caller counts from zero again
        self._resumed_epoch: int | None = None  # until the caller sets another epoch

    @property
    def is_within_epoch(self) -> bool:
        """Whether batches of an epoch were handed out, and not all."""
        return self._under_way and not self.ended and self.batches > self._left_out

    def as_dict(
        self, loader: DataLoader[Any], batches: int | None = None, *, ended: bool | None = None
    ) -> dict[str, Any]:
        """The position of a loader, as plain values.

        Args:
            loader: the loader.
            batches: number of batches that the caller has finished; by default those handed out.
            ended: whether these were all batches of the epoch; by default the `ended` of this state.
        """
        if self._next is not None:
            return dict(self._next)
        drawing = batches_of(loader)
        ended = self.ended if ended is None else ended
        sampler = sampler_of(drawing)
        batches = self.batches if batches is None else batches
        if self._resumed_at is not None and not ended and batches == self.batches == self._left_out:
            return dict(self._resumed_at)  # no batch was handed out since, and the generators may lack their states
        state: dict[str, Any] = {"version": _VERSION, "batches": 0 if ended else batches} | self.units(loader)
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
            elif self._under_way and loader.persistent_workers:  # its next epoch draws no base seed before its order
                state["generators"]["drawn"] = now
        return state

    @staticmethod
    def units(loader: DataLoader[Any]) -> dict[str, Any]:
        """The units of a position: `batch_size`, `replicas` and the dataset's `length`."""
        drawing = batches_of(loader)
        size = drawing.batch_size if type(drawing) is BatchSampler else None
        replicas = replicas_of(sampler_of(drawing))
        return {"batch_size": size, "replicas": replicas, "length": len(loader.dataset)}  # type: ignore[arg-type]

    def load(self, state: Mapping[str, Any], *, process_wide: bool = True) -> None:
        """Make the next epoch resume at the position of a state.

        Args:
            state: a result of `as_dict`.
            process_wide: whether to restore the process-wide generators, too. False for the state of another rank, or
                if another loader has restored them.

        Raises:
            ValueError: the value is no state, or a state of another version.
        """
        if not isinstance(state, Mapping) or state.get("version") != _VERSION or not state.keys() >= _KEYS:
            raise ValueError(f"state_dict must be what the state_dict of a CachedLoader gave, got {state!r:.200}")
        self._next = dict(state)
        generators = state.get("generators")
        if generators and not process_wide:
            now = {name: text for name, text in generators["now"].items() if name not in PROCESS_WIDE}
            self._next["generators"] = generators | {"now": now}

    def begin(self, loader: DataLoader[Any]) -> None:
        """Begin an epoch, or the rest of one. Begin the same rest again if no batch of it was handed out."""
        again = self._resumed_at if self.batches == self._left_out and not self.ended else None
        loaded, self._next, self._under_way = self._next, None, True
        self.origin = self._resumed_at = loaded or again
        self.batches = 0
        self._left_out = 0
        self.ended = False
        self.drawn = None
        self.asked = 0
        drawing = batches_of(loader)
        sampler = sampler_of(drawing)
        if not again and hasattr(sampler, "set_epoch") and isinstance(getattr(sampler, "epoch", None), int):
            self._set_epoch(sampler, None if loaded is None else loaded.get("epoch"))
        if self.origin is None:
            return
        self.batches = self._left_out = self.asked = batches_left_out(self.origin, drawing)
        states = self.origin.get("generators", {})
        if "drawn" not in states:  # between two epochs
            put_back(drawn_from(drawing), states.get("now", {}))
        if isinstance(sampler, LocalitySampler):
            sampler.seed = self.origin.get("seed", sampler.seed)
        if isinstance(sampler, LocalitySampler) and sampler.draws is None:
            sampler.skip = samples_left_out(self.origin, drawing)
            self.origin = None
        elif not self.origin["batches"] and "drawn" not in states:
            self.origin = None

    def end(self) -> None:
        """Mark the epoch as ended if any batch of it was handed out, even if its end was not reached."""
        self.ended = self.ended or self.batches > self._left_out

    def _set_epoch(self, sampler: Any, epoch: int | None) -> None:
        """Set the number of the resumed epoch, and of later ones if the caller counts from zero, as Fabric does."""
        if epoch is not None:
            self._resumed_epoch = epoch
            self._offset = epoch - sampler.epoch
        elif self._resumed_epoch is not None:
            if sampler.epoch > self._resumed_epoch:  # the caller counts on from the resumed epoch
                self._offset = 0
            self._resumed_epoch = None
        if self._offset:
            sampler.set_epoch(sampler.epoch + self._offset)


def samples_left_out(origin: Mapping[str, Any], batches: Any) -> int:
    """Number of samples that this rank leaves out of an epoch that goes on from a position."""
    samples = origin["batches"] * (origin["batch_size"] or 1) * origin["replicas"]
    return int(samples // replicas_of(sampler_of(batches)))


def batches_left_out(origin: Mapping[str, Any], batches: Any) -> int:
    """Number of batches that this rank leaves out: as many as were handed out, if their sizes are unknown."""
    if type(batches) is not BatchSampler or origin["batch_size"] is None or not hasattr(batches.sampler, "__len__"):
        return int(origin["batches"])
    left = max(len(cast(Any, batches.sampler)) - samples_left_out(origin, batches), 0)
    return len(batches) - (left // batches.batch_size if batches.drop_last else -(-left // batches.batch_size))

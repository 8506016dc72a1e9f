"""Find the deterministic and the random part of a source.

A cache freezes what it stores, and most random augmentation sits inside the user's dataset. `split` finds it:

1. A few indices are read twice, under different seeds of every process-wide generator. The source is deterministic if
   the bits are equal and no generator has moved, neither these nor one that can be reached from the source
   (RandomErasing(p=0.1) seldom changes bits, but always draws).
2. Otherwise a shallow copy of the dataset gets a `transform` that runs its steps one by one and notes each one's bits
   and draws. The earliest random step over all probed samples is the cut.
3. A second copy runs only the steps before the cut. Where their output lies in the sample is found by identity; the
   tail applies the other steps there, in the order of the calls.
4. The cut is proved: under one seed, `tail(copy[i])` must give the bits of `source[i]` and leave the generators in the
   same state, and the copy must be deterministic by the test of step 1.

The user's objects are not modified, and the generators end where they began, also when the source raises. A source that
is random in few samples only, and draws from what no look can find, is not found out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.cache.placement import Domain
from lightning_stocache.source.generators import ENTROPY, Generators, State, watch_entropy
from lightning_stocache.source.samples import Bits, Path, bits, difference, walk
from lightning_stocache.source.transform_split import (
    Cut,
    Head,
    Part,
    Places,
    Tail,
    UncuttableError,
    Values,
    draws_by_itself,
    step_name,
    steps_of,
    transform_of,
    with_transform,
)

__all__ = ["Probe", "Read", "Split", "sign", "split", "spread"]

QUICK_SECONDS = 0.2
_SLOW_SECONDS = 20.0  # after which two indices have to do
_NOT_HELD = "the sample does not hold what its transform returns, but something made of it"


@dataclass(frozen=True)
class Split:
    """A source and what `split` found in it.

    Args:
        source: the dataset to cache: a shallow copy whose transform ends before its first random step, or the user's
            own object if it is deterministic or cannot be split.
        probed: one read of `source` per probed index, the first index first.
        reads: how many times the user's dataset was read.
        tail: the random rest, applied to a sample after the cache; None if nothing is random.
        cut: where the source was cut, for other processes; None if it was not cut.
        reason: why a random source cannot be cached, else None.
    """

    source: Dataset[Any]
    probed: tuple[Read, ...]
    reads: int
    tail: Callable[[Any], Any] | None = None
    cut: Cut | None = None
    reason: str | None = None

    @property
    def indices(self) -> tuple[int, ...]:
        """The probed indices."""
        return tuple(read.index for read in self.probed)

    @property
    def samples(self) -> tuple[Any, ...]:
        """The samples of the probed indices."""
        return tuple(read.sample for read in self.probed)

    @property
    def intact(self) -> dict[int, Any]:
        """The samples by index, without those that a later read has overwritten in place."""
        return {read.index: read.sample for read in self.probed if bits(read.sample) == read.bits}


def split(
    source: Dataset[Any],
    *,
    samples: int = 4,
    quick: int = 0,
    domain: Domain | None = None,
) -> Split:
    """Split a source into what is the same on every read and the random rest.

    Args:
        source: a map-style dataset with at least one sample.
        samples: how many indices to probe, spread evenly from index 0 to the last; two where they take 20 s. A
            deterministic source is read twice per index, a random one up to six times.
        quick: how many more to probe within 0.2 s.
        domain: which indices may be read; by default all.

    Raises:
        ValueError: `source` is empty or `samples` is below 1. What the source itself raises comes through unchanged.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> class Pixels(Dataset):
        ...     transform = nn.Sequential(nn.Flatten(0), nn.Dropout(0.5))
        ...
        ...     def __len__(self):
        ...         return 8
        ...
        ...     def __getitem__(self, index):
        ...         return self.transform(torch.full((2, 2), float(index))), index
        >>> parts = split(Pixels())
        >>> parts.source[3]
        (tensor([3., 3., 3., 3.]), 3)
        >>> parts.tail
        Tail(Dropout)
    """
    length = len(cast(Sized, source))
    if length < 1 or samples < 1:
        raise ValueError(f"split needs a source with samples and samples >= 1, got {length} samples and {samples=}")
    indices = spread(length, samples, domain)
    more = spread(length, quick + 2, domain)[1:-1] if quick else ()
    with Probe(source) as probe, watch_entropy():
        pairs = list(_pairs(source, probe, indices, more))
        originals, again = zip(*pairs, strict=True)
        moved = next(filter(None, map(sign, originals, again)), None)
        if moved is None:
            return Split(source, again, probe.reads)
        try:
            cut, heads = _cut(source, originals, probe)
            if cut is None:
                return Split(source, again, probe.reads)
            head, tail = cut.apply(source)
            return Split(head, heads, probe.reads, tail, cut)
        except UncuttableError as error:
            why = str(error)
        except Exception as error:  # user code on a changed dataset may raise anything; the source as it is did not
            why = f"without its random steps it raised {error!r}"
        reason = f"it is random ({moved}) and cannot be split: {why}"
        return Split(source, again, probe.reads, reason=reason)


def spread(length: int, count: int, domain: Domain | None = None) -> tuple[int, ...]:
    """So many indices of a dataset, or of its domain, evenly from the first to the last."""
    among = range(length) if domain is None else domain.indices
    count = min(count, len(among))
    return tuple(int(among[k * (len(among) - 1) // max(count - 1, 1)]) for k in range(count))


def _pairs(
    source: Dataset[Any], probe: Probe, indices: tuple[int, ...], more: tuple[int, ...]
) -> Iterator[tuple[Read, Read]]:
    """Two reads of each index, and of more as long as that is quick and nothing is random.

    An index that raises is passed over, unless all do: it may be one that no sampler asks for.
    """
    begin, seen, failure = time.perf_counter(), 0, None
    for index in dict.fromkeys((*indices, *more)):
        first = index in indices
        if not (first or seen):
            break
        if seen >= 2 and time.perf_counter() - begin > (_SLOW_SECONDS if first else QUICK_SECONDS):
            break
        try:
            pair = probe.read_twice(source, index)
        except Exception as error:  # the source is the user's, and may raise anything
            failure = failure or error
            continue
        seen += 1
        yield pair
        if not first and sign(*pair) is not None:
            break
    if failure is not None and not seen:
        raise failure


# ---- reads ----


@dataclass(frozen=True)
class Read:
    """One read of an index.

    Args:
        index: that was read.
        sample: what came.
        bits: of the sample.
        moved: names of the generators that it drew from.
        after: the state of all generators after it.
    """

    index: int
    sample: Any
    bits: Bits
    moved: list[str]
    after: State


class Probe:
    """Reads of one source under given seeds, counted. At the end of a `with` all generators are where they were.

    Args:
        source: its own generators are watched, too.
    """

    def __init__(self, source: Dataset[Any]) -> None:
        self.generators, self.reads = Generators(source), 0

    def __enter__(self) -> Probe:
        self.generators.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self.generators.__exit__()

    def read(self, source: Dataset[Any], index: int, seed: int) -> Read:
        """Read an index of the source, or of a copy with another transform, under a seed; what it raises comes through.

        A generator that the first read has made is watched from then on.
        """
        self.generators.seed(seed)
        self.reads += 1
        before = self.generators.state()
        with _worker_of(seed):
            sample = source[index]
        after = self.generators.state()
        read = Read(index, sample, bits(sample), self.generators.moved(before, after), after)
        if self.reads == 1:
            self.generators.find_new()
        return read

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[Read, Read]:
        """Read an index under two seeds, which no other index has."""
        return self.read(source, index, 2 * index), self.read(source, index, 2 * index + 1)


@contextmanager
def _worker_of(seed: int) -> Iterator[None]:
    """Give a worker another seed and number for the time of a read, because sources may draw from these."""
    info: Any = get_worker_info()
    before = {} if info is None else {"seed": info.seed, "id": info.id}
    for name, value in zip(before, (seed, seed % 2), strict=False):
        object.__setattr__(info, name, value)  # its own `__setattr__` refuses
    try:
        yield
    finally:
        for name, value in before.items():
            object.__setattr__(info, name, value)


def sign(first: Read, second: Read) -> str | None:
    """What shows that two reads of an index are random, in words; None if nothing does."""
    for read in (first, second):
        if read.moved == [ENTROPY]:
            return f"reading index {read.index} makes a generator with a seed of the system's"
        if read.moved:
            return f"reading index {read.index} moves the generator of {' and '.join(read.moved)}"
    where = difference(first.bits, second.bits)
    return None if where is None else f"two reads of index {first.index} differ in sample{where}"


# ---- the cut ----


@dataclass(frozen=True)
class _Call:
    """A call of a transform: what it returned, and each step's bits and whether it drew."""

    values: Values
    steps: list[tuple[Bits, bool]]


class _Recorder(Head):
    """Reads a source with the first steps of its transform alone, and notes each call of them."""

    def __init__(self, source: Dataset[Any], transform: Callable[..., Any], end: int, probe: Probe) -> None:
        super().__init__(transform, end)
        self._parts = [Part(transform, position, position + 1) for position in range(end)]
        self._source, self._probe = with_transform(source, self), probe
        self._calls: list[_Call] = []

    def read(self, index: int, seed: int) -> tuple[Read, list[_Call]]:
        self._calls = []
        return self._probe.read(self._source, index, seed), self._calls

    def run(self, values: Values) -> Values:
        if len(set(map(type, values))) != 1:
            raise UncuttableError("its transform is called with values and keywords at once")
        steps = []
        for part in self._parts:
            with self._probe.generators.watch() as moved:
                values = part.run(values)
            steps.append((bits(values), bool(moved)))
        self._calls.append(_Call(values, steps))
        return values


def _cut(source: Dataset[Any], originals: tuple[Read, ...], probe: Probe) -> tuple[Cut | None, tuple[Read, ...]]:
    """The cut before the first random step, None if all are deterministic; and the reads of the deterministic part.

    Raises:
        UncuttableError: the cut would not be sound.
    """
    transform = transform_of(source)
    steps = steps_of(transform)
    recorder = _Recorder(source, transform, len(steps), probe)
    position = min(_first_random(recorder, original.index) for original in originals)
    if position == len(steps) and not draws_by_itself(transform):
        raise UncuttableError("no step of its transform is random by itself")
    recorder, heads, cuts = _Recorder(source, transform, position, probe), [], set()
    for original in originals:
        kept, _ = recorder.read(original.index, 2 * original.index + 1)  # the tail may work on the other one in place
        once, calls = recorder.read(original.index, 2 * original.index)  # the seed under which `original` was read
        if found := sign(once, kept):
            raise UncuttableError(f"its dataset is random outside the transform ({found})")
        heads.append(kept)
        if position == len(steps):
            if once.bits != original.bits:
                raise UncuttableError("its steps do not give its samples again, run one by one")
            continue
        free = list(walk(once.sample))
        cuts.add(cut := Cut(position, tuple(_places(call, free) for call in calls)))
        if len(cuts) > 1:
            raise UncuttableError("its transform is not called in the same way for every sample")
        whole = Tail(transform, position, cut.places)(once.sample)
        if probe.generators.moved(original.after) or bits(whole) != original.bits:
            raise UncuttableError(
                f"the steps from {step_name(steps[position])} on, run after the dataset, do not give its sample again "
                "under the same seed (does a sample need their result?)"
            )
    return next(iter(cuts), None), tuple(heads)


def _first_random(recorder: _Recorder, index: int) -> int:
    """The position of the first random step for one sample, the number of steps if none is."""
    (_, once), (_, again) = (recorder.read(index, 2 * index + number) for number in (0, 1))
    if not once:
        raise UncuttableError("its transform is not called when a sample is read")
    pairs = (enumerate(zip(left.steps, right.steps, strict=True)) for left, right in zip(once, again, strict=False))
    random = (position for steps in pairs for position, (a, b) in steps if a != b or a[1])
    return min(random, default=len(recorder.steps))


def _places(call: _Call, free: list[tuple[Path, Any]]) -> Places:
    """Where in the sample a call's values lie, by identity. An object that two calls returned lies twice."""
    places: list[tuple[int | str, Path]] = []
    for key, value in call.values.items():
        number = next((k for k, (_, node) in enumerate(free) if node is value), None)
        if number is not None:
            places.append((key, free.pop(number)[0]))
        elif isinstance(key, int):
            raise UncuttableError(_NOT_HELD)
    if not places:
        raise UncuttableError(_NOT_HELD)
    return tuple(places)

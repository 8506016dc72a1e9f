"""The deterministic and the random part of a source.

A cache freezes what it stores, and most random augmentation sits inside the user's dataset. `split` finds it:

1. A few indices are read twice, under different seeds of every process-wide generator (torch, CUDA if it runs, NumPy,
   Python). The source is deterministic if the bits are equal and no generator has moved, neither these nor one that can
   be reached from the source (RandomErasing(p=0.1) seldom changes bits, but always draws).
2. Otherwise a shallow copy of the dataset, through any depth of Subset, gets a `transform` that runs its steps one by
   one and notes each one's bits and draws. The earliest random step over all probed samples is the cut.
3. A second copy runs only the steps before the cut. Where their output lies in the sample is found by identity; the
   tail applies the other steps there, in the order of the calls. Position and places are the `Cut`: small, so that
   ranks which read nothing cut their own source in the same way.
4. Nothing is believed unproven: under one seed, `tail(copy[i])` must give the bits of `source[i]` and leave the
   generators in the same state, and the copy must be deterministic by the test of step 1.

The user's objects are not modified, and the generators end where they began, also when the source raises. Not promised:
that a source is found out which is random in few samples only, and draws from what no look can find.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.source.generators import Generators, watch_entropy
from lightning_stocache.source.probe import Probe, Read, sign
from lightning_stocache.source.samples import Bits, Path, bits, walk
from lightning_stocache.source.transform_split import (
    Cut,
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

__all__ = ["Split", "split", "spread"]

QUICK_SECONDS = 0.2
_SLOW_SECONDS = 20.0  # after which two indices have to do


@dataclass(frozen=True)
class Split:
    """A source and what `split` found in it.

    Args:
        source: What is cached: the user's own object if it is deterministic or cannot be split, else a shallow copy
            whose transform ends before its first random step.
        tail: The random rest, applied to a sample after the cache; None if nothing is random.
        cut: Where it was cut, for other processes; None if it was not.
        indices: The probed indices, 0 first.
        samples: What `source` returned for them.
        reads: How many times the user's dataset was read.
        reason: None, or why a random source cannot be cached: what moved, and why it is not split.
        bits: Those of the samples when they were read.
    """

    source: Dataset[Any]
    tail: Callable[[Any], Any] | None
    cut: Cut | None
    indices: tuple[int, ...]
    samples: tuple[Any, ...]
    reads: int
    reason: str | None
    bits: tuple[Bits, ...] = ()

    @property
    def intact(self) -> dict[int, Any]:
        """The samples by index, but those into whose memory the source has read another one since."""
        read = zip(self.indices, self.samples, self.bits, strict=True)
        return {index: sample for index, sample, before in read if bits(sample) == before}


def split(
    source: Dataset[Any],
    *,
    samples: int = 4,
    quick: int = 0,
    told: Callable[[int], None] | None = None,
    domain: Domain | None = None,
) -> Split:
    """Split a source into what is the same on every read and the random rest.

    Args:
        source: A map-style dataset with at least one sample.
        samples: How many indices to probe, spread evenly from index 0 to the last. A deterministic source is read twice
            per index, a random one up to six times. Raise it for sources that are random in few samples only. Where
            two take more than 20 s, they have to do.
        quick: How many more to probe, as long as all of it takes less than 0.2 s; what raises is left out.
        told: Called with each index before it is read.
        domain: Which indices may be read; by default all.

    Raises:
        ValueError: If `source` is empty or `samples` is below 1. What the source itself raises comes through unchanged.

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
    with Probe(source, spread(length, samples, domain), told) as probe, watch_entropy():
        return _split(source, probe, spread(length, quick + 2, domain)[1:-1] if quick else ())


def spread(length: int, count: int, domain: Domain | None = None) -> tuple[int, ...]:
    """So many indices of a dataset, or of its domain, evenly from the first to the last."""
    among = range(length) if domain is None else domain.indices
    count = min(count, len(among))
    return tuple(int(among[k * (len(among) - 1) // max(count - 1, 1)]) for k in range(count))


def _split(source: Dataset[Any], probe: Probe, quick: tuple[int, ...]) -> Split:
    pairs = list(_pairs(source, probe, quick))
    probe.indices = tuple(first.index for first, _ in pairs)
    found, as_read = tuple(second.sample for _, second in pairs), tuple(second.bits for _, second in pairs)
    moved = next(filter(None, (sign(*pair) for pair in pairs)), None)
    if moved is None:
        return Split(source, None, None, probe.indices, found, probe.reads, None, as_read)
    originals = [first for first, _ in pairs]
    try:
        transform = transform_of(source)
        position = min(_first_random(source, transform, index, probe) for index in probe.indices)
        if position == len(steps_of(transform)):
            if not draws_by_itself(transform):
                raise UncuttableError("no step of its transform is random by itself")
            for original, once, *_ in _heads(source, transform, position, originals, probe):
                if once.bits != original.bits:
                    raise UncuttableError("its steps do not give its samples again, run one by one")
            return Split(source, None, None, probe.indices, found, probe.reads, None, as_read)
        cut, heads = _cut(source, transform, position, originals, probe)
        part, tail = cut.apply(source)
    except UncuttableError as error:
        why = str(error)
    except Exception as error:  # user code on a changed dataset may raise anything; the source as it is did not
        why = f"without its random steps it raised {error!r}"
    else:
        samples = tuple(head.sample for head in heads)
        return Split(part, tail, cut, probe.indices, samples, probe.reads, None, tuple(head.bits for head in heads))
    reason = f"it is random ({moved}) and cannot be split: {why}"
    return Split(source, None, None, probe.indices, found, probe.reads, reason)


def _pairs(source: Dataset[Any], probe: Probe, quick: tuple[int, ...]) -> Iterator[tuple[Read, Read]]:
    """Two reads of each index that is to be probed, and of more as long as that is quick and nothing is random.

    An index that raises is passed over, unless all do: it may be one that no sampler asks for.
    """
    begin, seen, failure = time.perf_counter(), 0, None
    for index in (*probe.indices, *(index for index in quick if index not in probe.indices)):
        first = index in probe.indices
        if failure is not None and not (first or seen):
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


class _Recorder(Part):
    """The first steps of a transform, which notes per call the values and each step's bits and whether it drew."""

    def __init__(self, transform: Callable[..., Any], end: int, generators: Generators) -> None:
        super().__init__(transform, 0, end)
        self.parts = [Part(transform, position, position + 1) for position in range(end)]
        self.generators = generators
        self.calls: list[_Call] = []

    def run(self, values: Values) -> Values:
        if len(set(map(type, values))) != 1:
            raise UncuttableError("its transform is called with values and keywords at once")
        notes = []
        for part in self.parts:
            before = self.generators.state()
            values = part.run(values)
            notes.append((bits(values), bool(self.generators.moved(before))))
        self.calls.append(_Call(values, notes))
        return values


@dataclass(frozen=True)
class _Call:
    """A call of a transform: what it returned, by position or keyword, and each step's bits and whether it drew."""

    values: Values
    notes: list[tuple[Bits, bool]]


def _cut(
    source: Dataset[Any], transform: Callable[..., Any], position: int, originals: list[Read], probe: Probe
) -> tuple[Cut, tuple[Read, ...]]:
    """The cut before a step, and the reads of the deterministic part; UncuttableError if it is not sound."""
    first = step_name(steps_of(transform)[position])
    heads, cuts = [], set()
    for original, once, kept, calls in _heads(source, transform, position, originals, probe):
        free = list(walk(once.sample))
        cuts.add(Cut(position, tuple(_places(call, free) for call in calls)))
        if len(cuts) > 1:
            raise UncuttableError("its transform is not called in the same way for every sample")
        whole = Tail(transform, position, next(iter(cuts)).places)(once.sample)
        if probe.generators.moved(original.after) or bits(whole) != original.bits:
            raise UncuttableError(
                f"the steps from {first} on, run after the dataset, do not give its sample again under "
                "the same seed (does a sample need their result?)"
            )
        heads.append(kept)
    return cuts.pop(), tuple(heads)


def _heads(
    source: Dataset[Any], transform: Callable[..., Any], position: int, originals: list[Read], probe: Probe
) -> Iterator[tuple[Read, Read, Read, list[_Call]]]:
    """Each original, a read under its seed without the random steps, one whose sample is kept, and the calls."""
    recorder = _Recorder(transform, position, probe.generators)
    part = with_transform(source, recorder)
    for original in originals:
        kept = probe.read(part, original.index, 2 * original.index + 1)  # the tail may work on the other one in place
        recorder.calls.clear()
        once = probe.read(part, original.index, 2 * original.index)  # the seed under which `original` was read
        if found := sign(once, kept):
            raise UncuttableError(f"its dataset is random outside the transform ({found})")
        yield original, once, kept, recorder.calls.copy()


def _first_random(source: Dataset[Any], transform: Callable[..., Any], index: int, probe: Probe) -> int:
    """The position of the first random step for one sample, the number of steps if none is."""
    steps = len(steps_of(transform))
    recorder = _Recorder(transform, steps, probe.generators)
    probe.read(with_transform(source, recorder), index, 2 * index)
    once = recorder.calls.copy()
    recorder.calls.clear()
    probe.read(with_transform(source, recorder), index, 2 * index + 1)
    if not once:
        raise UncuttableError("its transform is not called when a sample is read")
    firsts = [steps]
    for left, right in zip(once, recorder.calls, strict=False):
        for position, (a, b) in enumerate(zip(left.notes, right.notes, strict=True)):
            if a != b or a[1]:
                firsts.append(position)
                break
    return min(firsts)


def _places(call: _Call, free: list[tuple[Path, Any]]) -> Places:
    """Where in the sample a call's values lie, by identity. An object that two calls returned lies twice."""
    places: list[tuple[int | str, Path]] = []
    for key, value in call.values.items():
        number = next((k for k, (_, node) in enumerate(free) if node is value), None)
        if number is not None:
            places.append((key, free.pop(number)[0]))
        elif isinstance(key, int):
            raise UncuttableError("the sample does not hold what its transform returns, but something made of it")
    if not places:
        raise UncuttableError("the sample does not hold what its transform returns, but something made of it")
    return tuple(places)

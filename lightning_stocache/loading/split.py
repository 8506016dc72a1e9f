"""The deterministic and the random part of a source.

A cache freezes what it stores, and most random augmentation sits inside the user's dataset. `split` finds it:

1. A few indices are read twice, under different seeds of every process-wide generator (torch, CUDA if it runs, NumPy,
   Python). The source is deterministic if the bits are equal and no generator moved (RandomErasing(p=0.1) seldom
   changes bits, but always draws).
2. Otherwise a shallow copy of the dataset, through any depth of Subset, gets a `transform` that runs its steps one by
   one and notes each one's bits and draws. The earliest random step over all probed samples is the cut.
3. A second copy runs only the steps before the cut. Where their output lies in the sample is found by identity; the
   tail applies the other steps there, in the order of the calls. Position and places are the `Cut`: small, so that
   ranks which read nothing cut their own source in the same way.
4. Nothing is believed unproven: under one seed, `tail(copy[i])` must give the bits of `source[i]` and leave the
   generators in the same state, and the copy must be deterministic by the test of step 1.

The user's objects are not modified, and the generators end where they began, also when the source raises. Not promised:
a generator that belongs to the source is moved by the reads, and one that rarely changes a sample may go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

from torch.utils.data import Dataset

from lightning_stocache.loading.cut import (
    Cut,
    Steps,
    Tail,
    UncuttableError,
    run_step,
    step_name,
    steps_of,
    transform_of,
    with_transform,
)
from lightning_stocache.loading.probe import Generators, Path, Probe, Read, bits, is_pil, sign, walk

__all__ = ["Split", "split"]

_BY_HAND = (
    "To split it by hand, keep what is the same every time (read, decode, resize) in the dataset, "
    "and pass the random rest as `transform=`, which runs after the cache."
)


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
        reason: None, or why a random source cannot be split: what moved, and what to do about it.
    """

    source: Dataset[Any]
    tail: Callable[[Any], Any] | None
    cut: Cut | None
    indices: tuple[int, ...]
    samples: tuple[Any, ...]
    reads: int
    reason: str | None


def split(source: Dataset[Any], *, samples: int = 4) -> Split:
    """Split a source into what is the same on every read and the random rest.

    Args:
        source: A map-style dataset with at least one sample.
        samples: How many indices to probe, spread evenly from index 0 to the last. A deterministic source is read twice
            per index, a random one up to six times. Raise it for sources that are random in few samples only.

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
    count = min(samples, length)
    probe = Probe(tuple(k * (length - 1) // max(count - 1, 1) for k in range(count)))
    try:
        pairs = [probe.read_twice(source, index) for index in probe.indices]
        found = tuple(second.sample for _, second in pairs)
        moved = next(filter(None, (sign(*pair) for pair in pairs)), None)
        if moved is None:
            return Split(source, None, None, probe.indices, found, probe.reads, None)
        try:
            cut, heads = _cut(source, [first for first, _ in pairs], probe)
            part, tail = cut.apply(source)
        except UncuttableError as error:
            why = str(error)
        except Exception as error:  # user code on a changed dataset may raise anything; the source as it is did not
            why = f"without its random steps it raised {error!r}"
        else:
            return Split(part, tail, cut, probe.indices, heads, probe.reads, None)
        reason = f"The source is random: {moved}. It is not split: {why}. {_BY_HAND}"
        return Split(source, None, None, probe.indices, found, probe.reads, reason)
    finally:
        probe.generators.restore(probe.before)


class _Recorder(Steps):
    """Steps that note, per call, the values they end with and each step's bits and whether it drew."""

    def __init__(self, steps: Sequence[Callable[..., Any]], generators: Generators) -> None:
        super().__init__(steps)
        self.generators = generators
        self.calls: list[tuple[tuple[Any, ...], list[tuple[dict[Path, Any], bool]]]] = []

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named or not values:
            raise UncuttableError(f"its transform is called with keyword arguments ({', '.join(named)})")
        notes = []
        for step in self.steps:
            before = self.generators.state()
            values = run_step(step, values)
            notes.append((bits(values), before != self.generators.state()))
        self.calls.append((values, notes))
        return values if len(values) > 1 else values[0]


def _cut(source: Dataset[Any], originals: list[Read], probe: Probe) -> tuple[Cut, tuple[Any, ...]]:
    """Where to cut, and the samples of the deterministic part; UncuttableError if there is no sound cut."""
    steps = steps_of(transform_of(source))
    position = min(_first_random(source, steps, index, probe) for index in probe.indices)
    if position == len(steps):
        raise UncuttableError("no step of its transform is random by itself")
    first, heads, cuts = step_name(steps[position]), [], set()
    for original in originals:
        recorder = _Recorder(steps[:position], probe.generators)
        part = with_transform(source, recorder)
        kept = probe.read(part, original.index, 2 * original.index + 1)  # returned: the tail below may work in place
        recorder.calls.clear()
        once = probe.read(part, original.index, 2 * original.index)  # the seed under which `original` was read
        if found := sign(once, kept):
            raise UncuttableError(f"its dataset is random outside the transform ({found})")
        outputs = [values for values, _ in recorder.calls]
        if any(is_pil(value) for values in outputs for value in values):
            raise UncuttableError(
                f"before its first random step, {first}, the transform holds a PIL image, which cannot "
                "be cached; let the steps before it end in a tensor of fixed shape, for instance by moving "
                "`v2.Resize(...)` and `v2.PILToTensor()` before it"
            )
        places = _places(outputs, once.sample)
        cuts.add(Cut(position, places))
        if len(cuts) > 1:
            raise UncuttableError("its transform is not called in the same way for every sample")
        whole = Tail(steps[position:], places)(once.sample)
        if probe.generators.state() != original.after or bits(whole) != original.bits:
            raise UncuttableError(
                f"the steps from {first} on, run after the dataset, do not give its sample again under "
                "the same seed (a generator of their own, or a sample that needs their result?)"
            )
        heads.append(kept.sample)
    return cuts.pop(), tuple(heads)


def _first_random(source: Dataset[Any], steps: list[Callable[..., Any]], index: int, probe: Probe) -> int:
    """The position of the first random step for one sample, `len(steps)` if none is."""
    recorder = _Recorder(steps, probe.generators)
    probe.read(with_transform(source, recorder), index, 2 * index)
    once = recorder.calls.copy()
    recorder.calls.clear()
    probe.read(with_transform(source, recorder), index, 2 * index + 1)
    if not once:
        raise UncuttableError("its transform is not called when a sample is read")
    firsts = [len(steps)]
    for (_, left), (_, right) in zip(once, recorder.calls, strict=False):
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            if a != b or a[1]:
                firsts.append(position)
                break
    return min(firsts)


def _places(outputs: list[tuple[Any, ...]], sample: Any) -> tuple[tuple[Path, ...], ...]:
    """Where in the sample each call's values lie, by identity. An object that two calls returned lies twice."""
    free, places = list(walk(sample)), []
    for values in outputs:
        paths: list[Path] = []
        for value in values:
            position = next((k for k, (_, node) in enumerate(free) if node is value), None)
            if position is None:
                raise UncuttableError("the sample does not hold what its transform returns, but something made of it")
            paths.append(free.pop(position)[0])
        places.append(tuple(paths))
    return tuple(places)

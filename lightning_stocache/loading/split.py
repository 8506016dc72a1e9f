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

import copy
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, Subset

Path = tuple[Any, ...]
"""Where an object lies in a sample: one key or position per level, () for the sample itself."""

_BY_HAND = (
    "To split it by hand, keep what is the same every time (read, decode, resize) in the dataset, "
    "and pass the random rest as `transform=`, which runs after the cache."
)


@dataclass(frozen=True)
class Cut:
    """Where a source is cut. Found by `split` in one process, it can be applied to the same source in another.

    Args:
        position: How many steps of the (flattened) transform stay in the source.
        places: Per call of the transform for a sample, where its values lie: one path, several if it is joint.
    """

    position: int
    places: tuple[tuple[Path, ...], ...]

    def apply(self, source: Dataset[Any]) -> tuple[Dataset[Any], Tail]:
        """The deterministic copy of `source` and the tail, without a read.

        Raises:
            ValueError: If `source` has no transform that could be cut: it is not the one that this was found in.
        """
        steps = _flat(_transform(source))
        return _with(source, Steps(steps[: self.position])), Tail(steps[self.position :], self.places)


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
    probe = _Probe(tuple(k * (length - 1) // max(count - 1, 1) for k in range(count)))
    try:
        pairs = [probe.read_twice(source, index) for index in probe.indices]
        found = tuple(second.sample for _, second in pairs)
        sign = next(filter(None, (_sign(*pair) for pair in pairs)), None)
        if sign is None:
            return Split(source, None, None, probe.indices, found, probe.reads, None)
        try:
            cut, heads = _cut(source, [first for first, _ in pairs], probe)
            part, tail = cut.apply(source)
        except _WholeError as error:
            why = str(error)
        except Exception as error:  # user code on a changed dataset may raise anything; the source as it is did not
            why = f"without its random steps it raised {error!r}"
        else:
            return Split(part, tail, cut, probe.indices, heads, probe.reads, None)
        reason = f"The source is random: {sign}. It is not split: {why}. {_BY_HAND}"
        return Split(source, None, None, probe.indices, found, probe.reads, reason)
    finally:
        probe.generators.restore(probe.before)


class Steps:
    """Some steps of a transform, called as a torchvision Compose is: one value in and out, or several in and out."""

    def __init__(self, steps: Sequence[Callable[..., Any]]) -> None:
        self.steps = list(steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(_name, self.steps))})"

    def __call__(self, *values: Any) -> Any:
        """Run the steps. Several values come back as a tuple."""
        for step in self.steps:
            values = _step(step, values)
        return values if len(values) > 1 else values[0]


class Tail(Steps):
    """The random steps, applied to those objects of a sample that the head made. The given sample keeps its containers.

    Args:
        steps: The steps from the first random one on.
        places: Where they work, as `Cut` has it.
    """

    def __init__(self, steps: Sequence[Callable[..., Any]], places: Sequence[Sequence[Path]]) -> None:
        super().__init__(steps)
        self.places = places

    def __call__(self, sample: Any) -> Any:
        """Finish a sample of the split source."""
        for paths in self.places:
            values = super().__call__(*(_get(sample, path) for path in paths))
            for path, value in zip(paths, values if len(paths) > 1 else (values,), strict=True):
                sample = _put(sample, path, value)
        return sample


class _WholeError(ValueError):
    """The source cannot be split; the message says why."""


class _Generators:
    """The process-wide generators. A state is a dict of values that `==` compares."""

    def __init__(self) -> None:
        # Looked at once: a generator that is born during the probe has no state to return to.
        self._cuda = bool(cast(Any, torch.cuda).is_initialized())

    def state(self) -> dict[str, Any]:
        state = {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "numpy.random": pickle.dumps(np.random.get_state(legacy=False)),
            "random": random.getstate(),
        }
        if self._cuda:
            state["torch.cuda"] = [one.numpy().tobytes() for one in torch.cuda.get_rng_state_all()]
        return state

    def restore(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(_as_tensor(state["torch"]))
        np.random.set_state(pickle.loads(state["numpy.random"]))
        random.setstate(state["random"])
        if self._cuda:
            torch.cuda.set_rng_state_all([_as_tensor(one) for one in state["torch.cuda"]])

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would queue the seed for a CUDA that starts later
        np.random.seed(seed)
        random.seed(seed)
        if self._cuda:
            torch.cuda.manual_seed_all(seed)


@dataclass(frozen=True)
class _Read:
    index: int
    sample: Any
    bits: dict[Path, Any]
    before: dict[str, Any]
    after: dict[str, Any]


class _Probe:
    """Reads under given seeds, and counts them."""

    def __init__(self, indices: tuple[int, ...]) -> None:
        self.indices = indices
        self.generators = _Generators()
        self.before = self.generators.state()
        self.reads = 0

    def read(self, source: Dataset[Any], index: int, seed: int) -> _Read:
        self.generators.seed(seed)
        before = self.generators.state()
        self.reads += 1
        sample = source[index]
        return _Read(index, sample, _bits(sample), before, self.generators.state())

    def read_twice(self, source: Dataset[Any], index: int) -> tuple[_Read, _Read]:
        return self.read(source, index, 2 * index), self.read(source, index, 2 * index + 1)


class _Recorder(Steps):
    """Steps that note, per call, the values they end with and each step's bits and whether it drew."""

    def __init__(self, steps: Sequence[Callable[..., Any]], generators: _Generators) -> None:
        super().__init__(steps)
        self.generators = generators
        self.calls: list[tuple[tuple[Any, ...], list[tuple[dict[Path, Any], bool]]]] = []

    def __call__(self, *values: Any, **named: Any) -> Any:
        if named or not values:
            raise _WholeError(f"its transform is called with keyword arguments ({', '.join(named)})")
        notes = []
        for step in self.steps:
            before = self.generators.state()
            values = _step(step, values)
            notes.append((_bits(values), before != self.generators.state()))
        self.calls.append((values, notes))
        return values if len(values) > 1 else values[0]


def _cut(source: Dataset[Any], originals: list[_Read], probe: _Probe) -> tuple[Cut, tuple[Any, ...]]:
    """Where to cut, and the samples of the deterministic part; _WholeError if there is no sound cut."""
    steps = _flat(_transform(source))
    position = min(_first_random(source, steps, index, probe) for index in probe.indices)
    if position == len(steps):
        raise _WholeError("no step of its transform is random by itself")
    first, heads, cuts = _name(steps[position]), [], set()
    for original in originals:
        recorder = _Recorder(steps[:position], probe.generators)
        part = _with(source, recorder)
        kept = probe.read(part, original.index, 2 * original.index + 1)  # returned: the tail below may work in place
        recorder.calls.clear()
        once = probe.read(part, original.index, 2 * original.index)  # the seed under which `original` was read
        if sign := _sign(once, kept):
            raise _WholeError(f"its dataset is random outside the transform ({sign})")
        outputs = [values for values, _ in recorder.calls]
        if any(_is_pil(value) for values in outputs for value in values):
            raise _WholeError(
                f"before its first random step, {first}, the transform holds a PIL image, which cannot "
                "be cached; let the steps before it end in a tensor of fixed shape, for instance by moving "
                "`v2.Resize(...)` and `v2.PILToTensor()` before it"
            )
        places = _places(outputs, once.sample)
        cuts.add(Cut(position, places))
        if len(cuts) > 1:
            raise _WholeError("its transform is not called in the same way for every sample")
        whole = Tail(steps[position:], places)(once.sample)
        if probe.generators.state() != original.after or _bits(whole) != original.bits:
            raise _WholeError(
                f"the steps from {first} on, run after the dataset, do not give its sample again under "
                "the same seed (a generator of their own, or a sample that needs their result?)"
            )
        heads.append(kept.sample)
    return cuts.pop(), tuple(heads)


def _first_random(source: Dataset[Any], steps: list[Callable[..., Any]], index: int, probe: _Probe) -> int:
    """The position of the first random step for one sample, `len(steps)` if none is."""
    recorder = _Recorder(steps, probe.generators)
    probe.read(_with(source, recorder), index, 2 * index)
    once = recorder.calls.copy()
    recorder.calls.clear()
    probe.read(_with(source, recorder), index, 2 * index + 1)
    if not once:
        raise _WholeError("its transform is not called when a sample is read")
    firsts = [len(steps)]
    for (_, left), (_, right) in zip(once, recorder.calls, strict=False):
        for position, (a, b) in enumerate(zip(left, right, strict=True)):
            if a != b or a[1]:
                firsts.append(position)
                break
    return min(firsts)


def _attribute(dataset: Dataset[Any]) -> str | None:
    """The attribute that holds the dataset's own transform; `transforms` is a joint one of image and target."""
    return next((name for name in ("transform", "transforms") if callable(getattr(dataset, name, None))), None)


def _transform(dataset: Dataset[Any]) -> Callable[..., Any]:
    """The transform of a dataset, or of what is inside its Subsets."""
    if name := _attribute(dataset):
        return cast(Callable[..., Any], getattr(dataset, name))
    if isinstance(dataset, Subset):
        return _transform(dataset.dataset)
    raise _WholeError(f"{type(dataset).__name__} has no `transform` or `transforms` that could be cut")


def _with(dataset: Dataset[Any], transform: Callable[..., Any]) -> Dataset[Any]:
    """A shallow copy with another transform, and of the Subsets around it."""
    clone: Any = copy.copy(dataset)
    name = _attribute(dataset)
    if name is None:
        clone.dataset = _with(clone.dataset, transform)
        return cast(Dataset[Any], clone)
    joint = getattr(clone, "transforms", None)
    if name == "transform" and joint is not None and getattr(joint, "transform", None) is clone.transform:
        # VisionDataset calls this one, a StandardTransform that holds the transform once more.
        clone.transforms = copy.copy(joint)
        clone.transforms.transform = transform
    setattr(clone, name, transform)
    return cast(Dataset[Any], clone)


def _flat(transform: Callable[..., Any]) -> list[Callable[..., Any]]:
    """The steps of nested Composes and Sequentials. A subclass that runs its steps in its own way is one step."""
    modules = (sys.modules.get(name) for name in ("torchvision.transforms", "torchvision.transforms.v2"))
    kinds = [nn.Sequential, *(module.Compose for module in modules if module is not None)]
    for kind in kinds:
        same = (getattr(type(transform), way, 0) is getattr(kind, way, 0) for way in ("__call__", "forward"))
        if isinstance(transform, kind) and all(same):
            steps = transform if isinstance(transform, nn.Sequential) else transform.transforms
            return [inner for step in steps for inner in _flat(step)]
    return [transform]


def _step(step: Callable[..., Any], values: tuple[Any, ...]) -> tuple[Any, ...]:
    result = step(*values)
    return tuple(result) if len(values) > 1 else (result,)


def _name(step: Any) -> str:
    return str(getattr(step, "__name__", type(step).__name__))


def _places(outputs: list[tuple[Any, ...]], sample: Any) -> tuple[tuple[Path, ...], ...]:
    """Where in the sample each call's values lie, by identity. An object that two calls returned lies twice."""
    free, places = list(_walk(sample)), []
    for values in outputs:
        paths: list[Path] = []
        for value in values:
            position = next((k for k, (_, node) in enumerate(free) if node is value), None)
            if position is None:
                raise _WholeError("the sample does not hold what its transform returns, but something made of it")
            paths.append(free.pop(position)[0])
        places.append(tuple(paths))
    return tuple(places)


def _walk(node: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Every container and leaf of a sample with its path."""
    yield path, node
    if isinstance(node, Mapping):
        for key in node:
            yield from _walk(node[key], (*path, key))
    elif isinstance(node, (list, tuple)):
        for position, inner in enumerate(node):
            yield from _walk(inner, (*path, position))


def _get(sample: Any, path: Path) -> Any:
    for key in path:
        sample = sample[key]
    return sample


def _put(node: Any, path: Path, value: Any) -> Any:
    """The sample with another object at `path`; containers on the way are copied."""
    if not path:
        return value
    key, value = path[0], _put(node[path[0]], path[1:], value)
    if isinstance(node, tuple):
        items = (*node[:key], value, *node[key + 1 :])
        return type(node)(*items) if hasattr(node, "_fields") else type(node)(items)
    node = copy.copy(node)
    node[key] = value
    return node


def _bits(sample: Any) -> dict[Path, Any]:
    """A sample as values that `==` compares bit for bit, by path; copies, which no later read can overwrite."""
    return {path: _leaf_bits(node) for path, node in _walk(sample)}


def _leaf_bits(node: Any) -> Any:
    kind: Any = type(node)
    if isinstance(node, Mapping):
        return kind, tuple(node)
    if isinstance(node, (list, tuple)):
        return kind, len(node)
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or node.is_meta or node.is_nested or node.is_quantized:
            return kind, node.dtype, node.layout  # no plain bytes; a cache refuses these anyway
        plain = node.as_subclass(torch.Tensor).detach()
        flat = plain.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
        return kind, plain.dtype, tuple(plain.shape), flat.view(torch.uint8).numpy().tobytes(), _bits(vars(node))
    if isinstance(node, (np.ndarray, np.generic, float, complex)):  # by bits: NaN equals itself, 0.0 is not -0.0
        array = np.asarray(node)
        return kind, array.dtype, array.shape, _bits(array.tolist()) if array.dtype.hasobject else array.tobytes()
    if _is_pil(node):
        return kind, node.mode, node.size, node.getpalette(), node.tobytes()
    # Other objects by their own ==, if they have one and are safe to keep; of the rest only the type can be compared.
    return (kind, node) if kind.__eq__ is not object.__eq__ and kind.__hash__ is not None else kind


def _is_pil(node: Any) -> bool:
    module = sys.modules.get("PIL.Image")  # never imported: then nobody made one
    return module is not None and isinstance(node, module.Image)


def _as_tensor(state: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(state), dtype=torch.uint8)


def _sign(first: _Read, second: _Read) -> str | None:
    """What shows that two reads of an index are random, in words; None if nothing does."""
    for read in (first, second):
        if moved := [name for name in read.before if read.before[name] != read.after[name]]:
            return f"reading index {read.index} moves the generator of {' and '.join(moved)}"
    for path in {**first.bits, **second.bits}:
        if path not in first.bits or first.bits[path] != second.bits.get(path):
            where = "".join(f"[{key!r}]" for key in path)
            return f"two reads of index {first.index} differ in sample{where}"
    return None

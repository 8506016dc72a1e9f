"""A CachedLoader beside the DataLoader that it must equal, run in the same way and compared, and covering designs."""

import collections
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchvision import tv_tensors

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader

__all__ = [
    "SAMPLERS",
    "SHARES",
    "STRUCTURES",
    "Faulty",
    "InBatches",
    "Jitter",
    "LazySampler",
    "Numbers",
    "UnequalBatches",
    "assert_as_plain",
    "copied",
    "outcomes",
    "pairwise",
    "same",
    "seed_all",
    "to_float",
    "totals",
    "uncached",
    "unchanged",
    "with_batches",
]


# ---- sources and transforms ----


class Numbers(Dataset[Any]):
    """Samples `(uint8 tensor, label)` that follow from their index, which may not lie outside."""

    def __init__(self, length: int, shape: tuple[int, ...] = (3, 5, 7)) -> None:
        self.length, self.shape = length, shape

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} samples")
        index %= self.length
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator), index


class Faulty(Numbers):
    """Numbers of which some cannot be loaded, with an error for each."""

    def __init__(self, length: int, bad: dict[int, Exception]) -> None:
        super().__init__(length)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise self.bad[index]
        return super().__getitem__(index)


class InBatches(Dataset[Any]):
    """A source that loads whole batches, over another."""

    def __init__(self, source: Dataset[Any]) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.source[index] for index in indices]


class _Transformed(Dataset[Any]):
    def __init__(self, source: Dataset[Any], transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source[index])


class _TransformedInBatches(_Transformed):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(self.transform, self.source.__getitems__(indices)))  # type: ignore[attr-defined]


def uncached(source: Dataset[Any], transform: Callable[[Any], Any] | None) -> Dataset[Any]:
    """A source and a transform, without any cache."""
    if transform is None:
        return source
    in_batches = hasattr(source, "__getitems__") and not isinstance(source, Subset)  # which loads one by one here
    return (_TransformedInBatches if in_batches else _Transformed)(source, transform)


class Jitter:
    """A transform that draws from the generator that its name says."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, sample: Any) -> Any:
        draw = {"torch": lambda: float(torch.rand(())), "numpy": np.random.rand, "random": random.random}[self.name]
        return sample[0].float() / 255 + draw(), sample[1]


def to_float(sample: Any) -> Any:
    """A transform that makes another sample."""
    image, label = sample
    return image.float() / 255, label


def unchanged(sample: Any) -> Any:
    """A transform that makes none."""
    return sample


# ---- samplers ----


class LazySampler(Sampler[int]):
    """Draws every index from the global generator, when it is asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Any:
        for _ in range(self.length):
            yield int(torch.randint(0, self.length, ()))


class UnequalBatches:
    """A batch sampler without a length, whose batches have 1 to 9 samples, drawn when they are asked for."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Any:
        order = torch.randperm(self.length).tolist()
        while order:
            size = int(torch.randint(1, 10, ()))
            yield order[:size]
            order = order[size:]


class _Shuffled(Sampler[int]):
    """An order from a generator of the user's, or a process-wide one, drawn when it is asked for it."""

    def __init__(self, indices: Sequence[int], generator: Any) -> None:
        self.indices, self.generator = indices, generator

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[int]:
        order = list(self.indices)
        self.generator.shuffle(order)
        return iter(order)


class _EagerBatches(_Shuffled):
    """A batch sampler that draws as soon as it is asked for an iterator."""

    def __iter__(self) -> Any:
        order = list(super().__iter__())
        return iter([order[:9], order[9:11], order[11:]])


class _LazyBatches(BatchSampler):
    """A BatchSampler that draws before every batch."""

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            torch.rand(1)
            yield batch


class _LazyDistributed(DistributedSampler[Any]):
    """A DistributedSampler with a way of its own to draw: from the global generator, when it is asked."""

    def __iter__(self) -> Iterator[int]:
        return (int(torch.randint(0, len(self.dataset), ())) for _ in range(self.num_samples))  # type: ignore[arg-type]


class _OwnRandomSampler(RandomSampler):
    """A subclass of a sampler that is known."""


SAMPLERS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sequential": lambda indices: {},
    "shuffle": lambda indices: {"shuffle": True},
    "a generator": lambda indices: {"shuffle": True, "generator": torch.Generator().manual_seed(3)},
    "replacement": lambda indices: {"sampler": RandomSampler(indices, replacement=True, num_samples=40)},
    "oversampled": lambda indices: {"sampler": RandomSampler(indices, num_samples=83)},
    "a shared generator": lambda indices: {"sampler": RandomSampler(indices, generator=torch.default_generator)},
    "a subclass": lambda indices: {"sampler": _OwnRandomSampler(indices)},
    "subset": lambda indices: {"sampler": SubsetRandomSampler(indices[::2])},
    "weighted": lambda indices: {"sampler": WeightedRandomSampler([1.0] * len(indices), 30)},
    "distributed": lambda indices: {"sampler": DistributedSampler(indices, 2, 1, seed=5)},
    "lazy distributed": lambda indices: {"sampler": _LazyDistributed(indices, 2, 0)},
    "lazy": lambda indices: {"sampler": LazySampler(len(indices))},
    "own generator": lambda indices: {"sampler": _Shuffled(indices, random.Random(4))},
    "Python's generator": lambda indices: {"sampler": _Shuffled(indices, random)},
    "NumPy's generator": lambda indices: {"sampler": _Shuffled(indices, np.random)},
    "a list": lambda indices: {"sampler": list(indices[::2])},
    "batches": lambda indices: {"batch_sampler": BatchSampler(RandomSampler(indices), 4, True)},
    "batches, a generator": lambda indices: {
        "batch_sampler": BatchSampler(RandomSampler(indices, generator=torch.Generator().manual_seed(2)), 3, True)
    },
    "batches, lazy": lambda indices: {"batch_sampler": BatchSampler(LazySampler(len(indices)), 3, False)},
    "bare batches": lambda indices: {"batch_sampler": BatchSampler(indices, 6, True)},
    "lazy batches": lambda indices: {"batch_sampler": _LazyBatches(SequentialSampler(indices), 3, False)},
    "eager batches": lambda indices: {"batch_sampler": _EagerBatches(indices, random)},
    "unequal batches": lambda indices: {"batch_sampler": UnequalBatches(len(indices))},
    "a list of lists": lambda indices: {"batch_sampler": [[1, 2], [3], [4, 5, 6]]},
    "no batches": lambda indices: {"shuffle": True, "batch_size": None},
}
"""The arguments of a loader for each way to draw indices, with samplers of their own."""


def with_batches(arguments: dict[str, Any], **batches: Any) -> dict[str, Any]:
    """The arguments of a loader, with these for its batches if they say nothing about them."""
    return arguments if {"batch_sampler", "batch_size"} & arguments.keys() else arguments | batches


# ---- runs ----


def seed_all() -> None:
    """Seed the process-wide generators."""
    torch.manual_seed(3), np.random.seed(3), random.seed(3)  # type: ignore[func-returns-value]


def totals(dataset: Any) -> Any:
    """What has been counted of a cache that is open."""
    return dataset.counters.totals()


SHARES: dict[str, int | str] = {"off": 0, "quarter": "25%", "all": "auto", "warm": "auto"}
"""Budgets; with the last one, all samples are in the cache before the first epoch."""

Run: TypeAlias = tuple[Any, Callable[[], dict[str, Any]]]
"""The class of a loader, and what makes its arguments, with samplers of their own."""


def assert_as_plain(
    source: Any,
    runs: Sequence[Run],
    shares: Iterable[str] = ("off", "quarter", "all"),
    *,
    transform: Callable[[Any], Any] | None = None,
    spec: Any = None,
) -> None:
    """Three epochs of a cached dataset, the second broken off, equal DataLoader's in batches and generators.

    The states of all generators are compared after each batch.

    Args:
        source: the dataset.
        runs: the loaders, one after the other over the same cache.
        shares: names of `SHARES`; each is compared.
        transform: runs after the cache.
        spec: what samples look like, for a cache that opens in no time.
    """
    plain, expected = uncached(source, transform), list[Any]()
    for _, arguments in runs:
        seed_all()
        expected.append(_run(DataLoader(plain, **arguments())))
    for share in shares:
        with closing(CachedDataset(source, SHARES[share], transform=transform, spec=spec)) as dataset:
            if share == "warm":
                dataset.__getitems__(list(range(len(source))))
            for (kind, arguments), batches in zip(runs, expected, strict=True):
                seed_all()
                loader = kind(dataset, **arguments())
                got = _run(loader)
                assert len(got) == len(batches), share
                for number, (one, other) in enumerate(zip(got, batches, strict=True)):
                    assert same(one, other), f"{share}: batch {number} or a generator's state after it differs"
                if kind is CachedLoader:
                    loader.close()
            counts, cache = totals(dataset), dataset.cache
            assert counts.fills == (0 if cache is None else cache.filled)
            assert counts.hits or cache is None or share == "quarter" or not got  # a sampler may draw none of a quarter


def _run(loader: DataLoader[Any]) -> list[Any]:
    """The batches of three epochs, the second broken off, each with the states of all generators after it.

    The consumer draws between batches.
    """
    seen: list[Any] = []
    for epoch, stop in enumerate((None, 2, None)):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            own = None if loader.generator is None else loader.generator.get_state()
            seen.append((copied(batch), torch.get_rng_state(), own, _numpy_state(), hash(random.getstate())))
            torch.rand(1)
            if number == stop:
                break
    return seen


def outcomes(loader: Any) -> Iterator[Any]:
    """The batches of an epoch, and errors in the place of some; the iteration goes on after each."""
    try:
        batches = iter(loader)
    except Exception as error:
        yield error
        return
    while True:
        try:
            batch = copied(next(batches))
        except StopIteration:
            return
        except Exception as error:
            yield error
        else:
            yield batch


def _numpy_state() -> tuple[bytes, int]:
    state: Any = np.random.get_state()
    return state[1].tobytes(), state[2]


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""
    if isinstance(batch, torch.Tensor):
        return batch.clone()
    if isinstance(batch, dict):
        return type(batch)((key, copied(value)) for key, value in batch.items())
    if isinstance(batch, tuple | list):
        values = [copied(value) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch


def same(one: Any, other: Any) -> bool:
    """Whether two batches, or two runs, are equal in structure, types, dtypes, shapes and every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(_bits(one), _bits(other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which every two values of different factors meet (greedy, the same in every run)."""
    names = list(factors)
    wanted = {
        ((one, a), (other, b))
        for one, other in itertools.combinations(names, 2)
        for a in range(len(factors[one]))
        for b in range(len(factors[other]))
    }
    dice = random.Random(0)
    chosen: list[dict[str, Any]] = []

    def met(places: dict[str, int]) -> set[Any]:
        return {((one, places[one]), (other, places[other])) for one, other in itertools.combinations(names, 2)}

    while wanted:
        first = dict(min(wanted))
        tries = [{name: first.get(name, dice.randrange(len(factors[name]))) for name in names} for _ in range(60)]
        best = max(tries, key=lambda places: len(met(places) & wanted))
        wanted -= met(best)
        chosen.append({name: factors[name][place] for name, place in best.items()})
    return chosen


Pair = collections.namedtuple("Pair", "image label")

STRUCTURES: dict[str, Callable[[int], Any]] = {
    "a tensor": lambda i: torch.full((2, 3), float(i)),
    "a list": lambda i: [torch.tensor([i, -i]), i],
    "a dict": lambda i: {"label": i, "image": torch.full((3,), i, dtype=torch.uint8)},
    "an OrderedDict": lambda i: collections.OrderedDict(b=torch.tensor(i), a=float(i)),
    "a namedtuple": lambda i: Pair(torch.tensor([i], dtype=torch.int16), i),
    "nested": lambda i: {"pair": Pair([torch.tensor([i])], (i, {"deep": torch.tensor([i * 0.5])})), "one": (i,)},
    "arrays": lambda i: (np.full((2, 2), i, dtype=np.float32), np.array(i), np.arange(3, dtype=np.int16) + i),
    "scalars": lambda i: (i, float(i), i % 2 == 0, np.float32(i), np.int64(i), torch.tensor(i % 3 == 0)),
    "half precision": lambda i: (torch.full((5,), i, dtype=torch.bfloat16), torch.full((3,), i, dtype=torch.half)),
    "complex": lambda i: torch.tensor([complex(i, -i)]),
    "an empty field": lambda i: (torch.empty(0, 3), torch.tensor([i])),
    "odd rows": lambda i: (torch.full((3,), i, dtype=torch.uint8), torch.tensor([i, 1, 2], dtype=torch.int16)),
    "tv_tensors": lambda i: {
        "image": tv_tensors.Image(torch.full((3, 2, 2), i, dtype=torch.uint8)),
        "mask": tv_tensors.Mask(torch.full((2, 2), i % 2 == 0)),
    },
    "boxes": lambda i: tv_tensors.BoundingBoxes(torch.full((2, 4), i), format="XYXY", canvas_size=(9, 9)),
    "a bool": lambda i: i % 2 == 0,
    "a NumPy scalar": lambda i: np.float16(i),
    "empty branches": lambda i: {2: torch.tensor([i]), "a": [], "b": (i, ()), "c": {}},
    "nothing": lambda i: (),
}
"""What samples look like: a sample for each index. `nothing` has no field, and `boxes` are no row."""

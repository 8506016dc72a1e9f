"""A CachedLoader beside the DataLoader that it must equal, run in the same way and compared, and covering designs."""

import collections
import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler
from torchvision import tv_tensors

__all__ = [
    "STRUCTURES",
    "Faulty",
    "InBatches",
    "Jitter",
    "LazySampler",
    "Numbers",
    "Transformed",
    "UnequalBatches",
    "copied",
    "outcomes",
    "pairwise",
    "run",
    "same",
    "to_float",
    "totals",
    "unchanged",
]


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

    def __init__(self, length: int, bad: dict[int, Exception], shape: tuple[int, ...] = (3, 5, 7)) -> None:
        super().__init__(length, shape)
        self.bad = bad

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise self.bad[index]
        return super().__getitem__(index)


class Transformed(Dataset[Any]):
    """A source and a transform, without any cache."""

    def __init__(self, source: Dataset[Any], transform: Callable[[Any], Any]) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source[index])


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


def totals(dataset: Any) -> Any:
    """What has been counted of a cache that is open."""
    return dataset.counters.totals()


def run(loader: DataLoader[Any], stops: Iterable[int | None] = (None, 2, None)) -> list[Any]:
    """All batches of some epochs, each with the states of all generators after it; the consumer draws between batches.

    Args:
        loader: what is iterated over.
        stops: for each epoch, the batch after which it is broken off.
    """
    seen: list[Any] = []
    for epoch, stop in enumerate(stops):
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

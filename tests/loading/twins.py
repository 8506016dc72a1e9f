"""A CachedLoader beside the DataLoader that it must equal, run in the same way and compared, and covering designs."""

import copy
import itertools
import logging
import random
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning_utilities import apply_to_collection
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.prefetch import PREFETCH_THREAD
from tests.cache.leaves import same
from tests.sources import Made

# ---- sources and transforms ----


class Numbers(Dataset[Any]):
    """Samples `(uint8 tensor, label)` that follow from their index, which may not lie outside; some may be errors."""

    def __init__(self, length: int, shape: tuple[int, ...] = (3, 5, 7), bad: dict[int, Exception] | None = None):
        self.length, self.shape, self.bad = length, shape, bad or {}

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index in self.bad:
            raise self.bad[index]
        if not -self.length <= index < self.length:
            raise IndexError(f"index {index} is outside of {self.length} samples")
        index %= self.length
        generator = torch.Generator().manual_seed(index)
        return torch.randint(0, 256, self.shape, dtype=torch.uint8, generator=generator), index


class AnyKey(Made):
    """Whatever a function makes of a key, which may count from the end or be no index."""

    def __getitem__(self, key: Any) -> Any:
        return self.make(key)


class InBatches(Dataset[Any]):
    """A source that loads whole batches, over another, and then transforms their samples."""

    def __init__(self, source: Any, transform: Callable[[Any], Any] = copy.copy) -> None:
        self.source, self.transform = source, transform

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.transform(self.source[index])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return list(map(self.transform, [self.source[index] for index in indices]))


class Augmented(Made):
    """Images, and what comes with them, that the source transforms at random by itself: it is split before that."""

    def __init__(self, make: Callable[[int], Any], length: int, *steps: Any) -> None:
        super().__init__(make, length)
        self.transform = v2.Compose(steps)

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.transform(image), label


def uncached(source: Any, transform: Callable[[Any], Any] | None) -> Any:
    """A source and a transform, without any cache."""
    if transform is None:
        return source
    if hasattr(source, "__getitems__") and not isinstance(source, Subset):  # which loads one by one here
        return InBatches(source, transform)
    return AnyKey(lambda index: transform(source[index]), len(source))


def jitter(sample: Any) -> Any:
    """A transform that draws from all process-wide generators."""
    return sample[0].float() / 255 + float(torch.rand(())) + np.random.rand() + random.random(), sample[1]


def to_float(sample: Any) -> Any:
    """A transform that makes another sample."""
    return sample[0].float() / 255, sample[1]


@contextmanager
def logged_to(path: Path) -> Iterator[None]:
    """What the package warns of in this process and its workers goes to a file, too."""
    log, handler = logging.getLogger("lightning_stocache"), logging.FileHandler(path)
    handler.setLevel(logging.WARNING)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


# ---- runs ----

PERSISTENT: dict[str, Any] = {"num_workers": 2, "persistent_workers": True}
WAYS: dict[str, tuple[dict[str, Any], str, Any]] = {
    "alone": ({}, "25%", None),
    "workers": ({"num_workers": 2}, "50%", None),
    "workers, made": ({"num_workers": 2}, "auto", to_float),
    "persistent": (PERSISTENT, "25%", None),
    "persistent, made": (PERSISTENT, "auto", to_float),
}
"""Arguments of a loader, budgets and transforms: batches are gathered or, with a transform, made by workers, if any."""
in_every_way = pytest.mark.parametrize(("arguments", "budget", "transform"), WAYS.values(), ids=WAYS)

SHARES: dict[str, int | str] = {"off": 0, "quarter": "25%", "all": "auto"}


def seed_all(seed: int = 3) -> None:
    """Seed the process-wide generators."""
    torch.manual_seed(seed), np.random.seed(seed), random.seed(seed)  # type: ignore[func-returns-value]


def plain_batches(source: Any, transform: Callable[[Any], Any] | None = None) -> list[Any]:
    """The batches of four that a DataLoader makes."""
    return list(DataLoader(uncached(source, transform), 4))


def looked(dataset: CachedDataset) -> int:
    """How many stored samples were read again, by all processes."""
    return 0 if dataset.counters is None else dataset.counters.looks[0]


def totals(dataset: Any) -> Any:
    """What has been counted of a cache that is open."""
    return dataset.counters.totals()


def prefetch_threads() -> int:
    """The threads that gather ahead."""
    return sum(thread.name.startswith(PREFETCH_THREAD) for thread in threading.enumerate())


def copied(batch: Any) -> Any:
    """The batch in memory of its own."""
    return apply_to_collection(batch, torch.Tensor, torch.Tensor.clone)


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


def comparable(outcome: Any) -> Any:
    """A batch as it is; of an error its type, its last words, and whether it has the user's traceback. An error that is
    kept would keep the batches of its epoch."""
    if not isinstance(outcome, Exception):
        return outcome
    lines = "".join(traceback.format_exception(outcome))
    return type(outcome), str(outcome).strip().rpartition(": ")[2], "self.bad[index]" in lines


def assert_as_plain(
    source: Any,
    runs: Sequence[tuple[Any, Callable[[], dict[str, Any]]]],
    shares: Iterable[str] = SHARES,
    *,
    transform: Callable[[Any], Any] | None = None,
) -> None:
    """Three epochs of a cached dataset, the second broken off, equal DataLoader's in batches and generators. `runs` are
    the classes of loaders, one after the other over the same cache, and what makes their arguments."""
    expected = [_run(DataLoader, uncached(source, transform), arguments()) for _, arguments in runs]
    for share in shares:
        with closing(CachedDataset(source, SHARES[share], transform=transform)) as dataset:
            for (kind, arguments), batches in zip(runs, expected, strict=True):
                got = _run(kind, dataset, arguments())
                assert len(got) == len(batches), share
                for number, (one, other) in enumerate(zip(got, batches, strict=True)):
                    assert same(one, other), f"{share}: batch {number} or a generator's state after it differs"
            counts, cache = totals(dataset), dataset.cache
            assert counts.fills == (0 if cache is None else cache.filled)
            assert counts.hits or cache is None or share == "quarter" or not got  # a sampler may draw none of a quarter


def _run(kind: Any, dataset: Any, arguments: dict[str, Any]) -> list[Any]:
    """Three epochs of a new loader, which is closed."""
    loader = kind(dataset, **arguments)
    seen = epochs_of(loader)
    if kind is CachedLoader:
        loader.close()
    return seen


def epochs_of(loader: Any) -> list[Any]:
    """The batches of three epochs, the second broken off, each with the states of all generators after it. The consumer
    draws between batches."""
    seed_all()
    seen = list[Any]()
    for epoch, stop in enumerate((None, 2, None)):
        if hasattr(loader.sampler, "set_epoch"):
            loader.sampler.set_epoch(epoch)
        for number, batch in enumerate(loader):
            own = None if loader.generator is None else loader.generator.get_state()
            numpy_state: Any = np.random.get_state()
            states = torch.get_rng_state(), own, numpy_state[1].tobytes(), numpy_state[2], hash(random.getstate())
            seen.append((copied(batch), states))
            torch.rand(1)
            if number == stop:
                break
    return seen


def pairwise(**factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Few combinations in which every two values of different factors meet (greedy, the same in every run)."""
    values = [[(name, at) for at in range(len(factors[name]))] for name in factors]
    wanted = {pair for two in itertools.combinations(values, 2) for pair in itertools.product(*two)}
    dice = random.Random(0)
    chosen: list[dict[str, Any]] = []
    while wanted:
        first = dict(min(wanted))
        tries = [{name: first.get(name, dice.randrange(len(factors[name]))) for name in factors} for _ in range(60)]
        best = max(tries, key=lambda places: len(wanted.intersection(itertools.combinations(places.items(), 2))))
        wanted.difference_update(itertools.combinations(best.items(), 2))
        chosen.append({name: factors[name][place] for name, place in best.items()})
    return chosen


@contextmanager
def default_device(name: str) -> Iterator[None]:
    """`torch.set_default_device`, and then none."""
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)
        vars(torch._GLOBAL_DEVICE_CONTEXT).pop("device_context", None)  # torch 2.4 would ask None for its device

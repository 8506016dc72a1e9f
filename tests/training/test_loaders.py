"""Walking a Trainer's loaders and making them anew around another dataset."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    Subset,
    WeightedRandomSampler,
)

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.loaders import cached_datasets, in_flight, loaders_in, rewrap, with_dataset

NUMBERS: Any = [torch.tensor(i) for i in range(12)]
TENS: Any = [torch.tensor(10 * i) for i in range(12)]


def read(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def tens(loader: DataLoader[Any]) -> DataLoader[Any]:
    return with_dataset(loader, TENS)


class Pair(collections.namedtuple("Pair", "one other")):
    """A namedtuple of loaders."""


@pytest.mark.parametrize(
    "nest",
    [
        lambda one, other: [one, other],
        lambda one, other: (one, other),
        lambda one, other: {"one": one, "other": [other]},
        lambda one, other: collections.OrderedDict(one=one, other=other),
        lambda one, other: Pair(one, other),
        lambda one, other: CombinedLoader({"one": one, "other": other}, "max_size"),
    ],
    ids=["list", "tuple", "dict", "OrderedDict", "namedtuple", "CombinedLoader"],
)
def test_nesting_and_types_are_kept(nest):
    """What comes back has the types and the form of what was given, with every loader replaced."""
    given = nest(DataLoader(NUMBERS, 4), DataLoader(NUMBERS, 6))
    renewed = rewrap(given, tens)
    assert type(renewed) is type(given)
    assert [len(loader) for loader in loaders_in(renewed)] == [3, 2]
    assert all(loader.dataset is TENS for loader in loaders_in(renewed))
    assert all(loader.dataset is NUMBERS for loader in loaders_in(given))
    if isinstance(given, CombinedLoader):
        assert renewed._mode == "max_size"


def test_what_is_no_loader_comes_back_as_it_is():
    """Batches that were given instead of a loader are left alone."""
    batches = [torch.zeros(2), torch.ones(2)]
    assert rewrap(batches, tens) == batches
    assert list(loaders_in(batches)) == []


@pytest.mark.parametrize(
    "make",
    [
        lambda data: DataLoader(data, batch_size=5, drop_last=True),
        lambda data: DataLoader(data, batch_size=4, sampler=[3, 1, 4, 1, 5]),
        lambda data: DataLoader(data, batch_sampler=BatchSampler(range(7), 3, drop_last=False)),
        lambda data: DataLoader(data, batch_sampler=[[0, 1], [5]]),
        lambda data: DataLoader(data, batch_size=None, sampler=[2, 7], collate_fn=lambda one: one[None]),
        lambda data: DataLoader(data, 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
        lambda data: DataLoader(data, 4, num_workers=1, prefetch_factor=3, multiprocessing_context="fork"),
        lambda data: DataLoader(
            data, sampler=WeightedRandomSampler([1.0] * 12, 9, generator=torch.Generator().manual_seed(2))
        ),
    ],
    ids=["drop_last", "sampler", "BatchSampler", "batches", "unbatched", "generator", "workers", "weighted"],
)
def test_the_new_loader_reads_what_the_old_one_would(make):
    """The same batches in the same order come from a loader that was made anew, with all of its arguments."""
    assert read(tens(make(NUMBERS))) == read(make(TENS))


def test_arguments_are_kept():
    """Collation, worker options and the generator of the old loader are those of the new one."""
    old = DataLoader(
        NUMBERS,
        4,
        num_workers=2,
        collate_fn=torch.stack,
        timeout=7,
        worker_init_fn=print,
        multiprocessing_context="spawn",
        generator=torch.Generator(),
        prefetch_factor=5,
        persistent_workers=True,
    )
    new = tens(old)
    for name in ("num_workers", "collate_fn", "timeout", "worker_init_fn", "generator", "prefetch_factor"):
        assert getattr(new, name) == getattr(old, name), name
    assert new.persistent_workers
    assert new.multiprocessing_context.get_start_method() == "spawn"


class Tagged(DataLoader[Any]):
    """A loader with an argument of its own, as a user would write it."""

    def __init__(self, dataset: Any, tag: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.tag = tag


class Narrow(DataLoader[Any]):
    """Takes little and decides the rest itself."""

    def __init__(self, dataset: Any, batch_size: int = 6) -> None:
        super().__init__(dataset, batch_size=batch_size, sampler=RandomSampler(dataset))


class Hiding(DataLoader[Any]):
    """Does not keep what it was given."""

    def __init__(self, secret: int, **options: Any) -> None:
        super().__init__(**options)


def test_subclasses_are_kept():
    """A subclass is made from the arguments that it takes, its own ones read from its attributes."""
    new = tens(Tagged(NUMBERS, "blue", batch_size=5))
    assert (type(new), new.tag, len(new)) == (Tagged, "blue", 3)  # type: ignore[attr-defined]
    narrow = tens(Narrow(NUMBERS, 4))
    assert type(narrow) is Narrow
    assert sorted(number for batch in read(narrow) for number in batch) == [10 * i for i in range(12)]


def test_a_subclass_that_hides_an_argument_is_refused():
    """The error names the class and the argument, and says what to do instead."""
    with pytest.raises(TypeError, match=r"Hiding cannot be made anew.*'secret' is not kept.*Wrap your dataset"):
        tens(Hiding(3, dataset=NUMBERS))


def test_cached_datasets_are_found_inside():
    """Subset and ConcatDataset are looked through, and each cache is found once."""
    one, other = CachedDataset(NUMBERS), CachedDataset(TENS)
    loaders = [DataLoader(Subset(one, [1, 2])), {"b": DataLoader(ConcatDataset([one, other]))}, DataLoader(NUMBERS)]
    assert cached_datasets(loaders) == [one, other]
    for dataset in (one, other):
        dataset.close()


def test_in_flight_knows_the_batch_of_a_batch_sampler():
    """What a loader keeps in memory is reckoned from its batch sampler where it has no batch size of its own."""
    assert in_flight(DataLoader(NUMBERS, batch_sampler=BatchSampler(range(7), 3, False))).batch_size == 3
    assert in_flight(DataLoader(NUMBERS, batch_size=None)).batch_size == 1


def test_in_flight_knows_how_workers_start():
    """A worker that is not forked needs as much memory as the trainer; without workers nothing is started."""
    assert in_flight(DataLoader(NUMBERS, num_workers=2, multiprocessing_context="spawn")).start_method == "spawn"
    assert in_flight(DataLoader(NUMBERS, num_workers=2)).start_method is None


def test_shuffling_sampler_object_is_kept():
    """The sampler of the old loader goes on in the new one: it may hold a state."""

    class Own(Sampler[int]):
        def __iter__(self):
            return iter([2, 0])

        def __len__(self):
            return 2

    sampler = Own()
    assert tens(DataLoader(NUMBERS, sampler=sampler)).sampler is sampler

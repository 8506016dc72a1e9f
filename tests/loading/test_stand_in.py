"""Whose name is whose: the user's dataset behind a CachedDataset, and behind what the doors put in its place."""

import copy
import logging
import pickle
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset, Subset, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset, StandIn, cached_in
from lightning_stocache.loading.loader import CachedLoader
from tests.loading.twins import totals

pytestmark = pytest.mark.processes

NAMES = [
    *("transform", "transforms", "target_transform", "classes", "targets", "data", "epoch", "_image_files", "_opened"),
    *("source", "cache", "counters", "ring", "group", "budget_bytes", "share", "close", "describe", "opened", "finish"),
    *("changed", "refresh", "view", "request", "adopt", "load_into", "budget", "spec", "name", "strict", "backend"),
]


class Named(Dataset[Any]):
    """A dataset that has every name that one could think of."""

    def __init__(self) -> None:
        for name in NAMES:
            setattr(self, name, f"the user's {name}")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        return index * index

    def __getitems__(self, indices: list[int]) -> list[int]:
        return [self[index] for index in indices]


class Plain(Dataset[Any]):
    """A dataset with attributes that decide what its samples are."""

    def __init__(self) -> None:
        self.strength, self._offset = 1, 0
        self.transform: Any = None

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> int:
        sample = index * self.strength + self._offset
        return sample if self.transform is None else self.transform(sample)

    def set_strength(self, strength: int) -> None:
        self.strength = strength


def double(sample: int) -> int:
    return 2 * sample


def itself(dataset: CachedDataset) -> CachedDataset:
    return dataset


@pytest.fixture
def plain() -> Plain:
    return Plain()


@pytest.fixture
def dataset(plain: Plain) -> Iterator[CachedDataset]:
    with closing(CachedDataset(plain)) as dataset:
        yield dataset


def test_a_stand_in_has_no_name_of_its_own() -> None:
    """Whatever the user's names are: read, written and deleted in the user's dataset."""
    source = Named()
    with closing(CachedDataset(source)) as dataset:
        stand_in: Any = StandIn(dataset)
        for name in NAMES:
            assert getattr(stand_in, name) == f"the user's {name}"
            setattr(stand_in, name, "another")
            assert vars(source)[name] == "another"
            delattr(stand_in, name)
            assert not hasattr(source, name)
            assert not hasattr(stand_in, name)
            assert list(DataLoader(stand_in, None)) == [index * index for index in range(6)]


def test_a_cached_dataset_keeps_a_few_names() -> None:
    """Those that it documents are its own; every other name is the source's, private ones too."""
    source = Named()
    with closing(CachedDataset(source)) as dataset:
        kept = set(dir(CachedDataset)) & set(NAMES) - {"transform"}
        for name in set(NAMES) - kept:
            assert getattr(dataset, name) == f"the user's {name}"
            setattr(dataset, name, "another")
            assert getattr(source, name) == "another"
        assert all(f"`{name}`" in str(CachedDataset.__doc__) for name in kept)
        assert dataset.source is source


@pytest.mark.parametrize("wrap", [itself, StandIn])
@pytest.mark.parametrize("way", ["an attribute", "a method", "the user's object"])
def test_a_change_takes_effect(plain: Plain, dataset: CachedDataset, wrap: Any, way: str, caplog: Any) -> None:
    """Through the wrapper, by a method or on the user's object: from the next read on, with one warning."""
    wrapped = wrap(dataset)
    assert [wrapped[index] for index in range(6)] == [0, 1, 2, 3, 4, 5]
    if way == "a method":
        wrapped.set_strength(3)
    else:
        (wrapped if way == "an attribute" else plain).strength = 3
    assert (plain.strength, wrapped.strength) == (3, 3)
    assert [wrapped[index] for index in range(6)] == [0, 3, 6, 9, 12, 15]
    assert wrapped.__getitems__([1, 2]) == [3, 6]
    assert list(DataLoader(Subset(wrapped, [1, 2]), None)) == [3, 6]
    wrapped.strength = 4
    assert wrapped[1] == 4
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning.startswith("Plain: its `strength` has changed")
    assert warning.count("\n") == 1
    assert dataset.cache is None
    assert totals(dataset).served == 17


def set_strength_of_the_worker(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.strength = worker + 2


def test_workers_that_change_their_copy_say_so_once(dataset: CachedDataset, tmp_path: Path) -> None:
    """Each epoch's workers do, for `worker_init_fn` tells them to."""
    log, handler = logging.getLogger("lightning_stocache"), logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    try:
        loader = DataLoader(dataset, 1, num_workers=2, worker_init_fn=set_strength_of_the_worker)
        batches = [[int(batch) for batch in loader] for _ in range(3)]
    finally:
        log.removeHandler(handler)
        handler.close()
    assert batches == [[0, 3, 4, 9, 8, 15]] * 3  # by two workers in turn, as without a cache
    assert (tmp_path / "log").read_text().count("its `strength` has changed") == 1


def test_the_transform_is_the_sources_unless_one_was_given(plain: Plain) -> None:
    """Reading and writing `transform` reach the source's; one that was given is the CachedDataset's own."""
    with closing(CachedDataset(plain)) as dataset:
        plain.transform = double
        assert dataset.transform is double
        assert dataset[2] == 4
        dataset.transform = None
        assert plain.transform is None
        assert dataset[2] == 2
    with closing(CachedDataset(plain, transform=double)) as dataset:
        dataset.transform = str
        assert (dataset[2], dataset.transform, plain.transform) == ("2", str, None)
        assert dataset.cache is not None
    with closing(CachedDataset([1, 2])) as dataset:
        assert dataset.transform is None
        dataset.transform = double
        assert dataset[1] == 4


@pytest.mark.parametrize(
    ("kind", "num_workers", "persistent"),
    [(DataLoader, 0, False), (DataLoader, 2, True), (CachedLoader, 0, False), (CachedLoader, 2, False)],
)
def test_batches_between_changes_are_a_plain_loaders(kind: Any, num_workers: int, persistent: bool) -> None:
    """Changed in the middle of an epoch, whose later batches may be gathered already, and between two of them: what a
    DataLoader over the user's dataset gives."""
    options = {"num_workers": num_workers, "persistent_workers": persistent}

    def run(make: Any, dataset: Any) -> list[list[int]]:
        loader, batches = make(dataset, 1, **options), []
        for epoch in range(4):
            for number, batch in enumerate(loader):
                batches.append(batch.tolist())
                if (epoch, number) == (1, 0):
                    dataset._offset = 100
            if epoch == 2:
                dataset.strength = 2
        return batches

    with closing(CachedDataset(Plain())) as dataset:
        assert run(kind, StandIn(dataset)) == run(DataLoader, Plain())


@pytest.mark.parametrize("wrap", [itself, StandIn])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))])
def test_a_copy_has_attributes_of_its_own(plain: Plain, dataset: CachedDataset, wrap: Any, duplicate: Any) -> None:
    """What is written to a copy stays there, as with the user's own dataset."""
    other = duplicate(wrap(dataset))
    other.strength = 5
    assert (other[1], dataset[1], plain.strength) == (5, 1, 1)


def test_the_package_finds_the_cached_dataset(dataset: CachedDataset, plain: Plain) -> None:
    """Behind a stand-in and as itself, and nothing elsewhere; a stand-in is not cached again."""
    assert cached_in(dataset) is cached_in(StandIn(dataset)) is dataset
    assert cached_in(plain) is None
    with pytest.raises(TypeError, match="cached already"):
        CachedDataset(StandIn(dataset))


def test_dir_and_dunder_names(dataset: CachedDataset) -> None:
    """`dir` shows the source's names; a dunder name of the source is never forwarded; what nobody has is missing."""
    assert {"strength", "_offset", "set_strength"} <= set(dir(dataset)) & set(dir(StandIn(dataset)))
    with closing(CachedDataset(Named(), 0)) as other:
        assert not hasattr(StandIn(other), "__iter__")
        with pytest.raises(AttributeError, match="nothing_of_this_name"):
            other.nothing_of_this_name  # noqa: B018
    with pytest.raises(AttributeError, match="source"):
        CachedDataset.__new__(CachedDataset).source  # noqa: B018  pickle asks before there is one

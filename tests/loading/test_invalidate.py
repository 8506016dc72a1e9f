"""A user says that samples have changed: a cached loader then gives what a plain DataLoader gives."""

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache import CachedDataset, CachedLoader, CachedStream
from tests.jobs import warnings
from tests.processes import call, path_of

SAMPLES, SIZE = 24, 4
CHANGED = [3, 5, 8, 13, 21]


class Labelled(Dataset[Any]):
    """Samples whose labels a training changes, as pseudo labels."""

    def __init__(self) -> None:
        self.labels = torch.zeros(SAMPLES)
        self.loads = 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index)), self.labels[index].clone()


class Texts(Labelled):
    """The same as records."""

    def __getitem__(self, index: int) -> Any:
        return {"text": "a" * (index + 1), "label": float(self.labels[index])}


@pytest.fixture(params=[Labelled, Texts])
def dataset(request: pytest.FixtureRequest) -> Iterator[CachedDataset]:
    cached = CachedDataset(request.param())
    yield cached
    cached.close()


def relabel(dataset: Any, epoch: int) -> None:
    """Change some labels, and say so if there is a cache."""
    source = dataset.source if isinstance(dataset, CachedDataset) else dataset
    source.labels[CHANGED] += epoch + 1
    if isinstance(dataset, CachedDataset):
        dataset.invalidate(CHANGED)


def epochs(make: Callable[[], Any], dataset: Any, within: int | None) -> list[list[Any]]:
    """Four epochs, with new labels between them, or after a batch."""
    torch.manual_seed(0)
    loader = make()
    seen = []
    for epoch in range(4):
        batches = []
        for number, batch in enumerate(loader):
            batches.append(copy.deepcopy(batch))
            if number == within:
                relabel(dataset, epoch)
        if within is None:
            relabel(dataset, epoch)
        seen.append(batches)
    if isinstance(loader, CachedLoader):
        loader.close()
    del loader
    gc.collect()  # persistent workers end with their loader
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("within", [None, 2, 4])
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (1, False), (1, True)])
def test_batches_are_those_of_a_plain_loader(
    dataset: CachedDataset, within: int | None, workers: int, persistent: bool
) -> None:
    """With workers, which have a copy of the dataset that is as old as they are, too."""
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": persistent}
    if workers:
        options["prefetch_factor"] = 1
    plain = type(dataset.source)()
    expected = epochs(lambda: DataLoader(plain, SIZE, **options), plain, within)
    for loader in (CachedLoader, DataLoader):
        dataset.source.labels.zero_()  # type: ignore[attr-defined]
        dataset.invalidate()
        found = epochs(lambda loader=loader: loader(dataset, SIZE, **options), dataset, within)
        assert [list(map(repr, batches)) for batches in found] == [list(map(repr, batches)) for batches in expected]
    assert dataset.cache is not None


@pytest.mark.processes
def test_it_holds_in_all_processes(dataset: CachedDataset, caplog: Any) -> None:
    """It is no change for which a cache is given up: what did not change is still served, without a warning."""
    expected = type(dataset.source)()
    for epoch in range(4):
        for index in range(SAMPLES):
            assert repr(dataset[index]) == repr(expected[index])
        before = dataset.counters.totals()
        expected.labels[CHANGED] += epoch + 1
        relabel(dataset, epoch)
        assert call(lambda: repr(dataset[5])) == repr(expected[5])
        samples = dataset.__getitems__(list(range(SAMPLES)))
        assert list(map(repr, samples)) == [repr(expected[index]) for index in range(SAMPLES)]
        counts = dataset.counters.totals() - before
        assert counts.hits >= SAMPLES - len(CHANGED)
        assert (counts.misses, counts.bypasses) == (counts.fills, 0)
        assert counts.fills == len(CHANGED)
    assert warnings(caplog) == []


@pytest.mark.parametrize("ask", ["one", "several", "loader"])
def test_what_changes_while_it_is_read_is_read_again(dataset: CachedDataset, ask: str, monkeypatch: Any) -> None:
    """Whether one sample is asked for, several, or a batch that is gathered: none comes as it was before."""
    indices = list(range(SIZE))
    loader = CachedLoader(dataset, SIZE, sampler=indices)
    for _ in range(2):
        list(loader)
    cache = dataset.cache
    moments = iter([True])
    assert cache is not None

    def late(function: Any) -> Any:
        def call_late(*args: Any) -> Any:
            result = function(*args)
            if next(moments, False):
                relabel(dataset, 6)
            return result

        return call_late

    for name in ("read", "gather"):
        monkeypatch.setattr(cache, name, late(getattr(cache, name)))
    expected = type(dataset.source)()
    expected.labels[CHANGED] += 7
    if ask == "one":
        assert repr(dataset[3]) == repr(expected[3])
    elif ask == "several":
        assert list(map(repr, dataset.__getitems__(indices))) == [repr(expected[index]) for index in indices]
    else:
        assert list(map(repr, loader)) == list(map(repr, DataLoader(expected, SIZE, sampler=indices)))
    assert next(moments, None) is None, "nothing was read"
    filled = cache.filled
    loader.invalidate([3])
    assert cache.filled == filled - 1


@pytest.mark.processes
def test_a_copy_stores_nothing_old(dataset: CachedDataset) -> None:
    """A copy of the dataset, here or in another process, has the labels of its time: what it loads is not stored."""
    twin = copy.deepcopy(dataset)
    relabel(dataset, 0)
    assert float(list(twin[5].values() if isinstance(twin[5], dict) else twin[5])[-1]) == 0
    assert float(list(dataset[5].values() if isinstance(dataset[5], dict) else dataset[5])[-1]) == 1
    twin.close()


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


@pytest.mark.named
def test_what_outlives_a_job_or_has_no_index_refuses(name: str, dataset: CachedDataset) -> None:
    """With the way out. Without a cache there is nothing to do."""
    assert not path_of(name).exists()
    named = CachedDataset(Labelled(), name=name)
    with pytest.raises(ValueError, match=r"outlives this job.*leave name= away"):
        named.invalidate([1])
    named.close()
    stream = CachedStream(Numbers())
    assert not hasattr(stream, "invalidate")
    stream.close()
    dataset.close()
    dataset.invalidate()
    off = CachedDataset(Labelled(), budget=0)
    off.invalidate([1])
    off.close()

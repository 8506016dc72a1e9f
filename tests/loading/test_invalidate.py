"""A user says that samples have changed: a cached loader then gives what a plain DataLoader gives."""

import copy
import gc
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Subset
from torchvision.transforms import Compose

from lightning_stocache import CachedDataset, CachedLoader, CachedStream
from lightning_stocache.cache.disk_sync import DiskSync
from lightning_stocache.node.files import HEADER_BYTES
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


def label(sample: Any) -> float:
    """The label of a sample."""
    return float(sample["label"] if isinstance(sample, dict) else sample[1])


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


@pytest.mark.parametrize("ask", ["one", "several", "block", "batch"])
def test_what_changes_while_it_is_read_is_read_again(dataset: CachedDataset, ask: str, monkeypatch: Any) -> None:
    """One sample, several, a block that is gathered, a batch that lacks a sample: none comes as it was before."""
    indices = list(range(SIZE))
    loader = CachedLoader(dataset, SIZE, sampler=indices)
    for _ in range(2):
        list(loader)
    if ask == "batch":
        dataset.invalidate([0])
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


@pytest.mark.parametrize("ask", ["one", "several", "loader"])
def test_changes_without_end_hold_no_reader_up(dataset: CachedDataset, ask: str, monkeypatch: Any) -> None:
    """Samples change after each copy out of the cache: soon they are loaded instead, and each counts once."""
    indices = list(range(SIZE))
    loader = CachedLoader(dataset, SIZE, sampler=indices)
    for _ in range(2):
        list(loader)
    cache = dataset.cache
    assert cache is not None
    moments = iter(range(10))

    def then_change(function: Any) -> Any:
        def call_then_change(*args: Any) -> Any:
            result = function(*args)
            assert next(moments, None) is not None, "it reads without end"
            relabel(dataset, 0)
            return result

        return call_then_change

    for name in ("read", "gather"):
        monkeypatch.setattr(cache, name, then_change(getattr(cache, name)))
    before = dataset.counters.totals()
    if ask == "one":
        found, samples = [dataset[3]], [dataset.source[3]]
    elif ask == "several":
        found, samples = dataset.__getitems__(indices), [dataset.source[index] for index in indices]
    else:
        found = list(loader)
        samples = list(DataLoader(dataset.source, SIZE, sampler=indices))
    assert list(map(repr, found)) == list(map(repr, samples))
    assert (dataset.counters.totals() - before).served == (1 if ask == "one" else SIZE)


def test_a_transform_may_say_that_samples_change() -> None:
    """It runs once for each sample."""
    transformed: list[int] = []

    def refine(sample: Any) -> Any:
        transformed.append(int(sample[0][0]))
        assert len(transformed) < 10, "it is called without end"
        dataset.invalidate([transformed[-1]])
        return sample

    with closing(CachedDataset(Labelled(), transform=refine)) as dataset:
        dataset.__getitems__([1, 2, 3])
        dataset.__getitems__([1, 2, 3])
        assert transformed == [1, 2, 3, 1, 2, 3]


def test_a_record_that_changes_before_it_is_decoded_is_loaded() -> None:
    """Records of a batch are decoded one by one. Where the first one is transformed, the last one changes."""

    def refine(sample: Any) -> Any:
        if len(sample["text"]) == 2:
            dataset.source.labels[3] = 7
            dataset.invalidate([3])
        return sample["label"]

    with closing(CachedDataset(Texts(), transform=refine)) as dataset:
        dataset.__getitems__([3, 2])
        before = dataset.counters.totals()
        assert dataset.__getitems__([1, 2, 3]) == [0, 0, 7]
        assert (dataset.counters.totals() - before).served == 3


@pytest.mark.processes
def test_a_copy_stores_nothing_old(dataset: CachedDataset) -> None:
    """A copy of the dataset, here or in another process, has the labels of its time: what it loads is not stored."""
    twin = copy.deepcopy(dataset)
    relabel(dataset, 0)
    assert label(copy.copy(twin)[5]) == 0
    assert label(dataset[5]) == 1
    relabel(dataset, -1)
    twin.invalidate([7])
    assert label(twin[5]) == 0
    assert label(dataset[5]) == 1
    twin.close()


@pytest.mark.processes
@pytest.mark.parametrize("made", ["copy", "deepcopy", "fork"])
def test_after_a_change_in_a_copy_the_original_stores_nothing_old(
    dataset: CachedDataset, made: str, caplog: Any
) -> None:
    """The copy reads its new label, and stores it. The original reads that, and stores again after a whole change."""
    [dataset[index] for index in range(SAMPLES)]
    before, after = (os.pipe() for _ in range(2))

    def change(twin: CachedDataset) -> None:
        twin.source.labels = (torch.arange(SAMPLES) == 3).float()  # type: ignore[attr-defined]
        twin.invalidate([3])

    if made == "fork":
        child = os.fork()
        if not child:
            change(dataset)
            os.write(before[1], b"x")
            os.read(after[0], 1)
            os._exit(label(dataset[3]) == 1)
        os.read(before[0], 1)
        assert label(dataset[3]) == 0
        os.write(after[1], b"x")
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    else:
        twin = getattr(copy, made)(dataset)
        change(twin)
        assert label(dataset[3]) == 0
        assert label(twin[3]) == 1
    assert label(dataset[3]) == 1
    assert len(warnings(caplog)) == 1
    dataset.invalidate()
    filled = dataset.cache.filled  # type: ignore[union-attr]
    assert label(dataset[3]) == 0
    assert dataset.cache.filled == filled + 1  # type: ignore[union-attr]
    for end in (*before, *after):
        os.close(end)


class Shifted(Labelled):
    """With a random transform, at which the dataset is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.transform = Compose([double, shift])

    def __getitem__(self, index: int) -> Any:
        return self.transform(torch.full((3,), float(index))), self.labels[index].clone()


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def shift(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand(())


def rebind(source: Any) -> None:
    source.labels = source.labels + 1


def rebind_part(source: Any) -> None:
    source.datasets[1].labels = source.datasets[1].labels + 1


def move(source: Any) -> None:
    source.indices = list(range(1, SAMPLES, 2))


def replace_transform(source: Any) -> None:
    source.transform = Compose([torch.neg, shift])


@pytest.mark.parametrize(
    ("make", "change", "stays"),
    [
        (Shifted, rebind, True),
        (Labelled, rebind, True),
        (lambda: ConcatDataset([Shifted(), Shifted()]), rebind_part, True),
        (lambda: Subset(Shifted(), list(range(0, SAMPLES, 2))), move, True),
        (Shifted, replace_transform, False),
    ],
)
def test_new_attributes_are_read(make: Any, change: Any, stays: bool, caplog: Any) -> None:
    """Also where the dataset is cut at its random transform. Another transform ends the cache, with a warning."""
    source = make()
    with closing(CachedDataset(source)) as dataset:
        loader = CachedLoader(dataset, SIZE)
        list(loader), list(loader)
        change(source)
        loader.invalidate()
        for seed in range(3):
            torch.manual_seed(seed)
            found = list(loader)
            torch.manual_seed(seed)
            assert repr(found) == repr(list(DataLoader(source, SIZE)))
        assert (dataset.cache is not None) == stays
    assert len(warnings(caplog)) == (not stays)


def test_indices_are_whole_numbers_of_samples(dataset: CachedDataset) -> None:
    """From the end, and of any type; a mask, a fraction and a number outside are errors, and nothing is emptied."""
    [dataset[index] for index in range(SAMPLES)]
    cache = dataset.cache
    assert cache is not None
    for bad, error in [
        (torch.zeros(SAMPLES, dtype=torch.bool), TypeError),
        ([1.5], TypeError),
        ([SAMPLES], IndexError),
        ([-SAMPLES - 1], IndexError),
    ]:
        with pytest.raises(error, match="indices must"):
            dataset.invalidate(bad)  # type: ignore[arg-type]
    assert cache.filled == SAMPLES
    dataset.invalidate([-1])
    dataset.invalidate(torch.tensor([2, 3]))  # type: ignore[arg-type]
    dataset.invalidate(np.array(4))  # type: ignore[arg-type]
    dataset.invalidate(range(6, 6))
    assert cache.is_stored(np.arange(SAMPLES)).nonzero()[0].tolist() == [0, 1, *range(5, SAMPLES - 1)]


def test_a_loader_of_a_part_says_whom_to_ask(dataset: CachedDataset) -> None:
    """It does not know which sample of the CachedDataset in it an index means."""
    for made in (Subset(dataset, [1, 2]), ConcatDataset([dataset, dataset])):
        with pytest.raises(TypeError, match="call invalidate of the CachedDataset"):
            CachedLoader(made, SIZE).invalidate([1])
    CachedLoader(Labelled(), SIZE).invalidate([1])


def test_a_disk_without_room_for_it_is_given_up(dataset: CachedDataset, monkeypatch: Any, caplog: Any) -> None:
    """The training goes on, uncached."""
    list(CachedLoader(dataset, SIZE))
    dataset.source.labels += 1  # type: ignore[attr-defined]
    monkeypatch.setattr(dataset.cache, "invalidate", lambda _: os.stat("/no/such/file"))
    dataset.invalidate()
    assert dataset.cache is None
    assert repr(dataset[3]) == repr(dataset.source[3])
    assert len(warnings(caplog)) == 1


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


class Many(Dataset[Any]):
    """More samples than set-up stores."""

    def __len__(self) -> int:
        return 4 * SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3,), float(index))


def test_who_finds_a_lost_sample_goes_on_storing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk has lost a sample before it was safe: the sample is loaded again, and later ones are stored as before."""
    monkeypatch.setattr(DiskSync, "note", lambda sync: None)
    with closing(CachedDataset(Many(), dir=str(tmp_path))) as cached:
        cache = cached.cache
        assert cache is not None
        lost = cached[5].numpy().tobytes()
        with open(f"/proc/self/fd/{cache.segment.descriptor}", "r+b") as file:
            content = file.read()
            file.seek(content.index(lost, HEADER_BYTES))
            file.write(bytes(len(lost)))
        assert cached[5].tolist() == [5.0] * 3
        stored = cache.filled
        assert [int(cached[index][0]) for index in range(4 * SAMPLES)] == list(range(4 * SAMPLES))
        assert stored < cache.filled == 4 * SAMPLES

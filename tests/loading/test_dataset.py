"""CachedDataset as a user of plain PyTorch meets it: the samples of the source in any loader, each loaded once."""

import copy
import logging
import os
import pickle
import random
import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    TensorDataset,
    random_split,
)

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup import allocation
from tests.loading.twins import InBatches, same, totals
from tests.logs import Log
from tests.proc import memory_files
from tests.processes import without_room
from tests.sources import CountedSource, Made

pytestmark = [pytest.mark.processes, pytest.mark.epoch_one_reads_all]

LENGTH = 24
SLOT_BYTES = 3 * 8 * 8 + 8 + 1  # the image, the label, the state


@pytest.fixture
def source(tmp_path: Path) -> CountedSource:
    return CountedSource(LENGTH, log_path=tmp_path / "loads")


@pytest.fixture(autouse=True)
def told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="lightning_stocache")


def announced(caplog: pytest.LogCaptureFixture) -> int:
    """The reads that were announced at set-up."""
    return sum(int(found[1]) for text in caplog.messages if (found := re.search(r"(\d+) samples? read", text)))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def slots(dataset: CachedDataset) -> int:
    return 0 if dataset.cache is None else len(dataset.cache)


def numbered(source: CountedSource, batch: Any) -> list[int]:
    """The index of each sample of a batch, by its pixels; the labels are those of these samples."""
    by_pixels = {source.expected(index)[0].numpy().tobytes(): index for index in range(len(source))}
    images, labels = batch
    indices = [by_pixels[image.numpy().tobytes()] for image in images]
    assert labels.tolist() == [source.expected(index)[1] for index in indices]
    return indices


# --- in any loader


WORKERS: dict[str, Any] = {"num_workers": 2}
PERSISTENT = WORKERS | {"persistent_workers": True}
ONE = PERSISTENT | {"num_workers": 1}  # where each imports what the test does
WAYS: dict[str, tuple[Any, str | int, int, dict[str, Any]]] = {
    "whole": (DataLoader, "auto", LENGTH, {}),
    "percent": (DataLoader, "33.3%", 7, WORKERS),
    "bytes": (DataLoader, 5 * SLOT_BYTES + SLOT_BYTES - 1, 5, {}),
    "percent of free": (DataLoader, "100% of free", LENGTH, WORKERS),
    "off": (DataLoader, 0, 0, {}),
    "fork server": (DataLoader, "auto", LENGTH, ONE | {"multiprocessing_context": "forkserver"}),
    "alone": (CachedLoader, "25%", 6, {}),
    "workers": (CachedLoader, "auto", LENGTH, WORKERS),
    "persistent": (CachedLoader, "25%", 6, PERSISTENT),
    "made": (CachedLoader, "25%", 6, WORKERS | {"gather": "worker"}),
    "made, persistent": (CachedLoader, "auto", LENGTH, PERSISTENT | {"gather": "worker"}),
    "spawn": (CachedLoader, "50%", 12, ONE | {"gather": "worker", "multiprocessing_context": "spawn"}),
}
"""Loaders, budgets, the slots that these pay for, and arguments of the loaders."""


@pytest.mark.parametrize("way", WAYS)
def test_what_has_a_slot_is_loaded_once(source: CountedSource, caplog: pytest.LogCaptureFixture, way: str) -> None:
    """In the first of three epochs. Each has each sample of the source once, each is counted once, as the source counts
    them too, and nothing is warned of."""
    kind, budget, count, options = WAYS[way]
    with closing(CachedDataset(source, budget)) as dataset:
        assert slots(dataset) == count
        assert dataset.budget_bytes <= LENGTH * SLOT_BYTES
        at_setup = announced(caplog)
        loader = kind(dataset, 5, shuffle=True, **options)
        for epoch in range(1, 4):
            indices = [index for batch in loader for index in numbered(source, batch)]
            assert sorted(indices) == list(range(LENGTH))
            counts = totals(dataset)
            assert (counts.misses, counts.fills, counts.hits) == (count, count, (epoch - 1) * count)
            assert counts.bypasses == epoch * (LENGTH - count)
            assert counts.bytes_from_cache == counts.hits * (SLOT_BYTES - 1)
            assert source.loads == at_setup + counts.misses + counts.bypasses
        assert f"{count} of {LENGTH}" in dataset.describe() or count == 0
        del loader
    assert warnings(caplog) == []


WRAPPED: dict[str, Callable[[Dataset[Any], Callable[[Dataset[Any]], Dataset[Any]]], Dataset[Any]]] = {
    "in Subset": lambda source, cached: cached(Subset(source, [7, 3, 3, 0, 20])),
    "in random_split": lambda source, cached: cached(random_split(source, [10, 14], seeded())[0]),
    "in ConcatDataset": lambda source, cached: cached(ConcatDataset([source, Subset(source, [1, 2])])),
    "Subset around": lambda source, cached: Subset(cached(source), [7, 3, 3, 0, 20]),
    "random_split around": lambda source, cached: random_split(cached(source), [10, 14], seeded())[0],
    "ConcatDataset around": lambda source, cached: ConcatDataset([cached(source), cached(Subset(source, [1, 2]))]),
}


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize(("name", "num_workers"), list(zip(WRAPPED, [0, 2] * 3, strict=True)), ids=WRAPPED)
def test_datasets_of_datasets(source: CountedSource, name: str, num_workers: int) -> None:
    """Around and inside Subset, random_split and ConcatDataset: the same samples, and no load in the second epoch."""
    expected = list(DataLoader(WRAPPED[name](CountedSource(LENGTH), lambda dataset: dataset), 4))
    loader = DataLoader(WRAPPED[name](source, CachedDataset), 4, num_workers=num_workers)
    assert same(list(loader), expected)
    loads = source.loads
    assert same(list(loader), expected)
    assert source.loads == loads


@pytest.mark.parametrize("budget", ["auto", "50%", 0])
def test_a_batch_is_its_samples(source: CountedSource, budget: str | int) -> None:
    """`__getitems__` gives what `__getitem__` gives: empty, filled, with repeated, negative and single indices.

    What comes twice is served twice, with memory of its own, and read once where it has a slot.
    """
    with closing(CachedDataset(source, budget)) as dataset:
        numbers = [-1, 1, np.int64(2), np.array(5), torch.tensor(5), torch.tensor(5 - LENGTH)]
        for indices in ([3, 5, 3], [0], numbers, list(range(LENGTH)), []):
            expected = [source.expected(int(index) % LENGTH) for index in indices]
            loads, served = source.loads, totals(dataset).served
            samples = dataset.__getitems__(indices)
            assert same(samples, expected)
            assert totals(dataset).served == served + len(indices)
            if indices == [3, 5, 3]:
                assert source.loads - loads == 2 or budget != "auto"
                samples[0][0].zero_()
                assert same(samples[1:], expected[1:])
            assert same([dataset[index] for index in indices], expected)


# --- sources that load whole batches


class Collated(CountedSource):
    """Loads whole batches and returns them as `make` makes them, for an own collate_fn."""

    make: Any = None

    def __getitems__(self, indices: list[int]) -> Any:
        return self.make([self[index][0] for index in indices])


@pytest.mark.parametrize(("budget", "batch_size"), [("auto", 1), ("50%", 5)])
def test_a_source_with_batches_of_its_own(source: CountedSource, caplog: Any, budget: str, batch_size: int) -> None:
    """Its `__getitems__` is asked for what is missing, batches of one included, and for nothing else."""
    with closing(CachedDataset(InBatches(source), budget)) as dataset:
        for _ in range(3):
            batches = list(DataLoader(dataset, batch_size))
            assert same(batches, list(DataLoader(CountedSource(LENGTH), batch_size)))
        assert source.loads == LENGTH + 2 * (LENGTH - slots(dataset)) + announced(caplog)
        assert totals(dataset).hits == 2 * slots(dataset)


@pytest.mark.parametrize(("budget", "make"), [("auto", torch.stack), ("auto", dict.fromkeys), (0, torch.stack)])
def test_batches_that_are_no_lists_of_samples(caplog: pytest.LogCaptureFixture, budget: str | int, make: Any) -> None:
    """A `__getitems__` that returns a finished batch is untouched, with a word where it was to be cached."""
    source = Collated(LENGTH)
    source.make = make
    with closing(CachedDataset(source, budget)) as dataset:
        assert dataset.cache is None
        [batch] = DataLoader(dataset, LENGTH, collate_fn=lambda batch: batch)
        assert (type(batch), len(batch)) == (torch.Tensor if make is torch.stack else dict, LENGTH)
    assert ("gives whole batches" in caplog.text) == (budget == "auto")


# --- indices


@pytest.mark.parametrize("budget", ["auto", 0])
def test_what_is_no_index_goes_to_the_source(budget: str | int) -> None:
    """Lists, slices and tensors of indices get what the source makes of them, transformed, and are counted."""
    data = TensorDataset(torch.arange(20).reshape(10, 2))
    with closing(CachedDataset(data, budget, transform=lambda sample: sample[0] + 1)) as dataset:
        for index in ([1, 3], slice(2, 5), torch.tensor([4]), np.array([4, 1])):
            assert torch.equal(dataset[index], data[index][0] + 1)
        assert totals(dataset).bypasses == 4
        batches = DataLoader(dataset, sampler=BatchSampler(SequentialSampler(data), 5, False), batch_size=None)
        assert [len(batch) for batch in batches] == [5, 5]


@pytest.mark.parametrize(
    ("budget", "index"), [("auto", LENGTH), ("50%", LENGTH + 5), (0, -LENGTH - 1), ("auto", -LENGTH - 1)]
)
def test_an_index_outside_is_the_sources_own_error(source: CountedSource, budget: str | int, index: int) -> None:
    """The source says what is wrong with it, with the index as it was given, also when everything is cached."""
    with closing(CachedDataset(source, budget)) as dataset:
        list(DataLoader(dataset))
        for ask in (dataset.__getitem__, lambda index: dataset.__getitems__([index])):
            with pytest.raises(IndexError, match=f"index {index} is outside of {LENGTH} samples"):
                ask(index)


# --- a part of the indices


FOLD = list(range(3, LENGTH, 5))


def row(index: int) -> Any:
    return torch.full((3,), float(index)), index


def record(index: int) -> Any:
    return {"text": f"sample {index}"}


@pytest.mark.parametrize(
    ("make", "budget", "indices", "count"),
    [(row, "100%", FOLD, 5), (record, "60%", FOLD, 3), (row, "50%", None, 12), (record, "auto", None, 24)],
)
def test_any_index_gives_the_sources_sample(make: Any, budget: str, indices: Any, count: int) -> None:
    """One by one and in batches, from the front and from the end, drawn or not: what a list has; counts add up."""
    source, chance, served = list(map(make, range(LENGTH))), random.Random(0), 0
    with closing(CachedDataset(source, budget, indices=indices)) as dataset:
        assert (len(dataset), slots(dataset)) == (LENGTH, count)
        for _ in range(200):
            wanted = [chance.randrange(-LENGTH, LENGTH) for _ in range(chance.randrange(1, 6))]
            got = [dataset[wanted[0]]] if len(wanted) == 1 else dataset.__getitems__(wanted)
            assert same(list(got), [source[index] for index in wanted])
            served += len(wanted)
        counts = totals(dataset)
        assert counts.served == served
        assert counts.fills == dataset.cache.filled == count


def test_budgets_and_coverage_are_of_what_is_drawn() -> None:
    """60 % is of the five that are drawn; who reads the description sees that."""
    with closing(CachedDataset(list(map(row, range(LENGTH))), "60%", indices=FOLD)) as dataset:
        assert dataset.ring.coverage == 0.6
        assert "3 of the 5 that are drawn of 24 samples have a slot" in dataset.describe()


def test_a_loader_that_draws_others_too_gets_them() -> None:
    """Though all that was to be drawn is cached, a loader's other samples come from the source."""
    source: Any = list(map(row, range(LENGTH)))
    with closing(CachedDataset(source, indices=FOLD)) as dataset:
        for drawn in (FOLD, range(LENGTH), [1, 2, 3]):
            for _ in range(2):
                batches = list(CachedLoader(dataset, 4, sampler=drawn))
                assert same(batches, list(DataLoader(source, 4, sampler=drawn)))


@pytest.mark.parametrize(
    ("indices", "words"), [([], "must name at least one sample"), ([50], "got 50"), ([1.5], "must be whole numbers")]
)
def test_indices_of_no_sample_are_refused(source: CountedSource, indices: Any, words: str) -> None:
    """None at all, or what the source does not have."""
    with pytest.raises(ValueError, match=words):
        CachedDataset(source, indices=indices)


def test_only_what_is_drawn_is_read_at_set_up() -> None:
    """A fold without the broken files is cached, whatever the others are like."""

    def broken(index: int) -> Any:
        if index not in FOLD:
            raise OSError(f"sample {index} is broken")
        return row(index)

    with closing(CachedDataset(Made(broken, LENGTH), indices=FOLD, strict=True)) as dataset:
        assert [dataset[index][1] for index in FOLD * 2] == FOLD * 2
        assert totals(dataset).hits == len(FOLD)


# --- random sources


class Noisy(CountedSource):
    """A source that is random in itself: it cannot be split."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image + torch.rand(()), label


def test_a_source_that_cannot_be_split_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """It is not cached, and one warning says how to split it."""
    with closing(CachedDataset(Noisy(LENGTH))) as dataset:
        assert not torch.equal(dataset[3][0], dataset[3][0])
        assert dataset.cache is None
        assert totals(dataset).bypasses == 2
        list(DataLoader(dataset, 5, num_workers=2))
    [warning] = warnings(caplog)
    words = r"Noisy .* passes through uncached: it is random .*\n.*as transform=, .*allow_random=True"
    assert re.search(words, warning)


def test_allow_random_freezes_the_first_draw(caplog: pytest.LogCaptureFixture) -> None:
    """A random source is cached as it is on demand, without a warning, though one sample cannot be read."""

    def noise(index: int) -> torch.Tensor:
        if index == 0:
            raise OSError("no file")
        return torch.rand(3)

    with closing(CachedDataset(Made(noise, 300), allow_random=True)) as dataset:
        assert torch.equal(dataset[3], dataset[3])
        dataset.__getitems__(list(range(1, 300)))  # so many that a sample would be read again
    assert warnings(caplog) == []


# --- options and budgets


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "shm"}, "backend must be 'auto', 'tmpfile', 'memfd' or 'file', got 'shm'"),
        ({"strict": "yes"}, "strict must be true or false, got 'yes'"),
        ({"budget": -1}, r"budget .*Accepted are"),
        ({"budget": None}, r"budget .*Accepted are"),
        ({"budget": "lots"}, r"budget .*Accepted are"),
        ({"spec": (3, 8, 8)}, r"spec must be a SampleSpec, .* got \(3, 8, 8\)"),
    ],
)
def test_options_are_checked(source: CountedSource, options: dict[str, Any], message: str) -> None:
    """An option that is none of its choices is refused with them; the source is not read."""
    with pytest.raises((ValueError, TypeError), match=message):
        CachedDataset(source, **options)
    assert source.loads == 0


def fill_in_small_shm(kind: Any, transform: Any) -> tuple[int, int, str, list[str]]:
    log = Log()
    log.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    source: Any = [torch.full((4, 2**18), index, dtype=torch.uint8) for index in range(96)]
    with closing(CachedDataset(source, backend="tmpfile", transform=transform)) as dataset:
        for _ in range(2):
            for number, batch in enumerate(kind(dataset, 1, num_workers=2)):  # torch's pass through /dev/shm, too
                assert batch.eq(number).all()
        where = os.readlink(dataset.cache.handle.segment.data)
        return len(dataset.cache), totals(dataset).hits, where, log.lines


@pytest.mark.parametrize(
    ("kind", "transform"), [(DataLoader, None), (CachedLoader, None), (CachedLoader, torch.Tensor.float)]
)
def test_a_small_dev_shm_is_never_overdrawn(kind: Any, transform: Any) -> None:
    """In 64 MiB, as Docker makes it, with backend="tmpfile" there are fewer slots and one warning, and no SIGBUS; nor
    do batches of workers, which would not fit beside them."""
    count, hits, where, heard = without_room(fill_in_small_shm, kind, transform)
    assert 32 <= count < 64
    assert hits == count
    assert where.startswith("/dev/shm/")
    [warning] = heard
    assert re.search(rf"room for {count} of 96 samples.*limited by /dev/shm \(\d+(\.\d)? MiB free\)", warning)


# --- sources that do not fit


class Stream(IterableDataset[Any]):
    """It has no index."""

    def __iter__(self) -> Any:
        return iter(())


class Endless:
    """It has no length."""

    def __getitem__(self, index: int) -> int:
        return index


CACHED: Any = CachedDataset([1, 2], defer=True)


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (Stream(), TypeError, "map-style.*got Stream. What has no index can be given to CachedStream"),
        (Endless(), TypeError, "with __getitem__ and __len__, got Endless"),
        (5, TypeError, "got int"),
        ("train/", TypeError, "source must be a map-style dataset .*, got str"),
        (Noisy(LENGTH), ValueError, r"Noisy \(24 samples\) cannot be cached: it is random"),
        ([], ValueError, "at least one sample, got an empty list: check the path or filter"),
        (Subset(CountedSource(3), []), ValueError, "got an empty Subset"),
        (CACHED, TypeError, "got a CachedDataset that is cached already"),
        (Subset(CACHED, [1]), TypeError, "got a Subset that is cached already"),
        (ConcatDataset([CountedSource(3), CACHED]), TypeError, "got a ConcatDataset that is cached already"),
        ([len, lambda: 1], TypeError, "cannot be kept as bytes: .*only objects that pickle can write"),
    ],
)
def test_what_cannot_be_cached_is_refused(source: Any, error: type[Exception], message: str) -> None:
    """Iterable, unsized, empty, random and cached sources, paths, and samples of no fixed size, are errors in words."""
    with pytest.raises(error, match=message):
        CachedDataset(source, strict=True)


def test_an_empty_source_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """Unless it is to be an error, it gives no batches, with one warning."""
    with closing(CachedDataset([])) as dataset:
        assert (len(dataset), list(DataLoader(dataset)), list(CachedLoader(dataset))) == (0, [], [])
        assert dataset.cache is None
    assert warnings(caplog) == ["list is empty: there is nothing to cache"]


# --- opening and closing


def test_a_dataset_that_is_not_open_passes_through(source: CountedSource) -> None:
    """With `defer=True` nothing is read before `share()`; after `close`, once or twice, nothing is kept."""
    dataset = CachedDataset(source, defer=True)
    assert (dataset.cache, source.loads) == (None, 0)
    assert same(dataset[3], source.expected(3))
    dataset.share()
    assert slots(dataset) == LENGTH
    first = list(DataLoader(dataset, 5))
    dataset.close()
    dataset.close()
    loads = source.loads
    assert same(list(DataLoader(dataset, 5, num_workers=2)), first)
    assert source.loads == loads + LENGTH
    assert (dataset.cache, dataset.counters, dataset.budget_bytes) == (None, None, 0)
    assert dataset.describe() == "CountedSource: 24 samples, not cached"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_sharing_anew_takes_the_memory_of_one(source: CountedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening again gives back all that was held, before what is free is measured; closing, everything."""
    this, measure, when_measured = {os.getpid()}, FreeMemory.measure, list[Any]()
    before, while_open = memory_files(this), set[int]()

    def measure_and_note(directory: str | None) -> FreeMemory:
        when_measured.append(memory_files(this))
        return measure(directory)

    monkeypatch.setattr(allocation.FreeMemory, "measure", measure_and_note)
    dataset = CachedDataset(source)
    for _ in range(3):
        while_open.add(len(memory_files(this)))
        dataset.share()
    dataset.close()
    assert memory_files(this) == before
    [count] = while_open
    assert count > len(before)
    assert all(files == before for files in when_measured)


@pytest.mark.parametrize("options", [{}, {"budget": 0}, {"budget": 0, "strict": True}])
def test_training_goes_on_without_memory(source: CountedSource, monkeypatch: Any, caplog: Any, options: Any) -> None:
    """Samples pass through, with one warning; nothing is refused where nothing was asked for."""

    def no_memory(*args: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Segment, "create", no_memory)
    dataset = CachedDataset(source, **options)
    assert same(list(DataLoader(dataset, 5, num_workers=2)), list(DataLoader(CountedSource(LENGTH), 5)))
    [warning] = warnings(caplog)
    assert "all samples are loaded from their source" in warning


# --- copies


@pytest.mark.parametrize("duplicate", [lambda dataset: pickle.loads(pickle.dumps(dataset)), copy.deepcopy, copy.copy])
def test_copies_share_the_cache(source: CountedSource, duplicate: Callable[[Any], Any]) -> None:
    """What the original fills, a copy serves, and one set of counts has both; closed, it gives up its own use alone.

    A copy outlives `close` of the original: it serves the source, and can still be sent to workers.
    """
    with closing(CachedDataset(source)) as dataset:
        other, another = duplicate(dataset), duplicate(dataset)
        loads = source.loads
        assert same(dataset[3], other[3])
        assert same(other[5], dataset.__getitems__([5, 3])[0])
        assert source.loads == loads + 2
        assert totals(dataset) == totals(other)
        assert totals(dataset).hits == 3
        other.close()
        assert other.cache is None
        assert same(other[3], source.expected(3))
        loads = source.loads
        assert same(dataset[3], source.expected(3))
        assert source.loads == loads
        assert (totals(dataset).hits, totals(dataset).misses) == (4, 2)
    for copied in (another, pickle.loads(pickle.dumps(another))):
        assert same([copied[3], *copied.__getitems__([5])], [source.expected(3), source.expected(5)])

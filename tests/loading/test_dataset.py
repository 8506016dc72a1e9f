"""CachedDataset as a user of plain PyTorch meets it: the samples of the source in any loader, each loaded once."""

import copy
import functools
import logging
import os
import pickle
import random
import re
import traceback
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
    DistributedSampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup import allocation
from tests.loading.twins import InBatches, Transformed, outcomes, same, totals
from tests.logs import Log
from tests.proc import memory_files
from tests.processes import context, without_room
from tests.sources import CountedSource, CountedStream, TransformedSource

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


def seed(value: int) -> None:
    torch.manual_seed(value)
    np.random.seed(value)
    random.seed(value)


def states() -> tuple[Any, ...]:
    return torch.get_rng_state().tolist(), pickle.dumps(np.random.get_state()), random.getstate()


def slots(dataset: CachedDataset) -> int:
    return 0 if dataset.cache is None else len(dataset.cache)


# --- in any loader


@pytest.mark.parametrize(
    ("num_workers", "method", "persistent"),
    [(0, None, False), (2, "fork", False), (2, "forkserver", True), (1, "spawn", True)],
)
def test_every_sample_is_loaded_once_in_three_epochs(
    source: CountedSource, caplog: pytest.LogCaptureFixture, num_workers: int, method: str | None, persistent: bool
) -> None:
    """Whatever starts the workers: the source's samples, for N loads and the announced ones, as the source counts."""
    with closing(CachedDataset(source)) as dataset:
        loader = DataLoader(
            dataset,
            5,
            True,
            num_workers=num_workers,
            multiprocessing_context=context(method) if method else None,
            persistent_workers=persistent,
        )
        for _ in range(3):
            seen = {}
            for images, labels, indices in map(functools.partial(numbered, source), loader):
                seen |= dict(zip(indices, zip(images, labels.tolist(), strict=True), strict=True))
            assert all(torch.equal(seen[i][0], source.expected(i)[0]) for i in range(LENGTH))
        counts = totals(dataset)
        del loader
    assert source.loads == LENGTH + announced(caplog)
    assert (counts.hits, counts.misses, counts.bypasses, counts.fills) == (2 * LENGTH, LENGTH, 0, LENGTH)


def numbered(source: CountedSource, batch: Any) -> tuple[Any, Any, list[int]]:
    """A batch with the index of each sample, by its pixels."""
    by_pixels = {source.expected(i)[0].numpy().tobytes(): i for i in range(len(source))}
    images, labels = batch
    indices = [by_pixels[image.numpy().tobytes()] for image in images]
    assert labels.tolist() == [source.expected(i)[1] for i in indices]
    return images, labels, indices


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

    What comes twice is read once.
    """
    with closing(CachedDataset(source, budget)) as dataset:
        numbers = [-1, 1, np.int64(2), np.array(5), torch.tensor(5), torch.tensor(5 - LENGTH)]
        for indices in ([3, 5, 3], [0], numbers, list(range(LENGTH)), []):
            expected, loads = [source.expected(int(index) % LENGTH) for index in indices], source.loads
            samples = dataset.__getitems__(indices)
            assert same(samples, expected)
            if len(indices) == 3 and budget == "auto":
                assert source.loads - loads == 2
                samples[0][0].zero_()  # each has memory of its own
                assert same(samples[1:], expected[1:])
            assert same([dataset[index] for index in indices], expected)


# --- sources that load whole batches


class Collated(CountedSource):
    """Loads whole batches and returns them as `make` makes them, for an own collate_fn."""

    make: Any = None

    def __getitems__(self, indices: list[int]) -> Any:
        return self.make([self[index][0] for index in indices])


@pytest.mark.parametrize("batch_size", [1, 5])
@pytest.mark.parametrize("budget", ["auto", "50%"])
def test_a_source_with_batches_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, batch_size: int, budget: str
) -> None:
    """Its `__getitems__` is asked for what is missing, batches of one included, and for nothing else."""
    source = CountedSource(LENGTH, log_path=tmp_path / "loads")
    with closing(CachedDataset(InBatches(source), budget)) as dataset:
        uncached = LENGTH - slots(dataset)
        for _ in range(3):
            batches = list(DataLoader(dataset, batch_size))
            assert same(batches, list(DataLoader(CountedSource(LENGTH), batch_size)))
        assert source.loads == LENGTH + 2 * uncached + announced(caplog)
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
        for ask in (
            lambda: dataset[index],
            lambda: dataset.__getitems__([0, index]),
            lambda: dataset.__getitems__([index]),
        ):
            with pytest.raises(IndexError, match=f"index {index} is outside of {LENGTH} samples"):
                ask()


# --- batches equal uncached batches


class BatchedAugmented(TransformedSource):
    """Loads whole batches."""

    def __getitems__(self, indices: list[int]) -> Any:
        return [self[index] for index in indices]


class Noisy(CountedSource):
    """A source that is random in itself: it cannot be split."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return image + torch.rand(()), label


AUGMENTATIONS = {
    "v1": v1.Compose([v1.ConvertImageDtype(torch.float32), v1.RandomCrop(6), v1.RandomHorizontalFlip()]),
    "v2": v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.RandomCrop(6), v2.RandomErasing(0.5)]),
}


def augmented(kind: str, make: type[TransformedSource] = TransformedSource) -> Dataset[Any]:
    source = make(LENGTH)
    source.transform = AUGMENTATIONS[kind]
    return source


def jitter(sample: Any) -> Any:
    """A transform that draws from every generator."""
    return sample[0] + torch.rand(()), sample[1], random.random(), np.random.rand()


def epochs(dataset: Dataset[Any], num_workers: int, shuffle: bool) -> tuple[list[Any], list[Any]]:
    """The batches of three epochs, and the states of the generators after each."""
    seed(11)
    batches, after = [], []
    for _ in range(3):
        batches += list(DataLoader(dataset, 5, shuffle, num_workers=num_workers))
        after.append(states())
    return batches, after


SOURCES: dict[str, Callable[[], Dataset[Any]]] = {
    "v1": lambda: augmented("v1"),
    "v2": lambda: augmented("v2"),
    "whole": lambda: Noisy(LENGTH),
    "Subset of whole": lambda: Subset(Noisy(LENGTH), range(3, LENGTH)),
    "Subset of split": lambda: Subset(augmented("v2"), range(3, LENGTH)),
}


@pytest.mark.usefixtures("seeded")
@pytest.mark.parametrize(
    ("name", "num_workers", "shuffle", "budget"),
    [
        ("v1", 0, True, "auto"),
        ("v1", 2, False, "50%"),
        ("v1", 0, True, 0),
        ("v2", 0, False, "50%"),
        ("v2", 2, True, "auto"),
        ("v2", 2, True, 0),
        ("whole", 0, True, "auto"),
        ("Subset of whole", 0, True, 0),
        ("Subset of split", 0, True, "50%"),
    ],
)
def test_batches_are_those_without_a_cache(name: str, num_workers: int, shuffle: bool, budget: str | int) -> None:
    """With a random transform in the source and another one after it: the same bits and draws in every epoch."""
    expected = epochs(Transformed(SOURCES[name](), jitter), num_workers, shuffle)
    with closing(CachedDataset(SOURCES[name](), budget, transform=jitter)) as dataset:
        assert same(epochs(dataset, num_workers, shuffle), expected)
        assert totals(dataset).hits == 2 * slots(dataset)


@pytest.mark.usefixtures("seeded")
def test_whole_batches_draw_alike_at_every_budget() -> None:
    """A source that loads whole batches draws for all of a batch before the first `transform`, cached or not."""
    results = []
    for budget in (0, "auto", "50%"):
        with closing(CachedDataset(augmented("v2", BatchedAugmented), budget, transform=jitter)) as dataset:
            results.append(epochs(dataset, 0, True))
    assert all(same(result, results[0]) for result in results)


# --- counts


@pytest.mark.parametrize(("budget", "num_workers"), [("auto", 0), ("50%", 2), (0, 0)])
def test_counts_add_up(source: CountedSource, budget: str | int, num_workers: int) -> None:
    """Hits, misses and bypasses sum to what was served, with replacement, padding and indices twice in a batch."""
    samplers: list[Any] = [
        WeightedRandomSampler([1.0] * LENGTH, 30, generator=seeded()),
        *(DistributedSampler(range(LENGTH + 1), 2, rank, shuffle=False) for rank in range(2)),
        [3, 3, 3, 5, 5, 3],
    ]
    with closing(CachedDataset(ConcatDataset([source, Subset(source, [0])]), budget)) as dataset:
        served = 0
        for sampler in samplers:
            for images, labels in DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers):
                numbered(source, (images, labels))  # every one is a whole sample of the source
                served += len(images)
        assert dataset[3][1] == dataset[3][1] == 3
        counts = totals(dataset)
        assert counts.served == served + 2 == 30 + 13 + 13 + 6 + 2
        assert counts.fills <= counts.misses
        assert counts.fills == (dataset.cache.filled if dataset.cache else 0)


# --- random sources


def test_a_source_that_cannot_be_split_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """It is not cached, and one warning says how to split it."""
    with closing(CachedDataset(Noisy(LENGTH))) as dataset:
        assert not torch.equal(dataset[3][0], dataset[3][0])
        assert dataset.cache is None
        assert totals(dataset).bypasses == 2
        list(DataLoader(dataset, 5, num_workers=2))
    [warning] = warnings(caplog)
    assert re.search(
        r"Noisy .* passes through uncached: it is random .*\n.*as transform=, .*allow_random=True", warning
    )


def test_allow_random_freezes_the_first_draw(caplog: pytest.LogCaptureFixture) -> None:
    """A random source is cached as it is on demand, without a warning."""
    with closing(CachedDataset(Noisy(300), allow_random=True)) as dataset:
        assert torch.equal(dataset[3][0], dataset[3][0])
        dataset.__getitems__(list(range(300)))  # so many that a sample would be read again
    assert warnings(caplog) == []


# --- budgets


@pytest.mark.parametrize(
    ("budget", "expected"),
    [("auto", LENGTH), ("33.3%", 7), (5 * SLOT_BYTES + SLOT_BYTES - 1, 5), (0, 0), ("100% of free", LENGTH)],
)
def test_a_budget_is_that_many_slots(
    source: CountedSource, caplog: pytest.LogCaptureFixture, budget: str | int, expected: int
) -> None:
    """Each form of a budget gives exactly the slots that it pays for, and all of them are filled."""
    with closing(CachedDataset(source, budget)) as dataset:
        assert slots(dataset) == expected
        assert dataset.budget_bytes <= LENGTH * SLOT_BYTES
        for _ in range(2):
            list(DataLoader(dataset, 5))
        assert totals(dataset).hits == totals(dataset).fills == expected
        assert totals(dataset).bypasses == 2 * (LENGTH - expected)
        assert f"{expected:,} of {LENGTH:,}" in dataset.describe() or expected == 0
    assert warnings(caplog) == []


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


def fill_in_small_shm(kind: Any) -> tuple[int, int, str, list[str]]:
    log = Log()
    log.setLevel(logging.WARNING)
    source: Any = [torch.full((4, 2**18), index, dtype=torch.uint8) for index in range(96)]
    with closing(CachedDataset(source, backend="tmpfile")) as dataset:
        for _ in range(2):
            for number, batch in enumerate(kind(dataset, 1, num_workers=2)):  # torch's pass through /dev/shm, too
                assert batch.eq(number).all()
        where = os.readlink(dataset.cache.handle.segment.data)
        return len(dataset.cache), totals(dataset).hits, where, log.lines


@pytest.mark.parametrize("kind", [DataLoader, CachedLoader])
def test_a_small_dev_shm_is_never_overdrawn(kind: Any) -> None:
    """In 64 MiB, as Docker makes it, with backend="tmpfile" there are fewer slots and one warning, and no SIGBUS."""
    count, hits, where, heard = without_room(fill_in_small_shm, kind)
    assert 32 <= count < 64
    assert hits == count
    assert where.startswith("/dev/shm/")
    assert len(heard) == 1
    assert re.search(rf"room for {count} of 96 samples.*limited by /dev/shm \(\d+(\.\d)? MiB free\)", heard[0])


# --- sources that do not fit


class Endless:
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (CountedStream, TypeError, "map-style.*got CountedStream. What has no index can be given to CachedStream"),
        (Endless, TypeError, "with __getitem__ and __len__, got Endless"),
        (lambda: 5, TypeError, "got int"),
        (lambda: "train/", TypeError, "source must be a map-style dataset .*, got str"),
        (lambda: Noisy(LENGTH), ValueError, r"Noisy \(24 samples\) cannot be cached: it is random"),
        (list, ValueError, "at least one sample, got an empty list: check the path or filter"),
        (lambda: Subset(CountedSource(3), []), ValueError, "got an empty Subset"),
        (lambda: CachedDataset([1, 2], defer=True), TypeError, "got a CachedDataset that is cached already"),
        (lambda: Subset(CachedDataset([1, 2], defer=True), [1]), TypeError, "got a Subset that is cached already"),
        (
            lambda: ConcatDataset([CountedSource(3), CachedDataset([1, 2], defer=True)]),
            TypeError,
            "got a ConcatDataset that is cached already",
        ),
        (lambda: [len, lambda: 1], TypeError, "cannot be kept as bytes: .*only objects that pickle can write"),
    ],
)
def test_what_cannot_be_cached_is_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    """Iterable, unsized, empty, random and cached sources, paths, and samples of no fixed size, are errors in words."""
    with pytest.raises(error, match=message):
        CachedDataset(make(), strict=True)


def test_an_empty_source_passes_through(caplog: pytest.LogCaptureFixture) -> None:
    """Unless it is to be an error, it gives no batches, with one warning."""
    with closing(CachedDataset([])) as dataset:
        assert (len(dataset), list(DataLoader(dataset)), list(CachedLoader(dataset)), dataset.cache) == (
            0,
            [],
            [],
            None,
        )
    assert warnings(caplog) == ["list is empty: there is nothing to cache"]


# --- closing


def test_a_closed_dataset_passes_through(source: CountedSource) -> None:
    """After `close`, once or twice, samples come from the source, and nothing is kept."""
    dataset = CachedDataset(source)
    first = list(DataLoader(dataset, 5))
    dataset.close()
    dataset.close()
    loads = source.loads
    assert same(list(DataLoader(dataset, 5, num_workers=2)), first)
    assert source.loads == loads + LENGTH
    assert (dataset.cache, dataset.counters, dataset.budget_bytes) == (None, None, 0)
    assert dataset.describe() == "CountedSource: 24 samples, not cached"


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_five_cycles_end_with_the_memory_of_one(source: CountedSource, monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening again gives back all that was held, before what is free is measured; closing, everything."""
    this, measure, when_measured = {os.getpid()}, FreeMemory.measure, list[Any]()
    before, while_open = memory_files(this), set[int]()

    def measure_and_note(directory: str | None) -> FreeMemory:
        when_measured.append(memory_files(this))
        return measure(directory)

    monkeypatch.setattr(allocation.FreeMemory, "measure", measure_and_note)
    dataset = CachedDataset(source)
    for _ in range(5):
        list(DataLoader(dataset, 5))
        while_open.add(len(memory_files(this)))
        dataset.share()
    dataset.close()
    assert memory_files(this) == before
    [count] = while_open
    assert count > len(before)
    assert all(files == before for files in when_measured)


def test_a_deferred_dataset_opens_when_it_is_shared(source: CountedSource) -> None:
    """With `defer=True` nothing is read or opened before `share()`."""
    dataset = CachedDataset(source, defer=True)
    assert (dataset.cache, source.loads) == (None, 0)
    assert same(dataset[3], source.expected(3))
    with closing(dataset):
        dataset.share()
        assert slots(dataset) == LENGTH


def no_memory(*args: Any, **named: Any) -> Any:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("options", [{}, {"budget": 0}, {"budget": 0, "strict": True}])
def test_training_goes_on_without_memory(
    source: CountedSource, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, options: dict[str, Any]
) -> None:
    """Samples pass through, with one warning; nothing is refused where nothing was asked for."""
    monkeypatch.setattr(Segment, "create", no_memory)
    dataset = CachedDataset(source, **options)
    assert same(list(DataLoader(dataset, 5, num_workers=2)), list(DataLoader(CountedSource(LENGTH), 5)))
    [warning] = warnings(caplog)
    assert "all samples are loaded from their source" in warning


# --- attributes and copies


@pytest.mark.parametrize("duplicate", [lambda dataset: pickle.loads(pickle.dumps(dataset)), copy.deepcopy, copy.copy])
def test_copies_share_the_cache(source: CountedSource, duplicate: Callable[[Any], Any]) -> None:
    """What the original fills, a copy serves, and one set of counts has both; closed, it gives up its own use alone."""
    with closing(CachedDataset(source)) as dataset:
        other = duplicate(dataset)
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


def test_a_copy_whose_memory_is_closed_passes_through(source: CountedSource) -> None:
    """A copy outlives `close` of the original: it serves the source, and can still be sent to workers."""
    dataset = CachedDataset(source)
    other = copy.deepcopy(dataset)
    dataset.close()
    assert same(other[3], source.expected(3))
    assert same(other.__getitems__([3]), [source.expected(3)])
    assert same(pickle.loads(pickle.dumps(other))[3], source.expected(3))


class DiskError(Exception):
    pass


class Failing(CountedSource):
    def __getitem__(self, index: int) -> Any:
        if index == 6:
            self.decode()
        return super().__getitem__(index)

    def decode(self) -> None:
        raise DiskError("the disk is gone")


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("budget", ["auto", 0])
def test_the_users_own_exception_comes_through(budget: str | int, num_workers: int) -> None:
    """With its type, text and traceback; the batches before and after it are served."""
    with closing(CachedDataset(Failing(LENGTH), budget)) as dataset:
        came = list(outcomes(DataLoader(dataset, 4, num_workers=num_workers)))
    error, served = came[1], [came[0], *came[2:]]
    assert same(served, [batch for k, batch in enumerate(DataLoader(CountedSource(LENGTH), 4)) if k != 1])
    assert type(error) is DiskError
    assert "the disk is gone" in str(error)
    text = "".join(traceback.format_exception(error))
    assert "in decode" in text
    assert 'raise DiskError("the disk is gone")' in text


@pytest.mark.parametrize("budget", [0, "50%", "auto"])
def test_a_batch_that_holds_an_index_twice_reads_it_once(tmp_path: Path, budget: Any) -> None:
    """Where it has a slot; each sample is served once, and both have memory of their own."""
    source = CountedSource(LENGTH, log_path=tmp_path / "loads")
    with closing(CachedDataset(source, budget)) as dataset:
        wanted, before = [4, 5, 4, 6, 5, 7], source.loads
        samples = dataset.__getitems__(wanted)
        assert [label for _, label in samples] == [source.expected(index)[1] for index in wanted]
        assert totals(dataset).served == len(wanted)
        if budget == "auto":
            assert source.loads - before == 4
        samples[0][0].zero_()
        assert torch.equal(samples[2][0], source.expected(4)[0])

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
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, SequentialSampler, Subset, TensorDataset
from torchvision.transforms import v2

from lightning_stocache.loading.dataset import CachedDataset, StandIn
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup import allocation
from tests.jobs import Log, warnings
from tests.loading.twins import Augmented, InBatches, looked, same, totals
from tests.processes import memory_files
from tests.sources import CountedSource, CountedStream, Made

LENGTH = 24
SLOT_BYTES = 3 * 8 * 8 + 8 + 4  # the image, the label, the word


@pytest.fixture
def source(tmp_path: Path) -> CountedSource:
    return CountedSource(LENGTH, log_path=tmp_path / "loads", classes=LENGTH)


WORKERS: dict[str, Any] = {"num_workers": 2}
PERSISTENT = WORKERS | {"persistent_workers": True}
WAYS: dict[str, tuple[Any, str | int, int, dict[str, Any]]] = {
    "whole": (DataLoader, "auto", LENGTH, {}),
    "percent": (DataLoader, "33.3%", 7, WORKERS),
    "bytes": (DataLoader, 5 * SLOT_BYTES + SLOT_BYTES - 1, 5, {}),
    "off": (DataLoader, 0, 0, {}),
    "alone": (CachedLoader, "25%", 6, {}),
    "persistent": (CachedLoader, "25%", 6, PERSISTENT),
    "made": (CachedLoader, "auto", LENGTH, PERSISTENT | {"gather": "worker"}),
}
"""Loaders, budgets, the slots that these pay for, and arguments of the loaders."""


class Settable:
    """Holds a transform in the ways in which frameworks set one."""

    def __init__(self) -> None:
        self.transform: Any = None
        self._steps: Any = None

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 16, 16), index, dtype=torch.uint8)
        for step in (self.transform, self._steps):
            image = image if step is None else step(image)
        return image, index

    @property
    def steps(self) -> Any:
        return self._steps

    @steps.setter
    def steps(self, steps: Any) -> None:
        self._steps = steps

    def set_steps(self, steps: Any) -> None:
        self._steps = steps


SETS: dict[str, Callable[[Any, Any], Any]] = {
    "attribute": lambda dataset, steps: setattr(dataset, "transform", steps),
    "property": lambda dataset, steps: setattr(dataset, "steps", steps),
    "method": lambda dataset, steps: dataset.set_steps(steps),
    "source": lambda dataset, steps: setattr(dataset.source, "transform", steps),
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "way", "options"),
    [
        *((kind, way, {}) for kind in (DataLoader, CachedLoader) for way in SETS),
        *((CachedLoader, way, WORKERS) for way in SETS),
        *((DataLoader, way, WORKERS) for way in ("attribute", "property")),
    ],
)
def test_a_transform_that_is_set_before_the_first_sample_opens_the_cache_again(
    kind: Any, way: str, options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """What a framework sets when it makes the loader is split, and no warning comes; later it is a change."""
    steps = v2.Compose([v2.RandomCrop(8), v2.ToDtype(torch.float32, scale=True)])
    with closing(CachedDataset(Settable())) as dataset:  # type: ignore[arg-type]
        SETS[way](dataset, steps)
        loader = kind(dataset, batch_size=16, **options)
        for _ in range(2):
            assert {image.shape for images, _ in loader for image in images} == {(3, 8, 8)}
        assert dataset.counters.totals().hits >= 64
        assert warnings(caplog) == []
        dataset.transform = v2.CenterCrop(12)
        assert dataset[0][0].shape[1] in (8, 12)
        assert dataset.cache is None
    [words] = warnings(caplog)
    assert "`transform` has changed since it was cached" in words


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize("way", WAYS)
def test_what_has_a_slot_is_loaded_once(source: CountedSource, caplog: pytest.LogCaptureFixture, way: str) -> None:
    """Each of three epochs has each sample once and counts it once, as the source counts; nothing is warned of."""
    kind, budget, count, options = WAYS[way]
    with closing(CachedDataset(InBatches(source) if way == "percent" else source, budget)) as dataset:
        assert len(dataset.cache or ()) == count
        assert dataset.budget_bytes <= LENGTH * SLOT_BYTES
        at_setup = source.loads
        loader = kind(dataset, 5, shuffle=True, **options)
        for epoch in range(1, 4):
            images, labels = map(torch.cat, zip(*loader, strict=True))
            assert sorted(labels.tolist()) == list(range(LENGTH))
            assert same(list(images), [source.expected(index)[0] for index in labels.tolist()])
            counts = totals(dataset)
            assert (counts.misses, counts.fills, counts.hits) == (count, count, (epoch - 1) * count)
            assert counts.bypasses == epoch * (LENGTH - count)
            assert counts.bytes_from_cache == counts.hits * (SLOT_BYTES - 4)
            assert source.loads == at_setup + counts.misses + counts.bypasses + looked(dataset)
        assert f"room for {'all' if count == LENGTH else f'{count} of'} {LENGTH}" in dataset.describe() or count == 0
        del loader
    assert warnings(caplog) == []


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


FOLD = list(range(3, LENGTH, 5))


def row(index: int) -> Any:
    return torch.full((3,), float(index)), int(index)


def record(index: int) -> Any:
    return {"text": f"sample {index}"}


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("make", "budget", "indices", "count"),
    [
        (row, "100%", FOLD, 5),
        (record, "60%", FOLD, 3),
        (row, "50%", None, 12),
        (record, "auto", None, 24),
        (row, 0, None, 0),
    ],
)
def test_any_index_gives_the_sources_sample(make: Any, budget: Any, indices: Any, count: int, tmp_path: Path) -> None:
    """One by one, in batches and by loaders, as numbers of Python and numpy; each with a slot is loaded once."""
    source, chance, served = Made(make, LENGTH, tmp_path / "loads"), random.Random(0), 0
    with closing(CachedDataset(source, budget, indices=indices or None)) as dataset:
        at_setup, kinds = source.loads, [int, np.int64, np.uint8]
        assert (len(dataset), len(dataset.cache or ())) == (LENGTH, count)
        assert dataset.ring.coverage == count / len(indices or source)
        room = "all" if count == 5 else f"{count} of"
        assert not indices or f"{room} the 5 that are drawn of 24 samples" in dataset.describe()
        for _ in range(200):
            wanted = [chance.choice(kinds)(chance.randrange(LENGTH)) for _ in range(chance.randrange(6))]
            got = [dataset[wanted[0]]] if len(wanted) == 1 else dataset.__getitems__(wanted)
            assert same(list(got), [make(int(index)) for index in wanted])
            served += len(wanted)
        counts = totals(dataset)
        assert counts.served == served
        assert counts.misses == counts.fills == count
        assert source.loads == at_setup + counts.misses + counts.bypasses + looked(dataset)
        if make is row:
            first, second = dataset.__getitems__([3, 3])
            first[0].zero_()
            assert same(second, row(3))
        for drawn in (FOLD, range(LENGTH), [1, 2, 3]):
            assert same(list(CachedLoader(dataset, 4, sampler=drawn)), list(DataLoader(source, 4, sampler=drawn)))
        for index in (LENGTH + 5, -LENGTH - 1):
            for ask in (dataset.__getitem__, lambda index: dataset.__getitems__([index])):
                with pytest.raises(IndexError, match=f"index {index} is outside of {LENGTH} samples"):
                    ask(index)


# --- sources and options


def test_freeze_random_freezes_the_first_draw(caplog: pytest.LogCaptureFixture) -> None:
    """A random source is cached as it is on demand, without a warning, though one sample cannot be read."""

    def noise(index: int) -> torch.Tensor:
        if index == 0:
            raise OSError("no file")
        return torch.rand(3)

    with closing(CachedDataset(Made(noise, 300), freeze_random=True)) as dataset:
        assert torch.equal(dataset[3], dataset[3])
        dataset.__getitems__(list(range(1, 300)))  # so many that a sample would be read again
    assert warnings(caplog) == []


def fill_in_small_shm(kind: Any, transform: Any) -> tuple[int, int, str, list[str]]:
    log = Log(logging.WARNING)
    source: Any = [torch.full((4, 2**18), index, dtype=torch.uint8) for index in range(48)]
    with closing(CachedDataset(source, backend="tmpfile", transform=transform)) as dataset:
        for _ in range(2):
            for number, batch in enumerate(kind(dataset, 1, num_workers=2)):  # torch's pass through /dev/shm, too
                assert batch.eq(number).all()
        where = os.readlink(dataset.cache.handle.segment.path)
        return len(dataset.cache), totals(dataset).hits, where, log.lines


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize(("kind", "transform"), [(DataLoader, None), (CachedLoader, torch.Tensor.float)])
def test_a_small_dev_shm_is_never_overdrawn(kind: Any, transform: Any, small_shm: Any) -> None:
    """In 32 MiB there are fewer slots, one warning and no SIGBUS; batches of workers stay outside."""
    count, hits, where, heard = small_shm(fill_in_small_shm, kind, transform, mib=32)
    assert 12 <= count < 32
    assert hits == count
    assert where.startswith("/dev/shm/")
    [warning] = heard
    assert re.search(rf"room for {count} of 48 samples.*limited by /dev/shm \(\d+(\.\d)? MiB free\)", warning)


class Collated(CountedSource):
    """Loads whole batches and returns them stacked, for a `collate_fn` of the user's."""

    def __getitems__(self, indices: list[int]) -> Any:
        return torch.stack([self[index][0] for index in indices])


NOISY = Made(lambda index: torch.rand(2), LENGTH)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ([], "list is empty: there is nothing to cache"),
        (Collated(LENGTH), "gives whole batches"),
        (NOISY, r"Made .* passes through uncached: it is random .*\n.*as transform=, .*freeze_random=True"),
    ],
    ids=["empty", "collated", "random"],
)
def test_what_cannot_be_cached_passes_through(source: Any, words: str, caplog: pytest.LogCaptureFixture) -> None:
    """As it is, finished batches of its `__getitems__` included, with one warning that says why."""
    arguments: dict[str, Any] = {"batch_size": LENGTH, "collate_fn": lambda batch: batch}
    expected = [(type(batch), len(batch)) for batch in DataLoader(source, **arguments)]
    with closing(CachedDataset(source)) as dataset:
        for kind in (DataLoader, CachedLoader):
            assert [(type(batch), len(batch)) for batch in kind(dataset, **arguments)] == expected
        assert dataset.cache is None
        assert totals(dataset).bypasses == 2 * len(source)
    [warning] = warnings(caplog)
    assert re.search(words, warning)


CACHED: Any = CachedDataset([1, 2], defer=True)
UNREAD = Made(lambda index: 1 / 0)
TWICE = ConcatDataset([CountedSource(3), Subset(CACHED, [1])])


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        (CountedStream(3), {}, "map-style.*got CountedStream. What has no index can be given to CachedStream"),
        ({1, 2}, {}, "with __getitem__ and __len__, got set"),
        ("train/", {}, "source must be a map-style dataset .*, got str"),
        (NOISY, {}, r"Made \(24 samples\) cannot be cached: it is random"),
        (Subset(NOISY, []), {}, "at least one sample, got an empty Subset: check the path or filter"),
        (CACHED, {}, "got a CachedDataset that is cached already"),
        (StandIn(CACHED), {}, "cached already"),
        (TWICE, {}, "got a ConcatDataset that is cached already"),
        ([len, lambda: 1], {}, "cannot be kept as bytes: .*only objects that pickle can write"),
        (UNREAD, {"backend": "shm"}, "backend must be 'auto', 'tmpfile', 'memfd' or 'file', got 'shm'"),
        (UNREAD, {"strict": "yes"}, "strict must be true or false, got 'yes'"),
        (UNREAD, {"defer": "yes"}, "defer must be true or false, got 'yes'"),
        (UNREAD, {"budget": "lots"}, "budget .*Accepted are"),
        (UNREAD, {"spec": "text", "layout": "rows"}, "cannot be|must be|has no"),
        (UNREAD, {"indices": []}, "must name at least one sample"),
        (UNREAD, {"indices": [50]}, "got 50"),
        (UNREAD, {"indices": [1.5]}, "must be whole numbers"),
    ],
)
def test_what_cannot_be_cached_is_refused(source: Any, options: dict[str, Any], message: str) -> None:
    """With `strict`, sources that cannot be cached, and always options that are none of their choices."""
    with pytest.raises((TypeError, ValueError), match=message):
        CachedDataset(source, **{"strict": True} | options)


# --- opening and closing


@pytest.mark.processes
def test_a_dataset_that_is_not_open_passes_through(source: CountedSource) -> None:
    """With `defer=True` nothing is read before `share()`; after `close`, once or twice, nothing is kept."""
    dataset = CachedDataset(source, defer=True)
    assert (dataset.cache, source.loads) == (None, 0)
    assert same(dataset[3], source.expected(3))
    dataset.share()
    assert len(dataset.cache or ()) == LENGTH
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


@pytest.mark.processes
def test_nothing_is_refused_where_nothing_was_asked_for(source: CountedSource, monkeypatch: Any, caplog: Any) -> None:
    """Without any memory, samples pass through, with one warning."""
    monkeypatch.setattr(Segment, "create", Mock(side_effect=OSError(28, "No space left on device")))
    dataset = CachedDataset(source, 0, strict=True)
    assert same(list(DataLoader(dataset, 5, num_workers=2)), list(DataLoader(source, 5)))
    [warning] = warnings(caplog)
    assert "all samples are loaded from their source" in warning


def test_a_larger_budget_never_keeps_fewer_images() -> None:
    """A few samples do not show the mean size of all: images are packed where they might not fit otherwise."""
    sizes = random.Random(3)
    images = [Image.new("RGB", (sizes.randint(40, 200), sizes.randint(40, 200))) for _ in range(64)]
    packed_bytes = sum(3 * image.width * image.height + 400 for image in images)
    for percent in (100, 125, 130, 150):
        with closing(CachedDataset(images, budget=packed_bytes * percent // 100)) as dataset:
            assert all(dataset[index] == image for index, image in enumerate(images))
            assert dataset.cache is not None
            assert dataset.cache.filled == 64


def test_what_is_kept_is_described() -> None:
    """How many images of many sizes will fit is an estimate; the steps that run after the cache are named."""
    images = [(Image.new("RGB", (size, size)), size) for size in range(40, 104)]
    source = Augmented(images.__getitem__, 64, v2.Pad(2), v2.RandomCrop(24), v2.ToImage())
    with closing(CachedDataset(source, budget="500KB")) as dataset:
        described = r"Augmented: room for about \d+ of 64 samples, 488.3 KiB; after the cache: RandomCrop, ToImage"
        assert re.fullmatch(described, dataset.describe())


def test_what_was_pickled_is_loaded_without_its_cache(source: CountedSource, caplog: Any) -> None:
    """A checkpoint may hold a dataset, and is loaded when the memory has gone."""
    with closing(CachedDataset(source)) as dataset:
        content = pickle.dumps(dataset)
    loaded = pickle.loads(content)
    assert loaded.cache is None
    assert same(loaded.__getitems__([3, 5]), [source.expected(3), source.expected(5)])
    [words] = warnings(caplog)
    assert words.startswith("a dataset that was pickled has lost its cache")


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("duplicate", [lambda dataset: pickle.loads(pickle.dumps(dataset)), copy.deepcopy, copy.copy])
def test_copies_share_the_cache(source: CountedSource, duplicate: Callable[[Any], Any]) -> None:
    """Fills and counts are shared. Closed, a copy gives up its own use alone; it outlives the original, uncached."""
    with closing(CachedDataset(source)) as dataset:
        other, another = duplicate(dataset), duplicate(dataset)
        loads = source.loads
        assert same(dataset[3], other[3])
        assert same(other[5], dataset.__getitems__([5, 3])[0])
        assert source.loads == loads + 2 + looked(dataset)
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

"""Datasets and loaders under the odds: their samples are the source's in every process and thread, stored once."""

import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.source.looks import AT_ONCE
from tests.cache.leaves import same
from tests.loading.twins import Numbers, copied, in_every_way, looked, plain_batches, totals
from tests.odds import CROWD, stop
from tests.sources import CountedSource, Made

pytestmark = pytest.mark.processes

LENGTH = 48


def source(folder: Path) -> CountedSource:
    return CountedSource(LENGTH, log_path=folder / "loads")


@pytest.fixture
def dataset(tmp_path: Path) -> Iterator[CachedDataset]:
    with closing(CachedDataset(source(tmp_path))) as dataset:
        yield dataset


def check(seed: int, dataset: Any, count: int = LENGTH) -> None:
    """Read samples in a random order, by default all, and compare each."""
    for index in random.Random(seed).sample(range(LENGTH), count):
        assert same(dataset[index], dataset.source.expected(index))


def test_many_processes_fill_one_cache(dataset: Any, crowd: Any) -> None:
    """32 processes that read all samples at once store each of them once, and count what they read."""
    before = dataset.source.loads
    crowd(check, dataset)
    counts = totals(dataset)
    assert counts.served == CROWD * LENGTH
    assert counts.misses == dataset.source.loads - before - looked(dataset)
    assert counts.fills + counts.setup_fills == dataset.cache.filled == LENGTH


@pytest.mark.epoch_one_reads_all
def test_a_process_that_is_stopped_in_a_load_keeps_nobody_from_its_sample(tmp_path: Path, stopped: Any) -> None:
    """Others load and store it meanwhile. When it goes on, it serves its own load, and stores nothing twice."""
    armed = tmp_path / "armed"

    def load(index: int) -> int:
        if index == 3 and armed.exists():
            armed.unlink()
            stop()
        return index

    with closing(CachedDataset(Made(load, LENGTH))) as dataset:
        armed.touch()
        reader = stopped(lambda: [dataset[index] for index in range(1, LENGTH)])
        assert [dataset[index] for index in range(LENGTH)] == list(range(LENGTH))
        assert dataset.cache.filled == LENGTH
        reader.go_on()
        assert reader.result() == list(range(1, LENGTH))
        assert totals(dataset).fills == LENGTH


@pytest.mark.named
def test_what_a_living_job_has_stored_is_not_loaded_again(tmp_path: Path, name: str, other_job: Any) -> None:
    """A job that joins a cache which another one has open is served its samples, also when that one is killed."""
    job = other_job(join, tmp_path, name, 20)
    with closing(join(tmp_path, name, 0)) as dataset:
        there, loads = dataset.cache.filled, source(tmp_path).loads
        assert there >= 20
        check(1, dataset)
        assert source(tmp_path).loads == loads + LENGTH - there + looked(dataset)
        job.kill()
        check(2, dataset)
        assert source(tmp_path).loads == loads + LENGTH - there + looked(dataset)


def join(folder: Path, name: str, count: int) -> CachedDataset:
    """Open the cache of a name, and read so many samples."""
    dataset = CachedDataset(source(folder), name=name)
    check(0, dataset, count)
    return dataset


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_second_thread_changes_no_batch(dataset: Any, second_thread: Any, num_workers: int) -> None:
    """It may draw random numbers, log, and read the same dataset; batches are those of the source."""
    expected = list(DataLoader(dataset.source, 5))
    second_thread(lambda: check(0, dataset, 1))
    loader = CachedLoader(dataset, 5, num_workers=num_workers)
    for _ in range(3):
        assert same([copied(batch) for batch in loader], expected)


class _Counting(Dataset[int]):
    """Counts its reads on the object or on the class."""

    reads = 0

    def __init__(self, of: str) -> None:
        self.of = of
        self.calls = 0

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        if self.of == "class":
            type(self).reads += 1
        self.calls += 1
        return index


@pytest.mark.parametrize("of", ["object", "class"])
def test_a_count_of_reads_beside_a_second_thread_asks_for_no_more_than_a_few(second_thread: Any, of: str) -> None:
    """Nobody can tell what moves a count while a second thread runs. That is found out once, not in each batch."""
    second_thread()
    with closing(CachedDataset(_Counting(of))) as dataset:
        loader = CachedLoader(dataset, 4)
        first = [batch.tolist() for batch in loader]
        before = cached_source(dataset).source.calls
        for _ in range(4):
            assert [batch.tolist() for batch in loader] == first
        assert cached_source(dataset).source.calls - before <= 2 * AT_ONCE
        assert dataset.cache is not None


@in_every_way
def test_a_device_that_is_behind_reads_whole_batches(
    arguments: Any, budget: Any, transform: Any, late_device: Any
) -> None:
    """The memory of a batch is not used again before a device that reads it an epoch later has done so."""
    expected = plain_batches(Numbers(LENGTH), transform)
    with closing(CachedDataset(Numbers(LENGTH), budget, transform=transform)) as dataset:
        loader = CachedLoader(dataset, 4, **arguments)
        for _ in range(2):
            read_late = [late_device.order(partial(copied, batch)) for batch in loader]
            late_device.synchronize()
            assert same([batch.result() for batch in read_late], expected)
        loader.close()

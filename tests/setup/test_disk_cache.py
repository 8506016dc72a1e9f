"""Caches on a disk, through the doors: warm from job to job, budgeted by the disk, refused where they cannot lie."""

import logging
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_stocache.cache import shortage
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading import serve
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.disk import DiskError
from lightning_stocache.node.named import clean
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.same_data import FingerprintError
from tests.processes import call, call_many
from tests.sources import CountedSource

LENGTH = 60


class Texts(CountedSource):
    """Samples that are no rows."""

    def expected(self, index: int) -> Any:
        return {"text": f"{index}," * (index % 17), "image": super().expected(index)[0]}


SOURCES = {"rows": CountedSource, "records": Texts}


def opened(source: Any, folder: Path, **options: Any) -> CachedDataset:
    """The cache of a source in a folder, under a name, without a look at random reads."""
    return CachedDataset(source, dir=str(folder / "caches"), name="photos", allow_random=True, **options)


def epoch(dataset: CachedDataset, source: Any, num_workers: int = 0) -> None:
    """Read every sample once, in batches, and compare each."""
    loader = CachedLoader(dataset, batch_size=8, shuffle=True, num_workers=num_workers, collate_fn=list)
    if isinstance(source, Texts):
        samples = [sample for batch in loader for sample in batch]
        assert sorted(sample["text"] for sample in samples) == sorted(source.expected(i)["text"] for i in range(LENGTH))
        return
    images, labels = zip(*CachedLoader(dataset, batch_size=8, shuffle=True, num_workers=num_workers), strict=True)
    came = sorted(zip(torch.cat(images).flatten(1).tolist(), torch.cat(labels).tolist(), strict=True))
    expected = [source.expected(index) for index in range(LENGTH)]
    assert came == sorted((image.flatten().tolist(), label) for image, label in expected)


def job(layout: str, folder: str, num_workers: int) -> tuple[int, int, list[int]]:
    """A job of one epoch: its hits and misses, and what it has loaded until then."""
    source = SOURCES[layout](LENGTH, (3, 8, 8), Path(folder, "loads"))
    dataset = opened(source, Path(folder))
    before = source.loads
    epoch(dataset, source, num_workers)
    counts = dataset.counters.totals()
    dataset.close()
    return counts.hits, counts.misses, source.loaded[before:]


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "num_workers"), [("rows", 2), ("records", 0)])
def test_the_next_job_loads_nothing(tmp_path: Path, layout: str, num_workers: int) -> None:
    """The first one loads each sample once; the next one, in another process, none. Another source is refused: the
    error names the directory, which `clean` needs."""
    assert call(job, layout, str(tmp_path), num_workers)[:2] == (0, LENGTH)
    hits, misses, loaded = call(job, layout, str(tmp_path), num_workers)
    assert (hits, misses, loaded) == (LENGTH, 0, [])
    with pytest.raises(FingerprintError, match=r"clean photos --dir .*caches"):
        opened(SOURCES[layout](LENGTH), tmp_path, fingerprint="v2")
    assert [segment.name for segment in clean("photos", str(tmp_path / "caches"))] == ["photos"]


@pytest.mark.processes
@pytest.mark.parametrize(("where", "num_workers"), [("disk", 2), ("memory", 0)])
def test_jobs_at_the_same_time_load_each_sample_once(tmp_path: Path, where: str, num_workers: int) -> None:
    """Four trials that draw the same order share one fill: between them, each sample is loaded once."""
    name = f"trials-{os.getpid()}-{num_workers}"
    options = {"name": name} if where == "memory" else {"name": name, "dir": str(tmp_path / "caches")}
    try:
        call_many(trial, [(str(tmp_path), num_workers, options)] * 4)
    finally:
        if where == "memory":
            clean(name)
    assert sorted(CountedSource(LENGTH, log_path=tmp_path / "loads").loaded) == list(range(LENGTH))


def trial(folder: str, num_workers: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    source = CountedSource(LENGTH, (3, 8, 8), Path(folder, "loads"))
    spec = SampleSpec.infer(source.expected(0))
    dataset = CachedDataset(source, allow_random=True, spec=spec, **options)
    for _ in range(2):
        epoch(dataset, source, num_workers)
    dataset.close()


@pytest.mark.processes
def test_a_cache_on_a_disk_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    """It goes with its job, like one in memory."""
    source = CountedSource(LENGTH)
    dataset = CachedDataset(source, dir=str(tmp_path / "caches"))
    epoch(dataset, source)
    assert (dataset.cache.memory_bytes, dataset.cache.disk_bytes > 0) == (0, True)
    assert "on the disk" in dataset.describe()
    dataset.close()
    assert os.listdir(tmp_path / "caches") == []


def test_the_budget_is_the_disk_s(tmp_path: Path) -> None:
    """Bytes and shares count samples with their checksums."""
    source = CountedSource(LENGTH)
    spec = SampleSpec.infer(source.expected(0))
    each = spec.slot_bytes + 8
    dataset = CachedDataset(source, 10 * each, dir=str(tmp_path), spec=spec)
    assert (len(dataset.cache), dataset.budget_bytes) == (10, 10 * each)
    for index in range(LENGTH):
        dataset[index]
    assert (dataset.cache.filled, dataset.cache.memory_bytes) == (10, 0)
    dataset.close()


@pytest.mark.processes
@pytest.mark.parametrize("layout", SOURCES)
def test_a_disk_that_hangs_is_waited_for_like_a_dataset(layout: str, tmp_path: Path, monkeypatch: Any) -> None:
    """What an earlier job has left is read by workers; the loader's `timeout` ends the wait, and nothing is lost."""
    call(job, layout, str(tmp_path), 0)
    source = SOURCES[layout](LENGTH, (3, 8, 8))
    dataset, on, fetch = opened(source, tmp_path), tmp_path / "on", Segment.fetch

    def hang(segment: Segment, offset: int, length: int) -> bytes:
        while not on.exists():
            time.sleep(0.01)
        return fetch(segment, offset, length)

    monkeypatch.setattr(Segment, "fetch", hang)
    batches = iter(CachedLoader(dataset, batch_size=8, num_workers=1, timeout=1, collate_fn=list))
    with pytest.raises(RuntimeError, match="timed out after 1 second"):
        next(batches)
    on.touch()
    del batches
    epoch(dataset, source, 1)
    counts = dataset.counters.totals()  # type: ignore[union-attr]
    assert (counts.misses, counts.fills) == (0, 0)
    dataset.close()


def test_storing_pauses_where_the_disk_is_slower_than_the_source(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    """Once it has cost half a second more than loading, samples are served unstored for ten, with one warning."""
    now, real = [0], Segment.store
    clock = SimpleNamespace(perf_counter_ns=lambda: now[0], monotonic=lambda: now[0] / 1e9)

    def slow(segment: Segment, offset: int, *parts: memoryview) -> None:
        now[0] += 100_000_000
        real(segment, offset, *parts)

    source = CountedSource(LENGTH)
    dataset = CachedDataset(source, dir=str(tmp_path / "caches"), spec=SampleSpec.infer(source.expected(0)))
    cache = dataset.cache
    assert cache is not None
    for module in (serve, shortage):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(Segment, "store", slow)
    for index in range(20):
        assert torch.equal(dataset[index][0], source.expected(index)[0])
    stored = cache.filled
    assert 0 < stored < 10
    counts = dataset.counters.totals()  # type: ignore[union-attr]
    assert (counts.misses, counts.bypasses, counts.fills) == (20, 0, stored)
    now[0] += 10_000_000_000
    dataset[20]
    assert cache.filled == stored + 1
    assert caplog.text.count("storing pauses for 10 s") == 1
    dataset.close()


def test_a_directory_that_is_none_ends_set_up_or_the_cache(tmp_path: Path, caplog: Any) -> None:
    """With `strict` it is an error, else training goes on without a cache, with one warning."""
    (tmp_path / "caches").write_text("a file")
    source = CountedSource(LENGTH)
    with pytest.raises(DiskError, match="Not a directory"):
        opened(source, tmp_path, strict=True)
    with caplog.at_level(logging.WARNING):
        dataset = opened(source, tmp_path)
    assert dataset.cache is None
    assert "the cache is off" in caplog.text
    epoch(dataset, source)


@pytest.mark.processes
def test_a_directory_that_vanishes_harms_nobody(tmp_path: Path) -> None:
    """The file is open; only the next job starts cold."""
    source = CountedSource(LENGTH)
    dataset = opened(source, tmp_path)
    epoch(dataset, source)
    shutil.rmtree(tmp_path / "caches")
    epoch(dataset, source)
    dataset.close()


def test_a_node_that_comes_new_takes_what_the_others_leave() -> None:
    """One of four is lost and replaced: its arc is the new one's, and no other moves."""
    ring = Ring.cut(1000, (0.25,) * 4, (250,) * 4)
    for lost in range(4):
        held = [None if node == lost else arc for node, arc in enumerate(ring.arcs)]
        order = [held[(node + 1) % 4] for node in range(4)]  # the nodes may come in another order
        again = ring.with_arcs(order)
        assert again.coverage == 1.0
        assert {arc.start for arc in again.arcs} == {0, 250, 500, 750}
    fewer = Ring.cut(1000, (1 / 3,) * 3, (250,) * 3).with_arcs(ring.arcs[:3])
    assert fewer.arcs == ring.arcs[:3]

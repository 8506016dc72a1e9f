"""A cache with a name, or on a disk, outlives its job: the next one starts warm, and is served its own data only."""

import itertools
import logging
import os
import re
import shutil
import signal
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset, default_collate

from lightning_stocache.cache import shortage
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.loading import serve
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.files import HEADER_BYTES, ManifestError
from lightning_stocache.node.named import clean, named_segments
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.same_data import FingerprintError
from lightning_stocache.source.samples import bits, same_sample
from lightning_stocache.training.datamodule import StocacheDataModule
from tests.jobs import warnings
from tests.loading.twins import looked, same
from tests.processes import call, call_many, hanging, path_of, run_ranks, signal_at_line
from tests.sources import CountedSource

pytestmark = pytest.mark.named

LENGTH = 40
COMPARED = 4
"""Samples that set-up reads for a cache with a name: to store them, or to compare them with what lies there."""

ROW = SampleSpec.infer(CountedSource(1).expected(0))


class OtherSource(CountedSource):
    """Another class."""


class Texts(CountedSource):
    """Samples that are no rows."""

    def expected(self, index: int) -> Any:
        return {"text": f"{index}," * (index % 17), "image": super().expected(index)[0]}


@pytest.fixture(autouse=True)
def set_up_reads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these tests start no process."""
    monkeypatch.setattr("lightning_stocache.setup.find.start_method", lambda chosen: None)


def source(folder: Path | str, kind: type[CountedSource] = CountedSource) -> CountedSource:
    return kind(LENGTH, log_path=Path(folder) / "loads")


def cached(source: Any, name: str, **options: Any) -> CachedDataset:
    """A cache for which set-up reads no more than four samples."""
    known = {"freeze_random": True} if isinstance(source, Texts) else {"spec": ROW}
    return CachedDataset(source, name=name, **known | options)


def check(dataset: CachedDataset, count: int | None = None) -> CachedDataset:
    """Read samples, by default all: each is that of the source."""
    for index in range(len(dataset) if count is None else count):
        assert bits(dataset[index]) == bits(dataset.source.expected(index))  # type: ignore[attr-defined]
    return dataset


def epoch(dataset: CachedDataset, num_workers: int) -> None:
    """Read every sample once, in batches of a random order, and compare each."""
    order = torch.randperm(LENGTH).tolist()
    loader = CachedLoader(dataset, batch_size=8, sampler=order, num_workers=num_workers)
    for at, batch in zip(range(0, LENGTH, 8), loader, strict=True):
        expected: Any = dataset.source.expected  # type: ignore[attr-defined]
        assert same(batch, default_collate([expected(index) for index in order[at : at + 8]]))


def read_all(folder: Path, name: str, kind: type[CountedSource], options: dict[str, Any]) -> tuple[int, ...]:
    """A job that reads everything once: the slots that were filled before, its misses, its hits, the filled slots, and
    the samples of its looks."""
    dataset = cached(source(folder, kind), name, **options)
    before = dataset.cache.filled
    check(dataset)
    counts, filled, looks = dataset.counters.totals(), dataset.cache.filled, looked(dataset)
    dataset.close()
    return before, counts.misses, counts.hits, filled, looks


@pytest.mark.processes
@pytest.mark.parametrize(("where", "kind"), [("memory", Texts), ("disk", CountedSource)])
def test_the_next_job_goes_on_filling(name: str, where: str, kind: type[CountedSource], tmp_path: Path) -> None:
    """After a job that was killed it loads what is missing, and nothing else; the one after it nothing at all."""
    options = {"dir": str(tmp_path / "caches")} if where == "disk" else {}
    with hanging(lambda: check(cached(source(tmp_path, kind), name, **options), 19)):
        pass  # and then it is killed
    loads = source(tmp_path).loads
    before, misses, hits, filled, looks = call(read_all, tmp_path, name, kind, options)
    assert 19 <= before < LENGTH
    assert (misses, hits, filled) == (LENGTH - before, before, LENGTH)
    assert source(tmp_path).loads == loads + COMPARED + misses + looks
    assert call(read_all, tmp_path, name, kind, options)[:4] == (LENGTH, 0, LENGTH, LENGTH)


@pytest.mark.processes
@pytest.mark.parametrize(("where", "num_workers"), [("disk", 2), ("memory", 0)])
def test_jobs_at_the_same_time_load_each_sample_once(name: str, tmp_path: Path, where: str, num_workers: int) -> None:
    """Four trials that draw the same order share one fill: between them, each sample is loaded once."""
    options = {"dir": str(tmp_path / "caches")} if where == "disk" else {}

    def trial() -> None:
        torch.manual_seed(0)
        with closing(cached(source(tmp_path), name, freeze_random=True, **options)) as dataset:  # set-up reads none
            for _ in range(2):
                epoch(dataset, num_workers)

    call_many(trial, [()] * 4)
    assert sorted(source(tmp_path).loaded) == list(range(LENGTH))


def load_rows(dataset: CachedDataset) -> Any:
    codec = dataset.cache.codec
    rows = codec.rows([np.empty(nbytes, dtype=np.uint8) for nbytes in codec.sizes(2)], 2)
    return cached_source(dataset).load_into(rows, [8, 9], [0, 1])


@pytest.mark.parametrize(
    "load",
    [
        lambda dataset: dataset[8],
        lambda dataset: dataset.__getitems__([8, 9]),
        load_rows,
        lambda dataset: cached_source(dataset).load_ahead(8),
    ],
    ids=["sample", "batch", "rows", "ahead"],
)
def test_who_is_interrupted_while_loading_leaves_the_samples_to_others(name: str, load: Any) -> None:
    """At whichever line an exception of a signal's handler comes (a timeout, Ctrl-C), the process goes on, and another
    job need not wait for the samples."""
    with closing(cached(CountedSource(LENGTH), name)) as dataset, closing(Store.attach(dataset.cache.handle)) as other:
        for moment in itertools.count(1):
            dataset.cache.clear()
            try:
                with signal_at_line(moment, ("cache", "loading"), lambda: True, sent=signal.SIGINT):
                    load(dataset)
                break
            except KeyboardInterrupt:
                missing = [index for index in (8, 9) if other.ready_slot(index) == NO_SLOT]
                assert other.divide(missing) == (missing, []), f"the line numbered {moment}"
                other.release(missing)
        assert moment > 50
        assert dataset.cache.filled == other.filled > 0


through: list[CachedDataset] = []


class Pairs(CountedSource):
    """Reads another sample through the cache, too."""

    def expected(self, index: int) -> Any:
        if through:
            assert same(through.pop()[index ^ 1], self.expected(index ^ 1))
        return super().expected(index)


def test_a_source_that_reads_through_the_cache_does_not_wait(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it makes a sample, which others may wait for, it loads a sample itself that another job is loading: two
    that wait for each other would wait for ever."""
    pairs = Pairs(LENGTH)
    with closing(cached(pairs, name)) as dataset, closing(Store.attach(dataset.cache.handle)) as other:
        dataset.cache.clear()
        assert other.divide([9]) == ([9], [])
        monkeypatch.setattr("lightning_stocache.cache.store.time.sleep", Mock(side_effect=AssertionError("it waits")))
        for first in (8, 10):
            through.append(dataset)
            assert same(dataset[first], pairs.expected(first))
        assert dataset.cache.is_stored(np.array([8, 9, 10, 11])).tolist() == [True, False, True, True]
        with pytest.raises(AssertionError, match="it waits"):  # outside of the source
            dataset[9]


def delete(file: Path, copy: Path) -> None:
    file.unlink()


def replace_by_a_copy(file: Path, copy: Path) -> None:
    shutil.copy(file, copy)
    copy.replace(file)


def replace_by_what_it_was(file: Path, copy: Path) -> None:
    shutil.copy(copy, f"{copy}.new")
    Path(f"{copy}.new").replace(file)


@pytest.mark.processes
@pytest.mark.parametrize("change", [delete, replace_by_a_copy, replace_by_what_it_was])
@pytest.mark.parametrize("kind", [CountedSource, Texts])
def test_who_changes_the_folder_of_jobs_changes_no_sample(
    change: Any, kind: type[CountedSource], name: str, tmp_path: Path
) -> None:
    """The file of a cache on a disk is swept away or replaced, with two jobs and a third at work: what each of them
    fills and reads, in turn with the others, is right."""
    options = {"dir": str(tmp_path / "caches")}
    file, copy = tmp_path / "caches" / path_of(name).name, tmp_path / "copy"
    first = check(cached(source(tmp_path, kind), name, **options), 10)
    shutil.copy(file, copy)
    with closing(first), closing(check(cached(source(tmp_path, kind), name, **options), 20)) as second:
        change(file, copy)
        with closing(cached(source(tmp_path, kind), name, **options)) as third:
            for dataset in (third, first, second) * 2:
                check(dataset)
    _, misses, hits, filled, _ = call(read_all, tmp_path, name, kind, options)
    assert (misses, filled) == (LENGTH - hits, LENGTH)


WHOLE = CountedSource(LENGTH)


def why_it_passes(caplog: pytest.LogCaptureFixture, source: CountedSource, name: str, **options: Any) -> str:
    """The warning with which a source passes through, read as without a cache. With `strict` it is an error."""
    caplog.clear()
    with closing(cached(source, name, **options)) as dataset:
        assert (dataset.cache, dataset.budget_bytes) == (None, 0)
        [words] = warnings(caplog)
        for index in (0, len(dataset) - 1):
            assert same_sample(dataset[index], source[index])
        assert dataset.counters.totals().bypasses == 2
    with pytest.raises((FingerprintError, ManifestError, PermissionError)) as caught:
        cached(source, name, strict=True, **options)
    assert "passes through uncached: " + str(caught.value) in words
    caplog.clear()
    return words


def test_another_dataset_passes_through(name: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Both sides are shown, with the two ways out; a spawned rank joins what the script itself has made."""
    table: list[tuple[Any, Any, dict[str, Any], str]] = [
        (WHOLE, WHOLE, {"fingerprint": "v2"}, "fingerprint"),
        (WHOLE, CountedSource(LENGTH + 1), {}, "length"),
        (WHOLE, CountedSource(LENGTH, (3, 8, 9)), {"spec": None}, "spec"),
        (WHOLE, OtherSource(LENGTH), {}, "dataset"),
        (WHOLE, WHOLE, {"freeze_random": True, "spec": None}, "dataset"),
        (Subset(WHOLE, range(20)), Subset(WHOLE, range(20, 40)), {}, "dataset"),  # two random splits of one length
    ]
    for number, (first, other, options, differs) in enumerate(table):
        with closing(cached(first, f"{name}-{number}", fingerprint="v1")) as dataset:
            words = why_it_passes(caplog, other, f"{name}-{number}", **{"fingerprint": "v1"} | options)
            assert re.search(rf"\({differs}: .+, not .+\)", words)
            assert "another name" in words
            assert f"stocache clean {name}-{number}" in words
            assert dataset.cache.filled == COMPARED
    for module in ("__main__", "__mp_main__"):
        monkeypatch.setattr(OtherSource, "__module__", module)
        cached(OtherSource(4), name, strict=True).close()


def test_any_texts_are_kept_and_told_apart(name: str) -> None:
    """Long ones of letters that take four bytes each, unprintable ones, and lone surrogates: the header has room."""
    words = "\U00020000" * 350
    source = type(words, (CountedSource,), {"__getitem__": lambda self, index: {words: torch.zeros(3)}})(LENGTH)
    for number, fingerprint in enumerate((words, "two\nlines", "\ud800", "\U0001f600" * 5000)):
        options = {"name": f"{name}-{number}", "spec": SampleSpec.infer(source[0])}
        for _ in range(2):
            cached(source, **options, fingerprint=fingerprint).close()
        with pytest.raises(FingerprintError):
            cached(source, **options, fingerprint=fingerprint + "!", strict=True)


def test_the_indices_of_one_fold_are_not_those_of_another(tmp_path: Path, name: str) -> None:
    """The job that draws the same finds its samples, whatever the order of its indices; another passes through."""
    fold = list(range(0, LENGTH, 4))
    with closing(cached(source(tmp_path), name, indices=fold)) as first:
        assert len(first.cache) == len(fold)
        for index in fold:
            first[index]
        looks = looked(first)
    with closing(cached(source(tmp_path), name, indices=fold[::-1])) as second:
        assert [second[index][1] for index in fold] == [index % 10 for index in fold]
        assert source(tmp_path).loads == len(fold) + COMPARED + looks + looked(second)
    for others in ({"indices": range(0, LENGTH, 5)}, {"indices": range(len(fold))}, {}):
        with pytest.raises(FingerprintError, match=r"\(dataset: "):
            cached(source(tmp_path), name, strict=True, **others)
        assert cached(source(tmp_path), name, **others).cache is None


def spoil(path: Path, place: int, content: bytes) -> None:
    """Overwrite a part of a cache's file."""
    with path.open("r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_file_that_is_no_sound_cache_passes_through(name: str, where: str, tmp_path: Path, caplog: Any) -> None:
    """What outlives a job can be spoilt: it is left alone before it is read, and the command that is named removes it.

    So is a file of another program or user; the other sets of the same job are cached.
    """
    folder = tmp_path / "caches"
    folder.mkdir()
    options = {"dir": str(folder)} if where == "disk" else {}
    path = folder / path_of(name).name if where == "disk" else path_of(name)
    for damage, words in (
        (lambda: spoil(path, 64, bytes(4)), "does not say what it holds"),
        (lambda: spoil(path, 64, b"\xff" * 500), "is damaged"),
        (lambda: spoil(path, 24, b"\x63"), r"another version .*format 99"),
        (lambda: os.truncate(path, HEADER_BYTES + LENGTH + 10), "do not fit in its 50 bytes"),
        (lambda: os.truncate(path, 100), "is cut off"),
        (lambda: path.write_text("notes"), "is no cache"),
        (lambda: path.chmod(0o666), "is not trusted"),
    ):
        if where == "disk" and "its 50" in words:
            continue  # repaired when the file is opened
        cached(WHOLE, name, **options).close()
        damage()
        command = f"stocache clean {name}"
        told = why_it_passes(caplog, WHOLE, name, **options)
        assert re.search(words, told)
        if "is no cache" in words or "is not trusted" in words:
            path.unlink()
            continue
        assert command in told
        assert [segment.name for segment in clean(name, **({"directory": str(folder)} if options else {}))] == [name]
    check(cached(WHOLE, name, **options)).close()


def test_a_name_that_cannot_be_used_leaves_the_other_sets_cached(name: str, caplog: Any) -> None:
    """A Trainer's call opens several sets at once; only the set of the other length passes through."""
    for length in (LENGTH, LENGTH + 1):
        dm = StocacheDataModule(CountedSource(length), CountedSource(8), name=name, freeze_random=True)
        caplog.clear()
        dm.setup("fit")
        facts = {"-".join(known["stages"]): known["slots"] for known in dm.caches.state()}
        assert facts == {"train": LENGTH if length == LENGTH else 0, "val": 8}
        assert len(warnings(caplog)) == (length > LENGTH)
        dm.teardown("fit")


def test_geometry_wins_over_another_budget(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A later job has the slots of the first, and is told so or refused; closing tells of what stays in memory."""
    caplog.set_level(logging.INFO, "lightning_stocache")
    for budget in ("50%", "50 %"):
        check(cached(WHOLE, name, budget=budget, strict=True)).close()
    assert warnings(caplog) == []
    assert caplog.text.count(f"kept as {name}, 20 of 20 slots filled. To remove it: ") == 2
    with closing(cached(WHOLE, name, budget="10%")) as later:
        assert (len(later.cache), later.cache.filled, later.ring.coverage) == (LENGTH // 2, LENGTH // 2, 0.5)
        assert later.ring.arcs == (later.cache.arc,)
        assert later.budget_bytes == LENGTH // 2 * later.cache.codec.slot_bytes
        check(later)
    [said] = warnings(caplog)
    assert f"the cache {name!r} was made with budget='50%' and keeps its 20 slots; budget='10%' is ignored" in said
    assert f"another name, or remove it: stocache clean {name}" in said
    assert said.count("\n") == 1
    with pytest.raises(FingerprintError, match="budget='auto' is ignored"):
        cached(WHOLE, name, strict=True)


@pytest.mark.processes
def test_two_ranks_share_it_and_the_next_job_is_warm(name: str, tmp_path: Path) -> None:
    """The leader opens it and the other rank attaches, twice; the leader finds other data, for both."""
    (cold, warm), of_the_other = run_ranks(halves, 2, str(tmp_path), name)
    assert of_the_other == [cold, warm]
    assert cold[:2] == warm[:2]
    assert cold[0] == LENGTH
    assert source(tmp_path).loads == LENGTH + COMPARED + cold[2] + warm[2]


def halves(rank: int, folder: str, name: str) -> list[tuple[int, int, int]]:
    return [half(rank, folder, name) for _ in range(2)]


def half(rank: int, folder: str, name: str) -> tuple[int, int, int]:
    dataset = cached(source(folder), name, defer=True)
    dataset.share()
    for index in range(rank, LENGTH, 2):
        assert bits(dataset[index]) == bits(WHOLE.expected(index))
    dist.barrier()
    answer = dataset.cache.filled, dataset.cache.segment.handle.inode, looked(dataset)
    other = cached(CountedSource(LENGTH, classes=7), name, defer=True)
    other.share()
    assert other.cache is None
    other.close()
    with pytest.raises((FingerprintError, RuntimeError), match="other data under this name"):
        cached(CountedSource(LENGTH, classes=7), name, defer=True, strict=True).share()
    dist.barrier()
    dataset.close()
    dist.barrier()
    return answer


def test_each_set_of_a_datamodule_has_a_name(name: str) -> None:
    """By its stage, and its place among the sets of that stage. A bad name is refused before anything is opened."""
    for make in (cached, lambda source, name: StocacheDataModule(source, name=name)):
        with pytest.raises(ValueError, match="name must be"):
            make(WHOLE, "../up")
    sets = [CountedSource(length) for length in (LENGTH, 8, 8, 8)]
    dm = StocacheDataModule(sets[0], sets[1:3], sets[3], name=name, freeze_random=True)
    for stage in ("fit", "test"):
        dm.setup(stage)
        dm.teardown(stage)
    kept = sorted(one.name.removeprefix(name) for one in named_segments() if one.name.startswith(name))
    assert kept == ["-test0", "-train0", "-val0", "-val1"]


def test_a_cache_on_a_disk_without_a_name_leaves_nothing(tmp_path: Path) -> None:
    """Its budget is the disk's. One with a name is removed by its folder, which may also vanish while it is used."""
    folder = tmp_path / "caches"
    each = ROW.slot_bytes + 24  # checksum, place, size
    with closing(CachedDataset(WHOLE, 10 * each, dir=str(folder), spec=ROW)) as dataset:
        check(dataset)
        assert (len(dataset.cache), dataset.cache.filled, dataset.budget_bytes) == (10, 10, 10 * each)
        assert (dataset.cache.memory_bytes, dataset.cache.disk_bytes > 0) == (0, True)
        assert "on the disk" in dataset.describe()
    assert os.listdir(folder) == []
    cached(WHOLE, "photos", dir=str(folder)).close()
    with pytest.raises(FingerprintError, match=r"clean photos --dir .*caches"):
        cached(WHOLE, "photos", dir=str(folder), fingerprint="v2", strict=True)
    assert [segment.name for segment in clean("photos", str(folder))] == ["photos"]
    with closing(cached(WHOLE, "photos", dir=str(folder))) as dataset:
        shutil.rmtree(folder)
        check(dataset)


@pytest.mark.processes
@pytest.mark.parametrize("kind", [CountedSource, Texts])
def test_a_disk_that_hangs_is_waited_for_like_a_dataset(
    kind: type[CountedSource], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an earlier job has left is read by workers; the loader's `timeout` ends the wait, and nothing is lost."""
    options = {"dir": str(tmp_path / "caches")}
    call(read_all, tmp_path, "photos", kind, options)
    dataset, on, fetch = cached(source(tmp_path, kind), "photos", **options), tmp_path / "on", Segment.fetch

    def hang(segment: Segment, offset: int, length: int) -> bytes:
        while not on.exists():
            time.sleep(0.01)
        return fetch(segment, offset, length)

    monkeypatch.setattr(Segment, "fetch", hang)
    batches = iter(CachedLoader(dataset, batch_size=8, num_workers=1, timeout=0.3, collate_fn=list))
    with pytest.raises(RuntimeError, match=r"timed out after 0\.3 second"):
        next(batches)
    on.touch()
    del batches
    epoch(dataset, 1)
    counts = dataset.counters.totals()  # type: ignore[union-attr]
    assert (counts.misses, counts.fills) == (0, 0)
    dataset.close()


def test_storing_pauses_where_the_disk_is_slower_than_the_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Once it has cost half a second more than loading, samples are served unstored for ten, with one warning."""
    now, store = [0], Segment.store
    clock = SimpleNamespace(
        perf_counter_ns=lambda: now[0], monotonic=lambda: now[0] / 1e9, thread_time_ns=lambda: now[0]
    )

    def slow(segment: Segment, offset: int, *parts: memoryview) -> None:
        now[0] += 100_000_000
        store(segment, offset, *parts)

    with closing(CachedDataset(WHOLE, dir=str(tmp_path / "caches"), spec=ROW)) as dataset:
        for module in (serve, shortage):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(Segment, "store", slow)
        check(dataset, 20)
        stored = dataset.cache.filled
        assert 0 < stored < 10
        counts = dataset.counters.totals()
        assert (counts.misses, counts.bypasses, counts.fills) == (20, 0, stored)
        now[0] += 10_000_000_000
        dataset[20]
        assert dataset.cache.filled == stored + 1
    assert caplog.text.count("storing pauses for 10 s") == 1

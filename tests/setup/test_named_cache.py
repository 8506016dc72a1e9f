"""A cache with a name outlives its job: the next one starts warm, and nobody is ever served what is not his."""

import errno
import logging
import os
import re
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Subset

from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import HEADER_BYTES, Geometry, Manifest
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.named import clean, named_segments, open_named
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.named_cache import open_cache
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.same_data import FingerprintError
from lightning_stocache.setup.segments import CacheMemoryError
from lightning_stocache.training.datamodule import StocacheDataModule
from tests.names import path_of
from tests.processes import Child, call
from tests.ranks import run_ranks
from tests.sources import CountedSource

pytestmark = pytest.mark.named

LENGTH = 40
COMPARED = 4
"""Samples that set-up reads for a cache with a name: to store them, or to compare them with what lies there."""


class OtherSource(CountedSource):
    """Another class."""


class StuckSource(CountedSource):
    """A job that is caught in the middle: its 20th load does not end until a file `go on` is there."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        sample = super().__getitem__(index)
        while self.loads == 20 and not Path(self.log_path).with_name("go on").exists():
            time.sleep(0.002)
        return sample


@pytest.fixture(autouse=True)
def set_up_reads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most of these tests start no process."""

    monkeypatch.setattr("lightning_stocache.setup.find.start_method", lambda chosen: None)


def source(folder: Path | str, length: int = LENGTH) -> CountedSource:
    return CountedSource(length, log_path=Path(folder) / "loads")


def cached(source: Any, name: str, **options: Any) -> CachedDataset:
    options.setdefault("spec", SampleSpec.infer(CountedSource(1).expected(0)))  # no reads at set-up but `COMPARED`
    return CachedDataset(source, name=name, **options)


def read_all(folder: str, name: str) -> tuple[int, int, int]:
    return read(cached(source(folder), name))


def read(dataset: CachedDataset) -> tuple[int, int, int]:
    """A job that reads everything once: its misses, its hits, and the slots that are filled at its end."""
    check(dataset)
    counts, filled = dataset.counters.totals(), dataset.cache.filled
    dataset.close()
    return counts.misses, counts.hits, filled


def check(dataset: CachedDataset) -> None:
    """Every sample is that of the source."""
    for index in range(len(dataset)):
        image, label = dataset[index]
        expected = dataset.source.expected(index)  # type: ignore[attr-defined]
        assert torch.equal(image, expected[0])
        assert label == expected[1]


# --- warm starts


@pytest.mark.processes
def test_a_half_filled_cache_goes_on_filling(name: str, tmp_path: Path) -> None:
    """The next job loads what is missing, and nothing else."""
    first = cached(source(tmp_path), name)
    for index in range(10):
        first[index]
    filled, loads = first.cache.filled, source(tmp_path).loads
    first.close()
    assert call(read_all, str(tmp_path), name) == (LENGTH - filled, filled, LENGTH)
    assert sorted(set(source(tmp_path).loaded)) == list(range(LENGTH))
    assert source(tmp_path).loads == loads + COMPARED + LENGTH - filled


def test_closing_says_once_what_is_kept(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Memory that stays must be told of, with the way to get rid of it."""
    caplog.set_level(logging.INFO, "lightning_stocache")
    dataset = cached(source(tmp_path), name)
    dataset.close()
    dataset.close()
    [said] = [record.getMessage() for record in caplog.records if "kept" in record.getMessage()]
    assert f"kept as {name}, {COMPARED} of {LENGTH} slots filled" in said
    assert said.endswith(f"python -m lightning_stocache clean {name}")


@pytest.mark.processes
def test_a_job_that_is_killed_leaves_a_usable_cache(name: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of filling: what is READY is right, and the next job loads the rest."""
    job = Child(fill_and_stick, str(tmp_path), name)
    deadline = time.monotonic() + 120
    while source(tmp_path).loads < 20:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    job.kill()
    (tmp_path / "go on").touch()
    misses, hits, filled = fill_and_stick(str(tmp_path), name)
    assert hits == 19
    assert (misses + hits, filled) == (LENGTH, LENGTH)


def fill_and_stick(folder: str, name: str) -> tuple[int, int, int]:
    return read(cached(StuckSource(LENGTH, log_path=Path(folder) / "loads"), name))


# --- what is refused


@pytest.mark.processes
@pytest.mark.parametrize(
    ("other", "options", "differs"),
    [
        (CountedSource(LENGTH), {"fingerprint": "v2"}, "fingerprint"),
        (CountedSource(LENGTH + 1), {}, "length"),
        (CountedSource(LENGTH, (3, 8, 9)), {"spec": None}, "spec"),
        (OtherSource(LENGTH), {}, "dataset"),
        (CountedSource(LENGTH), {"allow_random": True, "spec": None}, "dataset"),
    ],
)
def test_another_fingerprint_is_refused(name: str, other: Any, options: dict[str, Any], differs: str) -> None:
    """Both sides are shown, with the two ways out; what was there stays as it is."""
    first = cached(CountedSource(LENGTH), name, fingerprint="v1")
    with pytest.raises(FingerprintError) as caught:
        cached(other, name, **{"fingerprint": "v1"} | options)
    words = str(caught.value)
    assert re.search(rf"\({differs}: .+, not .+\)", words)
    assert "another name" in words
    assert f"python -m lightning_stocache clean {name}" in words
    assert first.cache.filled == COMPARED
    first.close()


def test_another_part_of_the_dataset_is_refused(name: str) -> None:
    """Two random splits of one length are told apart by their indices."""
    whole = CountedSource(LENGTH)
    first = cached(Subset(whole, list(range(0, 20))), name)
    with pytest.raises(FingerprintError, match=r"\(dataset: "):
        cached(Subset(whole, list(range(20, 40))), name)
    first.close()


def test_the_indices_of_one_fold_are_not_those_of_another(tmp_path, name):
    """The job that draws the same finds its samples, whatever the order of its indices; another is refused."""
    fold = list(range(0, LENGTH, 4))
    with closing(cached(source(tmp_path), name, indices=fold)) as first:
        assert len(first.cache) == len(fold)
        for index in fold:
            first[index]
    with closing(cached(source(tmp_path), name, indices=fold[::-1])) as second:
        assert [second[index][1] for index in fold] == [index % 10 for index in fold]
        assert source(tmp_path).loads == len(fold) + COMPARED
    for others in ({"indices": range(0, LENGTH, 5)}, {"indices": range(len(fold))}, {}):
        with pytest.raises(FingerprintError, match=r"\(dataset: "):
            cached(source(tmp_path), name, **others)


def test_the_source_of_a_script_is_the_same_in_a_spawned_rank(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that is spawned calls the script `__mp_main__`, and joins what the script itself has made."""
    for module in ("__main__", "__mp_main__"):
        monkeypatch.setattr(OtherSource, "__module__", module)
        dataset = cached(OtherSource(4, log_path=tmp_path / "loads"), name)
        assert dataset[1][1] == 1
        dataset.close()
    assert source(tmp_path).loads == 4 + COMPARED


def test_bad_names_are_refused() -> None:
    """Before anything is opened."""
    for make in (cached, lambda source, name: StocacheDataModule(source, name=name)):
        with pytest.raises(ValueError, match="name must be"):
            make(CountedSource(LENGTH), "../up")


# --- geometry


def test_geometry_wins_over_another_budget(name: str, tmp_path: Path) -> None:
    """The samples are where they are: a later job has the slots of the first, whatever it asks for."""
    first = cached(source(tmp_path), name, budget="50%")
    check(first)
    first.close()
    assert source(tmp_path).loads == LENGTH
    for budget in ("auto", "10%"):
        later = cached(source(tmp_path), name, budget=budget)
        assert (len(later.cache), later.cache.filled, later.ring.coverage) == (LENGTH // 2, LENGTH // 2, 0.5)
        assert later.ring.arcs == (later.cache.arc,)
        assert later.budget_bytes == LENGTH // 2 * later.cache.codec.slot_bytes
        check(later)
        later.close()
    assert source(tmp_path).loads == 2 * (LENGTH + COMPARED)


def test_a_budget_that_does_not_count_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """A sweep over budgets under one name hears both and the ways out, or is refused; the same ones do not."""
    for budget in ("50%", "50 %"):
        cached(CountedSource(LENGTH), name, budget=budget, strict=True).close()
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    cached(CountedSource(LENGTH), name, budget="10%").close()
    [said] = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert f"the cache {name!r} was made with budget='50%' and keeps its 20 slots; budget='10%' is not" in said
    assert f"another name, or remove it: python -m lightning_stocache clean {name}" in said
    assert said.count("\n") == 1
    with pytest.raises(FingerprintError, match="budget='auto' is not looked at"):
        cached(CountedSource(LENGTH), name, strict=True)


def test_off_is_off(name: str, tmp_path: Path) -> None:
    """A budget of 0 neither makes nor joins anything."""
    dataset = cached(source(tmp_path), name, budget=0)
    assert dataset.cache is None
    assert name not in [one.name for one in named_segments()]
    dataset.close()


@pytest.mark.processes
def test_datasets_open_beside_a_warm_one(name: str) -> None:
    """One that is warm takes nothing from the budget of the others, nor do they from its own."""
    warm = cached(CountedSource(LENGTH), name)
    check(warm)
    warm.close()
    requests = [CacheRequest(CountedSource(LENGTH), "", name=name), CacheRequest(CountedSource(10), "")]
    both = open_caches(requests, {"": Budget.parse("auto")}, NodeGroup())
    assert [opened.cache.filled for opened in both if opened.cache is not None] == [LENGTH, 10]  # read at set-up
    assert [len(opened.cache) for opened in both if opened.cache is not None] == [LENGTH, 10]
    for opened in both:
        opened.close()


def test_what_lies_there_is_no_cache(name: str) -> None:
    """A named segment of somebody else's making is refused, too."""
    segment, _ = open_named(name, 4096, Manifest(Geometry(10, 10)))
    with pytest.raises(FingerprintError, match="holds something else"):
        cached(CountedSource(LENGTH), name)
    segment.close()


def spoil(name: str, place: int, content: bytes) -> None:
    """Overwrite a part of a cache's file."""
    with path_of(name).open("r+b") as file:
        file.seek(place)
        file.write(content)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda name, path: spoil(name, 64, bytes(4)), "does not say what it holds"),
        (lambda name, path: spoil(name, 64, b"\xff" * 500), "is damaged"),
        (lambda name, path: spoil(name, 24, b"\x63"), r"another version .*format 99"),
        (lambda name, path: spoil(name, HEADER_BYTES + 3, b"\x05"), "a slot is in a state that there is not"),
        (lambda name, path: os.truncate(path, HEADER_BYTES + LENGTH + 10), "do not fit in its 50 bytes"),
        (lambda name, path: os.truncate(path, 100), "is cut off"),
    ],
)
def test_a_damaged_cache_is_refused_by_name(name: str, damage: Any, words: str) -> None:
    """What outlives a job can be spoilt: it is refused before it is read, and the command that is named removes it."""
    cached(CountedSource(LENGTH), name).close()
    damage(name, path_of(name))
    with pytest.raises(ValueError, match=f"the cache '{name}' .*{words}.*python -m lightning_stocache clean {name}"):
        cached(CountedSource(LENGTH), name)
    assert [one.name for one in clean(name)] == [name]
    dataset = cached(CountedSource(LENGTH), name)
    check(dataset)
    dataset.close()


@pytest.mark.parametrize("fingerprint", ["two\nlines", "\ud800", "\U0001f600" * 5000])
def test_any_fingerprint_is_kept_and_told_apart(name: str, fingerprint: str) -> None:
    """Texts that cannot be printed, that are long or that JSON escapes fit, and differ from their neighbours."""
    cached(CountedSource(LENGTH), name, fingerprint=fingerprint).close()
    cached(CountedSource(LENGTH), name, fingerprint=fingerprint).close()
    with pytest.raises(FingerprintError):
        cached(CountedSource(LENGTH), name, fingerprint=fingerprint + "!")


def test_the_longest_texts_fit_together(name: str) -> None:
    """Class, key and fingerprint of letters that take four bytes each: the header has room for all of them."""
    words = "\U00020000" * 350
    source = type(words, (CountedSource,), {"__getitem__": lambda self, index: {words: torch.zeros(3)}})(LENGTH)
    for _ in range(2):
        cached(source, name, spec=SampleSpec.infer(source[0]), fingerprint=words).close()


def test_without_memory_no_name_is_left(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `strict` the error is that of any cache, else samples pass through, and nothing lies under the name."""

    def full(segment: Segment, offset: int, length: int) -> None:
        if segment.path is not None:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Segment, "reserve", full)
    with pytest.raises(CacheMemoryError, match="No space left"):
        cached(CountedSource(LENGTH), name, strict=True)
    dataset = cached(CountedSource(LENGTH), name)
    assert dataset.cache is None
    check(dataset)
    assert name not in [one.name for one in named_segments()]


@pytest.mark.processes
def test_a_cache_that_another_job_has_made_stays(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who comes too late to make it, joins it and finds no memory leaves it as it is."""
    call(read_all, str(tmp_path), name)

    def full(segment: Segment, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    spec, auto = SampleSpec.infer(CountedSource(1).expected(0)), Budget.parse("auto")
    monkeypatch.setattr(Segment, "reserve", full)
    with pytest.raises(OSError, match="No space left"):
        open_cache(CacheRequest(source(tmp_path), name=name), spec, auto, Arc(LENGTH, LENGTH))
    monkeypatch.undo()
    assert call(read_all, str(tmp_path), name) == (0, LENGTH, LENGTH)


# --- several ranks


@pytest.mark.processes
def test_two_ranks_share_it_and_the_next_job_is_warm(name: str, tmp_path: Path) -> None:
    """The leader opens it and the other rank attaches; so again in the next job, which loads nothing."""
    cold = run_ranks(half, 2, str(tmp_path), name)
    assert [filled for filled, _ in cold] == [LENGTH, LENGTH]
    loads = source(tmp_path).loads
    assert loads == LENGTH
    warm = run_ranks(half, 2, str(tmp_path), name)
    assert warm == [(LENGTH, cold[0][1]), (LENGTH, cold[0][1])]
    assert source(tmp_path).loads == loads + COMPARED


def half(rank: int, folder: str, name: str) -> tuple[int, int]:
    dataset = cached(source(folder), name, defer=True)
    dataset.share()
    for index in range(rank, LENGTH, 2):
        image, _ = dataset[index]
        assert torch.equal(image, CountedSource(LENGTH).expected(index)[0])
    dist.barrier()
    answer = dataset.cache.filled, dataset.cache.segment.handle.inode
    dist.barrier()
    dataset.close()
    return answer


# --- several sets


@pytest.mark.processes
def test_each_set_of_a_datamodule_has_a_name(name: str) -> None:
    """By its stage, and its place among the sets of that stage."""
    sets = [CountedSource(length) for length in (LENGTH, 8, 8, 8)]
    dm = StocacheDataModule(sets[0], sets[1:3], sets[3], name=name, fingerprint="v1", allow_random=True)
    for stage in ("fit", "test"):
        dm.setup(stage)
        dm.teardown(stage)
    kept = sorted(one.name.removeprefix(name) for one in named_segments() if one.name.startswith(name))
    assert kept == ["-test0", "-train0", "-val0", "-val1"]

"""Requests open side by side, on one rank and on two: in the memory that was asked for, or the same error for all."""

import errno
import logging
import math
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.disk import DiskError
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.named import named_segments
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.segments import CacheMemoryError
from lightning_stocache.source import random_split
from tests.logs import Log
from tests.ranks import run_ranks
from tests.sources import CountedSource, Made, TransformedSource

pytestmark = pytest.mark.processes

LENGTH = 20


def opened(source: Dataset[Any], budget: str | int = "auto", strict: bool = False, **options: Any) -> OpenCache:
    request = CacheRequest(source, "", strict=strict)
    return open_caches([request], {"": Budget.parse(budget)}, NodeGroup.discover(), **options)[0]


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- on one rank ----


@pytest.mark.parametrize("backend", ["tmpfile", "memfd", "file"])
def test_the_backend_can_be_chosen(backend: Any) -> None:
    """The memory lies where it was asked for, and no name is left while it is used."""
    its = opened(CountedSource(LENGTH), backend=backend)
    where = os.readlink(its.cache.handle.segment.data)
    assert where.startswith({"tmpfile": "/dev/shm/#", "memfd": "/memfd:", "file": "/dev/shm/lsc-"}[backend])
    assert where.endswith(" (deleted)")
    its.close()


@pytest.mark.named
def test_off_reads_and_measures_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started, nobody looks for free memory, which takes its time, and no name is made."""
    for what in ("allocation.FreeMemory", "child.DataLoader"):
        monkeypatch.setattr(f"lightning_stocache.setup.{what}", None)
    with closing(CachedDataset(CountedSource(LENGTH), 0, name=name)) as off:
        assert off.cache is None
        assert off[3][1] == 3
    assert name not in [segment.name for segment in named_segments()]


def full_for_names(segment: Segment, offset: int, length: int) -> None:
    if segment.path is not None:
        full()


@pytest.mark.named
@pytest.mark.parametrize(
    ("patched", "option", "error", "words"),
    [
        (("lightning_stocache.setup.open.sys.platform", "win32"), None, None, "Windows"),
        ((f"{Segment.__module__}.Segment.create", full), None, CacheMemoryError, "rank 0 could not make or reach"),
        ((f"{Segment.__module__}.Segment.reserve", full_for_names), "name", CacheMemoryError, "No space left"),
        (None, "dir", DiskError, "Not a directory"),
    ],
    ids=["Windows", "no memory", "no memory for a name", "no directory"],
)
def test_where_no_cache_can_be_samples_pass_through(
    patched: Any,
    option: str | None,
    error: type[Exception] | None,
    words: str,
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one warning that says why, and nothing left; with `strict` it is an error."""
    (tmp_path / "caches").write_text("a file")
    places = {"name": name, "dir": str(tmp_path / "caches")}
    options = {} if option is None else {option: places[option]}
    # Read in this process: pytest keeps the log, the log the error, and the error what the reading process uses.
    monkeypatch.setattr("lightning_stocache.setup.find.start_method", lambda chosen: None)
    if patched is not None:
        monkeypatch.setattr(*patched)
    if error is not None:
        with pytest.raises(error, match=words):
            CachedDataset(CountedSource(LENGTH), strict=True, **options)
        caplog.clear()
    dataset = CachedDataset(CountedSource(LENGTH), **options)
    assert (dataset.cache, dataset.counters, dataset.budget_bytes) == (None, None, 0)
    assert dataset[3][1] == 3
    [record] = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert words in record.getMessage()
    assert name not in [segment.name for segment in named_segments()]


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request's segment cannot be made: the first one's memory is given back, and the error is told."""
    create, made = Segment.create, []

    def create_three(size: int, *rest: Any, **more: Any) -> Segment:
        made.append(size)
        return full() if len(made) > 3 else create(size, *rest, **more)

    monkeypatch.setattr(Segment, "create", create_three)
    requests = [CacheRequest(CountedSource(LENGTH), "", strict=True) for _ in range(2)]
    with pytest.raises(CacheMemoryError, match="No space left"):
        open_caches(requests, {"": Budget.parse("auto")}, NodeGroup())


def photo(index: int) -> Any:
    """An image of PIL of some size, which takes a quarter less where it is packed."""
    return Image.new("RGB", (40 + index % 7, 60 + index % 5), (index % 256, 0, 0)), index


def text(index: int) -> Any:
    """A record: they are of very different sizes."""
    return "x" * int(np.random.default_rng(index).lognormal(6, 1)), index


def row(index: int) -> Any:
    """A row: all are of one size."""
    return torch.full((30,), index), index


@pytest.mark.parametrize(("make", "percent"), [(photo, 75), (text, 50), (row, 75)])
def test_a_budget_of_a_percentage_is_that_of_the_samples(make: Any, percent: int) -> None:
    """Within one in a hundred, whatever they are and however they are stored."""
    with closing(CachedDataset(Made(make, 400), f"{percent}%")) as dataset:
        for index in range(400):
            dataset[index]
        assert dataset.cache.filled / 400 == pytest.approx(percent / 100, abs=0.01)


# ---- on two ranks ----


class Scale(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image / 255


class Dropped(TransformedSource):
    """Random inside, by a transform that can be cut: two steps, of which the second draws."""

    transform: Any = nn.Sequential(Scale(), nn.Dropout())


def train(rank: int, folder: Path, num_workers: int = 0) -> Any:
    """Three epochs of a plain loop."""
    source = CountedSource(LENGTH, log_path=folder / f"{rank}{num_workers}")
    dataset = CachedDataset(source, defer=True)
    dataset.share()
    reads, seen = source.loads, 0
    sampler = DistributedSampler(source, shuffle=True)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        method = "fork" if num_workers else None
        loader = DataLoader(dataset, 4, sampler=sampler, num_workers=num_workers, multiprocessing_context=method)
        order = list(sampler)
        for at, (images, labels) in zip(range(0, len(order), 4), loader, strict=True):
            expected = [source.expected(index) for index in order[at : at + 4]]
            assert torch.equal(images, torch.stack([image for image, _ in expected]))
            assert labels.tolist() == [label for _, label in expected]
            seen += len(labels)
        dist.barrier()  # as a step's all-reduce does: no rank begins an epoch before all have loaded the last one
    counts = dataset.counters.totals().values()
    dist.barrier()
    dataset.close()
    return reads, source.loads, seen, counts


def train_with_workers(rank: int, folder: Path) -> Any:
    return train(rank, folder, 2)


def half_of_the_photos(rank: int, folder: Path) -> float:
    dataset = CachedDataset(Made(photo, 400), "50%", defer=True)
    dataset.share()
    for index in range(400):
        dataset[index]
    dist.barrier()
    share = dataset.cache.filled / 400
    dist.barrier()
    dataset.close()
    return share


def folds(rank: int, folder: Path) -> Any:
    """Two nodes of one rank: the first draws the even samples, the second every fourth and the first."""
    mine = range(0, LENGTH, 2) if rank == 0 else [1, *range(0, LENGTH, 4)]
    dataset = CachedDataset(CountedSource(LENGTH), "50%", defer=True, indices=mine)
    dataset.share(NodeGroup(rank, ((0,), (1,))))
    list(dataset)
    held = [index for index in range(LENGTH) if dataset.cache.has_place(index)]
    result = held, dataset.cache.filled, dataset.ring.coverage
    dist.barrier()
    dataset.close()
    return result


def open_some(rank: int, folder: Path) -> Any:
    requests = [CacheRequest(CountedSource(LENGTH), "")] if rank == 0 else []
    return open_caches(requests, {"": Budget.parse("auto")}, NodeGroup.discover())


def split_for_itself(rank: int, folder: Path) -> Any:
    part, _ = torch.utils.data.random_split(CountedSource(24), [12, 12], torch.Generator().manual_seed(rank))
    dataset = CachedDataset(part, defer=True)
    dataset.share()
    labels = [int(dataset[index][1]) for index in range(12)]
    result = dataset.cache, labels == [index % 10 for index in part.indices]
    dataset.close()
    return result


def cut(rank: int, folder: Path) -> Any:
    source = Dropped(LENGTH, log_path=folder / f"cut{rank}")
    its = opened(source)
    at_set_up = source.loads
    assert its.tail is not None
    torch.manual_seed(3)
    served = CachedSource(its)
    samples = [served.sample(index) for index in range(LENGTH)]
    torch.manual_seed(3)
    same = all(torch.equal(image, source[index][0]) for index, (image, _) in enumerate(samples))
    dist.barrier()
    result = at_set_up, same, its.cache.filled, its.cache.segment.token, repr(its.tail)
    dist.barrier()
    its.close()
    return result


def without_memory(rank: int, folder: Path, strict: bool = False) -> Any:
    create = Segment.create
    if rank == 0:
        Segment.create = full  # type: ignore[method-assign]
    try:
        dataset = CachedDataset(CountedSource(LENGTH), strict=strict, defer=True)
        dataset.share()
    finally:
        Segment.create = create  # type: ignore[method-assign]
    return dataset.cache, dataset.group.world, dataset[3][1]


def without_memory_strict(rank: int, folder: Path) -> Any:
    return without_memory(rank, folder, strict=True)


def blind(rank: int, folder: Path, named_too: bool = False) -> Any:
    """Rank 1 cannot reach files without a name, as in another pid namespace; or none at all any more."""
    NodeGroup.discover()  # by then it could
    attach, create, made = Segment.attach, Segment.create, []

    def see_names_only(handle: SegmentHandle) -> Segment:
        if named_too or handle.data.startswith("/proc/"):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", handle.data)
        return attach(handle)

    def note(*arguments: Any, **more: Any) -> Segment:
        segment = create(*arguments, **more)
        made.append(segment.path)
        return segment

    if rank == 1:
        Segment.attach = see_names_only  # type: ignore[method-assign,assignment]
    Segment.create = note  # type: ignore[method-assign,assignment]
    error = its = None
    try:
        its = opened(CountedSource(LENGTH), strict=True)
    except OSError as raised:
        error = type(raised).__name__, str(raised), type(raised.__cause__).__name__
    Segment.attach, Segment.create = attach, create  # type: ignore[method-assign]
    dist.barrier()
    names = [path for path in made if path]
    left = [path for path in names if os.path.exists(path) or os.path.exists(path + ".locks")]
    label = None
    if its is not None and its.cache is not None:
        if rank == 0:
            CachedSource(its).sample(3)
        dist.barrier()
        sample = its.cache.get(3)
        label = None if sample is None else sample[1]
        dist.barrier()
        its.close()
    return len(names), left, label, error


def blind_to_names(rank: int, folder: Path) -> Any:
    return blind(rank, folder, named_too=True)


def broken(rank: int, folder: Path) -> Any:
    return opened(Made({"a": 1}.__getitem__), strict=True)


def uneven(rank: int, folder: Path) -> Any:
    return opened(CountedSource(LENGTH + rank))


def unlike(rank: int, folder: Path) -> Any:
    source = Dropped(LENGTH)
    if rank == 1:
        source.transform = None
    return opened(source)


def short_of_memory(rank: int, folder: Path) -> int:
    log = Log()
    log.setLevel(logging.WARNING)
    opened(CountedSource(LENGTH), 10).close()
    return len([line for line in log.lines if "set-up waits" not in line])  # as it may on a busy machine


WORKS = (
    *(train, train_with_workers, half_of_the_photos, folds, open_some, split_for_itself, cut, without_memory),
    *(without_memory_strict, blind, blind_to_names, broken, uneven, unlike, short_of_memory),
)


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[..., Any], list[Any]]:
    """For each of these functions, in turn, both ranks' results: what it returned, or what it raised."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_split, "QUICK_SECONDS", math.inf)  # set-up reads as many samples on a busy machine
        results = run_ranks(_do, 2, tmp_path_factory.mktemp("ranks"))
    return dict(zip(WORKS, zip(*results, strict=True), strict=True))


def _do(rank: int, folder: Path) -> list[Any]:
    results = []
    for work in WORKS:
        try:
            results.append(work(rank, folder))
        except Exception as error:
            results.append((type(error).__name__, str(error), type(error.__cause__).__name__))
        dist.barrier()  # all ranks come here, or the test runs into its time limit
    return results


@pytest.mark.parametrize("work", [train, train_with_workers])
def test_two_ranks_load_every_sample_once(on_two_ranks: Any, work: Any) -> None:
    """After `share()` the ranks of a node have one cache: N loads in all, and only the leader reads at set-up.
    It reads all samples twice, and stores them."""
    first, second = on_two_ranks[work]
    stored = first[0] // 2
    assert stored in range(4, LENGTH + 1)
    assert second[0] == 0
    assert first[1] + second[1] == LENGTH + stored
    assert first[2] == second[2] == 3 * LENGTH // 2
    assert first[3] == second[3]
    assert first[3][:4] == (2 * LENGTH + stored, LENGTH - stored, 0, LENGTH - stored)


def test_the_budget_is_that_of_the_node(on_two_ranks: Any) -> None:
    """Two ranks cache as much as one."""
    assert on_two_ranks[half_of_the_photos] == pytest.approx((0.5, 0.5), abs=0.01)


def test_nodes_divide_what_any_rank_draws(on_two_ranks: Any) -> None:
    """Of the eleven that are drawn by either rank, each of two nodes with half of the memory has slots for a part."""
    (first, filled, coverage), (second, *_) = on_two_ranks[folds]
    drawn = {1, *range(0, LENGTH, 2)}
    assert (len(first), filled) == (5, 5)
    assert not set(first) & set(second)
    assert set(first) | set(second) < drawn
    assert coverage == 10 / 11


def test_a_rank_that_wants_nothing_does_not_leave_the_others_waiting(on_two_ranks: Any) -> None:
    """All ranks must want the same: it is an error on each of them."""
    for kind, words, _ in on_two_ranks[open_some]:
        assert kind == "ValueError"
        assert "must open the same sources" in words


def test_a_split_that_each_rank_draws_for_itself_passes_through(on_two_ranks: Any) -> None:
    """Each rank sees the samples of its own part."""
    assert on_two_ranks[split_for_itself] == ((None, True), (None, True))


def test_only_the_leader_reads_and_all_cut_alike(on_two_ranks: Any) -> None:
    """The other rank cuts its own source where the leader has found it, maps the same memory, and serves the same."""
    first, second = on_two_ranks[cut]
    assert first[0] > 0 == second[0]
    assert first[1:] == second[1:]
    assert first[1:3] == (True, LENGTH)
    assert first[4] == "Tail(Dropout)"


def test_a_leader_without_memory_is_the_same_error_everywhere(on_two_ranks: Any) -> None:
    """With `strict` both ranks raise the same CacheMemoryError, which names the leader; else both pass through."""
    first, second = on_two_ranks[without_memory_strict]
    assert first[:2] == second[:2]
    assert first[0] == "CacheMemoryError"
    assert first[1].startswith("rank 0 could not make or reach the shared memory of its node: OSError(28")
    assert first[2] == "OSError"
    assert on_two_ranks[without_memory] == ((None, 2, 3), (None, 2, 3))


def test_ranks_that_cannot_attach_meet_by_name(on_two_ranks: Any) -> None:
    """A named file is tried next, whose name is gone as soon as all have it; if that fails too, all raise together."""
    assert on_two_ranks[blind] == ((2, [], 3, None), (0, [], 3, None))
    first, second = on_two_ranks[blind_to_names]
    assert (first[:3], second[:3]) == ((2, [], None), (0, [], None))
    (kind, words, _), (other_kind, other_words, cause) = first[3], second[3]
    assert (kind, words) == (other_kind, other_words)
    assert kind == "CacheMemoryError"
    assert words.startswith("rank 1 could not make or reach the shared memory of its node: FileNotFoundError")
    assert cause == "FileNotFoundError"


def test_what_one_source_does_wrong_is_told_to_all(on_two_ranks: Any) -> None:
    """The rank at fault raises its own error, the other one names it; sources of different length are refused."""
    by_source, by_length, by_cut = (on_two_ranks[work] for work in (broken, uneven, unlike))
    assert [kind for kind, *_ in by_source] == ["KeyError", "RuntimeError"]
    assert "failed on rank 0: KeyError(0)" in by_source[1][1]
    assert by_length[0] == by_length[1]
    assert by_length[0][0] == "ValueError"
    assert "those of rank 0 have [20] samples, those of rank 1 [21]" in by_length[0][1]
    assert [kind for kind, *_ in by_cut] == ["RuntimeError", "UncuttableError"]
    assert "failed on rank 1: UncuttableError" in by_cut[0][1]


def test_a_node_warns_once(on_two_ranks: Any) -> None:
    """Only the leader warns of a small budget."""
    assert on_two_ranks[short_of_memory] == (1, 0)

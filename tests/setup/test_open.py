"""Requests open side by side, on one rank and on two: in the memory that was asked for, or the same error for all."""

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.segments import CacheMemoryError
from tests.logs import Log
from tests.ranks import run_ranks
from tests.sources import CountedSource, TransformedSource

pytestmark = pytest.mark.processes

LENGTH = 20


def opened(source: Dataset[Any], budget: str | int = "auto", strict: bool = False, **options: Any) -> OpenCache:
    request = CacheRequest(source, "", strict=strict)
    return open_caches([request], {"": Budget.parse(budget)}, NodeGroup.discover(), **options)[0]


# ---- on one rank ----


@pytest.mark.parametrize("backend", ["tmpfile", "memfd", "file"])
def test_the_backend_can_be_chosen(backend: Any) -> None:
    """The memory lies where it was asked for, and no name is left while it is used."""
    its = opened(CountedSource(LENGTH), backend=backend)
    where = os.readlink(its.cache.handle.segment.data)
    assert where.startswith({"tmpfile": "/dev/shm/#", "memfd": "/memfd:", "file": "/dev/shm/lsc-"}[backend])
    assert where.endswith(" (deleted)")
    its.close()


def test_off_reads_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started, and nobody looks for free memory, which takes its time."""
    for what in ("allocation.FreeMemory", "child.DataLoader"):
        monkeypatch.setattr(f"lightning_stocache.setup.{what}", None)
    off = opened(CountedSource(LENGTH), 0)
    assert off.cache is None
    assert CachedSource(off).sample(3)[1] == 3
    off.close()


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request's segment cannot be made: the first one's memory is given back, and the error is told."""
    create, made = Segment.create, []

    def create_three(size: int, *rest: Any, **more: Any) -> Segment:
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(size)
        return create(size, *rest, **more)

    monkeypatch.setattr(Segment, "create", create_three)
    requests = [CacheRequest(CountedSource(LENGTH), "", strict=True) for _ in range(2)]
    with pytest.raises(CacheMemoryError, match=r"rank 0 could not make or reach .*No space left"):
        open_caches(requests, {"": Budget.parse("auto")}, NodeGroup())


def test_windows_passes_through(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where processes cannot share memory, nothing is read or opened, and one warning says so."""
    monkeypatch.setattr("lightning_stocache.setup.open.sys.platform", "win32")
    source = CountedSource(LENGTH)
    dataset = CachedDataset(source)
    assert (dataset.cache, dataset.counters, dataset.budget_bytes) == (None, None, 0)
    assert dataset[3][1] == source.expected(3)[1]
    [record] = caplog.records
    assert "Windows" in record.getMessage()


# ---- on two ranks ----


class Scale(nn.Module):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return image / 255


class Dropped(TransformedSource):
    """Random inside, by a transform that can be cut: two steps, of which the second draws."""

    transform: Any = nn.Sequential(Scale(), nn.Dropout())


def on_two_ranks(*works: Callable[[int], Any]) -> list[list[Any]]:
    """For each function of the rank, in turn, both ranks' results: what it returned, or what it raised."""
    return [list(results) for results in zip(*run_ranks(_do, 2, works), strict=True)]


def _do(rank: int, works: list[Callable[[int], Any]]) -> list[Any]:
    results = []
    for work in works:
        try:
            results.append(work(rank))
        except Exception as error:
            results.append((type(error).__name__, str(error), type(error.__cause__).__name__))
        dist.barrier()  # all ranks come here, or the test runs into its time limit
    return results


class Train:
    """Three epochs of a plain loop."""

    def __init__(self, folder: Path, num_workers: int) -> None:
        self.folder, self.num_workers = folder, num_workers

    def __call__(self, rank: int) -> Any:
        source = CountedSource(LENGTH, log_path=self.folder / f"{rank}{self.num_workers}")
        dataset = CachedDataset(source, defer=True)
        dataset.share()
        reads, seen = source.loads, 0
        sampler = DistributedSampler(source, shuffle=True)
        for epoch in range(3):
            sampler.set_epoch(epoch)
            method = "fork" if self.num_workers else None
            loader = DataLoader(
                dataset, 4, sampler=sampler, num_workers=self.num_workers, multiprocessing_context=method
            )
            for indices, (images, labels) in zip(batches(sampler), loader, strict=True):
                expected = [source.expected(index) for index in indices]
                assert torch.equal(images, torch.stack([image for image, _ in expected]))
                assert labels.tolist() == [label for _, label in expected]
                seen += len(indices)
            dist.barrier()  # as a step's all-reduce does: no rank begins an epoch before all have loaded the last one
        counts = dataset.counters.totals().values()
        dist.barrier()
        dataset.close()
        return reads, source.loads, seen, counts


def batches(sampler: DistributedSampler[Any]) -> list[list[int]]:
    indices = list(sampler)
    return [indices[at : at + 4] for at in range(0, len(indices), 4)]


def test_two_ranks_load_every_sample_once(tmp_path: Path) -> None:
    """After `share()` the ranks of a node have one cache: N loads in all, and only the leader reads at set-up.
    It reads all samples twice, and stores them."""
    for first, second in on_two_ranks(Train(tmp_path, 0), Train(tmp_path, 2)):
        stored = first[0] // 2
        assert stored in range(4, LENGTH + 1)
        assert second[0] == 0
        assert first[1] + second[1] == LENGTH + stored
        assert first[2] == second[2] == 3 * LENGTH // 2
        assert first[3] == second[3]
        assert first[3][:4] == (2 * LENGTH + stored, LENGTH - stored, 0, LENGTH - stored)


def folds(rank: int) -> Any:
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


def test_nodes_divide_what_any_rank_draws() -> None:
    """Of the eleven that are drawn by either rank, each of two nodes with half of the memory has slots for a part."""
    [((first, filled, coverage), (second, *_))] = on_two_ranks(folds)
    drawn = {1, *range(0, LENGTH, 2)}
    assert (len(first), filled) == (5, 5)
    assert not set(first) & set(second)
    assert set(first) | set(second) < drawn
    assert coverage == 10 / 11


def open_some(rank: int) -> Any:
    requests = [CacheRequest(CountedSource(LENGTH), "")] if rank == 0 else []
    return open_caches(requests, {"": Budget.parse("auto")}, NodeGroup.discover())


@pytest.mark.processes
def test_a_rank_that_wants_nothing_does_not_leave_the_others_waiting() -> None:
    """All ranks must want the same: it is an error on each of them."""
    [errors] = on_two_ranks(open_some)
    assert [kind for kind, *_ in errors] == ["ValueError", "ValueError"]
    assert all("must open the same sources" in words for _, words, _ in errors)


def split_for_itself(rank: int, folder: str) -> tuple[bool, list[int]]:
    whole = CountedSource(24, log_path=Path(folder) / str(rank))
    part, _ = random_split(whole, [12, 12], torch.Generator().manual_seed(rank))
    dataset = CachedDataset(part, defer=True)
    dataset.share()
    labels = [int(dataset[index][1]) for _ in range(2) for index in range(12)]
    cached = dataset.cache is not None
    dataset.close()
    return cached, [whole.expected(index)[1] == label for index, label in zip([*part.indices] * 2, labels, strict=True)]


def test_a_split_that_each_rank_draws_for_itself_passes_through(tmp_path: Path) -> None:
    """Each rank sees the samples of its own part."""
    for cached, right in run_ranks(split_for_itself, 2, str(tmp_path)):
        assert not cached
        assert all(right)


def look(rank: int) -> Any:
    reads = []

    class Watched(Dropped):
        def __getitem__(self, index: int) -> Any:
            reads.append(index)
            return super().__getitem__(index)

    source = Watched(LENGTH)
    its = opened(source)
    at_set_up = len(reads)
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


def test_only_the_leader_reads_and_all_cut_alike() -> None:
    """The other rank cuts its own source where the leader has found it, maps the same memory, and serves the same."""
    [(first, second)] = on_two_ranks(look)
    assert (first[0], second[0]) == (0, 0)  # the leader looks in another process
    assert first[1:] == second[1:]
    assert first[1:3] == (True, LENGTH)
    assert first[4] == "Tail(Dropout)"


def full(*_: Any) -> Segment:
    raise OSError(errno.ENOSPC, "No space left on device")


def no_segment(rank: int) -> Any:
    create = Segment.create
    if rank == 0:
        Segment.create = full  # type: ignore[method-assign]
    try:
        dataset = CachedDataset(CountedSource(LENGTH), strict=True, defer=True)
        dataset.share()
    finally:
        Segment.create = create  # type: ignore[method-assign]


def no_segment_but_on(rank: int) -> Any:
    create = Segment.create
    if rank == 0:
        Segment.create = full  # type: ignore[method-assign]
    dataset = CachedDataset(CountedSource(LENGTH), defer=True)
    dataset.share()
    Segment.create = create  # type: ignore[method-assign]
    return dataset.cache is None, dataset.group.world, dataset[3][1]


def test_a_leader_without_memory_is_the_same_error_everywhere() -> None:
    """With `strict` both ranks raise the same CacheMemoryError, which names the leader; else both pass through."""
    [(first, second), on] = on_two_ranks(no_segment, no_segment_but_on)
    assert first[:2] == second[:2]
    assert first[0] == "CacheMemoryError"
    assert first[1].startswith("rank 0 could not make or reach the shared memory of its node: OSError(28")
    assert first[2] == "OSError"
    assert on == [(True, 2, 3), (True, 2, 3)]


class Blind:
    """Rank 1 cannot reach files without a name, as in another pid namespace; or none at all any more."""

    def __init__(self, named_too: bool) -> None:
        self.named_too = named_too

    def __call__(self, rank: int) -> Any:
        NodeGroup.discover()  # by then it could
        attach, create, made = Segment.attach, Segment.create, []

        def see_names_only(handle: SegmentHandle) -> Segment:
            if self.named_too or handle.data.startswith("/proc/"):
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


def test_ranks_that_cannot_attach_meet_by_name() -> None:
    """A named file is tried next, whose name is gone as soon as all have it; if that fails too, all raise together."""
    [meet, (first, second)] = on_two_ranks(Blind(False), Blind(True))
    assert meet == [(2, [], 3, None), (0, [], 3, None)]
    assert (first[:3], second[:3]) == ((2, [], None), (0, [], None))
    (kind, text, _), (other_kind, other_text, cause) = first[3], second[3]
    assert (kind, text) == (other_kind, other_text)
    assert kind == "CacheMemoryError"
    assert text.startswith("rank 1 could not make or reach the shared memory of its node: FileNotFoundError")
    assert cause == "FileNotFoundError"


class Broken(CountedSource):
    def __getitem__(self, index: int) -> Any:
        raise KeyError("no such file")


def broken(rank: int) -> Any:
    return opened(Broken(LENGTH), strict=True)


def uneven(rank: int) -> Any:
    return opened(CountedSource(LENGTH + rank))


def unlike(rank: int) -> Any:
    source = Dropped(LENGTH)
    if rank == 1:
        source.transform = None
    return opened(source)


def test_what_one_source_does_wrong_is_told_to_all() -> None:
    """The rank at fault raises its own error, the other one names it; sources of different length are refused."""
    by_source, by_length, by_cut = on_two_ranks(broken, uneven, unlike)
    assert [kind for kind, *_ in by_source] == ["KeyError", "RuntimeError"]
    assert "failed on rank 0: KeyError(" in by_source[1][1]
    assert "no such file" in by_source[1][1]
    assert by_length[0] == by_length[1]
    assert by_length[0][0] == "ValueError"
    assert "those of rank 0 have [20] samples, those of rank 1 [21]" in by_length[0][1]
    assert [kind for kind, *_ in by_cut] == ["RuntimeError", "UncuttableError"]
    assert "failed on rank 1: UncuttableError" in by_cut[0][1]


def short_of_memory(rank: int) -> list[str]:
    log = Log()
    log.setLevel(logging.WARNING)
    opened(CountedSource(LENGTH), 10).close()
    return log.lines


def test_a_node_warns_once() -> None:
    """Only the leader warns of a small budget."""
    [(said, silence)] = on_two_ranks(short_of_memory)
    assert (len(said), silence) == (1, [])

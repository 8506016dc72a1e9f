"""Requests open side by side, on one rank and on two: in the memory that was asked for, or the same error for all."""

import errno
import math
import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.disk import DiskError
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.named import named_segments
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.segments import CacheMemoryError
from lightning_stocache.source import random_split
from tests.jobs import warnings
from tests.processes import run_ranks
from tests.sources import CountedSource, Made, TransformedSource

LENGTH = 20


def opened(source: Dataset[Any], budget: str | int = "auto", strict: bool = False, **options: Any) -> OpenCache:
    request = CacheRequest(source, "", strict=strict)
    return open_caches([request], {"": Budget.parse(budget)}, NodeGroup.discover(), **options)[0]


def full(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


# ---- on one rank ----


def test_the_backend_can_be_chosen() -> None:
    """The memory lies where it was asked for, and no name is left while it is used."""
    backends: dict[Any, str] = {"tmpfile": "/dev/shm/#", "memfd": "/memfd:", "file": "/dev/shm/lsc-"}
    for backend, prefix in backends.items():
        with closing(opened(CountedSource(LENGTH), backend=backend)) as cache:
            where = os.readlink(cache.cache.handle.segment.path)
            assert where.startswith(prefix)
            assert where.endswith(" (deleted)")


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
    patched: Any, option: str | None, error: Any, words: str, name: str, tmp_path: Path, monkeypatch: Any, caplog: Any
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
    [warning] = warnings(caplog)
    assert words in warning
    assert name not in [segment.name for segment in named_segments()]


def test_strict_refuses_a_part_of_what_was_asked(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Too little memory is an error that names the limit; a budget of a part is what was asked for."""
    free = FreeMemory(filesystem=None, available=80 * 2**20, cgroup=None, directory=None)
    monkeypatch.setattr(FreeMemory, "measure", lambda *_: free)
    source = Made(lambda _: torch.zeros(2**20, dtype=torch.uint8), 40)
    with pytest.raises(CacheMemoryError, match=r"room for .* of 40 samples, .*: limited by MemAv"):
        CachedDataset(source, strict=True)
    with closing(CachedDataset(source, "10MB", strict=True)) as dataset:
        assert len(dataset.cache) == 9
    assert not warnings(caplog)
    with closing(CachedDataset(source)):
        assert "limited by MemAvailable" in warnings(caplog)[0]


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


def test_a_budget_of_a_percentage_is_that_of_the_samples() -> None:
    """Within one in a hundred: of images, which take a quarter less where they are packed, and texts of all sizes."""
    for make, percent in (
        (lambda index: (Image.new("RGB", (40 + index % 7, 60 + index % 5), (index % 256, 0, 0)), index), 75),
        (lambda index: ("x" * int(np.random.default_rng(index).lognormal(6, 1)), index), 50),
    ):
        with closing(CachedDataset(Made(make, 400), f"{percent}%")) as dataset:
            for index in range(400):
                dataset[index]
            assert dataset.cache.filled / 400 == pytest.approx(percent / 100, abs=0.01)


# ---- on two ranks ----


class Dropped(TransformedSource):
    """Random inside, by a transform that can be cut: two steps, of which the second draws."""

    transform: Any = v2.Compose([v2.ToDtype(torch.float32, scale=True), nn.Dropout()])


def folds(rank: int, folder: Path) -> Any:
    """Two nodes of one rank: the first draws the even samples, the second every fourth and the first."""
    mine = range(0, LENGTH, 2) if rank == 0 else [1, *range(0, LENGTH, 4)]
    dataset = CachedDataset(CountedSource(LENGTH), "50%", defer=True, indices=mine)
    dataset.share(NodeGroup(rank, ((0,), (1,))))
    list(dataset)
    held = [index for index in range(LENGTH) if dataset.cache.has_slot(index)]
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


class Part(Dataset[Any]):
    """Samples that depend on a part, which a rank may have for itself."""

    def __init__(self, part: Any, **others: Any) -> None:
        self.part = part
        vars(self).update(others)

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        if callable(self.part):
            return self.part(index)
        part = os.environ["TEST_PART"] if self.part is None else self.part
        return torch.tensor(float(part[index]) if isinstance(part, list | dict | torch.Tensor) else int(part) + index)


def added(number: int) -> Callable[[int], Any]:
    return lambda index: torch.tensor(index + number)


def overridden(labels: dict[int, int]) -> Callable[[int], Any]:
    return lambda index: torch.tensor(labels.get(index, index))


def of_own_rank(index: int) -> torch.Tensor:
    return torch.tensor(index + 100 * dist.get_rank() * (index % 4 == 1))


def parts(rank: int, folder: Path) -> Any:
    """Which sources are cached: those of which each rank has its own part, and those that only know their rank."""
    os.environ["TEST_PART"] = str(rank)
    middle, table = torch.zeros(96), dict.fromkeys(range(96), 0.0)
    middle[50] = rank
    table[50] = rank
    choices = [rank, str(rank), middle, table, list(table.values()), added(rank), None]
    choices += [overridden(dict.fromkeys((7, 19, 23, 41, 11), -1) if rank else {}), of_own_rank]
    same = [Part(3, rank=rank), Part(3, folder=f"runs/{rank}"), Part(3, device=torch.device("meta", rank))]
    same += [Part(3, memo={rank: "read before"})]
    outcomes = []
    for source in [*map(Part, choices), *same]:
        with closing(opened(source)) as cache:
            outcomes.append(cache.cache is not None)
            dist.barrier()
    return outcomes


def cut(rank: int, folder: Path) -> Any:
    where = folder / str(rank)
    where.mkdir()
    os.chdir(where)
    source = Dropped(LENGTH, log_path="loads")  # one name, which leads to a file of this rank
    its = opened(source)
    at_set_up = source.loads
    served = CachedSource(its)
    torch.manual_seed(3)
    samples = [served.sample(index) for index in range(LENGTH)]
    torch.manual_seed(3)
    same = all(torch.equal(image, source[index][0]) for index, (image, _) in enumerate(samples))
    dist.barrier()
    result = same, its.cache.filled, its.cache.segment.token, str(its.tail)
    dist.barrier()
    its.close()
    return at_set_up, result


def blind(rank: int, folder: Path, reached: str = "/dev/shm/") -> Any:
    """Rank 1 reaches only files with a name, as in another pid namespace; or none at all."""
    NodeGroup.discover()  # by then it could
    attach, create, names = Segment.attach, Segment.create, list[str]()

    def attach_some(handle: SegmentHandle) -> Segment:
        if rank == 1 and not handle.path.startswith(reached):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", handle.path)
        return attach(handle)

    def note(*arguments: Any, **more: Any) -> Segment:
        segment = create(*arguments, **more)
        names.extend(filter(None, [segment.path]))
        return segment

    its = error = label = None
    with mock.patch.object(Segment, "attach", attach_some), mock.patch.object(Segment, "create", note):
        try:
            its = opened(CountedSource(LENGTH), strict=True)
        except CacheMemoryError as raised:
            error = type(raised.__cause__).__name__, str(raised)
    dist.barrier()
    left = [path for path in names if os.path.exists(path)]
    if its is not None:
        if rank == 0:
            CachedSource(its).sample(3)
        dist.barrier()
        label = its.cache.get(3)[1]
        dist.barrier()
        its.close()
    return len(names), left, label, error


def blind_to_names(rank: int, folder: Path) -> Any:
    return blind(rank, folder, "nothing")


def broken(rank: int, folder: Path) -> Any:
    return opened(Made({"a": 1}.__getitem__), strict=True)


def unlike(rank: int, folder: Path) -> Any:
    source = Dropped(LENGTH)
    if rank == 1:
        source.transform = None
    return opened(source)


WORKS = (folds, open_some, split_for_itself, parts, cut, blind, blind_to_names, broken, unlike)


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


@pytest.mark.processes
def test_nodes_divide_what_any_rank_draws(on_two_ranks: Any) -> None:
    """Each of two nodes has slots for a part. Of splits that ranks draw for themselves, each sees its own."""
    (first, filled, coverage), (second, *_) = on_two_ranks[folds]
    drawn = {1, *range(0, LENGTH, 2)}
    assert (len(first), filled) == (5, 5)
    assert not set(first) & set(second)
    assert set(first) | set(second) < drawn
    assert coverage == 10 / 11
    assert on_two_ranks[split_for_itself] == ((None, True), (None, True))


@pytest.mark.processes
def test_ranks_with_data_of_their_own_pass_through(on_two_ranks: Any) -> None:
    """Chosen by a number, a text, the middle of a container, a closure, the environment, other labels of a few indices,
    or the rank that a read asks for; a rank's name and its memo are no data."""
    assert on_two_ranks[parts] == ([False] * 9 + [True] * 4,) * 2


@pytest.mark.processes
def test_only_the_leader_reads_and_all_cut_alike(on_two_ranks: Any) -> None:
    """The other rank cuts its own source where the leader has found it, maps the same memory, and serves the same."""
    (at_set_up, first), (at_set_up_of_the_other, second) = on_two_ranks[cut]
    assert at_set_up > 0 == at_set_up_of_the_other
    assert first == second
    assert (*first[:2], first[3]) == (True, LENGTH, "Dropout")


@pytest.mark.processes
def test_ranks_that_cannot_attach_meet_by_name(on_two_ranks: Any) -> None:
    """A named file is tried next, whose name is gone as soon as all have it; if that fails too, all raise together."""
    assert on_two_ranks[blind] == ((2, [], 3, None), (0, [], 3, None))
    first, second = on_two_ranks[blind_to_names]
    assert (first[:3], second[:3]) == ((2, [], None), (0, [], None))
    assert first[3][1] == second[3][1]
    assert second[3][0] == "FileNotFoundError"
    assert first[3][1].startswith("rank 1 could not make or reach the shared memory of its node: FileNotFoundError")


@pytest.mark.processes
def test_what_one_source_does_wrong_is_told_to_all(on_two_ranks: Any) -> None:
    """The rank at fault raises its own error, the other one names it; all must want the same sources."""
    by_source, by_number, by_cut = (on_two_ranks[work] for work in (broken, open_some, unlike))
    assert [kind for kind, *_ in by_source] == ["KeyError", "RuntimeError"]
    assert "failed on rank 0: KeyError(0)" in by_source[1][1]
    for kind, words, _ in by_number:
        assert kind == "ValueError"
        assert "must open the same sources; those of rank 0 have [20] samples, those of rank 1 []" in words
    assert [kind for kind, *_ in by_cut] == ["RuntimeError", "UncuttableError"]
    assert "failed on rank 1: UncuttableError" in by_cut[0][1]


def test_an_error_that_is_none_of_memory_is_not_called_one(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """All samples are loaded from their source, with one warning that names what was raised."""

    def create(*_: Any, **__: Any) -> Any:
        raise ValueError("no such layout")

    monkeypatch.setattr("lightning_stocache.setup.open.Store.create", create)
    with closing(CachedDataset(Made(torch.tensor))) as dataset:
        assert [int(dataset[index]) for index in range(12)] == list(range(12))
    [warning] = warnings(caplog)
    assert warning.endswith("uncounted: rank 0 could not open a cache: it raised ValueError: no such layout")

"""The look at a source leaves nothing behind in the trainer, and gives up what cannot be read."""

import multiprocessing
import os
import sys
import time
import types
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.setup import child, first_samples
from lightning_stocache.setup.find import Finding, SourceReader
from lightning_stocache.setup.first_samples import difference
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from tests.processes import context
from tests.sources import Made

pytestmark = pytest.mark.processes

SAMPLES = 300


class Lazy(Dataset[Any]):
    """Opens its file when it is first read, without a buffer, counts its reads, and remembers the last."""

    def __init__(self, path: Path) -> None:
        self.path, self.file, self.reads, self.seen = path, None, 0, list[int]()

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = open(self.path, "rb", buffering=0)  # noqa: SIM115
        self.reads += 1
        self.seen = [*self.seen, index][-3:]
        self.file.seek(index * 512)
        return torch.frombuffer(bytearray(self.file.read(512)), dtype=torch.uint8), index


class Own(Dataset[Any]):
    """Draws from a generator of its own, for every fifth sample."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(3)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), float(index)) + (self.draws.random() if index % 5 == 0 else 0), index


def look(request: CacheRequest) -> Finding:
    """What a reader finds that is closed again."""
    with closing(SourceReader(request)) as reader:
        return reader.look()


@pytest.fixture
def lazy(tmp_path: Path) -> Lazy:
    rows = np.random.default_rng(0).integers(0, 256, (SAMPLES, 512), dtype=np.uint8)
    rows.tofile(tmp_path / "rows")
    return Lazy(tmp_path / "rows")


@pytest.fixture
def of_a_notebook(monkeypatch: pytest.MonkeyPatch) -> Dataset[Any]:
    """A source whose class no other process can import, as those of a notebook's cells."""
    cell = types.ModuleType("a_cell")
    cell.Made = type("Made", (Made,), {"__module__": "a_cell"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "a_cell", cell)
    return cell.Made(_squares)  # type: ignore[attr-defined, no-any-return]


def _squares(index: int) -> torch.Tensor:
    return torch.tensor([index, index**2])


def in_a_daemon(function: Callable[..., Any], *args: Any) -> Any:
    """What a function returns in a process that may have no children."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=lambda: sender.send(function(*args)), daemon=True)
    process.start()
    answer = receiver.recv() if receiver.poll(200) else None
    process.join(200)
    return answer


@pytest.mark.parametrize(("num_workers", "wrapped"), [(0, True), (2, False)])
def test_nothing_is_opened_counted_or_remembered(lazy: Lazy, num_workers: int, wrapped: bool) -> None:
    """The source is as it was, through a Subset too."""
    source = Subset(lazy, range(10, SAMPLES)) if wrapped else lazy
    finding = look(CacheRequest(source, reader=LoaderSettings(4, num_workers)))
    assert finding.codec.nbytes == 520
    assert finding.reads >= 8
    assert (lazy.file, lazy.reads, lazy.seen) == (None, 0, [])


def _looked_in_a_daemon(lazy: Lazy) -> Any:
    own = Own()
    before = own.draws.bit_generator.state
    finding = look(CacheRequest(lazy, reader=LoaderSettings(4, 1)))
    reason = look(CacheRequest(own)).reason
    return (finding.codec is not None, lazy.file, lazy.reads, reason, own.draws.bit_generator.state == before)


def test_where_no_process_can_be_started_all_is_put_back(lazy: Lazy) -> None:
    """A daemonic process reads the source itself; attributes and generators are then as before."""
    cached, file, reads, reason, same = in_a_daemon(_looked_in_a_daemon, lazy)
    assert (cached, file, reads, same) == (True, None, 0, True)
    assert "moves the generator of Own.draws" in reason


def test_a_generator_of_the_source_draws_what_it_would_have_drawn() -> None:
    """It passes through, and its numbers are those of a source that nobody looked at."""
    plain = torch.cat([values for values, _ in DataLoader(Own(), 8)])
    dataset = CachedDataset(Own())
    assert dataset.cache is None
    assert torch.equal(torch.cat([values for values, _ in DataLoader(dataset, 8)]), plain)


def _needs_init(worker: int) -> None:
    info = get_worker_info()
    info.dataset.make = lambda index: torch.tensor(index)


def _raises(index: int) -> Any:
    raise OSError("the disk is gone")


def test_the_users_worker_init_fn_is_called() -> None:
    """It finds the user's own dataset, as in a worker of the user's loader."""
    source = Made(_raises)
    finding = look(CacheRequest(source, reader=LoaderSettings(4, 2, worker_init_fn=_needs_init)))
    assert finding.codec.nbytes == 8
    assert look(CacheRequest(source)).codec is None


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        (Made(_raises), "reading it raised OSError: the disk is gone"),
        (Made({"k1": 1}.__getitem__), "reading it raised KeyError: 0"),
        (Made(lambda index: {"call": [_raises, lambda: index]}), "cannot be kept as bytes: "),
        (Made(lambda index: torch.rand(2)), "it is random (reading index 0 moves the generator of torch)"),
        (Made(lambda index: os._exit(3)), "exited unexpectedly"),
    ],
    ids=["raises", "keys", "function", "random", "dies"],
)
def test_what_cannot_be_cached_has_a_reason(source: Dataset[Any], reason: str) -> None:
    """In words, without an error; where errors are wanted, the error itself, but for a source that is random."""
    finding = look(CacheRequest(source))
    assert (finding.codec, finding.cut) == (None, None)
    assert reason in finding.reason


@pytest.mark.parametrize("name", ["seed", "id"])
def test_what_comes_from_the_worker_is_random(name: str) -> None:
    """A generator that is seeded by `get_worker_info().seed`, and a sample that depends on the worker."""
    source = Made(lambda index: torch.tensor([index, getattr(get_worker_info(), name, 0)]))
    assert "it is random" in look(CacheRequest(source, reader=LoaderSettings(4, 2))).reason


def test_strict_gives_the_error() -> None:
    """As the source raised it."""
    with pytest.raises(OSError, match="the disk is gone"):
        look(CacheRequest(Made(_raises), strict=True))
    with pytest.raises(TypeError, match="cannot be kept as bytes: "):
        look(CacheRequest(Made(lambda index: lambda: index), strict=True))
    with pytest.raises(TypeError, match="is a str, which cannot be cached"):
        look(CacheRequest(Made(str), strict=True, layout="rows"))
    with pytest.raises(ValueError, match=r"shape \(3,\).*layout=\"records\""):
        look(CacheRequest(Made(lambda index: torch.zeros(2 + index % 2)), strict=True, layout="rows"))


def test_a_late_error_of_the_source_is_no_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a RuntimeError that comes when the look is about to say what it waits for is the source's own."""

    def late(index: int) -> Any:
        time.sleep(0.95 * child.REPORT_SECONDS)
        raise RuntimeError("the disk is gone")

    monkeypatch.setattr(child, "REPORT_SECONDS", 0.5)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        look(CacheRequest(Made(late), strict=True))


def test_one_broken_sample_does_not_switch_the_cache_off() -> None:
    """Of rows, what raises or is odd beyond the four that must be alike is left to the batch that asks for it."""

    def make(index: int) -> torch.Tensor:
        if index == 5:
            raise OSError("sample 5 is broken")
        return torch.zeros(3 if index == 6 else 2)

    for strict in (False, True):
        finding = look(CacheRequest(Made(make), strict=strict, layout="rows"))
        assert finding.codec.nbytes == 8


def test_a_source_that_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a time-out, with a word on what is being read meanwhile; the process that waits for it is gone."""
    monkeypatch.setattr(child, "REPORT_SECONDS", 1.0)
    monkeypatch.setattr(child, "PATIENCE_SECONDS", 4.0)  # a busy machine takes its time to begin
    finding = look(CacheRequest(Made(lambda index: time.sleep(600 * (index > 0)) or torch.tensor(index))))
    assert finding.reason == "reading it has not ended in 4 s"
    assert "set-up waits for Made (12 samples, train)" in caplog.text
    assert not multiprocessing.active_children()


def test_a_process_that_imports_first_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that is not forked takes seconds to begin."""
    monkeypatch.setattr(child, "REPORT_SECONDS", 0.5)
    source = TensorDataset(torch.arange(12))
    finding = look(CacheRequest(source, reader=LoaderSettings(4, 1, start_method="spawn")))
    assert finding.codec is not None
    assert "set-up waits for TensorDataset" in caplog.text


class Local(Dataset[Any]):
    """Samples of a class that no other process can find by its name."""

    def __init__(self) -> None:
        from collections import namedtuple

        self.pair: Any = namedtuple("Hidden", "image label")
        self.reads = 0

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.pair(torch.tensor(index), index)


def test_samples_of_a_local_class_are_cached() -> None:
    """What cannot be told by another process is looked at here, and put back."""
    source = Local()
    finding = look(CacheRequest(source))
    assert finding.codec is not None
    assert source.reads == 0


def test_a_frozen_source_is_read_once_per_sample_and_left_alone() -> None:
    """`allow_random` needs what samples look like, and reads none twice; generators stay where they are."""
    source = Own()
    before = source.draws.bit_generator.state
    finding = look(CacheRequest(source, allow_random=True))
    assert (finding.reads, finding.reason) == (4, None)
    assert source.draws.bit_generator.state == before


def test_workers_that_cannot_import_the_source_are_told_of(of_a_notebook, monkeypatch):
    """Where workers are forked it is cached; where they are not it passes through, and the reason names the way out."""
    monkeypatch.setattr(child, "REPORT_SECONDS", 1.0)
    context("forkserver")
    for_now = {method: LoaderSettings(4, 2, start_method=method) for method in ("fork", "forkserver")}
    assert look(CacheRequest(of_a_notebook, reader=for_now["fork"])).codec is not None
    reason = look(CacheRequest(of_a_notebook, reader=for_now["forkserver"])).reason
    assert "exited unexpectedly. A process that is started by 'forkserver'" in reason
    assert 'multiprocessing_context="fork"' in reason
    with pytest.raises(ChildProcessError, match="notebook"):
        look(CacheRequest(of_a_notebook, reader=for_now["forkserver"], strict=True))


def test_where_nothing_is_forked_the_trainer_looks_itself(of_a_notebook, lazy, monkeypatch):
    """A spawned process would run the user's script once more; what was opened and remembered is put back."""
    monkeypatch.setattr("lightning_stocache.setup.child.sys.platform", "darwin")
    assert look(CacheRequest(of_a_notebook)).codec is not None
    readers = set[int]()
    assert look(CacheRequest(Made(lambda index: readers.add(os.getpid()) or torch.tensor(index)))).codec is not None
    assert readers == {os.getpid()}
    assert look(CacheRequest(lazy)).codec is not None
    assert (lazy.file, lazy.reads, lazy.seen) == (None, 0, [])


class Reported(Made):
    """Notes the process that reads it in a file."""

    def __init__(self, path: Path) -> None:
        super().__init__(_squares)
        self.path = path

    def __getitem__(self, index: int) -> Any:
        with self.path.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


def test_one_process_reads_all_of_a_source(tmp_path: Path) -> None:
    """The look, and samples that are asked for later; it ends when the reader is closed."""
    with closing(SourceReader(CacheRequest(Reported(tmp_path / "pids")))) as reader:
        found = reader.look()
        again = reader.read(found, [0, 5], True)
        assert list(again) == [0, 5]
        assert reader.read(found, [0, 5]) == again
        [pid] = set((tmp_path / "pids").read_text().split())
        assert int(pid) != os.getpid()
    assert not os.path.exists(f"/proc/{pid}")


class Killed(Reported):
    """Ends the process that reads it."""

    def __getitem__(self, index: int) -> Any:
        super().__getitem__(index)
        os._exit(1)


def test_one_process_reads_all_sources_of_a_call(tmp_path: Path) -> None:
    """One that raises or kills it is passed over, and the others are read all the same."""
    pids = tmp_path / "pids"
    unreadable = Made(lambda index: 1 // 0)
    requests = [CacheRequest(source) for source in (Reported(pids), Reported(pids), unreadable, Killed(tmp_path / "k"))]
    requests.append(CacheRequest(Reported(tmp_path / "last")))
    openings = SourceReader.of(requests)
    with ExitStack() as stack:
        for reader in openings:
            stack.enter_context(closing(reader))
        founds = [reader.look() for reader in openings]
        assert [found.codec is not None for found in founds] == [True, True, False, False, True]
        assert "ZeroDivisionError" in str(founds[2].reason)
        assert list(openings[0].read(founds[0], [0, 5])) == [0, 5]
        assert len(set(pids.read_text().split())) == 2  # that of the looks, and after the death another one


def test_a_loader_that_prepares_its_workers_has_a_process_of_its_own(tmp_path: Path) -> None:
    """`worker_init_fn` is for one source, which `get_worker_info` names."""
    sources = [Reported(tmp_path / name) for name in ("plain", "prepared")]
    prepared = LoaderSettings(4, 1, worker_init_fn=_point_elsewhere)
    requests = [CacheRequest(sources[0]), CacheRequest(sources[1], reader=prepared)]
    with ExitStack() as stack:
        for reader in SourceReader.of(requests):
            assert stack.enter_context(closing(reader)).look().codec is not None
    assert not (tmp_path / "prepared").exists()
    assert set((tmp_path / "plain").read_text().split()).isdisjoint((tmp_path / "prepared.init").read_text().split())


def _point_elsewhere(worker: int) -> None:
    info: Any = get_worker_info()
    info.dataset.path = info.dataset.path.with_suffix(".init")


# ---- the first samples of a stream, read again ----


@pytest.fixture
def reads_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker, which may have no process of its own."""
    monkeypatch.setattr(first_samples, "start_method", lambda chosen: None)


def test_reading_again_leaves_nothing_behind(reads_here: None) -> None:
    """The generators go on where they were."""
    state = torch.get_rng_state()
    assert difference(lambda: iter([torch.rand(2)]), lambda mark: []) is not None
    assert torch.equal(torch.get_rng_state(), state)


def test_a_stream_that_cannot_be_read_again_has_changed(reads_here: None) -> None:
    """What it raises is told."""

    def failing() -> Any:
        raise OSError("gone")

    assert "gone" in str(difference(failing, lambda mark: []))

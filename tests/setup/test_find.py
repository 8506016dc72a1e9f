"""The look at a source leaves nothing behind in the trainer, and gives up what cannot be read."""

import itertools
import json
import multiprocessing
import os
import re
import sys
import time
import types
from collections import Counter, defaultdict, namedtuple
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, get_worker_info

from lightning_stocache import CachedStream
from lightning_stocache.setup import find, reader
from lightning_stocache.setup.find import Finding, SourceReader, stream_difference
from lightning_stocache.setup.request import CacheRequest, LoaderSettings
from tests.sources import Made

pytestmark = pytest.mark.processes


class Lazy(Dataset[Any]):
    """Opens an unbuffered file at its first read, counts its reads, and remembers the last in a list and an array."""

    def __init__(self) -> None:
        self.last, self.file, self.reads, self.seen = np.zeros(2), None, 0, list[int]()

    def __len__(self) -> int:
        return 300

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self.file is None:
            self.file = open(__file__, "rb", buffering=0)  # noqa: SIM115
        self.reads += 1
        self.seen, self.last = [*self.seen, index][-3:], np.full(2, index + 1.0)
        self.file.seek(index)
        return torch.frombuffer(bytearray(self.file.read(512)), dtype=torch.uint8), index

    @property
    def is_as_before(self) -> bool:
        return (self.file, self.reads, self.seen, self.last.any()) == (None, 0, [], False)


def look(source: Any, workers: int = 0, method: str | None = None, **options: Any) -> Finding:
    """What a reader finds that is closed again."""
    loader = LoaderSettings(4, workers, start_method=method)
    with closing(SourceReader(CacheRequest(source, reader=loader, **options))) as reading:
        return reading.look()


def _squares(index: int) -> torch.Tensor:
    return torch.tensor([index, index**2])


def _raises(index: int) -> Any:
    raise OSError("the disk is gone")


@pytest.mark.parametrize(("num_workers", "wrapped"), [(0, True), (2, False)])
def test_nothing_is_opened_counted_or_remembered(num_workers: int, wrapped: bool) -> None:
    """The source is as it was, through a Subset too."""
    lazy = Lazy()
    finding = look(Subset(lazy, range(10, 300)) if wrapped else lazy, num_workers)
    assert finding.codec.nbytes == 520
    assert finding.reads >= 8
    assert lazy.is_as_before


def test_where_no_process_is_started_all_is_put_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a daemonic process, without fork, and for samples that cannot be sent, the source is read here, and attributes
    and generators are put back. A source that workers cannot import passes through, with the way out."""
    cell: Any = types.ModuleType("a_cell")
    cell.Made = type("Made", (Made,), {"__module__": "a_cell"})
    monkeypatch.setitem(sys.modules, "a_cell", cell)
    of_a_notebook = cell.Made(_squares)
    assert look(of_a_notebook, 2, "fork").codec is not None
    reason = str(look(of_a_notebook, 2, "forkserver").reason)
    assert "exited unexpectedly. A process that is started by 'forkserver'" in reason
    assert 'multiprocessing_context="fork"' in reason
    assert "notebook" in reason
    pair: Any = namedtuple("Hidden", "image label")
    assert look(Made(lambda index: pair(torch.tensor(index), index))).codec is not None
    lazy, own = Lazy(), np.random.default_rng(3)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fork", lambda: _raises(0))
        assert look(lazy).codec is not None
    monkeypatch.setattr("lightning_stocache.setup.reader.sys.platform", "darwin")
    assert look(of_a_notebook).codec is not None
    assert look(Made(partial(_report, tmp_path / "pids"))).codec is not None
    assert set((tmp_path / "pids").read_text().split()) == {str(os.getpid())}
    assert look(lazy).codec is not None
    assert "moves the generator of Made.make().own" in str(look(Made(lambda index: own.random())).reason)
    assert own.random() == np.random.default_rng(3).random()
    assert lazy.is_as_before


class Unread(Dataset[Any]):
    """Leaves reading to its class, which is torch's."""

    def __len__(self) -> int:
        return 8


def test_a_fault_of_the_package_is_not_called_one_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own error is its own, in a process of set-up or in this one. That of the data may come from any library."""
    for make, words in (
        (lambda index: torch.zeros(3).view(2, 2), "reading it raised RuntimeError: shape '[2, 2]' is invalid"),
        (lambda index: np.zeros(3).reshape(2, 2), "reading it raised ValueError: cannot reshape array"),
        (lambda index: json.loads("{"), "reading it raised JSONDecodeError: Expecting property name"),
    ):
        assert str(look(Made(make)).reason).startswith(words)
    assert str(look(Unread()).reason).startswith("reading it raised NotImplementedError: Subclasses of Dataset")
    monkeypatch.setattr("lightning_stocache.setup.find.MOST_BYTES", "64 MiB")
    for workers in (0, 2):
        reason = str(look(Made(_squares), workers).reason)
        assert reason.startswith("lightning_stocache itself raised TypeError: '<=' not supported")
        assert reason.endswith("This is no fault of the data: please report it")
    with pytest.raises(RuntimeError, match="lightning_stocache itself raised TypeError"):
        look(Made(_squares), strict=True)


def test_what_cannot_be_cached_has_a_reason() -> None:
    """In words, without an error; where errors are wanted, the error itself, but for a source that is random."""
    table: list[tuple[Any, str, type[Exception] | None]] = [
        (_raises, "reading it raised OSError: the disk is gone", OSError),
        (lambda index: {"call": [_raises, lambda: index]}, "cannot be kept as bytes: ", TypeError),
        (lambda index: torch.rand(2), r"it is random \(reading index 0 moves the generator of torch\)", None),
        (lambda index: os._exit(3), "exited unexpectedly", ChildProcessError),
        (lambda index: torch.tensor([index, getattr(get_worker_info(), "seed", 0)]), "it is random", None),
    ]
    for make, reason, error in table:
        finding = look(Made(make), 2, strict=error is None)
        assert (finding.codec, finding.cut) == (None, None)
        assert re.search(reason, str(finding.reason))
        if error is not None:
            with pytest.raises(error, match=reason.rpartition("Error: ")[2]):
                look(Made(make), 2, strict=True)


class Empty(Exception):
    """An error that has a length of zero, as one that collects others."""

    def __len__(self) -> int:
        return 0


class Untrue(Exception):
    """An error that has no truth."""

    def __bool__(self) -> bool:
        raise TypeError("no truth")


class Mute(Exception):
    """An error that has no text."""

    def __str__(self) -> str:
        raise TypeError("no text")


def _fails(kind: type[Exception], index: int) -> Any:
    raise kind("the shard is gone")


class FailingStream(IterableDataset[Any]):
    """Raises at its first sample."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __iter__(self) -> Any:
        raise self.kind("the shard is gone")
        yield


@pytest.mark.parametrize("kind", [Empty, Untrue, Mute])
def test_an_error_is_the_reason_whatever_its_class_says_of_it(kind: Any, caplog: pytest.LogCaptureFixture) -> None:
    """One with a length of 0, without a truth or without a text, of a dataset, of a step of it, and of a stream."""
    words = "unreadable" if kind is Mute else "the shard is gone"
    reason = f"reading it raised {kind.__name__}: {words}"
    for workers in (0, 2):
        assert look(Made(partial(_fails, kind)), workers).reason == reason
    with pytest.raises(kind):
        look(Made(partial(_fails, kind)), strict=True)
    assert look(Made(lambda index: _fails(kind, index) if index == 0 else torch.zeros(2))).codec is not None
    with closing(CachedStream(FailingStream(kind), "1MiB")) as stream, pytest.raises(kind):
        list(stream)
    assert f"FailingStream passes through uncached: {reason}" in caplog.text
    unpicklable = look(Made(lambda index: {"value": Unpicklable(kind)}), layout="records").reason
    assert str(unpicklable).startswith("sample 0 cannot be kept as bytes: " + words)


class Unpicklable:
    """A part of a sample that pickle cannot write."""

    def __init__(self, kind: type[Exception]) -> None:
        self.kind = kind

    def __reduce__(self) -> Any:
        raise self.kind("the shard is gone")


def test_one_broken_sample_does_not_switch_the_cache_off() -> None:
    """Of rows, what raises or is odd beyond the four that must be alike is left to the batch that asks for it."""

    def make(index: int) -> torch.Tensor:
        return _raises(index) if index == 5 else torch.zeros(3 if index == 6 else 2)

    for strict in (False, True):
        assert look(Made(make), strict=strict, layout="rows").codec.nbytes == 8


def test_a_source_that_blocks_is_given_up(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """After a time-out, with a word on what is being read meanwhile; the process that waits for it is gone."""
    minutes = SimpleNamespace(monotonic=partial(next, itertools.count(0, 60)))  # one at each look
    monkeypatch.setattr(reader, "time", minutes)
    finding = look(Made(lambda index: time.sleep(600)))
    assert finding.reason == "reading it has not ended in 120 s"
    assert "set-up waits for Made (12 samples, train)" in caplog.text
    assert not multiprocessing.active_children()


def _report(path: Path, index: int, *, ends: bool = False) -> torch.Tensor:
    """Note the process that reads in a file, and end it if told so."""
    with path.open("a") as file:
        file.write(f"{os.getpid()}\n")
    if ends:
        os._exit(1)
    return _squares(index)


def test_one_process_reads_all_sources_of_a_call(tmp_path: Path) -> None:
    """One that raises or kills it is passed over. `worker_init_fn` has a process of its own, for one source."""

    def init(worker: int) -> None:
        info: Any = get_worker_info()
        info.dataset.make = partial(_report, tmp_path / "init")

    noting = Made(partial(_report, tmp_path / "pids"))
    killing = Made(partial(_report, tmp_path / "killed", ends=True))
    requests = list(map(CacheRequest, (noting, noting, Made(_raises), killing, noting)))
    requests += [CacheRequest(Made(_raises), reader=LoaderSettings(4, 1, worker_init_fn=init))]
    openings = SourceReader.for_all(requests)
    with ExitStack() as stack:
        for opening in openings:
            stack.enter_context(closing(opening))
        founds = [opening.look() for opening in openings]
        assert [found.codec is not None for found in founds] == [True, True, False, False, True, True]
        assert "the disk is gone" in str(founds[2].reason)
        openings[0].found = founds[0]
        again = openings[0].read([0, 5], again=True)
        assert list(again) == [0, 5]
        assert openings[0].read([0, 5]) == again
    pids, of_init = (set((tmp_path / name).read_text().split()) for name in ("pids", "init"))
    assert len(pids - {str(os.getpid())}) == 2  # after the death another one
    assert pids.isdisjoint(of_init)


def test_a_stream_is_read_again_and_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a worker, which may have no process of its own: generators go on where they were; an error is told."""
    monkeypatch.setattr(find, "start_method", lambda chosen: None)
    state = torch.get_rng_state()
    assert stream_difference(lambda: iter([torch.rand(2)]), lambda mark: []) is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert "the disk is gone" in str(stream_difference(lambda: _raises(0), lambda mark: []))


class Batched(Made):
    """Its batches are made by a function of the list of samples."""

    def __init__(self, make: Any, finish_batch: Any) -> None:
        super().__init__(make)
        self.finish_batch = finish_batch

    def __getitems__(self, indices: list[int]) -> Any:
        return self.finish_batch([self.make(index) for index in indices])


def _padded(samples: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.nn.utils.rnn.pad_sequence(samples, batch_first=True))


def _ranked(samples: list[torch.Tensor]) -> list[tuple[torch.Tensor, int]]:
    return [(sample, number) for number, sample in enumerate(samples)]


@pytest.mark.parametrize(
    "finish_batch",
    [
        lambda samples: [sample - torch.cat(samples).mean() for sample in samples],
        lambda samples: [torch.cat([sample, *samples[:1]])[: len(sample) + 1] for sample in samples],
        _padded,
        _ranked,
    ],
)
def test_samples_that_depend_on_their_batch_pass_through(finish_batch: Any) -> None:
    """One that is normalised, padded, mixed or numbered by its batch has no content of its own."""
    source = Batched(lambda index: torch.full((1 + index % 3,), 1.0 + index), finish_batch)
    assert "gives another sample" in str(look(source).reason)


def test_batches_of_independent_samples_are_cached() -> None:
    """Also of a single sample, and through a Subset."""
    source = Batched(_squares, list)
    assert look(source).reason is None
    assert look(Subset(source, [3])).reason is None


class Moving(Dataset[Any]):
    """Samples of a function that may move what the dataset holds; the number of visits decides what it gives."""

    def __init__(self, visit: Any, **held: Any) -> None:
        vars(self).update(held)
        self.visit = visit

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[int, bool]:
        return index, self.visit(self, index)


class Visits:
    """A count of visits, which objects get when they are first visited."""

    count = 0


def _plus(values: Any, key: Any, step: Any = 1) -> Any:
    values[key] += step
    return values[key]


def _object_visited(source: Any, index: int) -> bool:
    source.visits[index].count += 1
    return bool(source.visits[index].count > 7)


def _appended(source: Any, index: int) -> bool:
    source.visits.append(index)
    return len(source.visits) > 700


def _function_visited(source: Any, index: int) -> bool:
    _function_visited.visits = getattr(_function_visited, "visits", 0) + 1  # type: ignore[attr-defined]
    return _function_visited.visits > 700  # type: ignore[attr-defined]


def _value_visited(source: Any, index: int) -> bool:
    source.visits.value += 1
    return bool(source.visits.value > 700)


def _each(source: Any, index: int) -> bool:
    return bool(_plus(source.visits, index) > 7)


@pytest.mark.parametrize(
    ("visit", "visits"),
    [
        *((_each, np.zeros(100, kind)) for kind in ("i2", "i4", "i8", "f4")),
        *((_each, visits) for visits in (torch.zeros(100), torch.zeros(100, dtype=torch.long), [0] * 100)),
        (lambda source, index: bool(_plus(source.visits, index) > 3), [0] * 100),  # set-up itself reads that often
        *((_each, visits) for visits in (Counter(), defaultdict(float))),
        (lambda source, index: vars(source).update(visits=source.visits - 1) or source.visits < 0, 700),
        (lambda source, index: int(_plus(vars(source), "visits", 0.01)) // 7, 0.0),
        (lambda source, index: bool(_plus(source.visits, 0) > 700), np.zeros(1, "i4")),
        (lambda source, index: next(source.visits) > 700, itertools.count(0, 2)),
        (_object_visited, [Visits() for _ in range(100)]),
        (_value_visited, multiprocessing.Value("i")),
        (_value_visited, multiprocessing.RawValue("d")),
        (_appended, list[int]()),
        (_function_visited, None),
    ],
)
def test_samples_that_depend_on_how_often_they_were_read_pass_through(visit: Any, visits: Any) -> None:
    """Whatever number of whatever kind counts the reads; what other processes see has its value again."""
    before = getattr(visits, "value", None)
    assert "how often it was read" in str(look(Moving(visit, visits=visits)).reason)
    assert getattr(visits, "value", None) == before


@pytest.mark.parametrize(
    "visit",
    [
        lambda source, index: bool(source.memo.setdefault(index, index)),
        lambda source, index: vars(source).update(clock=time.time(), calls=source.calls + 1),
        lambda source, index: source.visits.append(index),
        lambda source, index: _plus(source.ring, len(source.visits)) < 0,
    ],
)
def test_numbers_that_samples_do_not_depend_on_are_harmless(visit: Any) -> None:
    """A memo, a clock, a count, a list of what was read, an array that reads write to."""
    source = Moving(visit, memo={}, clock=0.0, calls=0, visits=[], ring=np.zeros(9))
    assert look(source).reason is None


def test_answers_of_another_process_are_no_random_numbers() -> None:
    """A source that asks a manager passes through, with that reason."""
    with multiprocessing.Manager() as manager:
        labels, settings = manager.list(range(12)), manager.dict(offset=3)
        for make in (lambda index: labels[index], lambda index: index + settings["offset"]):
            reason = str(look(Made(make)).reason)
            assert "ask another process" in reason
            assert "random (" not in reason

"""When stored samples are read again, and what follows from what has moved."""

import multiprocessing
import random
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.counters import Counters
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.source.looks import MOST, Due, Look, Schedule, judged, read_again
from lightning_stocache.source.snapshot import CommonState
from lightning_stocache.source.witness import Difference
from tests.sources import Made

SECOND = 10**9


def looked_in(epochs: int, epoch_ns: int, sample_ns: int) -> dict[int, int]:
    """The samples of the looks in some epochs of equal length, by epoch, where reading a sample takes a fixed time."""
    schedule, spent, looks = Schedule(), 0, dict[int, int]()
    for epoch in range(1, epochs + 1):
        samples = schedule.due(epoch, spent, (epoch - 1) * epoch_ns).samples
        if samples:
            looks[epoch] = samples
            spent += samples * sample_ns
            schedule.end(epoch, Look(samples, spent_ns=samples * sample_ns))
    return looks


def test_looks_come_ever_more_seldom() -> None:
    """Where reading is cheap, in epochs 1, 2, 3, 5, 9, 17, ...; four samples each, but one in the first."""
    looks = looked_in(70, SECOND, sample_ns=1000)
    assert list(looks) == [1, 2, 3, 5, 9, 17, 33, 65]
    assert looks.pop(1) == 1
    assert set(looks.values()) == {MOST}


@pytest.mark.parametrize("sample_ns", [SECOND // 1000, SECOND // 20, SECOND, 100 * SECOND])
def test_looks_take_a_hundredth_of_the_time(sample_ns: int) -> None:
    """But for one sample each in the first two epochs, at any moment; a look that has no time yet comes later."""
    looks = looked_in(2000, SECOND, sample_ns)
    assert looks[1] == 1
    assert looks[2] >= 1
    later, spent = sorted(set(looks) - {1, 2}), (looks[1] + looks[2]) * sample_ns
    for epoch in later:
        spent += looks[epoch] * sample_ns
        assert spent <= 0.01 * (epoch - 1) * SECOND
    assert bool(later) == (sample_ns <= SECOND)


def test_a_look_that_is_hastened_comes_in_the_next_epoch() -> None:
    """Not in the one that has just had one."""
    schedule = Schedule()
    schedule.end(5, Look(4, spent_ns=4000))
    assert [epoch for epoch in range(5, 12) if schedule.due(epoch, 0, SECOND).samples] == [9, 10, 11]
    schedule.end(6, Look(hastens=True))
    assert [epoch for epoch in range(5, 12) if schedule.due(epoch, 0, SECOND).samples] == [7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("differences", "allowed", "expected"),
    [
        ([], 4, (None, (), 0, False, None)),
        ([Difference("labels", "data", (3, 9))], 0, (None, (3, 9), 0, False, "labels")),
        (
            [Difference("labels", "data", tuple(range(99)))],
            0,
            (None, (0, 14, 28, 42, 56, 70, 84, 98), 0, False, "labels"),
        ),
        ([Difference("table", "data")], 99, ("table", (), 0, False, None)),
        ([Difference("epoch", "setting")], 8, (None, (), 8, False, "epoch")),
        ([Difference("epoch", "setting")], 7, ("epoch", (), 0, False, None)),
        ([Difference("weights", "unread")], 8, (None, (), 8, False, "weights")),
        ([Difference("weights", "unread")], 3, (None, (), 3, False, "weights")),
        ([Difference("weights", "unread")], 0, (None, (), 0, True, "weights")),
        ([Difference("weights", "unread", (3, 9))], 1, (None, (3,), 0, False, "weights")),
        ([Difference("calls", "machinery")], 0, (None, (), 0, True, None)),
        ([Difference("calls", "machinery"), Difference("table", "data")], 8, ("table", (), 0, False, None)),
    ],
)
def test_what_follows_from_what_has_moved(differences: list[Difference], allowed: int, expected: Any) -> None:
    """Data at known places, and settings if there is time, are read at once; machinery hastens the next look."""
    due = judged(Due(at_once=allowed), differences)
    path = due.moved[0].path if due.moved else None
    assert (due.change, due.indices, due.samples, due.hastens, path) == expected


def images(index: int) -> torch.Tensor:
    return torch.full((3,), float(index))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("change", "outcome"),
    [
        (lambda index: images(index), (None, "changed")),
        (lambda index: images(index) * (1 + 1e-7), (None, "changed")),  # another number of threads adds otherwise
        (lambda index: 1 // 0, (None, "changed")),
        (lambda index: images(index) + 1, ("sample", "changed")),
        (lambda index: images(index)[:2], ("sample", "changed")),
        (lambda index: {"x": images(index)}, ("sample", "changed")),
        (lambda index: torch.rand(3), ("sample", "random")),
        (lambda index: torch.tensor(np.random.rand(3)).float(), ("sample", "random")),
        (lambda index: torch.full((3,), random.random()), ("sample", "random")),
    ],
)
def test_stored_samples_are_compared(change: Callable[[int], Any], outcome: Any) -> None:
    """By their bits but the last ones of numbers; all generators are put back; what cannot be read is no change."""
    source = Made(images, 12)
    with closing(CachedDataset(source)) as dataset:
        for index in range(12):
            dataset[index]
        source.make = change
        states = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
        assert dataset.cache is not None
        look = read_again(source, dataset.cache, Due(3))
        assert (torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()) == states
    assert (look.change and look.change.partition(" ")[0], look.cause) == outcome


@pytest.mark.processes
def test_looks_come_to_all_samples(tmp_path: Path) -> None:
    """Not to the same few, of which all may be even."""
    source = Made(images, 64, log_path=tmp_path / "log")
    with closing(CachedDataset(source)) as dataset:
        for index in range(64):
            dataset[index]
        assert dataset.cache is not None
        (tmp_path / "log").unlink()
        for _ in range(150):
            read_again(source, dataset.cache, Due(8))
    assert set(source.loaded) == set(range(64))


class Visits:
    """A source that counts, and another object that reaches its counts."""

    def __init__(self, counts: Any) -> None:
        self.counts = counts


def read_of_counts(visits: Visits) -> Any:
    return visits.counts


@pytest.mark.parametrize(
    "counts",
    [
        *([0, 0], {0: 0, 1: 0}, np.zeros(2), torch.zeros(2, dtype=torch.int64)),
        *(torch.zeros(2, dtype=torch.bfloat16), bytearray(2), multiprocessing.Array("i", 2)),
    ],
    ids=lambda counts: f"{type(counts).__name__} {getattr(counts, 'dtype', '')}",
)
def test_what_is_written_into_common_state_is_found_and_put_back(counts: Any) -> None:
    """In containers and arrays that the other object holds, or whose name in the source its code says; no others."""
    source: Any = Visits(counts)
    source.reads = [0]
    for other, datasets in ((Visits(counts), []), (lambda: read_of_counts(source), []), (lambda: source.counts, [])):
        state = CommonState(source, [other], datasets)
        assert state
        before = state.content()
        source.reads[0] += 1
        assert before.put_back() is None
        source.counts[1] += 1
        assert before.put_back() == "Visits.counts"
        assert int(source.counts[1]) == 0
    assert not CommonState(source, [Visits([0, 0])])


def test_all_processes_share_what_looks_cost() -> None:
    """The time of the training begins with the first question; looks add to what they have read and taken."""
    counters = Counters.create()
    with closing(counters):
        assert counters.begin_looks() < SECOND
        counters.add_look(3, 500)
        counters.add_look(1, 20)
        assert counters.looks == (4, 520)
        assert not counters.says_changed
        counters.say_changed()
        assert counters.says_changed
        assert counters.totals().served == 0
    assert (counters.looks, counters.says_changed, counters.begin_looks()) == ((0, 0), False, 0)

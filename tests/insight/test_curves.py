"""Curves of the user's own loading: which arms are measured, that they are what is measured, and what follows."""

from __future__ import annotations

import pytest
import torch

from lightning_stocache.insight import measurement
from lightning_stocache.insight.curves import Arm, Curves, as_json, as_text, measure_curves
from lightning_stocache.insight.measurement import Data, PlanError
from tests.insight.planned import spread
from tests.insight.test_measurement import Broken, Clock, Slow, WithGradients

SOURCE = [torch.full((50,), index) for index in range(64)]
QUICK = 0.05


@pytest.mark.parametrize("workers", [[0], pytest.param([0, 2], marks=pytest.mark.processes)])
def test_every_arm_is_measured_in_every_round(workers) -> None:
    """Each once where workers and batch size meet; from the source and from the cache; told as they come."""
    told = []
    found = measure_curves(
        Data(SOURCE, 4), workers, [4, 60], seconds=QUICK, limit=1e9, progress=lambda *each: told.append(each)
    )
    arms = list(found.rates)
    assert len(arms) == 2 * (len(workers) + 1)
    assert all(len(rate.values) == 3 and rate.low > 0 for rate in found.rates.values())
    for source in ("source", "cache"):
        assert [number for number, _ in found.over("num_workers")[source]] == workers
        assert [number for number, _ in found.over("batch_size")[source]] == [4, 60]
    assert [done for done, *_ in told] == list(range(3 * len(arms) + 1))
    assert {count for _, count, *_ in told} == {3 * len(arms)}
    assert [words.partition(": ")[0] for *_, words in told[1:]] == [str(arm) for arm in arms] * 3
    assert found.left_out == ()


def test_there_is_a_time_limit(monkeypatch) -> None:
    """What cannot be measured in time is left out, and it is said after how many measurements."""
    clock = Clock(monkeypatch)
    monkeypatch.setattr(measurement.Trial, "pace", lambda *_: clock.takes(50.0, 0.001))
    found = measure_curves(Data(SOURCE, 4), [0], [4, 16], limit=120.0)
    assert [len(rate.values) for rate in found.rates.values()] == [1, 1, 1]
    assert found.left_out[0].endswith("s were over after 3 of 12 measurements.")


def test_what_cannot_be_cached_is_measured_from_the_source() -> None:
    """And said."""
    found = measure_curves(Data(WithGradients(40), 4), [0], seconds=QUICK)
    assert [arm.cached for arm in found.rates] == [False]
    assert "Nothing can be cached" in found.left_out[0]


def test_batches_that_take_too_long_are_left_out(monkeypatch) -> None:
    """A slow source is not read for minutes, and the dataset has an end; it is said which batches were not measured."""
    slow = Slow(Clock(monkeypatch))  # a quarter of a second a sample
    found = measure_curves(Data(slow, 2), (), [1, 16, 10**9], seconds=QUICK, limit=16.0)
    assert [number for number, _ in found.over("batch_size")["source"]] == [1]
    assert [number for number, _ in found.over("batch_size")["cache"]] == [1, 16]
    assert "Batches of 16 from the source" in found.left_out[0]
    assert "no batches of 1000000000" in found.left_out[1]


@pytest.mark.parametrize(
    ("data", "workers", "sizes", "words"),
    [
        (Data(SOURCE, 4), [-1], [], "workers must be 0 or more"),
        (Data(SOURCE, 4), [0, 10**4], [], "workers must be 8 per core at most"),
        (Data(SOURCE, 4), [], [0, 8], "batch sizes 1 or more"),
        (Data(Broken(2), 4), [0], [], "no file"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(data, workers, sizes, words) -> None:
    """Numbers that cannot be, and a source that raises."""
    with pytest.raises(PlanError, match=words):
        measure_curves(data, workers, sizes, seconds=QUICK)


SLOW, QUICK_RATES = {0: [90, 110], 1: [190, 210], 2: [380, 420], 4: [390, 425]}, [1000, 1200]
WORKERS = {Arm(8, number, False): spread(rates) for number, rates in SLOW.items()}
WORKERS |= {Arm(8, number, True): spread(QUICK_RATES) for number in SLOW}
SIZES = {Arm(size, 2, False): spread([100 * size, 120 * size]) for size in (8, 16, 128)}
SIZES |= {Arm(size, 2, True): spread(QUICK_RATES) for size in (8, 16, 128)}


def test_the_table_has_means_and_deviations() -> None:
    """One row for each number of workers, with the source and with the cache; JSON has every round."""
    curves = Curves(WORKERS, tuple(SLOW), (), 8, 2, ())
    rows = [line.split() for line in as_text(curves).splitlines()]
    assert ["4", "408", "+-", "25", "1,100", "+-", "141"] in rows
    assert [row[0] for row in rows[1:5]] == ["0", "1", "2", "4"]
    [first, *_] = as_json(curves)["points"]
    assert first == {"batch_size": 8, "num_workers": 0, "cached": False, "rounds": (90, 110)}


def test_workers_that_gain_nothing_are_not_advised() -> None:
    """Ranges that overlap with the best are as good; the fewest workers among them are told."""
    text = as_text(Curves(WORKERS, tuple(SLOW), (), 8, 2, ()))
    assert "Batches from the source: num_workers=2 is as fast as any of these (400 samples/s)." in text
    assert "Batches from the cache: num_workers=0 is as fast as any of these" in text


def test_larger_batches() -> None:
    """The question of small batches: how much faster a sample is in large ones."""
    text = as_text(Curves(SIZES, (), (8, 16, 128), 8, 2, ("One batch was left out.",)))
    assert "from 8 to 128 samples they are 16.0 times as fast per sample." in text
    assert "no faster, nor slower, per sample." in text
    assert "One batch was left out." in text

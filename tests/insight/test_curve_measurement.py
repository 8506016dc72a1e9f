"""Curves of the user's own loading: which settings are measured, and that they are what is measured."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from lightning_stocache.insight.breakdown import Breakdown
from lightning_stocache.insight.curve_measurement import measure_curves
from lightning_stocache.insight.curves import Setting
from lightning_stocache.insight.measurement import Data
from lightning_stocache.insight.planner import PlanError

SOURCE = [torch.full((50,), index) for index in range(64)]
QUICK = 0.05


class Unread:
    """A source that can be read a few times."""

    def __init__(self, sound: int) -> None:
        self.sound = sound

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        self.sound -= 1
        if self.sound < 0:
            raise ValueError("no more")
        return torch.zeros(4)


class Opaque:
    """Samples that no cache can hold."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> Any:
        return torch.ones(2, requires_grad=True)


@pytest.mark.parametrize("workers", [[0], pytest.param([0, 2], marks=pytest.mark.processes)])
def test_every_setting_is_measured_in_every_round(workers) -> None:
    """Each once where workers and batch size meet; from the source and from the cache; in three rounds."""
    told = []
    found = measure_curves(
        Data(SOURCE, 4), workers, [4, 60], seconds=40 * QUICK, progress=lambda *each: told.append(each)
    )
    settings = [point.setting for point in found.points]
    assert len(set(settings)) == len(settings) == 2 * (len(workers) + 1)
    assert all(point.loader.low > 0 for point in found.points)
    assert {len(point.loader.rounds) for point in found.points} == {3}
    assert [point.setting.num_workers for point in found.over_workers(True)] == workers
    assert [point.setting for point in found.over_batch_sizes(False)] == [
        Setting(size, 0, False, False) for size in (4, 60)
    ]
    assert told[0][:2] == (0, 3 * len(settings))
    assert told[-1] == (3 * len(settings), 3 * len(settings), 0.0, "")
    said = [words for *_, words in told if words]
    assert [words.partition(": ")[0] for words in said] == [f"loading, {setting}" for setting in settings]
    assert found.left_out == ()


def test_training_gets_the_batches_of_the_setting() -> None:
    """What trains is given a loader with the samples of the source, in batches of that size."""
    seen: set[int] = set()

    def train(loader: Any, warm: int, seconds: float) -> Breakdown:
        batch = next(iter(loader))
        seen.add(len(batch))
        assert batch[:, 0].tolist() == batch[:, 1].tolist()
        assert warm >= 3
        steps = Breakdown()
        steps.add({"wait": 1.0, "forward": 1.0})
        return steps

    found = measure_curves(Data(SOURCE, 8), (), [8, 16], train=train, seconds=QUICK)
    assert seen == {8, 16}
    [small, large] = found.over_batch_sizes(cached=True)
    assert small.training.rounds == (4.0,) * 3
    assert large.training.rounds == (8.0,) * 3
    assert small.steps.steps == 3


def test_what_cannot_be_cached_is_measured_from_the_source() -> None:
    """And said."""
    found = measure_curves(Data(Opaque(), 4), [0], seconds=QUICK)
    assert [point.setting.cached for point in found.points] == [False]
    assert "Nothing can be cached" in found.left_out[0]


class Slow(Opaque):
    def __getitem__(self, index: int) -> Any:
        time.sleep(0.01)
        return torch.ones(2)


def test_batches_that_take_too_long_are_left_out() -> None:
    """A slow source is not read for minutes, and the dataset has an end; it is said which batches were not measured."""
    found = measure_curves(Data(Slow(), 2), (), [1, 16, 10**9], seconds=1.0)
    assert [point.setting.batch_size for point in found.over_batch_sizes(cached=False)] == [1]
    assert [point.setting.batch_size for point in found.over_batch_sizes(cached=True)] == [1, 16]
    assert "Batches of 16 from the source" in found.left_out[0]
    assert "no batches of 1000000000" in found.left_out[1]


@pytest.mark.parametrize(
    ("data", "workers", "sizes", "words"),
    [
        (Data(SOURCE, 4), [-1], [], "workers must be 0 or more"),
        (Data(SOURCE, 4), [0, 10**4], [], "workers must be 8 per core at most"),
        (Data(SOURCE, 4), [], [0, 8], "batch sizes 1 or more"),
        (Data(Unread(2), 4), [0], [], "no more"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(data, workers, sizes, words) -> None:
    """Numbers that cannot be, and a source that raises."""
    with pytest.raises(PlanError, match=words):
        measure_curves(data, workers, sizes, seconds=QUICK)

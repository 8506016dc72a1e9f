"""What steps are made of: sums are exact, quantiles nearly."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from lightning_stocache.insight.breakdown import PARTS, Breakdown


def broken_down(*steps: dict[str, float], samples: int = 0) -> Breakdown:
    made = Breakdown()
    for step in steps:
        made.add(step, samples)
    return made


def test_sums_and_shares() -> None:
    """The parts add up to the step."""
    made = broken_down({"wait": 3.0, "forward": 1.0}, {"wait": 1.0, "backward": 3.0}, samples=4)
    assert (made.steps, made.samples, made.total, made.step_seconds) == (2, 8, 8.0, 4.0)
    assert [made.mean(part) for part in PARTS] == [2.0, 0.0, 0.5, 1.5, 0.0, 0.0]
    assert [made.share(part) for part in PARTS] == [0.5, 0.0, 0.125, 0.375, 0.0, 0.0]


def test_quantiles_are_those_of_the_list(rng: random.Random) -> None:
    """Within half a per cent, over six orders of magnitude, with steps that have none of a part."""
    values = [10 ** rng.uniform(-6, 0) if rng.random() < 0.8 else 0.0 for _ in range(2000)]
    made = broken_down(*({"forward": value} if value else {} for value in values))
    for share in (0.01, 0.5, 0.95, 1.0):
        exact = sorted(values)[math.ceil(share * len(values)) - 1]
        assert made.quantile("forward", share) == pytest.approx(exact, rel=0.005)
        assert made.quantile("step", share) == pytest.approx(exact, rel=0.005)


def test_many_at_a_time_are_as_one_by_one(rng: random.Random) -> None:
    """Rows of an array, one part a column, in the order of PARTS."""
    rows = [[rng.choice([0.0, rng.random()]) for _ in PARTS] for _ in range(50)]
    single, many = broken_down(*(dict(zip(PARTS, row, strict=True)) for row in rows), samples=2), Breakdown()
    for first in (0, 20):
        many.add_steps(np.array(rows[first : first + 20 + first]), samples=2 * (20 + first // 2))
    assert (many.steps, many.samples) == (single.steps, single.samples)
    for part in PARTS:
        assert many.seconds[part] == pytest.approx(single.seconds[part])
    for part in (*PARTS, "step"):
        assert [many.quantile(part, share) for share in (0.1, 0.5, 0.9)] == [
            single.quantile(part, share) for share in (0.1, 0.5, 0.9)
        ]


def test_several_are_added_up(rng: random.Random) -> None:
    """The sum of epochs is what one of all their steps would be."""
    steps = [{"wait": rng.random(), "rest": rng.random()} for _ in range(30)]
    parts = [broken_down(*steps[:10], samples=2), broken_down(*steps[10:], samples=2), Breakdown()]
    whole, together = broken_down(*steps, samples=2), Breakdown.sum(parts)
    assert (together.steps, together.samples) == (whole.steps, whole.samples)
    assert together.total == pytest.approx(whole.total)
    assert together.quantile("wait", 0.5) == whole.quantile("wait", 0.5)
    assert parts[0].steps == 10


def test_without_a_step_there_is_nothing() -> None:
    """No division by zero: means and quantiles are NaN, shares are 0."""
    none = Breakdown()
    assert math.isnan(none.mean("wait"))
    assert math.isnan(none.quantile("wait", 0.5))
    assert none.share("wait") == 0


def test_a_part_that_there_is_not_is_refused() -> None:
    """A misspelt part would be time that nobody sees."""
    with pytest.raises(ValueError, match=r"part must be one of wait, .* got forwards"):
        Breakdown().add({"wait": 1.0, "forwards": 1.0})

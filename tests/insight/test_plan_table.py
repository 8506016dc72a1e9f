"""A plan written down: the table, JSON and the picture."""

import json

import pytest

from lightning_stocache.insight.advice import advise
from lightning_stocache.insight.plan_table import as_json, as_text, save
from tests.insight.planned import measured, planner

QUICK = measured(hit=1e-6, uncached=[0.0105, 0.011, 0.0125])


def test_the_last_line_is_for_the_config():
    """The table ends with cache.budget=..., alone on its line, and JSON has the same."""
    plan = advise(planner(QUICK, step=0.045, num_workers=1))
    assert as_text(plan).splitlines()[-1] == "cache.budget=55%"
    values = json.loads(json.dumps(as_json(plan)))
    assert values["budget"] == "55%"
    assert [row["samples"] for row in values["rows"]] == [0, 250, 500, 550, 750, 1000]


def test_spreads_are_shown():
    """The lowest and the highest of what was measured stand beside each number, in the table and in JSON."""
    plan = advise(planner(QUICK))
    lines = {line.split()[0]: line for line in as_text(plan).splitlines() if line}
    assert lines["uncached"].split(maxsplit=1)[1] == "11.00 ms a sample [10.50..12.50]"
    assert "11 s [10.5..12.5]" in lines["0%"]
    assert as_json(plan)["seconds_per_sample"]["uncached"] == {"low": 0.0105, "median": 0.011, "high": 0.0125}
    assert as_json(plan)["rows"][0]["later_epoch"]["high"] == pytest.approx(12.5)


def test_the_largest_safe_budget_is_marked():
    """Where not all fits, the row of what does is named, and those beyond have a star."""
    text = as_text(advise(planner(safe_bytes=60_000)))
    assert "60% (largest safe)" in text
    assert "75%*" in text


def test_the_table_fits_a_terminal():
    """No line of a plan is wider than 110 characters."""
    assert max(map(len, as_text(advise(planner(QUICK, step=0.2))).splitlines())) <= 110


def test_the_picture_is_a_png(tmp_path):
    """The plan can be drawn, with and without a step, and where not all is safe."""
    for number, plan in enumerate((advise(planner(step=0.05)), advise(planner(safe_bytes=60_000)))):
        save(plan, path := tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")

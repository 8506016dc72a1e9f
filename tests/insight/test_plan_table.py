"""A plan written down: the table, JSON and the picture."""

import json

import pytest

from lightning_stocache.insight.curves import Arm, Curves
from lightning_stocache.insight.plan_table import as_json, as_text, save
from tests.insight.planned import paces, planned, spread

QUICK = paces(hit=1e-6, uncached=[0.0105, 0.011, 0.0125])
RATES = {Arm(8, number, cached): spread([90 + 900 * cached, 110.0]) for number in (0, 2) for cached in (False, True)}


def test_the_last_line_is_for_the_config():
    """The table ends with cache.budget=..., alone on its line, and JSON has the same."""
    plan = planned(QUICK, step=0.045, num_workers=1)
    assert as_text(plan).splitlines()[-1] == "cache.budget=55%"
    values = json.loads(as_json(plan))
    assert values["budget"] == "55%"
    assert [row["samples"] for row in values["rows"]] == [0, 250, 500, 550, 750, 1000]
    assert "curves" not in values


def test_ranges_and_deviations_are_shown():
    """The lowest and the highest stand beside each median, with the standard deviation, in the table and in JSON."""
    plan = planned(QUICK)
    lines = {line.split()[0]: line.split()[1:] for line in as_text(plan).splitlines() if line}
    assert lines["uncached"] == ["11.00", "10.50..12.50", "1.04", "ms", "a", "sample"]
    assert lines["hit"] == ["1.0", "1.0..1.0", "0.0", "us", "a", "sample"]
    assert lines["25%"][-4:] == ["1.5x", "[1.4..1.7]", "epoch", "2"]
    uncached = json.loads(as_json(plan))["seconds_per_sample"]["uncached"]
    assert uncached == pytest.approx({"low": 0.0105, "median": 0.011, "high": 0.0125, "deviation": 0.0010408}, rel=1e-3)


@pytest.mark.parametrize("safe_bytes", [10**12, 60_000 * 10**6])
def test_the_table_fits_a_terminal(safe_bytes):
    """No line of a plan is wider than 80 characters, also of a large dataset whose measurements vary."""
    wild = paces(uncached=[0.0002, 0.011, 9.5], hit=[1e-6, 2e-5], missed=[0.01, 12.5], disk_bytes=1)
    many = {"samples": 10**9, "batch_size": 10**4, "num_workers": 128, "nodes": 16, "ranks": 8, "free_bytes": 10**15}
    text = as_text(planned(wild, step=[0.002, 0.2, 7.0], safe_bytes=safe_bytes, **many))
    assert max(map(len, text.splitlines())) <= 80
    assert ("75%*" in text) == (safe_bytes < 10**11)


@pytest.mark.parametrize("plan", [planned(step=0.05), planned(safe_bytes=60_000), planned(paces(codec=None))])
@pytest.mark.parametrize("curves", [None, Curves(RATES, (0, 2), (), 8, 0, ())])
def test_the_picture_is_a_png(tmp_path, plan, curves):
    """The plan can be drawn with a step and without, where not all is safe, where nothing is, and with curves."""
    pytest.importorskip("matplotlib")
    save(plan, path := tmp_path / "plan.png", curves)
    assert path.read_bytes().startswith(b"\x89PNG")

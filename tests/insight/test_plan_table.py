"""A plan written down: the table, JSON and the picture."""

import json

import pytest

from lightning_stocache.insight.measurement import Curves
from lightning_stocache.insight.plan_table import as_json, as_text, curves_as_text, save
from tests.insight.planned import paces, planned, spread

QUICK = paces(hit=1e-6, uncached=[0.0105, 0.011, 0.0125])
SLOW = {0: [90, 110], 1: [190, 210], 2: [380, 420], 4: [390, 425]}
FAST = spread([1000, 1200])
WORKERS = {"source": [(n, spread(rates)) for n, rates in SLOW.items()], "cache": [(n, FAST) for n in SLOW]}
SIZES = {"source": [(n, spread([100 * n, 120 * n])) for n in (8, 16, 128)], "cache": [(n, FAST) for n in (8, 16, 128)]}
CURVES = Curves({"num_workers": WORKERS, "batch_size": SIZES}, ["One batch was left out."])


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
    assert uncached.pop("values") == [0.0105, 0.011, 0.0125]
    assert uncached == pytest.approx({"low": 0.0105, "median": 0.011, "high": 0.0125, "deviation": 0.0010408}, rel=1e-3)


@pytest.mark.parametrize("safe_bytes", [10**12, 60_000 * 10**6])
def test_the_table_fits_a_terminal(safe_bytes):
    """No line of a plan is wider than 80 characters, also of a large dataset whose measurements vary."""
    wild = paces(uncached=[0.0002, 0.011, 9.5], hit=[1e-6, 2e-5], missed=[0.01, 12.5], disk_bytes=1)
    many = {"samples": 10**9, "batch_size": 10**4, "num_workers": 128, "nodes": 16, "ranks": 8}
    text = as_text(planned(wild, step=[0.002, 0.2, 7.0], safe_bytes=safe_bytes, **many))
    assert max(map(len, text.splitlines())) <= 80
    assert ("75%*" in text) == (safe_bytes < 10**11)


@pytest.mark.parametrize("plan", [planned(step=0.05), planned(safe_bytes=60_000), planned(paces(codec=None))])
@pytest.mark.parametrize("curves", [None, CURVES])
def test_the_picture_is_a_png(tmp_path, plan, curves):
    """The plan can be drawn with a step and without, where not all is safe, where nothing is, and with curves."""
    pytest.importorskip("matplotlib")
    save(plan, path := tmp_path / "plan.png", curves)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_curves_have_tables_and_sentences():
    """A row for each number, with the spread of the rounds; ranges that overlap with the best are as good."""
    text = curves_as_text(CURVES)
    rows = [line.split() for line in text.splitlines()]
    assert ["4", "408", "+-", "25", "1,100", "+-", "141"] in rows
    assert [row[0] for row in rows[1:5]] == ["0", "1", "2", "4"]
    assert max(map(len, text.splitlines())) <= 80
    told = " ".join(text.split())
    assert "Batches from the source: num_workers=2 is as fast as any of these (400 samples/s)." in told
    assert "Batches from the cache: num_workers=0 is as fast as any of these" in told
    assert "from 8 to 128 samples they are 16.0 times as fast per sample." in told
    assert "no faster, nor slower, per sample." in told
    assert "One batch was left out." in told

"""Curves written down: tables, sentences, JSON and panels."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from lightning_stocache.insight.breakdown import Breakdown
from lightning_stocache.insight.chart import draw
from lightning_stocache.insight.curve_table import as_json, as_text, panels_of, sentences
from lightning_stocache.insight.curves import Curves, Point, Rates, Setting
from lightning_stocache.insight.picture import save


def steps(wait: float) -> Breakdown:
    made = Breakdown()
    made.add({"wait": wait, "forward": 0.01, "transfer": 0.001})
    return made


def point(
    size: int, workers: int, *rounds: float, cached: bool = False, wait: float | None = None, **more: Any
) -> Point:
    training = () if wait is None else tuple(rate / 2 for rate in rounds)
    made = steps(wait) if wait is not None else Breakdown()
    return Point(Setting(size, workers, cached, more.get("pinned", False)), Rates(rounds), Rates(training), made)


def curves(*points: Point, **more: Any) -> Curves:
    workers = tuple(sorted({each.setting.num_workers for each in points if each.setting.batch_size == 8}))
    sizes = tuple(sorted({each.setting.batch_size for each in points if each.setting.num_workers == 2}))
    workers, sizes = (numbers if len(numbers) > 1 else () for numbers in (workers, sizes))
    return Curves(points, workers, sizes, 8, 2, False, tuple(more.get("left_out", ())))


SOURCE = [point(8, 0, 90, 110), point(8, 1, 190, 210), point(8, 2, 380, 420), point(8, 4, 390, 425)]
LOADED = curves(*SOURCE, *(replace(each, setting=replace(each.setting, cached=True)) for each in SOURCE))
TRAINED = curves(
    *(point(size, 2, 100 * size, 120 * size, wait=0.08 / size) for size in (8, 16, 128)),
    *(point(size, 2, 1000, 1200, cached=True, wait=0.0) for size in (8, 16, 128)),
)


def test_the_table_has_means_and_ends() -> None:
    """One row for each number of workers, with the source and with the cache, and standard deviations between them."""
    rows = [line.split() for line in as_text(LOADED).splitlines()]
    assert ["4", *["408", "+-", "25", "[390..425]"] * 2] in rows
    assert [row[0] for row in rows[1:5]] == ["0", "1", "2", "4"]


def test_workers_that_gain_nothing_are_not_advised() -> None:
    """Error bars that overlap with the best are as good; the fewest workers among them are told."""
    said = sentences(LOADED)
    assert "num_workers=2 is as fast as any" in said[0]
    assert "from the cache" in said[1]


def test_larger_batches_and_waiting() -> None:
    """The question of small batches: how much faster a sample is in large ones, and how much is waited in each."""
    source, cache = sentences(TRAINED)
    assert "from 8 to 128 samples they are 16.0 times as fast per sample; waiting goes from 48 to 5 %" in source
    assert "no faster, nor slower, per sample; waiting goes from 0 to 0 %" in cache


def test_steps_are_broken_down_by_batch_size() -> None:
    """In milliseconds, with the source and with the cache."""
    rows = [line.split() for line in as_text(TRAINED).splitlines()]
    assert ["8", "10.00", "1.00", "10.00", "0.00", "0.00", "0.00", "21.00", "48", "%"] in rows
    assert ["8", "0.00", "1.00", "10.00", "0.00", "0.00", "0.00", "11.00", "0", "%"] in rows


def test_pinned_memory_is_compared_where_both_were_measured() -> None:
    """As on a machine with a GPU."""
    both = [point(8, 2, 400, cached=True, wait=0.0, pinned=pinned) for pinned in (True, False)]
    assert "pinned  transfer, ms" in as_text(replace(curves(*both), batch_sizes=(8,)))
    assert "pinned" not in as_text(TRAINED)


def test_json_has_every_round() -> None:
    """All numbers are there as they were measured."""
    values = json.loads(json.dumps(as_json(TRAINED)))
    assert values["points"][0]["loader"] == [800, 960]
    assert values["points"][0]["step_seconds"]["wait"] == pytest.approx(0.01)
    assert json.loads(json.dumps(as_json(LOADED)))["points"][0]["step_seconds"] == {}


def test_panels_have_error_bars(tmp_path) -> None:
    """A bar for each point, from the fastest round to the slowest, and what a step is made of beside."""
    pytest.importorskip("matplotlib")
    [loading] = panels_of(LOADED)
    assert draw(loading).count('class="line thin') == 8
    panels = panels_of(TRAINED)
    assert [panel.title for panel in panels] == [
        "Loading over batch_size",
        "Training over batch_size",
        "A step, with batches from the source",
        "A step, with batches from the cache",
    ]
    save([loading, *panels], tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")

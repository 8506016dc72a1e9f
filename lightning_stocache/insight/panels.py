"""What the dashboard draws, before anybody draws it: six panels of plain data.

A panel is plain data of one of four kinds: `Lines` over epochs or steps, `Stacks` of two parts per epoch, `Bars` of
several parts, `Meters` of used against granted. `chart` draws it. Rates have a fixed axis from 0 to 100 %: on an axis
that follows the data, 0.698 and 0.700 look like nothing and everything.

A metric that a run did not log leaves its panel with a sentence in `empty`. Colours are numbers, the same for a run in
all panels; the drawing knows what they look like. Of more than `MOST_DRAWN` runs the first are drawn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_stocache.insight.runs import Run, labels
from lightning_stocache.node.budget import format_bytes

__all__ = [
    "MOST_DRAWN",
    "Bar",
    "Bars",
    "Lines",
    "Meter",
    "Meters",
    "Panel",
    "Series",
    "Stack",
    "Stacks",
    "Unit",
    "panels",
    "write",
]

MOST_DRAWN = 8
Unit = Literal["%", "bytes", "s", "samples/s"]
Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """A line: values (`solid`), their ceiling (`dashed`), what is expected (`dotted`), a part (`thin`).

    Of style `band` the area between the lowest and the highest: the points go round it. Of style `error` bars from the
    lowest to the highest: two points for each, one after the other.
    """

    label: str
    points: Sequence[Point]
    colour: int
    style: Literal["solid", "dashed", "dotted", "thin", "band", "error"] = "solid"


@dataclass(frozen=True)
class Lines:
    """Values over epochs, steps or something else; `unit` "%" has the fixed axis. Notes are words at an x.

    With `names`, x is a number of a name, from 0: the points stand at equal distances.
    """

    title: str
    caption: str
    x: str
    unit: Unit
    series: Sequence[Series]
    empty: str = ""
    x_unit: Unit | None = None
    notes: Sequence[tuple[float, str]] = ()
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Stack:
    """One run's bars: for each epoch the lower and the upper part."""

    label: str
    bars: Sequence[tuple[float, float, float]]


@dataclass(frozen=True)
class Stacks:
    """Two parts of a whole per epoch, the runs side by side; above a bar stands the share of part `told`."""

    title: str
    caption: str
    unit: Unit
    parts: tuple[str, str]
    told: Literal[0, 1]
    stacks: Sequence[Stack]
    empty: str = ""


@dataclass(frozen=True)
class Meter:
    """Bytes used against bytes granted (0: none, or not known)."""

    label: str
    used: float
    granted: float
    colour: int


@dataclass(frozen=True)
class Meters:
    """Used against granted, all at one scale."""

    title: str
    caption: str
    rows: Sequence[Meter]
    empty: str = ""


@dataclass(frozen=True)
class Bar:
    """The parts of one thing, from below; above it stands a word."""

    label: str
    parts: Sequence[float]
    told: str = ""


@dataclass(frozen=True)
class Bars:
    """Any number of parts of a whole, for each of several things side by side."""

    title: str
    caption: str
    x: str
    unit: Unit
    parts: Sequence[str]
    colours: Sequence[int]
    bars: Sequence[Bar]
    empty: str = ""


Panel = Lines | Stacks | Bars | Meters


def write(value: float, unit: Unit) -> str:
    """Write a value for people.

    Example:
        >>> write(0.4996, "%"), write(1, "%"), write(3 * 2**20, "bytes"), write(0.0123, "s"), write(4321.9, "samples/s")
        ('50 %', '100 %', '3 MiB', '0.012 s', '4,322')
    """
    if unit == "%":
        return f"{100 * value:.1f}".removesuffix(".0") + " %"
    if unit == "bytes":
        return format_bytes(int(value))
    digits = (
        f"{value:,.0f}"
        if abs(value) >= 100
        else f"{value:.2g}"
        if abs(value) < 10
        else f"{value:.1f}".removesuffix(".0")
    )
    return f"{digits} s" if unit == "s" else digits


def panels(runs: Sequence[Run]) -> list[Panel]:
    """The six panels of these runs, in reading order."""
    runs = runs[:MOST_DRAWN]
    return [_hit_rate(runs), _fill(runs), _bytes(runs), _stall(runs), _speed(runs), _memory(runs)]


def _hit_rate(runs: Sequence[Run]) -> Lines:
    alone, series = len(runs) == 1, []
    for colour, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        line = "hit rate" if alone else label
        series += [
            Series(line, run.epochs("hit_rate"), colour),
            Series("ceiling" if alone else "", run.epochs("coverage"), 1 if alone else colour, "dashed"),
            Series("expected" if alone else "", run.epochs("hit_rate_expected"), 2 if alone else colour, "dotted"),
        ]
        if alone:
            series += [
                Series(stage, run.epochs("hit_rate", stage), 3, "thin") for stage in run.stages if stage != "train"
            ]
            series += [
                Series(f"node {node}", run.epochs(f"node{node}/hit_rate"), colour, "thin")
                for node in run.nodes[:MOST_DRAWN]
            ]
    expected = ", dotted what is expected" if any(run.epochs("hit_rate_expected") for run in runs) else ""
    caption = f"Samples served from memory, per epoch. Dashed the ceiling, the share that has a slot{expected}."
    return Lines("Hit rate", caption, "epoch", "%", _drawn(series), _unless(series[::3], "an epoch's hit_rate"))


def _fill(runs: Sequence[Run]) -> Lines:
    series = [
        Series("fill" if len(runs) == 1 else label, run.live("fill_fraction", first_epoch=True), colour)
        for colour, (run, label) in enumerate(zip(runs, labels(runs), strict=True))
    ]
    caption = "Slots that are ready, over the steps of the first epoch. Slots only: a small cache fills up as well."
    return Lines("Fill in the first epoch", caption, "step", "%", _drawn(series), _unless(series, "fill_fraction"))


def _bytes(runs: Sequence[Run]) -> Stacks:
    stacks = _stacks(runs, "bytes_from_cache", "bytes_from_source")
    caption = "Bytes per epoch; above a bar the share that came from the cache."
    empty = "" if stacks else _missing("bytes_from_cache and bytes_from_source")
    return Stacks("Where the bytes came from", caption, "bytes", ("cache", "source"), 0, stacks, empty)


def _stall(runs: Sequence[Run]) -> Stacks:
    stacks = _stacks(runs, "compute_seconds", "data_wait_seconds")
    caption = "Seconds of computing and waiting; above a bar the share spent waiting."
    empty = "" if stacks else _missing("data_wait_seconds and compute_seconds")
    return Stacks("Waiting for data", caption, "s", ("computing", "waiting for data"), 1, stacks, empty)


def _speed(runs: Sequence[Run]) -> Lines:
    series = [
        Series("" if len(runs) == 1 else label, run.epochs("samples_per_second"), colour)
        for colour, (run, label) in enumerate(zip(runs, labels(runs), strict=True))
    ]
    empty = _unless(series, "samples_per_second")
    return Lines(
        "Samples per second", "Of training, per epoch, over all ranks.", "epoch", "samples/s", _drawn(series), empty
    )


def _memory(runs: Sequence[Run]) -> Meters:
    rows = []
    for colour, (run, label) in enumerate(zip(runs, labels(runs), strict=True)):
        live = run.live("memory_bytes")
        used = run.last("memory_bytes") if run.epoch_count or not live else live[-1][1]
        parts = [("training" if len(runs) == 1 else label, used, run.last("budget_bytes"))]
        if len(runs) == 1:
            parts += [
                (stage, run.last("memory_bytes", stage), run.last("budget_bytes", stage)) for stage in run.stages[1:]
            ]
            parts += [(f"training, node {node}", run.last(f"node{node}/memory_bytes"), None) for node in run.nodes]
        rows += [
            Meter(name, max(used, 0.0), max(granted or 0.0, 0.0), colour)
            for name, used, granted in parts
            if used is not None
        ]
    caption = "In use after the last epoch, of what was granted; summed over nodes."
    return Meters("Memory against budget", caption, rows[:MOST_DRAWN], "" if rows else _missing("memory_bytes"))


def _stacks(runs: Sequence[Run], lower: str, upper: str) -> list[Stack]:
    stacks = []
    for run, label in zip(runs, labels(runs), strict=True):
        low, high = dict(run.epochs(lower)), dict(run.epochs(upper))
        bars = [(epoch, max(low[epoch], 0.0), max(high[epoch], 0.0)) for epoch in low if epoch in high]
        if bars:
            stacks.append(Stack("" if len(runs) == 1 else label, bars))
    return stacks


def _drawn(series: Iterable[Series]) -> list[Series]:
    return [line for line in series if line.points]


def _unless(series: Iterable[Series], metric: str) -> str:
    return "" if any(line.points for line in series) else _missing(metric)


def _missing(metrics: str) -> str:
    return f"Nothing to draw: {metrics} {'were' if ' and ' in metrics else 'was'} not logged here."

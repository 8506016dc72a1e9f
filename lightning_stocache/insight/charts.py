"""The report's charts, drawn by matplotlib: each as an SVG for the page, all of them in one PNG.

A chart is a title, a caption, the metrics that it needs and a function that draws runs into axes. Rates have a fixed
axis from 0 to 100 %: on an axis that follows the data, 0.698 and 0.700 look like nothing and everything. Names stand at
the ends of the lines and beside the last bar, in their colours, which are those of Okabe and Ito, darkened until they
can be read as text; runs differ by their marks, too. pyplot is not used: no window, no display, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill, shorten
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from lightning_stocache.insight.runs import Points, Run
from lightning_stocache.insight.summary import Unit, write

__all__ = ["CHARTS", "COLOURS", "Chart", "save", "svg"]

COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")
"""Of runs, in their order."""

_BLUE, _VERMILION, _GREEN, _PURPLE, _, _SKY, _GREY, _ = COLOURS
_ORANGE, _DIM, _INK, _RULE = "#d98200", "#667085", "#1b2330", "#e4e7ec"
_PARTS = {"wait": _ORANGE, "transfer": _SKY, "forward": _GREEN}  # of a step
_PARTS |= {"backward": _BLUE, "optimizer": _PURPLE, "rest": _GREY}
_BOUNDS = (("coverage", "at most", _VERMILION, "--"), ("hit_rate_expected", "expected", _GREEN, ":"))  # of a hit rate
_NODES = 6  # that are drawn
_GAP = 0.08  # between names beside the axes, as a share of the axes' height
_WIDTH, _HEIGHT = 4.6, 2.4  # of a chart, in inches
_STYLE = {
    **{
        "font.size": 8,
        "text.color": _INK,
        "text.parse_math": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "stocache",
    },
    **{f"axes.spines.{side}": False for side in ("top", "right", "left", "bottom")},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.03, "grid.color": _RULE},
    **{"axes.labelcolor": _DIM, "xtick.color": _DIM, "ytick.color": _DIM},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "lines.markersize": 4.5, "lines.markeredgecolor": "white"},
}

Runs = Mapping[str, Run]


@dataclass(frozen=True)
class Chart:
    """What is drawn of runs.

    Args:
        title: in a few words.
        caption: a sentence or two on how to read it.
        metrics: what must have been logged.
        draw: draws runs, by their names in charts, into axes; false if there is nothing to draw.
    """

    title: str
    caption: str
    metrics: Sequence[str]
    draw: Callable[[Axes, Runs], bool]


@dataclass(frozen=True)
class _Line:
    name: str
    points: Points
    colour: str
    style: str = "-"
    marker: str = ""


@dataclass(frozen=True)
class _Bar:
    run: str
    label: str
    parts: Sequence[float]


def _draw_lines(axes: Axes, lines: Iterable[_Line], unit: Unit, x: str) -> bool:
    """Lines with the last value and the name at the end of each that has a name or marks."""
    lines = [line for line in lines if line.points]
    if not lines:
        return False
    end = _scale(axes, max(y for line in lines for _, y in line.points), unit)
    for line in lines[::-1]:  # the first ones lie above
        xs, ys = [x for x, _ in line.points], [min(max(y, 0.0), end) for _, y in line.points]
        axes.plot(xs, ys, line.style, color=line.colour, marker=line.marker if len(xs) <= 20 else "", clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    if len(places := {x for line in lines for x, _ in line.points}) == 1:
        axes.set_xticks(list(places))
    axes.set_xlabel(x)
    named = [(line, line.points[-1][1]) for line in lines if line.name or line.marker]
    _name(axes, [(value / end, f"{write(value, unit)} {line.name}", line.colour) for line, value in named])
    return True


def _draw_bars(
    axes: Axes, bars: Sequence[_Bar], parts: Mapping[str, str], unit: Unit, share: int, x: str = "epoch"
) -> bool:
    """Stacked bars, run by run, and the parts' names beside the last one.

    Args:
        axes: to draw in.
        bars: those of a run one after the other.
        parts: the colours of the parts, by their names.
        unit: of the parts.
        share: number of the part whose share stands above a bar: of many bars above the last one of each run.
        x: what the labels are.
    """
    if not bars:
        return False
    runs = list(dict.fromkeys(bar.run for bar in bars))
    places = [number + 0.6 * runs.index(bar.run) for number, bar in enumerate(bars)]
    end = _scale(axes, max(sum(bar.parts) for bar in bars), unit)
    for number, colour in enumerate(parts.values()):
        heights, below = [bar.parts[number] for bar in bars], [sum(bar.parts[:number]) for bar in bars]
        axes.bar(places, heights, 0.8, below, color=colour)
    for run in runs:
        drawn = [(place, bar.parts) for place, bar in zip(places, bars, strict=True) if bar.run == run]
        middle = (drawn[0][0] + drawn[-1][0]) / 2
        _write(axes, run, (middle, 1), (0, 12), xycoords=axes.get_xaxis_transform(), ha="center")
        crowded = len(bars) > 8
        for place, values in drawn[-1:] if crowded else drawn:
            over = drawn[-3:] if crowded else [(place, values)]  # the bars that the words span
            top = max(sum(each) for _, each in over)
            _write(axes, _percent(values, share), (place, top), (0, 2), ha="center", fontweight="bold")
    every = math.ceil(len(bars) / 24)
    axes.set_xticks(places[::every], [bar.label for bar in bars[::every]])
    axes.set(xlabel=x, xlim=(-0.6, max(places[-1] + 0.6, 3.4)))
    values = bars[-1].parts
    middles = [sum(values[:number]) + values[number] / 2 for number in range(len(parts))]
    _name(axes, [(middle / end, *part) for middle, part in zip(middles, parts.items(), strict=True)])
    return True


def _percent(parts: Sequence[float], number: int) -> str:
    return f"{100 * parts[number] / sum(parts):.0f} %" if sum(parts) else ""


def _scale(axes: Axes, top: float, unit: Unit) -> float:
    """Give the y axis ticks from 0 to beyond the top, of a rate to 100 %; where it ends."""
    whole, steps = 1, [1.0, 2.0, 5.0, 10.0]
    if unit == "bytes":
        whole, steps = 1024 ** int(math.log(max(top, 1), 1024)), [1.0, 2.5, 5.0, 10.0]  # 0.25 MiB are 256 KiB
    ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
    if unit != "%":
        ticks = [whole * tick for tick in MaxNLocator(5, steps=steps).tick_values(0, top / whole if top > 0 else 1.0)]
    axes.set_yticks(ticks, [write(tick, unit) for tick in ticks])
    axes.set_ylim(0, ticks[-1])
    return ticks[-1]


def _name(axes: Axes, names: Sequence[tuple[float, str, str]]) -> None:
    """Write names in their colours to the right of the axes, at their heights or as far below as it needs."""
    last = 2.0
    for number, (height, words, colour) in enumerate(sorted(names, key=lambda name: -name[0])):
        below = len(names) - 1 - number
        last = max(min(height, last - _GAP, 1.0), _GAP * below)
        _write(axes, words, (1, last), (6, 0), xycoords="axes fraction", va="center", color=colour, fontweight="bold")


def _write(axes: Axes, words: str, place: tuple[float, float], beside: tuple[float, float], **how: Any) -> None:
    axes.annotate(words.strip(), place, beside, textcoords="offset points", annotation_clip=False, **how)


def _of_runs(runs: Runs, points: Callable[[Run], Points], alone: str = "") -> list[_Line]:
    """A line for each run; a run that is alone has the name that it is given here."""
    drawn = enumerate(zip(runs.items(), COLOURS, strict=False))
    return [_Line(name or alone, points(run), colour, marker="osD^"[n % 4]) for n, ((name, run), colour) in drawn]


def _hit_rate(axes: Axes, runs: Runs) -> bool:
    lines = _of_runs(runs, lambda run: run.epochs("hit_rate"), "hit rate")
    if not any(line.points for line in lines):
        return False
    alone = len(runs) == 1
    for line, run in zip(list(lines), runs.values(), strict=False):
        for metric, name, colour, form in _BOUNDS:
            points = run.epochs(metric)
            lines.append(_Line(name if alone else "", points, colour if alone else line.colour, form))
        more = {stage: run.epochs("hit_rate", stage) for stage in run.stages if stage != "train"}
        more |= {f"node {node}": run.epochs(f"node{node}/hit_rate") for node in run.nodes[:_NODES]}
        lines += [_Line(name, points, _GREY, "-.") for name, points in more.items() if alone]
    return _draw_lines(axes, lines, "%", "epoch")


def _fill(axes: Axes, runs: Runs) -> bool:
    lines = _of_runs(runs, lambda run: run.live("fill_fraction", first_epoch=True), "filled")
    return _draw_lines(axes, lines, "%", "step")


def _speed(axes: Axes, runs: Runs) -> bool:
    return _draw_lines(axes, _of_runs(runs, lambda run: run.epochs("samples_per_second")), "samples/s", "epoch")


def _bars_of(runs: Runs, metrics: Sequence[str]) -> list[_Bar]:
    """A bar for each epoch of each run that has logged all these parts."""
    bars = []
    for name, run in runs.items():
        columns = [dict(run.epochs(metric)) for metric in metrics]
        for epoch in sorted(set.intersection(*map(set, columns))):
            bars.append(_Bar(name, f"{epoch:.0f}", [max(column[epoch], 0.0) for column in columns]))
    return bars


def _bytes(axes: Axes, runs: Runs) -> bool:
    bars = _bars_of(runs, ["bytes_from_cache", "bytes_from_source"])
    return _draw_bars(axes, bars, {"cache": _BLUE, "source": _ORANGE}, "bytes", 0)


def _waiting(axes: Axes, runs: Runs) -> bool:
    bars = _bars_of(runs, ["compute_seconds", "data_wait_seconds"])
    return _draw_bars(axes, bars, {"computing": _BLUE, "waiting": _ORANGE}, "s", 1)


def _steps(axes: Axes, runs: Runs) -> bool:
    bars = _bars_of(runs, [f"step/{part}_seconds" for part in _PARTS])
    if len(runs) == 1:
        return _draw_bars(axes, bars, _PARTS, "s", 0)
    last = {bar.run: _Bar("", bar.run, bar.parts) for bar in bars}
    return _draw_bars(axes, list(last.values()), _PARTS, "s", 0, "")


def _memory(axes: Axes, runs: Runs) -> bool:
    rows = []
    for (name, run), colour in zip(runs.items(), COLOURS, strict=False):
        parts = [(name or "training", run.last("memory_bytes"), run.last("budget_bytes"))]
        if len(runs) == 1:
            others = [stage for stage in run.stages if stage != "train"]
            parts += [(stage, run.last("memory_bytes", stage), run.last("budget_bytes", stage)) for stage in others]
            parts += [(f"node {node}", run.last(f"node{node}/memory_bytes"), None) for node in run.nodes[:_NODES]]
        rows += [(part, used, granted or 0.0, colour) for part, used, granted in parts if used is not None]
    most = max([1.0, *(max(used, granted) for _, used, granted, _ in rows)])
    for place, (name, used, granted, colour) in enumerate(rows):
        axes.barh(place, granted, 0.4, color=_RULE)
        axes.barh(place, used, 0.4, color=colour)
        words = write(used, "bytes") + (f" of {write(granted, 'bytes')}" if granted else "")
        _write(axes, name, (0, place - 0.2), (0, 3), va="bottom")
        _write(axes, words, (most, place - 0.2), (0, 3), va="bottom", ha="right", fontweight="bold")
    axes.set(xlim=(0, most), ylim=(max(len(rows), 4) - 0.5, -0.7))
    axes.set_axis_off()
    return bool(rows)


CHARTS = (
    Chart(
        "Hit rate",
        "Samples served from memory, per epoch. Dashed the share that has a slot, dotted what is expected.",
        ["hit_rate"],
        _hit_rate,
    ),
    Chart(
        "Fill in the first epoch",
        "Slots that are ready, over the steps of the first epoch. Slots only: a small cache fills up as well.",
        ["fill_fraction"],
        _fill,
    ),
    Chart(
        "Where the bytes came from",
        "Bytes per epoch; above a bar the share that came from the cache.",
        ["bytes_from_cache", "bytes_from_source"],
        _bytes,
    ),
    Chart(
        "Waiting for data",
        "Seconds of computing and waiting per epoch; above a bar the share spent waiting.",
        ["compute_seconds", "data_wait_seconds"],
        _waiting,
    ),
    Chart("Samples per second", "Of training, per epoch, over all ranks.", ["samples_per_second"], _speed),
    Chart("Memory against budget", "In use, of what was granted; summed over nodes.", ["memory_bytes"], _memory),
    Chart(
        "What a step is made of",
        "Mean seconds of a step, by epoch; of several runs in the last epoch. Above a bar the share spent waiting.",
        ["step/wait_seconds"],
        _steps,
    ),
)
"""In reading order; the last is for runs with a StepTimer."""


def svg(chart: Chart, runs: Runs) -> str:
    """A chart as an `<svg>` element.

    Args:
        chart: what to draw.
        runs: by the names that they have in charts, at most as many as there are colours.
    """
    text = StringIO()
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        _draw(chart, figure.subplots(), runs)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(charts: Sequence[Chart], runs: Runs, table: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw a table, and charts below it, two in a row, into a PNG file.

    Args:
        charts: what to draw.
        runs: by the names that they have in charts.
        table: cells by column.
        path: the file, written anew.
    """
    rows, lines = math.ceil(len(charts) / 2), len(next(iter(table.values())))
    heights = [0.6 + 0.25 * lines, rows * (_HEIGHT + 0.7)]
    with rc_context(_STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(2 * _WIDTH + 0.6, sum(heights)), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=heights)
        _draw_table(halves[0].subplots(), table)
        parts = halves[1].subfigures(rows, 2, wspace=0.03, hspace=0.03)
        for chart, part in zip(charts, parts.flat, strict=False):
            part.text(0.02, 0.97, chart.title, va="top", fontsize=10, fontweight="bold")
            part.suptitle("\n\n" + fill(chart.caption, 85), x=0.02, ha="left", fontsize=7, color=_DIM)
            _draw(chart, part.subplots(), runs)
        figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.2)


def _draw(chart: Chart, axes: Axes, runs: Runs) -> None:
    if not chart.draw(axes, runs):
        axes.set_axis_off()
        words = f"Nothing to draw:\n{' and '.join(chart.metrics)} not logged here."
        axes.text(0.5, 0.5, words, color=_DIM, ha="center", va="center")


def _draw_table(axes: Axes, columns: Mapping[str, Sequence[str]]) -> None:
    cells = [[shorten(cell, 40, placeholder="...") for cell in row] for row in zip(*columns.values(), strict=True)]
    head = [fill(name, 9) for name in columns]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n")) for column in zip(head, *cells, strict=True)
    ]
    axes.set_axis_off()
    table = axes.table(
        cells, None, "right", widths, colLabels=head, colLoc="right", bbox=Bbox.unit(), edges="horizontal"
    )
    table.auto_set_font_size(False)
    for (row, column), cell in table.get_celld().items():
        cell.set(edgecolor=_RULE, fontsize=7)
        cell.set_height(1 if row else 2)
        if row and not column:
            cell.get_text().set(color=COLOURS[(row - 1) % len(COLOURS)], fontweight="bold")

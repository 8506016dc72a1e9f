"""The report's charts, drawn by matplotlib: each as an SVG for the page, all of them and the table in one PNG.

Every chart is lines over epochs (or steps), or stacked bars. Rates have a fixed axis from 0 to 100 %: on an axis that
follows the data, 0.698 and 0.700 look like nothing and everything. Names stand at the ends of the lines and beside the
last bar, in their colours, which are those of Okabe and Ito, darkened until they can be read as text. pyplot is not
used: no window, no display, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill, shorten
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from lightning_stocache.insight.runs import Points, Run, Unit, write

__all__ = ["CHARTS", "COLOURS", "Chart", "save", "svg"]

COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")
"""Of runs, in their order."""

_BLUE, _VERMILION, _GREEN, _PURPLE, _, _SKY, _GREY, _ = COLOURS
_ORANGE, _DIM, _INK, _RULE = "#d98200", "#667085", "#1b2330", "#e4e7ec"
_PARTS = {"wait": _ORANGE, "transfer": _SKY, "forward": _GREEN, "backward": _BLUE, "optimizer": _PURPLE, "rest": _GREY}
_NODES = 6  # that are drawn
_FEW = 8  # bars, each with its share above
_GAP = 0.08  # between names beside the axes, as a share of the axes' height
_WIDTH, _HEIGHT = 4.6, 2.4  # of a chart, in inches
_STYLE: dict[Any, Any] = {
    **{f"axes.spines.{side}": False for side in ("top", "right", "left", "bottom")},
    **{"font.size": 8, "text.color": _INK, "text.parse_math": False, "svg.fonttype": "none"},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.03, "grid.color": _RULE},
    **{"axes.labelcolor": _DIM, "xtick.color": _DIM, "ytick.color": _DIM, "svg.hashsalt": "stocache"},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "lines.markersize": 4.5, "lines.markeredgecolor": "white"},
}

Runs = Mapping[str, Run]
"""By the names that they have in charts, at most as many as there are colours."""


class Chart(NamedTuple):
    """What is drawn of runs."""

    title: str
    caption: str  # a sentence or two on how to read it
    metrics: Sequence[str]  # what must have been logged
    draw: Callable[[Axes, Runs], bool]  # false if there is nothing to draw


class _Line(NamedTuple):
    name: str
    points: Points
    colour: str
    style: str = "o-"


class _Bar(NamedTuple):
    run: str
    label: str
    parts: Sequence[float]


def _draw_lines(axes: Axes, lines: Sequence[_Line], unit: Unit, x: str = "epoch") -> bool:
    """Lines with the last value and the name at the end of each."""
    lines = [line for line in lines if line.points]
    if not lines:
        return False
    end = _scale(axes, max(y for line in lines for _, y in line.points), unit)
    for line in lines[::-1]:  # the first ones lie above
        xs, ys = [x for x, _ in line.points], [min(max(y, 0.0), end) for _, y in line.points]
        axes.plot(xs, ys, line.style, color=line.colour, clip_on=False)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel(x)
    _name(axes, [(line.points[-1][1] / end, f"{write(line.points[-1][1], unit)} {line.name}", line) for line in lines])
    return True


def _draw_bars(axes: Axes, bars: Sequence[_Bar], colours: Mapping[str, str], unit: Unit, x: str = "epoch") -> bool:
    """Stacked bars, run by run, the names of the parts beside the last one, and above each the share of its first part.

    Of many bars the share of each run's last one stands above, beside the run's name.
    """
    if not bars:
        return False
    runs = list(dict.fromkeys(bar.run for bar in bars))
    places = [number + 0.6 * runs.index(bar.run) for number, bar in enumerate(bars)]
    end = _scale(axes, max(sum(bar.parts) for bar in bars), unit)
    bottoms = [0.0] * len(bars)
    for number, colour in enumerate(colours.values()):
        axes.bar(places, [bar.parts[number] for bar in bars], 0.8, bottoms, color=colour)
        bottoms = [sum(bar.parts[: number + 1]) for bar in bars]
    shares = [f"{100 * bar.parts[0] / top:.0f} %" if top else "" for bar, top in zip(bars, bottoms, strict=True)]
    for run in runs:
        members = [number for number, bar in enumerate(bars) if bar.run == run]
        name = run if len(bars) <= _FEW else f"{run}\n{shares[members[-1]]}"
        middle = (places[members[0]] + places[members[-1]]) / 2
        _write(axes, name, (middle, 1), (0, 12), xycoords=axes.get_xaxis_transform(), ha="center")
    if len(bars) <= _FEW:
        for share, place, top in zip(shares, places, bottoms, strict=True):
            _write(axes, share, (place, top), (0, 2), ha="center", fontweight="bold")
    every = math.ceil(len(bars) / 24)
    axes.set_xticks(places[::every], [bar.label for bar in bars[::every]])
    axes.set(xlabel=x, xlim=(-0.6, max(places[-1] + 0.6, 3.4)))
    named, below = [], 0.0
    for part, (name, colour) in zip(bars[-1].parts, colours.items(), strict=True):
        named.append(((below + part / 2) / end, name, _Line(name, (), colour)))
        below += part
    _name(axes, named)
    return True


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


def _name(axes: Axes, names: Sequence[tuple[float, str, _Line]]) -> None:
    """Write names in their colours to the right of the axes, at their heights or as far below as it needs."""
    last = 2.0
    for number, (height, words, line) in enumerate(sorted(names, key=lambda name: -name[0])):
        below = len(names) - 1 - number
        last = max(min(height, last - _GAP, 1.0), _GAP * below)
        _write(axes, words, (1, last), (6, 0), xycoords="axes fraction", va="center", color=line.colour, weight="bold")


def _write(axes: Axes, words: str, place: tuple[float, float], beside: tuple[float, float], **how: Any) -> None:
    axes.annotate(words.strip(), place, beside, textcoords="offset points", annotation_clip=False, **how)


def _of_runs(runs: Runs, points: Callable[[Run], Points], alone: str = "") -> list[_Line]:
    """A line for each run, with marks of its own; a run that is alone has the name that it is given here."""
    drawn = enumerate(zip(runs.items(), COLOURS, strict=False))
    return [_Line(name or alone, points(run), colour, "osD^"[n % 4] + "-") for n, ((name, run), colour) in drawn]


def _hit_rate(axes: Axes, runs: Runs) -> bool:
    lines = _of_runs(runs, lambda run: run.epochs("hit_rate"), "hit rate")
    if len(runs) == 1 and lines[0].points:
        [run] = runs.values()
        lines.append(_Line("at most", run.epochs("coverage"), _VERMILION, "--"))
        lines.append(_Line("expected", run.epochs("hit_rate_expected"), _GREEN, ":"))
        lines += [_Line(stage, run.epochs("hit_rate", stage), _GREY, "-.") for stage in run.stages if stage != "train"]
        nodes = run.nodes[:_NODES]
        lines += [_Line(f"node {node}", run.epochs(f"node{node}/hit_rate"), _GREY, "-.") for node in nodes]
    return _draw_lines(axes, lines, "%")


def _fill(axes: Axes, runs: Runs) -> bool:
    lines = _of_runs(runs, lambda run: run.live("fill_fraction", first_epoch=True), "filled")
    return _draw_lines(axes, lines, "%", "step")


def _speed(axes: Axes, runs: Runs) -> bool:
    return _draw_lines(axes, _of_runs(runs, lambda run: run.epochs("samples_per_second")), "samples/s")


def _epochs(colours: Mapping[str, str], metrics: Sequence[str], unit: Unit) -> Callable[[Axes, Runs], bool]:
    """What draws a bar for each epoch of each run that has logged all these parts."""

    def draw(axes: Axes, runs: Runs) -> bool:
        bars = []
        for name, run in runs.items():
            columns = [dict(run.epochs(metric)) for metric in metrics]
            for epoch in sorted(set.intersection(*map(set, columns))):
                bars.append(_Bar(name, f"{epoch:.0f}", [max(column[epoch], 0.0) for column in columns]))
        return _draw_bars(axes, bars, colours, unit)

    return draw


def _memory(axes: Axes, runs: Runs) -> bool:
    bars = []
    for name, run in runs.items():
        pairs = [(name or "training", run.last("memory_bytes"), run.last("budget_bytes"))]
        if len(runs) == 1:
            others = [stage for stage in run.stages if stage != "train"]
            pairs += [(stage, run.last("memory_bytes", stage), run.last("budget_bytes", stage)) for stage in others]
            share = (run.last("budget_bytes") or 0) / max(len(run.nodes), 1)
            pairs += [(f"node {node}", run.last(f"node{node}/memory_bytes"), share) for node in run.nodes[:_NODES]]
        bars += [
            _Bar("", part, [used, max((budget or 0) - used, 0)]) for part, used, budget in pairs if used is not None
        ]
    return _draw_bars(axes, bars, {"in use": _BLUE, "granted": "#aab2c0"}, "bytes", "")


_STEP = tuple(f"step/{part}_seconds" for part in _PARTS)
_WHENCE = ("bytes_from_cache", "bytes_from_source")
_SPENT = ("data_wait_seconds", "compute_seconds")
CHARTS = (
    Chart(
        "Hit rate",
        "Samples served from memory, per epoch. Of one run dashed the share that has a slot, dotted what is expected.",
        ("hit_rate",),
        _hit_rate,
    ),
    Chart(
        "Fill in the first epoch",
        "Slots that are ready, over the steps of the first epoch. Slots only: a small cache fills up as well.",
        ("fill_fraction",),
        _fill,
    ),
    Chart(
        "Where the bytes came from",
        "Bytes per epoch; above them the share that came from the cache.",
        _WHENCE,
        _epochs({"cache": _BLUE, "source": _ORANGE}, _WHENCE, "bytes"),
    ),
    Chart(
        "Waiting for data",
        "Seconds of waiting and computing per epoch; above them the share spent waiting.",
        _SPENT,
        _epochs({"waiting": _ORANGE, "computing": _BLUE}, _SPENT, "s"),
    ),
    Chart("Samples per second", "Of training, per epoch, over all ranks.", ("samples_per_second",), _speed),
    Chart("Memory against budget", "In use, of what was granted; summed over nodes.", ("memory_bytes",), _memory),
    Chart(
        "What a step is made of",
        "Mean seconds of a step, per epoch; above them the share spent waiting.",
        ("step/wait_seconds",),
        _epochs(_PARTS, _STEP, "s"),
    ),
)
"""In reading order; the last is for runs with a StepTimer."""


def svg(chart: Chart, runs: Runs) -> str:
    """A chart as an `<svg>` element."""
    text = StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        _draw(chart, figure.subplots(), runs)
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(charts: Sequence[Chart], runs: Runs, table: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw a table (cells by column), and charts below it, two in a row, into a new PNG file."""
    rows, lines = math.ceil(len(charts) / 2), len(next(iter(table.values())))
    heights = [0.6 + 0.25 * lines, rows * (_HEIGHT + 0.7)]
    with rc_context(_STYLE):
        figure = Figure(figsize=(2 * _WIDTH + 0.6, sum(heights)), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=heights)
        _draw_table(halves[0].subplots(), table)
        for chart, part in zip(charts, halves[1].subfigures(rows, 2, wspace=0.03, hspace=0.03).flat, strict=False):
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
    lines = [[*heading.split("\n"), *column] for heading, *column in zip(head, *cells, strict=True)]
    widths = [max(map(len, column)) for column in lines]
    axes.set_axis_off()
    drawn = axes.table(
        cells, None, "right", widths, colLabels=head, colLoc="right", bbox=Bbox.unit(), edges="horizontal"
    )
    drawn.auto_set_font_size(False)
    for (row, column), cell in drawn.get_celld().items():
        cell.set(edgecolor=_RULE, fontsize=7)
        cell.set_height(1 if row else 2)
        if row and not column:
            cell.get_text().set(color=COLOURS[(row - 1) % len(COLOURS)], fontweight="bold")

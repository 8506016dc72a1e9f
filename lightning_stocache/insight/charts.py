"""Charts by matplotlib: lines and stacked bars, as SVG for a page, or several charts in one PNG.

Rates have an axis from 0 to 100 %. A legend beside the axes has the names in the colours of the lines and bars. The
colours are those of Okabe and Ito, darkened until they can be read as text. pyplot is not used: it has global state and
opens windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from lightning_stocache.insight.runs import Points, Unit, write

__all__ = [
    "BLUE",
    "COLOURS",
    "GREY",
    "ORANGE",
    "Bar",
    "Chart",
    "Line",
    "draw_bars",
    "draw_lines",
    "over",
    "save",
    "svg",
]

COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")
"""Blue, vermilion, green, purple, brown, sky blue, grey and violet: of runs, in their order."""

BLUE, ORANGE, GREY = COLOURS[0], "#d98200", COLOURS[6]

_DIM, _INK, _RULE = "#667085", "#1b2330", "#e4e7ec"
_MANY = 8  # bars: more than this have no share above each
_WIDTH, _HEIGHT = 4.6, 2.4  # of a chart, in inches
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # of a legend: to the right of the axes
_STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.spines.bottom": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.xmargin": 0.03,
    "axes.labelcolor": _DIM,
    "font.size": 8,
    "grid.color": _RULE,
    "legend.frameon": False,
    "legend.handlelength": 1.8,
    "legend.labelcolor": "linecolor",
    "lines.markeredgecolor": "white",
    "lines.markersize": 4.5,
    "svg.fonttype": "none",
    "svg.hashsalt": "stocache",
    "text.color": _INK,
    "text.parse_math": False,
    "xtick.color": _DIM,
    "xtick.major.size": 0,
    "ytick.color": _DIM,
    "ytick.major.size": 0,
}


class Chart(NamedTuple):
    """A drawing with its title and caption."""

    title: str
    caption: str
    draw: Callable[[Axes], None]


class Line(NamedTuple):
    """A line with its name in the legend."""

    name: str
    points: Points
    colour: str
    style: str = "o-"
    errors: Any = None  # in two rows: how far the error bar of each point reaches down and up


class Bar(NamedTuple):
    """A stacked bar, which belongs to a group of bars."""

    group: str
    label: str
    parts: Sequence[float]


def over(name: str, ticks: Mapping[float, str], lines: Sequence[Line]) -> Callable[[Axes], None]:
    """A drawing of seconds over a quantity, with these ticks."""

    def draw(axes: Axes) -> None:
        draw_lines(axes, lines, "s", name)
        axes.set_xticks(list(ticks), list(ticks.values()))

    return draw


def draw_lines(axes: Axes, lines: Sequence[Line], unit: Unit, x: str = "epoch") -> None:
    """Draw the lines that have points, and a legend with the last value of each, the highest at the top."""
    by_height = sorted((line for line in lines if line.points), key=lambda line: -line.points[-1][1])
    for line in by_height:
        xs, ys = zip(*line.points, strict=True)
        above = 3 - lines.index(line) / 100  # the first line lies above the others
        axes.errorbar(
            xs,
            ys,
            line.errors,
            label=f"{write(ys[-1], unit)} {line.name}".strip(),
            fmt=line.style,
            color=line.colour,
            capsize=3,
            clip_on=False,
            zorder=above,
        )
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel(x)
    _scale(axes, unit)
    axes.legend(**_BESIDE)


def draw_bars(axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str], compared: tuple[str, float] | None) -> None:
    """Draw stacked bars of seconds, group by group, and a legend of their parts.

    Args:
        axes: where to draw.
        bars: the bars. The share of the first part stands above each.
        colours: the parts by their names.
        compared: the name and the height of a dashed line across all bars, if there is one.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    places = [number + 0.6 * groups.index(bar.group) for number, bar in enumerate(bars)]
    tops = np.zeros(len(bars))
    for number, (name, colour) in enumerate(colours.items()):
        heights = [bar.parts[number] for bar in bars]
        drawn = axes.bar(places, heights, 0.8, tops, color=colour, label=name)
        tops += heights
    shares = [f"{100 * bar.parts[0] / top:.0f}%" if top else "" for bar, top in zip(bars, tops, strict=True)]
    if len(bars) <= _MANY:
        axes.bar_label(drawn, shares, padding=2, fontweight="bold", fontsize=7)
    if compared is not None:
        axes.axhline(compared[1], color=_DIM, linestyle="--", label=f"{write(compared[1], 's')} {compared[0]}")
    every = math.ceil(len(bars) / 24)
    axes.set_xticks(places[::every], [bar.label for bar in bars[::every]])
    if len(groups) > 1:
        middles = [np.mean([place for place, bar in zip(places, bars, strict=True) if bar.group == g]) for g in groups]
        below = axes.secondary_xaxis("bottom")
        below.set_xticks(middles, [group.replace("=", "=\n") for group in groups], color=_INK)
        below.tick_params(pad=16)
        below.spines[:].set_visible(False)
    axes.set_xlim(-0.6, max(places[-1] + 0.6, 3.4))
    _scale(axes, "s")
    axes.legend(reverse=True, **_BESIDE)


def svg(chart: Chart) -> str:
    """A chart as an `<svg>` element."""
    text = StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        chart.draw(figure.subplots())
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(charts: Sequence[Chart], path: Path) -> None:
    """Draw charts, two in a row, into a new PNG file."""
    columns = 2 if len(charts) > 1 else 1
    rows = math.ceil(len(charts) / columns)
    with rc_context(_STYLE):
        figure = Figure(figsize=(columns * (_WIDTH + 0.3), rows * (_HEIGHT + 0.7)), layout="constrained")
        for chart, part in zip(charts, figure.subfigures(rows, columns, squeeze=False).flat, strict=False):
            part.text(0.02, 0.97, chart.title, va="top", fontsize=10, fontweight="bold")
            part.suptitle("\n\n" + fill(chart.caption, 85), x=0.02, ha="left", fontsize=7, color=_DIM)
            chart.draw(part.subplots())
        figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.2)


def _scale(axes: Axes, unit: Unit) -> None:
    """Let the y axis start at 0, and for a rate end at 100 %. Write its ticks in a unit."""
    axes.set_ylim(bottom=0)
    if unit == "%":
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_ylim(0, 1)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value, unit)))

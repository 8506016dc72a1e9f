"""Charts by matplotlib: lines over numbers and stacked bars, as SVG for a page or several charts in one PNG.

Rates have a fixed axis from 0 to 100 %. A legend beside the axes has the names in the colours of the lines and bars.
The colours are those of Okabe and Ito, darkened until they can be read as text. pyplot is not used: it has global state
and opens windows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from pathlib import Path
from textwrap import fill, shorten
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator
from matplotlib.transforms import Bbox

from lightning_stocache.insight.runs import Points, Unit, write

__all__ = ["COLOURS", "Bar", "Chart", "Line", "draw_bars", "draw_lines", "save", "svg"]

COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")
"""Blue, vermilion, green, purple, brown, sky blue, grey and violet: of runs, in their order."""

_DIM, _INK, _RULE = "#667085", "#1b2330", "#e4e7ec"
_MANY = 8  # bars: more than this have no share above each
_WIDTH, _HEIGHT = 4.6, 2.4  # of a chart, in inches
_BESIDE: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1, 0.5)}  # of a legend: to the right of the axes
_STYLE: dict[Any, Any] = {
    **{f"axes.spines.{side}": False for side in ("top", "right", "left", "bottom")},
    **{"font.size": 8, "text.color": _INK, "text.parse_math": False, "svg.fonttype": "none"},
    **{"axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True, "axes.xmargin": 0.03, "grid.color": _RULE},
    **{"axes.labelcolor": _DIM, "xtick.color": _DIM, "ytick.color": _DIM, "svg.hashsalt": "stocache"},
    **{"xtick.major.size": 0, "ytick.major.size": 0, "lines.markersize": 4.5, "lines.markeredgecolor": "white"},
    **{"legend.frameon": False, "legend.labelcolor": "linecolor", "legend.handlelength": 1.8},
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


def draw_lines(axes: Axes, lines: Sequence[Line], unit: Unit, x: str = "epoch") -> None:
    """Draw the lines that have points, and a legend with the last value of each, the highest at the top."""
    by_height = sorted((line for line in lines if line.points), key=lambda line: -line.points[-1][1])
    for line in by_height:
        xs, ys = zip(*line.points, strict=True)
        name = f"{write(ys[-1], unit)} {line.name}".strip()
        style: dict[str, Any] = {"fmt": line.style, "color": line.colour, "capsize": 3, "clip_on": False}
        above = 3 - lines.index(line) / 100  # the first line lies above the others
        axes.errorbar(xs, ys, line.errors, label=name, zorder=above, **style)
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel(x)
    _scale(axes, unit)
    axes.legend(**_BESIDE)


def draw_bars(axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str], unit: Unit, x: str = "epoch") -> None:
    """Draw stacked bars, group by group, and a legend of their parts.

    Above each bar stands the share of its first part. With many bars only the last bar of each group has its
    share, below the name of the group.
    """
    groups = list(dict.fromkeys(bar.group for bar in bars))
    places = [number + 0.6 * groups.index(bar.group) for number, bar in enumerate(bars)]
    tops = np.zeros(len(bars))
    for number, (name, colour) in enumerate(colours.items()):
        heights = [bar.parts[number] for bar in bars]
        drawn = axes.bar(places, heights, 0.8, tops, color=colour, label=name)
        tops += heights
    shares = [f"{100 * bar.parts[0] / top:.0f} %" if top else "" for bar, top in zip(bars, tops, strict=True)]
    titles, middles = [], []
    for group in groups:
        members = [number for number, bar in enumerate(bars) if bar.group == group]
        titles.append(group if len(bars) <= _MANY else f"{group}\n{shares[members[-1]]}")
        middles.append((places[members[0]] + places[members[-1]]) / 2)
    above = axes.secondary_xaxis("top")
    above.set_xticks(middles, titles, color=_INK)
    above.tick_params(pad=12)  # above the shares
    above.spines[:].set_visible(False)
    if len(bars) <= _MANY:
        axes.bar_label(drawn, shares, padding=2, fontweight="bold", fontsize=7)
    every = math.ceil(len(bars) / 24)
    axes.set_xticks(places[::every], [bar.label for bar in bars[::every]])
    axes.set(xlabel=x, xlim=(-0.6, max(places[-1] + 0.6, 3.4)))
    _scale(axes, unit)
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


def save(charts: Sequence[Chart], table: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw a table (cells by column), and charts below it, two in a row, into a new PNG file."""
    columns = 2 if len(charts) > 1 else 1
    rows, lines = math.ceil(max(len(charts), 1) / columns), len(next(iter(table.values())))
    heights = [0.6 + 0.25 * lines, rows * (_HEIGHT + 0.7)]
    with rc_context(_STYLE):
        figure = Figure(figsize=(2 * _WIDTH + 0.6, sum(heights)), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=heights)
        _draw_table(halves[0].subplots(), table)
        parts = halves[1].subfigures(rows, columns, squeeze=False, wspace=0.03, hspace=0.03)
        for chart, part in zip(charts, parts.flat, strict=False):
            part.text(0.02, 0.97, chart.title, va="top", fontsize=10, fontweight="bold")
            part.suptitle("\n\n" + fill(chart.caption, 85), x=0.02, ha="left", fontsize=7, color=_DIM)
            chart.draw(part.subplots())
        figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.2)


def _scale(axes: Axes, unit: Unit) -> None:
    """Let the y axis start at 0, and for a rate end at 100 %. Write its ticks in a unit; bytes step by a power of 2."""
    axes.set_ylim(bottom=0)
    if unit == "%":
        axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
        axes.set_ylim(0, 1)
    elif unit == "bytes":
        exponent = math.floor(math.log2(max(axes.get_ylim()[1], 4)))
        axes.yaxis.set_major_locator(MultipleLocator(2 ** (exponent - 2)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(value, unit)))


def _draw_table(axes: Axes, columns: Mapping[str, Sequence[str]]) -> None:
    cells = [[shorten(cell, 40, placeholder="...") for cell in row] for row in zip(*columns.values(), strict=True)]
    head = [fill(name, 9) for name in columns]
    widths = [max(map(len, "\n".join(column).split("\n"))) for column in zip(head, *cells, strict=True)]
    axes.set_axis_off()
    drawn = axes.table(
        cells, None, "right", widths, colLabels=head, colLoc="right", bbox=Bbox.unit(), edges="horizontal"
    )
    drawn.auto_set_font_size(False)
    for (row, column), cell in drawn.get_celld().items():
        cell.set(edgecolor=_RULE, fontsize=7, height=1 if row else 2)
        if row and not column and "run" in columns:
            cell.get_text().set(color=COLOURS[(row - 1) % len(COLOURS)], fontweight="bold")

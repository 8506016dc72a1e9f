"""Charts by matplotlib: lines over numbers and stacked bars, as SVG for a page or several in one PNG.

Rates have a fixed axis from 0 to 100 %. Names stand at the ends of the lines and beside the last bar, in their colours:
those of Okabe and Ito, darkened until they can be read as text. pyplot is not used: no window, no global state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from io import StringIO
from itertools import accumulate
from pathlib import Path
from textwrap import fill, shorten
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from matplotlib.transforms import Bbox

from lightning_stocache.insight.runs import Points, Unit, write

__all__ = ["COLOURS", "Bar", "Chart", "Line", "draw_bars", "draw_lines", "save", "svg"]

COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")
"""Blue, vermilion, green, purple, brown, sky blue, grey and violet: of runs, in their order."""

_DIM, _INK, _RULE = "#667085", "#1b2330", "#e4e7ec"
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


class Chart(NamedTuple):
    """A drawing, with what stands above it."""

    title: str
    caption: str
    draw: Callable[[Axes], bool]  # false if there is nothing to draw
    nothing: str = ""  # what to say then


class Line(NamedTuple):
    """A line, with its name at its end."""

    name: str
    points: Points
    colour: str
    style: str = "o-"
    ranges: Sequence[tuple[float, float]] = ()  # from where to where the error bar of each point reaches


class Bar(NamedTuple):
    """A stacked bar, which belongs to a group of bars."""

    group: str
    label: str
    parts: Sequence[float]


def draw_lines(axes: Axes, lines: Sequence[Line], unit: Unit, x: str = "epoch") -> bool:
    """Draw lines with the last value and the name at the end of each; false if no line has a point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return False
    end = _scale(axes, max(y for line in lines for _, y in (*line.points, *line.ranges)), unit)
    names = []
    for line in lines[::-1]:  # the first ones lie above
        xs, ys = [x for x, _ in line.points], [min(max(y, 0.0), end) for _, y in line.points]
        errors = [(y - low, high - y) for y, (low, high) in zip(ys, line.ranges, strict=False)]
        axes.errorbar(
            xs,
            ys,
            np.transpose(errors) if errors else None,
            fmt=line.style,
            color=line.colour,
            capsize=3,
            clip_on=False,
        )
        names.append((ys[-1] / end, f"{write(line.points[-1][1], unit)} {line.name}", line.colour))
    axes.xaxis.set_major_locator(MaxNLocator(8, integer=True, min_n_ticks=1))
    axes.set_xlabel(x)
    _name(axes, names[::-1])
    return True


def draw_bars(axes: Axes, bars: Sequence[Bar], colours: Mapping[str, str], unit: Unit, x: str = "epoch") -> bool:
    """Draw stacked bars, group by group, with the names of the parts beside the last one; false if there is no bar.

    Above each bar stands the share of its first part; of many bars that of each group's last one, beside its name.
    """
    if not bars:
        return False
    groups = list(dict.fromkeys(bar.group for bar in bars))
    places = [number + 0.6 * groups.index(bar.group) for number, bar in enumerate(bars)]
    tops = [sum(bar.parts) for bar in bars]
    end = _scale(axes, max(tops), unit)
    for number, colour in enumerate(colours.values()):
        bottoms = [sum(bar.parts[:number]) for bar in bars]
        axes.bar(places, [bar.parts[number] for bar in bars], 0.8, bottoms, color=colour)
    shares = [f"{100 * bar.parts[0] / top:.0f} %" if top else "" for bar, top in zip(bars, tops, strict=True)]
    for group in groups:
        members = [number for number, bar in enumerate(bars) if bar.group == group]
        name = group if len(bars) <= _FEW else f"{group}\n{shares[members[-1]]}"
        middle = (places[members[0]] + places[members[-1]]) / 2
        _write(axes, name, (middle, 1), (0, 12), xycoords=axes.get_xaxis_transform(), ha="center")
    for share, place, top in zip(shares, places, tops, strict=True) if len(bars) <= _FEW else ():
        _write(axes, share, (place, top), (0, 2), ha="center", fontweight="bold")
    every = math.ceil(len(bars) / 24)
    axes.set_xticks(places[::every], [bar.label for bar in bars[::every]])
    axes.set(xlabel=x, xlim=(-0.6, max(places[-1] + 0.6, 3.4)))
    last = bars[-1].parts
    middles = [(top - part / 2) / end for top, part in zip(accumulate(last), last, strict=True)]
    _name(axes, list(zip(middles, colours, colours.values(), strict=True)))
    return True


def svg(chart: Chart) -> str:
    """A chart as an `<svg>` element."""
    text = StringIO()
    with rc_context(_STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
        _draw(chart, figure.subplots())
        metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(text, format="svg", transparent=True, metadata=metadata)
    return text.getvalue()[text.getvalue().index("<svg") :]


def save(charts: Sequence[Chart], table: Mapping[str, Sequence[str]], path: Path) -> None:
    """Draw a table (cells by column), and charts below it, two in a row, into a new PNG file."""
    columns = min(len(charts), 2)
    rows, lines = math.ceil(len(charts) / columns), len(next(iter(table.values())))
    heights = [0.6 + 0.25 * lines, rows * (_HEIGHT + 0.7)]
    with rc_context(_STYLE):
        figure = Figure(figsize=(2 * _WIDTH + 0.6, sum(heights)), layout="constrained")
        halves: Any = figure.subfigures(2, 1, height_ratios=heights)
        _draw_table(halves[0].subplots(), table)
        parts = halves[1].subfigures(rows, columns, squeeze=False, wspace=0.03, hspace=0.03)
        for chart, part in zip(charts, parts.flat, strict=False):
            part.text(0.02, 0.97, chart.title, va="top", fontsize=10, fontweight="bold")
            part.suptitle("\n\n" + fill(chart.caption, 85), x=0.02, ha="left", fontsize=7, color=_DIM)
            _draw(chart, part.subplots())
        figure.savefig(path, format="png", dpi=150, bbox_inches="tight", pad_inches=0.2)


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
    """Write names (height, words, colour) to the right of the axes, at their heights or as far below as it needs."""
    last = 2.0
    for number, (height, words, colour) in enumerate(sorted(names, key=lambda name: -name[0])):
        below = len(names) - 1 - number
        last = max(min(height, last - _GAP, 1.0), _GAP * below)
        _write(axes, words, (1, last), (6, 0), xycoords="axes fraction", va="center", color=colour, weight="bold")


def _write(axes: Axes, words: str, place: tuple[float, float], beside: tuple[float, float], **how: Any) -> None:
    axes.annotate(words.strip(), place, beside, textcoords="offset points", annotation_clip=False, **how)


def _draw(chart: Chart, axes: Axes) -> None:
    if not chart.draw(axes):
        axes.set_axis_off()
        axes.text(0.5, 0.5, f"Nothing to draw:\n{chart.nothing}", color=_DIM, ha="center", va="center")


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

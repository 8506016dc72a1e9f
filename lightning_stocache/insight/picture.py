"""Panels as a PNG, with matplotlib: for a README, a paper or a chat, where a page cannot go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from lightning_stocache.insight.canvas import COLOURS, DIM, RULE, canvas
from lightning_stocache.insight.chart import scale, spread
from lightning_stocache.insight.panels import MOST_DRAWN, Lines, Meters, Panel, Stacks, Unit, panels, write
from lightning_stocache.insight.runs import Run, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["save"]

_PARTS = ("#0072b2", "#e08a00")
_MARKS = "osD^"
_PANEL_POINTS = 210  # width of a panel on the figure that is saved
_STYLES = {"solid": ("-", 2.2), "dashed": ("--", 1.4), "dotted": (":", 1.8), "thin": ("-", 1.0)}


def save(runs: Sequence[Run], path: Path) -> None:
    """Draw the panels of these runs into a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: The file cannot be written.
    """
    with canvas(path, 12, 10.5, gap=0.18) as figure:
        for axes, panel in zip(figure.subplots(3, 2).flat, panels(runs), strict=True):
            axes.set_title(
                panel.title, loc="left", fontweight="bold", fontsize=11, pad=30 if isinstance(panel, Stacks) else 14
            )
            axes.tick_params(length=0, colors=DIM)
            axes.spines[:].set_visible(False)
            _draw(axes, panel)
        if labels(runs[:MOST_DRAWN])[0] == "run 1":  # what the page's table says beside its charts
            names = [f"run {number}: {run.name}" for number, run in enumerate(runs[:MOST_DRAWN], 1)]
            figure.supxlabel("\n".join(shorten(name, 150) for name in names), x=0.02, ha="left", fontsize=8)


def _draw(axes: Axes, panel: Panel) -> None:
    if panel.empty:
        axes.set_axis_off()
        axes.text(0.5, 0.5, panel.empty, transform=axes.transAxes, ha="center", color=DIM)
    elif isinstance(panel, Lines):
        _lines(axes, panel)
    elif isinstance(panel, Stacks):
        _stacks(axes, panel)
    else:
        _meters(axes, panel)


def _ticks(axes: Axes, top: float, unit: Unit) -> float:
    ticks = scale(top, unit)
    axes.set_yticks(ticks, [write(tick, unit) for tick in ticks])
    axes.set_ylim(0, ticks[-1] * 1.04)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    return ticks[-1]


def _lines(axes: Axes, panel: Lines) -> None:
    top = _ticks(axes, max(y for one in panel.series for _, y in one.points), panel.unit)
    for one in sorted(panel.series, key=lambda one: one.style == "solid"):  # values above their ceilings
        line, width = _STYLES[one.style]
        few = len(one.points) <= 20
        mark = _MARKS[one.colour % len(_MARKS)] if few and (one.style == "solid" or len(one.points) == 1) else ""
        xs, ys = zip(*one.points, strict=True)
        colour = COLOURS[one.colour % len(COLOURS)]
        axes.plot(xs, ys, line, marker=mark, linewidth=width, markersize=4, color=colour, clip_on=False)
    named = [one for one in panel.series if one.label or one.style == "solid"]
    depths = spread([-min(one.points[-1][1], top) for one in named], 0.075 * top, -top, 0)
    for one, depth in zip(named, depths, strict=True):
        told = f"{write(one.points[-1][1], panel.unit)} {one.label}".strip()
        place = axes.get_yaxis_transform()
        colour = COLOURS[one.colour % len(COLOURS)]
        axes.text(1.01, -depth, told, transform=place, va="center", color=colour, fontweight="bold")
    axes.set_xlabel(panel.x, color=DIM)
    axes.locator_params(axis="x", integer=True)


def _stacks(axes: Axes, panel: Stacks) -> None:
    from matplotlib.patches import Patch

    top = _ticks(axes, max(low + high for stack in panel.stacks for _, low, high in stack.bars), panel.unit)
    left, places, labels = 0.0, [], []
    most = max(24 // len(panel.stacks), 1)
    letters = sum(len(stack.label) + 2 for stack in panel.stacks)
    size = min(_PANEL_POINTS / (0.6 * letters), 10.0)  # names stand side by side
    for stack in panel.stacks:
        every = -(-len(stack.bars) // most)
        for index, (epoch, low, high) in enumerate(stack.bars):
            axes.bar(left + index, low, width=0.8, color=_PARTS[0])
            axes.bar(left + index, high, width=0.8, bottom=low, color=_PARTS[1])
            last = index == len(stack.bars) - 1
            if low + high > 0 and (last or (len(panel.stacks) == 1 and every == 1)):
                share = (low, high)[panel.told] / (low + high)
                axes.text(left + index, low + high, f"{100 * share:.0f} %", ha="center", va="bottom", fontsize=8)
            if (len(stack.bars) - 1 - index) % every == 0:
                places.append(left + index)
                labels.append(f"{epoch:,.0f}")
        axes.text(left + (len(stack.bars) - 1) / 2, 1.06 * top, stack.label, ha="center", va="bottom", fontsize=size)
        left += len(stack.bars) + 1
    axes.set_xticks(places, labels)
    axes.set_xlabel("epoch", color=DIM)
    keys = [Patch(color=colour, label=part) for part, colour in zip(panel.parts, _PARTS, strict=True)]
    axes.legend(handles=keys, loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, handlelength=0.8)


def _meters(axes: Axes, panel: Meters) -> None:
    axes.set_yticks([])
    axes.set_xticks([])
    most = max([max(row.used, row.granted) for row in panel.rows] + [1.0])
    for index, row in enumerate(panel.rows):
        axes.barh(-index, row.granted, height=0.4, color=RULE)
        axes.barh(-index, row.used, height=0.4, color=COLOURS[row.colour % len(COLOURS)])
        told = write(row.used, "bytes") + (f" of {write(row.granted, 'bytes')}" if row.granted else "")
        axes.text(0, 0.25 - index, row.label, va="bottom")
        axes.text(most, 0.25 - index, told, va="bottom", ha="right", fontweight="bold")
    axes.set_xlim(0, most)
    axes.set_ylim(-max(len(panel.rows), 4) + 0.4, 0.75)

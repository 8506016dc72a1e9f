"""Panels as a PNG, with matplotlib: for a README, a paper or a chat, where a page cannot go.

The drawings are those of the page: `chart` makes SVG, whose elements are drawn here in the page's light colours. No
pyplot, so no window, no global state and no display is needed. A name with a dollar sign is not a formula. matplotlib
is an extra, imported only when a picture is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lightning_stocache.insight.chart import HEIGHT, WIDTH, draw
from lightning_stocache.insight.panels import Panel, Stacks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["COLOURS", "check_matplotlib", "save"]

_UNITS = 100  # to an inch: a letter of 13 units has 9.4 points
_MARGIN, _HEAD, _FOOT = 24.0, 58.0, 18.0  # units beside each drawing, above it (title and caption), and per footnote
_INK, _PAPER = "#1b2330", "#ffffff"
# By class. After Okabe and Ito, which the colour-blind tell apart, darkened until they can be read as text.
COLOURS = {"good": "#0072b2", "bad": "#e08a00", "dim": "#667085", "grid": "#e4e7ec", "track": "#e4e7ec"}
COLOURS |= {"c0": "#0072b2", "c1": "#c2500a", "c2": "#00795c", "c3": "#a34677"}
COLOURS |= {"c4": "#8a6a00", "c5": "#2c86c7", "c6": "#59616e", "c7": "#7a4fc9"}
_LINES: dict[str, dict[str, Any]] = {
    "grid": {"linewidth": 0.7},
    "solid": {"linewidth": 1.9},
    "dashed": {"linewidth": 1.3, "linestyle": "--"},
    "dotted": {"linewidth": 1.6, "linestyle": ":"},
    "thin": {"linewidth": 1.0, "alpha": 0.75},
}


def check_matplotlib() -> None:
    """Find out, before a picture is due, whether it can be drawn.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
    """
    try:
        import matplotlib.figure  # noqa: F401
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a PNG needs matplotlib, which is not installed: pip install "lightning-stocache[report]"'
        ) from error


def save(panels: Sequence[Panel], path: Path, *, columns: int = 2, footnotes: Sequence[str] = ()) -> None:
    """Draw panels into a PNG file.

    Args:
        panels: in reading order.
        path: the file, written anew.
        columns: panels in a row.
        footnotes: one line each, below all panels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: the file cannot be written.
    """
    check_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure

    cell_width, cell_height = WIDTH + 2 * _MARGIN, HEIGHT + _HEAD + _MARGIN
    width, height = columns * cell_width, -(-len(panels) // columns) * cell_height + _FOOT * len(footnotes) + _MARGIN
    style: Any = {"font.family": "sans-serif", "text.parse_math": False, "text.color": _INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width / _UNITS, height / _UNITS), facecolor=_PAPER)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        for number, panel in enumerate(panels):
            row, column = divmod(number, columns)
            _panel(axes, panel, column * cell_width + _MARGIN, row * cell_height + _MARGIN)
        for number, note in enumerate(footnotes):
            y = height - _MARGIN - _FOOT * (len(footnotes) - 1 - number)
            axes.text(_MARGIN, y, shorten(note, 150), color=COLOURS["dim"], fontsize=8.6)
        figure.savefig(path, format="png", dpi=1.25 * _UNITS)


def _panel(axes: Axes, panel: Panel, left: float, top: float) -> None:
    dim = COLOURS["dim"]
    axes.text(left, top + 8, panel.title, fontsize=11.5, fontweight="bold", va="center")
    axes.text(left, top + 20, fill(panel.caption, 95), fontsize=8, color=dim, va="top", linespacing=1.3)
    if panel.empty:
        axes.text(left + WIDTH / 2, top + _HEAD + HEIGHT / 2, panel.empty, fontsize=8.6, color=dim, ha="center")
        return
    if isinstance(panel, Stacks):
        for part, kind, x in zip(panel.parts, ("good", "bad"), (WIDTH - 230, WIDTH - 130), strict=True):
            axes.text(left + x, top + 8, "\u25a0", fontsize=11.5, color=COLOURS[kind], va="center")
            axes.text(left + x + 17, top + 8, part, fontsize=8.6, va="center")
    for element in ElementTree.fromstring(draw(panel)):
        _draw(axes, element, left, top + _HEAD)


def _draw(axes: Axes, element: ElementTree.Element, left: float, top: float) -> None:
    """One element of a drawing whose corner is at this place."""
    from matplotlib.patches import Polygon, Rectangle

    kinds = element.get("class", "").split()
    colour = next((COLOURS[kind] for kind in kinds if kind in COLOURS), _INK)
    x, y, width, height = (float(element.get(name, 0)) for name in ("x", "y", "width", "height"))
    if element.tag == "text":
        anchor: Any = {"start": "left", "middle": "center", "end": "right"}[element.get("text-anchor", "start")]
        size, bold = 8.6 if {"dim", "share"} & {*kinds} else 9.2, len(element) or {"strong", "share"} & {*kinds}
        style: Any = {"color": colour, "ha": anchor, "fontsize": size, "fontweight": "bold" if bold else "normal"}
        axes.text(left + x, top + y, "".join(element.itertext()).strip(), **style)
    elif element.tag == "rect":
        axes.add_patch(Rectangle((left + x, top + y), width, height, facecolor=colour, edgecolor="none", zorder=2))
    elif "mark" in kinds:
        x, y = map(float, re.findall(r"[-\d.]+", element.get("transform", "")))
        form = "osD^"[int(kinds[-1][1:]) % 4]  # as in `chart`, by the colour's number
        axes.plot(left + x, top + y, form, color=colour, markersize=6, markeredgecolor=_PAPER, zorder=3)
    else:
        pairs = [pair.split() for pair in element.get("d", "")[1:].split("L")]
        points = [(left + float(x), top + float(y)) for x, y in pairs]
        if "band" in kinds:
            axes.add_patch(Polygon(points, facecolor=colour, edgecolor="none", alpha=0.2))
        else:
            axes.plot(
                *zip(*points, strict=True), color=colour, **next(_LINES[kind] for kind in kinds if kind in _LINES)
            )

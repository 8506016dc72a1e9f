"""Panels as SVG, by hand: no dependency, no script, and it takes its colours from the page around it.

Every drawing is 560 x 270 units and scales with the page. What it shows of others' text goes through `_text`, which
escapes; everything else that is written into the SVG is a number or a constant. Classes: `c0` to `c7` set a colour,
`good` and `bad` are the lower and the upper part of a bar; what they look like is said by the page's style sheet, and
by `picture`, which draws the same elements with matplotlib: `text`, `rect`, and `path` of straight lines (`M`, `L`) or
with a mark's form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import TypeVar

from lightning_stocache.insight.panels import (
    MOST_DRAWN,
    Bars,
    Lines,
    Meters,
    Panel,
    Point,
    Series,
    Stack,
    Stacks,
    Unit,
    write,
)

__all__ = ["HEIGHT", "WIDTH", "draw", "scale", "spread"]

_Item = TypeVar("_Item")

WIDTH, HEIGHT = 560.0, 270.0
_LEFT, _TOP, _BOTTOM = 58.0, 32.0, 232.0
_MARKS = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z",
    "M-3.6-3.6h7.2v7.2h-7.2z",
    "M0-5L5 0L0 5L-5 0z",
    "M0-4.8L4.6 3.6H-4.6z",
)


def draw(panel: Panel) -> str:
    """A panel that is not empty, as an `<svg>` element."""
    if isinstance(panel, Lines):
        parts = _lines(panel)
    elif isinstance(panel, Stacks):
        parts = _stacks(panel)
    elif isinstance(panel, Bars):
        parts = _columns(panel)
    else:
        parts = _meters(panel)
    size = f'viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}"'
    return f'<svg {size} role="img" aria-label="{escape(panel.title)}">{"".join(parts)}</svg>'


def scale(top: float, unit: Unit) -> list[float]:
    """The ticks of an axis from 0 that reaches `top`; the last is its end. Of a rate always 0 to 100 %.

    Example:
        >>> scale(0.3, "%"), scale(17, "s"), [tick / 2**20 for tick in scale(46.9 * 2**20, "bytes")]
        ([0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 5.0, 10.0, 15.0, 20.0], [0.0, 20.0, 40.0, 60.0])
    """
    if unit == "%":
        return [0.0, 0.25, 0.5, 0.75, 1.0]
    if not top > 0:
        return [0.0, 1.0]
    power = min(int(math.log(top, 1024)), 4) if unit == "bytes" and top >= 1 else 0
    whole = top / 1024**power
    magnitude = 10.0 ** math.floor(math.log10(whole / 4))
    step = next(factor * magnitude for factor in (1, 2, 2.5, 5, 10) if whole <= 4.4 * factor * magnitude)
    return [count * step * 1024**power for count in range(math.ceil(whole / step * (1 - 1e-9)) + 1)]


def spread(places: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Move labels apart until they are `gap` from each other, between low and high as far as that goes.

    Example:
        >>> spread([50, 52, 10], 14, 0, 100)
        [50, 64, 10]
    """
    order = sorted(range(len(places)), key=lambda index: places[index])
    moved, last = list(places), low - gap
    for index in order:
        last = moved[index] = max(moved[index], last + gap)
    last = high + gap
    for index in reversed(order):
        last = moved[index] = min(moved[index], last - gap)
    return moved


def _text(x: float, y: float, text: str, classes: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{classes}" text-anchor="{anchor}">{escape(text)}</text>'


def _height(value: float, top: float) -> float:
    return _BOTTOM - (_BOTTOM - _TOP) * min(max(value / top, 0.0), 1.0)


def _grid(ticks: Sequence[float], unit: Unit, right: float) -> Iterator[str]:
    for tick in ticks:
        y = _height(tick, ticks[-1])
        yield f'<path class="grid" d="M{_LEFT:.1f} {y:.1f}L{right:.1f} {y:.1f}"/>'
        yield _text(_LEFT - 8, y + 4, write(tick, unit), "dim", "end")


def _lines(panel: Lines) -> Iterator[str]:
    labelled = [series for series in panel.series if series.label or series.style == "solid"]
    letters = max(len(write(series.points[-1][1], panel.unit) + series.label) for series in labelled)
    right = WIDTH - min(22 + 7.8 * letters, 210)
    ticks = scale(max(y for series in panel.series for _, y in series.points), panel.unit)
    xs = [x for series in panel.series for x, _ in series.points]
    first, last = min([0.0, *xs]) if panel.x == "step" else min(xs), max(xs)

    def place(point: Point) -> Point:
        part = (point[0] - first) / (last - first) if last > first else 0.5
        return _LEFT + 10 + part * (right - _LEFT - 20), _height(point[1], ticks[-1])

    yield from _grid(ticks, panel.unit, right)
    for number in _thinned(sorted({first, *xs}), 9 if panel.x == "epoch" or panel.names else 5):
        words = write(number, panel.x_unit) if panel.x_unit else f"{number:,.0f}"
        words = panel.names[int(number)] if panel.names else words
        yield _text(place((number, 0))[0], _BOTTOM + 18, words, "dim", "middle")
    yield _text((_LEFT + right) / 2, _BOTTOM + 35, panel.x, "dim", "middle")
    for row, (number, words) in enumerate(panel.notes):
        x, anchor = place((number, 0))[0], "end" if number > (first + last) / 2 else "start"
        yield f'<path class="line thin c6" d="M{x:.1f} {_TOP:.1f}L{x:.1f} {_BOTTOM:.1f}"/>'
        yield _text(x, _TOP - 4 - 15 * row, words, "dim", anchor)
    for series in sorted(panel.series, key=lambda series: series.style == "solid"):  # values above their ceilings
        yield from _line(series, [place(point) for point in series.points], panel.unit)
    heights = spread([place(series.points[-1])[1] for series in labelled], 15, _TOP - 8, _BOTTOM)
    for series, y in zip(labelled, heights, strict=True):
        value = f'<tspan class="strong">{escape(write(series.points[-1][1], panel.unit))}</tspan>'
        classes = f"ink c{series.colour % MOST_DRAWN}"
        yield f'<text x="{right + 4:.1f}" y="{y + 4:.1f}" class="{classes}">{value} {escape(series.label)}</text>'


def _line(series: Series, places: Sequence[Point], unit: Unit) -> Iterator[str]:
    colour = f"c{series.colour % MOST_DRAWN}"
    if series.style == "error":
        for (x, low), (_, high) in zip(places[::2], places[1::2], strict=True):
            ends = (x - 5, low), (x + 5, low), (x, low), (x, high), (x - 5, high), (x + 5, high)
            yield f'<path class="line thin {colour}" d="M{"L".join(f"{at:.1f} {y:.1f}" for at, y in ends)}"/>'
        return
    shown = _thinned(list(zip(places, series.points, strict=True)), 400)
    path = "L".join(f"{x:.1f} {y:.1f}" for (x, y), _ in shown)
    if len(shown) == 1 and series.style != "solid":  # a ceiling of one epoch is seen as a short line
        (x, y), _ = shown[0]
        path = f"{x - 14:.1f} {y:.1f}L{x + 14:.1f} {y:.1f}"
    yield f'<path class="{"line " * (series.style != "band")}{series.style} {colour}" d="M{path}"/>'
    if series.style == "solid" and len(shown) <= 20:
        mark = _MARKS[series.colour % len(_MARKS)]
        for (x, y), (at, value) in shown:
            tip = escape(f"{series.label} {write(value, unit)} at {at:,.0f}".strip())
            place = f'transform="translate({x:.1f} {y:.1f})"'
            yield f'<path class="mark {colour}" {place} d="{mark}"><title>{tip}</title></path>'


def _stacks(panel: Stacks) -> Iterator[str]:
    right = WIDTH - 8
    ticks = scale(max(low + high for stack in panel.stacks for _, low, high in stack.bars), panel.unit)
    yield from _grid(ticks, panel.unit, right)
    width = (right - _LEFT) / len(panel.stacks)
    for index, stack in enumerate(panel.stacks):
        left = _LEFT + index * width + 6
        if stack.label:
            yield _text(left + (width - 12) / 2, 11, stack.label, "name", "middle")
        yield from _bars(panel, stack, left, width - 12, ticks[-1])
    yield _text((_LEFT + right) / 2, _BOTTOM + 35, "epoch", "dim", "middle")


def _bars(panel: Stacks, stack: Stack, left: float, width: float, top: float) -> Iterator[str]:
    pitch = width / len(stack.bars)
    bar = min(0.8 * pitch, 46)
    shares = [(low, high)[panel.told] / (low + high) if low + high > 0 else 0.0 for _, low, high in stack.bars]
    for index, (_, low, high) in enumerate(stack.bars):
        x = left + (index + 0.5) * pitch
        split, end = _height(low, top), _height(low + high, top)
        for name, kind, upper, lower, value in (
            (panel.parts[0], "good", split, _BOTTOM, low),
            (panel.parts[1], "bad", end, split, high),
        ):
            if lower > upper:
                tip = escape(f"{name} {write(value, panel.unit)}")
                box = f'x="{x - bar / 2:.1f}" y="{upper:.1f}" width="{bar:.1f}" height="{lower - upper:.1f}"'
                yield f'<rect class="{kind}" {box}><title>{tip}</title></rect>'
        if low + high > 0 and (pitch >= 44 or (index == len(stack.bars) - 1 and width >= 30)):
            yield _text(x, end - 5, f"{100 * shares[index]:.0f} %", "share", "middle")
    if not any(low + high for _, low, high in stack.bars):
        yield _text(left + width / 2, _BOTTOM - 8, "none counted", "dim", "middle")
    for index in _thinned(range(len(stack.bars)), max(int(width / 24), 1)):
        yield _text(left + (index + 0.5) * pitch, _BOTTOM + 18, f"{stack.bars[index][0]:,.0f}", "dim", "middle")


def _columns(panel: Bars) -> Iterator[str]:
    """Bars of any number of parts, with what the parts are to their right: the uppermost first."""
    right = WIDTH - 22 - 7.2 * max(map(len, panel.parts))
    ticks = scale(max(sum(bar.parts) for bar in panel.bars), panel.unit)
    yield from _grid(ticks, panel.unit, right)
    pitch = (right - _LEFT) / len(panel.bars)
    width = min(0.7 * pitch, 46)
    for index, bar in enumerate(panel.bars):
        x, end = _LEFT + (index + 0.5) * pitch, 0.0
        for part, colour, value in zip(panel.parts, panel.colours, bar.parts, strict=True):
            upper, lower, end = _height(end + value, ticks[-1]), _height(end, ticks[-1]), end + value
            if lower > upper:
                tip = escape(f"{part} {write(value, panel.unit)}")
                box = f'x="{x - width / 2:.1f}" y="{upper:.1f}" width="{width:.1f}" height="{lower - upper:.1f}"'
                yield f'<rect class="used c{colour % MOST_DRAWN}" {box}><title>{tip}</title></rect>'
        yield _text(x, _height(end, ticks[-1]) - 5, bar.told, "share", "middle")
        if pitch >= 30 or index % 2 == 0:
            yield _text(x, _BOTTOM + 18, bar.label, "dim", "middle")
    yield _text((_LEFT + right) / 2, _BOTTOM + 35, panel.x, "dim", "middle")
    for row, (part, colour) in enumerate(reversed(list(zip(panel.parts, panel.colours, strict=True)))):
        y, kind = _TOP + 22 * row, f"used c{colour % MOST_DRAWN}"
        yield f'<rect class="{kind}" x="{right + 8:.1f}" y="{y:.1f}" width="10" height="10"/>'
        yield _text(right + 22, y + 9, part)


def _meters(panel: Meters) -> Iterator[str]:
    left, right = 8.0, WIDTH - 8
    most = max([max(row.used, row.granted) for row in panel.rows] + [1.0])
    pitch = min(76.0, (HEIGHT - 16) / len(panel.rows))
    thick = min(26.0, pitch - 24)
    for index, row in enumerate(panel.rows):
        y = 14 + index * pitch
        told = write(row.used, "bytes") + (f" of {write(row.granted, 'bytes')}" if row.granted else "")
        yield _text(left, y + 6, row.label, "name")
        yield _text(right, y + 6, told, "strong", "end")
        for kind, value in (("track", row.granted), (f"used c{row.colour % MOST_DRAWN}", row.used)):
            width = (right - left) * value / most
            box = f'x="{left:.1f}" y="{y + 13:.1f}" width="{width:.1f}" height="{thick:.1f}" rx="3"'
            yield f'<rect class="{kind}" {box}/>'


def _thinned(items: Sequence[_Item], most: int) -> list[_Item]:
    """At most so many of the items, evenly spaced, the last among them."""
    every = -(-len(items) // most) or 1
    return [item for index, item in enumerate(items) if (len(items) - 1 - index) % every == 0]

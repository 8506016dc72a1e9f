"""What plan and StepTimer draw, before anybody draws it: panels of plain data.

A panel is plain data of one of four kinds: `Lines` over epochs or steps, `Stacks` of two parts per epoch, `Bars` of
several parts, `Meters` of used against granted. `chart` draws it. Rates have a fixed axis from 0 to 100 %: on an axis
that follows the data, 0.698 and 0.700 look like nothing and everything.

A metric that a run did not log leaves its panel with a sentence in `empty`. Colours are numbers, the same for a run in
all panels; the drawing knows what they look like. Of more than `MOST_DRAWN` runs the first are drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

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

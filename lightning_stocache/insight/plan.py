"""The gain of a budget, before it is paid: the law, the advice, one table in 80 columns, one picture.

The law is linear. Of the n samples of a rank the share h comes from the cache:

    loading = n * ((1 - h) * missed + h * hit)

In epoch one h is 0. Later h is the share of the samples that have a slot on some node. Without a cache a sample takes
`uncached`. The training steps are added if the main process loads. If workers load, or if all samples are hits, an
epoch takes the longer of the two.

The advice follows from the ranges that were measured. A cache gains if it is faster even with the lowest uncached pace
and with its own highest paces. It gains nothing if it is no faster even with the highest uncached pace and with its own
lowest paces. In between `plan` cannot tell, and the advice is `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from lightning_stocache.insight.inventory import wrapped
from lightning_stocache.insight.measurement import Arm, Curves, Data, Kind, Paces, Spread
from lightning_stocache.node.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["Plan", "Row", "aligned", "as_text", "curves_as_text", "plan", "save"]

Points = Sequence[tuple[int, Spread]]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOTHING = 0.02  # of an epoch's time: less is no gain
_HEAD = ("budget", "per node", "hit rate", "epoch one", "later", "faster", "pays in")
_SOURCES: dict[Kind, str] = {"uncached": "source", "hit": "cache"}  # of the batches of a curve


class Row(NamedTuple):
    """The effect of one budget. Seconds are those of training, or of the loader alone if there is no model."""

    budget: str  # as in a config
    budget_bytes: int  # per node
    safe: bool  # this node has room for it
    hit_rate: float  # of later epochs
    first_epoch: Spread  # seconds
    later_epoch: Spread  # seconds
    faster: Spread  # the time of an uncached epoch over the time of a later epoch
    pays_in: int | None  # the first epoch, from 1, that ends ahead of uncached training; None: never, or unknown


@dataclass(frozen=True)
class Plan:
    """The table, the measurements behind it, and the advice."""

    data: Data
    paces: Paces
    step: Spread | None  # seconds a batch, if there is a model
    rows: tuple[Row, ...]  # by rising budget, uncached first
    budget: str  # the advice: the value for `cache.budget` in the config
    sentences: tuple[str, ...]  # the reasons for the advice


def plan(data: Data, paces: Paces, step: Spread | None = None) -> Plan:
    """Make the table over shares of the dataset; the largest safe budget and the advised budget are among them.

    Args:
        data: the training data, and the ranks that load it.
        paces: the measurements of its loader.
        step: seconds of a training step, if there is a model.
    """
    law = _Law(data, paces, step)
    safe = min(paces.safe_bytes / law.dataset_bytes, 1.0) if law.dataset_bytes else 0.0
    share, sentences = _advice(law, safe, step is not None)
    percent = math.ceil(round(100 * share, 3))
    budget = "0" if percent == 0 else "auto" if share == safe else f"{percent}%"
    shares = {*_SHARES, safe, *([] if share == safe else [percent / 100])} if law.dataset_bytes else {0.0}
    return Plan(data, paces, step, tuple(map(law.row, sorted(shares))), budget, tuple(sentences))


class _Law:
    """Seconds of an epoch by the share of the dataset that a node caches; arrays are lowest, median, highest."""

    def __init__(self, data: Data, paces: Paces, step: Spread | None) -> None:
        self.data, self.paces = data, paces
        spreads = (paces.uncached, paces.missed, paces.hit, step or Spread(0.0, 0.0, 0.0))
        self.uncached, self.missed, self.hit, self.step = (np.array(spread[:3]) for spread in spreads)
        self.samples = data.samples / (data.nodes * data.ranks)  # of one rank in an epoch
        self.batches = math.ceil(self.samples / data.batch_size)
        self.dataset_bytes = 0 if paces.codec is None else data.samples * paces.codec.slot_bytes  # cached whole

    def hit_rate(self, share: float) -> float:
        """The hit rate of later epochs: the slots of the nodes add up."""
        slots = math.floor(round(share * self.data.samples, 6)) / self.data.samples
        return min(self.data.nodes * slots, 1.0)

    def epoch(self, hit_rate: float, loaded: Any, hit: Any, step: Any) -> Any:
        """Seconds of an epoch, from seconds a sample loaded, a sample hit and a step: numbers or arrays."""
        loading = self.samples * ((1 - hit_rate) * loaded + hit_rate * hit)
        steps = self.batches * step
        return loading + steps if hit_rate < 1 and not self.data.num_workers else np.maximum(loading, steps)

    def row(self, share: float) -> Row:
        """The effect of a budget of a share of the dataset."""
        missed, rate = self.missed if share else self.uncached, self.hit_rate(share)
        without = self.epoch(0.0, self.uncached, self.hit, self.step)
        first = self.epoch(0.0, missed, self.hit, self.step)
        later = self.epoch(rate, missed, self.hit, self.step)
        # The least gain is that of the lowest uncached pace over the highest of all others.
        slowest = self.epoch(rate, missed[::-1], self.hit[::-1], self.step[::-1])
        faster = Spread(*(self.epoch(0.0, self.uncached, self.hit, self.step[::-1]) / slowest).tolist())
        pays_in = None
        if share and faster.low > 1:
            pays_in = max(math.floor((first[1] - without[1]) / (without[1] - later[1])) + 2, 2)
        percent, budget_bytes = round(100 * share, 7), math.floor(share * self.dataset_bytes)
        budget = f"{percent:.0f}%" if percent == int(percent) else f"{percent:.1f}%"
        safe, epochs = budget_bytes <= self.paces.safe_bytes, (Spread(*first.tolist()), Spread(*later.tolist()))
        return Row(budget, budget_bytes, safe, rate, *epochs, faster, pays_in)

    def enough(self, safe: float) -> float:
        """The smallest share, in whole percents, that is as good as the largest safe one.

        It is calculated from the highest miss, the lowest hit and the lowest step, which give the largest share.
        """
        paces = self.missed[2], self.hit[0], self.step[0]
        goal = self.epoch(self.hit_rate(safe), *paces) * (1 + _NOTHING)
        percents = (percent / 100 for percent in range(1, math.ceil(100 * safe)))
        return next((share for share in percents if self.epoch(self.hit_rate(share), *paces) <= goal), safe)


def _advice(law: _Law, safe: float, has_step: bool) -> tuple[float, list[str]]:
    """The share of the dataset to cache, and why."""
    if law.paces.codec is None:
        return 0.0, [f"Nothing can be cached. {law.paces.reason}"]
    sentences = []
    if safe < 1:
        sentences.append(f"This node has room for {100 * safe:.1f} % of it: see python -m lightning_stocache doctor.")
    faster = law.row(safe).faster
    if faster.high <= 1 + _NOTHING:
        why = "training waits for its steps, not for data" if has_step else "the source is as fast as the cache"
        return 0.0, [*sentences, f"No budget gains anything: {why}."]
    if faster.low <= 1 + _NOTHING:
        why = "repeated measurements differ by more than a cache would gain"
        return safe, [*sentences, f"Cannot tell whether a budget gains anything: {why}."]
    enough = law.enough(safe)
    if enough > 0.95 * safe:  # that near, what is free when the job starts may as well be taken
        return safe, sentences
    why = ": training waits for its steps" if has_step else ""
    return enough, [*sentences, f"Beyond {100 * enough:.0f} % of the dataset nothing is gained{why}."]


def as_text(plan: Plan) -> str:
    """The measurements, the table and the advice. The last line is the budget, as in a config."""
    data, paces = plan.data, plan.paces
    size = f" of {format_bytes(paces.codec.nbytes)}" if paces.codec is not None else ""
    measured = [_pace("uncached", paces.uncached, "sample")]
    if paces.codec is not None:
        measured += [_pace("missed", paces.missed, "sample"), _pace("hit", paces.hit, "sample")]
    if plan.step is not None:
        measured.append(_pace("step", plan.step, "batch"))
    lines = [
        f"{data.samples:,} samples{size}, batches of {data.batch_size}, num_workers={data.num_workers}",
        f"{_number(data.nodes, 'node')} x {_number(data.ranks, 'rank')}, threads={paces.threads}",
        "",
        *aligned([("", "median", "lowest..highest", "deviation", ""), *measured], left=1),
        "",
        *aligned([_HEAD, *map(_cells, plan.rows)], left=1),
    ]
    if not all(row.safe for row in plan.rows):
        lines.append("* more than is safely free on this node")
    parts = "with the step" if plan.step else "of the loader (no model was given)"
    lines += [f"Time of an epoch {parts}; [lowest..highest] measured.", ""]
    lines += [*chain.from_iterable(map(wrapped, plan.sentences)), ""] if plan.sentences else []
    return "\n".join([*lines, f"cache.budget={plan.budget}"])


def curves_as_text(curves: Curves) -> str:
    """A table of all measured loaders, and a sentence on each curve. Ranges that overlap are no difference."""
    kinds = [kind for kind in _SOURCES if any(arm.kind == kind for arm in curves.rates)]
    rows = [["batch_size", "num_workers", *(f"from the {_SOURCES[kind]}" for kind in kinds)]]
    for size, number in dict.fromkeys((arm.batch_size, arm.num_workers) for arm in curves.rates):
        spreads = [curves.rates.get(Arm(kind, size, number)) for kind in kinds]
        rates = (f"{spread.median:,.0f} +- {spread.deviation:,.0f}" if spread else "" for spread in spreads)
        rows.append([str(size), str(number), *rates])
    sentences = list(curves.left_out)
    for kind in kinds:
        if len(points := curves.over("num_workers", kind)) > 1:
            sentences.append(f"Batches from the {_SOURCES[kind]}: {_fewest_workers(points)}")
        if len(points := curves.over("batch_size", kind)) > 1:
            sentences.append(f"Batches from the {_SOURCES[kind]}: {_larger_batches(points)}")
    table = [*aligned(rows), "Samples per second; median +- standard deviation of the rounds.", ""]
    return "\n".join([*table, *chain.from_iterable(map(wrapped, sentences))])


def save(plan: Plan, path: Path, curves: Curves | None = None) -> None:
    """Draw the table, seconds per epoch over the budget, and the curves into a PNG file; bars: lowest to highest.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from lightning_stocache.insight.charts import COLOURS, Chart, Line, draw_lines
    from lightning_stocache.insight.charts import save as save_charts

    blue, vermilion, *_, grey, _ = COLOURS

    def line(name: str, points: Sequence[tuple[float, Spread]], colour: str) -> Line:
        errors = np.transpose([(seconds.median - seconds.low, seconds.high - seconds.median) for _, seconds in points])
        return Line(name, [(x, seconds.median) for x, seconds in points], colour, errors=errors)

    def draw_budgets(axes: Axes) -> None:
        rows = [(float(row.budget.rstrip("%")), row) for row in plan.rows]
        first = Line("epoch one", [(percent, row.first_epoch.median) for percent, row in rows], grey, "--")
        later = line("later", [(percent, row.later_epoch) for percent, row in rows], blue)
        budget = "budget, % of the dataset"
        if not all(row.safe for row in plan.rows):
            free = 100 * plan.paces.safe_bytes / plan.rows[-1].budget_bytes
            axes.axvline(free, color=vermilion, linestyle=":")
            budget += " (dotted: what is safely free)"
        draw_lines(axes, [later, first], "s", budget)

    def draw_curve(axes: Axes, curves: Curves, name: Literal["num_workers", "batch_size"]) -> None:
        found = {kind: curves.over(name, kind) for kind in _SOURCES}
        numbers = sorted({number for points in found.values() for number, _ in points})
        lines = []
        for kind, points in found.items():  # seconds: beside a rate a hundred times as high the other would be flat
            seconds = [(numbers.index(n), Spread(*(1000 / rate for rate in rates[2::-1]))) for n, rates in points]
            lines.append(line(f"from the {_SOURCES[kind]}", seconds, blue if kind == "hit" else vermilion))
        draw_lines(axes, lines, "s", name)
        axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])

    seconds_of = "Of training" if plan.step else "Of the loader alone"
    charts = [Chart("Seconds per epoch", f"{seconds_of}. The advice is cache.budget={plan.budget}.", draw_budgets)]
    names: tuple[Literal["num_workers", "batch_size"], ...] = ("num_workers", "batch_size")
    for name in names:
        if curves is not None and any(len(curves.over(name, kind)) > 1 for kind in _SOURCES):
            caption = "Of loading; bars reach from the lowest to the highest of the rounds."
            draw = partial(draw_curve, curves=curves, name=name)
            charts.append(Chart(f"Seconds per 1,000 samples over {name}", caption, draw))
    save_charts(charts, dict(zip(_HEAD, zip(*map(_cells, plan.rows), strict=True), strict=True)), path)


def aligned(rows: Sequence[Sequence[str]], left: int = 0) -> list[str]:
    """Rows of a table as lines. The first `left` columns are aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        names = map(str.ljust, row[:left], widths[:left])
        numbers = map(str.rjust, row[left:], widths[left:])
        lines.append("  ".join([*names, *numbers]).rstrip())
    return lines


def _number(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count > 1)}"


def _cells(row: Row) -> list[str]:
    low, median, high = (f"{value:.1f}" if value < 999 else ">999" for value in row.faster[:3])
    return [
        row.budget + "*" * (not row.safe),
        format_bytes(row.budget_bytes),
        f"{100 * row.hit_rate:.1f} %",
        _seconds(row.first_epoch.median),
        _seconds(row.later_epoch.median),
        f"{median}x [{low}..{high}]" if row.budget_bytes else "",
        f"epoch {row.pays_in}" if row.pays_in else "",
    ]


def _pace(name: str, seconds: Spread, noun: str) -> list[str]:
    """The cells of a measurement, in a unit of time that gives readable numbers."""
    scales = (("s", 1.0, 2), ("ms", 1e3, 2), ("us", 1e6, 1))
    unit, factor, digits = next((scale for scale in scales if scale[1] * seconds.median >= 1), scales[-1])
    low, median, high, deviation = (f"{factor * value:,.{digits}f}" for value in seconds)
    return [name, median, f"{low}..{high}", deviation, f"{unit} a {noun}"]


def _seconds(value: float) -> str:
    if value >= 36_000:
        return f"{value / 3600:,.0f} h"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _fewest_workers(points: Points) -> str:
    best = max((rates for _, rates in points), key=lambda rates: rates.median)
    number, rates = next((number, rates) for number, rates in points if rates.high >= best.low)
    return f"num_workers={number} is as fast as any of these ({rates.median:,.0f} samples/s)."


def _larger_batches(points: Points) -> str:
    (small, before), (large, after) = points[0], points[-1]
    same = before.high >= after.low and after.high >= before.low
    change = "neither faster nor slower" if same else f"{after.median / before.median:.1f} times as fast"
    return f"from {small} to {large} samples they are {change} per sample."

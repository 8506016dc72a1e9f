"""The gain of a budget, before it is paid: the law, the advice, one table in 80 columns, one picture.

The law is linear. Of the n samples of a rank the share h has a slot on some node:

    first epoch    n * ((1 - h) * plain + h * stored)
    later epochs   n * ((1 - h) * plain + h * hit)

A sample without a slot is loaded as by a plain loader, in every epoch. The training steps are added if the main process
loads. If workers load, or if all samples are hits, an epoch takes the longer of the two.

Loading and steps slow each other down: they share cores, memory and caches of the processor. So a training with a plain
loader is measured, too. If it takes longer than the law predicts, each epoch gets the difference in proportion to the
samples that it loads. The first epoch also gets the time in which the workers started. Validation, checkpoints and
callbacks are no part of these seconds.

The advice follows from the ranges that were measured. A cache gains if it is faster even with the lowest plain pace and
with its own highest paces, and if the training has enough epochs to win back what the first one stores. It gains
nothing if it is no faster even with the highest plain pace and with its own lowest paces. In between `plan` cannot
tell, and the advice is `auto`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from lightning_stocache.console import wrapped
from lightning_stocache.insight.measurement import Arm, Curves, Data, Kind, Paces, Spread, Steps, Swept
from lightning_stocache.insight.metrics import seconds
from lightning_stocache.node.budget import format_bytes

__all__ = ["Plan", "Row", "aligned", "as_text", "curves_as_text", "plan", "save"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOTHING = 0.02  # of an epoch's time: less is no gain
_HEAD = ("budget", "per node", "hits", "first epoch", "later", "speed-up", "pays with")


class Row(NamedTuple):
    """The effect of one budget. Seconds are those of training, or of the loader alone if there is no model."""

    budget: str  # as in a config
    budget_bytes: int  # per node
    safe: bool  # this node has room for it
    hit_rate: float  # of later epochs
    first_epoch: Spread  # seconds
    later_epoch: Spread  # seconds
    faster: Spread  # the time of an uncached epoch over the time of a later epoch
    pays_with: int | None  # the least epochs with which the whole training is shorter; None: never, or unknown


@dataclass(frozen=True)
class Plan:
    """The table, the measurements behind it, and the advice."""

    data: Data
    paces: Paces
    steps: Steps | None  # if there is a model
    rows: tuple[Row, ...]  # by rising budget, uncached first
    budget: str  # the advice, as in a config
    sentences: tuple[str, ...]  # the reasons for the advice


def plan(data: Data, paces: Paces, steps: Steps | None = None, epochs: int | None = None) -> Plan:
    """Make the table over shares of the dataset; the largest safe budget and the advised budget are among them.

    Args:
        data: the training data, and the ranks that load it.
        paces: the measurements of its loader.
        steps: the measurements of its steps, if there is a model.
        epochs: number of epochs of the training, if it is known.
    """
    law = _Law(data, paces, steps)
    safe = min(paces.safe_bytes / law.dataset_bytes, 1.0) if law.dataset_bytes else 0.0
    share, sentences = _advice(law, safe, epochs)
    percent = math.ceil(round(100 * share, 3))
    budget = "0" if percent == 0 else "auto" if share == safe else f"{percent}%"
    shares = {*_SHARES, safe, *([] if share == safe else [percent / 100])} if law.dataset_bytes else {0.0}
    return Plan(data, paces, steps, tuple(map(law.row, sorted(shares))), budget, tuple(sentences))


class _Law:
    """Seconds of an epoch by the share of the dataset that a node caches; arrays are lowest, median, highest."""

    def __init__(self, data: Data, paces: Paces, steps: Steps | None) -> None:
        self.data, self.paces = data, paces
        none = Spread(0.0, 0.0, 0.0)
        spreads = (paces.plain, paces.stored, paces.hit, none if steps is None else steps.alone)
        self.plain, self.stored, self.hit, self.step = (np.array(spread[:3]) for spread in spreads)
        self.has_step = steps is not None
        self.samples = data.samples / (data.nodes * data.ranks)  # of one rank in an epoch
        self.batches = math.ceil(self.samples / data.batch_size)
        self.dataset_bytes = 0 if paces.codec is None else data.samples * paces.codec.slot_bytes  # cached whole
        self.slowdown = 0.0  # seconds of an uncached epoch beyond those of its loading and its steps
        self.start = 0.0 if steps is None else steps.start
        if steps is not None:
            alone = self.epoch(0.0, paces.plain.median, paces.hit.median, steps.alone.median)
            self.slowdown = max(float(self.batches * steps.uncached.median - alone), 0.0)

    def hit_rate(self, share: float) -> float:
        """The hit rate of later epochs: the slots of the nodes add up."""
        slots = math.floor(round(share * self.data.samples, 6)) / self.data.samples
        return min(self.data.nodes * slots, 1.0)

    def epoch(self, share: float, plain: Any, cached: Any, step: Any) -> Any:
        """Seconds of an epoch in which a share of the samples takes `cached`, and the others `plain`, seconds each."""
        loading = self.samples * ((1 - share) * plain + share * cached)
        steps = self.batches * step
        return np.maximum(loading, steps) if self.data.num_workers else loading + steps

    def first(self, share: float) -> Any:
        """Seconds of the first epoch, which loads all samples."""
        return self.epoch(share, self.plain, self.stored, self.step) + self.slowdown + self.start

    def later(self, share: float, plain: Any, hit: Any, step: Any) -> Any:
        """Seconds of a later epoch; if all samples are hits, a thread gathers them beside the steps."""
        if share < 1:
            return self.epoch(share, plain, hit, step) + (1 - share) * self.slowdown
        return np.maximum(self.samples * hit, self.batches * step)

    def row(self, share: float) -> Row:
        """The effect of a budget of a share of the dataset."""
        rate = self.hit_rate(share)
        without = self.later(0.0, self.plain, self.hit, self.step)
        first = self.first(rate)
        later = self.later(rate, self.plain, self.hit, self.step)
        # The least gain: what the cache loads is slow, and all else. A plain sample is equally slow in both.
        slowest = self.later(rate, self.plain, self.hit[::-1], self.step[::-1])
        faster = Spread(*(self.later(0.0, self.plain, self.hit, self.step[::-1]) / slowest).tolist())
        (_, cold, _), (_, warm, _), (_, plain, _) = first, later, without
        pays_with = None
        if share and faster.low > 1:  # with n epochs cold + (n - 1) * warm < n * plain
            pays_with = max(math.floor((cold - warm) / (plain - warm)) + 1, 2)
        percent, budget_bytes = round(100 * share, 7), math.floor(share * self.dataset_bytes)
        return Row(
            budget=f"{percent:.0f}%" if percent == int(percent) else f"{percent:.1f}%",
            budget_bytes=budget_bytes,
            safe=budget_bytes <= self.paces.safe_bytes,
            hit_rate=rate,
            first_epoch=Spread(*first.tolist()),
            later_epoch=Spread(*later.tolist()),
            faster=faster,
            pays_with=pays_with,
        )

    def enough(self, safe: float) -> float:
        """The smallest share, in whole percents, that is as good as the largest safe one.

        It is calculated from the highest plain pace, the lowest hit and the lowest step, which give the largest share.
        """
        paces = self.plain[2], self.hit[0], self.step[0]
        goal = self.later(self.hit_rate(safe), *paces) * (1 + _NOTHING)
        percents = (percent / 100 for percent in range(1, math.ceil(100 * safe)))
        return next((share for share in percents if self.later(self.hit_rate(share), *paces) <= goal), safe)


def _advice(law: _Law, safe: float, epochs: int | None) -> tuple[float, list[str]]:
    """The share of the dataset to cache, and why."""
    if law.paces.codec is None:
        return 0.0, [f"Nothing can be cached. {law.paces.reason}"]
    sentences = []
    if safe < 1:
        sentences.append(f"This node has room for {100 * safe:.1f} % of it: see stocache doctor.")
    if epochs == 1:
        return 0.0, [*sentences, "A cache helps from the second epoch on, and trainer.max_epochs is 1."]
    largest = law.row(safe)
    if largest.faster.high <= 1 + _NOTHING:
        why = "training waits for its steps, not for data" if law.has_step else "the source is as fast as the cache"
        return 0.0, [*sentences, f"No budget gains anything: {why}."]
    if largest.faster.low <= 1 + _NOTHING:
        why = "repeated measurements differ by more than a cache would gain"
        return safe, [*sentences, f"Cannot tell whether a budget gains anything: {why}."]
    enough = law.enough(safe)
    if enough > 0.95 * safe:  # that near, what is free when the job starts may as well be taken
        enough = safe
    pays_with = law.row(enough).pays_with
    if epochs is not None and (pays_with is None or pays_with > epochs):
        needed = "" if pays_with is None else f": {pays_with} epochs win back what the first one stores"
        return 0.0, [*sentences, f"trainer.max_epochs={epochs} is too few{needed}."]
    if enough < safe:
        why = ": training waits for its steps" if law.has_step else ""
        sentences.append(f"Beyond {100 * enough:.0f} % of the dataset nothing is gained{why}.")
    return enough, sentences


def as_text(plan: Plan) -> str:
    """The measurements, the table and the reasons for the advice."""
    data, paces = plan.data, plan.paces
    size = f" of {format_bytes(paces.codec.nbytes)}" if paces.codec is not None else ""
    measured = [_pace("plain loader", paces.plain, "sample")]
    if paces.codec is not None:
        measured += [_pace("loaded and stored", paces.stored, "sample"), _pace("from the cache", paces.hit, "sample")]
    if plan.steps is not None:
        measured.append(_pace("training step", plan.steps.alone, "batch"))
        measured.append(_pace("with its loading", plan.steps.uncached, "batch"))
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
    parts = "with the step" if plan.steps else "of the loader (no model was given)"
    lines.append(f"Time of an epoch {parts}; [lowest..highest] measured.")
    lines += ["", *map(wrapped, plan.sentences)] if plan.sentences else []
    return "\n".join(lines)


def curves_as_text(curves: Curves) -> str:
    """A table of all measured loaders, and a sentence on each curve. Ranges that overlap are no difference."""
    kinds = [kind for kind in _SOURCES if any(arm.kind == kind for arm in curves.rates)]
    rows = [["batch_size", "num_workers", "pin_memory", *(f"from the {_SOURCES[kind]}" for kind in kinds)]]
    for loader in dict.fromkeys(arm[1:] for arm in curves.rates):
        spreads = [curves.rates.get(Arm(kind, *loader)) for kind in kinds]
        rates = [f"{spread.median:,.0f} +- {spread.deviation:,.0f}" if spread else "" for spread in spreads]
        rows.append([*map(str, loader), *rates])
    sentences = list(curves.left_out)
    for kind in kinds:
        for name, say in _SENTENCES.items():
            if len(points := curves.over(name, kind)) > 1:
                sentences.append(f"Batches from the {_SOURCES[kind]}: {say(points)}")
    table = [*aligned(rows), "Samples per second; median +- standard deviation of the rounds.", ""]
    return "\n".join([*table, *map(wrapped, sentences)])


def save(plan: Plan, path: Path, curves: Curves | None = None) -> None:
    """Draw seconds per epoch over the budget, and the curves, into a PNG file; bars: lowest to highest.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
        OSError: the file cannot be written.
    """
    from lightning_stocache.insight.charts import BLUE, GREY, ORANGE, Chart, Line, over
    from lightning_stocache.insight.charts import save as save_charts

    def line(name: str, points: Sequence[tuple[float, Spread]], colour: str, style: str = "o-") -> Line:
        spreads = [spread for _, spread in points]
        reach = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
        return Line(name, [(x, spread.median) for x, spread in points], colour, style, reach)

    rows = [(float(row.budget.rstrip("%")), row) for row in plan.rows]
    first = line("first epoch", [(percent, row.first_epoch) for percent, row in rows], GREY, "o--")
    later = line("later", [(percent, row.later_epoch) for percent, row in rows], BLUE)
    of = "Of training" if plan.steps else "Of the loader alone"
    safe = [percent for percent, row in rows if row.safe]
    room = "" if len(safe) == len(rows) else f" This node has room for {max(safe):.0f} %."
    ticks = {100 * share: f"{100 * share:.0f}" for share in _SHARES if 100 * share <= rows[-1][0]}
    draw = over("budget, % of the dataset", ticks, [later, first])
    charts = [Chart("Seconds per epoch", f"{of}. The advice is budget={plan.budget}.{room}", draw)]
    for name in _SENTENCES if curves is not None else ():
        found = {kind: curves.over(name, kind) for kind in _SOURCES}  # type: ignore[union-attr]
        if len(found["plain"]) > 1:
            lines = []
            for kind, points in found.items():  # seconds: beside a rate a hundred times as high the other would be flat
                seconds_of = [Spread(*(1000 / rate for rate in rates[2::-1])) for _, rates in points]
                lines.append(
                    line(f"from the {_SOURCES[kind]}", list(enumerate(seconds_of)), BLUE if kind == "hit" else ORANGE)
                )
            caption = "Of loading; bars reach from the lowest to the highest of the rounds."
            values = {float(n): str(value) for n, (value, _) in enumerate(found["plain"])}
            charts.append(Chart(f"Seconds per 1,000 samples over {name}", caption, over(name, values, lines)))
    save_charts(charts, path)


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
    speed_up = f"{median}x [{low}..{high}]" if row.faster.median >= 1 else f"{1 / row.faster.median:.1f}x slower"
    return [
        row.budget + "*" * (not row.safe),
        format_bytes(row.budget_bytes),
        f"{100 * row.hit_rate:.0f} %",
        seconds(row.first_epoch.median),
        seconds(row.later_epoch.median),
        speed_up if row.budget_bytes else "",
        f"{row.pays_with} epochs" if row.pays_with else "",
    ]


def _pace(name: str, spread: Spread, noun: str) -> list[str]:
    """The cells of a measurement, in a unit of time that gives readable numbers."""
    scales = (("s", 1.0, 2), ("ms", 1e3, 2), ("us", 1e6, 1))
    unit, factor, digits = next((scale for scale in scales if scale[1] * spread.median >= 1), scales[-1])
    low, median, high, deviation = (f"{factor * value:,.{digits}f}" for value in spread)
    return [name, median, f"{low}..{high}", deviation, f"{unit} a {noun}"]


Points = Sequence[tuple[int, Spread]]


def _fewest_workers(points: Points) -> str:
    best = max((rates for _, rates in points), key=lambda rates: rates.median)
    number, rates = next((number, rates) for number, rates in points if rates.high >= best.low)
    return f"num_workers={number} is as fast as any of these ({rates.median:,.0f} samples/s)."


def _larger_batches(points: Points) -> str:
    return f"from {points[0][0]} to {points[-1][0]} samples they are {_change(points)} per sample."


def _pinned(points: Points) -> str:
    return f"with pin_memory=True they are {_change(points)} per sample."


def _change(points: Points) -> str:
    (_, before), (_, after) = points[0], points[-1]
    same = before.high >= after.low and after.high >= before.low
    return "neither faster nor slower" if same else f"{after.median / before.median:.1f} times as fast"


_SOURCES: dict[Kind, str] = {"plain": "source", "hit": "cache"}  # of the batches of a curve
_SENTENCES: dict[Swept, Callable[[Points], str]] = {
    "num_workers": _fewest_workers,
    "batch_size": _larger_batches,
    "pin_memory": _pinned,
}

"""A plan and its curves, written down: tables in 80 columns, plain values for JSON, one picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.measurement import Curves, Spread
from lightning_stocache.insight.planner import Plan, Row
from lightning_stocache.node.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_json", "as_text", "curves_as_text", "save"]

_COLOURS = {"source": "#c2500a", "cache": "#0072b2", "grey": "#667085"}  # after Okabe and Ito


def as_text(plan: Plan) -> str:
    """What was measured, the table, and what follows; the last line is the budget, as it is written into a config."""
    job, paces = plan.job, plan.paces
    size = f" of {format_bytes(paces.codec.nbytes)}" if paces.codec is not None else ""
    measured = [("uncached", paces.uncached, "sample")]
    if paces.codec is not None:
        measured += [("missed", paces.missed, "sample"), ("hit", paces.hit, "sample")]
    measured += [("step", plan.step, "batch")] if plan.step else []
    lines = [
        f"{job.samples:,} samples{size}, batches of {job.batch_size}, num_workers={job.num_workers}",
        f"{job.nodes} node{'s' * (job.nodes > 1)} x {job.ranks} rank{'s' * (job.ranks > 1)}, {job.threads}",
        "",
        *aligned([["", "median", "lowest..highest", "deviation", ""], *(_pace(*pace) for pace in measured)], left=1),
        "",
        *aligned([_HEAD, *map(_cells, plan.rows)], left=1),
    ]
    if not all(row.safe for row in plan.rows):
        lines.append("* more than is safely free on this node")
    what = "with the step" if plan.step else "of the loader alone (no model was given)"
    lines += [f"Time of an epoch {what}; [lowest..highest] measured.", ""]
    lines += [*_wrapped(plan.sentences), ""] if plan.sentences else []
    return "\n".join([*lines, f"cache.budget={plan.budget}"])


def curves_as_text(curves: Curves) -> str:
    """The curves as tables, and what follows. Ranges that overlap are no difference."""
    lines: list[str] = []
    sentences = list(curves.left_out)
    for name, sources in curves.lines.items():
        rates = {number: [dict(line).get(number) for line in sources.values()] for number in _numbers(sources)}
        rows = [[name, *(f"from the {source}" for source in sources)]]
        rows += [[str(number), *map(_rate, found)] for number, found in rates.items()]
        lines += (
            [*aligned(rows), "Samples per second; median +- standard deviation of the rounds.", ""] if rates else []
        )
        for source, line in sources.items():
            if len(line) > 1:
                judged = _fewest_workers if name == "num_workers" else _larger_batches
                sentences.append(f"Batches from the {source}: {judged(line)}")
    return "\n".join([*lines, *_wrapped(sentences)])


def as_json(plan: Plan, curves: Curves | None = None) -> str:
    """A plan and its curves as plain values: seconds, bytes, rates from 0 to 1, samples per second."""
    paces = plan.paces
    values = {
        "budget": plan.budget,
        "sentences": plan.sentences,
        "rows": plan.rows,
        "job": plan.job,
        "sample_bytes": None if paces.codec is None else paces.codec.nbytes,
        "seconds_per_sample": {"uncached": paces.uncached, "missed": paces.missed, "hit": paces.hit},
        "step": None if plan.step is None else {"seconds": plan.step},
    }
    return json.dumps(values if curves is None else values | {"curves": curves}, default=_plain)


def save(plan: Plan, path: Path, curves: Curves | None = None) -> None:
    """Draw seconds per epoch over the budget into a PNG file, and below it the curves; bars from lowest to highest.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a PNG needs matplotlib, which is not installed: pip install "lightning-stocache[report]"'
        ) from error
    drawn = {name: sources for name, sources in curves.lines.items() if sources} if curves else {}
    figure = Figure(figsize=(7.5, 3.6 * (1 + len(drawn))), layout="constrained")
    above, *below = figure.subplots(1 + len(drawn), squeeze=False)[:, 0]
    budgets = [row.budget_bytes / 2**20 for row in plan.rows]
    _draw(above, budgets, [row.later_epoch for row in plan.rows], "cache", "later, lowest to highest")
    above.plot(budgets, [row.first_epoch.median for row in plan.rows], "--", color=_COLOURS["grey"], label="epoch one")
    if not all(row.safe for row in plan.rows):
        above.axvline(plan.job.safe_bytes / 2**20, color=_COLOURS["source"], linestyle=":", label="safely free")
    title = f"What a budget would give, {'training' if plan.step else 'the loader alone'}: cache.budget={plan.budget}"
    above.set(xlabel="budget per node, MiB", ylabel="seconds per epoch", title=title)
    for axes, (name, sources) in zip(below, drawn.items(), strict=True):
        numbers = _numbers(sources)
        for source, line in sources.items():  # seconds: beside a rate a hundred times as high the other is flat
            seconds = [Spread(tuple(1000 / rate for rate in rates.values)) for _, rates in line]
            _draw(axes, [numbers.index(number) for number, _ in line], seconds, source, f"from the {source}")
        axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
        axes.set(xlabel=name, ylabel="seconds per 1,000 samples", title=f"Loading over {name}")
    for axes in (above, *below):
        axes.set_ylim(0, None)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, format="png", dpi=125)


def _draw(axes: Axes, places: Sequence[float], spreads: Sequence[Spread], colour: str, label: str) -> None:
    bars = [[each.median - each.low for each in spreads], [each.high - each.median for each in spreads]]
    medians = [each.median for each in spreads]
    axes.errorbar(places, medians, bars, marker="o", capsize=4, color=_COLOURS[colour], label=label)


_HEAD = ["budget", "per node", "hit rate", "epoch one", "later", "faster", "pays in"]


def _cells(row: Row) -> list[str]:
    low, median, high = (f"{value:.1f}" if value < 999 else ">999" for value in _ends(row.faster))
    return [
        row.budget + "*" * (not row.safe),
        format_bytes(row.budget_bytes),
        f"{100 * row.hit_rate:.1f} %",
        _seconds(row.first_epoch.median),
        _seconds(row.later_epoch.median),
        f"{median}x [{low}..{high}]" if row.budget_bytes else "",
        f"epoch {row.pays_in}" if row.pays_in else "",
    ]


def _pace(name: str, seconds: Spread, what: str) -> list[str]:
    """Seconds at a scale at which they can be read."""
    scales = (("s", 1.0, 2), ("ms", 1e3, 2), ("us", 1e6, 1))
    unit, factor, digits = next((scale for scale in scales if scale[1] * seconds.median >= 1), scales[-1])
    low, median, high = (f"{factor * value:,.{digits}f}" for value in _ends(seconds))
    return [name, median, f"{low}..{high}", f"{factor * seconds.deviation:,.{digits}f}", f"{unit} a {what}"]


def _ends(spread: Spread) -> tuple[float, float, float]:
    return spread.low, spread.median, spread.high


def _seconds(value: float) -> str:
    if value >= 36_000:
        return f"{value / 3600:,.0f} h"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _rate(rates: Spread | None) -> str:
    return "" if rates is None else f"{rates.median:,.0f} +- {rates.deviation:,.0f}"


def _fewest_workers(line: Sequence[tuple[int, Spread]]) -> str:
    best = max((rates for _, rates in line), key=lambda rates: rates.median)
    number, rates = next((number, rates) for number, rates in line if rates.high >= best.low)
    return f"num_workers={number} is as fast as any of these ({rates.median:,.0f} samples/s)."


def _larger_batches(line: Sequence[tuple[int, Spread]]) -> str:
    (small, before), (large, after) = line[0], line[-1]
    same = before.high >= after.low and after.high >= before.low
    change = "no faster, nor slower," if same else f"{after.median / before.median:.1f} times as fast"
    return f"from {small} to {large} samples they are {change} per sample."


def _numbers(sources: Any) -> list[int]:
    """The numbers of workers, or of samples in a batch, for which anything was measured."""
    return sorted({number for line in sources.values() for number, _ in line})


def _wrapped(sentences: Sequence[str]) -> list[str]:
    return [line for sentence in sentences for line in wrap(sentence, 80)]


def _plain(value: Any) -> Any:
    """A spread as its bounds, any other record as its fields."""
    if not isinstance(value, Spread):
        return vars(value)
    return {name: getattr(value, name) for name in ("low", "median", "high", "deviation", "values")}

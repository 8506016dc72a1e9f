"""A plan and its curves, written down: a table in 80 columns, plain values for JSON, one picture."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.curves import Curves, Line
from lightning_stocache.insight.curves import as_json as curves_as_json
from lightning_stocache.insight.measurement import Spread
from lightning_stocache.insight.planner import Plan, Row
from lightning_stocache.node.budget import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["as_json", "as_text", "save"]

_COLOURS = {"source": "#c2500a", "cache": "#0072b2", "grey": "#667085"}  # after Okabe and Ito


def as_text(plan: Plan) -> str:
    """What was measured, the table, and what follows; the last line is the budget, as it is written into a config."""
    job, codec = plan.job, plan.paces.codec
    size = f" of {format_bytes(codec.nbytes)}" if codec is not None else ""
    paces = [("uncached", plan.paces.uncached, "sample")]
    if codec is not None:
        paces += [("missed", plan.paces.missed, "sample"), ("hit", plan.paces.hit, "sample")]
    paces += [("step", plan.step, "batch")] if plan.step else []
    measured = [["", "median", "lowest..highest", "deviation", ""], *(_pace(*pace) for pace in paces)]
    head = ["budget", "per node", "hit rate", "epoch one", "later", "faster", "pays in"]
    lines = [
        f"{job.samples:,} samples{size}, batches of {job.batch_size}, num_workers={job.num_workers}",
        f"{job.nodes} node{'s' * (job.nodes > 1)} x {job.ranks} rank{'s' * (job.ranks > 1)}, threads={job.threads} "
        f"({job.threads_from})",
        "",
        *aligned(measured, left=1),
        "",
        *aligned([head, *map(_cells, plan.rows)], left=1),
    ]
    if not all(row.safe for row in plan.rows):
        lines.append("* more than is safely free on this node")
    what = "with the step" if plan.step else "of the loader alone (no model was given)"
    lines.append(f"Time of an epoch {what}; [lowest..highest] measured.")
    lines += ["", *(line for sentence in plan.sentences for line in wrap(sentence, 80))] if plan.sentences else []
    return "\n".join([*lines, "", f"cache.budget={plan.budget}"])


def as_json(plan: Plan, curves: Curves | None = None) -> str:
    """A plan and its curves as plain values: seconds, bytes, rates from 0 to 1, samples per second."""
    codec = plan.paces.codec
    paces = {name: _plain(getattr(plan.paces, name)) for name in ("uncached", "missed", "hit")}
    spreads = ("first_epoch", "later_epoch", "faster")
    values = {
        "budget": plan.budget,
        "sentences": list(plan.sentences),
        "rows": [asdict(row) | {name: _plain(getattr(row, name)) for name in spreads} for row in plan.rows],
        "job": asdict(plan.job),
        "sample_bytes": None if codec is None else codec.nbytes,
        "seconds_per_sample": paces,
        "step": None if plan.step is None else {"seconds": _plain(plan.step)},
    }
    return json.dumps(values if curves is None else values | {"curves": curves_as_json(curves)})


def save(plan: Plan, path: Path, curves: Curves | None = None) -> None:
    """Draw seconds per epoch over the budget into a PNG file, and below it the curves, with standard deviations.

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
    drawn = {name: lines for name in ("num_workers", "batch_size") if curves and (lines := curves.over(name))}
    figure = Figure(figsize=(7.5, 3.6 * (1 + len(drawn))), layout="constrained")
    above, *below = figure.subplots(1 + len(drawn), squeeze=False)[:, 0]
    _draw_budgets(above, plan)
    for axes, (name, lines) in zip(below, drawn.items(), strict=True):
        _draw_curve(axes, name, lines)
    for axes in (above, *below):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, format="png", dpi=125)


def _draw_budgets(axes: Axes, plan: Plan) -> None:
    budgets = [row.budget_bytes / 2**20 for row in plan.rows]
    later = [row.later_epoch for row in plan.rows]
    bars = [[each.median - each.low for each in later], [each.high - each.median for each in later]]
    medians, label = [each.median for each in later], "later, lowest to highest"
    axes.errorbar(budgets, medians, bars, marker="o", capsize=4, color=_COLOURS["cache"], label=label)
    first = [row.first_epoch.median for row in plan.rows]
    axes.plot(budgets, first, "--", color=_COLOURS["grey"], label="epoch one")
    if plan.paces.codec is not None and plan.job.safe_bytes < plan.rows[-1].budget_bytes:
        axes.axvline(plan.job.safe_bytes / 2**20, color=_COLOURS["source"], linestyle=":", label="safely free")
    title = f"What a budget would give, {'training' if plan.step else 'the loader alone'}: cache.budget={plan.budget}"
    axes.set(xlabel="budget per node, MiB", ylabel="seconds per epoch", title=title, ylim=(0, None))
    axes.legend(frameon=False)


def _draw_curve(axes: Axes, name: str, lines: dict[str, Line]) -> None:
    """Seconds, not rates: a cache that is a hundred times as fast hides nothing there."""
    numbers = sorted({number for line in lines.values() for number, _ in line})
    for source, line in lines.items():
        places = [numbers.index(number) for number, _ in line]
        seconds = [Spread(tuple(1000 / value for value in rate.values)) for _, rate in line]
        means, bars = [each.mean for each in seconds], [each.deviation for each in seconds]
        axes.errorbar(places, means, bars, marker="o", capsize=4, color=_COLOURS[source], label=f"from the {source}")
    axes.set_xticks(range(len(numbers)), [str(number) for number in numbers])
    axes.set(xlabel=name, ylabel="seconds per 1,000 samples", title=f"Loading over {name}", ylim=(0, None))
    axes.legend(frameon=False)


def _pace(name: str, seconds: Spread, what: str) -> list[str]:
    """Seconds at a scale at which they can be read."""
    scales = (("s", 1.0, 2), ("ms", 1e3, 2), ("us", 1e6, 1))
    unit, factor, digits = next((scale for scale in scales if scale[1] * seconds.median >= 1), scales[-1])
    low, median, high, deviation = (
        f"{factor * value:,.{digits}f}" for value in (seconds.low, seconds.median, seconds.high, seconds.deviation)
    )
    return [name, median, f"{low}..{high}", deviation, f"{unit} a {what}"]


def _cells(row: Row) -> list[str]:
    cells = [row.budget + "*" * (not row.safe), format_bytes(row.budget_bytes), f"{100 * row.hit_rate:.1f} %"]
    cells += [_seconds(row.first_epoch.median), _seconds(row.later_epoch.median)]
    faster = row.faster
    low, median, high = (
        f"{value:.1f}" if value < 999 else ">999" for value in (faster.low, faster.median, faster.high)
    )
    cells.append(f"{median}x [{low}..{high}]" if row.budget_bytes else "")
    return [*cells, f"epoch {row.pays_in}" if row.pays_in else ""]


def _seconds(value: float) -> str:
    if value >= 36_000:
        return f"{value / 3600:,.0f} h"
    return f"{value:,.0f} s" if value >= 100 else f"{value:.3g} s"


def _plain(spread: Spread) -> dict[str, float]:
    return {name: getattr(spread, name) for name in ("low", "median", "high", "deviation")}

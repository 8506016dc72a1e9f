"""A plan, written down: as a table for people, as plain values for JSON, as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning_stocache.insight.advice import Plan
from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.panels import Lines, Panel, Series, write
from lightning_stocache.insight.picture import save as save_picture
from lightning_stocache.insight.planner import ENDS, Row, Spread
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.setup.form_choice import keeps_files

__all__ = ["as_json", "as_text", "save"]


def as_text(plan: Plan) -> str:
    """What was measured, the table, and what follows; the last line is the budget, as it is written into a config."""
    job, costs = plan.job, plan.costs
    size = f" of {format_bytes(costs.spec.nbytes)}" if costs.spec is not None else ""
    lines = [
        f"{job.samples:,} samples{size}, batches of {job.batch_size}, num_workers={job.num_workers}, "
        f"{job.nodes} node{'s' * (job.nodes > 1)} x {job.ranks} rank{'s' * (job.ranks > 1)}, {job.cores} cores, "
        f"threads={job.threads}",
        "",
        f"source    {_each(Spread.of([costs.reads.first]))}{_whence(plan)}; again {_each(costs.reads.repeated)}",
        f"uncached  {_each(costs.uncached)}",
    ]
    if costs.spec is not None:
        lines += [f"missed    {_each(costs.missed)}", f"hit       {_each(costs.hit)}"]
        lines += _of_files(plan)
    lines += [f"step      {_each(plan.step.seconds, 'batch')}" if plan.step else "step      no model was given", ""]
    head = ["budget", "per node", "samples", "hit rate", "epoch one", "later", "faster", "pays in"]
    rows = [head] + [_cells(row, plan) for row in plan.rows]
    lines += aligned(rows)
    if not all(row.safe for row in plan.rows):
        lines.append("* more than is safely free on this node")
    what = "with the step" if plan.step else "of the loader alone"
    lines.append(f"Seconds per epoch {what}; [lowest..highest] of what was measured several times.")
    sentences = [fill(sentence, 100) for sentence in plan.sentences]
    return "\n".join([*lines, "", *sentences, "", f"cache.budget={plan.budget}"])


def _of_files(plan: Plan) -> list[str]:
    """What keeping files would give, where they are known."""
    encoded, codec = plan.costs.encoded, plan.costs.spec
    if encoded is None or codec is None:
        return []
    size, read, decode = encoded.codec.nbytes, encoded.read_seconds, encoded.decode_seconds
    taken = next((row.budget_bytes for row in plan.rows if plan.budget == row.budget), plan.job.safe_bytes)
    keeps = "files" if keeps_files(taken, plan.job.samples, codec, encoded) else "decoded samples"
    return [
        f"file      {format_bytes(size)} a sample; {_each(Spread.of([read]))} to read, {_each(Spread.of([decode]))} to "
        f"decode: store=auto keeps {keeps}"
    ]


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain values: seconds, bytes, rates from 0 to 1."""
    costs = {name: value for name, value in asdict(plan.costs).items() if name not in ("spec", "encoded")}
    encoded = plan.costs.encoded
    costs |= {"sample_bytes": plan.costs.spec.nbytes if plan.costs.spec is not None else None}
    costs |= {"file_bytes": encoded.codec.nbytes if encoded is not None else None}
    return {
        "budget": plan.budget,
        "num_workers": plan.num_workers,
        "sentences": list(plan.sentences),
        "rows": [asdict(row) for row in plan.rows],
        "job": asdict(plan.job),
        "seconds_per_sample": costs,
        "step": None if plan.step is None else asdict(plan.step),
    }


def save(plan: Plan, path: Path, more: Sequence[Panel] = ()) -> None:
    """Draw seconds per epoch over the budget into a PNG file, after further panels.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: the file cannot be written.
    """
    low, middle, high = ([(row.budget_bytes, row.later_epoch.at(end)) for row in plan.rows] for end in ENDS)
    first = [(row.budget_bytes, row.first_epoch.median) for row in plan.rows]
    series = [
        Series("", low + high[::-1], 0, "band"),
        Series("epoch one", first, 6, "dashed"),
        Series("later", middle, 0),
    ]
    taken = (row.budget_bytes for row in plan.rows if plan.budget in (row.budget, "auto" if row.safe else ""))
    notes = [(max(taken, default=0), f"cache.budget={plan.budget}")]
    if plan.costs.spec is not None and plan.job.safe_bytes < plan.rows[-1].budget_bytes:
        notes.append((plan.job.safe_bytes, "more is not safely free"))
    title = f"What a budget would give: {'training' if plan.step else 'the loader alone'}"
    caption = "Seconds per epoch; shaded from the lowest to the highest measured."
    panel = Lines(title, caption, "budget per node", "s", series, x_unit="bytes", notes=notes)
    save_picture([*more, panel], path, columns=2 if more else 1)


def _cells(row: Row, plan: Plan) -> list[str]:
    low, high = row.hit_rates[1], row.hit_rates[-1]
    rates = f"{100 * low:.1f} to {100 * high:.1f} %" if abs(high - low) > 0.002 else write(high, "%")
    fullest = plan.job.safe_bytes < plan.rows[-1].budget_bytes and row == [row for row in plan.rows if row.safe][-1]
    name = row.budget + ("" if row.safe else "*") + (" (largest safe)" if fullest else "")
    cells = [name, format_bytes(row.budget_bytes), f"{row.samples:,}", rates, write(row.first_epoch.median, "s")]
    later, faster = row.later_epoch, row.faster
    cells.append(f"{write(later.median, 's')} [{_bare(later.low)}..{_bare(later.high)}]")
    cells.append(f"{faster.median:.1f}x [{faster.low:.1f}..{faster.high:.1f}]" if row.budget_bytes else "1")
    return [*cells, f"epoch {row.pays_in}" if row.pays_in else "-"]


def _bare(seconds: float) -> str:
    return write(seconds, "s").removesuffix(" s")


def _each(seconds: Spread, what: str = "sample") -> str:
    """Seconds per sample, at a scale at which they can be read."""
    unit, factor, digits = ("ms", 1e3, 2) if seconds.median >= 1e-3 else ("us", 1e6, 1)
    low, median, high = (f"{factor * value:.{digits}f}" for value in (seconds.low, seconds.median, seconds.high))
    return f"{median} {unit} a {what}" + (f" [{low}..{high}]" if low != high else "")


def _whence(plan: Plan) -> str:
    fetched = plan.costs.reads.from_disk
    if fetched is None:
        return ""
    # Below that it is not the data: a page of a library, a folder.
    return f", {format_bytes(int(fetched))} from disk" if fetched >= 1024 else " from the page cache"

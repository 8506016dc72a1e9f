"""What the report says in figures: those of each run, and how a value is written.

Figures are only picked from `Run`; a value that was not logged is left out, never guessed and never 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from lightning_stocache.insight.runs import Run
from lightning_stocache.node.budget import format_bytes

__all__ = ["Unit", "figures", "table", "write"]

Unit = Literal["%", "bytes", "s", "samples/s"]


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
    digits = f"{value:.2g}" if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")
    if abs(value) >= 100:
        digits = f"{value:,.0f}"
    return f"{digits} s" if unit == "s" else digits


def figures(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    """A run in figures, by what they are; empty where that was not logged.

    Args:
        run: that is summed up.
        runs: among which that without a cache is looked for.
    """
    before, after = next(iter(run.epoch_seconds), None), run.later_seconds
    uncached, waits = run.uncached(runs), run.wait_shares
    return {
        "epochs": str(run.epoch_count),
        "hit rate": _known(run.last("hit_rate"), "%"),
        "at most": _known(run.last("coverage"), "%"),
        "slots filled": _known(run.last("fill_fraction"), "%"),
        "epoch one": _known(before, "s"),
        "later epochs": _known(after, "s"),
        "faster than epoch one": _times(before, after),
        "faster than budget=0": _times(uncached.later_seconds if uncached else None, after),
        "waiting, epoch one": _known(waits[0] if waits else None, "%"),
        "waiting, last epoch": _known(waits[-1] if len(waits) > 1 else None, "%"),
        "waiting saved per epoch": _known(run.seconds_saved, "s"),
        "memory": _known(run.last("memory_bytes"), "bytes"),
        "budget": _known(run.last("budget_bytes"), "bytes"),
        "val hit rate": _known(run.last("hit_rate", "val"), "%"),
    }


def table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The figures of all runs by column, without columns that are empty."""
    rows = [figures(run, runs) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: cells for name, cells in columns.items() if any(cells)}


def _known(value: float | None, unit: Unit) -> str:
    return "" if value is None else write(value, unit)


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.1f}x" if before is not None and after else ""

"""What the dashboard says in figures: a headline for a single run, a table for all.

Both only pick from `Run`; a value that was not logged is left out, never guessed and never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_stocache.insight.panels import MOST_DRAWN, Unit, write
from lightning_stocache.insight.runs import Run, labels

__all__ = ["headline", "table"]


def headline(run: Run) -> list[tuple[str, str, str]]:
    """A single run in a few figures: what, how much, and what to hold it against."""
    figures = []
    hit, ceiling = run.last("hit_rate"), run.last("coverage")
    if hit is not None:
        against = f"of at most {write(ceiling, '%')}" if ceiling is not None else ""
        figures.append(("hit rate, last epoch", write(hit, "%"), against))
    fill = run.last("fill_fraction") if run.epoch_count else (run.live("fill_fraction") or ((0.0, None),))[-1][1]
    if fill is not None:
        against = "" if ceiling is None else f"{write(ceiling, '%')} of the dataset has a slot"
        figures.append(("slots filled", write(fill, "%"), against if run.epoch_count else "first epoch not over yet"))
    waits = _wait_shares(run)
    if waits:
        figures.append(("waiting for data", write(waits[-1], "%"), f"of the time; first epoch {write(waits[0], '%')}"))
    if run.epoch_seconds:
        first, later = run.epoch_seconds[0], run.later_seconds
        if later is None:
            warm = (run.epochs("hit_rate") or ((0, 0.0),))[0][1] > 0.5
            note = "from a cache that was filled before" if warm else "a cache helps from the second epoch on"
            figures.append(("seconds of epoch one", write(first, "s"), note))
        else:
            figures.append(("seconds per epoch", write(later, "s"), f"later ones; epoch one {write(first, 's')}"))
            figures.append(("faster than epoch one", _times(first, later), "the median of later epochs"))
    memory = run.last("memory_bytes")
    if memory is not None:
        budget = run.last("budget_bytes")
        figures.append(("memory", write(memory, "bytes"), f"of {write(budget, 'bytes')} granted" if budget else ""))
    if run.seconds_saved is not None:
        figures.append(("waiting saved", write(run.seconds_saved, "s"), "per epoch, against epoch one"))
    return figures


def table(runs: Sequence[Run]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the summary: one row per run, named if there are several, and no column that is empty."""
    columns: list[tuple[str, Callable[[Run], str]]] = [
        ("epochs", lambda run: str(run.epoch_count)),
        ("hit rate", lambda run: _cell(run.last("hit_rate"), "%")),
        ("ceiling", lambda run: _cell(run.last("coverage"), "%")),
        ("epoch one", lambda run: _cell(run.epoch_seconds[:1], "s")),
        ("later epochs", lambda run: _cell(run.later_seconds, "s")),
        ("faster than epoch one", lambda run: _times(next(iter(run.epoch_seconds), None), run.later_seconds)),
        ("faster than budget=0", lambda run: _times(_uncached_seconds(run, runs), run.later_seconds)),
        ("waiting for data", lambda run: _cell(_wait_shares(run)[-1:], "%")),
        ("memory", lambda run: _cell(run.last("memory_bytes"), "bytes")),
        ("budget", lambda run: _cell(run.last("budget_bytes"), "bytes")),
        ("filled", lambda run: _cell(run.last("fill_fraction"), "%")),
        ("val hit rate", lambda run: _cell(run.last("hit_rate", "val"), "%")),
        ("saved per epoch", lambda run: _cell(run.seconds_saved, "s")),
    ]
    filled = [("run", _names(runs))] + [(head, [tell(run) for run in runs]) for head, tell in columns]
    filled = [(head, cells) for head, cells in filled if any(cells)]
    return [head for head, _ in filled], [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]


def _names(runs: Sequence[Run]) -> list[str]:
    """The names of several runs; with their numbers, if that is what the charts call them."""
    if len(runs) == 1:
        return [""]
    numbered = labels(runs[:MOST_DRAWN])[0] == "run 1"
    return [f"run {number}: {run.name}" if numbered else run.name for number, run in enumerate(runs, 1)]


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.1f}x" if before is not None and after else ""


def _uncached_seconds(run: Run, runs: Sequence[Run]) -> float | None:
    uncached = run.uncached(runs)
    return None if uncached is None else uncached.later_seconds


def _cell(value: float | Sequence[float] | None, unit: Unit) -> str:
    if isinstance(value, Sequence):
        value = value[0] if value else None
    return "" if value is None else write(value, unit)


def _wait_shares(run: Run) -> list[float]:
    waits, computes = dict(run.epochs("data_wait_seconds")), dict(run.epochs("compute_seconds"))
    pairs = [(waits[epoch], computes[epoch]) for epoch in waits if epoch in computes]
    return [wait / (wait + compute) for wait, compute in pairs if wait + compute > 0]

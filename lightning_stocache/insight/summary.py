"""What the dashboard says in figures: a headline for a single run, a table for all.

Both only pick from `Run`; a value that was not logged is left out, never guessed and never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_stocache.insight.panels import Unit, write
from lightning_stocache.insight.runs import Run

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
    speeds = run.epochs("samples_per_second")
    if len(speeds) > 1 and speeds[0][1] > 0:
        against = f"from {write(speeds[0][1], 'samples/s')} to {write(speeds[-1][1], 'samples/s')} samples/s"
        figures.append(("faster than epoch one", f"{speeds[-1][1] / speeds[0][1]:.1f}x", against))
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
        ("run", lambda run: run.name if len(runs) > 1 else ""),
        ("epochs", lambda run: str(run.epoch_count)),
        ("hit rate", lambda run: _cell(run.last("hit_rate"), "%")),
        ("ceiling", lambda run: _cell(run.last("coverage"), "%")),
        ("val hit rate", lambda run: _cell(run.last("hit_rate", "val"), "%")),
        ("filled", lambda run: _cell(run.last("fill_fraction"), "%")),
        ("memory", lambda run: _cell(run.last("memory_bytes"), "bytes")),
        ("budget", lambda run: _cell(run.last("budget_bytes"), "bytes")),
        ("waiting for data", lambda run: _cell(_wait_shares(run)[-1:], "%")),
        (
            "samples/s, first epoch",
            lambda run: _cell([y for _, y in run.epochs("samples_per_second")[:1]], "samples/s"),
        ),
        ("last epoch", lambda run: _cell(run.last("samples_per_second"), "samples/s")),
        ("saved per epoch", lambda run: _cell(run.seconds_saved, "s")),
    ]
    filled = [(head, [tell(run) for run in runs]) for head, tell in columns]
    filled = [(head, cells) for head, cells in filled if any(cells)]
    return [head for head, _ in filled], [list(row) for row in zip(*(cells for _, cells in filled), strict=True)]


def _cell(value: float | Sequence[float] | None, unit: Unit) -> str:
    if isinstance(value, Sequence):
        value = value[0] if value else None
    return "" if value is None else write(value, unit)


def _wait_shares(run: Run) -> list[float]:
    waits, computes = dict(run.epochs("data_wait_seconds")), dict(run.epochs("compute_seconds"))
    pairs = [(waits[epoch], computes[epoch]) for epoch in waits if epoch in computes]
    return [wait / (wait + compute) for wait, compute in pairs if wait + compute > 0]

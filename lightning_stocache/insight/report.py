"""One HTML page of the runs in some folders, which needs no server.

The page is made from `report.html`, a template of jinja2. It has its style and pictures inside, has no script, and
loads nothing. The names of runs come from users: jinja2 and matplotlib escape them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes

from lightning_stocache.insight.charts import (
    BLUE,
    COLOURS,
    GREY,
    ORANGE,
    Bar,
    Chart,
    Line,
    draw_bars,
    draw_lines,
    over,
    svg,
)
from lightning_stocache.insight.runs import Run, find_runs, labels, table
from lightning_stocache.insight.steps import PARTS

__all__ = ["charts", "report"]

_NODES = 6  # the most nodes that are drawn
_OF_PARTS = dict(zip(PARTS, (ORANGE, "#2c86c7", "#00795c", BLUE, "#a34677", GREY), strict=True))

Runs = Mapping[str, Run]
"""Runs by their names in charts; at most as many as there are colours."""


def report(folders: Sequence[Path], output: Path) -> list[str]:
    """Write the page of the runs in these folders.

    Args:
        folders: folders of runs, or folders above them: of CSVLogger, of TensorBoardLogger (needs the extra
            `tensorboard`), or of Hydra, one run or a multirun.
        output: the HTML page. A file that exists is overwritten.

    Returns:
        One sentence for each run that cannot be read.

    Raises:
        LogError: no run can be read.
        OSError: a file cannot be written.
    """
    runs, left_out = find_runs(folders)
    drawn = dict(zip(labels(runs[: len(COLOURS)]), runs, strict=False))
    numbered = "run 1" in drawn  # the names are too long for the charts; the table has them
    names = [f"run {number}: {run.name}" if numbered else run.name for number, run in enumerate(runs, 1)]
    notes = [f"Left out: {sentence}" for sentence in left_out]
    if len(runs) > len(drawn):
        notes.insert(0, f"The charts show the first {len(drawn)} of {len(runs)} runs; the table has all.")
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    text = templates.get_template("report.html").render(
        title="Stochastic cache" if len(runs) == 1 else f"Stochastic cache: {len(runs)} runs",
        about=f"{names[0]}: {_epochs(runs[0])}" if len(runs) == 1 else "side by side, named by what differs",
        names=names,
        table=table(runs),
        colours=COLOURS,
        charts=[(chart, svg(chart)) for chart in charts(drawn)],
        notes=notes,
    )
    output.write_text(text, encoding="utf-8", errors="replace")
    return left_out


def charts(runs: Runs) -> list[Chart]:
    """The charts of some runs, in reading order, without those whose values no run has logged."""
    found = []
    if any(run.epochs("data_wait_seconds") for run in runs.values()):
        caption = "Waiting for data, and the rest. Above the bars: the share of waiting."
        if len(runs) > 1:
            caption += " Of each run the first epoch, and the median of the later ones."
        found.append(Chart("Seconds per epoch", caption, partial(_seconds, runs)))
    for name, of_budget in _sweeps(list(runs.values())).items():
        caption = "Later epochs by the budget" + (f", {name}." if name else ".") + " Dashed: without a cache."
        found.append(Chart("Seconds over the budget", caption, _over_budget(of_budget)))
    if any(run.epochs("hit_rate") for run in runs.values()):
        caption = "Share of samples that came from the cache, per epoch."
        if len(runs) == 1:
            caption += " Dashed: the share that fits."
        found.append(Chart("Hit rate", caption, partial(_hit_rate, runs)))
    if any(run.epochs("step/wait_seconds") for run in runs.values()):
        caption = "Mean seconds of a step, per epoch. Above the bars: the share of waiting."
        found.append(Chart("What a step is made of", caption, partial(_steps, runs)))
    return found


def _epochs(run: Run) -> str:
    count = len(run.epochs("hits") or run.epochs("step/wait_seconds"))
    if not count:
        return "the first epoch is not over yet"
    return "1 epoch; a cache helps from the second epoch on" if count == 1 else f"{count} epochs"


def _seconds(runs: Runs, axes: Axes) -> None:
    """Waiting and the rest: of a single run in each epoch, of several runs in the first and in later epochs."""
    bars = []
    for name, run in runs.items():
        waits, computes = (dict(run.epochs(metric)) for metric in ("data_wait_seconds", "compute_seconds"))
        epochs = [epoch for epoch in waits if epoch in computes]
        groups = [(f"{epoch:.0f}", [epoch]) for epoch in epochs]
        if len(runs) > 1:
            groups = [("1st", epochs[:1]), ("later", epochs[1:])]
        for label, members in groups:
            if members:
                parts = [statistics.median(values[epoch] for epoch in members) for values in (waits, computes)]
                bars.append(Bar(name, label, parts))
    without = next((run.later_seconds for run in runs.values() if run.is_off and run.later_seconds), None)
    compared = ("without a cache", without) if without and len(runs) > 1 else None
    draw_bars(axes, bars, {"waiting": ORANGE, "the rest": BLUE}, compared)


def _steps(runs: Runs, axes: Axes) -> None:
    bars = []
    for name, run in runs.items():
        columns = [dict(run.epochs(f"step/{part}_seconds")) for part in PARTS]
        for epoch in columns[0]:
            bars.append(Bar(name, f"{epoch:.0f}", [max(column.get(epoch, 0.0), 0.0) for column in columns]))
    draw_bars(axes, bars, _OF_PARTS, None)


def _sweeps(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in the budget alone, at least three, by what else is in their names."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        if run.budget is not None and run.later_seconds:
            found.setdefault(run.name_without_budget, []).append(run)
    return {name: members for name, members in found.items() if len({run.budget for run in members}) > 2}


def _over_budget(runs: Sequence[Run]) -> Callable[[Axes], None]:
    """Seconds of later epochs over the share that fits, with ticks at the budgets, and a line without a cache."""
    by_share = sorted(runs, key=lambda run: run.last("coverage") or 0.0)
    points = [(run.last("coverage") or 0.0, run.later_seconds or 0.0) for run in by_share]
    lines = [Line("later", points, BLUE)]
    if by_share[0].is_off:
        lines.append(Line("without", [(share, points[0][1]) for share, _ in points], GREY, "--"))
    ticks = {share: str(run.budget) for (share, _), run in zip(points, by_share, strict=True)}
    return over("budget", ticks, lines)


def _hit_rate(runs: Runs, axes: Axes) -> None:
    """A line for each run; of a single run also the share that fits, and its other stages and nodes."""
    lines = []
    for number, ((name, run), colour) in enumerate(zip(runs.items(), COLOURS, strict=False)):
        lines.append(Line(name or "training", run.epochs("hit_rate"), colour, "osD^"[number % 4] + "-"))
    if len(runs) == 1:
        [run] = runs.values()
        lines.append(Line("fits", run.epochs("coverage"), COLOURS[1], "--"))
        parts = ["val", "test", "predict", *(f"node{node}" for node in range(_NODES))]
        lines += [Line(part.replace("node", "node "), run.epochs(f"{part}/hit_rate"), GREY, "-.") for part in parts]
    draw_lines(axes, lines, "%")

"""A dashboard without a server: one HTML page of the runs in some folders.

The page is made from `report.html`, a template of jinja2. It has its style and pictures inside, has no script, and
loads nothing. The names of runs come from users: jinja2 and matplotlib escape them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from matplotlib.axes import Axes

from lightning_stocache.insight.charts import COLOURS, Bar, Chart, Line, draw_bars, draw_lines, save, svg
from lightning_stocache.insight.runs import Points, Run, Unit, find_runs, labels, table
from lightning_stocache.insight.steps import PARTS

__all__ = ["charts", "report"]

_BLUE, _VERMILION, _GREEN, _PURPLE, _, _SKY, _GREY, _ = COLOURS
_ORANGE, _PALE = "#d98200", "#aab2c0"
_NODES = 6  # the most nodes that are drawn

Runs = Mapping[str, Run]
"""Runs by their names in charts; at most as many as there are colours."""


def report(folders: Sequence[Path], output: Path, png: Path | None = None) -> list[str]:
    """Write the dashboard of the runs in these folders.

    Args:
        folders: folders of runs, or folders above them: of CSVLogger, of TensorBoardLogger (needs the extra
            `tensorboard`), or of Hydra, one run or a multirun.
        output: the HTML page. A file that exists is overwritten.
        png: a picture with the same charts and table, if given.

    Returns:
        One sentence for each run that cannot be read.

    Raises:
        LogError: no run can be read.
        OSError: a file cannot be written.
    """
    runs, left_out = find_runs(folders)
    drawn = dict(zip(labels(runs[: len(COLOURS)]), runs, strict=False))
    panels = charts(drawn)
    numbered = "run 1" in drawn  # the names are too long for the charts; the table has them
    names = [f"run {number}: {run.name}" if numbered else run.name for number, run in enumerate(runs, 1)]
    notes = [f"Left out: {sentence}" for sentence in left_out]
    if len(runs) > len(drawn):
        notes.insert(0, f"The charts show the first {len(drawn)} of {len(runs)} runs; the table has all.")
    templates = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    text = templates.get_template("report.html").render(
        title="Stochastic cache" if len(runs) == 1 else f"Stochastic cache: {len(runs)} runs",
        about=f"{names[0]}: {_epochs(runs[0])}" if len(runs) == 1 else "side by side, named by what sets them apart",
        names=names,
        table=table(runs),
        colours=COLOURS,
        charts=[(panel, svg(panel)) for panel in panels],
        notes=notes,
    )
    output.write_text(text, encoding="utf-8", errors="replace")
    if png is not None:
        save(panels, {"run": names} | table(runs), png)
    return left_out


def charts(runs: Runs) -> list[Chart]:
    """The charts of some runs, in reading order, without those whose values no run has logged."""
    return [
        Chart(title, caption, partial(draw, runs))
        for title, caption, metrics, draw in _CHARTS
        if any(all(map(run.epochs, metrics)) for run in runs.values())
    ]


def _epochs(run: Run) -> str:
    count = len(run.epochs("hits") or run.epochs("step/wait_seconds"))
    if not count:
        return "first epoch not over yet"
    return "1 epoch; a cache helps from the second epoch on" if count == 1 else f"{count} epochs"


def _of_runs(runs: Runs, points: Callable[[Run], Points], alone: str = "") -> list[Line]:
    """A line for each run, with different marks. A single run has no name: the line is called `alone`."""
    drawn = enumerate(zip(runs.items(), COLOURS, strict=False))
    return [Line(name or alone, points(run), colour, "osD^"[n % 4] + "-") for n, ((name, run), colour) in drawn]


def _hit_rate(runs: Runs, axes: Axes) -> None:
    lines = _of_runs(runs, lambda run: run.epochs("hit_rate"), "hit rate")
    if len(runs) == 1:
        [run] = runs.values()
        lines.append(Line("at most", run.epochs("coverage"), _VERMILION, "--"))
        parts = ["val", "test", "predict", *(f"node{node}" for node in range(_NODES))]
        lines += [Line(part.replace("node", "node "), run.epochs(f"{part}/hit_rate"), _GREY, "-.") for part in parts]
    draw_lines(axes, lines, "%")


def _fill(runs: Runs, axes: Axes) -> None:
    lines = _of_runs(runs, lambda run: run.first_epoch("fill_fraction"), "filled")
    draw_lines(axes, lines, "%", "step")


def _speed(runs: Runs, axes: Axes) -> None:
    draw_lines(axes, _of_runs(runs, lambda run: run.epochs("samples_per_second")), "samples/s")


def _memory(runs: Runs, axes: Axes) -> None:
    bars = []
    for name, run in runs.items():
        for stage in ("",) if len(runs) > 1 else ("", "val/", "test/", "predict/"):
            used, budget = run.last(f"{stage}memory_bytes"), run.last(f"{stage}budget_bytes") or 0
            label = name.replace("=", "=\n") or stage.rstrip("/") or "training"
            if used is not None:
                bars.append(Bar("", label, [used, max(budget - used, 0)]))
    draw_bars(axes, bars, {"in use": _BLUE, "granted": _PALE}, "bytes", "")


def _epoch_bars(colours: Mapping[str, str], metrics: Sequence[str], unit: Unit) -> Callable[[Runs, Axes], None]:
    """A function that draws a bar for each epoch of each run that has logged all these metrics."""

    def draw(runs: Runs, axes: Axes) -> None:
        bars = []
        for name, run in runs.items():
            columns = [dict(run.epochs(metric)) for metric in metrics]
            for epoch in sorted(set.intersection(*map(set, columns))):
                bars.append(Bar(name, f"{epoch:.0f}", [max(column[epoch], 0.0) for column in columns]))
        draw_bars(axes, bars, colours, unit)

    return draw


_BYTES = ("bytes_from_cache", "bytes_from_source")
_SECONDS = ("data_wait_seconds", "compute_seconds")
_STEP = tuple(f"step/{part}_seconds" for part in PARTS)
_OF_PARTS = dict(zip(PARTS, (_ORANGE, _SKY, _GREEN, _BLUE, _PURPLE, _GREY), strict=True))
_CHARTS = (  # title, caption, the metrics that must have been logged, and what draws them
    (
        "Hit rate",
        "Share of samples from memory, per epoch. For a single run: dashed, share with a slot; dotted, expected.",
        ("hit_rate",),
        _hit_rate,
    ),
    (
        "Fill in the first epoch",
        "Share of the slots that are ready, over the steps of the first epoch. A small cache reaches 100 %, too.",
        ("live/fill_fraction",),
        _fill,
    ),
    (
        "Where the bytes came from",
        "Bytes per epoch. Above the bars: the share from the cache.",
        _BYTES,
        _epoch_bars({"cache": _BLUE, "source": _ORANGE}, _BYTES, "bytes"),
    ),
    (
        "Waiting for data",
        "Seconds of waiting and computing per epoch. Above the bars: the share of waiting.",
        _SECONDS,
        _epoch_bars({"waiting": _ORANGE, "computing": _BLUE}, _SECONDS, "s"),
    ),
    ("Samples per second", "Training samples of all ranks per second, per epoch.", ("samples_per_second",), _speed),
    ("Memory against budget", "Bytes in use and granted, over all nodes.", ("memory_bytes",), _memory),
    (
        "What a step is made of",
        "Mean seconds of a step, per epoch. Above the bars: the share of waiting.",
        ("step/wait_seconds",),
        _epoch_bars(_OF_PARTS, _STEP, "s"),
    ),
)

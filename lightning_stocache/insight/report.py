"""The dashboard without a server: from the folders of runs to one page that can be opened, mailed and kept.

The page is `report.html`, a template of jinja2, and stands by itself: style and pictures inside, no script, nothing
loaded, and it forbids itself both. Names of runs were written by others: jinja2 and matplotlib escape them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_stocache.insight.runs import Run, find_runs, labels, table

__all__ = ["report"]


def report(folders: Sequence[Path], output: Path, png: Path | None = None) -> list[str]:
    r"""Write the dashboard of the runs in these folders.

    Args:
        folders: Run folders, or folders above them: of CSVLogger, of TensorBoardLogger (needs the extra
            `tensorboard`), of Hydra, one run or a multirun.
        output: The HTML page, written anew.
        png: Where to draw the same as a picture, too.

    Returns:
        One sentence for each run below the folders that had to be left out.

    Raises:
        LogError: There is no run that could be read.
        ModuleNotFoundError: The extra `report` is not installed; the message says how to have it.
        OSError: A file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> text = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"
        >>> _ = (folder / "metrics.csv").write_text(text)
        >>> report([folder], folder / "report.html"), (folder / "report.html").stat().st_size > 0
        ([], True)
    """
    try:
        from jinja2 import Environment, FileSystemLoader

        from lightning_stocache.insight.charts import CHARTS, COLOURS, save, svg
    except ModuleNotFoundError as error:
        needed = f"the report needs {error.name}, which is not installed"
        raise ModuleNotFoundError(f'{needed}: pip install "lightning-stocache[report]"', name=error.name) from error
    runs, left_out = find_runs(folders)
    drawn = dict(zip(labels(runs[: len(COLOURS)]), runs, strict=False))
    timed = any(run.epochs("step/wait_seconds") for run in drawn.values())
    charts = CHARTS if timed else CHARTS[:-1]
    numbered = "run 1" in drawn  # the names, which the table has, are too long for the charts
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
        charts=[(chart, svg(chart, drawn)) for chart in charts],
        notes=notes,
    )
    output.write_text(text, encoding="utf-8", errors="replace")
    if png is not None:
        save(charts, drawn, {"run": names} | table(runs), png)
    return left_out


def _epochs(run: Run) -> str:
    count = len(run.ends["train"])
    if not count:
        return "first epoch not over yet"
    return "1 epoch; a cache helps from the second epoch on" if count == 1 else f"{count} epochs"

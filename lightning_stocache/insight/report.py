"""The dashboard without a server: from the folders of runs to one page that can be opened, mailed and kept.

logs -> runs -> panels and summary -> chart -> page; `picture` draws the same panels as a PNG. Nothing here knows
Lightning or torch, and nothing is sent or fetched.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_stocache.insight.page import page
from lightning_stocache.insight.runs import find_runs

__all__ = ["report"]


def report(folders: Sequence[Path], output: Path, png: Path | None = None) -> list[str]:
    r"""Write the dashboard of the runs in these folders.

    Args:
        folders: Run folders, or folders above them: of CSVLogger, of TensorBoardLogger (needs the extra
            `tensorboard`), of Hydra, one run or a multirun.
        output: The HTML page, written anew.
        png: Where to draw the panels as a picture too (needs the extra `report`).

    Returns:
        One sentence for each run below the folders that had to be left out.

    Raises:
        LogError: There is no run that could be read.
        ModuleNotFoundError: A picture is asked for and matplotlib is not installed.
        OSError: A file cannot be written.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> text = "epoch,step,stocache/hit_rate,stocache/hits\n0,9,0.5,5\n"
        >>> _ = (folder / "metrics.csv").write_text(text)
        >>> report([folder], folder / "report.html"), (folder / "report.html").stat().st_size > 0
        ([], True)
    """
    runs, left_out = find_runs(folders)
    output.write_text(page(runs, left_out), encoding="utf-8", errors="replace")
    if png is not None:
        from lightning_stocache.insight.picture import save

        save(runs, png)
    return left_out

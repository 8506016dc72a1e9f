"""The look of all figures: colours and marks that the colour-blind can tell apart, units, and the machine below."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["COLOURS", "MARKS", "legend", "logarithmic", "new", "save"]

# Okabe and Ito's palette, dark ones first; every series has a mark of its own too.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255", "#888888")
MARKS = ("o", "s", "D", "^", "v", "P", "X", "*", "<")


def new(rows: int = 1, columns: int = 1, *, width: float = 4.6, height: float = 3.6, **options: Any) -> tuple[Any, Any]:
    """A figure and its axes `[rows, columns]`, each of so many inches."""
    import matplotlib  # here: a process that measures does not need it

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update(
        {
            "font.size": 10,
            "axes.grid": True,
            "axes.axisbelow": True,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.titlesize": 10.5,
            "grid.color": "#dddddd",
            "grid.linewidth": 0.7,
            "errorbar.capsize": 3,
            "legend.frameon": False,
            "legend.fontsize": 9,
        }
    )
    made, axes = pyplot.subplots(
        rows, columns, figsize=(width * columns, height * rows + 0.6), squeeze=False, layout="constrained", **options
    )
    return made, axes


def logarithmic(axis: Any) -> None:
    """A logarithmic y axis with plain numbers on it."""
    from matplotlib.ticker import LogLocator

    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
    axis.yaxis.set_minor_formatter("{x:g}")
    axis.tick_params(axis="y", which="minor", labelsize=8)


def legend(made: Any, axis: Any, columns: int) -> None:
    """One legend for the whole figure, of what is drawn in one of its axes."""
    made.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=columns)


def save(made: Any, path: Path, title: str, machine: str) -> None:
    """Write the PNG, with what it shows above and where it was measured below."""
    bold = {"size": 12, "weight": "bold"}
    if made.legends:  # as the legend's own title: constrained layout puts the two on top of each other
        made.legends[0].set_title(title, prop=bold)
    else:
        made.suptitle(title, **bold)
    made.supxlabel(machine, fontsize=7.5, color="#666666")
    made.savefig(path, dpi=140)
    print(path)

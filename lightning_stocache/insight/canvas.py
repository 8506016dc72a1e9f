"""A figure of matplotlib in this package's look, that ends as a PNG file.

No pyplot, so no window, no global state and no display is needed. A name with a dollar sign is not a formula.
matplotlib is an extra, imported only when a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["COLOURS", "DIM", "RULE", "canvas"]

_INK, DIM, RULE = "#1b2330", "#667085", "#e4e7ec"
# Those of the page, in the same order: after Okabe and Ito, which the colour-blind tell apart.
COLOURS = ("#0072b2", "#c2500a", "#00795c", "#a34677", "#8a6a00", "#2c86c7", "#59616e", "#7a4fc9")


@contextmanager
def canvas(path: Path, width: float, height: float, *, gap: float = 0.15) -> Iterator[Figure]:
    """A figure to be drawn into; it is written when the block ends without an error.

    Args:
        path: the PNG file.
        width: in inches, of 120 pixels.
        height: likewise.
        gap: inches above and below each of its axes.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            'a PNG needs matplotlib, which is not installed: pip install "lightning-stocache[report]"'
        ) from error
    style: Any = {"font.family": "sans-serif", "font.size": 9, "text.parse_math": False, "text.color": _INK}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.15, h_pad=gap))
        yield figure
        figure.savefig(path, format="png", dpi=120)

"""What steps were made of, written down: a table with sentences, and a picture.

How fast a loader could be is not seen in a step that did not wait for it. What is said is what follows: the steps as
they were, the same steps without waiting, and, for a loader that works only while it is asked (`ahead=False`: a
DataLoader without workers), what it gives while it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning_stocache.insight.breakdown import PARTS, Breakdown
from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.panels import Bar, Bars
from lightning_stocache.insight.picture import save as save_picture

__all__ = ["as_text", "bars_of", "save", "sentences"]

_COLOURS = [1, 5, 2, 0, 3, 6]  # waiting stands out, the rest is grey
_NAMES = ["waiting", *PARTS[1:]]
_WAITS = 0.03  # below this share of a step, waiting is what asking costs
_COLUMNS = 4  # epochs whose shares stand in the table
_MOST_BARS = 16  # epochs in the picture


def as_text(epochs: Sequence[Breakdown], *, ahead: bool = True) -> str:
    """The table over all steps, the parts' shares by epoch, and what follows.

    Args:
        epochs: the steps of each epoch, in their order; not empty.
        ahead: whether the loader works while a step runs.

    Example:
        >>> epoch = Breakdown()
        >>> for _ in range(10):
        ...     epoch.add({"wait": 0.010, "forward": 0.004, "backward": 0.006}, samples=32)
        >>> print(as_text([epoch]))
        part       ms a step    p50    p95  share
        waiting        10.00   9.98   9.98   50 %
        transfer        0.00   0.00   0.00    0 %
        forward         4.00   4.00   4.00   20 %
        backward        6.00   5.99   5.99   30 %
        optimizer       0.00   0.00   0.00    0 %
        rest            0.00   0.00   0.00    0 %
        step           20.00  19.99  19.99
        10 steps, 50 % of the time waiting for data. The loader gives 1,600 samples/s, the steps could take 3,200.
    """
    whole, shown = Breakdown.sum(epochs), _shown(len(epochs))
    rows = [["part", "ms a step", "p50", "p95", "share", *(f"epoch {number}" for number in shown)]]
    for part, name in zip(PARTS, _NAMES, strict=True):
        times = whole.mean(part), whole.quantile(part, 0.5), whole.quantile(part, 0.95)
        shares = whole.share(part), *(epochs[number].share(part) for number in shown)
        rows.append([name, *map(_milliseconds, times), *(f"{100 * share:.0f} %" for share in shares)])
    times = whole.step_seconds, whole.quantile("step", 0.5), whole.quantile("step", 0.95)
    means = (epochs[number].step_seconds for number in shown)
    rows.append(["step", *map(_milliseconds, times), "", *map(_milliseconds, means)])
    return "\n".join([*aligned(rows, left=1), *sentences(whole, ahead=ahead)])


def sentences(steps: Breakdown, *, ahead: bool = True) -> list[str]:
    """What a breakdown says about the loader; nothing without a step.

    Args:
        steps: of a run.
        ahead: whether the loader works while a step runs.

    Example:
        >>> steps = Breakdown()
        >>> steps.add({"forward": 0.01}, samples=8)
        >>> sentences(steps)
        ['1 step, 0 % of the time waiting for data. Steps take 800 samples/s, most of their time in forward.']
    """
    if not steps.total > 0:
        return []
    unit, amount = ("samples/s", steps.samples) if steps.samples else ("steps/s", steps.steps)
    waited, share = steps.seconds["wait"], steps.share("wait")
    rate, alone = amount / steps.total, amount / (steps.total - waited) if steps.total > waited else math.inf
    said = f"{steps.steps:,} step{'s' * (steps.steps != 1)}, {100 * share:.0f} % of the time waiting for data."
    if share < _WAITS:
        most = max(PARTS[1:], key=lambda part: steps.seconds[part])
        return [f"{said} Steps take {_rate(rate)} {unit}, most of their time in {most}."]
    gives = rate if ahead else amount / waited
    beside = "" if ahead else f" while it is asked, {_rate(rate)} in all"
    return [f"{said} The loader gives {_rate(gives)} {unit}{beside}, the steps could take {_rate(alone)}."]


def bars_of(named: Mapping[str, Breakdown], title: str, caption: str, x: str) -> Bars:
    """Mean seconds of each part, one bar for each name; above a bar stands the share of waiting."""
    bars = [
        Bar(name, [steps.mean(part) for part in PARTS], f"{100 * steps.share('wait'):.0f} %")
        for name, steps in named.items()
    ]
    return Bars(title, caption, x, "s", _NAMES, _COLOURS, bars)


def save(epochs: Sequence[Breakdown], path: Path, *, ahead: bool = True) -> None:
    """Draw the parts of a step by epoch into a PNG file.

    Raises:
        ModuleNotFoundError: matplotlib is not installed; the message says how to have it.
        OSError: the file cannot be written.
    """
    every = math.ceil(len(epochs) / _MOST_BARS)
    named = {str(number): epochs[number] for number in range(0, len(epochs), every)}
    said = " ".join(sentences(Breakdown.sum(epochs), ahead=ahead))
    caption = f"Mean seconds; above a bar the share of waiting for data. {said}"
    panel = bars_of(named, "What a training step is made of", caption, "epoch")
    save_picture([panel], path, columns=1)


def _shown(count: int) -> list[int]:
    """The epochs that stand in the table: with one, it is the whole; the first two differ where a cache fills."""
    if count <= _COLUMNS:
        return list(range(count)) if count > 1 else []
    return [0, 1, count // 2, count - 1]


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"

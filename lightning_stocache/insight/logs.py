"""The values that a logger left in a folder: metrics.csv of CSVLogger, or the event files of TensorBoardLogger.

Both become rows in the order of their steps: a dict from column (or tag) to value. Only `epoch`, `step` and what begins
with `stocache/` is kept, and only finite numbers. TensorBoard stores each tag by itself: the values of one step become
two rows, the live ones first, then those of the epoch that ended there.
"""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

from lightning_stocache.insight.layout import LIVE

__all__ = ["LogError", "Row", "log_folders", "read_log"]

Row = dict[str, float]

_CSV = "metrics.csv"


class LogError(ValueError):
    """A log that cannot be read; the message is one sentence for people."""


def log_folders(folder: Path) -> list[Path]:
    """The folders at or below this one into which a logger has written; those with a metrics.csv first."""
    found = (path.parent for pattern in (_CSV, "events.out.tfevents.*") for path in sorted(folder.rglob(pattern)))
    return list(dict.fromkeys(found))


def read_log(folder: Path) -> list[Row]:
    """The rows of a folder's log; of metrics.csv, if there are both.

    Args:
        folder: Where the file lies, not one above it.

    Raises:
        LogError: The log cannot be read or holds no `stocache/` value; or TensorBoard is needed to read it and is not
            installed.
    """
    rows = _read_csv(folder / _CSV) if (folder / _CSV).is_file() else _read_events(folder)
    if not any(name.startswith("stocache/") for row in rows for name in row):
        raise LogError(
            f"{folder} holds no stocache/ value: was CacheMonitor or StochasticCache among the Trainer's callbacks, "
            "and did the run get as far as its first logging step?"
        )
    return rows


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            rows = [_row(line) for line in csv.DictReader(file) if None not in line.values()]  # None: it was cut off
    except (OSError, csv.Error) as error:
        raise LogError(f"{path} cannot be read: {error}") from error
    return [row for row in rows if "step" in row]


def _row(cells: dict[str, Any]) -> Row:
    row = {}
    for name, cell in cells.items():
        if name and (name in ("epoch", "step") or name.startswith("stocache/")):
            try:
                row[name] = float(cell)
            except ValueError:
                continue  # not logged in this row
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _read_events(folder: Path) -> list[Row]:
    try:
        from tensorboard.backend.event_processing import event_accumulator as reader
    except ModuleNotFoundError as error:
        raise LogError(
            f"{folder} holds TensorBoard events, and reading those needs TensorBoard, which is not installed: "
            'pip install "lightning-stocache[tensorboard]", or log with CSVLogger'
        ) from error
    events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0}, purge_orphaned_data=False)
    events.Reload()
    rows: dict[tuple[int, bool], Row] = {}
    for tag in events.Tags()[reader.SCALARS]:
        of_epoch = not tag.startswith(LIVE)
        for event in events.Scalars(tag):
            rows.setdefault((event.step, of_epoch), {"step": event.step})[tag] = event.value
    return [_row(rows[key]) for key in sorted(rows)]

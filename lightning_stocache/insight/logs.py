"""The values that a logger left in a folder: metrics.csv of CSVLogger, or the event files of TensorBoardLogger.

Both become rows, in the order in which they were logged: one dict per `log_metrics` call, from column (or tag) to
value. Only `epoch`, `step` and what begins with `stocache/` is kept, and only finite numbers.

TensorBoard stores each tag by itself. A row is what was logged together, so it is put together again: the values of
one step, apart by whether the step also holds a value that is logged at an epoch's end only. Live values have keys of
their own (`LIVE`), and come before the epoch's end that has their step. In older logs they have the keys of epochs;
there a live value carries the count of steps done, an epoch's end the index of its last step.

What is read here was written by somebody else, perhaps half: whatever is wrong with it is a `LogError` of one sentence.
"""

from __future__ import annotations

import csv
import math
from importlib import import_module
from pathlib import Path
from typing import Any

from lightning_stocache.insight.layout import LIVE

__all__ = ["LogError", "Row", "has_log", "is_epoch_end", "read_log"]

Row = dict[str, float]

_CSV = "metrics.csv"
_EVENTS = "events.out.tfevents.*"
_EPOCH_END_ONLY = ("hits", "misses", "bypasses", "fills", "bytes_from_cache", "bytes_from_source", "coverage")
_OTHER_STAGES = ("val/", "test/", "predict/")


class LogError(ValueError):
    """A log that cannot be read; the message is one sentence for people."""


def has_log(folder: Path) -> bool:
    """Whether a logger has written into this very folder."""
    return (folder / _CSV).is_file() or any(folder.glob(_EVENTS))


def read_log(folder: Path) -> list[Row]:
    """The rows of a folder's log; of metrics.csv, if there are both.

    Args:
        folder: Where the file lies, not one above it.

    Raises:
        LogError: The log is empty, cut off, not such a log, or holds no `stocache/` value; or TensorBoard is needed to
            read it and is not installed.
    """
    path = folder / _CSV
    rows = _read_csv(path) if path.is_file() else _read_events(folder)
    if not any(name.startswith("stocache/") for row in rows for name in row):
        raise LogError(
            f"{path if path.is_file() else folder} holds no stocache/ value: was CacheMonitor or StochasticCache among "
            "the Trainer's callbacks, and did the run get as far as its first logging step?"
        )
    return rows


def is_epoch_end(row: Row, prefix: str = "stocache/") -> bool:
    """Whether a row was logged at the end of an epoch, rather than live at a step.

    Example:
        >>> is_epoch_end({"step": 62, "stocache/hit_rate": 0.5, "stocache/hits": 40}), is_epoch_end({"step": 10})
        (True, False)
    """
    return any(prefix + name in row for name in _EPOCH_END_ONLY)


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            lines = csv.reader(file)
            header = next(lines, None)
            if not header:
                raise LogError(f"{path} is empty: the run has not logged anything yet, or was killed before it did")
            if "step" not in header:
                raise LogError(f"{path} is not a metrics.csv of CSVLogger: it has no column named step")
            # A line that is shorter than the header was cut off, and so perhaps was its last number.
            return [_row(zip(header, line, strict=True)) for line in lines if len(line) == len(header)]
    except (OSError, csv.Error) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


def _row(cells: Any) -> Row:
    row = {}
    for name, text in cells:
        if name in ("epoch", "step") or name.startswith("stocache/"):
            try:
                value = float(text)
            except ValueError:
                continue  # not logged in this row
            if math.isfinite(value):
                row[name] = value
    return row


def _read_events(folder: Path) -> list[Row]:
    try:
        reader = import_module("tensorboard.backend.event_processing.event_accumulator")
        protobuf = import_module("google.protobuf.message")
    except ModuleNotFoundError as error:
        raise LogError(
            f"{folder} holds TensorBoard events, and reading those needs TensorBoard, which is not installed: "
            'pip install "lightning-stocache[tensorboard]", or log with CSVLogger'
        ) from error
    # 0 keeps every scalar; of everything else, which may be large, only one is kept.
    keep = {**dict.fromkeys(reader.DEFAULT_SIZE_GUIDANCE, 1), reader.SCALARS: 0}
    events = reader.EventAccumulator(str(folder), size_guidance=keep, purge_orphaned_data=False)
    try:
        events.Reload()
    except (protobuf.DecodeError, OSError, ValueError) as error:  # TensorBoard itself passes over what is cut off
        raise LogError(f"{folder} holds TensorBoard events that cannot be read: {error}") from error
    tags = [tag for tag in events.Tags()[reader.SCALARS] if tag == "epoch" or tag.startswith("stocache/")]
    scalars = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}
    ends = {stage: _steps_of_epoch_ends(scalars, stage) for stage in ("", *_OTHER_STAGES)}

    rows: dict[tuple[int, bool], Row] = {}
    for tag, points in scalars.items():
        stage = next((stage for stage in _OTHER_STAGES if tag.startswith(f"stocache/{stage}")), "")
        for step, value in points:  # of two values at one step the last one is the epoch's, and overwrites
            at_end = (step in ends[stage] or tag == "epoch") and not tag.startswith(LIVE)
            if math.isfinite(value):
                rows.setdefault((step if at_end else step - 1, at_end), {"step": step})[tag] = value
    return [rows[key] for key in sorted(rows)]


def _steps_of_epoch_ends(scalars: dict[str, list[tuple[int, float]]], stage: str) -> set[int]:
    tags = (f"stocache/{stage}{name}" for name in _EPOCH_END_ONLY)
    return {step for tag in tags for step, _ in scalars.get(tag, ())}

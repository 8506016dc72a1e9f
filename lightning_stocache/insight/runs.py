"""Runs as the loggers leave them in folders: found, named, read and summed up in figures.

A run is a folder with a log, or the Hydra folder around it: its name is then made of the overrides that set it apart
from the runs beside it, else of its path. A log is the metrics.csv of CSVLogger, or the event files of
TensorBoardLogger where there is no CSV. It becomes rows in the order of its steps: finite numbers by column (or tag),
of `epoch`, `step` and what begins with `stocache/`. Of TensorBoard's events the live values of a step are one row, and
those of the epoch that ended there are the next. Files are only read.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from lightning_stocache.insight.metrics import LIVE
from lightning_stocache.node.budget import format_bytes

__all__ = ["LogError", "Points", "Run", "Unit", "find_runs", "labels", "table", "write"]

Points = Sequence[tuple[float, float]]
Row = dict[str, float]
Unit = Literal["%", "bytes", "s", "samples/s"]

_STAGES = {"train": "stocache/", "val": "stocache/val/", "test": "stocache/test/", "predict": "stocache/predict/"}


class LogError(ValueError):
    """Folders without a run, or a log that cannot be read; the message is one sentence for people."""


@dataclass(frozen=True)
class Run:
    """The log of one run.

    Args:
        name: what sets it apart from the other runs.
        rows: its log, in the order in which it was written.

    Example:
        >>> live = {"step": 1, "stocache/live/hit_rate": 0.1}
        >>> run = Run("half", [live, {"epoch": 0, "step": 9, "stocache/hit_rate": 0.5, "stocache/hits": 5}])
        >>> run.last("hit_rate"), run.live("hit_rate"), run.stages
        (0.5, [(1, 0.1)], ['train'])
    """

    name: str
    rows: Sequence[Row] = field(repr=False)

    @cached_property
    def ends(self) -> dict[str, list[Row]]:
        """The rows that were logged at the ends of each stage's epochs: they have counts, or a StepTimer's means."""
        timed = [row for row in self.rows if "epoch" in row and "stocache/step/wait_seconds" in row]
        ends = {stage: [row for row in self.rows if prefix + "hits" in row] for stage, prefix in _STAGES.items()}
        return ends | {"train": ends["train"] or timed}

    @property
    def stages(self) -> list[str]:
        """The stages that ended an epoch, training first."""
        return [stage for stage in _STAGES if self.ends[stage]]

    @cached_property
    def nodes(self) -> list[int]:
        """Numbers of the nodes, if there were several."""
        found = (re.match(r"stocache/node(\d+)/", name) for row in self.rows for name in row)
        return sorted({int(match[1]) for match in found if match})

    def epochs(self, metric: str, stage: str = "train") -> Points:
        """Pairs of epoch and value, in order; where the epochs of several fits overlap, they are numbered through."""
        rows, key = self.ends[stage], _STAGES[stage] + metric
        numbers = [row.get("epoch", float(index)) for index, row in enumerate(rows)]
        if any(after <= before for before, after in pairwise(numbers)):
            numbers = [float(index) for index in range(len(rows))]
        return [(number, row[key]) for number, row in zip(numbers, rows, strict=True) if key in row]

    def last(self, metric: str, stage: str = "train") -> float | None:
        """The value of the last epoch that has one; of training in its first epoch, the last live value."""
        first_epoch = stage == "train" and not self.ends["train"]
        points = self.live(metric) if first_epoch else self.epochs(metric, stage)
        return points[-1][1] if points else None

    def live(self, metric: str, *, first_epoch: bool = False) -> Points:
        """Pairs of step and value while training ran; of the first epoch, its end included, or of all."""
        points = {row["step"]: row[LIVE + metric] for row in self.rows if LIVE + metric in row}
        if first_epoch and self.ends["train"]:
            end = self.ends["train"][0]
            points = {step: value for step, value in points.items() if step <= end["step"]}
            if f"stocache/{metric}" in end:
                points[end["step"]] = end[f"stocache/{metric}"]
        return sorted(points.items())

    @cached_property
    def epoch_seconds(self) -> list[float]:
        """Seconds of each epoch's training loop: the samples that it was served, at its speed."""
        counts = [dict(self.epochs(metric)) for metric in ("hits", "misses", "bypasses")]
        speeds = [(epoch, speed) for epoch, speed in self.epochs("samples_per_second") if speed > 0]
        return [sum(count.get(epoch, 0.0) for count in counts) / speed for epoch, speed in speeds]

    @property
    def later_seconds(self) -> float | None:
        """Seconds of an epoch after the first: the median of all."""
        return statistics.median(self.epoch_seconds[1:]) if len(self.epoch_seconds) > 1 else None


def write(value: float | None, unit: Unit) -> str:
    """Write a value for people; what is not known is empty.

    Example:
        >>> write(0.4996, "%"), write(1, "%"), write(3 * 2**20, "bytes"), write(0.0123, "s"), write(4321.9, "samples/s")
        ('50 %', '100 %', '3 MiB', '0.012 s', '4,322')
    """
    if value is None:
        return ""
    if unit == "%":
        return f"{100 * value:.1f}".removesuffix(".0") + " %"
    if unit == "bytes":
        return format_bytes(int(value))
    digits = f"{value:.2g}" if abs(value) < 10 else f"{value:.1f}".removesuffix(".0")
    if abs(value) >= 100:
        digits = f"{value:,.0f}"
    return f"{digits} s" if unit == "s" else digits


def table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The figures of all runs by column, without columns that are empty. What was not logged is empty, never 0."""
    rows = [_figures(run, runs) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: cells for name, cells in columns.items() if any(cells)}


def _figures(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    before, after = next(iter(run.epoch_seconds), None), run.later_seconds
    same = [other for other in runs if _but_for_budget(other) == _but_for_budget(run)]
    uncached = next((other.later_seconds for other in same if other is not run and other.last("coverage") == 0), None)
    computes = dict(run.epochs("compute_seconds"))
    pairs = [(wait, wait + computes.get(epoch, 0.0)) for epoch, wait in run.epochs("data_wait_seconds")]
    waits = [wait / whole for wait, whole in pairs if whole > 0]
    return {
        "epochs": str(len(run.ends["train"])),
        "hit rate": write(run.last("hit_rate"), "%"),
        "at most": write(run.last("coverage"), "%"),
        "slots filled": write(run.last("fill_fraction"), "%"),
        "epoch one": write(before, "s"),
        "later epochs": write(after, "s"),
        "faster than epoch one": _times(before, after),
        "faster than budget=0": _times(uncached, after),
        "waiting, epoch one": write(waits[0] if waits else None, "%"),
        "waiting, last epoch": write(waits[-1] if len(waits) > 1 else None, "%"),
        "memory": write(run.last("memory_bytes"), "bytes"),
        "budget": write(run.last("budget_bytes"), "bytes"),
        "val hit rate": write(run.last("hit_rate", "val"), "%"),
    }


def _times(before: float | None, after: float | None) -> str:
    return f"{before / after:.1f}x" if before is not None and after else ""


def _but_for_budget(run: Run) -> list[str]:
    return [override for override in run.name.split(", ") if not override.partition("=")[0].endswith("budget")]


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Find and read the runs in these folders and below.

    Args:
        folders: folders of runs, or folders above them.

    Returns:
        The runs, in the order of their paths, and one sentence for each that had to be left out.

    Raises:
        LogError: one of the folders is not a folder or has no log below it, or no run at all could be read.
    """
    logs: dict[Path, Path] = {}  # by the run's folder
    for folder in folders:
        if not folder.is_dir():
            why = "is a file: give the folder that it lies in" if folder.exists() else "does not exist"
            raise LogError(f"{folder} {why}")
        patterns = ("metrics.csv", "events.out.tfevents.*")  # of two loggers in one Hydra folder the CSV is read
        found = [path.parent for pattern in patterns for path in sorted(folder.resolve().rglob(pattern))]
        if not found:
            raise LogError(f"{folder} holds no run: no metrics.csv (CSVLogger) nor TensorBoard event file lies in it")
        for log in found:  # outputs/date/time/csv/version_0: the Hydra folder is at most three above
            above = (each for each in (log, *log.parents[:3]) if (each / ".hydra").is_dir())
            logs.setdefault(next(above, log), log)
    homes = sorted(logs, key=_numbered)
    runs, problems = [], []
    for name, home in zip(_names(homes), homes, strict=True):
        try:
            runs.append(Run(name, _read(logs[home])))
        except LogError as error:
            problems.append(str(error))
    if not runs:
        raise LogError(problems[0])
    return runs, problems


def labels(runs: Sequence[Run]) -> list[str]:
    """Names that are short enough to stand in a chart, and differ: overrides without their groups, or numbers.

    Example:
        >>> def named(*names):
        ...     return [Run(name, []) for name in names]
        >>> labels(named("cache.budget=0", "cache.budget=50%")), labels(named("data.root=/mnt/first", "data.root=/mnt"))
        (['budget=0', 'budget=50%'], ['run 1', 'run 2'])
        >>> labels(named("lightning_logs"))
        ['']
    """
    if len(runs) == 1:
        return [""]
    names = [re.sub(r"[^,= ]*\.(?=[^,=]*=)", "", run.name) for run in runs]
    if max(map(len, names)) <= (14 if len(runs) <= 4 else 8) and len(set(names)) == len(names):
        return names
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def _numbered(home: Path) -> list[int | str]:
    """A key by which version_10 comes after version_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(home))]


def _names(homes: Sequence[Path]) -> list[str]:
    """Each run by the overrides that not all have; where there are none, by its path below what is common to all."""
    overrides = [_overrides(home) for home in homes]
    common = set.intersection(*map(set, overrides)) if len(homes) > 1 else set()
    above = Path(os.path.commonpath([home.parent for home in homes]))
    paths = [str(home.relative_to(above)) for home in homes]
    names = [
        ", ".join(override for override in listed if override not in common) or path
        for listed, path in zip(overrides, paths, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in zip(names, paths, strict=True)]


def _overrides(home: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]  # comes with hydra-core

    try:
        listed = yaml.safe_load((home / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # the path will do as a name
    return [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []


def _read(folder: Path) -> list[Row]:
    rows = _read_csv(folder / "metrics.csv") if (folder / "metrics.csv").is_file() else _read_events(folder)
    rows = [row for row in rows if "step" in row]
    if not any(name.startswith("stocache/") for row in rows for name in row):
        raise LogError(
            f"{folder} holds no stocache/ value: was CacheMonitor or StochasticCache among the Trainer's callbacks, "
            "and did the run get as far as its first logging step?"
        )
    return rows


def _read_csv(path: Path) -> list[Row]:
    try:
        with path.open(newline="", encoding="utf-8", errors="replace") as file:
            return [_row(line) for line in csv.DictReader(file) if None not in line.values()]  # None: it was cut off
    except (OSError, csv.Error) as error:
        raise LogError(f"{path} cannot be read: {error}") from error


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
        for event in events.Scalars(tag):
            rows.setdefault((event.step, not tag.startswith(LIVE)), {"step": event.step})[tag] = event.value
    return [_row(rows[key]) for key in sorted(rows)]

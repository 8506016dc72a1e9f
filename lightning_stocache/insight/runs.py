"""The runs that loggers have left in folders: find, name and read them, and sum them up in a table.

A run is a folder with a log, or the Hydra folder around it. A log is the metrics.csv of CSVLogger, or the event files
of TensorBoardLogger if there is no CSV. Its rows have finite numbers in the columns `epoch`, `step`, and all columns
that begin with `stocache/`. TensorBoard's events become two rows per step: the live values, and the epoch's values.
"""

from __future__ import annotations

import csv
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_stocache.insight.metrics import LIVE, seconds
from lightning_stocache.node.budget import format_bytes

__all__ = ["LogError", "Points", "Run", "Unit", "find_runs", "labels", "table", "write"]

Points = Sequence[tuple[float, float]]
Row = dict[str, float]
Unit = Literal["%", "bytes", "s"]


class LogError(ValueError):
    """A folder without a run, or a log that cannot be read. The message is one sentence."""


@dataclass(frozen=True)
class Run:
    """The log of one run: a name that no other run has, its overrides, and the rows in the order of the log."""

    name: str
    rows: Sequence[Row] = field(repr=False)
    overrides: Mapping[str, str] = field(default_factory=dict)

    def epochs(self, metric: str) -> Points:
        """Pairs of epoch and value, in order. The metric of another stage than training begins with the stage.

        Of several validations in an epoch, the last.
        """
        key = f"stocache/{metric}"
        return list({row.get("epoch", 0.0): row[key] for row in self.rows if key in row}.items())

    def last(self, metric: str) -> float | None:
        """The value of the last epoch."""
        points = self.epochs(metric)
        return points[-1][1] if points else None

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of the training in each epoch."""
        return [seconds for _, seconds in self.epochs("epoch_seconds")]

    @property
    def later_seconds(self) -> float | None:
        """The median of the seconds of all epochs after the first."""
        return statistics.median(self.epoch_seconds[1:]) if len(self.epoch_seconds) > 1 else None

    @property
    def is_off(self) -> bool:
        """Whether nothing was cached."""
        return self.last("coverage") == 0

    @property
    def budget(self) -> str | None:
        """The budget in the overrides, if there is one."""
        return next((value for key, value in self.overrides.items() if key.endswith("budget")), None)

    @property
    def name_without_budget(self) -> str:
        """The overrides of the name, without that of the budget."""
        return ", ".join(part for part in self.name.split(", ") if not re.match(r"\S*budget=", part))


def write(value: float | None, unit: Unit) -> str:
    """A value as text: "50 %", "3 MiB", "12 ms", "4,322"; empty for None."""
    if value is None:
        return ""
    if unit == "%":
        return f"{100 * value:.1f}".removesuffix(".0") + " %"
    if unit == "s":
        return seconds(value)
    return format_bytes(int(value))


def table(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The table of all runs: cells by column, without empty columns. A value that was not logged is empty, never 0."""
    rows = [_figures(run, runs) for run in runs]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    return {name: cells for name, cells in columns.items() if any(cells)}


def _figures(run: Run, runs: Sequence[Run]) -> dict[str, str]:
    first, later = next(iter(run.epoch_seconds), None), run.later_seconds
    others = [each for each in runs if each.is_off and each.name_without_budget == run.name_without_budget]
    without = next((each.later_seconds for each in others if each is not run), None)
    waits = [wait for _, wait in run.epochs("data_wait_seconds")]
    return {
        "epochs": str(len(run.epochs("hits"))),
        "hit rate": write(run.last("hit_rate"), "%"),
        "share that fits": write(run.last("coverage"), "%"),
        "filled": write(run.last("fill_fraction"), "%"),
        "first epoch": write(first, "s"),
        "waiting": write(waits[0] if waits else None, "s"),
        "later epochs": write(later, "s"),
        "waiting, later": write(statistics.median(waits[1:]) if len(waits) > 1 else None, "s"),
        "speed-up": f"{without / later:.1f}x" if without and later else "",
        "memory": write(run.last("memory_bytes"), "bytes"),
        "val hit rate": write(run.last("val/hit_rate"), "%"),
    }


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Find and read the runs in these folders and below.

    Returns:
        The runs, in the order of their paths, and one sentence for each run that cannot be read.

    Raises:
        LogError: a folder has no log below it, or no run at all could be read.
    """
    logs: dict[Path, Path] = {}  # by the run's folder
    for folder in folders:
        patterns = ("metrics.csv", "events.out.tfevents.*")  # of two loggers in one Hydra folder the CSV is read
        found = [path.parent for pattern in patterns for path in sorted(folder.resolve().rglob(pattern))]
        if not found:
            what = "holds no run" if folder.is_dir() else "is no folder"
            raise LogError(f"{folder} {what}: a run's folder has a metrics.csv (CSVLogger) or TensorBoard's event file")
        for log in found:  # outputs/date/time/csv/version_0: the Hydra folder is at most three above
            above = (each for each in (log, *log.parents[:3]) if (each / ".hydra").is_dir())
            logs.setdefault(next(above, log), log)
    homes = sorted(logs, key=_numbered)
    runs, problems = [], []
    overrides = [_overrides(home) for home in homes]
    for name, home, chosen in zip(_names(homes, overrides), homes, overrides, strict=True):
        try:
            runs.append(Run(name, _read(logs[home]), chosen))
        except LogError as error:
            problems.append(str(error))
    if not runs:
        raise LogError(problems[0])
    return runs, problems


def labels(runs: Sequence[Run]) -> list[str]:
    """Names for charts: overrides without their groups if these are short and differ, else "run 1", "run 2"."""
    if len(runs) == 1:
        return [""]
    names = [re.sub(r"[^,= ]*\.(?=[^,=]*=)", "", run.name) for run in runs]
    if max(map(len, names)) <= (14 if len(runs) <= 4 else 8) and len(set(names)) == len(names):
        return names
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def _numbered(home: Path) -> list[int | str]:
    """A sort key that puts version_10 after version_9."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", str(home))]


def _names(homes: Sequence[Path], overrides: Sequence[Mapping[str, str]]) -> list[str]:
    """A name for each run: its overrides that most runs do not have, or its path below the folder of all runs."""
    counts = Counter(override for chosen in overrides for override in chosen.items())
    usual = {override for override, count in counts.items() if len(homes) > 1 and 2 * count > len(homes)}
    above = Path(os.path.commonpath([home.parent for home in homes]))
    paths = [str(home.relative_to(above)) for home in homes]
    names = []
    for chosen, path in zip(overrides, paths, strict=True):
        parts = [f"{key}={value}" for key, value in chosen.items() if (key, value) not in usual]
        parts += [f"without {key}" for key, _ in sorted(usual) if key not in chosen] if chosen else []
        names.append(", ".join(parts) or path)
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in zip(names, paths, strict=True)]


def _overrides(home: Path) -> dict[str, str]:
    """The overrides of a run of Hydra, by their keys; none where a killed job has left a broken file."""
    import yaml

    path = home / ".hydra" / "overrides.yaml"
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (yaml.YAMLError, UnicodeDecodeError):
        listed = None
    pairs = [str(override).lstrip("+").partition("=") for override in listed] if isinstance(listed, list) else []
    return {key: value for key, _, value in pairs}


def _read(folder: Path) -> list[Row]:
    lines = _read_csv(folder / "metrics.csv") if (folder / "metrics.csv").is_file() else _read_events(folder)
    rows = [row for row in map(_row, lines) if "step" in row]
    if not any(name.startswith("stocache/") for row in rows for name in row):
        raise LogError(
            f"{folder} holds no stocache/ value: did its Trainer have a StochasticCache, a CacheMonitor or a "
            "DataModule that caches, and did the run get as far as its first logging step?"
        )
    return rows


def _row(cells: dict[str, Any]) -> Row:
    """The finite numbers in the columns of a run. A cell without a number was not logged in this row."""
    row = {}
    for name, cell in cells.items():
        if name and (name in ("epoch", "step") or name.startswith("stocache/")):
            with suppress(ValueError):
                row[name] = float(cell)
    return {name: value for name, value in row.items() if math.isfinite(value)}


def _read_csv(path: Path) -> list[dict[str, Any]]:
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        return [line for line in csv.DictReader(file) if None not in line.values()]  # None: it was cut off


def _read_events(folder: Path) -> Iterable[dict[str, Any]]:
    from tensorboard.backend.event_processing import event_accumulator as reader

    events = reader.EventAccumulator(str(folder), size_guidance={reader.SCALARS: 0}, purge_orphaned_data=False)
    events.Reload()
    rows: dict[tuple[int, bool], dict[str, Any]] = {}
    for tag in events.Tags()[reader.SCALARS]:
        for event in events.Scalars(tag):
            rows.setdefault((event.step, not tag.startswith(LIVE)), {"step": event.step})[tag] = event.value
    return [rows[key] for key in sorted(rows)]

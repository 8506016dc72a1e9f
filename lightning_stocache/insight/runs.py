"""Runs as their folders tell them: which there are below a folder, what each is called, what it measured.

A run is a folder with a log (`logs`), or the Hydra folder around it, where Hydra started the run: then its name is made
of the overrides in `.hydra/overrides.yaml` that set it apart from the runs beside it. Otherwise its name is the path.
Where two loggers wrote in one Hydra folder, the CSV is read. Links are not followed, and files are only read.
"""

from __future__ import annotations

import os
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path

from lightning_stocache.insight.layout import LIVE
from lightning_stocache.insight.logs import LogError, Row, log_folders, read_log
from lightning_stocache.insight.verdict import saved_seconds

__all__ = ["Run", "find_runs", "labels"]

_STAGES = {"train": "stocache/", "val": "stocache/val/", "test": "stocache/test/", "predict": "stocache/predict/"}

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Args:
        name: What sets it apart from the other runs.
        rows: Its log, in the order in which it was written.

    Example:
        >>> live = {"step": 1, "stocache/live/hit_rate": 0.1}
        >>> run = Run("half", [live, {"epoch": 0, "step": 9, "stocache/hit_rate": 0.5, "stocache/hits": 5}])
        >>> run.last("hit_rate"), run.live("hit_rate"), run.stages
        (0.5, [(1, 0.1)], ['train'])
    """

    name: str
    rows: Sequence[Row] = field(repr=False)

    @cached_property
    def stages(self) -> list[str]:
        """The stages that ended an epoch, training first."""
        return [stage for stage in _STAGES if self._ends[stage]]

    @cached_property
    def nodes(self) -> list[int]:
        """Numbers of the nodes, if there were several."""
        found = (re.match(r"stocache/node(\d+)/", name) for row in self.rows for name in row)
        return sorted({int(match[1]) for match in found if match})

    @property
    def epoch_count(self) -> int:
        """Training epochs that ended."""
        return len(self._ends["train"])

    def epochs(self, metric: str, stage: str = "train") -> Points:
        """Pairs of epoch and value, in order; where the epochs of several fits overlap, they are numbered through."""
        rows, key = self._ends[stage], _STAGES[stage] + metric
        numbers = [row.get("epoch", float(index)) for index, row in enumerate(rows)]
        if any(after <= before for before, after in pairwise(numbers)):
            numbers = [float(index) for index in range(len(rows))]
        return [(number, row[key]) for number, row in zip(numbers, rows, strict=True) if key in row]

    def last(self, metric: str, stage: str = "train") -> float | None:
        """The value of the last epoch that has one; of training in its first epoch, the last live value."""
        points = self.epochs(metric, stage)
        if stage == "train" and not self.epoch_count:
            points = self.live(metric)
        return points[-1][1] if points else None

    def live(self, metric: str, *, first_epoch: bool = False) -> Points:
        """Pairs of step and value while training ran; of the first epoch, its end included, or of all."""
        end = next(iter(self._ends["train"]), None) if first_epoch else None
        points = {row["step"]: row[LIVE + metric] for row in self.rows if LIVE + metric in row}
        if end is not None:
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

    @property
    def wait_shares(self) -> list[float]:
        """Share of each epoch's time that training waited for data."""
        computes = dict(self.epochs("compute_seconds"))
        pairs = [(wait, wait + computes.get(epoch, 0.0)) for epoch, wait in self.epochs("data_wait_seconds")]
        return [wait / whole for wait, whole in pairs if whole > 0]

    @property
    def seconds_saved(self) -> float | None:
        """Seconds by which an epoch waited less for data than the first one did; None where it cannot be known."""
        ends = self._ends["train"]
        return saved_seconds([{name.removeprefix("stocache/"): value for name, value in row.items()} for row in ends])

    def uncached(self, runs: Sequence[Run]) -> Run | None:
        """The run that differs from this one by its budget alone, and had none; None if there is no such run."""
        same = (run for run in runs if _but_for_budget(run.name) == _but_for_budget(self.name))
        return next((run for run in same if run is not self and run.last("coverage") == 0), None)

    @cached_property
    def _ends(self) -> dict[str, list[Row]]:
        """The rows that were logged at the epochs' ends of each stage: they have counts, or a StepTimer's means."""
        timed = [row for row in self.rows if "epoch" in row and "stocache/step/wait_seconds" in row]
        ends = {stage: [row for row in self.rows if prefix + "hits" in row] for stage, prefix in _STAGES.items()}
        return ends | {"train": ends["train"] or timed}


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Find and read the runs in these folders and below.

    Args:
        folders: Folders of runs, or folders above them.

    Returns:
        The runs, in the order of the folders, and one sentence for each that had to be left out.

    Raises:
        LogError: One of the folders is not a folder or has no log below it, or no run at all could be read.
    """
    logs: dict[Path, Path] = {}  # by the run's folder
    for folder in folders:
        if not folder.is_dir():
            why = "is a file: give the folder that it lies in" if folder.exists() else "does not exist"
            raise LogError(f"{folder} {why}")
        found = log_folders(folder.resolve())
        if not found:
            raise LogError(
                f"{folder} holds no run: no metrics.csv (CSVLogger) or TensorBoard event file in it or below"
            )
        for log in found:
            logs.setdefault(_home(log), log)
    homes = sorted(logs, key=lambda home: _natural(str(home)))
    names, runs, problems = _names(homes), [], []
    for name, home in zip(names, homes, strict=True):
        try:
            runs.append(Run(name, read_log(logs[home])))
        except LogError as error:
            problems.append(str(error))
    if not runs:
        more = f" ({len(problems) - 1} more runs could not be read)" if len(problems) > 1 else ""
        raise LogError(problems[0] + more)
    return runs, problems


def labels(runs: Sequence[Run]) -> list[str]:
    """Names that are short enough to stand in a chart, and differ: nothing for a single run.

    Overrides without their groups, or their values alone; if these are too long, the numbers of the runs.

    Example:
        >>> def named(*names):
        ...     return [Run(name, []) for name in names]
        >>> labels(named("cache.budget=0", "cache.budget=50%")), labels(named("cache.budget=50%, seed=1", "seed=2"))
        (['budget=0', 'budget=50%'], ['50%, 1', '2'])
        >>> labels(named("data.root=/mnt/storage/one", "data.root=/mnt/storage/two")), labels(named("lightning_logs"))
        (['run 1', 'run 2'], [''])
    """
    if len(runs) == 1:
        return [""]
    longest = 14 if len(runs) <= 4 else 8
    for left_out in (r"[^,= ]*\.(?=[^,=]*=)", r"[^,= ]*="):  # the group of a key, the key
        names = [re.sub(left_out, "", run.name) for run in runs]
        if max(map(len, names)) <= longest and len(set(names)) == len(names):
            return names
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def _but_for_budget(name: str) -> list[str]:
    return [override for override in name.split(", ") if not override.partition("=")[0].endswith("budget")]


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which version_10 comes after version_9."""
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]


def _home(log: Path) -> Path:
    """The Hydra folder of a log, at most three above it (outputs/date/time/csv/version_0), or its own."""
    return next((folder for folder in (log, *list(log.parents)[:3]) if (folder / ".hydra").is_dir()), log)


def _overrides(home: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]  # comes with hydra-core

    try:
        listed = yaml.safe_load((home / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []  # the path will do as a name
    return [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []


def _names(homes: Sequence[Path]) -> list[str]:
    """Each run by the overrides that not all have; where there are none, by its path below what is common to all."""
    overrides = [_overrides(home) for home in homes]
    common = set.intersection(*map(set, overrides)) if len(homes) > 1 else set()
    names = [", ".join(override for override in listed if override not in common) for listed in overrides]
    above = Path(os.path.commonpath([home.parent for home in homes]))
    paths = [str(home.relative_to(above)) for home in homes]
    names = [name or path for name, path in zip(names, paths, strict=True)]
    return [name if names.count(name) == 1 else f"{name} ({path})" for name, path in zip(names, paths, strict=True)]

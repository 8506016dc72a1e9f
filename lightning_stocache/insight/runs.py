"""Runs as their folders tell them: which there are below a folder, what each is called, what it measured.

A run is a folder with a log (`logs`), or the Hydra folder around it, where the run was started by Hydra: then its name
is what sets it apart from the runs beside it, of its overrides in `.hydra/overrides.yaml`. Otherwise it is the path.
Where two loggers wrote in one Hydra folder, the CSV is read.

Links are not followed, and files are only read.
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
from lightning_stocache.insight.logs import LogError, Row, has_log, is_epoch_end, read_log
from lightning_stocache.insight.verdict import saved_seconds

__all__ = ["Run", "find_runs", "labels"]

_OTHER_STAGES = ("val", "test", "predict")


@dataclass(frozen=True)
class Run:
    """What one run measured.

    Args:
        name: What sets it apart from the other runs.
        folder: Where it lies.
        rows: Its log, in the order in which it was written.

    Example:
        >>> run = Run(
        ...     "half",
        ...     Path("."),
        ...     [
        ...         {"step": 1, "stocache/hit_rate": 0.1},
        ...         {"epoch": 0, "step": 9, "stocache/hit_rate": 0.5, "stocache/hits": 5},
        ...     ],
        ... )
        >>> run.last("hit_rate"), run.live("hit_rate"), run.stages
        (0.5, ((1, 0.1),), ('train',))
    """

    name: str
    folder: Path
    rows: Sequence[Row] = field(repr=False)

    @cached_property
    def stages(self) -> tuple[str, ...]:
        """The stages that ended an epoch, training first."""
        return tuple(stage for stage in ("train", *_OTHER_STAGES) if self._ends(stage))

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        """Numbers of the nodes, if there were several."""
        found = (re.fullmatch(r"stocache/node(\d{1,6})/\w+", name) for row in self.rows for name in row)
        return tuple(sorted({int(match[1]) for match in found if match}))

    def epochs(self, metric: str, stage: str = "train") -> tuple[tuple[float, float], ...]:
        """Pairs of epoch and value, in order; where the epochs of several fits overlap, they are numbered through."""
        rows = self._ends(stage)
        numbers = [row.get("epoch", float(index)) for index, row in enumerate(rows)]
        if any(after <= before for before, after in pairwise(numbers)):
            numbers = [float(index) for index in range(len(rows))]
        key = _prefix(stage) + metric
        return tuple((number, row[key]) for number, row in zip(numbers, rows, strict=True) if key in row)

    def last(self, metric: str, stage: str = "train") -> float | None:
        """The value of the last epoch that has one."""
        values = self.epochs(metric, stage)
        return values[-1][1] if values else None

    def live(self, metric: str, *, first_epoch: bool = False) -> tuple[tuple[float, float], ...]:
        """Pairs of step and value while training ran; of the first epoch, its end included, or of all.

        Older logs have them under the keys of epochs.
        """
        key, points = f"stocache/{metric}", []
        for row in self.rows:
            at_end = is_epoch_end(row)
            name = LIVE + metric if LIVE + metric in row else key
            if name in row and "step" in row and (first_epoch or name != key or not at_end):
                points.append((row["step"], row[name]))
            if at_end and first_epoch:
                break
        return tuple(sorted(dict(points).items()))

    @property
    def epoch_seconds(self) -> tuple[float, ...]:
        """Seconds of each epoch's training loop: the samples that it was served, at its speed."""
        counts = [dict(self.epochs(metric)) for metric in ("hits", "misses", "bypasses")]
        speeds = [(epoch, speed) for epoch, speed in self.epochs("samples_per_second") if speed > 0]
        return tuple(sum(count.get(epoch, 0.0) for count in counts) / speed for epoch, speed in speeds)

    @property
    def later_seconds(self) -> float | None:
        """Seconds of an epoch after the first: the median of all."""
        return statistics.median(self.epoch_seconds[1:]) if len(self.epoch_seconds) > 1 else None

    def uncached(self, runs: Sequence[Run]) -> Run | None:
        """The run that differs from this one by its budget alone, and had none; None if there is no such run."""
        same = (run for run in runs if _but_for_budget(run.name) == _but_for_budget(self.name))
        return next((run for run in same if run is not self and run.last("coverage") == 0), None)

    @property
    def epoch_count(self) -> int:
        """Training epochs that ended."""
        return len(self._ends("train"))

    @property
    def seconds_saved(self) -> float | None:
        """Seconds by which an epoch waited less for data than the first one did; None where it cannot be known."""
        prefix = _prefix("train")
        return saved_seconds(
            [{name.removeprefix(prefix): value for name, value in row.items()} for row in self._ends("train")]
        )

    def _ends(self, stage: str) -> list[Row]:
        return self._epoch_ends[stage]

    @cached_property
    def _epoch_ends(self) -> dict[str, list[Row]]:
        stages = ("train", *_OTHER_STAGES)
        return {stage: [row for row in self.rows if is_epoch_end(row, _prefix(stage))] for stage in stages}


def find_runs(folders: Sequence[Path]) -> tuple[list[Run], list[str]]:
    """Find and read the runs in these folders and below.

    Args:
        folders: Folders of runs, or folders above them.

    Returns:
        The runs, in the order of the folders, and one sentence for each that had to be left out.

    Raises:
        LogError: One of the folders is not a folder or has no log below it, or no run at all could be read.
    """
    homes: dict[Path, Path] = {}  # of the run: of its log
    for folder in folders:
        if not folder.is_dir():
            why = "is a file: give the folder that it lies in" if folder.exists() else "does not exist"
            raise LogError(f"{folder} {why}")
        logs = [Path(path) for path, children, _ in os.walk(folder) if _in_order(children) and has_log(Path(path))]
        if not logs:
            raise LogError(
                f"{folder} holds no run: there is no metrics.csv (CSVLogger) and no TensorBoard event file in it "
                "or below"
            )
        for log in sorted(logs, key=lambda path: not (path / "metrics.csv").is_file()):
            homes.setdefault(_home(log), log)
    runs, problems = [], []
    for home, log in sorted(homes.items(), key=lambda item: _natural(str(item[0]))):
        try:
            runs.append((home, read_log(log)))
        except LogError as error:
            problems.append(str(error))
    if not runs:
        more = f" ({len(problems) - 1} more runs could not be read)" if len(problems) > 1 else ""
        raise LogError(problems[0] + more)
    names = _names([home for home, _ in runs])
    return [Run(name, home, rows) for name, (home, rows) in zip(names, runs, strict=True)], problems


def labels(runs: Sequence[Run]) -> list[str]:
    """Names that are short enough to stand in a chart, and differ.

    Overrides without their groups, or their values alone; where that is not to be had, the numbers of the runs.

    Example:
        >>> def named(*names):
        ...     return [Run(name, Path("."), []) for name in names]
        >>> labels(named("cache.budget=0", "cache.budget=50%")), labels(named("cache.budget=50%, seed=1", "seed=2"))
        (['budget=0', 'budget=50%'], ['50%, 1', '2'])
        >>> labels(named("data.root=/mnt/storage/one", "data.root=/mnt/storage/two"))
        ['run 1', 'run 2']
    """
    most = 14 if len(runs) <= 4 else 8
    keyed, bare = [[shorten(run.name) for run in runs] for shorten in (_without_groups, _values)]
    for names in (keyed, bare):
        if max(map(len, names)) <= most and len(set(names)) == len(names):
            return names
    return [f"run {number}" for number in range(1, len(runs) + 1)]


def _without_groups(name: str) -> str:
    overrides = (override.partition("=") for override in name.split(", "))
    return ", ".join(key.rpartition(".")[2] + equals + value for key, equals, value in overrides)


def _values(name: str) -> str:
    return ", ".join(override.rpartition("=")[2] for override in name.split(", "))


def _but_for_budget(name: str) -> list[str]:
    return [override for override in name.split(", ") if not override.partition("=")[0].endswith("budget")]


def _prefix(stage: str) -> str:
    return "stocache/" if stage == "train" else f"stocache/{stage}/"


def _in_order(children: list[str]) -> bool:
    """Have os.walk visit the children in the order of their numbers."""
    children.sort(key=_natural)
    return True


def _natural(name: str) -> list[tuple[int, str]]:
    """A sort key by which version_10 comes after version_9."""
    parts = re.split(r"(\d{1,18})", name)
    return [(int(part), "") if index % 2 else (0, part) for index, part in enumerate(parts)]


def _home(log: Path) -> Path:
    """The Hydra folder of a log, at most three above it (outputs/date/time/csv/version_0), or its own."""
    here = log.resolve()
    return next((folder for folder in (here, *list(here.parents)[:3]) if (folder / ".hydra").is_dir()), here)


def _overrides(home: Path) -> list[str]:
    import yaml  # type: ignore[import-untyped]  # comes with hydra-core

    try:
        listed = yaml.safe_load((home / ".hydra" / "overrides.yaml").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return []  # no overrides, no name by them: the path will do
    return [entry for entry in listed if isinstance(entry, str)] if isinstance(listed, list) else []


def _names(homes: Sequence[Path]) -> list[str]:
    """Each run by the overrides that not all have; where there are none, by its path below what is common to all."""
    overrides = [_overrides(home) for home in homes]
    common = set.intersection(*map(set, overrides)) if len(homes) > 1 else set()
    names = [", ".join(override for override in listed if override not in common) for listed in overrides]
    above = Path(os.path.commonpath([home.parent for home in homes]))
    paths = [str(home.relative_to(above)) for home in homes]
    named = [name or path for name, path in zip(names, paths, strict=True)]
    unique = (name if named.count(name) == 1 else f"{name} ({path})" for name, path in zip(named, paths, strict=True))
    return ["".join(char if char.isprintable() else "\ufffd" for char in name) for name in unique]

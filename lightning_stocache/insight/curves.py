"""How fast training data comes, over the number of workers and over the batch size: what was measured of each setting.

A setting has batches from the source or from a full cache. It was measured in several rounds, by itself and with a
model's steps; a curve is made of the settings that differ in one number.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from lightning_stocache.insight.breakdown import Breakdown

__all__ = ["Curves", "Point", "Rates", "Setting"]


@dataclass(frozen=True)
class Rates:
    """Samples per second, as each round had it; none if nothing was measured."""

    rounds: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Over the rounds."""
        return statistics.fmean(self.rounds)

    @property
    def low(self) -> float:
        """Of the slowest round."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """Of the fastest round."""
        return max(self.rounds)


@dataclass(frozen=True)
class Setting:
    """How batches are loaded."""

    batch_size: int
    num_workers: int
    cached: bool
    pinned: bool


@dataclass(frozen=True)
class Point:
    """What a setting gave."""

    setting: Setting
    loader: Rates  # by itself
    training: Rates  # with the model's steps; without a model, nothing
    steps: Breakdown  # what these were made of, over all rounds


@dataclass(frozen=True)
class Curves:
    """What was measured."""

    points: tuple[Point, ...]
    workers: tuple[int, ...]  # with batches of `batch_size`
    batch_sizes: tuple[int, ...]  # with `num_workers`
    batch_size: int
    num_workers: int
    pinned: bool  # as the user's loader has it
    load: float  # processes that wanted a core, per core, before anything was measured
    left_out: tuple[str, ...]  # what was not measured, and why

    def over_workers(self, cached: bool) -> list[Point]:
        """The points over the number of workers."""
        wanted = (Setting(self.batch_size, workers, cached, self.pinned) for workers in self.workers)
        return self._found(wanted)

    def over_batch_sizes(self, cached: bool, pinned: bool | None = None) -> list[Point]:
        """The points over the batch size."""
        pinned = self.pinned if pinned is None else pinned
        return self._found(Setting(size, self.num_workers, cached, pinned) for size in self.batch_sizes)

    def _found(self, settings: Iterable[Setting]) -> list[Point]:
        points = {point.setting: point for point in self.points}
        return [points[setting] for setting in settings if setting in points]

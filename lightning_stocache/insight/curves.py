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
    """Samples per second of one setting.

    Args:
        rounds: as each round of measurements had it; none if nothing was measured.
    """

    rounds: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """The mean of the rounds, samples per second; there must be one."""
        return statistics.fmean(self.rounds)

    @property
    def deviation(self) -> float:
        """The standard deviation of the rounds, samples per second; 0 for a single one."""
        return statistics.stdev(self.rounds) if len(self.rounds) > 1 else 0.0

    @property
    def low(self) -> float:
        """The slowest round, samples per second; there must be one."""
        return min(self.rounds)

    @property
    def high(self) -> float:
        """The fastest round, samples per second; there must be one."""
        return max(self.rounds)


@dataclass(frozen=True)
class Setting:
    """How batches are loaded.

    Args:
        batch_size: samples in a batch.
        num_workers: processes that load; 0: the trainer's own.
        cached: whether batches come from a cache that is full, or from the source.
        pinned: whether they lie in pinned memory.
    """

    batch_size: int
    num_workers: int
    cached: bool
    pinned: bool

    def __str__(self) -> str:
        whence = "the cache" if self.cached else "the source"
        return f"num_workers={self.num_workers}, batch_size={self.batch_size}, batches from {whence}"


@dataclass(frozen=True)
class Point:
    """What was measured of a setting.

    Args:
        setting: how batches were loaded.
        loader: the loader by itself.
        training: the loader with a model's steps; without a model nothing was measured.
        steps: what these steps were made of, over all rounds.
    """

    setting: Setting
    loader: Rates
    training: Rates
    steps: Breakdown


@dataclass(frozen=True)
class Curves:
    """The points that were measured, and which of them are a curve.

    Args:
        points: one for each setting.
        workers: numbers of workers that were asked for, with batches of `batch_size`.
        batch_sizes: batch sizes that were asked for, with `num_workers`.
        batch_size: of the user's loader.
        num_workers: of the user's loader.
        pinned: whether the user's loader pins its batches.
        left_out: what was not measured and why, in sentences.
    """

    points: tuple[Point, ...]
    workers: tuple[int, ...]
    batch_sizes: tuple[int, ...]
    batch_size: int
    num_workers: int
    pinned: bool
    left_out: tuple[str, ...]

    def over_workers(self, cached: bool) -> list[Point]:
        """The points of the curve over the number of workers, from the cache or from the source."""
        wanted = (Setting(self.batch_size, workers, cached, self.pinned) for workers in self.workers)
        return self._found(wanted)

    def over_batch_sizes(self, cached: bool, pinned: bool | None = None) -> list[Point]:
        """The points of the curve over the batch size; `pinned` is that of the user's loader by default."""
        pinned = self.pinned if pinned is None else pinned
        return self._found(Setting(size, self.num_workers, cached, pinned) for size in self.batch_sizes)

    def _found(self, settings: Iterable[Setting]) -> list[Point]:
        points = {point.setting: point for point in self.points}
        return [points[setting] for setting in settings if setting in points]

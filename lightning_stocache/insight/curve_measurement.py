"""How fast training data comes, over the number of workers and over the batch size.

Each setting is measured with batches from the source and with batches from a cache that is full: the loader alone, and,
where there is a model, training with it, split into its parts. All settings are measured in turn, and then again: what
differs from round to round is the noise of the machine, and is shown as error bars. A loader delivers in waves of one
batch per worker; what counts begins after the first wave, when the workers are there. Samples of the source are others
each time as long as there are enough; what of it lies in the page cache is as fast as that.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader

from lightning_stocache.insight.breakdown import Breakdown
from lightning_stocache.insight.curves import Curves, Point, Rates, Setting
from lightning_stocache.insight.measurement import Data, Trial, reading
from lightning_stocache.insight.planner import PlanError
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader

__all__ = ["Train", "measure_curves"]

Train = Callable[[DataLoader[Any], int, float], Breakdown]
"""Trains with a loader's batches, after so many to warm up for so many seconds; what its steps were made of."""

_ROUNDS = 3
_AT_LEAST = 0.3  # seconds of a measurement
_PATIENCE = 20.0  # seconds that all rounds may take, however few were asked for
_MOST_WORKERS = 8  # per core: to start more takes longer than to measure them
_WARM = 3  # batches before training is timed, at least


def measure_curves(
    data: Data,
    workers: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    *,
    train: Train | None = None,
    seconds: float = 60.0,
    progress: Callable[[int, int, float, str], None] | None = None,
) -> Curves:
    """Measure loading over the number of workers, and over the batch size; the other of both is the data's own.

    Args:
        data: the training data, and how one rank loads it.
        workers: numbers of workers, 0 among them for loading in this process.
        batch_sizes: in samples.
        train: trains with the batches; None: the loader alone is measured.
        seconds: of all measurements together, about. Where that is too little for all rounds, there are fewer.
        progress: is told how many measurements are done, of how many, the seconds that are left, about, and in the
            first round what the latest one has given.

    Raises:
        PlanError: a number is not one that can be, the dataset raises, or there is no memory for a sample.

    Example:
        >>> source = [torch.zeros(100)] * 64
        >>> curves = measure_curves(Data(source, batch_size=8), batch_sizes=[4, 16], seconds=0.1)
        >>> [point.setting.batch_size for point in curves.over_batch_sizes(cached=True)]
        [4, 16]
        >>> curves.points[0].loader.low > 0
        True
    """
    workers, batch_sizes = tuple(sorted(set(workers))), tuple(sorted(set(batch_sizes)))
    if min(workers, default=0) < 0 or min(batch_sizes, default=1) < 1:
        raise PlanError(f"workers must be 0 or more and batch sizes 1 or more, got {workers} and {batch_sizes}")
    cores = os.cpu_count() or 1
    if max(workers, default=0) > _MOST_WORKERS * cores:
        raise PlanError(
            f"workers must be {_MOST_WORKERS} per core at most, here {_MOST_WORKERS * cores}, got {workers}"
        )
    with reading(f"a sample of {type(data.source).__name__}"):
        measured = _Measured(data, train, seconds)
        try:
            settings = measured.settings(workers, batch_sizes)
            points = measured.points(settings, progress or (lambda done, of, left, words: None))
        finally:
            measured.close()
    pinned, left_out = measured.pinned, tuple(measured.left_out)
    return Curves(points, workers, batch_sizes, data.batch_size, data.num_workers, pinned, left_out)


class _Measured:
    """The measurements: a full cache, and loaders on it and on the source."""

    def __init__(self, data: Data, train: Train | None, seconds: float) -> None:
        self.data, self.train, self.seconds = data, train, seconds
        self.pinned, self.left_out = bool(data.settings.get("pin_memory")), list[str]()
        self._trial = Trial(data, _AT_LEAST)
        samples, self._read_seconds = self._trial.read()
        self._full: CachedDataset | None = None
        if (spec := self._trial.spec) is not None:
            self._full = self._trial.full(samples, spec.slot_bytes, data.safe_bytes(spec.slot_bytes, 1))
        else:
            self.left_out.append(f"Nothing can be cached: {self._trial.reason}")

    def close(self) -> None:
        if self._full is not None:
            self._full.close()

    def settings(self, workers: Sequence[int], batch_sizes: Sequence[int]) -> list[Setting]:
        """All settings, each once. Pinned memory is compared where there is a device to copy to."""
        size, count = self.data.batch_size, self.data.num_workers
        over_sizes = [(each, count) for each in batch_sizes]
        compared = self.train is not None and torch.cuda.is_available()
        made = []
        for batch_size, num_workers in dict.fromkeys([*((size, each) for each in workers), *over_sizes]):
            if batch_size > max(len(self._trial.order), size):
                self.left_out.append(f"There are no batches of {batch_size}: the dataset has fewer samples.")
                continue
            if self._read_seconds * batch_size * 2 > self.seconds / 4:
                took = self._read_seconds * batch_size
                self.left_out.append(f"Batches of {batch_size} from the source take {took:.0f} s each: not measured.")
            else:
                made.append(Setting(batch_size, num_workers, False, self.pinned))
            if self._full is not None:
                kinds = [self.pinned]
                if compared and (batch_size, num_workers) in over_sizes:
                    kinds.append(not self.pinned)
                made += [Setting(batch_size, num_workers, True, pinned) for pinned in kinds]
        return made

    def points(
        self, settings: Sequence[Setting], progress: Callable[[int, int, float, str], None]
    ) -> tuple[Point, ...]:
        """Measure all settings in turn, and again, in rounds."""
        tasks = list(itertools.product(settings, [False] + [True] * (self.train is not None)))
        each = max(self.seconds / max(_ROUNDS * len(tasks), 1) - 0.05, min(_AT_LEAST, self.seconds / 10))
        loader: dict[Setting, list[float]] = {setting: [] for setting in settings}
        training: dict[Setting, list[Breakdown]] = {setting: [] for setting in settings}
        begin, done, count, words = time.perf_counter(), 0, _ROUNDS * len(tasks), ""
        for number in range(_ROUNDS):
            spent = time.perf_counter() - begin
            if number and spent / number * (number + 1) > max(2 * self.seconds, _PATIENCE):
                self.left_out.append(f"{number} of {_ROUNDS} rounds: more would have taken too long.")
                break
            for setting, trains in tasks:
                spent = time.perf_counter() - begin
                if not number and spent > max(3 * self.seconds, 3 * _PATIENCE):
                    self.left_out.append(f"After {done} of {len(tasks)} measurements {spent:.0f} s were over.")
                    break
                progress(done, count, spent / done * (count - done) if done else self.seconds, words)
                if trains:
                    training[setting].append(self._trained(setting, each))
                    words = f"training, {setting}: {_samples_per_second(setting, training[setting][-1]):,.0f} samples/s"
                else:
                    loader[setting].append(self._rate(setting, each))
                    words = f"loading, {setting}: {loader[setting][-1]:,.0f} samples/s"
                words = "" if number else words
                done += 1
        progress(count, count, 0.0, words)
        made = []
        for setting in filter(loader.get, settings):
            rates = (_samples_per_second(setting, steps) for steps in training[setting])
            steps = Breakdown.sum(training[setting])
            made.append(Point(setting, Rates(tuple(loader[setting])), Rates(tuple(rates)), steps))
        return tuple(made)

    def _rate(self, setting: Setting, seconds: float) -> float:
        """Samples per second of a loader by itself, after its first wave."""
        wave, ends = max(setting.num_workers, 1), list[float]()
        with self._loader(setting) as loader:
            for _ in loader:
                ends.append(time.perf_counter())
                if len(ends) % wave == 0 and len(ends) > wave and ends[-1] - ends[wave - 1] > seconds:
                    break
        return (len(ends) - wave) * setting.batch_size / max(ends[-1] - ends[wave - 1], 1e-9)

    def _trained(self, setting: Setting, seconds: float) -> Breakdown:
        assert self.train is not None
        with self._loader(setting) as loader:
            return self.train(loader, max(setting.num_workers, _WARM), seconds)

    @contextmanager
    def _loader(self, setting: Setting) -> Iterator[CachedLoader]:
        """A loader whose workers, and whose dataset where that is no cache, end with its use."""
        trial, order = self._trial, self._trial.order
        moved = len(order) // (2 * _ROUNDS + 1)
        trial.order = order = order[moved:] + order[:moved]
        if setting.cached:
            assert self._full is not None
            dataset, order = self._full, torch.randperm(len(self._full)).tolist()
        else:
            dataset = CachedDataset(trial.source, 0, spec=trial.spec, transform=trial.transform)
        settings = {**self.data.settings, "pin_memory": setting.pinned}
        if not setting.num_workers:
            for name in ("multiprocessing_context", "prefetch_factor", "timeout"):
                settings.pop(name, None)
        batches = cast(Any, _Batches(order, setting.batch_size))
        loader = CachedLoader(dataset, batch_sampler=batches, num_workers=setting.num_workers, **settings)
        try:
            yield loader
        finally:
            loader.close()
            if not setting.cached:
                dataset.close()


def _samples_per_second(setting: Setting, steps: Breakdown) -> float:
    return steps.steps * setting.batch_size / steps.total


class _Batches:
    """Batches of these indices, over and over: more than anybody waits for."""

    def __init__(self, order: Sequence[int], batch_size: int) -> None:
        self.order, self.batch_size = order, batch_size

    def __len__(self) -> int:
        return 2**40

    def __iter__(self) -> Iterator[list[int]]:
        indices = itertools.cycle(self.order)
        while True:
            yield list(itertools.islice(indices, self.batch_size))

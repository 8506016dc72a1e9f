"""How fast training data comes over the number of workers and over the batch size, for the user's own data.

Each arm is a loader over the source or over a full cache. All arms take turns, in three rounds, and the standard
deviation of the rounds is the error bar. There is a time limit: measurements beyond it are left out, and it is said.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lightning_stocache.insight.columns import aligned
from lightning_stocache.insight.measurement import Data, Kind, PlanError, Spread, Trial, reading

__all__ = ["Arm", "Curves", "Line", "as_json", "as_text", "check_numbers", "measure_curves"]

Line = list[tuple[int, Spread]]

_ROUNDS = 3
_MOST_WORKERS = 8  # per core: to start more takes longer than to measure them
_SOURCES = ("source", "cache")


@dataclass(frozen=True)
class Arm:
    """How batches are loaded."""

    batch_size: int
    num_workers: int
    cached: bool  # whether batches come from a full cache, or from the source

    def __str__(self) -> str:
        whence = "the cache" if self.cached else "the source"
        return f"num_workers={self.num_workers}, batch_size={self.batch_size}, batches from {whence}"


@dataclass(frozen=True)
class Curves:
    """Samples per second of each arm, and which of the arms are a curve."""

    rates: dict[Arm, Spread]
    workers: tuple[int, ...]  # asked for, with batches of `batch_size`
    batch_sizes: tuple[int, ...]  # asked for, with `num_workers`
    batch_size: int  # of the user's loader
    num_workers: int  # of the user's loader
    left_out: tuple[str, ...]  # what was not measured and why, in sentences

    def over(self, name: str) -> dict[str, Line]:
        """The curves over `num_workers` or `batch_size`, with batches from the "source" and from the "cache"."""
        found = {}
        for source in _SOURCES:
            cached = source == "cache"
            arms = [(number, Arm(self.batch_size, number, cached)) for number in self.workers]
            if name == "batch_size":
                arms = [(number, Arm(number, self.num_workers, cached)) for number in self.batch_sizes]
            if line := [(number, self.rates[arm]) for number, arm in arms if arm in self.rates]:
                found[source] = line
        return found


def check_numbers(workers: Sequence[int], batch_sizes: Sequence[int]) -> None:
    """Refuse numbers of workers and batch sizes that cannot be measured, before anything else is.

    Raises:
        PlanError: a number is too small, or there are more than eight workers per core.
    """
    if min(workers, default=0) < 0 or min(batch_sizes, default=1) < 1:
        raise PlanError(f"workers must be 0 or more and batch sizes 1 or more, got {workers} and {batch_sizes}")
    most = _MOST_WORKERS * (os.cpu_count() or 1)
    if max(workers, default=0) > most:
        raise PlanError(f"workers must be {_MOST_WORKERS} per core at most, here {most}, got {workers}")


def measure_curves(
    data: Data,
    workers: Sequence[int] = (),
    batch_sizes: Sequence[int] = (),
    *,
    seconds: float = 60.0,
    limit: float = 120.0,
    progress: Callable[[int, int, float, str], None] | None = None,
) -> Curves:
    """Measure loading over the number of workers, and over the batch size; the other of both is the data's own.

    Args:
        data: the training data, and how one rank loads it.
        workers: numbers of workers, 0 among them for loading in this process.
        batch_sizes: in samples.
        seconds: of all measurements together, about.
        limit: seconds after which no measurement begins.
        progress: is told how many measurements are done, of how many, the seconds that are left, about, and what the
            latest one has given.

    Raises:
        PlanError: a number is not one that can be, the dataset raises, or there is no memory for a sample.

    Example:
        >>> curves = measure_curves(Data([1.5] * 64, batch_size=8), batch_sizes=[4, 16], seconds=0.5)
        >>> [number for number, _ in curves.over("batch_size")["cache"]]
        [4, 16]
    """
    workers, batch_sizes = tuple(sorted(set(workers))), tuple(sorted(set(batch_sizes)))
    check_numbers(workers, batch_sizes)
    report = progress or (lambda done, count, left, words: None)
    with reading(f"a sample of {type(data.source).__name__}"), Trial(data) as trial:
        left_out = [] if trial.full is not None else [f"Nothing can be cached: {trial.reason}"]
        pairs = [(data.batch_size, number) for number in workers] + [(size, data.num_workers) for size in batch_sizes]
        rates: dict[Arm, list[float]] = {}
        for size, number in dict.fromkeys(pairs):
            arms, why = _arms(trial, size, number, limit / 16)
            rates |= {arm: [] for arm in arms}
            left_out += why
        begin, count = time.perf_counter(), _ROUNDS * len(rates)
        report(0, count, seconds, "")
        for done, arm in enumerate([*rates] * _ROUNDS):
            spent = time.perf_counter() - begin
            if spent > limit:
                left_out.append(f"{spent:.0f} s were over after {done} of {count} measurements.")
                break
            kind: Kind = "hit" if arm.cached else "uncached"
            rate = 1 / trial.pace(kind, arm.batch_size, arm.num_workers, seconds / count)
            rates[arm].append(rate)
            left = (time.perf_counter() - begin) / (done + 1) * (count - done - 1)
            report(done + 1, count, left, f"{arm}: {rate:,.0f} samples/s")
    measured = {arm: Spread(tuple(values)) for arm, values in rates.items() if values}
    return Curves(measured, workers, batch_sizes, data.batch_size, data.num_workers, tuple(left_out))


def _arms(trial: Trial, size: int, num_workers: int, patience: float) -> tuple[list[Arm], list[str]]:
    """What can be measured for a batch size and a number of workers, and what is left out."""
    if size > max(len(trial.order), trial.data.batch_size):
        return [], [f"There are no batches of {size}: the dataset has fewer samples."]
    cached = [Arm(size, num_workers, True)] if trial.full is not None else []
    if (took := trial.read_seconds * size) > patience:
        return cached, [f"Batches of {size} from the source take {took:.0f} s each: left out."]
    return [Arm(size, num_workers, False), *cached], []


def as_text(curves: Curves) -> str:
    """The curves as tables, and what follows."""
    blocks = []
    for name in ("num_workers", "batch_size"):
        lines = curves.over(name)
        cells = {(source, number): rate for source, line in lines.items() for number, rate in line}
        rows = [[name, *(f"from the {source}" for source in lines)]]
        for number in sorted({number for _, number in cells}):
            rates = [cells.get((source, number)) for source in lines]
            rows.append(
                [str(number), *(f"{rate.mean:,.0f} +- {rate.deviation:,.0f}" if rate else "" for rate in rates)]
            )
        if cells:
            blocks.append([*aligned(rows), "Samples per second; mean +- standard deviation of the rounds."])
    return "\n\n".join("\n".join(block) for block in [*blocks, _sentences(curves)] if block)


def as_json(curves: Curves) -> dict[str, Any]:
    """The curves as plain values: samples per second in each round."""
    points = [asdict(arm) | {"rounds": rate.values} for arm, rate in curves.rates.items()]
    asked = {"workers": curves.workers, "batch_sizes": curves.batch_sizes, "left_out": curves.left_out}
    return {"points": points, **asked, "sentences": _sentences(curves)}


def _sentences(curves: Curves) -> list[str]:
    """What follows for the number of workers and the batch size. Ranges that overlap are no difference."""
    sentences = list(curves.left_out)
    for source, line in curves.over("num_workers").items():
        if len(line) > 1:
            best = max((rate for _, rate in line), key=lambda rate: rate.mean)
            number, rate = next((number, rate) for number, rate in line if rate.high >= best.low)
            told = f"Batches from the {source}: num_workers={number} is as fast as any of these"
            sentences.append(f"{told} ({rate.mean:,.0f} samples/s).")
    for source, line in curves.over("batch_size").items():
        if len(line) > 1:
            (small, before), (large, after) = line[0], line[-1]
            same = before.high >= after.low and after.high >= before.low
            change = "no faster, nor slower," if same else f"{after.mean / before.mean:.1f} times as fast"
            sentences.append(
                f"Batches from the {source}: from {small} to {large} samples they are {change} per sample."
            )
    return sentences

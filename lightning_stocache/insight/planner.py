"""What a budget would give, before it is paid: from what was measured to seconds per epoch, for a table of budgets.

Arithmetic alone. `Costs` are seconds per sample, measured by `measurement`; all nodes are alike.
Of the n samples of a rank a part h hits. As the loader does it:

- without workers, and where workers make whole batches, one follows the other: `n (1-h) missed + n h hit`;
- else workers load misses while the main process gathers: `max(n (1-h) missed, n hit)`;
- a training step lets the main process wait, not the workers: it is added to what the main process does. Where all is
  cached, the next batch is gathered meanwhile, and the slower of the two counts;
- nothing is faster than the processor time of all ranks of the node, divided by its cores;
- epoch one is all misses, after the workers have started; without a cache every epoch goes by `uncached`.

Later misses cost what repeated reads cost in place of first ones, if the first ones came from a disk and the files
would fit into free memory. What other programs do meanwhile, and a slower network at night, nobody can plan.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.sampling.locality_sampler import Mode
from lightning_stocache.setup.form_choice import EncodedForm

__all__ = ["ENDS", "MOST", "WORST", "Costs", "Job", "PlanError", "Planner", "Reads", "Row", "Spread", "Step"]

End = Literal["low", "median", "high"]
Case = tuple[End, End, End, End]  # which end of what was measured is taken to be true: of uncached, missed, hit, step
ENDS: tuple[End, ...] = ("low", "median", "high")
MEDIANS: Case = ("median", "median", "median", "median")
LOW: Case = ("low", "low", "low", "low")
HIGH: Case = ("high", "high", "high", "high")
WORST: Case = ("low", "high", "high", "high")  # a cache gains least
BEST: Case = ("high", "low", "low", "low")
MOST: Case = ("high", "high", "low", "low")  # a cache must be largest

_NOTHING = 0.02  # of an epoch's time: less is no gain


class PlanError(Exception):
    """Nothing can be planned, and the message says why in one sentence."""


@dataclass(frozen=True)
class Spread:
    """The lowest, the median and the highest of several measurements; plans go by the median.

    Example:
        >>> Spread.of([3.0, 1.0, 2.0]), Spread.of([2.0]).high
        (Spread(low=1.0, median=2.0, high=3.0), 2.0)
    """

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """The spread of these values."""
        values = sorted(values)
        return cls(values[0], statistics.median(values), values[-1])

    def at(self, end: End) -> float:
        """One of the three."""
        value: float = getattr(self, end)
        return value


@dataclass(frozen=True)
class Reads:
    """The source in one process: seconds per sample."""

    first: float  # read for the first time by this process
    repeated: Spread  # read again
    cpu: float  # seconds of the processor in a repeated read; the rest is waiting
    from_disk: float | None = None  # bytes that a first read fetched from a disk; None where the system does not say


@dataclass(frozen=True)
class Costs:
    """Seconds per sample of one rank."""

    spec: SampleCodec | None  # what a sample looks like in the cache; None if it cannot be cached
    reads: Reads
    transform: float  # what comes after the cache, on the CPU, in one process
    uncached: Spread  # the loader without a cache
    missed: Spread  # the loader where every sample is loaded and stored
    hit: Spread  # the loader where every sample is cached
    start: float = 0.0  # until the workers are there, once
    made_by_workers: bool = False  # whole batches, hits too
    reason: str | None = None  # why nothing can be cached, if so
    encoded: EncodedForm | None = None  # what is known of samples as their files


@dataclass(frozen=True)
class Step:
    """A training step, one batch of one rank: from having a batch to asking for the next one."""

    seconds: Spread
    cpu: float = 0.0  # seconds of the processor


@dataclass(frozen=True)
class Job:
    """The training that is planned."""

    samples: int
    batch_size: int  # of one rank
    num_workers: int = 0  # of one rank
    nodes: int = 1  # all as this one
    ranks: int = 1  # on each node
    epochs: int = 10
    mode: Mode = "locality"
    other_bytes: int = 0  # cached size of the sets that share the budget (validation)
    safe_bytes: int = 0  # the largest budget that is safe on this node
    cores: int = 1  # of this node
    persistent: bool = True  # workers live on from epoch to epoch
    threads: int = 1  # of torch, in each rank
    hot: bool = False  # repeated reads are what later epochs pay

    @property
    def rank_samples(self) -> float:
        """Samples of one rank in an epoch."""
        return self.samples / (self.nodes * self.ranks)


@dataclass(frozen=True)
class Row:
    """What one budget gives. Epochs are those of training, or of the loader alone if there is no model."""

    budget: str  # as it is written into a config
    budget_bytes: int  # per node
    safe: bool  # this node has room for it
    samples: int  # that have a slot somewhere in the job
    hit_rates: tuple[float, ...]  # per epoch
    first_epoch: Spread  # seconds
    later_epoch: Spread  # seconds of the last epoch
    faster: Spread  # how many times as fast the last epoch is as an uncached one
    pays_in: int | None  # the epoch, from 1, at whose end training is ahead of uncached; None: never, or cannot be told


class Planner:
    """The calculator for one job.

    Args:
        job: the training.
        costs: what a sample costs.
        step: what a step costs, if there is a model.

    Example:
        >>> slow, quick = Spread.of([0.009, 0.01, 0.012]), Spread.of([1e-5])
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> costs = Costs(SampleSpec.infer(1.5), Reads(0.01, slow, 0.01), 0.0, uncached=slow, missed=slow, hit=quick)
        >>> planner = Planner(Job(samples=1000, batch_size=10, safe_bytes=2**20), costs, Step(Spread.of([0.05])))
        >>> half = planner.row(0.5)
        >>> half.samples, half.hit_rates[:2], round(half.later_epoch.median, 3), round(half.faster.low, 3)
        (500, (0.0, 0.5), 10.005, 1.272)
    """

    def __init__(self, job: Job, costs: Costs, step: Step | None = None) -> None:
        self.job, self.costs, self.step = job, costs, step
        self.slot_bytes = costs.spec.slot_bytes if costs.spec is not None else 0
        self.pot_bytes = job.samples * self.slot_bytes + job.other_bytes

    def row(self, share: float) -> Row:
        """What a budget of a share of the dataset gives."""
        rates, percent = self.hit_rates(share), round(100 * share, 7)
        last = len(rates) - 1
        first, later = (
            Spread.of(self.epoch(rates[number], share, number, case) for case in (LOW, MEDIANS, HIGH))
            for number in (0, last)
        )
        faster = Spread.of(
            self.epoch(0.0, 0.0, last, case) / self.epoch(rates[last], share, last, case)
            for case in (WORST, MEDIANS, BEST)
        )
        ahead, pays_in = 0.0, None
        for number, rate in enumerate(rates):
            ahead += self.epoch(0.0, 0.0, number) - self.epoch(rate, share, number)
            if pays_in is None and ahead > 0 and faster.low > 1:
                pays_in = number + 1
        budget_bytes = math.floor(share * self.pot_bytes)
        return Row(
            f"{percent:.0f}%" if percent == int(percent) else f"{percent:.1f}%",
            budget_bytes,
            budget_bytes <= self.job.safe_bytes,
            round(self._reach(share) * self.job.samples),
            tuple(rates),
            first,
            later,
            faster,
            pays_in,
        )

    def hit_rates(self, share: float) -> list[float]:
        """The hit rate of every epoch. A node to which samples are dealt at random meets its part by and by."""
        job, later = self.job, range(1, max(self.job.epochs, 2))
        if job.mode != "global":
            return [0.0, *[self._reach(share)] * len(later)]
        return [0.0, *(self._part(share) * (1 - (1 - 1 / job.nodes) ** epoch) for epoch in later)]

    def epoch(self, hit_rate: float, share: float, number: int, case: Case = MEDIANS) -> float:
        """Seconds of an epoch, counted from 0, with the step if there is one."""
        job, costs, samples = self.job, self.costs, self.job.rank_samples
        batches, cached = math.ceil(samples / job.batch_size), share > 0 and costs.spec is not None
        loaded, hit = (costs.missed.at(case[1]) if cached else costs.uncached.at(case[0])), costs.hit.at(case[2])
        steps = batches * self.step.seconds.at(case[3]) if self.step is not None else 0.0
        later = min(costs.reads.repeated.median / costs.reads.first, 1.0) if job.hot and number else 1.0
        loading, gather = samples * (1 - hit_rate) * loaded * later, samples * hit_rate * hit
        if hit_rate >= 1:
            seconds = max(gather, steps)
        elif not job.num_workers:
            seconds = loading + gather + steps
        elif not cached or costs.made_by_workers:
            seconds = max(loading + gather, steps)
        else:
            seconds = max(loading, samples * hit + steps)
        busy = samples * ((1 - hit_rate) * (costs.reads.cpu + costs.transform) + hit_rate * hit)
        busy += batches * self.step.cpu if self.step is not None else 0.0
        starts = number == 0 or not (job.persistent or (hit_rate >= 1 and not costs.made_by_workers))
        return max(seconds, job.ranks * busy / job.cores) + (costs.start if starts else 0.0)

    def enough(self, safe: float, case: Case) -> float:
        """The smallest share, in whole percents, with which later epochs are as fast as with the largest safe one."""
        goal = self._later(safe, case) * (1 + _NOTHING)
        percents = (percent / 100 for percent in range(math.ceil(100 * safe)))
        return next((share for share in percents if self._later(share, case) <= goal), safe)

    def _later(self, share: float, case: Case) -> float:
        return self.epoch(self._reach(share), share, 1, case)

    def _part(self, share: float) -> float:
        """The part of the samples that each node has slots for."""
        samples = self.job.samples
        return math.floor(round(share * samples, 6)) / samples if self.slot_bytes else 0.0

    def _reach(self, share: float) -> float:
        """The part of the samples that has a slot on some node, and is hit where each goes to a node that has it."""
        return min(self.job.nodes * self._part(share), 1.0)

"""What a budget would give, before it is paid.

From what a sample costs (`costs`) and what hit rates theory predicts (`theory`) to seconds per epoch, for a table of
budgets. Arithmetic alone; nothing is measured here but the memory that is free.

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
from dataclasses import dataclass, replace

from lightning_stocache.cache.placement import Ring
from lightning_stocache.insight.costs import Costs, End, Job, Spread, Step
from lightning_stocache.insight.theory import expected_hit_rate, moved_share

__all__ = ["Planner", "Row"]

_NOTHING = 0.02  # of an epoch's time: less is no gain


@dataclass(frozen=True)
class Row:
    """What one budget gives. Epochs are those of training, or of the loader alone if there is no model.

    Args:
        budget: as it is written into a config.
        budget_bytes: per node.
        safe: whether this node has room for it.
        samples: that have a slot somewhere in the job.
        hit_rates: per epoch.
        first_epoch: seconds.
        later_epoch: seconds of the last epoch.
        faster: how many times as fast the last epoch is as an uncached one.
        pays_in: epoch, counted from 1, at whose end training has taken less time than uncached; None if never, or if
            that cannot be told.
    """

    budget: str
    budget_bytes: int
    safe: bool
    samples: int
    hit_rates: tuple[float, ...]
    first_epoch: Spread
    later_epoch: Spread
    faster: Spread
    pays_in: int | None


class Planner:
    """The calculator for one job.

    Args:
        job: the training.
        costs: what a sample costs.
        step: what a step costs, if there is a model.

    Example:
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> from lightning_stocache.insight.costs import Reads
        >>> slow, quick = Spread.of([0.009, 0.01, 0.012]), Spread.of([1e-5])
        >>> costs = Costs(SampleSpec.infer(1.5), Reads(0.01, slow, 0.01), 0.0, uncached=slow, missed=slow, hit=quick)
        >>> planner = Planner(Job(samples=1000, batch_size=10, safe_bytes=2**20), costs, Step(Spread.of([0.05])))
        >>> half = planner.row(0.5)
        >>> half.samples, half.hit_rates[:2], round(half.later_epoch.median, 3), round(half.faster.low, 3)
        (500, (0.0, 0.5), 10.005, 1.272)
    """

    def __init__(self, job: Job, costs: Costs, step: Step | None = None) -> None:
        self.job, self.costs, self.step = job, costs, step
        self.slot_bytes = costs.spec.slot_bytes if costs.spec is not None else 0
        self.dataset_bytes = job.samples * self.slot_bytes
        self.pot_bytes = self.dataset_bytes + job.other_bytes

    def row(self, share: float) -> Row:
        """What a budget of a share of the dataset gives."""
        budget_bytes = math.floor(share * self.pot_bytes)
        rates = self.hit_rates(share)
        last = len(rates) - 1
        low, high = self.case("low", "low", "low", "low"), self.case("high", "high", "high", "high")
        cached = [self.epoch(rate, share, number) for number, rate in enumerate(rates)]
        uncached = [self.epoch(0.0, 0.0, number) for number in range(len(rates))]
        cases = (self.worst(), self, self.case(uncached="high", missed="low", hit="low", step="low"))
        faster = Spread.of(case.epoch(0.0, 0.0, last) / case.epoch(rates[last], share, last) for case in cases)
        pays = (epoch for epoch in range(1, len(rates) + 1) if sum(cached[:epoch]) < sum(uncached[:epoch]))
        percent = 100 * share
        return Row(
            f"{percent:.0f}%" if share == 0 or abs(percent - round(percent)) < 1e-9 else f"{percent:.1f}%",
            budget_bytes,
            budget_bytes <= self.job.safe_bytes,
            round(self._ring(share).coverage * self.job.samples),
            tuple(rates),
            Spread(low.epoch(rates[0], share, 0), cached[0], high.epoch(rates[0], share, 0)),
            Spread(low.epoch(rates[last], share, last), cached[last], high.epoch(rates[last], share, last)),
            faster,
            next(pays, None) if faster.low > 1 else None,
        )

    def hit_rates(self, share: float) -> list[float]:
        """The hit rate of every epoch."""
        job, ring = self.job, self._ring(share)
        shares = (1 / job.nodes,) * job.nodes
        moved = 0.0
        if job.nodes > 1 and job.mode == "locality" and share > 0:
            ranks = tuple(
                tuple(range(first, first + job.ranks)) for first in range(0, job.nodes * job.ranks, job.ranks)
            )
            moved = moved_share(ring, ranks, job.batch_size, batches=64)
        return [expected_hit_rate(ring, shares, epoch, moved, job.mode) for epoch in range(max(job.epochs, 2))]

    def epoch(self, hit_rate: float, share: float, number: int) -> float:
        """Seconds of an epoch, counted from 0, with the step if there is one; by the medians."""
        job, costs = self.job, self.costs
        steps = job.batches * self.step.seconds.median if self.step is not None else 0.0
        cpu = job.batches * self.step.cpu if self.step is not None else 0.0
        samples, cached, hit = job.own_samples, share > 0 and costs.spec is not None, costs.hit.median
        later = min(costs.reads.repeated.median / costs.reads.first, 1.0) if job.hot and number else 1.0
        loading = samples * (1 - hit_rate) * (costs.missed if cached else costs.uncached).median * later
        gather = samples * hit_rate * hit
        if hit_rate >= 1:
            seconds = max(gather, steps)
        elif not job.num_workers:
            seconds = loading + gather + steps
        elif not cached or costs.made_by_workers:
            seconds = max(loading + gather, steps)
        else:
            seconds = max(loading, samples * hit + steps)
        working = samples * ((1 - hit_rate) * (costs.reads.cpu + costs.transform) + hit_rate * hit) + cpu
        starts = number == 0 or not (job.persistent or (hit_rate >= 1 and not costs.made_by_workers))
        return max(seconds, job.ranks * working / job.cores) + (costs.start if starts else 0.0)

    def enough(self, safe: float) -> float:
        """The smallest share of the dataset with which later epochs are as fast as with the largest safe one."""
        if not safe or self.costs.spec is None:
            return 0.0
        goal = self._later(safe) * (1 + _NOTHING)
        low, high = 0.0, safe
        if self._later(0.0) <= goal:
            return 0.0
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (low, middle) if self._later(middle) <= goal else (middle, high)
        return high

    def worst(self) -> Planner:
        """The calculator for the case in which a cache gains least."""
        return self.case(uncached="low", missed="high", hit="high", step="high")

    def case(self, uncached: End, missed: End, hit: End, step: End) -> Planner:
        """The calculator for the case that of each cost this end of what was measured is true."""
        costs = self.costs
        costs = replace(
            costs, uncached=costs.uncached.at(uncached), missed=costs.missed.at(missed), hit=costs.hit.at(hit)
        )
        timed = None if self.step is None else replace(self.step, seconds=self.step.seconds.at(step))
        return Planner(self.job, costs, timed)

    def _later(self, share: float) -> float:
        rate = expected_hit_rate(self._ring(share), (1 / self.job.nodes,) * self.job.nodes, 1, 0.0, "sticky")
        return self.epoch(rate, share, 1)

    def _ring(self, share: float) -> Ring:
        nodes, slots = self.job.nodes, math.floor(round(share * self.job.samples, 6))
        return Ring.cut(self.job.samples, (1 / nodes,) * nodes, (slots if self.slot_bytes else 0,) * nodes)

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
import os
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_stocache.cache.placement import Ring
from lightning_stocache.insight.costs import Costs, Job, Step
from lightning_stocache.insight.theory import expected_hit_rate, moved_share
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import grant, loader_reserve

__all__ = ["Plan", "Planner", "Row", "largest_safe"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOTHING = 0.02  # of an epoch's time: less is no gain, and cannot be told from noise


@dataclass(frozen=True)
class Row:
    """What one budget gives.

    Args:
        budget: as it is written into a config.
        budget_bytes: per node.
        safe: whether this node has room for it.
        samples: that have a slot somewhere in the job.
        hit_rates: per epoch.
        first_epoch: seconds of the loader alone.
        later_epoch: the same of the last epoch.
        first_training: seconds of the epoch with the step; None without a model.
        later_training: the same of the last epoch.
        pays_in: epoch, counted from 1, at whose end training has taken less time than uncached; None if never.
    """

    budget: str
    budget_bytes: int
    safe: bool
    samples: int
    hit_rates: tuple[float, ...]
    first_epoch: float
    later_epoch: float
    first_training: float | None
    later_training: float | None
    pays_in: int | None


@dataclass(frozen=True)
class Plan:
    """The table and what follows from it.

    Args:
        job: what was planned.
        costs: what it is made from.
        step: the training step, if there is a model.
        rows: by rising budget, uncached first.
        budget: what to write into the config as `cache.budget`.
        num_workers: what to write there for each rank's loader.
        sentences: what follows, for people.
    """

    job: Job
    costs: Costs
    step: Step | None
    rows: tuple[Row, ...]
    budget: str
    num_workers: int
    sentences: tuple[str, ...]


def largest_safe(
    dataset_bytes: int, batch_bytes: int, num_workers: int, prefetch_factor: int | None, ranks: int
) -> int:
    """The bytes that a cache of this size may take on this node, at most: of /dev/shm or, if that is small, of a memfd.

    Example:
        >>> largest_safe(2**20, batch_bytes=2**10, num_workers=0, prefetch_factor=None, ranks=1) == 2**20
        True
    """
    places = [memory_directory()] + ([None] if hasattr(os, "memfd_create") else [])
    frees = [FreeMemory.measure(place) for place in places]
    reserve = loader_reserve(batch_bytes, num_workers, prefetch_factor, ranks, own=frees[0].own)
    return max(grant(Budget.parse("auto"), dataset_bytes, free, reserve, ranks).bytes for free in frees)


class Planner:
    """The calculator for one job.

    Args:
        job: the training.
        costs: what a sample costs.
        step: what a step costs, if there is a model.

    Example:
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> from lightning_stocache.insight.costs import Reads
        >>> costs = Costs(SampleSpec.infer(1.5), Reads(0.01, 0.01, 0.01), 0.0, uncached=0.01, missed=0.01, hit=1e-5)
        >>> planner = Planner(Job(samples=1000, batch_size=10, safe_bytes=2**20), costs, Step(0.05))
        >>> half = planner.row(0.5)
        >>> half.samples, half.hit_rates[:2], round(half.later_epoch, 3), round(half.later_training, 3)
        (500, (0.0, 0.5), 5.005, 10.005)
        >>> planner.plan().budget
        'auto'
    """

    def __init__(self, job: Job, costs: Costs, step: Step | None = None) -> None:
        self.job, self.costs, self.step = job, costs, step
        self.slot_bytes = costs.spec.slot_bytes if costs.spec is not None else 0
        self.dataset_bytes = job.samples * self.slot_bytes
        self.pot_bytes = self.dataset_bytes + job.other_bytes

    def plan(self) -> Plan:
        """The table over shares of the dataset, with the largest budget that is safe and the one to take among them."""
        safe = min(self.job.safe_bytes / self.pot_bytes, 1.0) if self.pot_bytes else 0.0
        share = self.enough(safe)
        percent = math.ceil(round(100 * share, 3))
        whole = share > 0.95 * safe  # that near, what is free when the job starts may as well be taken
        budget = "0" if percent == 0 else "auto" if whole else f"{percent}%"
        shares = {*_SHARES, *([safe] if self.pot_bytes else []), *([] if whole else [percent / 100])}
        rows = tuple(self.row(one) for one in sorted(shares))
        if not self.pot_bytes:
            rows = rows[:1]
        workers, advice = self.workers(share)
        return Plan(self.job, self.costs, self.step, rows, budget, workers, (*self._told(share, safe), advice))

    def row(self, share: float) -> Row:
        """What a budget of a share of the dataset gives."""
        budget_bytes = math.floor(share * self.pot_bytes)
        rates = self.hit_rates(share)
        seconds = [self.epoch(rate, share, number) for number, rate in enumerate(rates)]
        training = [self.epoch(rate, share, number, step=True) for number, rate in enumerate(rates)]
        plain = [self.epoch(0.0, 0.0, number, step=True) for number in range(len(rates))]
        pays = (epoch for epoch in range(1, len(rates) + 1) if sum(training[:epoch]) < sum(plain[:epoch]))
        with_step = self.step is not None
        percent = 100 * share
        return Row(
            f"{percent:.0f}%" if share == 0 or abs(percent - round(percent)) < 1e-9 else f"{percent:.1f}%",
            budget_bytes,
            budget_bytes <= self.job.safe_bytes,
            round(self._ring(share).coverage * self.job.samples),
            tuple(rates),
            seconds[0],
            seconds[-1],
            training[0] if with_step else None,
            training[-1] if with_step else None,
            next(pays, None) if share else None,
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

    def epoch(self, hit_rate: float, share: float, number: int, *, step: bool = False) -> float:
        """Seconds of an epoch, counted from 0, in the loader alone or with the step."""
        job, costs = self.job, self.costs
        steps = job.batches * self.step.seconds if step and self.step is not None else 0.0
        cpu = job.batches * self.step.cpu if step and self.step is not None else 0.0
        samples, cached = job.own_samples, share > 0 and costs.spec is not None
        later = costs.reads.repeated / costs.reads.first if job.hot and number else 1.0
        loading = samples * (1 - hit_rate) * (costs.missed if cached else costs.uncached) * later
        gather = samples * hit_rate * costs.hit
        if hit_rate >= 1:
            seconds = max(gather, steps)
        elif not job.num_workers:
            seconds = loading + gather + steps
        elif not cached or costs.made_by_workers:
            seconds = max(loading + gather, steps)
        else:
            seconds = max(loading, samples * costs.hit + steps)
        working = samples * ((1 - hit_rate) * (costs.reads.cpu + costs.transform) + hit_rate * costs.hit) + cpu
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

    def workers(self, share: float) -> tuple[int, str]:
        """The advice on `num_workers`, and why."""
        job, costs, reads = self.job, self.costs, self.costs.reads
        work = reads.first + costs.transform
        busy = min((reads.cpu + costs.transform) / work, 1.0) if work else 1.0  # the rest of the time it waits
        most = max(int(job.cores / job.ranks / max(busy, 0.25)), 1)
        if self.step is None:
            needed, why = most, f"as many as {job.cores} cores can feed"
        else:
            needed = math.ceil(job.batch_size * work / self.step.seconds) if self.step.seconds else most
            why = "so that loading keeps up with the step in epoch one"
            if needed > most:
                why = f"as many as {job.cores} cores can feed; keeping up with the step would take {needed}"
            needed = min(needed, most)
        full = share >= 1 and not costs.made_by_workers and costs.spec is not None and job.nodes == 1
        after = " From epoch two on all is read from memory, and there are no workers." if full else ""
        return needed, f"num_workers={needed} per rank (now {job.num_workers}): {why}.{after}"

    def _later(self, share: float) -> float:
        rate = expected_hit_rate(self._ring(share), (1 / self.job.nodes,) * self.job.nodes, 1, 0.0, "sticky")
        return self.epoch(rate, share, 1, step=True)

    def _ring(self, share: float) -> Ring:
        nodes, slots = self.job.nodes, math.floor(round(share * self.job.samples, 6))
        return Ring.cut(self.job.samples, (1 / nodes,) * nodes, (slots if self.slot_bytes else 0,) * nodes)

    def _told(self, share: float, safe: float) -> Sequence[str]:
        if self.costs.reason is not None:
            return [f"Nothing can be cached. {self.costs.reason}"]
        told = []
        if safe < 1:
            told.append(f"This node has room for {100 * safe:.1f} % of it: see python -m lightning_stocache doctor.")
        if share == 0:
            told.append("No budget gains anything: training waits for its steps, not for data.")
        elif share <= 0.95 * safe:
            why = ": training then waits for its steps" if self.step is not None else ""
            told.append(f"Beyond {100 * share:.0f} % of the dataset nothing is gained{why}.")
        return told

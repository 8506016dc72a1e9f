"""What follows from a plan's numbers: the budget to take, how many workers, and whether that can be told at all.

Every cost is a spread of repeated measurements. A budget below `auto` is advised only where the ends of the spreads say
the same as their medians: a cache gains if it is faster where the source was at its quickest and the cache at its
slowest; nothing is gained if it is not faster the other way round. Else the ranges overlap: the advice is that it
cannot be told, and `auto`, which does no harm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_stocache.insight.planner import MOST, WORST, Costs, Job, Planner, Row, Step

__all__ = ["Plan", "advise"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class Plan:
    """The table, what it is made from, and what follows from it."""

    job: Job
    costs: Costs
    step: Step | None  # if there is a model
    rows: tuple[Row, ...]  # by rising budget, uncached first
    budget: str  # what to write into the config as `cache.budget`
    num_workers: int  # what to write there for each rank's loader
    sentences: tuple[str, ...]  # what follows, for people


def advise(planner: Planner) -> Plan:
    """The table over shares of the dataset, with the largest budget that is safe and the one to take among them.

    Example:
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> from lightning_stocache.insight.planner import Reads, Spread
        >>> slow, quick = Spread.of([0.009, 0.01, 0.012]), Spread.of([1e-5])
        >>> costs = Costs(SampleSpec.infer(1.5), Reads(0.01, slow, 0.01), 0.0, uncached=slow, missed=slow, hit=quick)
        >>> advise(Planner(Job(samples=1000, batch_size=10, safe_bytes=2**20), costs)).budget
        'auto'
    """
    job, pot = planner.job, planner.pot_bytes
    safe = min(job.safe_bytes / pot, 1.0) if pot else 0.0
    share, sentences = _budget(planner, safe)
    percent = math.ceil(round(100 * share, 3))
    budget = "0" if percent == 0 else "auto" if share == safe else f"{percent}%"
    shares = {*_SHARES, safe, *([] if share == safe else [percent / 100])} if pot else {0.0}
    rows = tuple(planner.row(share) for share in sorted(shares))
    workers, sentence = _workers(planner, share)
    return Plan(job, planner.costs, planner.step, rows, budget, workers, (*sentences, sentence))


def _budget(planner: Planner, safe: float) -> tuple[float, list[str]]:
    """The share of the dataset to take, and why."""
    if planner.costs.reason is not None:
        return 0.0, [f"Nothing can be cached. {planner.costs.reason}"]
    sentences = []
    if safe < 1:
        sentences.append(f"This node has room for {100 * safe:.1f} % of it: see python -m lightning_stocache doctor.")
    enough, gains = planner.enough(safe, MOST), planner.enough(safe, WORST) > 0
    wait = "training waits for its steps" if planner.step is not None else ""
    if not enough:
        why = wait + ", not for data" if wait else "the source is as fast as the cache"
        return 0.0, [*sentences, f"No budget gains anything: {why}."]
    if gains:
        if enough > 0.95 * safe:  # that near, what is free when the job starts may as well be taken
            return safe, sentences
        told = f"Beyond {100 * enough:.0f} % of the dataset nothing is gained" + (f": {wait}." if wait else ".")
        return enough, [*sentences, told]
    why = "repeated measurements differ by more than a cache would gain"
    told = f"Cannot tell whether a budget gains anything: {why}. Run it again when the machine is quiet."
    return safe, [*sentences, told]


def _workers(planner: Planner, share: float) -> tuple[int, str]:
    """The advice on `num_workers`, and why."""
    job, costs, reads = planner.job, planner.costs, planner.costs.reads
    work = reads.first + costs.transform
    busy = min((reads.cpu + costs.transform) / work, 1.0) if work else 1.0  # the rest of the time it waits
    most = max(int(job.cores / job.ranks / max(busy, 0.25)), 1)
    step = planner.step.seconds.median if planner.step is not None else 0.0
    needed = math.ceil(job.batch_size * work / step) if step else most
    why = f"as many as {job.cores} cores can feed"
    if needed > most:
        why += f"; keeping up with the step would take {needed}"
    elif step:
        why = "so that loading keeps up with the step in epoch one"
    needed = min(needed, most)
    full = share >= 1 and not costs.made_by_workers and costs.spec is not None and job.nodes == 1
    after = " From epoch two on all is read from memory, and there are no workers." if full else ""
    return needed, f"num_workers={needed} per rank (now {job.num_workers}): {why}.{after}"

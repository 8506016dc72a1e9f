"""What a budget would give, before it is paid: from the measured paces to the seconds of an epoch.

The law is linear. Of the n samples of a rank the share h comes from the cache:

    loading = n * ((1 - h) * missed + h * hit)

In epoch one h is 0; later it is the share of the samples that have a slot on some node. Without a cache a sample takes
`uncached`. The training steps are added to that where the main process loads, and hide it where workers do, or where
all samples are hits: then an epoch takes the longer of the two.

Advice follows from ranges. A cache gains if it is faster with the lowest uncached pace and its own highest paces; it
gains nothing if it is no faster the other way round. In between the ranges overlap: it cannot be told, and the advice
is `auto`, which does no harm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_stocache.insight.measurement import Paces, Spread
from lightning_stocache.sampling.locality_sampler import Mode

__all__ = ["Job", "Plan", "Row", "plan"]

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
_NOTHING = 0.02  # of an epoch's time: less is no gain


@dataclass(frozen=True)
class Job:
    """The training that is planned. All nodes are alike."""

    samples: int
    batch_size: int  # of one rank
    num_workers: int = 0  # of one rank
    nodes: int = 1
    ranks: int = 1  # on each node
    mode: Mode = "locality"  # how samples are dealt to nodes
    other_bytes: int = 0  # cached size of the sets that share the budget (validation)
    safe_bytes: int = 0  # the largest budget that is safe on this node
    threads: str = ""  # how many torch has in each rank, and who says so


@dataclass(frozen=True)
class Row:
    """What one budget gives. Seconds are those of training, or of the loader alone if there is no model."""

    budget: str  # as it is written into a config
    budget_bytes: int  # per node
    safe: bool  # this node has room for it
    samples: int  # that have a slot somewhere in the job
    hit_rate: float  # of later epochs
    first_epoch: Spread  # seconds; lowest, median, highest, as the next two
    later_epoch: Spread  # seconds
    faster: Spread  # how many times as fast a later epoch is as an uncached one
    pays_in: int | None  # the epoch, from 1, at whose end training is ahead of uncached; None: never, or cannot tell


@dataclass(frozen=True)
class Plan:
    """The table, what it is made from, and what follows from it."""

    job: Job
    paces: Paces
    step: Spread | None  # seconds a batch, if there is a model
    rows: tuple[Row, ...]  # by rising budget, uncached first
    budget: str  # what to write into the config as `cache.budget`
    sentences: tuple[str, ...]  # what follows, for people


def plan(job: Job, paces: Paces, step: Spread | None = None) -> Plan:
    """Make the table over shares of the dataset, with the largest safe budget and the advised one among them.

    Args:
        job: the training.
        paces: seconds a sample of one rank's loader.
        step: seconds of a training step, if there is a model.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> slow, quick = Spread((0.009, 0.01, 0.012)), Spread((1e-5,))
        >>> paces = Paces(slow, slow, quick, SampleSpec.infer(1.5))
        >>> plan(Job(samples=1000, batch_size=10, safe_bytes=2**20), paces).budget
        'auto'
    """
    law = _Law(job, paces, step)
    pot = law.pot_bytes
    safe = min(job.safe_bytes / pot, 1.0) if pot else 0.0
    share, sentences = _advice(law, safe, step is not None)
    percent = math.ceil(round(100 * share, 3))
    budget = "0" if percent == 0 else "auto" if share == safe else f"{percent}%"
    shares = {*_SHARES, safe, *([] if share == safe else [percent / 100])} if pot else {0.0}
    return Plan(job, paces, step, tuple(map(law.row, sorted(shares))), budget, tuple(sentences))


class _Law:
    """Seconds of an epoch by the share of the dataset that a node caches."""

    def __init__(self, job: Job, paces: Paces, step: Spread | None) -> None:
        self.job, self.paces, self.step = job, paces, step or Spread((0.0,))
        self.samples = job.samples / (job.nodes * job.ranks)  # of one rank in an epoch
        self.batches = math.ceil(self.samples / job.batch_size)
        slot_bytes = paces.codec.slot_bytes if paces.codec is not None else 0
        self.pot_bytes = job.samples * slot_bytes + (job.other_bytes if slot_bytes else 0)

    def hit_rate(self, share: float) -> float:
        """The hit rate of later epochs. Nodes to which samples are dealt at random do not add up."""
        slots = math.floor(round(share * self.job.samples, 6)) / self.job.samples
        return slots if self.job.mode == "global" else min(self.job.nodes * slots, 1.0)

    def epoch(self, hit_rate: float, loaded: float, hit: float, step: float) -> float:
        """Seconds of an epoch, from seconds a sample loaded, a sample hit and a step."""
        loading = self.samples * ((1 - hit_rate) * loaded + hit_rate * hit)
        steps = self.batches * step
        return loading + steps if hit_rate < 1 and not self.job.num_workers else max(loading, steps)

    def row(self, share: float) -> Row:
        """What a budget of a share of the dataset gives."""
        uncached, hit, step = self.paces.uncached, self.paces.hit, self.step
        missed, rate = self.paces.missed if share else uncached, self.hit_rate(share)
        without, first, later = (self._spread(*each) for each in ((0.0, uncached), (0.0, missed), (rate, missed)))
        faster = (
            self.epoch(0.0, uncached.low, 0.0, step.high) / self.epoch(rate, missed.high, hit.high, step.high),
            without.median / later.median,
            self.epoch(0.0, uncached.high, 0.0, step.low) / self.epoch(rate, missed.low, hit.low, step.low),
        )
        pays_in = None
        if share and faster[0] > 1:
            pays_in = max(math.floor((first.median - without.median) / (without.median - later.median)) + 2, 2)
        percent, budget_bytes = round(100 * share, 7), math.floor(share * self.pot_bytes)
        return Row(
            budget=f"{percent:.0f}%" if percent == int(percent) else f"{percent:.1f}%",
            budget_bytes=budget_bytes,
            safe=budget_bytes <= self.job.safe_bytes,
            samples=round(min(self.job.nodes * share, 1.0) * self.job.samples),
            hit_rate=rate,
            first_epoch=first,
            later_epoch=later,
            faster=Spread(faster),
            pays_in=pays_in,
        )

    def enough(self, safe: float) -> float:
        """The smallest share, in whole percents, that is as good as the largest safe one.

        It is that for the highest miss, the lowest hit and the lowest step of those measured: they need it largest.
        """
        paces = self.paces.missed.high, self.paces.hit.low, self.step.low
        goal = self.epoch(self.hit_rate(safe), *paces) * (1 + _NOTHING)
        percents = (percent / 100 for percent in range(1, math.ceil(100 * safe)))
        return next((share for share in percents if self.epoch(self.hit_rate(share), *paces) <= goal), safe)

    def _spread(self, hit_rate: float, loaded: Spread) -> Spread:
        ends = ((each.low, each.median, each.high) for each in (loaded, self.paces.hit, self.step))
        return Spread(tuple(self.epoch(hit_rate, *end) for end in zip(*ends, strict=True)))


def _advice(law: _Law, safe: float, has_step: bool) -> tuple[float, list[str]]:
    """The share of the dataset to cache, and why."""
    if law.paces.codec is None:
        return 0.0, [f"Nothing can be cached. {law.paces.reason}"]
    sentences = []
    if safe < 1:
        sentences.append(f"This node has room for {100 * safe:.1f} % of it: see python -m lightning_stocache doctor.")
    if law.paces.disk_bytes:
        sentences.append(
            "The source was read from a disk. Later epochs may find it in the page cache, and be faster without a "
            "cache, too: run this again to see."
        )
    faster = law.row(safe).faster
    if faster.high <= 1 + _NOTHING:
        why = "training waits for its steps, not for data" if has_step else "the source is as fast as the cache"
        return 0.0, [*sentences, f"No budget gains anything: {why}."]
    if faster.low <= 1 + _NOTHING:
        why = "repeated measurements differ by more than a cache would gain"
        return safe, [*sentences, f"Cannot tell whether a budget gains anything: {why}."]
    enough = law.enough(safe)
    if enough > 0.95 * safe:  # that near, what is free when the job starts may as well be taken
        return safe, sentences
    why = ": training waits for its steps" if has_step else ""
    return enough, [*sentences, f"Beyond {100 * enough:.0f} % of the dataset nothing is gained{why}."]

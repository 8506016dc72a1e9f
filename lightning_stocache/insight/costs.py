"""The facts that a plan is made of: how the user loads, what a sample and a step cost, what is to be trained."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.sampler import LocalitySampler, Mode

__all__ = ["Costs", "End", "Job", "Loading", "PlanError", "Reads", "Spread", "Step"]

End = Literal["low", "median", "high"]


class PlanError(Exception):
    """Nothing can be planned, and the message says why in one sentence."""


@dataclass(frozen=True)
class Spread:
    """What several measurements of one thing gave.

    Args:
        low: the lowest.
        median: the one to plan with.
        high: the highest.

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

    def at(self, end: End) -> Spread:
        """The spread as if only this end had been measured."""
        return Spread.of([getattr(self, end)])


@dataclass(frozen=True)
class Loading:
    """How the user's training loader loads, one rank of it.

    Args:
        batch_size: samples per batch.
        num_workers: worker processes.
        shuffle: whether it shuffles.
        persistent: whether its workers live on from epoch to epoch.
        settings: further arguments of DataLoader: `collate_fn`, `pin_memory`, `prefetch_factor` and so on.
    """

    batch_size: int
    num_workers: int = 0
    shuffle: bool = True
    persistent: bool = True
    settings: Mapping[str, Any] = field(default_factory=dict)

    def few(self, dataset: CachedDataset, batches: list[list[int]]) -> CachedLoader:
        """A loader of these batches."""
        return CachedLoader(dataset, batch_sampler=batches, num_workers=self.num_workers, **self.settings)

    def whole(self, dataset: CachedDataset) -> CachedLoader:
        """A loader of whole epochs, sampled as in training."""
        size, settings = self.batch_size, dict(self.settings) | {"persistent_workers": self.num_workers > 0}
        sampler = LocalitySampler(dataset, 1, 0, shuffle=self.shuffle, batch_size=size, ring=None, nodes=((0,),))
        return CachedLoader(dataset, size, sampler=sampler, num_workers=self.num_workers, **settings)


@dataclass(frozen=True)
class Reads:
    """The source in one process.

    Args:
        first: seconds per sample, read for the first time by this process.
        repeated: the same samples again.
        cpu: seconds of the processor per repeated read; the rest is waiting.
        from_disk: bytes per sample that the first reads fetched from a disk; None where the system does not say.
    """

    first: float
    repeated: Spread
    cpu: float
    from_disk: float | None = None


@dataclass(frozen=True)
class Costs:
    """Seconds per sample of one rank.

    Args:
        spec: what a sample looks like in the cache; None if it cannot be cached.
        reads: the source in one process.
        transform: what comes after the cache, on the CPU, in one process.
        uncached: the loader without a cache.
        missed: the loader where every sample is loaded and stored.
        hit: the loader where every sample is cached.
        start: seconds until the workers are there.
        made_by_workers: whether whole batches are made in the workers, hits too.
        reason: why nothing can be cached, if so.
    """

    spec: SampleSpec | None
    reads: Reads
    transform: float
    uncached: Spread
    missed: Spread
    hit: Spread
    start: float = 0.0
    made_by_workers: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Step:
    """A training step, one batch of one rank.

    Args:
        seconds: from having a batch to asking for the next one.
        cpu: seconds of the processor in it.
    """

    seconds: Spread
    cpu: float = 0.0


@dataclass(frozen=True)
class Job:
    """The training that is planned.

    Args:
        samples: length of the dataset.
        batch_size: of one rank.
        num_workers: of one rank.
        nodes: number of nodes, all as this one.
        ranks: ranks on each node.
        epochs: number of epochs.
        mode: the sampler's.
        other_bytes: cached size of the sets that share the budget (validation).
        safe_bytes: the largest budget that is safe on this node.
        cores: of this node.
        persistent: whether workers live on from epoch to epoch.
        hot: whether repeated reads are what later epochs pay.
        load: processes that wanted a core, per core of the machine, in the minute before anything was measured.
    """

    samples: int
    batch_size: int
    num_workers: int = 0
    nodes: int = 1
    ranks: int = 1
    epochs: int = 10
    mode: Mode = "locality"
    other_bytes: int = 0
    safe_bytes: int = 0
    cores: int = 1
    persistent: bool = True
    hot: bool = False
    load: float = 0.0

    @property
    def own_samples(self) -> float:
        """Samples of one rank in an epoch."""
        return self.samples / (self.nodes * self.ranks)

    @property
    def batches(self) -> int:
        """Batches of one rank in an epoch."""
        return math.ceil(self.own_samples / self.batch_size)

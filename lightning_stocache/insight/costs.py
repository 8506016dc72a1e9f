"""The facts that a plan is made of: how the user loads, what a sample and a step cost, what is to be trained."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.sampler import LocalitySampler, Mode

__all__ = ["Costs", "Job", "Loading", "PlanError", "Reads", "Step"]


class PlanError(Exception):
    """Nothing can be planned, and the message says why in one sentence."""


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
        repeated: the same samples once more.
        cpu: seconds of the processor per repeated read; the rest is waiting.
        from_disk: bytes per sample that the first reads fetched from a disk; None where the system does not say.
    """

    first: float
    repeated: float
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
    uncached: float
    missed: float
    hit: float
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

    seconds: float
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

    @property
    def own_samples(self) -> float:
        """Samples of one rank in an epoch."""
        return self.samples / (self.nodes * self.ranks)

    @property
    def batches(self) -> int:
        """Batches of one rank in an epoch."""
        return math.ceil(self.own_samples / self.batch_size)

"""What the hit rate should be, and what is wrong if it is not.

A cache that silently does nothing is the commonest failure of caches. So the hit rate of each epoch is compared with
the one that theory predicts for the arcs, the ranks and the sampler in use, and for as many samples as the epochs drew:
with `limit_train_batches`, or after a checkpoint, that is not all of them.

There is a formula for torch's own samplers, DistributedSampler and LocalitySampler. For any other there is none: what
it will draw cannot be known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.insight.theory import expected_hit_rate, expected_with_replacement, moved_share
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.training.loaders import cached_datasets, loaders_in

__all__ = ["Expectation"]

_TOLERANCE = 0.05  # the formula is exact to 0.002 for full epochs; short epochs of small datasets spread by 0.012
_SPREAD = 3  # standard deviations of what is drawn at random, which is much where an epoch draws a hundred samples

Order = Literal["anew", "same", "weighted", "unknown"]
"""How epochs differ: each draws anew without replacement, all draw the same, each sample by its weight."""


class Expectation:
    """The prediction for one training set, epoch by epoch.

    Args:
        trainer: whose loader and sampler are in use.
        dataset: the cached training set.
    """

    def __init__(self, trainer: Trainer, dataset: CachedDataset) -> None:
        self._dataset = dataset
        loader = next(loader for loader in loaders_in(trainer.train_dataloader) if cached_datasets(loader))
        self._sampler: Any = loader.sampler
        self._order = _order(loader, trainer.world_size)
        if self._order == "weighted" and cached_in(loader.dataset) is not dataset:
            self._order = "unknown"  # a Subset, say, whose indices are not the cache's
        of_loader: Any = loader.dataset
        self._samples = len(getattr(self._sampler, "indices", of_loader))
        self._mode: Mode = self._sampler.mode if isinstance(self._sampler, LocalitySampler) else "global"
        self._ready = 0.0  # share of the slots that were ready before the first epoch
        self._served: list[int] = []
        ring, group = dataset.ring, dataset.group
        self._moved = 0.0
        if ring is not None and len(group.nodes) > 1 and self._mode == "locality":
            self._moved = moved_share(ring, group.nodes, loader.batch_size or 1)

    def hit_rate(self, metrics: Mapping[str, float]) -> float | None:
        """The predicted hit rate of the epoch that ends now; None where no formula holds.

        Args:
            metrics: of this epoch.
        """
        ring, group = cached_source(self._dataset).opened.known_ring, self._dataset.group
        before, served = self._served[:], int(sum(metrics[name] for name in ("hits", "misses", "bypasses")))
        self._served.append(served)
        if ring is None or self._order == "unknown" or len(self._dataset) != ring.arcs[0].size:
            return None  # no cache, no formula, or a source that has grown
        if not before and (slots := sum(arc.slots for arc in ring.arcs)):
            self._ready = max(metrics["fill_fraction"] - metrics["fills"] / slots, 0.0)
        if self._order == "weighted":
            known = not self._ready  # which indices they were is not known
            return expected_with_replacement(ring, _weights(self._sampler), sum(before), served) if known else None
        if served > self._samples + group.world:  # what is more than padding was drawn twice
            return None
        whole = served if self._order == "same" else self._samples
        drawn = [self._ready, *(min(count / max(whole, 1), 1.0) for count in before)]
        return expected_hit_rate(ring, group.shares, len(drawn), self._moved, self._mode, drawn)

    def complaint(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong, in words, if the hit rate is well below the predicted one."""
        ring, measured = cached_source(self._dataset).opened.known_ring, metrics["hit_rate"]
        expected = metrics.get("hit_rate_expected")
        overlapping = ring is not None and sum(arc.slots for arc in ring.arcs) > ring.arcs[0].size
        several = len(self._dataset.group.nodes) > 1
        if expected is None or (several and overlapping):
            return None  # where arcs overlap, the formula leaves out a lag
        spread = math.sqrt(expected * (1 - expected) / max(self._served[-1], 1))
        if measured >= expected - _TOLERANCE - _SPREAD * spread:
            return None
        return (
            f"the hit rate of this epoch is {100 * measured:.1f} %, where {100 * expected:.1f} % were to be expected:\n"
            f"{self._cause(metrics['fill_fraction'])}"
        )

    def _cause(self, fill_fraction: float) -> str:
        if fill_fraction < 1:
            return (
                f"only {100 * fill_fraction:.1f} % of the slots are filled; memory may have run out (see the warnings "
                "above)"
            )
        if len(self._dataset.group.nodes) > 1 and not isinstance(self._sampler, LocalitySampler):
            return f"{type(self._sampler).__name__} deals samples to nodes that do not have them; use LocalitySampler"
        return "the source may be made anew in every epoch, or samples be asked for more than once"


def _order(loader: DataLoader[Any], world: int) -> Order:
    sampler: Any = loader.sampler
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return "unknown"
    if isinstance(sampler, LocalitySampler) or type(sampler) is DistributedSampler:
        return "anew" if sampler.shuffle else "same"
    if world > 1:  # each rank draws by itself, perhaps the same as the others
        return "unknown"
    if type(sampler) is SequentialSampler:
        return "same"
    if getattr(sampler, "replacement", False):
        return "weighted" if type(sampler) in (RandomSampler, WeightedRandomSampler) else "unknown"
    return "anew" if type(sampler) in (RandomSampler, SubsetRandomSampler) else "unknown"


def _weights(sampler: Any) -> torch.Tensor:
    weights: torch.Tensor | None = getattr(sampler, "weights", None)
    return torch.ones(len(sampler.data_source)) if weights is None else weights

"""A loop of two ranks over one cache, for test_meter: without Lightning, which would take the ranks seconds."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DistributedSampler

from lightning_stocache.insight.meter import CacheMeter
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.sources import CountedSource

__all__ = ["loop"]


def loop(rank: int, samples: int) -> Any:
    """What the rank's meter says of two epochs, and what was granted."""
    dataset = CachedDataset(CountedSource(samples), defer=True)
    dataset.share()
    sampler = DistributedSampler(dataset, 2, rank)
    meter = CacheMeter(CachedLoader(dataset, batch_size=4, sampler=sampler))
    found = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        list(meter)
        found.append(meter.epoch())
    granted = meter.hyperparameters()["stocache"]
    dataset.close()
    return found, granted["ranks"], granted["nodes"]

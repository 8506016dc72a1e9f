"""A loop of two ranks over one cache, for test_meter: without Lightning, which would take the ranks seconds."""

from typing import Any

from torch.utils.data import DistributedSampler

from lightning_stocache.insight.meter import CacheMeter
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.node.group import NodeGroup
from tests.sources import CountedSource

__all__ = ["loop", "on_two_nodes"]


def loop(rank: int, samples: int) -> Any:
    """The metrics of this rank's meter for two epochs, and the numbers of ranks and nodes."""
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


def on_two_nodes(rank: int, samples: int) -> Any:
    """The expected hit rates of three epochs on two nodes, whose memory holds a quarter and all of the dataset."""
    dataset = CachedDataset(CountedSource(samples), budget=("25%", "100%")[rank], defer=True)
    dataset.share(NodeGroup.discover(key=rank))
    found = []
    for sampling in ("locality", "global"):
        loader = CachedLoader(dataset, batch_size=4, shuffle=True, sampling=sampling)
        meter = CacheMeter(loader)
        for epoch in range(3):
            loader.set_epoch(epoch)
            list(meter)
            found.append(meter.epoch().get("stocache/hit_rate_expected"))
    dataset.close()
    return found

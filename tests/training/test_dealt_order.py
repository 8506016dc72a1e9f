"""On several ranks a training loader without shuffling is dealt as Lightning deals it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import DataLoader

from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.options import CacheOptions


@pytest.mark.processes  # set-up reads samples in a process of its own
def test_lightning_shuffles_what_it_deals_out_for_training():
    """Lightning gives a training loader a DistributedSampler that shuffles, whatever its order was; so does a door."""
    loader: DataLoader[Any] = DataLoader(list(range(24)), batch_size=3)  # type: ignore[arg-type]
    ranks = {"num_replicas": 2, "rank": 0}
    trainer: Any = SimpleNamespace(distributed_sampler_kwargs=ranks, overfit_batches=0, state=SimpleNamespace(fn=None))
    trainer.lightning_module, trainer.callbacks = None, []
    caches = CallCaches(CacheOptions(budget="1MiB"))
    try:
        renewed = CallLoaders(caches, {"train": lambda: loader}, ["train"], trainer=trainer)("train")
        assert renewed.sampler.shuffle is True
    finally:
        caches.close()

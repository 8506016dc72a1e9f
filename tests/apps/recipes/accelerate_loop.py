"""The recipe of Accelerate, in one process or several (torchrun): equal batches, and each sample is loaded once.

Also what the guide says of a CachedLoader, of `cache_loader` after `prepare`, and of the settings of `prepare`.
"""

import os
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import accelerate
import torch
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from lightning_stocache import CachedDataset, CachedLoader, cache_loader
from lightning_stocache.loading.loader_tree import cached_in_leaves
from tests.apps.recipes.guide import run
from tests.cache.leaves import same
from tests.sources import CountedSource

SAMPLES = 90
RANK = int(os.environ.get("RANK", 0))
SETTINGS = ({}, {"split_batches": True}, {"dispatch_batches": True}, {"use_seedable_sampler": True})


def three_epochs(loader: Any) -> list[Any]:
    """The batches, and the state of torch's generator after them."""
    batches = [batch for _ in range(3) for batch in loader]
    return [*batches, torch.get_rng_state()]


def by_recipe(source: Any, workers: int, cached: bool) -> Any:
    """The loader of the guide."""
    return run("Accelerate", cached=cached, photos=source, workers=workers, cpu=True)["loader"]


def by_cached_loader(source: Any, workers: int) -> Any:
    """A CachedLoader, which `prepare` makes anew."""
    accelerator = accelerate.Accelerator(cpu=True)
    dataset = CachedDataset(source, "4MiB", defer=True)
    dataset.share()
    loader = accelerator.prepare(CachedLoader(dataset, 8, shuffle=True, num_workers=workers))
    assert not isinstance(loader, CachedLoader)
    return loader


def by_prepared_loader(source: Any, workers: int) -> Any:
    """A loader that is cached after `prepare`."""
    accelerator = accelerate.Accelerator(cpu=True)
    return cache_loader(accelerator.prepare(DataLoader(source, 8, shuffle=True, num_workers=workers)), "4MiB")


def compare(settings: dict[str, Any], workers: int) -> None:
    """The batches of all ways are equal; samples of the cache are loaded once, on any rank."""
    configured = partial(accelerate.Accelerator, dataloader_config=accelerate.DataLoaderConfiguration(**settings))
    with patch.object(accelerate, "Accelerator", configured):
        set_seed(1)
        expected = three_epochs(by_recipe(CountedSource(SAMPLES), workers, cached=False))
        ways = {"recipe": partial(by_recipe, cached=True), "loader": by_cached_loader, "prepared": by_prepared_loader}
        for name, way in ways.items():
            path = Path(f"loads-{RANK}-{workers}-{name}-{'-'.join(settings)}").absolute()
            source = CountedSource(SAMPLES, log_path=path)
            set_seed(1)
            loader = way(source, workers)
            assert same(three_epochs(loader), expected), (name, workers, settings)
            [dataset] = cached_in_leaves(loader)
            accelerate.PartialState().wait_for_everyone()
            counts = dataset.counters.totals()
            assert counts.misses + counts.setup_fills <= SAMPLES + 8, (name, counts)  # two ranks may ask at once
            accelerate.PartialState().wait_for_everyone()


for setting in SETTINGS:
    for number in (0, 2):
        compare(setting, number)
print("equal")

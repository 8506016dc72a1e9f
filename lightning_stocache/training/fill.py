"""Fills the named caches of a DataModule before a job, so that the job starts warm.

The caches open as they would for the fit of a job on one node, under the same names. Samples that are stored already
are not loaded again, so a run that was stopped is continued by the next one, and several may run at a time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from tqdm import tqdm

from lightning_stocache.insight.measurement import PlanError
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.prefill import prefill
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.datamodule import StocacheDataModule

__all__ = ["fill"]

_CADENCE = 0.1  # seconds between two looks at how much is filled


def fill(datamodule: Any, caches: CallCaches, workers: int = 0) -> Iterator[tuple[str, bool]]:
    """Fill the caches of training and validation, with a progress bar for each.

    Args:
        datamodule: the DataModule of the job.
        caches: the caches of the job; they have a name.
        workers: processes that load; 0: this one.

    Yields:
        A line about each cache, and whether all samples for which there is room are stored.

    Raises:
        PlanError: the caches have no name, their budget is 0, or nothing can be cached.
        Exception: what a source or a hook raises.
    """
    if caches.options.name is None:
        raise PlanError("only a cache with a name outlives this command: cache.name=photos")
    if all(caches.options.is_off(stage) for stage in ("train", "val")):
        raise PlanError("budget=0 caches nothing: give the budget of the job, such as cache.budget=8GiB")
    datamodule.prepare_data()
    datamodule.setup("fit")
    try:
        if not isinstance(datamodule, StocacheDataModule):  # which has opened them in `setup`
            stages = [stage for stage in ("train", "val") if is_overridden(f"{stage}_dataloader", datamodule)]
            getters = {stage: getattr(datamodule, f"{stage}_dataloader") for stage in stages}
            CallLoaders(caches, getters).open({stage: loader() for stage, loader in getters.items()})
        datasets = [each for each in caches.datasets if isinstance(each, CachedDataset) and each.cache is not None]
        if not datasets:
            raise PlanError("nothing can be cached: the warnings above say why")
        for dataset in datasets:
            yield _filled(cached_source(dataset), workers)
    finally:
        datamodule.teardown("fit")
        caches.close()


def _filled(cached: CachedSource, workers: int) -> tuple[str, bool]:
    cache, name = cached.cache, cached.opened.request.name
    assert cache is not None
    with tqdm(desc=name, total=cache.capacity, initial=cache.filled, unit=" samples") as bar:
        shown = time.monotonic()
        for _ in DataLoader(_Missing(cached, max(workers, 1)), batch_size=None, num_workers=workers):
            if time.monotonic() - shown > _CADENCE:  # other jobs may fill, too
                bar.update(cache.filled - bar.n)
                shown = time.monotonic()
        bar.update(cache.filled - bar.n)
    where = "on the disk" if cache.disk_bytes else "in memory"
    size = format_bytes(cache.disk_bytes or cache.memory_bytes)
    line = f"{name}: {cache.filled:,} of {cached.opened.request.samples:,} samples, {size} {where}"
    missing = cache.capacity - cache.filled
    return (f"{line}; {missing:,} could not be loaded or stored" if missing > 0 else line), missing <= 0


class _Missing(IterableDataset[int]):
    """Loads the samples that are not stored yet, each worker its part. One that is stored on a disk is verified."""

    def __init__(self, cached: CachedSource, workers: int) -> None:
        self._cached, self._workers = cached, workers

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        for _ in prefill(self._cached, 0 if info is None else info.id, self._workers):
            yield 1

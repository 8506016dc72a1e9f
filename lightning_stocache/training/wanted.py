"""What the loaders of a Trainer call will read, and which of it.

What a loader cannot draw needs no slot. It is known from its sampler (`sampling.sampler_domain`), and from the
Trainer's limits where samples come in order: of a validation that ends after fifty batches, and of `overfit_batches`,
for which Lightning has every loader start at the beginning, whatever its sampler.

Nothing is known beforehand where loaders are made anew while training goes on, nor of a cache with a name, which other
jobs read with other loaders, at the same time even: it is for the whole dataset. So is one that is kept for later
calls, where there is memory for all of it, or a part of the dataset was asked for; else it is for what is drawn now.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset, SequentialSampler

from lightning_stocache.cache.placement import Domain
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.setup.request import LoaderSettings
from lightning_stocache.training.sampling import is_default, replicas

__all__ = ["Wanted", "drawn_by", "loader_domain"]


@dataclass(frozen=True)
class Wanted:
    """A dataset that a loader of the call will read.

    Args:
        source: the user's dataset.
        stage: of the loader.
        loader: what it keeps in memory besides.
        domain: what of the dataset it draws; None: all of it, or that is not known.
    """

    source: Dataset[Any]
    stage: str
    loader: LoaderSettings
    domain: Domain | None = None


def loader_domain(trainer: Any, stage: str, loader: DataLoader[Any]) -> Domain | None:
    """The indices that a loader of a stage will draw; None for all, for a stream, or where it is not known."""
    if isinstance(loader.dataset, IterableDataset):
        return None
    length = len(loader.dataset)  # type: ignore[arg-type]
    return drawn_by(trainer, stage, length, loader.batch_size or 1, loader.sampler, loader.batch_sampler)


def drawn_by(
    trainer: Any, stage: str, length: int, batch_size: int, sampler: Any, batch_sampler: Any = None
) -> Domain | None:
    """The indices that a sampler or batch sampler will draw in a stage of a Trainer call.

    Args:
        trainer: of the call; None outside of one.
        stage: of the loader.
        length: number of samples in its dataset.
        batch_size: of one rank.
        sampler: the loader's.
        batch_sampler: the loader's, which says more than the other two.
    """
    if getattr(trainer, "reload_dataloaders_every_n_epochs", 0):
        return None
    if type(batch_sampler) is BatchSampler:
        sampler, batch_size, batch_sampler = batch_sampler.sampler, batch_sampler.batch_size, None
    if stage in ("train", "val") and getattr(trainer, "overfit_batches", 0) > 0 and trainer.state.fn == "fit":
        return None if batch_sampler is not None else _beginning(trainer, stage, length, batch_size)
    if stage == "train" and batch_sampler is None and is_default(sampler) and replicas(trainer)[0] > 1:
        return None  # all is drawn, whatever the sampler leaves out
    in_order = type(sampler) is SequentialSampler or (type(sampler) is DistributedSampler and not sampler.shuffle)
    if trainer is not None and stage != "train" and in_order and batch_sampler is None:
        return _beginning(trainer, stage, length, batch_size)
    return sampler_domain(sampler if batch_sampler is None else batch_sampler, length)


def _beginning(trainer: Any, stage: str, length: int, batch_size: int) -> Domain | None:
    """The first samples, as many as the Trainer's limit lets through; None: all."""
    limit: int | float = getattr(trainer, f"limit_{stage}_batches", 1.0)
    step = batch_size * replicas(trainer)[0]
    batches = limit if isinstance(limit, int) else int(math.ceil(length / step) * limit)
    count = batches * step
    return Domain(np.arange(count), length) if 0 < count < length else None

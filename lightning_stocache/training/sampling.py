"""What the loaders of a Trainer call draw: which sampler a training loader gets, and which indices a loader reaches.

A training loader that shuffles, or reads in order, with the default sampler gets a LocalitySampler: the global batches
of DistributedSampler, dealt so that samples go to nodes that have them. Lightning keeps it, because it is a
DistributedSampler, and calls its `set_epoch`. What another sampler gives is dealt by one, too, where there are several
nodes, in the order in which Lightning's own wrapper deals it; on one node that wrapper does as well. A sampler that
deals to ranks by itself is the user's own and stays.

What a loader cannot draw needs no slot. Its domain is known from its sampler (`sampling.sampler_domain`), and from the
Trainer's limits where samples come in order: of a validation that ends after fifty batches, and of `overfit_batches`,
for which Lightning has every loader start at the beginning, whatever its sampler. Nothing is known beforehand where
loaders are made anew while training goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from lightning_stocache.cache.placement import Domain
from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader_sampler import deals_to_ranks, locality_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.sampling.rolling_sampler import RollingSampler
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.training.lightning_internals import leaves_samplers_alone, say

__all__ = ["check_sampler", "epochs_done", "follow_pools", "loader_domain", "locality_for", "replicas"]


def replicas(trainer: Any, *, always: bool = False) -> tuple[int, int]:
    """How many ranks share the data, and which of them this is: for tensor parallelism fewer than there are ranks.

    Where the Trainer has been told to leave samplers alone (`use_distributed_sampler=False`), a user's loader is one
    rank's own: 1, 0. `always` asks all the same.
    """
    if not always and leaves_samplers_alone(trainer):
        return 1, 0
    arguments = getattr(trainer, "distributed_sampler_kwargs", None) or {}
    return arguments.get("num_replicas", 1), arguments.get("rank", 0)


def epochs_done(trainer: Any) -> int:
    """The epoch that the next training loader is for; right also while a checkpoint is being loaded."""
    return int(trainer.fit_loop.epoch_progress.current.processed) if trainer is not None else 0


def follow_pools(trainer: Any, loaders: Iterable[Any]) -> None:
    """Have training loaders of rolling caches be as long as what is resident, in every epoch. Collective.

    Lightning asks for a length once, unless it asks for the loaders before each epoch.
    """
    growing = False
    for loader in loaders:
        if isinstance(pool := getattr(loader, "dataset", None), RollingCache):
            growing |= pool.epoch_samples is None
            if isinstance(loader.sampler, RollingSampler):
                loader.sampler.look_again()
            else:
                pool.resident()
    if growing and trainer is not None and not trainer.reload_dataloaders_every_n_epochs:
        trainer.reload_dataloaders_every_n_epochs = 1
        say(
            "a rolling cache grows, so the Trainer asks for its loaders before each epoch: "
            "reload_dataloaders_every_n_epochs=1 was set. RollingCache(epoch_samples=...) gives all epochs one length"
        )


def locality_for(
    trainer: Any, dataset: CachedDataset, sampler: Any, batch_size: int | None, mode: Mode, *, dealt: bool = False
) -> LocalitySampler | None:
    """The LocalitySampler that replaces Lightning's DistributedSampler, or None if the loader keeps its own sampler.

    It shuffles whatever the loader's order was: Lightning's does, for training. `dealt` says that the fit was begun in
    such an order: it goes on in it on one rank, too.
    """
    count, rank = replicas(trainer)
    if (count == 1 and not dealt) or not batch_size:
        return None
    if trainer.overfit_batches:  # Lightning takes the sampler away, with a warning if it is not sequential
        return None
    if _is_default(sampler):
        return locality_sampler(dataset, batch_size, True, count, rank, mode=mode)
    if deals_to_ranks(sampler) or len(dataset.group.nodes) == 1:
        return None
    return locality_sampler(dataset, batch_size, True, count, rank, mode=mode, draws=sampler)


def check_sampler(loader: DataLoader[Any], world: int) -> None:
    """Refuse a sampler that deals to ranks by itself without being a DistributedSampler.

    `world` counts the ranks among which Lightning would divide it: 1 where the Trainer leaves samplers alone.

    Raises:
        TypeError: Lightning would wrap it in a DistributedSampler and halve its share once more, silently.
    """
    sampler = loader.sampler
    if world > 1 and deals_to_ranks(sampler) and not isinstance(sampler, DistributedSampler):
        raise TypeError(
            f"{type(sampler).__name__} deals samples to ranks, but is not a torch.utils.data.DistributedSampler: "
            f"Lightning would wrap it in one, and each rank would get 1/{world} of its share. Derive it from "
            "DistributedSampler, or give the Trainer use_distributed_sampler=False"
        )


def loader_domain(trainer: Any, stage: str, loader: DataLoader[Any]) -> Domain | None:
    """The indices that a loader will draw in a stage of a Trainer call; None for all, a stream, or where it is unknown.

    `trainer` is None outside of a call.
    """
    anew = getattr(trainer, "reload_dataloaders_every_n_epochs", 0) > 0
    if anew or isinstance(loader.dataset, IterableDataset):
        return None
    length = len(loader.dataset)  # type: ignore[arg-type]
    batches: Any = loader.batch_sampler
    plain, sampler, size = batches is None, loader.sampler, loader.batch_size or 1
    if type(batches) is BatchSampler:
        plain, sampler, size = True, batches.sampler, batches.batch_size
    if stage in ("train", "val") and getattr(trainer, "overfit_batches", 0) > 0 and trainer.state.fn == "fit":
        return _beginning(trainer, stage, length, size) if plain else None
    if not plain:
        return sampler_domain(batches, length)
    if stage == "train" and _is_default(sampler) and replicas(trainer)[0] > 1:
        return None  # all is drawn, whatever the sampler leaves out
    in_order = type(sampler) is SequentialSampler or (type(sampler) is DistributedSampler and not sampler.shuffle)
    if trainer is not None and stage != "train" and in_order:
        return _beginning(trainer, stage, length, size)
    return sampler_domain(sampler, length)


def _beginning(trainer: Any, stage: str, length: int, batch_size: int) -> Domain | None:
    """The first samples, as many as the Trainer's limit lets through; None: all."""
    limit: int | float = getattr(trainer, f"limit_{stage}_batches", 1.0)
    step = batch_size * replicas(trainer)[0]
    batches = limit if isinstance(limit, int) else int(math.ceil(length / step) * limit)
    count = batches * step
    return Domain(np.arange(count), length) if 0 < count < length else None


def _is_default(sampler: Any) -> bool:
    """Whether Lightning, among several ranks, deals the whole dataset in place of what a sampler gives."""
    return isinstance(sampler, RandomSampler | SequentialSampler)

"""The samplers of a Trainer call: how training loaders draw, and which indices a loader can draw.

On several ranks, a training loader with a default sampler gets a LocalitySampler: the global batches of
DistributedSampler, dealt so that samples go to nodes that have them. Lightning keeps it, because it is a
DistributedSampler, and calls its `set_epoch`. On several nodes a LocalitySampler also deals the indices of any other
sampler, in the order of Lightning's own wrapper. A sampler that deals to ranks itself is kept.

An index that a loader cannot draw needs no slot. The domain of a loader follows from its sampler
(`sampling.sampler_domain`), and from the Trainer's limits where samples come in order. With `overfit_batches` Lightning
starts every loader at the beginning, whatever its sampler. Loaders that are re-created during training may draw any
index.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, SequentialSampler

from lightning_stocache.cache.placement import Domain
from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader_sampler import deals_to_ranks, index_sampler, locality_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler
from lightning_stocache.sampling.sampler_domain import sampler_domain
from lightning_stocache.training.lightning_internals import leaves_samplers_alone

__all__ = ["epochs_done", "follow_pools", "free_pools", "loader_domain", "locality_for", "replicas"]


def replicas(trainer: Any, *, always: bool = False) -> tuple[int, int]:
    """The number of ranks that divide the data, and this rank's number; tensor parallel ranks count as one.

    With `use_distributed_sampler=False` each rank has its own data: (1, 0), unless `always`.
    """
    if not always and leaves_samplers_alone(trainer):
        return 1, 0
    arguments = getattr(trainer, "distributed_sampler_kwargs", None) or {}
    return arguments.get("num_replicas", 1), arguments.get("rank", 0)


def epochs_done(trainer: Any) -> int:
    """The epoch of the next training loader, also while a checkpoint is being loaded."""
    return int(trainer.fit_loop.epoch_progress.current.processed) if trainer is not None else 0


def follow_pools(loaders: Iterable[Any], *, fix: bool) -> bool:
    """Set the length of training loaders of rolling caches to the number of resident samples. Collective.

    Args:
        loaders: the training loaders.
        fix: whether the epochs keep this length until the next call or `free_pools`. A Trainer counts the batches of an
            epoch before it begins. If large records replace small ones meanwhile, a batch is missing, and the Trainer
            skips the epoch's validation.

    Returns:
        Whether a rolling cache grows, so that its loader has another length in each epoch.
    """
    grows = False
    for loader in loaders:
        pool = getattr(loader, "dataset", None)
        if isinstance(pool, RollingCache):
            grows |= pool.epoch_samples is None
            if isinstance(loader.sampler, RollingSampler):
                loader.sampler.look_again()
                loader.sampler.fixed = len(loader.sampler) if fix else None
            else:
                pool.resident()
    return grows


def free_pools(loaders: Iterable[Any]) -> None:
    """Let each epoch of a rolling cache have its own length again."""
    for loader in loaders:
        sampler = getattr(loader, "sampler", None)
        if isinstance(sampler, RollingSampler):
            sampler.fixed = None


def locality_for(
    trainer: Any, dataset: CachedDataset, sampler: Any, batch_size: int | None, *, dealt: bool = False
) -> LocalitySampler | None:
    """The LocalitySampler that replaces Lightning's DistributedSampler, or None if the loader keeps its own sampler.

    Like Lightning's sampler for training, it shuffles whatever the order of the loader was. `dealt`: the fit began with
    a LocalitySampler, and keeps its order on one rank, too. The loader of a StocacheDataModule always has one, which
    does not know the cache yet.
    """
    if type(sampler) is LocalitySampler and batch_size:
        return locality_sampler(dataset, batch_size, sampler.shuffle, sampler.num_replicas, sampler.rank)
    count, rank = replicas(trainer)
    if (count == 1 and not dealt) or not batch_size or trainer.overfit_batches:
        return None
    if _is_default(sampler):
        return locality_sampler(dataset, batch_size, True, count, rank)
    if deals_to_ranks(sampler) or len(dataset.group.nodes) == 1:
        return None
    return locality_sampler(dataset, batch_size, True, count, rank, draws=sampler)


def loader_domain(trainer: Any, stage: str, loader: DataLoader[Any]) -> Domain | None:
    """The indices that a loader can draw in a stage of a Trainer call; None if all, or if they are unknown.

    `trainer` is None outside of a call.
    """
    if isinstance(loader.dataset, IterableDataset) or getattr(trainer, "reload_dataloaders_every_n_epochs", False):
        return None
    order = index_sampler(loader)
    length = len(loader.dataset)  # type: ignore[arg-type]
    own_batches = order is loader.batch_sampler
    batch_size = getattr(loader.batch_sampler, "batch_size", None) or 1
    if stage in ("train", "val") and getattr(trainer, "overfit_batches", False) and trainer.state.fn == "fit":
        return None if own_batches else _beginning(trainer, stage, length, batch_size)
    if stage == "train" and _is_default(order) and replicas(trainer)[0] > 1:
        return None  # Lightning's sampler replaces it, and draws all
    in_order = type(order) is SequentialSampler or (type(order) is DistributedSampler and not order.shuffle)
    if trainer is not None and stage != "train" and in_order:
        return _beginning(trainer, stage, length, batch_size)
    return sampler_domain(order, length)


def _beginning(trainer: Any, stage: str, length: int, batch_size: int) -> Domain | None:
    """The first samples, up to the Trainer's limit; None for all."""
    limit: int | float = getattr(trainer, f"limit_{stage}_batches", 1.0)
    step = batch_size * replicas(trainer)[0]
    batches = limit if isinstance(limit, int) else int(math.ceil(length / step) * limit)
    count = batches * step
    return Domain(range(count), length) if 0 < count < length else None


def _is_default(sampler: Any) -> bool:
    """Whether Lightning replaces this sampler on several ranks, and deals the whole dataset."""
    return isinstance(sampler, RandomSampler | SequentialSampler)

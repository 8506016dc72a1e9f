"""Which sampler a training loader gets.

A loader that shuffles, or reads in order, with the default sampler gets a LocalitySampler: the global batches of
DistributedSampler, dealt so that samples go to nodes that have them. Lightning keeps it, because it is a
DistributedSampler, and calls its `set_epoch`. What another sampler gives is dealt by one, too, where there are several
nodes, in the order in which Lightning's own wrapper deals it; on one node that wrapper does as well. A sampler that
deals to ranks by itself is the user's own and stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.locality import deals_to_ranks, locality_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.sampling.rolling_sampler import RollingSampler
from lightning_stocache.training.lightning_internals import leaves_samplers_alone
from lightning_stocache.training.say import say

__all__ = ["check_sampler", "epochs_done", "follow_pools", "is_default", "locality_for", "replicas"]


def replicas(trainer: Any, *, always: bool = False) -> tuple[int, int]:
    """How many ranks share the data, and which of them this is: for tensor parallelism fewer than there are ranks.

    Args:
        trainer: whose ranks they are.
        always: also where the Trainer has been told to leave samplers alone (`use_distributed_sampler=False`) and a
            user's loader therefore is one rank's own.
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


def is_default(sampler: Any) -> bool:
    """Whether Lightning, among several ranks, deals the whole dataset in place of what a sampler gives."""
    return isinstance(sampler, RandomSampler | SequentialSampler)


def locality_for(
    trainer: Any, dataset: CachedDataset, sampler: Any, batch_size: int | None, mode: Mode, *, dealt: bool = False
) -> LocalitySampler | None:
    """What a training loader draws from where Lightning would have put a sampler of its own; None: from its own.

    Shuffled whatever the loader's order was: Lightning's is, for training.

    Args:
        trainer: of the call.
        dataset: what the loader reads.
        sampler: the loader's.
        batch_size: of one rank; None where a batch sampler knows.
        mode: see `LocalitySampler`.
        dealt: whether the fit was begun in such an order: it goes on in it on one rank, too.
    """
    count, rank = replicas(trainer)
    if (count == 1 and not dealt) or not batch_size:
        return None
    if trainer.overfit_batches:  # Lightning takes the sampler away, with a warning if it is not sequential
        return None
    if is_default(sampler):
        return locality_sampler(dataset, batch_size, True, count, rank, mode=mode)
    if deals_to_ranks(sampler) or len(dataset.group.nodes) == 1:
        return None
    return locality_sampler(dataset, batch_size, True, count, rank, mode=mode, draws=sampler)


def check_sampler(loader: DataLoader[Any], world: int) -> None:
    """Refuse a sampler that deals to ranks by itself without being a DistributedSampler.

    Args:
        loader: of the training stage or another one.
        world: ranks among which Lightning would divide it; 1 where the Trainer leaves samplers alone.

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

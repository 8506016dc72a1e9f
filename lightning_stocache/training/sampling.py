"""Which sampler a training loader gets.

A loader that shuffles, or reads in order, with the default sampler gets a LocalitySampler: the global batches of
DistributedSampler, dealt so that samples go to nodes that have them. Lightning keeps it, because it is a
DistributedSampler, and calls its `set_epoch`. Any other sampler is the user's own and stays.
"""

from __future__ import annotations

import os
from typing import Any

from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, SequentialSampler

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.torch_internals import draws_all_once
from lightning_stocache.training.lightning_internals import leaves_samplers_alone

__all__ = ["check_sampler", "epochs_done", "global_seed", "is_default", "locality_sampler", "replicas"]


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


def global_seed() -> int:
    """The seed of `seed_everything`, which Lightning gives its own DistributedSampler too."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def locality_sampler(
    dataset: CachedDataset, *, shuffle: bool, batch_size: int, replicas: tuple[int, int], mode: Mode
) -> LocalitySampler:
    """A sampler for the training loader of a cached dataset.

    Args:
        dataset: the dataset; its ring says which node has what.
        shuffle: another order in every epoch, or the dataset's own.
        batch_size: of one rank.
        replicas: how many ranks share the data, and which of them this is.
        mode: see `LocalitySampler`.
    """
    count, rank = replicas
    group = dataset.group
    ring = dataset.ring
    # Else groups of ranks share their samples, and a node may hold parts of groups; or the source has grown.
    whole = count == group.world and (ring is None or ring.arcs[0].size == len(dataset))
    return LocalitySampler(
        dataset,
        count,
        rank,
        shuffle=shuffle,
        seed=global_seed(),
        batch_size=batch_size,
        ring=ring if whole else None,
        nodes=group.nodes if whole else (tuple(range(count)),),
        mode=mode,
    )


def is_default(loader: DataLoader[Any]) -> bool:
    """Whether a loader has the sampler that DataLoader gives it by itself."""
    sampler = loader.sampler
    return type(sampler) is SequentialSampler or (type(sampler) is RandomSampler and draws_all_once(sampler))


def check_sampler(loader: DataLoader[Any], world: int) -> None:
    """Refuse a sampler that deals to ranks by itself without being a DistributedSampler.

    Args:
        loader: of the training stage or another one.
        world: ranks among which Lightning would divide it; 1 where the Trainer leaves samplers alone.

    Raises:
        TypeError: Lightning would wrap it in a DistributedSampler and halve its share once more, silently.
    """
    sampler = loader.sampler
    deals = any(hasattr(sampler, name) for name in ("num_replicas", "world_size"))
    if world > 1 and deals and not isinstance(sampler, DistributedSampler):
        raise TypeError(
            f"{type(sampler).__name__} deals samples to ranks, but is not a torch.utils.data.DistributedSampler: "
            f"Lightning would wrap it in one, and each rank would get 1/{world} of its share. Derive it from "
            "DistributedSampler, or give the Trainer use_distributed_sampler=False"
        )

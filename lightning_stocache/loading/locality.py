"""A LocalitySampler for a cached dataset, for loaders of every door."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch.distributed
from torch.utils.data import RandomSampler

from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.node.group import NodeGroup, job_ranks
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode

__all__ = ["deals_to_ranks", "global_seed", "locality_sampler", "warn_of_ranks"]

log = logging.getLogger(__name__)


def global_seed() -> int:
    """The seed of `seed_everything`, which Lightning and Fabric give their own DistributedSampler too."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def deals_to_ranks(sampler: Any) -> bool:
    """Whether a sampler gives each rank a part of its own: a DistributedSampler, or what has been made after it."""
    return any(hasattr(sampler, name) for name in ("num_replicas", "world_size"))


def locality_sampler(
    dataset: Any,
    batch_size: int | None,
    shuffle: bool,
    num_replicas: int | None = None,
    rank: int | None = None,
    *,
    mode: Mode = "locality",
    draws: Iterable[Any] | None = None,
) -> LocalitySampler:
    """A sampler for the training loader of a cached dataset; of any other, it deals as DistributedSampler does.

    Args:
        dataset: the dataset; its ring says which node has what.
        batch_size: of one rank.
        shuffle: another order in every epoch, or the dataset's own.
        num_replicas: how many ranks share the data; all of the process group by default.
        rank: which of them this is.
        mode: see `LocalitySampler`.
        draws: a sampler of the user's, whose indices are dealt.

    Raises:
        ValueError: there is no batch size, or no such mode.
    """
    if batch_size is None:
        raise ValueError("sampling deals global batches: give the loader a batch_size")
    if num_replicas is None or rank is None:
        several = torch.distributed.is_available() and torch.distributed.is_initialized()
        world = (torch.distributed.get_world_size(), torch.distributed.get_rank()) if several else (1, 0)
        num_replicas, rank = world[0] if num_replicas is None else num_replicas, world[1] if rank is None else rank
    cached = cached_in(dataset)
    group, ring = (NodeGroup(), None) if cached is None else (cached.group, cached.ring)
    # Else groups of ranks share their samples, and a node may hold parts of groups; or the source has grown.
    whole = num_replicas == group.world and (ring is None or ring.arcs[0].length == len(dataset))
    return LocalitySampler(
        dataset,
        num_replicas,
        rank,
        shuffle=shuffle,
        seed=global_seed(),
        batch_size=batch_size,
        ring=ring if whole else None,
        nodes=group.nodes if whole else (tuple(range(num_replicas)),),
        mode=mode,
        draws=draws,
    )


def warn_of_ranks(group: NodeGroup, sampler: Any) -> None:
    """Say once, on rank zero, that ranks have a cache each, or train on the same samples.

    Args:
        group: the ranks that share the cache.
        sampler: what a loader draws its indices from; one of no random order is taken to validate.
    """
    world, rank = job_ranks()
    alone, same = group.world < world, type(sampler) is RandomSampler
    if rank or not (same or (alone and deals_to_ranks(sampler))) or world == 1:
        return
    troubles, advice = [], []
    if alone:
        troubles.append("has a cache of its own")
        advice.append("after init_process_group, call share() of the dataset on every rank")
    if same:
        troubles.append("trains on all samples")
        advice.append('give CachedLoader sampling="locality", or a DistributedSampler')
    _warn(f"each of {world} ranks {' and '.join(troubles)}: {'; '.join(advice)}")


@cache
def _warn(message: str) -> None:
    log.warning(message)

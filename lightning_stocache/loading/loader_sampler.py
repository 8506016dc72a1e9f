"""The samplers of a loader: its batch sampler, the sampler inside it, and the random generators that they draw from.

The generators of torch's samplers and of LocalitySampler are known. Any other sampler may draw from the process-wide
generators and from the generators among its attributes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.loading.dataset import cached_in
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.residents import RollingSampler
from lightning_stocache.source.generators import PROCESS_WIDE
from lightning_stocache.source.walk import GENERATORS

__all__ = [
    "batches_of",
    "deals_to_ranks",
    "drawn_from",
    "draws_unseen",
    "global_seed",
    "index_sampler",
    "locality_sampler",
    "replicas_of",
    "sampler_of",
    "set_epoch",
]

_DRAW_FROM_TORCH = (RandomSampler, WeightedRandomSampler, SubsetRandomSampler)
_MOST_INNER = 64  # samplers that a sampler has in a list; a longer list has indices
_DRAW_NOTHING = (DistributedSampler.__iter__, LocalitySampler.__iter__, SequentialSampler.__iter__)


def batches_of(loader: DataLoader[Any]) -> Any:
    """The batch sampler of a loader, or its sampler if it makes no batches."""
    return loader.sampler if loader.batch_sampler is None else loader.batch_sampler


def sampler_of(batches: Any) -> Any:
    """The sampler inside a batch sampler; any other sampler itself."""
    sampler = getattr(batches, "sampler", None)
    return batches if sampler is None else sampler  # an array of indices is neither true nor false


def index_sampler(loader: DataLoader[Any]) -> Any:
    """The sampler of a loader's indices: a batch sampler of the user's own, else the sampler."""
    batches = batches_of(loader)
    return batches.sampler if type(batches) is BatchSampler else batches


def replicas_of(sampler: Any) -> int:
    """Number of ranks to which a sampler deals the data; 1 if it does not deal."""
    replicas = getattr(sampler, "num_replicas", 1)
    return replicas if isinstance(replicas, int) else 1


def set_epoch(loader: DataLoader[Any], epoch: int) -> None:
    """Set the number of the next epoch in a loader's samplers, once in each, as Lightning and Fabric do."""
    samplers = [loader.sampler, getattr(loader.batch_sampler, "sampler", None)]
    for sampler in samplers[:1] if samplers[0] is samplers[1] else samplers:
        if callable(set_number := getattr(sampler, "set_epoch", None)):
            set_number(epoch)


def drawn_from(batches: Any) -> dict[str, Any]:
    """The generators, by name, from which the order of an epoch may be drawn; empty for samplers that use none."""
    sampler = sampler_of(batches)
    plain = type(batches) is BatchSampler or sampler is batches
    dealt = sampler.draws if isinstance(sampler, LocalitySampler) else None
    if plain and dealt is None and getattr(type(sampler), "__iter__", None) in _DRAW_NOTHING:
        return {}
    generators = {
        f"{number}.{name}": value
        for number, drawing in enumerate(_nested(batches, {}))
        for name, value in getattr(drawing, "__dict__", {}).items()
        if isinstance(value, GENERATORS)
    }
    if plain and type(sampler) in _DRAW_FROM_TORCH:
        return generators or {"torch": PROCESS_WIDE["torch"]}
    return {**PROCESS_WIDE, **generators}


def _nested(sampler: Any, seen: dict[int, Any]) -> Iterator[Any]:
    """A sampler and the samplers among its attributes, in turn, each once."""
    if id(sampler) in seen:
        return
    seen[id(sampler)] = sampler
    yield sampler
    attributes = dict(getattr(sampler, "__dict__", {}))
    attributes |= getattr(attributes.get("dataset"), "__dict__", {})  # Lightning's wrapper reads the user's sampler
    for value in attributes.values():
        for inner in value if isinstance(value, list | tuple) and len(value) < _MOST_INNER else [value]:
            if isinstance(inner, Sampler):
                yield from _nested(inner, seen)


def draws_unseen(sampler: Any) -> bool:
    """Whether nothing else draws from the sampler's generators, so that nobody can notice when the sampler draws."""
    if type(sampler) is RandomSampler:
        return sampler.generator is None  # it makes one for each epoch
    return getattr(type(sampler), "__iter__", None) in (*_DRAW_NOTHING, RollingSampler.__iter__)


# ---- several ranks ----


def global_seed() -> int:
    """The seed of `seed_everything`, which Lightning and Fabric give their own DistributedSampler too."""
    return int(os.environ.get("PL_GLOBAL_SEED", 0))


def deals_to_ranks(sampler: Any) -> bool:
    """Whether a sampler deals to ranks: a DistributedSampler, or a class with the same attributes."""
    return any(hasattr(sampler, name) for name in ("num_replicas", "world_size"))


def locality_sampler(
    dataset: Any,
    batch_size: int | None,
    shuffle: bool,
    num_replicas: int | None = None,
    rank: int | None = None,
    *,
    draws: Iterable[Any] | None = None,
) -> LocalitySampler:
    """A sampler for the training loader of a cached dataset. For any other dataset it deals as DistributedSampler does.

    Args:
        dataset: the dataset, whose ring says which node has which samples.
        batch_size: samples per batch of one rank.
        shuffle: whether each epoch has another order; else the dataset's own order.
        num_replicas: number of ranks that share the data; by default all ranks of the process group.
        rank: the rank of this process among them.
        draws: a sampler of the user's, whose indices are dealt; by default all indices of the dataset.

    Raises:
        ValueError: there is no batch size.
    """
    if batch_size is None:
        raise ValueError("a LocalitySampler deals global batches: give the loader a batch_size")
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    if num_replicas is None:
        num_replicas = torch.distributed.get_world_size() if several else 1
    if rank is None:
        rank = torch.distributed.get_rank() if several else 0
    cached = cached_in(dataset)
    group, ring = (NodeGroup(), None) if cached is None else (cached.group, cached.ring)
    # There is no ring where groups of ranks train on the same samples, or where the source has grown.
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
        draws=draws,
    )

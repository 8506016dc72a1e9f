"""How a training loader draws from a cached dataset, as far as its sampler shows: by what chances, and which indices.

Known are torch's samplers, LocalitySampler, MONAI's distributed ones, and lists. Of several ranks that share the memory
of a node, what all of them draw together counts: a permutation that they deal among themselves, or draws with
replacement, which are as independent of each other on several ranks as on one. Where each rank draws by itself without
replacement (Lightning deals out each rank's own SubsetRandomSampler), or a sampler or batch sampler is somebody else's,
nothing is known: to find out one would have to draw.

A loader may read the dataset through `Subset` and `ConcatDataset`: then a position of the sampler's is an index of the
dataset's, or of another one.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Integers, Ring
from lightning_stocache.insight.first_draws import Anew, ByWeight, Draws, InOrder, WithReplacement
from lightning_stocache.loading.loader_sampler import index_sampler, wrapped_sampler
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.sampler_domain import indices_of, is_monai

__all__ = ["LoaderDraws", "drawn_list", "loader_draws"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoaderDraws:
    """What is known of a loader's draws from one dataset.

    Args:
        draws: their chances, by groups of indices.
        indices: that are drawn, int64 `[distinct]`; None: each of the dataset once, in one group.
        group: of each of them, int64 `[distinct]`.
    """

    draws: Draws
    indices: Integers | None
    group: Integers

    def slots(self, ring: Ring, length: int) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """How many indices of each group have a slot on the first node, and how many have none."""
        if self.indices is None:
            return np.array([ring.arcs[0].slots]), np.array([length - ring.arcs[0].slots])
        held = np.bincount(self.group, ring.held_by(0, self.indices), self.draws.groups)
        return held, np.bincount(self.group, minlength=self.draws.groups) - held


def loader_draws(loader: DataLoader[Any], counters: Counters, world: int, nodes: int) -> LoaderDraws | None:
    """What is known of a loader's draws; None where nothing is.

    A sampler is its user's, and its attributes may be anything: where they make no sense, nothing is known.

    Args:
        loader: as training reads it, Fabric's too.
        counters: of the cached dataset whose samples are meant.
        world: number of ranks.
        nodes: among how many nodes they are.
    """
    try:
        return _known(loader, counters, world, nodes)
    except Exception:
        log.debug("the draws of %s cannot be told", type(index_sampler(loader)).__name__, exc_info=True)
        return None


def drawn_list(loader: DataLoader[Any]) -> str | None:
    """A digest of the indices or weights that a loader's sampler has now; None where it has none, or they are none."""
    sampler = index_sampler(loader)
    given = getattr(sampler, "indices", getattr(sampler, "weights", sampler if isinstance(sampler, list) else None))
    try:
        return None if given is None else sha256(np.asarray(given).tobytes()).hexdigest()
    except Exception:
        log.debug("what %s draws from cannot be told", type(sampler).__name__, exc_info=True)
        return None


def _known(loader: DataLoader[Any], counters: Counters, world: int, nodes: int) -> LoaderDraws | None:
    cached, sampler = cached_in(loader.dataset), index_sampler(loader)
    if world > 1 and nodes == 1 and (inner := wrapped_sampler(sampler)) is not None:
        sampler = inner if getattr(inner, "replacement", False) else None
    elif world > 1 and not isinstance(sampler, DistributedSampler):
        return None
    order = _order(sampler)
    positions = None if order is None else indices_of(sampler)
    if order is None or positions is None:
        return None
    whole = len(positions) == len(loader.dataset)  # type: ignore[arg-type]
    if order == "anew" and whole and cached is not None and not isinstance(sampler, SubsetRandomSampler):
        return LoaderDraws(Anew(np.ones(1), len(positions)), None, np.zeros(0, dtype=np.int64))
    if order == "same" and world == 1 and isinstance(sampler, DistributedSampler):
        positions = positions[sampler.rank :: sampler.num_replicas]
    indices = _through(loader.dataset, counters, np.asarray(positions, dtype=np.int64))
    ours = indices >= 0
    if order == "weighted":
        return _weighted(sampler, positions[ours], indices[ours])
    distinct, numbers, copies = np.unique(indices[ours], return_inverse=True, return_counts=True)
    if order == "same":
        return LoaderDraws(InOrder(numbers), distinct, np.arange(len(distinct)))
    each, group = np.unique(copies, return_inverse=True)
    return LoaderDraws(Anew(each, int(ours.sum())), distinct, group)


def _order(sampler: Any) -> str | None:
    """How epochs differ: each draws "anew" without replacement, all draw the "same", or "weighted"; None: not known."""
    kind = type(sampler)
    if kind in (LocalitySampler, DistributedSampler) or is_monai(sampler, "DistributedSampler"):
        return "anew" if sampler.shuffle else "same"
    if kind is SequentialSampler or isinstance(sampler, list | tuple | range | np.ndarray | torch.Tensor):
        return "same"
    if kind is WeightedRandomSampler or is_monai(sampler, "DistributedWeightedRandomSampler"):
        return "weighted"
    if kind is RandomSampler:
        return "weighted" if sampler.replacement else "anew"
    return "anew" if kind is SubsetRandomSampler else None


def _weighted(sampler: Any, positions: Integers, indices: Integers) -> LoaderDraws:
    given = getattr(sampler, "weights", None)
    weights = np.ones(len(indices)) if given is None else np.asarray(torch.as_tensor(given).double())[positions]
    each, group = np.unique(weights, return_inverse=True)
    if getattr(sampler, "replacement", True):
        return LoaderDraws(WithReplacement(each / weights.sum()), indices, group)
    return LoaderDraws(ByWeight(each, np.bincount(group)), indices, group)


def _through(dataset: Any, counters: Counters, positions: Integers) -> Integers:
    """The indices in a cached dataset that positions in what a loader reads stand for; -1 where they are another's."""
    if (cached := cached_in(dataset)) is not None and cached.counters is counters:
        return positions
    indices = np.full(len(positions), -1)
    if isinstance(dataset, Subset):
        return _through(dataset.dataset, counters, np.asarray(dataset.indices)[positions])
    if isinstance(dataset, ConcatDataset):
        ends = dataset.cumulative_sizes
        for part, begin, end in zip(dataset.datasets, [0, *ends[:-1]], ends, strict=True):
            inside = (positions >= begin) & (positions < end)
            indices[inside] = _through(part, counters, positions[inside] - begin)
    return indices

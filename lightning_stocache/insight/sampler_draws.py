"""How a training loader draws from a cached dataset, as far as its sampler shows: by what chances, and which indices.

Of which samplers it is known, `sampling.sampler_domain` says. Of several ranks that share the memory of a node, what
all of them draw together counts: a permutation that they deal among themselves, or draws with replacement, which are as
independent of each other on several ranks as on one. Where each rank draws by itself without replacement (Lightning
deals out each rank's own SubsetRandomSampler), or a sampler or batch sampler is somebody else's, nothing is known: to
find out one would have to draw.

Several loaders may read one dataset, in turns: then it counts what they draw together, if one cannot draw as another
does (both with a seed or generator of their own, which may be the same).

A loader may read the dataset through `Subset` and `ConcatDataset`: then a position of the sampler's is an index of the
dataset's, or of another one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, DistributedSampler, Subset

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Integers, Ring
from lightning_stocache.insight.first_draws import Anew, ByWeight, Draws, InOrder, Together, WithReplacement
from lightning_stocache.loading.loader_sampler import batches_of, index_sampler, wrapped_sampler
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.sampler_domain import Drawing, drawing_of

__all__ = ["LoaderDraws", "drawn_list", "drawn_together", "loader_draws"]

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


def drawn_together(
    loaders: Sequence[DataLoader[Any]], each: Sequence[LoaderDraws | None], length: int, *, again: bool
) -> LoaderDraws | None:
    """What is known of the draws of several loaders that give batches in turns; None where nothing is.

    Args:
        loaders: which.
        each: what is known of each.
        length: number of samples in the dataset.
        again: whether one that has ended begins again while others go on.
    """
    known = [draws for draws in each if draws is not None]
    if len(known) < len(each) or sum(map(_has_seed, loaders)) > 1:
        return None
    if len(known) == 1:
        return known[0]
    key, groups = np.zeros(length, dtype=np.int64), []
    for draws in known:
        group = np.zeros(length, dtype=np.int64)
        if draws.indices is not None:
            group[:] = -1
            group[draws.indices] = draws.group
        groups.append(group)
        key = np.unique(key * (draws.draws.groups + 1) + group + 1, return_inverse=True)[1]
    drawn = np.flatnonzero(np.max(groups, axis=0) >= 0)
    _, first, number = np.unique(key[drawn], return_index=True, return_inverse=True)
    places = [group[drawn][first] for group in groups]
    return LoaderDraws(Together([draws.draws for draws in known], places, _in_turns(loaders, again)), drawn, number)


def _has_seed(loader: DataLoader[Any]) -> bool:
    sampler = index_sampler(loader)
    generators = [loader.generator, getattr(sampler, "generator", None)]
    return hasattr(sampler, "epoch") or any(generator is not None for generator in generators)


def _in_turns(loaders: Sequence[DataLoader[Any]], again: bool) -> Callable[[int], list[int]]:
    """How many of so many samples are each loader's."""
    batches = np.array([len(loader) for loader in loaders])
    sizes = np.array([_samples(loader) for loader in loaders]) / np.maximum(batches, 1)

    def divided(draws: int) -> list[int]:
        low, high = 0.0, float(draws)  # a turn gives a sample at least, of whichever loader
        for _ in range(60):
            turns = (low + high) / 2
            given = turns * sizes if again else np.minimum(turns, batches) * sizes
            low, high = (turns, high) if given.sum() < draws else (low, turns)
        return [round(count) for count in given.tolist()]

    return divided


def _samples(loader: DataLoader[Any]) -> int:
    """How many samples a loader gives in an epoch."""
    batches = batches_of(loader)
    if type(batches) is not BatchSampler:
        return sum(map(len, batches)) if isinstance(batches, list) else len(loader)
    whole = len(index_sampler(loader))
    return whole // batches.batch_size * batches.batch_size if batches.drop_last else whole


def drawn_list(loader: DataLoader[Any]) -> str | None:
    """A digest of the indices or weights that a loader's sampler has now; None where it has none, or they are none."""
    sampler = index_sampler(loader)
    sampler = getattr(sampler, "draws", None) if isinstance(sampler, LocalitySampler) else sampler
    given: Any = sampler
    if not isinstance(sampler, list | np.ndarray | torch.Tensor):  # a tensor has a method that is called `indices`
        given = getattr(sampler, "indices", getattr(sampler, "weights", None))
    try:
        numbers = np.asarray(given)
        return None if numbers.dtype == object else sha256(numbers.tobytes()).hexdigest()
    except Exception:
        log.debug("what %s draws from cannot be told", type(sampler).__name__, exc_info=True)
        return None


def _known(loader: DataLoader[Any], counters: Counters, world: int, nodes: int) -> LoaderDraws | None:
    cached, sampler = cached_in(loader.dataset), index_sampler(loader)
    if world > 1 and nodes == 1 and (inner := wrapped_sampler(sampler)) is not None:
        sampler = inner if getattr(inner, "replacement", False) else None
    elif world > 1 and not isinstance(sampler, DistributedSampler):
        return None
    drawing = drawing_of(sampler)
    if drawing is None or drawing.order == "unknown":
        return None
    if world > 1 and getattr(sampler, "draws", None) is not None and (nodes > 1 or drawing.order != "replacement"):
        return None  # each rank draws the list for itself
    whole = isinstance(drawing.indices, range) and len(drawing.indices) == len(loader.dataset)  # type: ignore[arg-type]
    if drawing.order == "anew" and whole and cached is not None:
        draws = Anew(np.ones(1), len(drawing.indices), drawing.repeats)
        return LoaderDraws(draws, None, np.zeros(0, dtype=np.int64))
    positions = np.asarray(drawing.indices, dtype=np.int64)
    if drawing.order == "same" and world == 1:
        positions = positions[drawing.part[0] :: drawing.part[1]]
    indices = _through(loader.dataset, counters, positions)
    ours = indices >= 0
    if drawing.order in ("replacement", "weighted"):
        return _by_chance(drawing, ours, indices[ours])
    distinct, numbers, copies = np.unique(indices[ours], return_inverse=True, return_counts=True)
    if drawing.order == "same":
        return LoaderDraws(InOrder(numbers), distinct, np.arange(len(distinct)))
    each, group = np.unique(copies, return_inverse=True)
    return LoaderDraws(Anew(each, int(ours.sum()), drawing.repeats), distinct, group)


def _by_chance(drawing: Drawing, ours: npt.NDArray[np.bool_], indices: Integers) -> LoaderDraws:
    weights = np.ones(len(indices)) if drawing.weights is None else drawing.weights[ours]
    each, group = np.unique(weights, return_inverse=True)
    if drawing.order == "weighted":
        return LoaderDraws(ByWeight(each, np.bincount(group)), indices, group)
    together = drawing.together
    draws = WithReplacement(each / weights.sum()) if together is None else WithReplacement(each, together)
    return LoaderDraws(draws, indices, group)


def _through(dataset: Any, counters: Counters, positions: Integers) -> Integers:
    """The indices in a cached dataset that positions in what a loader reads stand for; -1 where they are another's."""
    positions = np.where(positions < 0, positions + len(dataset), positions)  # from the end
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

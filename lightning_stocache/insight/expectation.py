"""A warning if the hit rate of an epoch that draws each index once is far below what is to be expected.

Node k trains on a share s_k of every batch and has slots for a share a_k of the drawn indices. A later epoch hits
`sum over nodes min(s_k, a_k)`. The first epoch hits the samples that were READY when it began.

The rule holds if the sampler draws each index once and the epoch is served whole. On several nodes it also needs a
LocalitySampler, which deals samples to the nodes that have them. No hit rate is expected for weighted draws, custom
batch samplers, `limit_train_batches`, several loaders of one dataset, streams, and once samples were invalidated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import NO_SLOT, Domain
from lightning_stocache.loading.dataset import CachedDataset, cached_in, cached_source
from lightning_stocache.loading.loader_sampler import batches_of, index_sampler
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.sampler_domain import draws_once, sampler_domain

__all__ = ["Expectation"]

_WHOLE = 0.98  # share of the indices that a whole epoch serves at least; `drop_last` may leave out the others
_TOLERANCE = 0.05  # a hit rate that is lower than expected by more is warned about
_TOLERANCE_OF_NODES = 0.25  # on several nodes: four nodes with batches of eight samples lose 0.24 in epoch two


class Expectation:
    """The expected hit rates of the training sets in use, epoch by epoch."""

    def __init__(self) -> None:
        self._drawn: dict[Counters, Domain | None] = {}  # the indices that each dataset's loader drew at first
        self._begun: set[Counters] = set()  # datasets that served a whole epoch
        self._stray: str | None = None  # the complaint about a sampler whose indices have changed
        self._complained = False

    def compare(
        self, metrics: Mapping[str, float], counts: Mapping[Counters, Counts], datasets: Sequence[Cached], loaders: Any
    ) -> str | None:
        """Compare the hit rate of the epoch that ends with the expected one, if the rule holds.

        Args:
            metrics: the metrics of this epoch, over all ranks.
            counts: this rank's counts of each training set; the other ranks are assumed to have the same shares.
            datasets: the training sets.
            loaders: the loaders that read them.

        Returns:
            A complaint if the hit rate is too low and no earlier epoch had a complaint; else None.
        """
        served = metrics["hits"] + metrics["misses"] + metrics["bypasses"]
        of_rank, hits = sum(counts.values(), Counts()), 0.0
        for dataset in datasets:
            of_set = counts.get(dataset.counters, Counts())  # type: ignore[arg-type]
            share = of_set.served / of_rank.served if of_rank.served else 1 / len(datasets)
            of_all = served * share
            fills = metrics["fills"] * (of_set.fills / of_rank.fills if of_rank.fills else share)
            hits += self._hits(dataset, _reader(loaders, dataset), of_all, fills, metrics["fill_fraction"])
        complaint = self._stray if metrics["bypasses"] else None
        if served and not math.isnan(hits):
            expected = hits / served
            tolerance = _TOLERANCE if len(datasets[0].group.nodes) == 1 else _TOLERANCE_OF_NODES
            if metrics["hit_rate"] < expected - tolerance:
                complaint = _too_low(metrics, expected)
        if self._complained or complaint is None:
            return None
        self._complained = True
        return complaint

    def _hits(self, dataset: Cached, loader: Any, served: float, fills: float, filled: float) -> float:
        """The expected hits of one training set, over all ranks; NaN if the rule does not hold.

        Args:
            dataset: the training set.
            loader: the loader that reads it, if it is a single one.
            served: samples of it that all ranks were served in this epoch.
            fills: samples of it that all ranks stored in this epoch.
            filled: share of the slots that are ready at the end of this epoch.
        """
        if loader is None or not isinstance(dataset, CachedDataset) or cached_in(loader.dataset) is None:
            return math.nan
        ring, cache, counters = cached_source(dataset).opened.known_ring, dataset.cache, dataset.counters
        if ring is None or cache is None or counters is None or cache.changes:
            return math.nan
        sampler, group = index_sampler(loader), dataset.group
        domain = sampler_domain(batches_of(loader), len(dataset))
        count = len(dataset) if domain is None else len(domain)
        dealt = isinstance(sampler, LocalitySampler)
        whole = len(dataset) == ring.arcs[0].length and _WHOLE * count <= served <= count + group.world
        same = self._drawn.setdefault(counters, domain) == domain
        if not same and cached_source(dataset).opened.request.domain is not None:
            has_door = cached_source(dataset).opened.request.reader is not None
            advice = "With keep_cache=True slots are for the whole dataset" if has_door else "Give indices= all of them"
            self._stray = (
                f"{type(sampler).__name__} draws other samples than when the cache opened, and only those have slots."
                f"\n{advice}"
            )
        if not (whole and same and draws_once(sampler) and (dealt or len(group.nodes) == 1)):
            return math.nan
        slots = [
            arc.slots if domain is None else int((arc.slots_of(domain.indices) != NO_SLOT).sum()) for arc in ring.arcs
        ]
        if counters in self._begun:
            return served * math.fsum(map(min, group.shares, [held / count for held in slots]))
        self._begun.add(counters)
        ready = filled * sum(slots)
        if len(group.nodes) == 1:
            ready = cache.filled if domain is None else int(cache.is_stored(domain.indices).sum())
        return min(max(ready - fills, 0.0), served)


def _reader(loaders: Any, dataset: Cached) -> Any:
    """The loader that reads a cached dataset; None if there are several. Loaders of Fabric count, too."""
    leaves = [leaf for leaf in leaves_in(loaders) if hasattr(leaf, "batch_sampler")]
    readers = [leaf for leaf in leaves if any(each.counters is dataset.counters for each in cached_in_leaves(leaf))]
    return readers[0] if len(readers) == 1 else None


def _too_low(metrics: Mapping[str, float], expected: float) -> str:
    """The complaint about a hit rate that is far below the expected hit rate."""
    filled = metrics["fill_fraction"]
    cause = "the source may be created again in every epoch"
    if metrics["bypasses"]:
        cause = "samples are drawn that have no slot"
    if filled < 1:
        cause = f"only {100 * filled:.1f} % of the cache is filled (the warnings above say why)"
    return (
        f"the hit rate of this epoch is {100 * metrics['hit_rate']:.1f} %, where "
        f"{100 * expected:.1f} % were to be expected:\n{cause}"
    )

"""The hit rate to expect of an epoch that draws each index once, and what is wrong if the hit rate is far below it.

A cache that silently does nothing is the commonest failure of caches. Node k trains on a share s_k of every batch and
has slots for a share a_k of what is drawn. A cache never evicts, so a later epoch hits `sum over nodes min(s_k, a_k)`.
The first epoch hits what was READY when it began: nothing, or what a named cache or the set-up had stored.

The rule holds for samplers that draw each index once (`sampling.sampler_domain.draws_once`), in epochs that are served
whole. On several nodes it holds where a LocalitySampler deals samples to the nodes that have them; it leaves out the
few per cent that go elsewhere, because batches do not come in exact proportions. Otherwise nothing is expected:
weighted draws, batch samplers of the user's own, `limit_train_batches`, several loaders of one dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import NO_SLOT, Domain, Ring
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_sampler import batches_of, index_sampler
from lightning_stocache.loading.loader_tree import Cached, cached_behind, leaves_in
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.sampling.sampler_domain import draws_once, sampler_domain

__all__ = ["Expectation"]

_WHOLE = 0.98  # of the indices; `drop_last` may leave out the others
_TOLERANCE = 0.05
_TOLERANCE_OF_NODES = 0.25  # four nodes with batches of eight samples lose 0.24 in epoch two


class Expectation:
    """The expected hit rates of the training sets in use, epoch by epoch; what is wrong is said once."""

    def __init__(self) -> None:
        self._drawn: dict[Counters, list[Domain | None]] = {}  # by the loaders of each dataset, in their first epoch
        self._begun: set[Counters] = set()  # datasets of which an epoch was served whole
        self._complained = False

    def compare(
        self,
        metrics: dict[str, float],
        counts: Mapping[Counters, Counts],
        datasets: Sequence[Cached],
        loaders: Any,
        *,
        world: int,
    ) -> str | None:
        """Add `hit_rate_expected` to the metrics of the epoch that ends now, unless the rule does not hold.

        Args:
            metrics: of this epoch.
            counts: what this rank has been served of each training set in it, the other ranks likewise.
            datasets: the training sets; where one of them is a stream, nothing is expected.
            loaders: that read them.
            world: number of ranks.

        Returns:
            What is wrong, in words, if there is something, and for the first time.
        """
        own = sum(counts.values(), Counts())
        served = metrics["hits"] + metrics["misses"] + metrics["bypasses"]
        hits = [0.0 if served and datasets else math.nan]
        complaint = None
        for dataset in datasets:
            counters = dataset.counters
            if not isinstance(dataset, CachedDataset) or counters is None:
                hits.append(math.nan)
                continue
            of_set = counts.get(counters, Counts())
            readers = _readers(loaders, counters)
            drawn = [sampler_domain(batches_of(reader), len(dataset)) for reader in readers]
            if self._drawn.setdefault(counters, drawn) != drawn:
                hits.append(math.nan)
                complaint = complaint or _unforeseen(dataset, readers, metrics)
                continue
            share = served * of_set.served / max(own.served, 1)
            fills = metrics["fills"] * of_set.fills / max(own.fills, 1)
            hits.append(self._hits(dataset, readers, share, fills, metrics["fill_fraction"], world))
        if not math.isnan(expected := sum(hits)):
            metrics["hit_rate_expected"] = expected / served
            nodes = len(datasets[0].group.nodes)
            tolerance = _TOLERANCE if nodes == 1 else _TOLERANCE_OF_NODES
            if metrics["hit_rate"] < metrics["hit_rate_expected"] - tolerance:
                complaint = complaint or _too_low(metrics)
        complaint = None if self._complained else complaint
        self._complained |= complaint is not None
        return complaint

    def forget(self) -> None:
        """Begin anew with the next epoch: its caches and loaders are those of another call."""
        self._drawn.clear()
        self._begun.clear()

    def _hits(
        self, dataset: CachedDataset, readers: Sequence[Any], served: float, fills: float, filled: float, world: int
    ) -> float:
        """The hits to expect of one training set, over all ranks; not a number where the rule does not hold."""
        ring, cache, counters = cached_source(dataset).opened.known_ring, dataset.cache, dataset.counters
        if ring is None or cache is None or counters is None or len(readers) != 1:
            return math.nan
        [loader], length, nodes = readers, len(dataset), len(dataset.group.nodes)
        sampler = index_sampler(loader)
        in_place = nodes == 1 or (isinstance(sampler, LocalitySampler) and sampler.mode != "global")
        if not in_place or cached_in(loader.dataset) is None or not draws_once(sampler):
            return math.nan
        domain = sampler_domain(sampler, length)
        count = length if domain is None else len(domain)
        if length != ring.arcs[0].length or not _WHOLE * count <= served <= count + world:
            return math.nan
        slots = [_slots(ring, node, domain) for node in range(nodes)]
        if counters in self._begun:
            return served * math.fsum(map(min, dataset.group.shares, [held / count for held in slots]))
        self._begun.add(counters)
        if nodes > 1:
            ready = filled * sum(slots)
        elif domain is None or domain == ring.arcs[0].domain:
            ready = cache.filled
        else:
            ready = int(cache.is_stored(domain.indices).sum())
        return min(max(ready - fills, 0.0), served)


def _slots(ring: Ring, node: int, domain: Domain | None) -> int:
    """How many of the indices that are drawn have a slot on a node."""
    arc = ring.arcs[node]
    if domain is None or domain == arc.domain:
        return arc.slots
    return int((arc.slots_of(domain.indices) != NO_SLOT).sum())


def _unforeseen(dataset: CachedDataset, readers: Sequence[Any], metrics: Mapping[str, float]) -> str | None:
    """The complaint about a sampler that draws what has no slot, because it drew other samples at set-up."""
    if not readers or not metrics["bypasses"] or cached_source(dataset).opened.request.domain is None:
        return None
    return (
        f"{type(index_sampler(readers[0])).__name__} draws other samples than when the cache opened, and only those "
        f"have slots: {int(metrics['bypasses'])} samples of this epoch had none.\nWith keep_cache=True and memory for "
        "the whole dataset all samples have slots"
    )


def _too_low(metrics: Mapping[str, float]) -> str:
    """The complaint about a hit rate that is far below the expected one."""
    filled = metrics["fill_fraction"]
    cause = "the source may be made anew in every epoch"
    if filled < 1:
        cause = f"only {100 * filled:.1f} % of the slots are filled; memory may have run out (see the warnings above)"
    return (
        f"the hit rate of this epoch is {100 * metrics['hit_rate']:.1f} %, where "
        f"{100 * metrics['hit_rate_expected']:.1f} % were to be expected:\n{cause}"
    )


def _readers(loaders: Any, counters: Counters) -> list[Any]:
    """The loaders among them that read a cached dataset, Fabric's too."""
    return [
        leaf
        for leaf in leaves_in(loaders)
        if hasattr(leaf, "batch_sampler") and any(dataset.counters is counters for dataset in cached_behind(leaf))
    ]

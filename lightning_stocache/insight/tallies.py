"""Counts of an epoch over all ranks: the one meter of all doors.

**Counting.** The counts of an epoch are the difference between two of its ends: workers run ahead of the step, so an
epoch's first samples are served before `on_train_epoch_start`. What training has been served is put aside when a
validation starts, since one dataset may be in both stages.

**Telling.** Nothing here waits in a collective, which another callback's at an epoch's end could cross. Each rank posts
its tally (`node.post`) when the last step of the epoch is done, and goes on; at the epoch's end it collects what all
have posted. No last step waits for what another rank does after its own, so the slowest rank ends all waits, and all
get the same numbers. They are final: what workers serve ahead belongs to the next epoch.

The wait has a limit. Where ranks are out of step (one has no monitor, or more batches than the others), one warning is
given, the epoch goes without values, and later ones are waited for a second at most.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.growing.rolling_cache import RollingCache, RollingStats
from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS, Tally, rates, summarise
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.node.post import Post

__all__ = ["PoolRates", "Seconds", "Tallies", "coverage", "end_call", "loader_seconds", "samples_of"]

log = logging.getLogger(__name__)

_before: WeakKeyDictionary[Counters, Counts] = WeakKeyDictionary()  # when the current Trainer call began

_ONCE_LATE = 1.0  # seconds to wait where the ranks were found out of step before


class Seconds(NamedTuple):
    """Seconds of a rank's loop in an epoch; the first two are NaN if one of its loaders does not tell."""

    waited: float  # for data, inside of `__next__` of the loaders
    computed: float  # on the batches
    looped: float  # waited, computed, and everything between


def loader_seconds(loaders: Any) -> tuple[float, float]:
    """Seconds of waiting for these loaders so far, and between their batches; NaN if one does not tell."""
    positions = [getattr(leaf, "position", None) for leaf in leaves_in(loaders)]
    clocks = [position.waiting for position in positions if isinstance(position, LoaderState)]
    if not clocks or len(clocks) < len(positions):
        return math.nan, math.nan
    return sum(clock.waited_ns for clock in clocks) / 1e9, sum(clock.away_ns for clock in clocks) / 1e9


class Tallies:
    """The tallies of this rank, and what those of all ranks come to at an epoch's end.

    `loaders` are those that a stage reads, in any nesting.
    """

    def __init__(self) -> None:
        self.pools = PoolRates()
        self._expectation = Expectation()
        self._seen: dict[Counters, Counts] = {}
        self._aside: dict[Counters, Counts] = {}  # served to training since its last epoch's end, but seen by now
        self._posted: dict[str, tuple[Post[Tally], dict[Counters, Counts]]] = {}
        self._was_late = False

    def post(self, stage: str, loaders: Any, seconds: Seconds | None = None) -> None:
        """Tell all ranks what this one brings to the epoch of a stage that ends, unless that is done."""
        datasets = _counted(loaders)
        if stage in self._posted or not datasets:
            return
        served = self._take(datasets)
        if stage == "train":
            served = {counters: counts + self._aside.pop(counters, Counts()) for counters, counts in served.items()}
        self._posted[stage] = next(iter(datasets.values())).group.post(_tally(datasets, served, seconds)), served

    def metrics(self, stage: str, loaders: Any, patience: float) -> dict[str, float]:
        """The metrics of the epoch that ends, over all ranks; empty if nothing was posted, or not by all in time.

        Args:
            stage: whose epoch it is.
            loaders: that it reads.
            patience: seconds to wait for the slowest rank.
        """
        if stage not in self._posted:
            return {}
        posted, served = self._posted.pop(stage)
        tallies = posted.collect(min(patience, _ONCE_LATE) if self._was_late else patience)
        if tallies is None:
            if not self._was_late:
                self._was_late = True
                log.warning(
                    "the cache counts of the other ranks have not come in %.0f s: this epoch's stocache/ values are "
                    "left out.\nGive all ranks the same monitor callbacks and the same number of batches",
                    patience,
                )
            return {}
        datasets = cached_in_leaves(loaders)
        metrics = summarise(tallies) | {"coverage": coverage(datasets)}
        if stage == "train" and datasets:
            complaint = self._expectation.compare(metrics, served, datasets, loaders)
            if complaint is not None and datasets[0].group.rank == 0:
                log.warning(complaint)
            metrics |= self.pools.metrics(loaders)
        return metrics

    def skip(self, loaders: Any) -> None:
        """Count nothing of what was served so far."""
        self._take(_counted(loaders))

    def put_aside(self, loaders: Any) -> None:
        """Keep what training has been served so far for its epoch's end: another stage begins."""
        for counters, counts in self._take(_counted(loaders)).items():
            self._aside[counters] = self._aside.get(counters, Counts()) + counts

    def live(self, loaders: Any, seconds: Seconds | None = None) -> dict[str, float]:
        """This rank's values of training's epoch so far, by their metric keys; empty where nothing counts."""
        if not (datasets := _counted(loaders)):
            return {}
        served = self._served(datasets)
        served = {counters: counts + self._aside.get(counters, Counts()) for counters, counts in served.items()}
        now = rates(_tally(datasets, served, seconds))
        return {LIVE + name: now[name] for name in LIVE_METRICS if name in now}

    def _take(self, datasets: Mapping[Counters, Cached]) -> dict[Counters, Counts]:
        """Counts of this rank for each dataset since the last call, which the next call leaves out."""
        served = self._served(datasets)
        for counters, counts in served.items():
            self._seen[counters] = self._begin(counters) + counts
        return served

    def _served(self, datasets: Mapping[Counters, Cached]) -> dict[Counters, Counts]:
        return {
            counters: counters.totals(dataset.group.rank) - self._begin(counters)
            for counters, dataset in datasets.items()
        }

    def _begin(self, counters: Counters) -> Counts:
        return self._seen.get(counters, _before.get(counters, Counts()))


class PoolRates:
    """The numbers of the rolling cache that some loaders read, from one call to the next."""

    def __init__(self) -> None:
        self._before: tuple[RollingStats, float] | None = None

    def metrics(self, loaders: Any) -> dict[str, float]:
        """Samples resident, and those that came and left since the last call; empty without a rolling cache."""
        datasets = [getattr(leaf, "dataset", None) for leaf in leaves_in(loaders)]
        pools = [dataset for dataset in datasets if isinstance(dataset, RollingCache)]
        if len(pools) != 1:
            return {}
        now, at = pools[0].stats(), time.monotonic()
        metrics = {f"rolling/{name}": getattr(now, name) for name in ("resident", "oldest_seconds", "times_seen")}
        if self._before is not None:
            before, seconds = self._before[0], max(at - self._before[1], 1e-9)
            metrics["rolling/appended_per_second"] = (now.appended - before.appended) / seconds
            metrics["rolling/evicted_per_second"] = (now.evicted - before.evicted) / seconds
            metrics["rolling/renewed"] = now.renewed - before.renewed
        self._before = now, at
        return metrics


def end_call(datasets: Iterable[Cached]) -> None:
    """End a Trainer call: the epochs of the next one count from here."""
    for dataset in datasets:
        if dataset.counters is not None:
            _before[dataset.counters] = dataset.counters.totals(dataset.group.rank)


def coverage(datasets: Sequence[Cached]) -> float:
    """Share of the indices of all these datasets, of those that are drawn, that have a slot on some node."""
    return sum(map(_covered, datasets)) / max(sum(map(samples_of, datasets)), 1)


def samples_of(dataset: Cached) -> int:
    """Number of samples of a dataset that are drawn; of a stream, as far as it is known."""
    if isinstance(dataset, CachedDataset):
        domain = cached_source(dataset).opened.request.domain
        return len(dataset) if domain is None else len(domain)
    return 0 if dataset.cache is None else len(dataset.cache)


def _covered(dataset: Cached) -> float:
    if not isinstance(dataset, CachedDataset):
        return 0 if dataset.cache is None else dataset.cache.filled
    ring = cached_source(dataset).opened.known_ring
    return 0.0 if ring is None else min(samples_of(dataset), ring.arcs[0].size) * ring.coverage


def _counted(loaders: Any) -> dict[Counters, Cached]:
    """The datasets behind loaders that count, by their counters."""
    datasets = cached_in_leaves(loaders)
    return {dataset.counters: dataset for dataset in datasets if dataset.counters is not None}


def _tally(datasets: Mapping[Counters, Cached], served: Mapping[Counters, Counts], seconds: Seconds | None) -> Tally:
    """One tally of all datasets, with the seconds of the loop that read them."""
    joined = reduce(Tally.__add__, (_tally_of(dataset, served[counters]) for counters, dataset in datasets.items()))
    if seconds is None:
        return joined
    waited, computed, looped = seconds
    return replace(joined, wait_seconds=waited, compute_seconds=computed, loop_seconds=looped, ranks=1)


def _tally_of(dataset: Cached, counts: Counts) -> Tally:
    cache, node = dataset.cache, dataset.group.node
    if cache is None:  # nobody knows what a sample would take in a slot
        return Tally(node, counts, unsized=counts.misses + counts.bypasses)
    filled = cache.fill_fraction * len(cache)
    return Tally(node, counts, len(cache), filled, cache.memory_bytes, dataset.budget_bytes)

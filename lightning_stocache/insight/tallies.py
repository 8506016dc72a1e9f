"""Counts of an epoch over all ranks, for CacheMonitor and CacheMeter alike.

**Counting.** The counts of an epoch are the difference between the totals at its end and at the end of the epoch
before. The moment when an epoch starts does not matter: workers run ahead of the training step, so they serve an
epoch's first samples before `on_train_epoch_start`. Validation may read the dataset of training, so the counts of
training are taken before each validation starts.

**Exchange.** No rank waits in a collective, because it could cross a collective of another callback. Each rank posts
its tally (`node.post`) after the last step of the epoch, or at its end, before anything else. Then it collects the
tallies of all ranks. A rank's last step never depends on what other ranks do after their last steps, so every wait ends
when the slowest rank posts, and all ranks get the same numbers. The numbers are final: what workers serve ahead belongs
to the next epoch.

**Time limit.** Ranks are out of step if one has no monitor, or more batches than the others. Then one warning is given,
the epoch has no values, and later epochs wait for one second at most.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Sequence
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.growing.rolling_cache import RollingCache, RollingStats
from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS, Tally, rates, summarise
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.loading.position import LoaderState
from lightning_stocache.node.post import Post

__all__ = ["PoolRates", "Tallies", "coverage", "end_call", "loader_seconds", "samples_of"]

log = logging.getLogger(__name__)

_before: WeakKeyDictionary[Counters, Counts] = WeakKeyDictionary()  # totals at the start of the current Trainer call

_ONCE_LATE = 1.0  # seconds to wait after the ranks were once out of step


def loader_seconds(loaders: Any) -> tuple[float, float]:
    """Seconds so far inside of the loaders' `__next__`, and between their batches; NaN if a loader has no clock."""
    positions = [getattr(leaf, "position", None) for leaf in leaves_in(loaders)]
    clocks = [position.waiting for position in positions if isinstance(position, LoaderState)]
    if not clocks or len(clocks) < len(positions):
        return math.nan, math.nan
    return sum(clock.waited_ns for clock in clocks) / 1e9, sum(clock.away_ns for clock in clocks) / 1e9


class Tallies:
    """The counts of this rank's stages, and the metrics of all ranks at the end of an epoch.

    `loaders` are the loaders that a stage reads, in any nesting.
    """

    def __init__(self) -> None:
        self.pools = PoolRates()
        self._expectation = Expectation()
        self._totals: dict[Counters, Counts] = {}  # at the last call of `count`
        self._counts: dict[str, dict[Counters, Counts]] = {}  # of each stage, in its epoch so far
        self._posted: dict[str, tuple[Post[Tally], dict[Counters, Counts]]] = {}
        self._was_late = False

    def count(self, stage: str, loaders: Any) -> None:
        """Count the samples served since the last call for the running epoch of a stage.

        Two stages may read one dataset. Call this for the stage that pauses, before another stage begins. Counts of a
        stage that never ends an epoch, such as "sanity check", are dropped.
        """
        counts = self._counts.setdefault(stage, {})
        for counters, dataset in _counted(loaders).items():
            total = counters.totals(dataset.group.rank)
            before = self._totals.get(counters, _before.get(counters, Counts()))
            counts[counters] = counts.get(counters, Counts()) + (total - before)
            self._totals[counters] = total

    def live(self, loaders: Any, loop: Tally | None = None) -> dict[str, float]:
        """This rank's metrics of the training epoch so far, by their keys; empty if no dataset counts."""
        if (tally := self._tally("train", loaders, loop)) is None:
            return {}
        values = rates(tally)
        return {LIVE + name: values[name] for name in LIVE_METRICS if name in values}

    def post(self, stage: str, loaders: Any, loop: Tally | None = None) -> None:
        """Send this rank's tally of the epoch that ends to all ranks. A second call for one epoch does nothing.

        Args:
            stage: the stage whose epoch ends.
            loaders: the loaders that it reads.
            loop: the seconds of this rank's loop, if they are known.
        """
        if stage in self._posted or (tally := self._tally(stage, loaders, loop)) is None:
            return
        group = next(iter(_counted(loaders).values())).group
        self._posted[stage] = group.post(tally), self._counts.pop(stage)

    def metrics(self, stage: str, loaders: Any, patience: float) -> dict[str, float]:
        """The metrics of the epoch that ends, over all ranks; empty if a rank did not post its tally in time.

        Args:
            stage: the stage whose epoch ends.
            loaders: the loaders that it reads.
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
                    "left out.\nGive all ranks the same monitors and the same number of batches",
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

    def _tally(self, stage: str, loaders: Any, loop: Tally | None) -> Tally | None:
        """The sum over all datasets of a stage in its epoch so far, and its loop; None if no dataset counts."""
        self.count(stage, loaders)
        datasets, counts = _counted(loaders), self._counts[stage]
        if not datasets:
            return None
        tally = reduce(Tally.__add__, (_tally_of(dataset, counts[counters]) for counters, dataset in datasets.items()))
        return tally if loop is None else tally + loop


class PoolRates:
    """The metrics of the rolling cache behind some loaders, from one call to the next."""

    def __init__(self) -> None:
        self._before: tuple[RollingStats, float] | None = None

    def metrics(self, loaders: Any) -> dict[str, float]:
        """Samples resident, and rates since the last call; empty unless exactly one rolling cache is read."""
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
    """End a Trainer call: the first epoch of the next call counts from here."""
    for dataset in datasets:
        if dataset.counters is not None:
            _before[dataset.counters] = dataset.counters.totals(dataset.group.rank)


def coverage(datasets: Sequence[Cached]) -> float:
    """Share of the drawn indices of all these datasets that have a slot on some node."""
    return sum(map(_covered, datasets)) / max(sum(map(samples_of, datasets)), 1)


def samples_of(dataset: Cached) -> int:
    """Number of samples that are drawn of a dataset; of a stream, the number of samples stored so far."""
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
    """The datasets behind loaders that have counters, by these."""
    datasets = cached_in_leaves(loaders)
    return {dataset.counters: dataset for dataset in datasets if dataset.counters is not None}


def _tally_of(dataset: Cached, counts: Counts) -> Tally:
    cache, node = dataset.cache, dataset.group.node
    if cache is None:  # the size of a sample in a slot is unknown
        return Tally(node, counts, unsized=counts.misses + counts.bypasses)
    filled = cache.fill_fraction * len(cache)
    return Tally(node, counts, len(cache), filled, cache.memory_bytes, dataset.budget_bytes)

"""Counts of an epoch over all ranks, for CacheMonitor and CacheMeter alike.

**Counting.** Each CachedLoader knows where the samples of each batch came from that it has handed out
(`position.Ledger`). The hits, misses and bypasses of an epoch are those of the batches that were handed to the trainer,
without what workers have made ahead, and without a batch that Lightning has only fetched. All else (fills, bytes,
seconds of loading) is counted by the processes that do it, in totals that the loaders of a dataset share. So are the
samples of other loaders: of streams, plain DataLoaders over a CachedDataset, and classes of the user's. Of totals an
epoch has the difference between its end and the end of the epoch before. Validation may read the dataset of training,
so the difference is taken before each validation, too.

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
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from typing import Any
from weakref import WeakKeyDictionary

from lightning_stocache.cache.counters import Counters, Counts, Served
from lightning_stocache.growing.rolling_cache import RollingCache, RollingStats
from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.metrics import LIVE, LIVE_METRICS, Tally, rates, summarise
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.loading.position import Given, Ledger, LoaderState
from lightning_stocache.node.post import Post

__all__ = ["PoolRates", "Tallies", "began_at", "coverage", "samples_of"]

log = logging.getLogger(__name__)

_before: WeakKeyDictionary[Counters, Counts] = WeakKeyDictionary()  # totals at the start of the current Trainer call

_ONCE_LATE = 1.0  # seconds to wait after the ranks were once out of step


class Tallies:
    """The counts of this rank's stages, and the metrics of all ranks at the end of an epoch.

    `loaders` are the loaders that a stage reads, in any nesting.
    """

    def __init__(self) -> None:
        self.pools = PoolRates()
        self._expectation = Expectation()
        self._given: dict[tuple[str, Ledger], Given] = {}  # by each loader, when the stage's epoch began
        self._paused: dict[str, dict[Ledger, Given]] = {}  # by each loader, when the stage paused
        self._started: dict[str, Counter[int]] = {}  # batches of each stage in its epoch so far, by the loader's number
        self._totals: dict[Counters, Counts] = {}  # at the last call of `count`
        self._counts: dict[str, dict[Counters, Counts]] = {}  # of each stage, in its epoch so far
        self._posted: dict[str, tuple[Post[Tally], dict[Counters, Counts]]] = {}
        self._was_late = False

    def begin(self, stage: str, loaders: Any) -> None:
        """Begin a training, or a validation, test or prediction.

        Lightning has called `iter` of its first loader, and of the others only if they are read side by side.
        """
        self._started[stage] = Counter()
        ledgers = [ledger_of(leaf) for leaf in leaves_in(loaders)]
        first = ledgers[0].begun_at if ledgers and ledgers[0] is not None else math.inf
        for ledger in filter(None, ledgers):
            self._given[stage, ledger] = ledger.begun if ledger.begun_at >= first else ledger.given()

    def start(self, stage: str, loaders: Any, number: int = 0) -> None:
        """Note that the trainer starts on a batch of the loader of that number; in training, of all loaders together.

        With its first batch, an epoch begins where the iteration under way began: nobody else has read from that.
        """
        if (started := self._started.get(stage)) is None:
            started = self._started[stage] = Counter()
        if not started[number]:
            for leaf_number, ledger in enumerate(map(ledger_of, leaves_in(loaders))):
                if ledger is not None and (stage == "train" or leaf_number == number):
                    self._given[stage, ledger] = ledger.begun
        started[number] += 1

    def pause(self, stage: str, loaders: Any) -> None:
        """What these loaders give until `resume` belongs to another stage."""
        self._paused[stage] = {ledger: ledger.given() for ledger in _ledgers(loaders)}
        self.count(stage, loaders)

    def resume(self, stage: str) -> None:
        """Go on with a stage."""
        for ledger, before in self._paused.pop(stage, {}).items():
            begun = self._given.get((stage, ledger), Given())
            self._given[stage, ledger] = begun.later(ledger.given().since(before))

    def settle(self, stage: str, loaders: Any) -> None:
        """What these loaders have given until now belongs to no later epoch."""
        self._given |= {(stage, ledger): ledger.given() for ledger in _ledgers(loaders)}

    def end(self) -> None:
        """End a Trainer call: the totals of the next call count from here."""
        _before.update({counters: counters.totals(counters.rank) for counters in self._totals if not counters.closed})

    def seconds(self, stage: str, loaders: Any) -> tuple[float, float]:
        """Seconds of the epoch so far in which the consumer waited for these loaders, and did something else.

        NaN if a loader has no clock.
        """
        if any(ledger_of(leaf) is None for leaf in leaves_in(loaders)):
            return math.nan, math.nan
        given = [ledger.given().since(self._given.get((stage, ledger), Given())) for ledger in _ledgers(loaders)]
        return sum(each.waited_ns for each in given) / 1e9, sum(each.away_ns for each in given) / 1e9

    def served(self, stage: str, loaders: Any) -> dict[Counters, Served | None]:
        """The samples of the epoch so far that each dataset has given; None if they are known from its totals alone.

        If a loader has no length, Lightning fetches one batch ahead, which may be no step's.
        """
        leaves, seen = list(leaves_in(loaders)), set[Ledger]()
        served: dict[Counters, Served | None] = {}
        has_length = all(map(_has_length, leaves))
        for number, leaf in enumerate(leaves):
            ledger, given = ledger_of(leaf), None
            if ledger is not None and ledger.is_known:
                given = self._of_loader(stage, number, ledger, has_length) if ledger not in seen else (0, 0, 0)
                seen.add(ledger)
            for dataset in cached_in_leaves(leaf):
                if dataset.counters is not None:
                    before = served.get(dataset.counters, (0, 0, 0))
                    both = None if before is None or given is None else tuple(map(int.__add__, before, given))
                    served[dataset.counters] = both  # type: ignore[assignment]
        return served

    def _of_loader(self, stage: str, number: int, ledger: Ledger, has_length: bool) -> Served:
        begun, started = self._given.get((stage, ledger), Given()), self._started.get(stage)
        is_ahead = False
        if started is not None and not has_length:
            is_ahead = ledger.given().batches - begun.batches > started.get(number, started[0])
        given = ledger.given(without_newest=is_ahead).since(begun)
        return given.hits, given.misses, given.bypasses

    def count(self, stage: str, loaders: Any) -> None:
        """Add what the totals of the datasets have grown by since the last call to the running epoch of a stage.

        Two stages may read one dataset, so one that pauses is counted before another begins. Counts of a stage that
        never ends an epoch, such as "sanity check", are dropped.
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

    def is_posted(self, stage: str) -> bool:
        """Whether the tally of a stage's epoch has been sent."""
        return stage in self._posted

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
        self._started.pop(stage, None)
        self.settle(stage, loaders)

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
        for counters, served in self.served(stage, loaders).items():
            if served is not None:
                hits, misses, bypasses = served
                counts[counters] = replace(counts[counters], hits=hits, misses=misses, bypasses=bypasses)
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


def ledger_of(leaf: Any) -> Ledger | None:
    """What a loader notes about the batches that it has handed out; None if its class notes nothing."""
    position = getattr(leaf, "position", None)
    return position.ledger if isinstance(position, LoaderState) else None


def _ledgers(loaders: Any) -> list[Ledger]:
    """The ledgers of all loaders, each once."""
    return list(dict.fromkeys(ledger for leaf in leaves_in(loaders) if (ledger := ledger_of(leaf)) is not None))


def _has_length(leaf: Any) -> bool:
    try:
        return len(leaf) >= 0
    except (TypeError, NotImplementedError):
        return False


def began_at(loaders: Any) -> float:
    """When the first iteration under way of these loaders began, in seconds of `time.perf_counter`; inf: not known."""
    return min((ledger.begun_at for ledger in _ledgers(loaders)), default=math.inf)


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

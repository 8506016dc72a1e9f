"""What the ranks were served in an epoch, and how they tell each other.

**Counting.** The counts of an epoch are the difference between two of its ends: workers run ahead of the step, so an
epoch's first samples are served before `on_train_epoch_start`. What training has been served is put aside when a
validation starts, since one dataset may be in both stages.

**Telling.** Around an epoch's end other callbacks are in collectives of theirs. A progress bar reads the metrics on
rank zero alone, and reading one that is reduced over the ranks waits until the other ranks reduce it too, which they do
when their hooks are over. So nothing here waits in a collective. Each rank posts its tally (`node.post`) when the last
step of the epoch is done, and goes on; at the epoch's end it collects what all have posted. A rank that waits there has
posted. It waits for ranks that are in their last step, and no last step waits for what another rank does after its own.
So the slowest rank ends all waits, and all get the same numbers. They are final: the samples of a rank's last step have
been served before it, and what its workers serve ahead after its post belongs to the next epoch.

One node is no exception, though all counters lie in its memory: an exact sum needs a word from the slowest rank that it
has ended the epoch, and a CPU runs ahead of its GPU's reductions, which therefore hold no rank back.

The wait has a limit. Where ranks are out of step (one has no monitor, or more batches than the others), one warning is
given, the epoch goes without values, and later ones are waited for a second at most: ranks that were only late once
log again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import reduce
from weakref import WeakKeyDictionary

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.insight.layout import LIVE
from lightning_stocache.insight.metrics import LIVE_METRICS, Tally, rates, summarise
from lightning_stocache.insight.stall import Seconds
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_tree import Cached
from lightning_stocache.node.post import Posted

__all__ = ["Tallies", "coverage", "end_call", "samples_of"]

log = logging.getLogger(__name__)

_before: WeakKeyDictionary[Counters, Counts] = WeakKeyDictionary()  # when the current Trainer call began

_ONCE_LATE = 1.0  # seconds to wait where the ranks were found out of step before


class Tallies:
    """The tallies of this rank, and those of all ranks at an epoch's end.

    Example:
        >>> dataset = CachedDataset([1.0, 2.0])
        >>> _ = dataset[0]
        >>> tallies = Tallies()
        >>> tallies.post("val", [dataset])
        >>> [tally.counts.served for tally in tallies.collect("val", patience=1)]
        [1]
        >>> dataset.close()
    """

    def __init__(self) -> None:
        self._seen: dict[Counters, Counts] = {}
        self._aside: dict[Counters, Counts] = {}  # served to training since its last epoch's end, but seen by now
        self._posted: dict[str, Posted[Tally]] = {}
        self._was_late = False
        self.served: dict[str, dict[Counters, Counts]] = {}
        """What this rank was served of each dataset in the epoch of a stage that was posted last."""

    def post(self, stage: str, datasets: Sequence[Cached], seconds: Seconds | None = None) -> None:
        """Tell all ranks what this one brings to the epoch that ends, unless that is done.

        Args:
            stage: whose epoch it is.
            datasets: what the stage reads; nothing is told where none of them counts.
            seconds: those of the stage's loop, which only training has.
        """
        if stage in self._posted:
            return
        tallies, self.served[stage] = [], {}
        for dataset, counters in _counted(datasets):
            counts = self._moved(dataset, counters)
            if stage == "train":
                counts += self._aside.pop(counters, Counts())
            self.served[stage][counters] = counts
            tallies.append(_tally(dataset, counts))
        if (tally := _joined(tallies, seconds)) is not None:
            self._posted[stage] = datasets[0].group.post(tally)

    def collect(self, stage: str, patience: float) -> list[Tally]:
        """What all ranks bring to the epoch that ends; empty if nothing was posted, or not by all.

        Args:
            stage: whose epoch it is.
            patience: seconds to wait for the slowest rank.
        """
        posted = self._posted.pop(stage, None)
        if posted is None:
            return []
        tallies = posted.collect(min(patience, _ONCE_LATE) if self._was_late else patience)
        if tallies is None and not self._was_late:
            self._was_late = True
            log.warning(
                "the cache counts of the other ranks have not come in %.0f s: this epoch's stocache/ values are left "
                "out.\nGive all ranks the same monitor callbacks and the same number of batches",
                patience,
            )
        return tallies or []

    def metrics(self, stage: str, datasets: Sequence[Cached], patience: float) -> dict[str, float]:
        """The metrics of the epoch that ends, over all ranks, by the names of the metric keys; empty as `collect` is.

        Args:
            stage: whose epoch it is.
            datasets: what the stage reads.
            patience: seconds to wait for the slowest rank.
        """
        tallies = self.collect(stage, patience)
        return summarise(tallies) | {"coverage": coverage(datasets)} if tallies else {}

    def skip(self, datasets: Iterable[Cached]) -> None:
        """Count nothing of what was served so far."""
        for dataset, counters in _counted(datasets):
            self._moved(dataset, counters)

    def peek(self, datasets: Iterable[Cached], seconds: Seconds | None = None) -> Tally | None:
        """This rank's tally of training's epoch so far, with the seconds of its loop where they are known."""
        tallies = []
        for dataset, counters in _counted(datasets):
            _, counts = self._since(dataset, counters)
            tallies.append(_tally(dataset, counts + self._aside.get(counters, Counts())))
        return _joined(tallies, seconds)

    def live(self, datasets: Iterable[Cached], seconds: Seconds | None = None) -> dict[str, float]:
        """This rank's values of training's epoch so far, by their metric keys; empty where nothing counts."""
        tally = self.peek(datasets, seconds)
        now = {} if tally is None else rates(tally)
        return {LIVE + name: now[name] for name in LIVE_METRICS if name in now}

    def put_aside(self, datasets: Iterable[Cached]) -> None:
        """Keep what training has been served so far for its epoch's end: another stage begins."""
        for dataset, counters in _counted(datasets):
            self._aside[counters] = self._aside.get(counters, Counts()) + self._moved(dataset, counters)

    def _moved(self, dataset: Cached, counters: Counters) -> Counts:
        self._seen[counters], moved = self._since(dataset, counters)
        return moved

    def _since(self, dataset: Cached, counters: Counters) -> tuple[Counts, Counts]:
        """What this rank has been served up to now, and since the last look."""
        now = counters.totals(dataset.group.rank)
        return now, now - self._seen.get(counters, _before.get(counters, Counts()))


def end_call(datasets: Iterable[Cached]) -> None:
    """What has been counted until now is of a Trainer call that is over: the next one's epochs begin here."""
    for dataset, counters in _counted(datasets):
        _before[counters] = counters.totals(dataset.group.rank)


def _counted(datasets: Iterable[Cached]) -> list[tuple[Cached, Counters]]:
    return [(dataset, dataset.counters) for dataset in datasets if dataset.counters is not None]


def _tally(dataset: Cached, counts: Counts) -> Tally:
    cache, node = dataset.cache, dataset.group.node
    if cache is None:  # nobody knows what a sample would take in a slot
        return Tally(node, counts, unsized=counts.misses + counts.bypasses)
    filled = cache.fill_fraction * len(cache)
    return Tally(node, counts, len(cache), filled, cache.memory_bytes, dataset.budget_bytes)


def _joined(tallies: Sequence[Tally], seconds: Seconds | None) -> Tally | None:
    """One tally of all datasets, with the seconds of the loop that read them."""
    if not tallies:
        return None
    joined = reduce(Tally.__add__, tallies)
    return joined if seconds is None else joined + Tally(joined.node, Counts(), 0, 0, 0, 0, *seconds, ranks=1)


def coverage(datasets: Sequence[Cached]) -> float:
    """Share of the indices of all these datasets, as long as they are now, that have a slot on some node.

    Where it is known which indices are drawn, it is the share of these.
    """
    covered = sum(map(_covered, datasets))
    return covered / max(sum(map(samples_of, datasets)), 1)


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

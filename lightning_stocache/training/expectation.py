"""What the hit rate should be, and what is wrong if it is not.

A cache that silently does nothing is the commonest failure of caches. So the hit rate of each epoch is compared with
the one that theory predicts for the arcs, the ranks and the sampler in use, and for as many samples as the epochs drew:
with `limit_train_batches`, or after a checkpoint, that is not all of them. Of several training sets it is the mean of
theirs, weighted by what was served of each.

On one node `insight.first_draws` has the theory, for all samplers of which `sampler_draws` knows something; on several
`insight.theory` has it, for DistributedSampler and LocalitySampler. There is none where what a sampler will draw cannot
be known, where two loaders of several ranks read one dataset, where validation may fill slots of the same samples, and
where idle workers fill the cache. To watch what is drawn, and to predict the hits from that, would be to measure them
twice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy.typing as npt
from lightning.pytorch import Trainer
from torch.utils.data import BatchSampler

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.stores import stored
from lightning_stocache.insight.first_draws import FirstDraws
from lightning_stocache.insight.theory import expected_hit_rate, moved_share
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.loading.loader_tree import cached_datasets, loaders_in
from lightning_stocache.sampling.locality_sampler import LocalitySampler, Mode
from lightning_stocache.sampling.sampler_domain import drawing_of
from lightning_stocache.training.lightning_internals import begins_again
from lightning_stocache.training.sampler_draws import LoaderDraws, drawn_list, drawn_together, loader_draws

__all__ = ["Expectation"]

_TOLERANCE = 0.05  # the formula is exact to 0.002 for full epochs; short epochs of small datasets spread by 0.012
_ALL = 0.999
_SPREAD = 3  # standard deviations of what is drawn at random, which is much where an epoch draws a hundred samples


class Expectation:
    """The prediction for the training sets, epoch by epoch.

    Args:
        trainer: whose loaders and samplers are in use.
        datasets: the cached training sets.
    """

    def __init__(self, trainer: Trainer, datasets: Sequence[CachedDataset]) -> None:
        self._sets = [_SetExpectation(trainer, dataset, alone=len(datasets) == 1) for dataset in datasets]
        self._served = 0

    def hit_rate(self, metrics: Mapping[str, float], counts: Mapping[Counters, Counts]) -> float | None:
        """The predicted hit rate of the epoch that ends now; None where no formula holds.

        Args:
            metrics: of this epoch.
            counts: what this rank has been served of each training set in it, the others likewise.
        """
        self._served = sum(int(metrics[name]) for name in ("hits", "misses", "bypasses"))
        each = [counts.get(part.counters, Counts()) for part in self._sets]
        served, fills = sum(count.served for count in each), sum(count.fills for count in each)
        hits = 0.0
        for part, count in zip(self._sets, each, strict=True):
            share = count.served / served if served else 1 / len(each)
            filled = int(metrics["fills"]) * (count.fills / fills if fills else 0)
            rate = part.hit_rate(round(self._served * share), filled, metrics["fill_fraction"])
            if rate is None:
                hits = math.nan
            else:
                hits += share * rate
        return None if math.isnan(hits) else hits

    def complaint(self, metrics: Mapping[str, float]) -> str | None:
        """What is wrong, in words: the hit rate is far below the predicted one, or slots are for what is not drawn."""
        for part in self._sets:
            if part.changed and part.leaves_out and metrics["bypasses"]:
                return (
                    f"{type(part.sampler).__name__} draws other samples than when the cache opened, and only those "
                    f"have slots: {int(metrics['bypasses'])} samples of this epoch had none.\nWith keep_cache=True and "
                    "memory for the whole dataset all samples have slots"
                )
        measured, expected = metrics["hit_rate"], metrics.get("hit_rate_expected")
        if expected is None or any(part.lags for part in self._sets):
            return None
        spread = math.sqrt(expected * (1 - expected) / max(self._served, 1))
        if measured >= expected - _TOLERANCE - _SPREAD * spread:
            return None
        return (
            f"the hit rate of this epoch is {100 * measured:.1f} %, where {100 * expected:.1f} % were to be expected:\n"
            f"{self._cause(metrics['fill_fraction'])}"
        )

    def _cause(self, fill_fraction: float) -> str:
        if fill_fraction < 1:
            return (
                f"only {100 * fill_fraction:.1f} % of the slots are filled; memory may have run out (see the warnings "
                "above)"
            )
        for part in self._sets:
            if part.nodes > 1 and not isinstance(part.sampler, LocalitySampler):
                name = type(part.sampler).__name__
                return f"{name} deals samples to nodes that do not have them; use LocalitySampler"
        return "the source may be made anew in every epoch, or samples be asked for more than once"


class _SetExpectation:
    """The prediction for one training set."""

    def __init__(self, trainer: Trainer, dataset: CachedDataset, *, alone: bool) -> None:
        assert dataset.counters is not None
        self.counters = dataset.counters
        self._dataset = dataset
        group, readers = dataset.group, _readers(trainer.train_dataloader, dataset.counters)
        self.nodes, loader = len(group.nodes), readers[0]
        self.sampler: Any = index_sampler(loader)
        self._epochs: list[int] = []  # how many samples each was served
        self._ready = 0.0
        self._theory: FirstDraws | None = None
        self._slots: tuple[Ring, npt.NDArray[Any], npt.NDArray[Any]] | None = None
        self._trainer, self._lists, self.changed = trainer, list(map(drawn_list, readers)), False
        each = [loader_draws(reader, dataset.counters, trainer.world_size, self.nodes) for reader in readers]
        known = drawn_together(readers, each, len(dataset), again=begins_again(trainer)) if len(each) > 1 else each[0]
        shared = [
            loader_draws(other, dataset.counters, 1, 1) for other in _readers(trainer.val_dataloaders, dataset.counters)
        ]
        self._alone = alone and not shared
        prefills = cached_source(dataset).opened.request.prefill
        if (
            (len(readers) > 1 and trainer.world_size > 1)
            or prefills
            or (shared and (known is None or any(_meet(known, other) for other in shared)))
        ):
            known = None
        self._draws = known
        if self.nodes > 1 and (type(loader.batch_sampler) is not BatchSampler or not _deals(self.sampler)):
            self._draws = None
        self._mode: Mode = self.sampler.mode if isinstance(self.sampler, LocalitySampler) else "global"
        self._moved = 0.0
        if self._draws is not None and self.nodes > 1 and self._mode == "locality" and dataset.ring is not None:
            self._moved = moved_share(dataset.ring, group.nodes, loader.batch_size or 1)

    @property
    def leaves_out(self) -> bool:
        """Whether only a part of the dataset has slots, because no more was drawn."""
        return cached_source(self._dataset).opened.request.domain is not None

    @property
    def lags(self) -> bool:
        """Whether the formula leaves out a lag: where the arcs of several nodes overlap."""
        ring = cached_source(self._dataset).opened.known_ring
        return ring is not None and self.nodes > 1 and sum(arc.slots for arc in ring.arcs) > ring.arcs[0].size

    def hit_rate(self, served: int, fills: float, fill_fraction: float) -> float | None:
        """The predicted hit rate of an epoch that was served so many samples; None where no formula holds."""
        ring, group = cached_source(self._dataset).opened.known_ring, self._dataset.group
        first, known = not self._epochs, self._draws
        self._epochs.append(served)
        readers = _readers(self._trainer.train_dataloader, self.counters)
        self.changed |= list(map(drawn_list, readers)) != self._lists
        if self.changed:
            return None
        if ring is None or known is None or len(self._dataset) != ring.arcs[0].length:
            return None  # no cache, no formula, or a source that has grown
        if first and (slots := sum(arc.slots for arc in ring.arcs)):
            cache = self._dataset.cache
            filled = fill_fraction if self._alone or cache is None else cache.filled / max(len(cache), 1)
            self._ready = max(filled - fills / slots, 0.0)
        if self.nodes == 1:
            return self._on_one_node(ring, known, served, fills)
        samples = ring.arcs[0].length
        if served > samples + group.world:  # what is more than padding was drawn twice
            return None
        whole = samples if self.sampler.shuffle else served
        drawn = [self._ready, *(min(count / max(whole, 1), 1.0) for count in self._epochs[:-1])]
        return expected_hit_rate(ring, group.shares, len(drawn), self._moved, self._mode, drawn)

    def _on_one_node(self, ring: Ring, known: LoaderDraws, served: int, fills: float) -> float | None:
        whole, cache = cached_source(self._dataset).opened.ring, self._dataset.cache
        if self._slots is None or self._slots[0] != ring:  # of records, it is learnt how many find room
            self._slots = (ring, *known.slots(ring, len(self._dataset)))
        _, held, others = self._slots
        if self._theory is None:
            if not self._alone and cache is not None and known.indices is not None:
                # Others fill it, too: what was there of these samples.
                before = int(stored(cache, known.indices).sum()) - fills
                self._ready = max(before / max(int(held.sum()), 1), 0.0)
            self._theory = FirstDraws(known.draws, self._ready)
        short = whole is not None and ring.arcs[0].slots < whole.arcs[0].slots
        if known.draws.groups > 1 and (0 < self._ready < _ALL or short):
            self._draws = None  # which indices were ready, or will find room, is not known, and they are not alike
            return None
        return self._theory.hit_rate(served, held, others)


def _readers(loaders: Any, counters: Counters) -> list[Any]:
    """The loaders among them that read a cached dataset."""
    return [
        loader
        for loader in loaders_in(loaders)
        if any(dataset.counters is counters for dataset in cached_datasets(loader))
    ]


def _meet(known: LoaderDraws, other: LoaderDraws | None) -> bool:
    """Whether two loaders may draw the same sample."""
    if other is None or known.indices is None or other.indices is None:
        return True
    return bool(set(known.indices.tolist()) & set(other.indices.tolist()))


def _deals(sampler: Any) -> bool:
    """Whether it deals one permutation among the ranks."""
    drawing = drawing_of(sampler)
    return drawing is not None and drawing.deals

"""The caches of one Trainer call: opened together, once, and closed at its end.

All datasets of a call (train and val for `fit`) share the budget, so they must be known before the first of them opens.
The DataModule of ours knows them. Where loaders come from the user's hooks, the first request of a call asks for all
of them, and what was asked too early is handed out when its turn comes; each hook still runs as often as it would.

A dataset is known by its object. The same object is never opened twice within a call: not for a second `setup`, nor
for reloaded loaders. Another object is another dataset, even if it looks the same: its cache starts empty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Dataset

from lightning_stocache.loading.allocation import InFlight
from lightning_stocache.loading.dataset import CachedDataset, open_together
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.training.loaders import cached_datasets, in_flight, loaders_in, rewrap, with_dataset
from lightning_stocache.training.options import CacheOptions

__all__ = ["CallCaches", "LoaderTap", "Wanted"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A dataset that a loader of the call will read."""

    source: Dataset[Any]
    stage: str
    loader: InFlight


class CallCaches:
    """The open caches of the current Trainer call.

    Args:
        options: budgets and the rest.
    """

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self._open: dict[int, tuple[str, CachedDataset]] = {}

    def __getitem__(self, source: Dataset[Any]) -> CachedDataset:
        """The cached dataset around a source that has been opened."""
        return self._open[id(source)][1]

    def __contains__(self, source: Dataset[Any]) -> bool:
        return id(source) in self._open

    def open(self, wanted: Iterable[Wanted], group: NodeGroup | None = None) -> None:
        """Open what is wanted and not open yet. Collective: every rank wants the same, in the same order.

        Raises:
            CacheMemoryError: the memory cannot be had, and `on_error="raise"`.
            Exception: what a source raises when its first samples are read.
        """
        new = {id(one.source): one for one in wanted if one.source not in self}
        if not new:
            return
        options = self.options
        datasets = {
            key: CachedDataset(
                one.source,
                allow_random=options.allow_random,
                backend=options.backend,
                on_error=options.on_error,
                defer=True,
            )
            for key, one in new.items()
        }
        pots = {key: options.pot(one.stage) for key, one in new.items()}
        open_together(
            list(datasets.values()),
            {pot: self._left(pot, budget) for pot, budget in options.budgets.items()},
            NodeGroup.discover() if group is None else group,
            list(pots.values()),
            [one.loader for one in new.values()],
        )
        self._open |= {key: (pots[key], dataset) for key, dataset in datasets.items()}

    def close(self) -> None:
        """Close all caches; samples of the same datasets pass through uncached from then on."""
        for _, dataset in self._open.values():
            dataset.close()
        self._open.clear()

    def end_call(self) -> None:
        """End of a Trainer call: close, unless the caches are to be kept for the next one."""
        if not self.options.keep_cache:
            self.close()
        for _, dataset in self._open.values():
            if dataset.counters is not None:
                dataset.baseline = dataset.counters.totals(dataset.group.rank)

    def _left(self, pot: str, budget: Budget) -> Budget:
        """What a budget in bytes has left beside the caches that are open already."""
        taken = sum(dataset.budget_bytes for own, dataset in self._open.values() if own == pot)
        return Budget.parse(max(int(budget.amount) - taken, 0)) if taken and budget.unit == "bytes" else budget


class LoaderTap:
    """Stands before the functions that give a Trainer call its loaders; gives the same ones with cached datasets.

    Args:
        caches: where the datasets are opened.
        getters: the user's function for every stage of the call.
    """

    def __init__(self, caches: CallCaches, getters: Mapping[str, Callable[[], Any]]) -> None:
        self._caches = caches
        self._getters = dict(getters)
        self._early: dict[str, Any] | None = None

    def __call__(self, stage: str) -> Any:
        """The loaders of a stage. Collective: every rank asks for the same stages in the same order."""
        if self._early is None:  # the first request of the call
            self._early = {name: getter() for name, getter in self._getters.items()}
            self._open(self._early)
        loaders = self._early.pop(stage) if stage in self._early else self._getters[stage]()
        self._open({stage: loaders})
        return rewrap(loaders, self._cached)

    def _open(self, loaders_of: Mapping[str, Any]) -> None:
        wanted = [
            Wanted(loader.dataset, stage, in_flight(loader))
            for stage, loaders in loaders_of.items()
            for loader in loaders_in(loaders)
            if not cached_datasets(loader)
        ]
        self._caches.open(wanted)
        own = [dataset for loaders in loaders_of.values() for dataset in cached_datasets(loaders)]
        for dataset in own:  # made by the user: it only has to become the node's common one
            if dataset.group.world == 1:
                dataset.share()

    def _cached(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        return loader if cached_datasets(loader) else with_dataset(loader, self._caches[loader.dataset])

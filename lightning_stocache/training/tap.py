"""Where a Trainer call gets its loaders: the user's own ones, with cached datasets.

Train and val share the budget, so at the first request of a `fit` the loaders of both are asked for, and what was asked
too early is handed out when its turn comes; each hook still runs as often as it would. A hook that draws random numbers
draws the same ones, too: Lightning puts the generators back after the sanity check, in which the first request falls,
so those of the early one are put back as well, and moved on when the hook's own turn has come. Where the generators
have moved meanwhile (no sanity check, and a val hook that draws), they stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from lightning_stocache.loading.generators import Generators
from lightning_stocache.loading.stand_in import StandIn
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.training.caches import CallCaches, Wanted
from lightning_stocache.training.loaders import cached_datasets, in_flight, loaders_in, rewrap, with_dataset
from lightning_stocache.training.sampling import check_sampler, is_default, locality_sampler

__all__ = ["LoaderTap"]


@dataclass(frozen=True)
class _Early:
    """Loaders that were asked for before their turn, and the generators' state before and after that."""

    loaders: Any
    before: dict[str, Any]
    after: dict[str, Any]


class LoaderTap:
    """Stands before the functions that give a Trainer call its loaders; gives the same ones with cached datasets.

    Args:
        caches: where the datasets are opened.
        getters: the user's function for every stage that may be asked for.
        together: the stages that share the budget with the first one that is asked for.
        replicas: says how many ranks share the data and which of them this is, once the Trainer knows.
        later_bytes: says what memory the training will take, once there is a model.
    """

    def __init__(
        self,
        caches: CallCaches,
        getters: Mapping[str, Callable[[], Any]],
        together: Collection[str] = (),
        replicas: Callable[[], tuple[int, int]] = lambda: (1, 0),
        later_bytes: Callable[[], int] = int,
    ) -> None:
        self._caches = caches
        self._getters = dict(getters)
        self._replicas, self._later_bytes = replicas, later_bytes
        self._together: Collection[str] | None = together
        self._early: dict[str, _Early] = {}

    def __call__(self, stage: str) -> Any:
        """The loaders of a stage. Collective: every rank asks for the same stages in the same order.

        Raises:
            TypeError: a loader that cannot be cached; it says what to do.
        """
        together, self._together = self._together or (), None
        self._early |= {other: self._ask_early(other) for other in together if other != stage}
        loaders = self._take_early(stage) if stage in self._early else self._getters[stage]()
        asked = {stage: loaders} | {other: early.loaders for other, early in self._early.items()}
        self._open({name: asked[name] for name in self._getters if name in asked})
        return rewrap(loaders, lambda loader: self._cached(stage, loader))

    def _ask_early(self, stage: str) -> _Early:
        generators = Generators()
        before = generators.state()
        early = _Early(self._getters[stage](), before, generators.state())
        generators.restore(before)
        return early

    def _take_early(self, stage: str) -> Any:
        early = self._early.pop(stage)
        generators = Generators()
        if generators.state() == early.before:
            generators.restore(early.after)
        return early.loaders

    def _open(self, loaders_of: Mapping[str, Any]) -> None:
        group = NodeGroup.discover()
        loaders = [(stage, loader) for stage, loaders in loaders_of.items() for loader in loaders_in(loaders)]
        self._caches.open(
            (Wanted(one.dataset, stage, in_flight(one)) for stage, one in loaders if self._to_cache(stage, one)),
            group,
            self._later_bytes(),
        )
        for dataset in cached_datasets(list(loaders_of.values())):
            # The user's own: it only has to become the node's common one, and must not start anew in every epoch.
            if dataset.counters is None or dataset.group != group:
                dataset.share(group)

    def _cached(self, stage: str, loader: DataLoader[Any]) -> DataLoader[Any]:
        if not self._to_cache(stage, loader):
            return loader
        dataset, replicas = self._caches[loader.dataset], self._replicas()
        check_sampler(loader, replicas[0])
        sampler = None
        several = replicas[0] > 1 and len(dataset.group.nodes) > 1
        if stage == "train" and several and loader.batch_size and is_default(loader):
            sampler = locality_sampler(
                dataset,
                shuffle=isinstance(loader.sampler, RandomSampler),
                batch_size=loader.batch_size,
                replicas=replicas,
                mode=self._caches.options.sampling,
            )
        return with_dataset(loader, StandIn(dataset), sampler)

    def _to_cache(self, stage: str, loader: DataLoader[Any]) -> bool:
        """Whether a loader is to be cached: not if it is already, or if it cannot be and its stage is off."""
        if cached_datasets(loader):
            return False
        if not isinstance(loader.dataset, IterableDataset):
            return True
        if self._caches.options.is_off(stage):
            return False
        raise TypeError(
            f"the {stage} loader reads the iterable-style {type(loader.dataset).__name__}: without an index there is "
            f"nothing to cache by. Use a map-style dataset, or leave the stage out: stage_budgets={{{stage!r}: 0}}"
        )

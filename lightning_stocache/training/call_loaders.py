"""Replaces the loaders of one Trainer call by copies that read the cache.

Lightning alone decides when a loader hook runs, and how often. So the budget is divided as loaders become known (see
`CacheOptions`). Loaders that were given to the Trainer, and those of a StocacheDataModule, are known from the start.

A loader that cannot be cached stays the user's own object, with one warning; the other loaders are cached. The ranks
agree on each loader.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from lightning.pytorch.utilities import CombinedLoader
from torch.nn.parameter import UninitializedParameter
from torch.utils.data import DataLoader, IterableDataset

from lightning_stocache.growing.rolling_cache import share_pools
from lightning_stocache.growing.stream import stream_with
from lightning_stocache.loading.dataset import StandIn, cached_source, dataset_over
from lightning_stocache.loading.loader_copy import reason_of, settings_of
from lightning_stocache.loading.loader_tree import Cached, cached_in_leaves, leaves_in
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.options import STAGES
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.lightning_internals import say
from lightning_stocache.training.loaders import (
    TrainerLoader,
    TransformedSet,
    TransformedStream,
    cacheable_length,
    rewrap,
    source_of,
    title,
    with_dataset,
)
from lightning_stocache.training.reads import Reads
from lightning_stocache.training.resume import ResumePoint
from lightning_stocache.training.sampling import follow_pools, free_pools, loader_domain, locality_for

__all__ = ["CallLoaders", "training_bytes"]

# Bytes to come per byte of a parameter that is trained on the CPU: 3 for its gradient and Adam's two moments, and 4 for
# a copy of these and the parameter, because workers that start in a later epoch hold the pages that a step writes to.
_PER_PARAMETER = 7


def training_bytes(trainer: Any) -> int:
    """Memory that a fit of one rank will take after its caches open: gradients, and the optimiser's state. In bytes.

    0 on another device, and without a trainer.
    """
    if trainer is None or trainer.state.fn != "fit" or trainer.strategy.root_device.type != "cpu":
        return 0
    parameters = [parameter for parameter in trainer.lightning_module.parameters() if parameter.requires_grad]
    known = [parameter for parameter in parameters if not isinstance(parameter, UninitializedParameter)]
    return _PER_PARAMETER * int(sum(parameter.numel() * parameter.element_size() for parameter in known))


class _Copy(NamedTuple):
    """A user's loader, its attributes at the time of the copy, the cached dataset, and the copy that reads it."""

    loader: DataLoader[Any]
    attributes: dict[str, Any]
    dataset: Cached
    copy: DataLoader[Any]

    def is_current(self, loader: DataLoader[Any], dataset: Cached) -> bool:
        """Whether the copy reads this dataset, and nobody has changed the user's loader since."""
        now = vars(loader)
        same = all(now.get(name, self) is value for name, value in self.attributes.items())
        return self.dataset is dataset and len(now) == len(self.attributes) and same


class CallLoaders:
    """The loaders of one Trainer call: those of the user's functions, with cached datasets.

    Args:
        caches: the open caches of the call.
        getters: the user's function that returns the loaders, for each stage.
        trainer: the Trainer of the call, if there is one; it keeps the position to resume from.
        at_hand: loaders that are known without running a hook, by stage.
    """

    def __init__(
        self,
        caches: CallCaches,
        getters: Mapping[str, Callable[[], Any]],
        trainer: Any = None,
        at_hand: Mapping[str, Any] | None = None,
    ) -> None:
        self._caches = caches
        self._getters = dict(getters)
        self._trainer = trainer
        self._reads = Reads(trainer)
        self._fits = trainer is not None and trainer.state.fn == "fit"
        self._train_to_come = "train" in getters and self._fits
        self._at_hand = dict(at_hand or {})
        # By stage and the id of the user's loader. Only the copies of a hook's last run are here: an older copy would
        # keep its persistent workers alive.
        self._copies: dict[str, dict[int, _Copy]] = {}
        self._single = set[int]()  # the ids of loaders that are not cached because the call reads them once
        self._sets_reload = False
        self._followed: list[Any] = []  # training loaders, whose rolling caches have a fixed length

    def __call__(self, stage: str) -> Any:
        """The loaders of a stage. Collective: every rank asks for the same stages in the same order.

        Raises:
            TypeError: (`strict=True`) a loader cannot be cached; the message says what to do.
            ValueError: (`strict=True`) a dataset is empty.
        """
        loaders = self._getters[stage]()
        share_pools(getattr(leaf, "dataset", None) for leaf in leaves_in(loaders))
        if stage == "train":
            self._followed = list(leaves_in(loaders))
            if follow_pools(self._followed, fix=self._fits):
                self._reload_each_epoch()
        chosen = self.open({**self._at_hand, stage: loaders})
        before = self._copies.get(stage, {})
        self._copies[stage] = {}
        if stage == "train" and self._fits:  # a copy of what is read once has a position, too
            chosen |= {id(leaf) for leaf in leaves_in(loaders) if id(leaf) in self._single and type(leaf) is DataLoader}
        copies = rewrap(loaders, lambda loader: self._copy(stage, loader, before) if id(loader) in chosen else loader)
        if stage == "train" and self._fits:
            ResumePoint.for_trainer(self._trainer).set_positions(copies)
        return copies

    def open(self, loaders: Mapping[str, Any]) -> set[int]:
        """Open the caches of loaders, which share the budget by the size of their datasets. Collective.

        Args:
            loaders: all loaders of some stages, by stage, in any nesting.

        Returns:
            The ids of the loaders that can be cached.
        """
        self._at_hand = {}
        if "train" in loaders:
            self._train_to_come = False
        group = NodeGroup.discover()
        options = self._caches.options
        cacheable = self._cacheable(loaders, group)
        requests: list[CacheRequest] = []
        number = Counter[str]()  # of the datasets of each stage
        for stage, loader in cacheable:
            source = source_of(loader)
            name = f"{options.name or ''}-{stage}{number[stage]}"
            domain = loader_domain(self._trainer, stage, loader)
            is_running = loader.persistent_workers and id(loader) in self._copies.get(stage, {})
            passes = math.inf if options.for_all else self._reads.passes(stage)
            settings = replace(settings_of(loader, stage), is_running=is_running, passes=passes)
            requests.append(options.request(source, settings, name, domain))
            if not isinstance(source, IterableDataset):
                number[stage] += 1
        later = training_bytes(self._trainer)
        self._caches.open(requests, loaders, group, later_bytes=later, train_to_come=self._train_to_come)
        for dataset in cached_in_leaves(list(loaders.values())):
            # The user's own CachedDataset: all ranks of the node share its cache.
            if dataset.counters is None or dataset.group != group:
                dataset.share(group)
        return {id(loader) for _, loader in cacheable}

    def end(self) -> None:
        """End the call: the Trainer has its own settings again, and rolling caches their own length."""
        free_pools(self._followed)
        if self._sets_reload:
            self._trainer.reload_dataloaders_every_n_epochs = 0
        self._sets_reload = False

    def _reload_each_epoch(self) -> None:
        """Make the Trainer ask for its loaders before each epoch, because it reads a loader's length only then."""
        if self._trainer is None or self._trainer.reload_dataloaders_every_n_epochs:
            return
        self._trainer.reload_dataloaders_every_n_epochs = 1
        self._sets_reload = True
        say(
            "a rolling cache grows, so the Trainer asks for its loaders before each epoch: "
            "reload_dataloaders_every_n_epochs=1 was set. RollingCache(epoch_samples=...) gives all epochs one length"
        )

    def _cacheable(self, asked: Mapping[str, Any], group: NodeGroup) -> list[tuple[str, DataLoader[Any]]]:
        """The loaders that can be cached on every rank, each with its stage; a message for each of the others."""
        leaves = [(stage, leaf) for stage in self._getters if stage in asked for leaf in leaves_in(asked[stage])]

        def examine() -> list[tuple[int | str | None, bool]]:
            return [
                (self._finding(stage, leaf), self._is_single(number, leaves, asked))
                for number, (stage, leaf) in enumerate(leaves)
            ]

        by_rank = group.exchange(group.together(examine))
        cacheable: list[tuple[str, DataLoader[Any]]] = []
        single_stages = set[str]()
        self._single.clear()
        for number, (stage, leaf) in enumerate(leaves):
            findings = [of_rank[number] if len(of_rank) == len(leaves) else (None, False) for of_rank in by_rank]
            found = [finding for finding, _ in findings]
            reason = reason_of(found)
            if all(is_single for _, is_single in findings):
                if reason is None:
                    single_stages.add(stage)
                    self._single.add(id(leaf))
            elif reason is not None:
                self._caches.pass_by(stage, title(leaf), reason)
            elif found[0] is not None:
                cacheable.append((stage, leaf))
        single_stages -= {stage for stage, _ in cacheable}
        self._caches.say_single(sorted(single_stages, key=STAGES.index))
        return cacheable

    def _is_single(self, number: int, leaves: Sequence[tuple[str, Any]], asked: Mapping[str, Any]) -> bool:
        """Whether a leaf is not cached because the call reads it once."""
        options = self._caches.options
        stage, leaf = leaves[number]
        if options.for_all or options.dir is not None or self._caches.budget(stage).off or cached_in_leaves(leaf):
            return False
        if isinstance(leaf, DataLoader) and source_of(leaf) in self._caches:  # another stage reads it, too
            return False
        if isinstance(getattr(leaf, "dataset", None), IterableDataset) and not options.streams:
            return False  # it is not cached in any call
        goes_round = stage == "train" or isinstance(asked[stage], CombinedLoader)  # whose mode is its own matter
        return self._reads.is_single(stage, leaf, [*leaves[:number], *leaves[number + 1 :]], goes_round=goes_round)

    def _finding(self, stage: str, leaf: Any) -> int | str | None:
        """The length of a leaf's dataset, the reason why it cannot be cached, or None if there is nothing to cache."""
        options = self._caches.options
        budget = self._caches.budget(stage)
        try:
            return cacheable_length(leaf, budget, streams=options.streams)
        except (TypeError, ValueError) as error:
            if budget.off:
                return None
            if options.strict:
                raise type(error)(f"the {stage} loader cannot be cached, {title(leaf)}: {error}") from error
            return str(error)

    def _copy(self, stage: str, loader: DataLoader[Any], before: Mapping[int, _Copy]) -> DataLoader[Any]:
        """A copy of a loader that reads the cached dataset. The same loader gets the same copy: its workers persist."""
        is_single = id(loader) in self._single
        dataset: Any = loader.dataset if is_single else self._caches.dataset_for(stage, source_of(loader))
        if not is_single and dataset.counters is None:  # its cache could not be opened
            return loader
        copy = self._copies[stage].get(id(loader), before.get(id(loader)))
        if copy is None or not copy.is_current(loader, dataset):
            new = with_dataset(loader, dataset) if is_single else self._new_copy(stage, loader, dataset)
            copy = _Copy(loader, dict(vars(loader)), dataset, new)
        self._copies[stage][id(loader)] = copy
        return copy.copy

    def _new_copy(self, stage: str, loader: DataLoader[Any], dataset: Any) -> DataLoader[Any]:
        """A new copy of a loader that reads a cached dataset, with the loader's own transform after the cache."""
        if isinstance(loader.dataset, TransformedStream):
            return with_dataset(loader, stream_with(dataset, loader.dataset.transform))
        if isinstance(loader.dataset, IterableDataset):
            return with_dataset(loader, dataset)
        sampler = None
        if stage == "train" and self._trainer is not None:
            # One rank that resumes a fit of several ranks keeps their order.
            dealt = ResumePoint.for_trainer(self._trainer).dealt
            sampler = locality_for(self._trainer, dataset, loader.sampler, loader.batch_size, dealt=dealt)
        if isinstance(loader.dataset, TransformedSet):
            dataset = dataset_over(cached_source(dataset).view(loader.dataset.transform))
        if not isinstance(loader, TrainerLoader):  # a TrainerLoader shows the CachedDataset itself
            dataset = StandIn(dataset)
        return with_dataset(loader, dataset, sampler)

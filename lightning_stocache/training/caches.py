"""The caches of one Trainer call: opened together, once, and closed at its end.

All datasets of a call (train and val for `fit`) share the budget, so they must be known before the first of them opens.

A dataset is known by its object. The same object is never opened twice within a call: not for a second `setup`, nor
for reloaded loaders. Another object is another dataset, even if it looks the same: its cache starts empty, and the
caches of those that it replaces are closed.

Caches that were opened by other ranks than those of now (by hand, before the Trainer had started its processes) are
closed and opened again for all. A copy in another process (pickled for ddp_spawn) has the options and nothing open.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.loading.allocation import InFlight
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.together import open_together
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.training.options import CacheOptions

__all__ = ["CallCaches", "Wanted"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wanted:
    """A dataset that a loader of the call will read."""

    source: Dataset[Any]
    stage: str
    loader: InFlight


@dataclass
class _Open:
    """A dataset whose cache is open, the pot that it drew on, and the stages that read it."""

    dataset: CachedDataset
    pot: str
    stages: set[str] = field(default_factory=set)


class CallCaches:
    """The open caches of the current Trainer call.

    Args:
        options: budgets and the rest.
    """

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self._open: dict[int, _Open] = {}
        self._group = NodeGroup()
        self._warned = False

    def __getitem__(self, source: Dataset[Any]) -> CachedDataset:
        """The cached dataset around a source that has been opened."""
        return self._open[id(source)].dataset

    def __contains__(self, source: Dataset[Any]) -> bool:
        return id(source) in self._open

    def open(self, wanted: Iterable[Wanted], group: NodeGroup | None = None) -> None:
        """Open what is wanted and not open yet. Collective: every rank wants the same, in the same order.

        Args:
            wanted: all datasets of the stages that it names; what is open for these stages and not among them is
                closed.
            group: which ranks share memory; by default it is found out.

        Raises:
            CacheMemoryError: the memory cannot be had, and `on_error="raise"`.
            Exception: what a source raises when its first samples are read.
        """
        wanted = list(wanted)
        group = NodeGroup.discover() if group is None else group
        if group != self._group:
            self.close()
            self._group = group
        new: dict[int, Wanted] = {}
        names: dict[int, str] = {}
        number = Counter[str]()
        for one in wanted:
            if one.source not in self:
                new.setdefault(id(one.source), one)  # in several stages: pot and name are those of the first
                names.setdefault(id(one.source), f"{self.options.name}-{one.stage}{number[one.stage]}")
            number[one.stage] += 1
        self._let_go(wanted, new.values())
        options = self.options
        pots = {key: options.pot(one.stage) for key, one in new.items()}
        datasets = {
            key: CachedDataset(
                one.source,
                str(options.budgets[pots[key]]),
                allow_random=options.allow_random,
                backend=options.backend,
                on_error=options.on_error,
                defer=True,
                name=None if options.name is None else names[key],
                fingerprint=options.fingerprint,
                strict=options.strict,
            )
            for key, one in new.items()
        }
        open_together(
            list(datasets.values()),
            {pot: self._left(pot, budget) for pot, budget in options.budgets.items() if pot in pots.values()},
            group,
            list(pots.values()),
            [one.loader for one in new.values()],
        )
        self._open |= {key: _Open(dataset, pots[key]) for key, dataset in datasets.items()}
        for one in wanted:
            self._open[id(one.source)].stages.add(one.stage)

    def close(self) -> None:
        """Close all caches; samples of the same datasets pass through uncached from then on."""
        for one in self._open.values():
            one.dataset.close()
        self._open.clear()

    def end_call(self) -> None:
        """End of a Trainer call: close, unless the caches are to be kept for the next one."""
        if not self.options.keep_cache:
            self.close()
        for one in self._open.values():
            if (counters := one.dataset.counters) is not None:
                one.dataset.baseline = counters.totals(one.dataset.group.rank)

    def _let_go(self, wanted: Collection[Wanted], new: Collection[Wanted]) -> None:
        """Close what the wanted stages do not read any more: a replaced dataset's memory is the new one's."""
        for stage in {one.stage for one in wanted}:
            still = {id(one.source) for one in wanted if one.stage == stage}
            for key, one in list(self._open.items()):
                if stage not in one.stages or key in still:
                    continue
                one.stages.remove(stage)
                if not one.stages:
                    one.dataset.close()
                    del self._open[key]
                if not self._warned and self._group.rank == 0 and any(it.stage == stage for it in new):
                    self._warned = True
                    log.warning(
                        "the %s loader came with a new %s: the cache of the one before is closed, and this one starts "
                        "empty. Make the dataset once, outside of the loader hook (with keep_cache: outside of setup)",
                        stage,
                        type(one.dataset.source).__name__,
                    )

    def _left(self, pot: str, budget: Budget) -> Budget:
        """What a budget in bytes has left beside the caches that are open already."""
        taken = sum(one.dataset.budget_bytes for one in self._open.values() if one.pot == pot)
        if not taken or budget.unit != "bytes":
            return budget
        left = max(int(budget.amount) - taken, 0)
        if not left and self._group.rank == 0:
            log.warning(
                "the caches that are open use all of budget=%r: nothing is left for another dataset", str(budget)
            )
        return Budget.parse(left)

    def __getstate__(self) -> dict[str, Any]:
        # Datasets are known by their id here, which means nothing in another process.
        return self.__dict__ | {"_open": {}, "_group": NodeGroup()}

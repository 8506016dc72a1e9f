"""The caches of one Trainer call: opened together, once, and closed at its end.

The datasets of a call (train and val for `fit`) share the budget. Those that open at once divide it by their size; one
that opens later gets what is left of a budget in bytes, and of the free memory. A val set that opens before the
training set takes at most half.

A dataset is known by its object. The same object is never opened twice within a call, for a second `setup` or for
reloaded loaders, but where a stage that comes later draws what has no slot there: it gets a cache of its own. So does a
later call for which a cache was kept, if that had no room for more than was drawn then; the kept one goes. Another
object that comes in its place within the call goes on in the same cache, if the samples that are compared are equal
(`same_data`); it may be longer, and what is new passes through. Else its cache starts empty, and that of the one
before is closed; when that has happened twice, and nothing was hit, the stage is not cached any more.

Caches that were opened by other ranks than those of now (by hand, before the Trainer had started its processes) are
closed and opened again for all. A copy in another process (pickled for ddp_spawn) has the options and nothing open.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset

from lightning_stocache.cache.counters import Counts
from lightning_stocache.cache.placement import Domain
from lightning_stocache.growing.stream import CachedStream, stream_source
from lightning_stocache.insight.tallies import end_call
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.agreement import drawn_by_any, united
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.same_data import is_continued
from lightning_stocache.training.options import CacheOptions
from lightning_stocache.training.wanted import Wanted

__all__ = ["CallCaches"]

log = logging.getLogger(__name__)

_MOST_FRUITLESS = 2


@dataclass(eq=False)
class _Open:
    """A source whose cache is open, the pot that it drew on, what of it has a slot, and the stages that read it."""

    source: Dataset[Any]
    dataset: CachedDataset | CachedStream
    pot: str
    domain: Domain | None = None
    stages: set[str] = field(default_factory=set)
    kept: bool = False  # from an earlier call, and not asked for in this one

    def serves(self, entry: Wanted) -> bool:
        """Whether what is open is for that loader, too."""
        known = entry.stage in self.stages and not self.kept
        return self.source is entry.source and (known or self.domain is None or self.domain.covers(entry.domain))


class CallCaches:
    """The open caches of the current Trainer call.

    Args:
        options: budgets and the rest.
    """

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self._open: list[_Open] = []
        self._group = NodeGroup()
        self._warned = False
        self._said: set[str] = set()
        self._fruitless = Counter[str]()  # datasets of a stage that were replaced before a sample was hit

    def of(self, stage: str, source: Dataset[Any]) -> Any:
        """The cached dataset, or stream, around one that has been opened for a stage."""
        found = [opened for opened in self._open if opened.source is source]
        return max(found, key=lambda opened: stage in opened.stages).dataset

    def __contains__(self, source: Dataset[Any]) -> bool:
        return any(opened.source is source for opened in self._open)

    def pass_by(self, stage: str, title: str, reason: str) -> None:
        """Say, once and on one rank, that something is not cached."""
        message = f"{stage} loader: {title} passes through uncached: {reason}"
        if message not in self._said and NodeGroup.discover().rank == 0:
            log.warning(message)
        self._said.add(message)

    def open(
        self,
        wanted: Iterable[Wanted],
        group: NodeGroup | None = None,
        *,
        later_bytes: int = 0,
        train_to_come: bool = False,
    ) -> None:
        """Open what is wanted and not open yet. Collective: every rank wants the same, in the same order.

        Args:
            wanted: all datasets and streams of the stages that it names; what is open for these stages and not among
                them is closed.
            group: which ranks share memory; by default it is found out.
            later_bytes: what the training will take, see `model_memory`.
            train_to_come: whether the training set will open later, so that half of its pot is kept for it.

        Raises:
            CacheMemoryError: (`strict`) the memory cannot be had.
            Exception: what a source raises when its first samples are read.
        """
        options = self.options
        group = NodeGroup.discover() if group is None else group
        if group != self._group:
            self.close()
            self._group = group
        wanted = list(wanted)
        domains = drawn_by_any([None if options.is_for_all(entry.stage) else entry.domain for entry in wanted], group)
        wanted = [replace(entry, domain=domain) for entry, domain in zip(wanted, domains, strict=True)]
        self._go_on(wanted, group)
        self._let_go(wanted, train_to_come)
        new, streams = dict[int, CacheRequest](), dict[int, Wanted]()
        options, number, left = self.options, Counter[str](), dict[str, Budget]()
        for entry in wanted:  # what is in several stages has pot and name of the first, and slots for all
            key, stream = id(entry.source), isinstance(entry.source, IterableDataset)
            if self._serving(entry) is None and stream:
                streams.setdefault(key, entry)
            elif self._serving(entry) is None and key not in new:
                name, loader = f"{options.name or ''}-{entry.stage}{number[entry.stage]}", entry.loader
                domain = united([other.domain for other in wanted if other.source is entry.source])
                new[key] = options.request(entry.source, replace(loader, stage=entry.stage), name, domain)
                left[new[key].pot] = self._left(entry.stage, entry.source, train_to_come)
            number[entry.stage] += not stream
        opened = open_caches(
            list(new.values()),
            {pot: left[pot] for pot in options.budgets if pot in left},
            group,
            later_bytes=later_bytes,
            kept_back=self._kept_back(left, train_to_come),
        )
        for cache in opened:
            request, dataset = cache.request, dataset_over(CachedSource(cache))
            self._open.append(_Open(request.source, dataset, request.pot, request.domain))
            cache.tell()
        self._open_streams(streams, group, train_to_come)
        for entry in wanted:
            (serving := cast(_Open, self._serving(entry))).stages.add(entry.stage)
            serving.kept = False

    def _serving(self, entry: Wanted) -> _Open | None:
        """What is open for a loader: for its stage if there is such a one, else the first that will do."""
        serving = [opened for opened in self._open if opened.serves(entry)]
        return max(serving, key=lambda opened: entry.stage in opened.stages, default=None)

    def state(self) -> list[dict[str, Any]]:
        """What is held on this node now, one entry for each dataset whose cache is open, as plain values.

        Its keys: `dataset` (class), `stages`, `slots`, `filled`, `memory_bytes`, `disk_bytes`, `budget_bytes`, and of
        what is no stream `samples`, `name` and `dir` (None where it has none).
        """
        return [
            {"dataset": type(opened.dataset.source).__name__, "stages": sorted(opened.stages)} | _held(opened.dataset)
            for opened in self._open
        ]

    def _open_streams(self, streams: Mapping[int, Wanted], group: NodeGroup, train_to_come: bool) -> None:
        """Open the memory of streams, which divide what the datasets leave of their pot evenly."""
        options = self.options
        for number, entry in enumerate(streams.values()):
            pot, waiting = options.pot(entry.stage), len(streams) - number
            budget = self._left(entry.stage, entry.source, train_to_come)
            budget = Budget.parse(int(budget.amount) // waiting) if budget.unit == "bytes" else budget
            free = max(FreeMemory.measure(memory_directory()).bytes, 0)
            back = self._kept_back([pot], train_to_come)
            back += (free - min(back, free)) * (waiting - 1) // waiting
            parts = {"allow_random": options.allow_random, "shuffle": entry.stage == "train"}
            stream = CachedStream(entry.source, budget, defer=True, **parts)  # type: ignore[arg-type]
            stream_source(stream).open(budget, group, strict=options.strict, kept_back=back)
            self._open.append(_Open(entry.source, stream, pot))

    def close(self) -> None:
        """Close all caches, kept ones too; samples of the same datasets pass through uncached from then on."""
        for opened in self._open:
            opened.dataset.close()
        self._open.clear()

    def end_call(self) -> None:
        """End of a Trainer call: close, unless the caches are to be kept for the next one."""
        if not self.options.keep_cache:
            self.close()
        for opened in self._open:
            opened.kept = True
        end_call(opened.dataset for opened in self._open)

    def _go_on(self, wanted: Collection[Wanted], group: NodeGroup) -> None:
        """Have an open cache serve the object that comes in place of its dataset, if it has the same samples."""
        for entry in wanted:
            stages = [opened for opened in self._open if entry.stage in opened.stages]
            if entry.source in self or len(stages) != 1 or stages[0].kept or entry.domain is not None:
                continue
            [opened] = stages
            if not isinstance(opened.dataset, CachedDataset) or any(other.source is opened.source for other in wanted):
                continue
            before = cached_source(opened.dataset)
            if all(group.exchange(is_continued(before.opened, entry.source))):
                request = replace(before.opened.request, source=entry.source)
                cache = replace(before.opened, request=request, source=entry.source)
                opened.source, opened.dataset = entry.source, dataset_over(CachedSource(cache))

    def _let_go(self, wanted: Collection[Wanted], train_to_come: bool) -> None:
        """Close what no loader of its stages reads any more: its memory is that of what comes in its place."""
        new = [entry for entry in wanted if self._serving(entry) is None]
        stages = {entry.stage for entry in wanted}
        if new and train_to_come and not self.options.keep_cache:
            stages.add("train")  # what is open for it was opened by hand, before the call
        for before in list(self._open):
            for stage in sorted(before.stages & stages):  # tells all ranks in one order
                if any(entry.stage == stage and before.serves(entry) for entry in wanted):
                    continue
                before.stages.remove(stage)
                if any(entry.stage == stage and entry.source is not before.source for entry in new):
                    self._tell_of_another(stage, before)
            if not before.stages:
                before.dataset.close()
                self._open.remove(before)

    def _tell_of_another(self, stage: str, before: _Open) -> None:
        """Warn of a dataset that was replaced; cache its stage no more when the second goes of which nothing was hit.

        Collective.
        """
        counters = before.dataset.counters
        counts = Counts() if counters is None else counters.totals()
        hit = any(self._group.exchange(counts.hits > counts.setup_fills))  # those are hit in the first epoch already
        self._fruitless[stage] += not hit
        kind, ended = type(before.dataset.source).__name__, not hit and self._fruitless[stage] == _MOST_FRUITLESS
        if ended:
            self.options = replace(self.options, stage_budgets={**(self.options.stage_budgets or {}), stage: 0})
        if self._group.rank == 0 and not self._warned:
            log.warning(
                "the %s loader came with a new %s: the cache of the one before is closed, and this one starts empty.\n"
                "Make the dataset once, outside of the loader hook (with keep_cache: outside of setup)",
                stage,
                kind,
            )
        if self._group.rank == 0 and ended:
            log.warning(
                "the %s loader is not cached any more: nothing of its last two %s was hit before another one came.\n"
                "Make the dataset once; for one that grows there is RollingCache",
                stage,
                kind,
            )
        self._warned = True

    def _left(self, stage: str, source: Dataset[Any], train_to_come: bool) -> Budget:
        """What a new dataset may take of its pot: of bytes, what the open caches leave, or half if train is to come."""
        pot = self.options.pot(stage)
        budget = self.options.budgets[pot]
        if budget.unit != "bytes" or budget.off:
            return budget
        left = max(
            int(budget.amount) - sum(opened.dataset.budget_bytes for opened in self._open if opened.pot == pot), 0
        )
        if train_to_come and pot == self.options.pot("train"):
            left = min(left, int(budget.amount) // 2)
        if not left:
            advice = f"Keep a share for it: stage_budgets={{{stage!r}: ...}}"
            reason = f"the caches that are open use all of budget={str(budget)!r}. {advice}"
            self.pass_by(stage, type(source).__name__, reason)
        return Budget.parse(left)

    def _kept_back(self, pots: Collection[str], train_to_come: bool) -> int:
        """Free memory that new datasets may not take: what the open caches have yet to fill, and half for train."""
        caches = [(opened.dataset.budget_bytes, opened.dataset.cache) for opened in self._open]
        promised = sum(max(granted - cache.memory_bytes, 0) for granted, cache in caches if cache is not None)
        if self.options.dir is not None:  # what was granted is room on a disk
            opened = (entry.dataset.cache for entry in self._open if isinstance(entry.dataset, CachedDataset))
            promised = sum(cache.promised_bytes for cache in opened if cache is not None)
        pot = self.options.pot("train")
        if not train_to_come or pot not in pots or self.options.budgets[pot].unit == "bytes":
            return promised
        return promised + max(FreeMemory.measure(memory_directory()).bytes - promised, 0) // 2

    def __getstate__(self) -> dict[str, Any]:
        # Datasets are known by their id here, which means nothing in another process.
        return self.__dict__ | {"_open": [], "_group": NodeGroup()}


def _held(dataset: CachedDataset | CachedStream) -> dict[str, Any]:
    if isinstance(dataset, CachedDataset):
        return cached_source(dataset).opened.state()
    cache, budget = dataset.cache, dataset.budget_bytes
    held = (0, 0, 0) if cache is None else (len(cache), cache.filled, cache.memory_bytes)
    return dict(zip(("slots", "filled", "memory_bytes"), held, strict=True)) | {"disk_bytes": 0, "budget_bytes": budget}

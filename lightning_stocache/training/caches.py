"""The caches of one Trainer call: opened together, once, and closed at the end of the call.

The datasets of a call share the budget as they become known (`call_loaders`). A dataset is recognised by its object,
and has one cache for the call; a later stage that draws indices without a slot gets a cache of its own. When loaders
are made again, three things may have happened to their dataset:

- A hook has returned another object. If its state and the compared samples are equal (`same_data`), it uses the cache
  of the old one. Else the old cache is closed, and a new one starts empty. After the second time without a hit the
  stage is not cached any more.
- It has grown, in place or as another object. A larger cache opens, and takes over the samples of the smaller one; both
  take memory meanwhile. New samples pass through, with one warning, if not all samples have room; on several nodes;
  with store="auto"; and if the cache has a name, a directory or a domain.
- It has changed, and passed through since then. A new cache opens.

The last two wait until nothing reads the old cache (`_Open.is_being_read`).

Caches that were opened for other ranks (by hand, before the Trainer started its processes) are closed, and opened again
for all ranks. A copy in another process (pickled for ddp_spawn) has the options and no open caches.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

from torch.utils.data import Dataset, IterableDataset

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.counters import Counts
from lightning_stocache.growing.stream import CachedStream, stream_for, stream_source
from lightning_stocache.insight.tallies import coverage
from lightning_stocache.loading.dataset import CachedDataset, cached_source, dataset_over
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.open import drawn_by_any, open_caches, united
from lightning_stocache.setup.options import CacheOptions
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.setup.same_data import is_continued, take_over
from lightning_stocache.training.lightning_internals import say

__all__ = ["CallCaches"]

log = logging.getLogger(__name__)

_MOST_FRUITLESS = 2
_OFF = Budget.parse(0)


@dataclass(eq=False)
class _Open:
    """An open cache: the request that it was opened for, the dataset around it, and the stages that read it."""

    request: CacheRequest
    dataset: CachedDataset | CachedStream
    stages: set[str] = field(default_factory=set)
    idle: bool = False  # kept from an earlier call, and not read in this call
    is_largest: bool = False  # a larger cache could not take its place

    @property
    def source(self) -> Any:
        """The user's dataset or stream."""
        return self.dataset.source

    def serves(self, request: CacheRequest) -> bool:
        """Whether this cache can serve the loader of a request, too."""
        if self.source is not request.source:
            return False
        domain = self.request.domain
        return _stage(request) in self.stages or domain is None or domain.covers(request.domain)

    @property
    def codec(self) -> Codec | None:
        """The codec, if whole samples are cached and the dataset's attributes have not changed; else None."""
        store = self.dataset.cache
        if store is None or not isinstance(self.dataset, CachedDataset):
            return None
        cached = cached_source(self.dataset)
        has_changed = cached.changes.source_has_changed or cached.changes.witness.look() is not None
        return store.codec if cached.opened.source is self.source and not has_changed else None

    def is_being_read(self, requests: Iterable[CacheRequest], stages: Collection[str]) -> bool:
        """Whether a loader goes on with this cache while the loaders of these requests and stages are made.

        Training reads it to the end of the epoch. Persistent workers read it as long as they live: new workers would
        draw a second base seed.
        """
        is_training = "train" in self.stages and "train" not in stages and not self.idle
        return is_training or any(request.reader is not None and request.reader.is_running for request in requests)

    def has_changed(self, requests: Iterable[CacheRequest], stages: Collection[str]) -> bool:
        """Whether the dataset has changed, and its loaders in these requests can begin with a new cache."""
        served = [request for request in requests if self.serves(request)]
        if not served or isinstance(self.dataset, CachedStream) or self.is_being_read(served, stages):
            return False
        return cached_source(self.dataset).changes.source_has_changed

    def has_grown(self, requests: Iterable[CacheRequest], stages: Collection[str]) -> bool:
        """Whether the dataset has grown, and a larger cache may take the place of this one."""
        store = self.dataset.cache
        if self.is_largest or store is None or isinstance(self.dataset, CachedStream):
            return False
        request = self.request
        if request.name is not None or request.dir is not None or request.store == "auto":
            return False
        served = [other for other in requests if self.serves(other)]
        if any(each.domain is not None for each in (request, *served)):
            return False
        return any(other.length > store.length for other in served) and not self.is_being_read(served, stages)

    def replaced_by(self, larger: _Open, group: NodeGroup) -> _Open:
        """The larger cache with the samples of this one; this one, if not all samples have room there. Collective."""

        def copy() -> bool:
            cached = cached_source(cast(CachedDataset, self.dataset))
            before = cached.opened
            after = cached_source(cast(CachedDataset, larger.dataset)).opened
            if before.counters is not None and after.counters is not None:
                after.counters.take_matters(before.counters)
            return take_over(after, before, cached.changes.witness.machinery)

        if not group.lead(copy):
            larger.dataset.close()
            self.is_largest = True
            return self
        self.dataset.close()
        larger.stages |= self.stages
        return larger

    def state(self) -> dict[str, Any]:
        """The content of this cache on this node, as plain values."""
        cache = self.dataset.cache
        state: dict[str, Any] = {
            "dataset": type(self.source).__name__,
            "stages": sorted(self.stages),
            "slots": 0 if cache is None else len(cache),
            "filled": 0 if cache is None else cache.filled,
            "memory_bytes": 0 if cache is None else cache.memory_bytes,
            "disk_bytes": 0 if cache is None else cache.disk_bytes,
            "budget_bytes": self.dataset.budget_bytes,
        }
        if isinstance(self.dataset, CachedDataset):
            request = cached_source(self.dataset).opened.request
            state |= {"samples": request.samples, "name": request.name, "dir": request.dir}
        return state


class CallCaches:
    """The open caches of the current Trainer call.

    Args:
        options: the options of all caches.
    """

    def __init__(self, options: CacheOptions) -> None:
        self.options = options
        self.verbose = True  # whether each cache that opens is described in a line
        self._open: list[_Open] = []
        self._group = NodeGroup()
        self._train_to_come = False
        self._told = set[str]()  # warnings and lines that were given once
        self._said_single = set[str]()  # stages
        self._fruitless = Counter[str]()  # datasets of a stage that were replaced before a sample was hit

    def dataset_for(self, stage: str, source: Dataset[Any]) -> Any:
        """The cached dataset, or stream, around a source that is open for a stage."""
        found = [opened for opened in self._open if opened.source is source]
        return max(found, key=lambda opened: stage in opened.stages).dataset

    def datasets_of(self, stage: str) -> list[CachedDataset]:
        """The cached datasets of a stage, without streams."""
        among = [opened.dataset for opened in self._open if stage in opened.stages]
        return [dataset for dataset in among if isinstance(dataset, CachedDataset)]

    @property
    def has_slots(self) -> bool:
        """Whether a sample has a slot, on any node."""
        return any(coverage([opened.dataset]) > 0 for opened in self._open)

    @property
    def datasets(self) -> list[Any]:
        """The cached datasets and streams that are open."""
        return [opened.dataset for opened in self._open]

    def __contains__(self, source: Dataset[Any]) -> bool:
        return any(opened.source is source for opened in self._open)

    def budget(self, stage: str) -> Budget:
        """The budget of a stage: 0 if its datasets were replaced too often."""
        return _OFF if self._is_given_up(stage) else self.options.budgets[self.options.pot(stage)]

    def pass_by(self, stage: str, title: str, reason: str) -> None:
        """Warn that a loader is not cached."""
        self._warn_once(f"{stage} loader: {title} passes through uncached: {reason}")

    def say_single(self, stages: Sequence[str]) -> None:
        """Print once that the datasets of these stages are not cached because the call reads them once."""
        new = [stage for stage in stages if stage not in self._said_single]
        self._said_single.update(new)
        text = (
            f"{' and '.join(new)}: read once in this call, so not cached. With keep_cache=True, a name or a dir the "
            "cache is there for the next call"
        )
        if new:
            say(text)

    def open(
        self,
        requests: Iterable[CacheRequest],
        stages: Iterable[str],
        group: NodeGroup,
        *,
        later_bytes: int = 0,
        train_to_come: bool = False,
    ) -> None:
        """Open the caches that are not open yet. Collective: every rank asks for the same, in the same order.

        Args:
            requests: one for each dataset or stream that can be cached in the loaders of these stages.
            stages: the stages whose loaders are known; their other caches are closed.
            group: which ranks share memory.
            later_bytes: memory that the training of each rank will take later.
            train_to_come: whether the training set opens later; then half of its pot is reserved for it.

        Raises:
            CacheMemoryError: (`strict`) the memory cannot be had.
            Exception: what a source raises when its first samples are read.
        """
        if group != self._group:
            self.close()
            self._group = group
        self._train_to_come = train_to_come and not self._is_given_up("train")
        requests = list(requests)
        stages = set(stages)
        known = [None if self.options.for_all else request.domain for request in requests]
        drawn = drawn_by_any(known, group)
        requests = [replace(request, domain=domain) for request, domain in zip(requests, drawn, strict=True)]
        self._replace_sources(requests)
        grown = self._close_outdated(requests, stages)
        self._close_unread(requests, stages)
        new = self._unserved(requests)
        self._open_datasets([each for each in new if not isinstance(each.source, IterableDataset)], grown, later_bytes)
        self._open_streams([each for each in new if isinstance(each.source, IterableDataset)])
        for request in requests:
            serving = self._serving(request)
            assert serving is not None
            serving.stages.add(_stage(request))
            serving.idle = False
            store = serving.dataset.cache
            if isinstance(serving.dataset, CachedDataset) and store is not None and request.length > store.length:
                reason = "the dataset has grown since its cache opened. For data that grows there is RollingCache"
                self.pass_by(_stage(request), f"the new part of {type(request.source).__name__}", reason)

    def state(self) -> list[dict[str, Any]]:
        """The open caches on this node, one entry for each dataset, as plain values.

        The keys of an entry: `dataset` (class), `stages`, `slots`, `filled`, `memory_bytes`, `disk_bytes` and
        `budget_bytes`. An entry of a map-style dataset also has `samples`, `name` and `dir` (None without a name or a
        directory).
        """
        return [opened.state() for opened in self._open]

    def close(self) -> None:
        """Close all caches, also kept ones. From then on samples of the same datasets pass through uncached."""
        for opened in self._open:
            opened.dataset.close()
        self._open.clear()

    def end_call(self) -> None:
        """End a Trainer call: close the caches, or keep them for the next call."""
        if not self.options.keep_cache:
            self.close()
        for opened in self._open:
            opened.idle = True

    def _serving(self, request: CacheRequest) -> _Open | None:
        """The open cache for a loader; of several, the cache of its stage."""
        serving = [opened for opened in self._open if opened.serves(request)]
        return max(serving, key=lambda opened: _stage(request) in opened.stages, default=None)

    def _unserved(self, requests: Sequence[CacheRequest]) -> list[CacheRequest]:
        """The requests for which a cache opens: of several for one source the first, with slots for all."""
        new: dict[int, CacheRequest] = {}
        for request in requests:
            if self._serving(request) is None and id(request.source) not in new:
                domain = united([other.domain for other in requests if other.source is request.source])
                stage = _stage(request)
                if self._is_given_up(stage):  # since the request was made
                    request = replace(request, pot=stage, budget=_OFF)
                new[id(request.source)] = replace(request, domain=domain)
        return list(new.values())

    def _open_datasets(self, requests: Sequence[CacheRequest], grown: dict[int, _Open], later_bytes: int) -> None:
        """Open caches, which divide what is left of their pots. Those of grown datasets take over stored samples."""
        left = {request.pot: self._left(request) for request in requests}
        # With the codec set-up need not examine a grown source.
        codecs = {source: smaller.codec for source, smaller in grown.items()}
        for cache in open_caches(
            [replace(request, spec=codecs.get(id(request.source))) for request in requests],
            {pot: left[pot] for pot in (*self.options.budgets, *left) if pot in left},
            self._group,
            later_bytes=later_bytes,
            kept_back=self._kept_back(left),
        ):
            request = cache.request
            opened = _Open(request, dataset_over(CachedSource(cache)))
            smaller = grown.get(id(request.source))
            if smaller is not None:
                opened = smaller.replaced_by(opened, self._group)
            self._open.append(opened)
            if opened is not smaller and self.verbose:
                cache.tell()

    def _replace_sources(self, requests: Sequence[CacheRequest]) -> None:
        """Let an open cache serve the object that replaces its dataset, if both have the same samples."""
        asked = {id(request.source) for request in requests}
        stages: dict[str, dict[int, CacheRequest]] = {}
        for request in requests:
            stages.setdefault(_stage(request), {})[id(request.source)] = request
        pairs: list[tuple[_Open, CacheRequest]] = []
        for stage, asked_for in stages.items():
            caches = [opened for opened in self._open if stage in opened.stages]
            if len(caches) == len(asked_for):  # the loaders of a stage come in one order
                pairs += zip(caches, asked_for.values(), strict=True)
        for opened, new in pairs:
            if new.source in self or new.domain is not None:
                continue
            if opened.idle or id(opened.source) in asked or not isinstance(opened.dataset, CachedDataset):
                continue
            cached = cached_source(opened.dataset)
            before = cached.opened
            if all(self._group.exchange(is_continued(before, new.source, cached.changes.witness.machinery))):
                cache = replace(before, request=replace(before.request, source=new.source), source=new.source)
                opened.request = cache.request  # the old object goes
                opened.dataset = dataset_over(CachedSource(cache))

    def _close_outdated(self, requests: Sequence[CacheRequest], stages: Collection[str]) -> dict[int, _Open]:
        """Close the caches of datasets that have changed, so that new ones open. Collective.

        Returns:
            The caches of datasets that have grown, by the id of the dataset: larger ones take their place.
        """
        is_one_node = len(self._group.nodes) == 1
        here = [
            (opened.has_changed(requests, stages), is_one_node and opened.has_grown(requests, stages))
            for opened in self._open
        ]
        grown: dict[int, _Open] = {}
        for opened, by_rank in zip(list(self._open), zip(*self._group.exchange(here), strict=True), strict=True):
            if any(has_changed for has_changed, _ in by_rank):
                for stage in sorted(opened.stages & set(stages)):
                    self._count_fruitless(stage, opened, "has changed")
                opened.dataset.close()
                self._open.remove(opened)
            elif all(has_grown for _, has_grown in by_rank):
                grown[id(opened.source)] = opened
                self._open.remove(opened)
        return grown

    def _close_unread(self, requests: Sequence[CacheRequest], stages: set[str]) -> None:
        """Close caches that no loader of these stages reads any more. New caches get their memory."""
        new = [request for request in requests if self._serving(request) is None]
        if new and self._train_to_come and not self.options.keep_cache:
            stages.add("train")  # its open cache was opened by hand, before the call
        for before in list(self._open):
            for stage in sorted(before.stages & stages):  # in one order on all ranks
                if any(_stage(request) == stage and before.serves(request) for request in requests):
                    continue
                before.stages.remove(stage)
                if any(_stage(request) == stage and request.source is not before.source for request in new):
                    self._warn_of_another(stage, before)
            if not before.stages:
                before.dataset.close()
                self._open.remove(before)

    def _warn_of_another(self, stage: str, before: _Open) -> None:
        """Warn of a replaced dataset; after the second one without a hit, stop caching its stage. Collective."""
        if before.dataset.cache is not None:
            self._warn_once(
                f"the {stage} loader came with a new {type(before.source).__name__}: the cache of the old one is "
                "closed, and a new one starts empty.\nMake the dataset once, outside of the loader hook (with "
                "keep_cache: outside of setup)"
            )
        self._count_fruitless(stage, before, "was replaced")

    def _count_fruitless(self, stage: str, before: _Open, what: str) -> None:
        """Note that a cache ends early; after the second one without a hit, stop caching its stage. Collective."""
        counters = before.dataset.counters
        counts = Counts() if counters is None else counters.totals()
        hit = any(self._group.exchange(counts.hits > counts.setup_fills))  # epoch one hits what set-up stored
        self._fruitless[stage] += not hit
        if not hit and self._fruitless[stage] == _MOST_FRUITLESS:
            advice = "Make the dataset once" if what == "was replaced" else "Change it after the cache, in a transform"
            self._warn_once(
                f"the {stage} loader is not cached any more: its {type(before.source).__name__} {what} twice before a "
                f"sample was hit.\n{advice}; for data that grows there is RollingCache"
            )

    def _is_given_up(self, stage: str) -> bool:
        """Whether a stage is not cached any more."""
        return self._fruitless[stage] >= _MOST_FRUITLESS

    def _warn_once(self, message: str) -> None:
        """Give a warning, once and on one rank."""
        if message not in self._told and NodeGroup.discover().rank == 0:
            log.warning(message)
        self._told.add(message)

    def _open_streams(self, requests: Sequence[CacheRequest]) -> None:
        """Open the memory of streams, which divide the rest of their pot evenly."""
        for number, request in enumerate(requests):
            waiting = len(requests) - number
            budget = self._left(request)
            if budget.unit == "bytes":
                budget = budget.limited(int(budget.amount) // waiting)
            back = self._kept_back([request.pot])
            back += max(_free_bytes() - back, 0) * (waiting - 1) // waiting
            stream = stream_for(
                request.source,
                budget,  # type: ignore[arg-type]
                freeze_random=request.freeze_random,
                strict=request.strict,
                defer=True,
                shuffle=_stage(request) == "train",
            )
            stream_source(stream).open(self._group, back)
            self._open.append(_Open(request, stream))

    def _left(self, request: CacheRequest) -> Budget:
        """The part of its pot that a new dataset may take: what open caches leave, at most half before train."""
        budget = request.budget
        if budget.unit != "bytes" or budget.off:
            return budget
        used = sum(opened.dataset.budget_bytes for opened in self._open if opened.request.pot == request.pot)
        left = max(int(budget.amount) - used, 0)
        if self._train_to_come and request.pot == self.options.pot("train"):
            left = min(left, int(budget.amount) // 2)
        if not left:
            stage = _stage(request)
            advice = f"Keep a share for it: budget={{{stage!r}: ...}}"
            reason = f"the caches that are open use all of budget={budget.written!r}. {advice}"
            self.pass_by(stage, type(request.source).__name__, reason)
        return budget.limited(left)

    def _kept_back(self, pots: Collection[str]) -> int:
        """Free bytes that new datasets may not take: what open caches have yet to fill, and half before train."""
        caches = [opened.dataset.cache for opened in self._open]
        promised = sum(cache.promised_bytes for cache in caches if cache is not None)
        pot = self.options.pot("train")
        if not self._train_to_come or pot not in pots or self.options.budgets[pot].unit == "bytes":
            return promised
        return promised + max(_free_bytes() - promised, 0) // 2

    def __getstate__(self) -> dict[str, Any]:
        # Datasets are recognised by their objects, which another process does not have.
        return self.__dict__ | {"_open": [], "_group": NodeGroup()}


def _stage(request: CacheRequest) -> str:
    """The stage of the loader that will read the source."""
    assert request.reader is not None
    return request.reader.stage


def _free_bytes() -> int:
    return max(FreeMemory.measure(memory_directory()).bytes, 0)

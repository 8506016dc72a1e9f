"""A dataset that remembers.

`CachedDataset` stands between a loader and the user's dataset, the source. It answers an index from the index's slot if
that is ready (a hit), loads the sample from the source and stores it if not (a miss), and only loads it if the index
has no slot (a bypass). What is random comes after: first the tail that was cut off the source, then `transform`. So the
samples are those of the source, bit for bit and in the same order of random draws, cached or not.

It is a plain map-style dataset: any DataLoader, start method, Subset, random_split and ConcatDataset will do. Each
process that it reaches by fork or by pickle works on the same memory.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, SupportsIndex

import torch
from torch.utils.data import Dataset, IterableDataset

from lightning_stocache.cache.cache import SharedCache
from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import NO_SLOT, Ring
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.loading.allocation import BackendChoice, InFlight, Request
from lightning_stocache.loading.opening import CacheMemoryError, Opened, open_caches
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.group import NodeGroup

__all__ = ["CachedDataset", "OnError", "open_together"]

log = logging.getLogger(__name__)

OnError = Literal["raise", "disable"]


class CachedDataset(Dataset[Any]):
    """A map-style dataset whose samples are kept in memory that all processes of the node share.

    Opening reads a few samples (their shape, and whether they are random) and takes no memory for slots until they are
    filled.

    Args:
        source: the dataset to cache: its deterministic, expensive part (read, decode, resize). A torchvision
            `transform` inside it is split at its first random step by itself.
        budget: memory per node: "8GiB", "500MB", "60%" (of the dataset's cached size), "60% of free" (memory), "auto"
            (the whole dataset), a whole number of bytes, or 0 (off). What does not fit is loaded every time.
        transform: what is done to each sample after the cache, on the CPU; it gets what `source[index]` returns.
        spec: what a sample looks like, as `SampleSpec.infer(sample)` says; given, the source is not read at set-up.
        allow_random: cache a random source as it is, with its first draw frozen.
        backend: where the memory lies: "tmpfile" (/dev/shm), "memfd", "file", or "auto".
        on_error: what happens when the memory cannot be had: "raise", or "disable" (go on uncached, with a warning).
        defer: open nothing yet; samples pass through until `share` is called.

    Raises:
        TypeError: the source is iterable-style, or its samples hold something of no fixed size.
        ValueError: the source is empty, or the budget cannot be read.

    Example:
        >>> squares = [torch.tensor([i, i * i]) for i in range(10)]
        >>> dataset = CachedDataset(squares, budget="50%")
        >>> [int(dataset[i][1]) for i in range(10)] == [int(dataset[i][1]) for i in range(10)]
        True
        >>> dataset.counters.totals().hits
        5
        >>> dataset.close()
    """

    def __init__(
        self,
        source: Dataset[Any],
        budget: int | float | str = "auto",
        *,
        transform: Callable[[Any], Any] | None = None,
        spec: SampleSpec | None = None,
        allow_random: bool = False,
        backend: BackendChoice = "auto",
        on_error: OnError = "raise",
        defer: bool = False,
    ) -> None:
        _check_source(source)
        self.source = source
        self.budget = Budget.parse(budget)
        self.transform = transform
        self.spec = spec
        self.allow_random = allow_random
        self.backend = backend
        self.on_error = on_error
        self.baseline = Counts()  # what had been counted when the current Trainer call began
        self._opened = Opened(source)
        if not defer:
            self.share(NodeGroup())

    def share(self, group: NodeGroup | None = None) -> None:
        """Swap the cache for one that all ranks of the node have in common. Collective: every rank calls it.

        What was cached before is given up, so call it before the first epoch. The leader of the node reads a few
        samples and grants the budget; the other ranks read nothing.

        Args:
            group: which ranks share memory; by default it is found out from the running process group.
        """
        group = NodeGroup.discover() if group is None else group
        open_together([self], {"": self.budget}, group)

    @property
    def cache(self) -> SharedCache | None:
        """The cache, or None while samples pass through."""
        cache = self._opened.cache
        return None if cache is None or cache.closed else cache

    @property
    def counters(self) -> Counters | None:
        """What has been served and filled, by all processes of the node; None before the first opening."""
        return self._opened.counters

    @property
    def ring(self) -> Ring | None:
        """Which node holds which indices; None before the first opening."""
        return self._opened.ring

    @property
    def group(self) -> NodeGroup:
        """The ranks that share the cache."""
        return self._opened.group

    @property
    def budget_bytes(self) -> int:
        """Memory that was granted on this node."""
        return self._opened.budget_bytes

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through uncached."""
        self._opened.close()
        self._opened = Opened(self.source)

    def describe(self) -> str:
        """One line on what is cached here, for people."""
        cache = self.cache
        name, samples = type(self.source).__name__, len(self)
        if cache is None:
            return f"{name}: {samples:,} samples, not cached"
        return (
            f"{name}: {len(cache):,} of {samples:,} samples have a slot, {cache.filled:,} are filled, "
            f"{format_bytes(cache.memory_bytes)} in use of {format_bytes(self.budget_bytes)}"
        )

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]

    def __getitem__(self, index: SupportsIndex) -> Any:
        """The sample of an index. What is no index to a cache (a list of them, a slice) goes to the source itself."""
        try:
            position = self._position(index)
        except TypeError:
            self._count(bypasses=1)
            return self._transformed(self.source[index])
        return self._finish(self._serve(position))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[Any]:
        """The samples of a batch: all hits are copied out by one gather per field."""
        return [self._finish(sample) for sample in self._serve_many([self._position(index) for index in indices])]

    def __getattr__(self, name: str) -> Any:
        # Names of the user's dataset (`classes`, `targets`) stay reachable; never dunder names: a forwarded
        # __getitems__ would be found by the loader and go past the cache.
        if name.startswith("_") or "source" not in self.__dict__:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)

    def _position(self, index: SupportsIndex) -> int:
        position = operator.index(index)
        return position + len(self) if position < 0 else position

    def _finish(self, sample: Any) -> Any:
        if self._opened.tail is not None:
            sample = self._opened.tail(sample)
        return self._transformed(sample)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    def _serve(self, index: int) -> Any:
        cache = self.cache
        if cache is not None and index < cache.arc.size and (sample := cache.get(index)) is not None:
            self._count(hits=1, bytes_from_cache=cache.spec.nbytes)
            return sample
        start = time.perf_counter_ns()
        sample = self._opened.source[index]
        return self._keep(index, sample, time.perf_counter_ns() - start)

    def _serve_many(self, indices: list[int]) -> list[Any]:
        cache = self.cache
        if cache is None or len(indices) == 1 or max(indices) >= cache.arc.size:
            return self._load_many(indices)
        slots = cache.ready_slots(torch.tensor(indices))
        hits = (slots != NO_SLOT).nonzero().flatten()
        samples: list[Any] = [None] * len(indices)
        if len(hits):
            found = cache.spec.split(cache.gather(slots[hits]), len(hits))
            for place, sample in zip(hits.tolist(), found, strict=True):
                samples[place] = sample
            self._count(hits=len(hits), bytes_from_cache=len(hits) * cache.spec.nbytes)
        if len(hits) < len(indices):
            others = (slots == NO_SLOT).nonzero().flatten().tolist()
            for place, sample in zip(others, self._load_many([indices[place] for place in others]), strict=True):
                samples[place] = sample
        return samples

    def _load_many(self, indices: list[int]) -> list[Any]:
        """Serve what was not ready a moment ago: in one call, if the source can."""
        fetch = getattr(self._opened.source, "__getitems__", None)
        if fetch is None:
            return [self._serve(index) for index in indices]  # looks again: the batch may hold an index twice
        start = time.perf_counter_ns()
        samples = fetch(indices)
        each = (time.perf_counter_ns() - start) // max(len(indices), 1)
        return [self._keep(index, sample, each) for index, sample in zip(indices, samples, strict=True)]

    def _keep(self, index: int, sample: Any, source_ns: int) -> Any:
        """Store a sample that was loaded, if it has a slot, and count it."""
        cache = self.cache
        if cache is None or index >= cache.arc.size:
            self._count(bypasses=1, source_ns=source_ns)
            return sample
        filled = cache.fill(index, sample)
        has_slot = cache.arc.slot(index) != NO_SLOT
        self._count(
            misses=int(has_slot),
            bypasses=int(not has_slot),
            fills=int(filled),
            bytes_from_source=cache.spec.nbytes,
            source_ns=source_ns,
        )
        return sample

    def _count(self, **counts: int) -> None:
        if self._opened.counters is not None:
            self._opened.counters.add(**counts)


def open_together(
    datasets: Sequence[CachedDataset],
    budgets: Mapping[str, Budget],
    group: NodeGroup,
    pots: Sequence[str] | None = None,
    in_flight: Sequence[InFlight | None] | None = None,
) -> None:
    """Open the caches of several datasets at once, which share budgets. Collective over the group.

    Args:
        datasets: the same ones in the same order on every rank.
        budgets: the budget of every pot.
        group: which ranks share memory.
        pots: the pot of each dataset; by default the one pot that there is.
        in_flight: the loader of each dataset, whose batches need memory too.
    """
    if not datasets:
        return
    only = next(iter(budgets))
    requests = [
        Request(one.source, pot, one.spec, one.allow_random, loader)
        for one, pot, loader in zip(
            datasets, pots or [only] * len(datasets), in_flight or [None] * len(datasets), strict=True
        )
    ]
    for one in datasets:
        one.close()
    try:
        opened = open_caches(requests, budgets, group, datasets[0].backend)
    except CacheMemoryError as error:
        if datasets[0].on_error == "raise":
            raise
        log.warning("the cache is off, all samples are loaded from their source: %s", error)
        return
    for one, its in zip(datasets, opened, strict=True):
        one._opened, one.baseline = its, Counts()


def _check_source(source: Any) -> None:
    if isinstance(source, CachedDataset):
        raise TypeError("source must be the dataset itself, got a CachedDataset: it is cached already")
    if isinstance(source, IterableDataset) or not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        raise TypeError(
            f"source must be a map-style dataset with __getitem__ and __len__, got {type(source).__name__}: without an "
            "index there is nothing to cache by"
        )
    if len(source) == 0:
        raise ValueError(f"source must have at least one sample, got an empty {type(source).__name__}")

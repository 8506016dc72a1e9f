"""A source with its cache open in this process: what it serves for an index, and how that is counted.

A sample is a hit (its slot is ready: a copy of it), a miss (it has a slot that is not ready: it is loaded, and stored
if nobody else is doing so), or a bypass (it has no slot, it is odd, or there is no cache: it is loaded). Whatever has
been loaded while there is a cache is checked against the spec, stored or not; what differs is odd, and served as an
`Odd`: it is never stored. What is served here is the deterministic part: the tail and the user's transform come after.

A batch is looked up at once, its hits are copied out by one gather per field (a CachedLoader does that by itself, and
has the others loaded: `load_into`), and the others are loaded in one call if the source has `__getitems__`. Counts are
added when a sample has been served; a source that raises adds nothing, and what Ctrl-C interrupts adds no more than
what it has stored.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import BatchRows
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.store import NO_PLACE
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.interrupts import LetThrough
from lightning_stocache.loading.misses import Misses, Store
from lightning_stocache.loading.odd import Odd
from lightning_stocache.node.group import NodeGroup

__all__ = ["Opened"]

log = logging.getLogger(__name__)


@dataclass
class Opened:
    """What came of a request, in this process.

    Args:
        source: where misses are loaded from: the request's source, or its deterministic part.
        tail: the random part, to be applied after the cache.
        cache: None when the source is passed through uncached.
        counters: None where counting is impossible (Windows, or no memory at all).
        ring: the arcs of all nodes.
        group: the ranks that share it.
        budget_bytes: memory that was granted on this node.
        name: under which the cache stays in memory when it is closed.
        borrowed: whether the cache is a copy's, which does not close the memory of the dataset that it was copied from.
        strict: whether a sample that differs from the spec is an error, not a bypass.
        frozen: whether a random source is cached as it is.
        off: whether nothing was to be cached: its budget is 0.
        baseline: what had been counted when the current Trainer call began.

    Raises:
        SampleMismatchError: (whatever serves) a loaded sample differs from the cache's spec.
        TypeError: (`serve_many`) the source's `__getitems__` does not give one sample per index.
    """

    source: Dataset[Any]
    tail: Callable[[Any], Any] | None = None
    cache: SharedCache | None = None
    counters: Counters | None = None
    ring: Ring | None = None
    group: NodeGroup = field(default_factory=NodeGroup)
    budget_bytes: int = 0
    name: str | None = None
    strict: bool = False
    frozen: bool = False
    baseline: Counts = field(default_factory=Counts)
    borrowed: bool = False
    off: bool = False
    _pool: BatchPool = field(default_factory=BatchPool, repr=False, compare=False)
    _loading: Misses | None = field(default=None, repr=False, compare=False)

    @property
    def live_cache(self) -> SharedCache | None:
        """The cache, unless this process has closed it."""
        return None if self.cache is None or self.cache.closed else self.cache

    @property
    def fetch(self) -> Callable[[list[int]], Any] | None:
        """The source's own way to load a batch, if it has one: a Subset has none that its dataset has not."""
        inner = self.source
        while type(inner) is Subset:
            inner = inner.dataset
        return getattr(self.source, "__getitems__", None) if getattr(inner, "__getitems__", None) else None

    def serve(self, index: int) -> Any:
        """The sample of an index. One that lies outside the dataset is the source's business."""
        cache = self.live_cache
        start = time.perf_counter_ns()
        if cache is not None and (sample := cache.get(index)) is not None:
            self.count(hits=1, bytes_from_cache=cache.codec.nbytes, gather_ns=time.perf_counter_ns() - start)
            return sample
        start = time.perf_counter_ns()
        sample = self.source[index]
        return self._keep(index, sample, time.perf_counter_ns() - start)

    def finished(self, sample: Any, whole: Dataset[Any]) -> Any:
        """What was served with the tail applied.

        Args:
            sample: it may be an `Odd`.
            whole: the source before its tail was cut off, from which a sample comes that is built in another way: the
                tail would not find its places.
        """
        if type(sample) is not Odd:
            return sample if self.tail is None else self.tail(sample)
        if self.tail is None:
            return sample.sample
        if sample.has_all_places:
            return self.tail(sample.sample)
        index = sample.index
        return whole[index] if self.fetch is None else cast(Any, whole).__getitems__([index])[0]

    def serve_many(self, indices: list[int]) -> Any:
        """The samples of a batch, as a list; without a cache, whatever the source's own `__getitems__` makes of it."""
        cache = self.live_cache
        if cache is None or not indices or min(indices) < 0 or max(indices) >= cache.length:
            return self._load(indices)
        places, hits = self._ready(cache, indices)
        samples: list[Any] = [None] * len(indices)
        gather_ns = 0
        if len(hits):
            start = time.perf_counter_ns()
            memory = self._pool.take(cache.codec.sizes(len(hits)))
            cache.gather(places[hits], memory)
            for place, sample in zip(hits.tolist(), cache.codec.split(memory, len(hits)), strict=True):
                samples[place] = sample
            gather_ns = time.perf_counter_ns() - start
        if len(hits) < len(indices):
            others = (places == NO_PLACE).nonzero().flatten().tolist()
            for place, sample in zip(others, self._load([indices[place] for place in others]), strict=True):
                samples[place] = sample
        # Only now: where loading fails or is interrupted, nobody gets the hits, and the batch may come again.
        self.count(hits=len(hits), bytes_from_cache=len(hits) * cache.codec.nbytes, gather_ns=gather_ns)
        return samples

    def load_into(self, batch: BatchRows, indices: list[int], places: list[int]) -> dict[int, Any]:
        """Serve samples that were not ready a moment ago, each at its place of a batch.

        They are stored from there: each is copied out of what the source gave only once.

        Returns:
            By place, the samples that are odd; their rows are undefined.
        """
        cache = self.cache
        assert cache is not None
        if self._one_by_one(indices) and not len(self._ready(cache, indices)[1]):

            def store(number: int, sample: Any) -> bool:
                parts = cache.codec.encode(sample, indices[number])
                return cache.put(indices[number], batch.put(places[number], parts))

            samples = self._load_then_keep(indices, store)
        else:
            samples = self.serve_many(indices)
            for place, index, sample in zip(places, indices, samples, strict=True):
                if type(sample) is not Odd:
                    batch.put(place, cache.codec.encode(sample, index))
        return {place: sample.sample for place, sample in zip(places, samples, strict=True) if type(sample) is Odd}

    def count(self, **counts: int) -> None:
        """Add to the counters, by the names of `Counts`."""
        if self.counters is not None:
            self.counters.add(**counts)

    def count_hits(self, samples: int, gather_ns: int = 0) -> None:
        """Count samples that somebody else has copied out of the cache, and the nanoseconds that it took."""
        if self.cache is not None and self.counters is not None:
            self.counters.add_hits(samples, samples * self.cache.codec.nbytes, gather_ns)

    def passing(self, source: Dataset[Any]) -> Opened:
        """The same counters around another source, without the cache: its memory is free when nobody reads it."""
        return replace(self, source=source, tail=None, cache=None, ring=None, budget_bytes=0)

    def close(self) -> None:
        """Give cache and counters up in this process; a cache with a name stays for the next job."""
        if self.borrowed:
            return
        cache = self.live_cache
        if cache is not None and self.name is not None and self.group.is_leader:
            log.info(
                "the cache is kept as %s, %d of %d slots filled; remove it with: python -m lightning_stocache clean %s",
                self.name,
                cache.filled,
                len(cache),
                self.name,
            )
        for part in (self.cache, self.counters):
            if part is not None:
                part.close()

    def _load(self, indices: list[int]) -> Any:
        """Serve what was not ready a moment ago: in one call, if the source can."""
        if self._one_by_one(indices):
            return self._load_then_keep(indices)
        fetch = self.fetch
        if fetch is None:
            return [self.serve(index) for index in indices]  # looks again: the batch may hold an index twice
        start = time.perf_counter_ns()
        with LetThrough():
            samples = fetch(indices)
        each = (time.perf_counter_ns() - start) // max(len(indices), 1)
        if self.live_cache is None:
            self.count(bypasses=len(indices), source_ns=each * len(indices))
            return samples
        if not isinstance(samples, Sequence) or len(samples) != len(indices):
            came = f"{len(samples)}" if isinstance(samples, Sequence) else f"a {type(samples).__name__}"
            raise TypeError(
                f"{type(self.source).__name__}.__getitems__ must return a list of one sample per index, here "
                f"{len(indices)}; got {came}. Batches cannot be cached: make them in collate_fn"
            )
        return [self._keep(index, sample, each) for index, sample in zip(indices, samples, strict=True)]

    @staticmethod
    def _ready(cache: SharedCache, indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Where those indices can be read now, NO_PLACE for what is not ready; and which of them these are."""
        places = cache.lookup(torch.tensor(indices))
        return places, (places != NO_PLACE).nonzero().flatten()

    def _one_by_one(self, indices: list[int]) -> bool:
        """Whether the source loads single samples, and a cache is open that knows these, which are all different."""
        cache = self.live_cache
        if self.fetch is not None or cache is None or not indices:
            return False
        return min(indices) >= 0 and max(indices) < cache.length and len(set(indices)) == len(indices)

    def _load_then_keep(self, indices: list[int], store: Store | None = None) -> list[Any]:
        """Load samples, and store them in a cache that is open."""
        return self._misses.load(indices, store)

    def _keep(self, index: int, sample: Any, source_ns: int) -> Any:
        """Store a sample that was loaded, if it has a slot, and count it; the sample, or an `Odd`."""
        cache = self.live_cache
        if cache is None or not 0 <= index < cache.length:
            self.count(bypasses=1, source_ns=source_ns)
            return sample
        samples = [sample]
        self._misses.keep([index], samples, source_ns)
        return samples[0]

    @property
    def _misses(self) -> Misses:
        """What loads and stores in this process."""
        assert self.cache is not None
        if self._loading is None or self._loading.source is not self.source or self._loading.cache is not self.cache:
            self._loading = Misses(self.source, self.cache, self.counters, self.strict, self.frozen)
        return self._loading

    def __getstate__(self) -> dict[str, Any]:
        # What this process has closed cannot be sent to another one, which passes samples through just the same. What
        # comes out may share this process's memory: it is a copy's then.
        counters = None if self.counters is None or self.counters.closed else self.counters
        state = {"cache": self.live_cache, "counters": counters, "borrowed": True}
        return self.__dict__ | state | {"_pool": BatchPool(), "_loading": None}

"""A source as this process serves it: samples from the cache where they are READY, else loaded, stored and counted.

A sample is a hit (its slot is READY: a copy of it), a miss (it has a slot that is not READY: it is loaded, and stored
if nobody else is doing so), or a bypass (it has no slot or no room, is odd, or there is no cache: it is loaded). What
has been loaded is checked against the cache's codec; what differs is odd, served as it is, and never stored. What is
random comes after the cache: first the tail that was cut off the source, then the user's transform.

A batch is looked up at once. The hits of rows are copied out by one gather per field (a CachedLoader does that by
itself, and has the others loaded: `load_into`), those of records one by one when they are asked for; the others are
loaded in one call if the source has `__getitems__`. Counts are added when a sample has been served: of a batch whose
loading fails, what was loaded before is stored and counted, its hits are not.
Where other jobs fill the same cache, each sample is loaded by one of them (`turns`).

The source stays its user's: as soon as it is seen to have changed, it is served as it is now, uncached.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, SupportsIndex, cast

import numpy as np
from torch.utils.data import Dataset

from lightning_stocache.cache.rows import FieldRows
from lightning_stocache.cache.shortage import Pace
from lightning_stocache.cache.store import NO_PLACE, UNREADABLE, Store, gathers
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.misses import Misses, in_order, passed_through
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.access import Odd, batch_reader, position_of
from lightning_stocache.source.state import SourceState

__all__ = ["CachedSource"]

_AGAIN: Any = object()  # stands for a sample that its batch has already


class CachedSource:
    """Serves the samples of a source.

    Args:
        opened: the source, which is the user's dataset with its whole transform, and what was opened for it.
        transform: what the user has done to each sample after the cache.

    Raises:
        SampleMismatchError: (whatever serves, `strict`) a loaded sample differs from the cache's codec.
        TypeError: (`samples`) the source's `__getitems__` does not give one sample per index.
    """

    def __init__(self, opened: OpenCache, transform: Callable[[Any], Any] | None = None) -> None:
        self.opened, self.transform = opened, transform
        self._pool = BatchPool()
        self._misses: Misses | None = None
        self._state = SourceState(self.source, getattr(opened.tail, "steps", ()))

    @property
    def source(self) -> Dataset[Any]:
        """The user's dataset."""
        return self.opened.request.source

    @property
    def cache(self) -> Store | None:
        """The cache, or None while samples pass through."""
        return self.opened.live_cache

    @property
    def transforms(self) -> bool:
        """Whether something is done to each sample after the cache."""
        return self.opened.tail is not None or self.transform is not None

    def sample(self, index: SupportsIndex) -> Any:
        """The finished sample of an index. What is no index to a cache (a list, a slice) goes to the source itself."""
        self.refresh()
        with self._state:
            try:
                position = position_of(index, self.source)
            except TypeError:
                return self._uncached(self.source, [index], self._transformed)[0]
            cache = self.cache
            if cache is None:
                return self._uncached(self.opened.source, [position], self._finished)[0]
            return self._finished(self._serve(cache, position))

    def samples(self, indices: Sequence[SupportsIndex]) -> Any:
        """The finished samples of a batch, each made when it is asked for: who puts one away needs no memory for all.

        Without a cache and without transforms they are whatever the source's own `__getitems__` makes of the batch.
        """
        self.refresh()
        with self._state:
            try:
                positions = [position_of(index, self.source) for index in indices]
            except TypeError:  # a sampler's keys, which only the source understands
                return self._uncached(self.source, indices, self._transformed)
            if self.cache is None and self._read_batch is None:
                return self._uncached(self.opened.source, positions, self._finished)
            return self._each_finished(self._serve_many(positions, lazily=self.transforms))

    def load_into(self, batch: FieldRows, indices: Sequence[SupportsIndex], rows: list[int]) -> dict[int, Any]:
        """Serve samples that were not READY a moment ago, each in its row of a batch, untransformed; store them there.

        Returns:
            By row, the samples that are odd; what lies in their rows is undefined.
        """
        with self._state:
            return self._load_into(batch, [position_of(index, self.source) for index in indices], rows)

    def load_ahead(self, index: int) -> bool:
        """Load a sample that nobody has asked for yet; whether there is room for such."""
        self.refresh()
        if (cache := self.cache) is None:
            return False
        with self._state:
            mine, _ = cache.divide([index])
            return not mine or cache.has_room(self._loading(cache).load(mine, served=False)[0])

    def count_hits(self, samples: int, gather_ns: int = 0) -> None:
        """Count samples that somebody else has copied out of the cache, and the nanoseconds that it took."""
        if self.opened.cache is not None and self.opened.counters is not None:
            self.opened.counters.add_hits(samples, samples * self.opened.cache.codec.nbytes, gather_ns)

    # ---- the source's life ----

    @property
    def changed(self) -> bool:
        """Whether the source has changed since it was cached."""
        counters = self.opened.counters if self.opened.group.rank == 0 else None
        return self._state.look(None if counters is None else lambda: counters.is_first("changed source")) is not None

    def refresh(self) -> None:
        """Once the source has been seen to change, serve the source itself, uncached."""
        opened = self.opened
        if (opened.cache is not None or opened.source is not self.source) and self.changed:
            self._let_go(opened.given_up())

    def view(self, transform: Callable[[Any], Any] | None) -> CachedSource:
        """What serves from the same cache with another transform; it does not close the cache."""
        view = copy.copy(self)
        view.transform, view.opened = transform, replace(self.opened, borrowed=True)
        return view

    def around(self, source: Dataset[Any]) -> CachedSource:
        """What serves a copy of the source, which goes its own way from now on, from the same cache."""
        self.refresh()
        opened, request = self.opened, replace(self.opened.request, source=source)
        inner = source if opened.source is self.source else opened.source
        return CachedSource(replace(opened, request=request, source=inner, borrowed=True), self.transform)

    def _let_go(self, opened: OpenCache) -> None:
        """Serve from something else; the memory is free when nobody holds it."""
        self.opened, self._misses, self._pool = opened, None, BatchPool()

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through."""
        self.opened.close()
        self._let_go(OpenCache.without(self.opened.request))

    def __getstate__(self) -> dict[str, Any]:
        # For a copy, too: memory and what loads belong to one process, and to one cache.
        return self.__dict__ | {"_pool": BatchPool(), "_misses": None}

    # ---- from the cache ----

    def _serve(self, cache: Store, index: int) -> Any:
        """The sample of an index, unfinished. One that lies outside the dataset is the source's business."""
        start = time.perf_counter_ns()
        if (place := cache.place(index, verify=True)) != NO_PLACE:
            places = np.array([place])
            [sample] = cache.read(places, self._pool.lend)
            if sample is UNREADABLE:
                return self._load(cache, [index])[0]
            nbytes, gather_ns = cache.stored_bytes(places), time.perf_counter_ns() - start
            self.opened.count(hits=1, bytes_from_cache=nbytes, gather_ns=gather_ns)
            return sample
        if cache.divide([index])[1] and cache.turns.wait([index]):
            return self._serve(cache, index)
        return self._loading(cache).load([index])[0]

    def _serve_many(self, indices: list[int], *, lazily: bool = False) -> Any:
        """The samples of a batch, unfinished; `lazily`: records are read when their samples are asked for.

        Without a cache, whatever the source's `__getitems__` makes of the batch.
        """
        cache = self.cache
        if cache is None or not indices or min(indices) < 0 or max(indices) >= cache.length:
            return self._load(cache, indices)
        start, rows = time.perf_counter_ns(), gathers(cache)
        places = cache.lookup(np.array(indices), verify=True)
        hits = np.flatnonzero(places != NO_PLACE)
        ready = cache.read(places[hits], self._pool.take if rows else self._pool.lend)
        nbytes, gather_ns = cache.stored_bytes(places[hits]), time.perf_counter_ns() - start
        missing = [index for index, place in zip(indices, places.tolist(), strict=True) if place == NO_PLACE]
        loaded = self._load(cache, missing) if missing else []
        # Only now: where loading fails or is interrupted, nobody gets the hits, and the batch may come again.
        self.opened.count(hits=len(hits), bytes_from_cache=nbytes, gather_ns=gather_ns)
        samples = in_order(places, ready, loaded, lambda at: self._load(cache, [indices[at]])[0], self.opened.count)
        return samples if lazily and not rows else list(samples)

    # ---- from the source ----

    def _load_into(self, batch: FieldRows, indices: list[int], rows: list[int]) -> dict[int, Any]:
        cache = cast(Store, self.opened.cache)
        different = len(set(indices)) == len(indices) > 0 and self._read_batch is None
        inside = different and min(indices) >= 0 and max(indices) < cache.length
        alone = inside and not cache.closed and bool((cache.lookup(np.array(indices), verify=True) == NO_PLACE).all())
        if alone and not cache.divide(indices)[1]:
            samples = self._loading(cache).load(indices, batch=batch, rows=rows)
        else:
            samples = self._serve_many(indices)
            fitting = [number for number, sample in enumerate(samples) if type(sample) is not Odd]
            parts = [cache.codec.encode(samples[number], indices[number]) for number in fitting]
            if parts:
                batch.put_many([rows[number] for number in fitting], parts)
        return {row: sample.sample for row, sample in zip(rows, samples, strict=True) if type(sample) is Odd}

    def _load(self, cache: Store | None, indices: list[int]) -> Any:
        """The samples of indices that were not READY a moment ago; what another job is loading, when it has come."""
        mine, others = (indices, []) if cache is None else cache.divide(indices)
        if cache is None or not others:
            return self._load_now(cache, indices)
        loaded, theirs = iter(self._load_now(cache, mine) if mine else ()), set(others)
        come = iter(self._serve_many(others) if cache.turns.wait(others) else self._load_now(cache, others))
        return [next(come if index in theirs else loaded) for index in indices]

    def _load_now(self, cache: Store | None, indices: list[int]) -> Any:
        """The samples of indices, loaded here: in one call, if the source can."""
        read = self._read_batch
        if read is not None and cache is not None:
            return self._loading(cache).load(indices, read)
        if read is not None:
            start = time.perf_counter_ns()
            samples = read(indices)
            self.opened.count(bypasses=len(indices), source_ns=time.perf_counter_ns() - start)
            return samples
        if cache is None:
            return self._uncached(self.opened.source, indices, lambda sample: sample)
        loaded = dict.fromkeys(indices)
        loaded.update(zip(loaded, self._loading(cache).load(list(loaded)), strict=True))
        if len(loaded) == len(indices):
            return list(loaded.values())
        samples = [loaded.pop(index, _AGAIN) for index in indices]  # what comes again may be READY by now
        again = iter(self._serve_many([i for i, sample in zip(indices, samples, strict=True) if sample is _AGAIN]))
        return [next(again) if sample is _AGAIN else sample for sample in samples]

    def _uncached(self, source: Any, indices: Sequence[Any], finish: Callable[[Any], Any]) -> list[Any]:
        """Finished samples of a source, counted when all have come."""
        samples, source_ns = passed_through(source, indices, finish)
        self.opened.count(bypasses=len(samples), source_ns=source_ns)
        return samples

    @property
    def _read_batch(self) -> Callable[[list[int]], Any] | None:
        return batch_reader(self.opened.source)

    def _loading(self, cache: Store) -> Misses:
        """What loads and stores in this process."""
        opened, known = self.opened, self._misses
        if known is None or known.source is not opened.source or known.cache is not cache:
            pace = None if opened.request.dir is None else Pace()
            how = opened.request.strict, opened.request.allow_random, pace
            self._misses = known = Misses(opened.source, cache, opened.counters, *how)
        return known

    # ---- after the cache ----

    def _each_finished(self, samples: Iterable[Any]) -> Any:
        # Generators, not `map`: a StopIteration of a transform must not end the batch.
        if self._read_batch is None and self.transforms:
            return (self._finished(sample) for sample in samples)
        # Where the source loads whole batches, all of its draws come first, as without a cache.
        if self.cache is not None or self.opened.tail is not None:
            samples = [self.opened.with_tail(sample) for sample in samples]
        return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def _finished(self, sample: Any) -> Any:
        return self._transformed(self.opened.with_tail(sample))

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

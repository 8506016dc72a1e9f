"""A source as this process serves it: samples from the cache where they are READY, else loaded, stored and counted.

A sample is a hit (its slot is READY: a copy of it), a miss (it has a slot that is not READY: it is loaded, and stored
if nobody else is doing so), or a bypass (it has no slot or no room, is odd, or there is no cache: it is loaded). A
loaded sample that differs from the cache's codec is odd: it is served as it is and never stored, with one warning for
the dataset on the node. Random steps come after the cache: first the tail that was cut off the source, then the user's
transform.

A batch is looked up at once. The hits of rows are copied by one gather per field, those of records one by one when
they are asked for. The other samples are loaded in one call if the source has `__getitems__`. Samples that a batch
holds twice, that another job is loading or that cannot be decoded are served one by one after that. Samples
are counted when they have been served. If loading fails, what was loaded before is stored and counted, and the hits of
the batch are not counted.

A source that has changed is served as it is now, uncached.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, SupportsIndex, cast

import numpy as np
from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.cache.codec import Memory, Parts, SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.counters import Counters, Matter, count
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.shortage import PAUSE_SECONDS, Pace
from lightning_stocache.cache.store import NO_PLACE, UNREADABLE, Store, gathers
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.node.group import job_ranks
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.access import Odd, batch_reader, one_per_index, position_of, warn_of_odd
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.guards import Recheck, SourceState
from lightning_stocache.source.transform_split import Tail

__all__ = ["CachedSource"]

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 20  # bytes that are copied into a batch, then stored: they are still in the processor's cache


class CachedSource:
    """Serves the samples of a source.

    Args:
        opened: the opened cache, with the source: the user's dataset with its whole transform.
        transform: the user's transform of each sample after the cache.

    Raises:
        SampleMismatchError: (all methods that serve, `strict`) a loaded sample differs from the cache's codec.
        TypeError: (`samples`) the source's `__getitems__` does not give one sample per index.
    """

    def __init__(self, opened: OpenCache, transform: Callable[[Any], Any] | None = None) -> None:
        self.transform, self.knows_ranks = transform, False
        self._state = SourceState(opened.request.source, getattr(opened.tail, "steps", ()))
        self._serve_from(opened)

    def _serve_from(self, opened: OpenCache) -> None:
        self.opened, self._pool = opened, BatchPool()
        self._pace = None if opened.request.dir is None else Pace()
        vars(self).pop("_recheck", None)

    @cached_property
    def _recheck(self) -> Recheck | None:
        """Reads some samples again; None if the user wants a random source cached as it is."""
        if self.opened.request.allow_random:
            return None
        return Recheck(self.opened.source, partial(_is_first, self.opened.counters, "random sample"))

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
        """Whether each sample is transformed after the cache."""
        return self.opened.tail is not None or self.transform is not None

    # ---- serving ----

    def sample(self, index: SupportsIndex) -> Any:
        """The finished sample of an index. The source itself answers for a list, a slice or another key."""
        self.refresh()
        with self._state:
            try:
                position = position_of(index, self.source)
            except TypeError:
                return self._uncached(self.source, [index], self._transformed)[0]
            if (cache := self.cache) is None:
                return self._uncached(self.opened.source, [position], self._finished)[0]
            return self._finished(self._serve_one(cache, position))

    def sample_with(self, *key: Any, **options: Any) -> Any:
        """The finished sample for several arguments, which only the source's own `__getitem__` understands."""
        source: Any = self.source
        self.refresh()
        with self._state:
            sample = source.__getitem__(*key, **options)
            count(self.opened.counters, bypasses=1)
            return self._transformed(sample)

    def samples(self, indices: Sequence[SupportsIndex]) -> Any:
        """The finished samples of a batch, each made when it is asked for, so that they are not all in memory at once.

        Without a cache and without transforms they are the result of the source's own `__getitems__`.
        """
        self.refresh()
        with self._state:
            try:
                positions = [position_of(index, self.source) for index in indices]
            except TypeError:  # a sampler's keys, which only the source understands
                return self._uncached(self.source, indices, self._transformed)
            if not self.knows_ranks:
                self.look_at_ranks()
            if (cache := self.cache) is not None:
                return self._each_finished(self._serve(cache, positions))
            if (read := batch_reader(self.opened.source)) is None:
                return self._uncached(self.opened.source, positions, self._finished)
            start = time.perf_counter_ns()
            samples = read(positions)
            count(self.opened.counters, bypasses=len(positions), source_ns=time.perf_counter_ns() - start)
            return self._each_finished(samples)

    def look_at_ranks(self) -> None:
        """Warn once, on rank zero, if the ranks of a job do not share the cache.

        Processes have counters in common. Before `share` there are none, so the first worker warns for all.
        """
        self.knows_ranks, (world, rank), worker = True, job_ranks(), get_worker_info()
        if rank or self.opened.group.world >= world or (self.opened.counters is None and worker and worker.id):
            return
        if self._is_first("ranks alone"):
            log.warning(
                "each of %d ranks %s: after init_process_group, call share() of the dataset on every rank, and give "
                'its loader a DistributedSampler (or CachedLoader sampling="locality"), without which each trains on '
                "all samples",
                world,
                "loads its samples uncached" if self.cache is None else "has a cache of its own",
            )

    def load_into(self, batch: Memory, indices: Sequence[SupportsIndex], rows: Sequence[int]) -> dict[int, Any]:
        """Serve samples that were not READY a moment ago into their rows of a batch, untransformed, and store them.

        Returns:
            The odd samples, by row; the content of their rows is undefined.
        """
        with self._state:
            cache, positions = cast(Store, self.opened.cache), [position_of(index, self.source) for index in indices]
            places = cache.lookup(np.array(positions, dtype=np.int64), verify=True)
            once = len(set(positions)) == len(positions)
            if once and (places == NO_PLACE).all() and not cache.divide(positions)[1]:
                samples = self.load(cache, positions, in_one_call=True, batch=batch, rows=rows)
            else:  # some are READY by now (or verified on a disk), drawn twice, or loaded by another job
                samples = list(self._serve(cache, positions))
                fitting = [number for number, sample in enumerate(samples) if type(sample) is not Odd]
                if fitting:
                    parts = [cache.codec.encode(samples[number], positions[number]) for number in fitting]
                    cache.codec.put_many(batch, [rows[number] for number in fitting], parts)
        return {row: sample.sample for row, sample in zip(rows, samples, strict=True) if type(sample) is Odd}

    def load_ahead(self, index: int) -> bool:
        """Load a sample before it is asked for. Returns whether there is room for more."""
        self.refresh()
        if (cache := self.cache) is None:
            return False
        with self._state:
            mine, _ = cache.divide([index])
            return not mine or cache.has_room(self.load(cache, mine, served=False)[0])

    def count_hits(self, samples: int) -> None:
        """Count samples that the caller has copied out of the cache."""
        if (cache := self.opened.cache) is not None:
            count(self.opened.counters, hits=samples, bytes_from_cache=samples * cache.codec.nbytes)

    def _serve_one(self, cache: Store, index: int) -> Any:
        """The unfinished sample of an index. The source raises for an index outside the dataset."""
        start = time.perf_counter_ns()
        while (place := cache.place(index, verify=True)) == NO_PLACE:
            if not (cache.divide([index])[1] and cache.wait(index)):
                return self.load(cache, [index])[0]
        places = np.array([place])
        [sample] = cache.read(places, self._pool.lend)
        if sample is UNREADABLE:
            return self.load(cache, [index])[0]
        nbytes, gather_ns = cache.stored_bytes(places), time.perf_counter_ns() - start
        count(self.opened.counters, hits=1, bytes_from_cache=nbytes, gather_ns=gather_ns)
        return sample

    def _serve(self, cache: Store, indices: list[int]) -> Iterable[Any]:
        """The unfinished samples of a batch. Samples that are not READY are loaded now, records read when asked for."""
        start, rows = time.perf_counter_ns(), gathers(cache)
        places = cache.lookup(np.array(indices, dtype=np.int64), verify=True)
        hits = places[places != NO_PLACE]
        ready = cache.read(hits, self._pool.take if rows else self._pool.lend)
        nbytes, gather_ns = cache.stored_bytes(hits), time.perf_counter_ns() - start
        loaded: list[Any] = []
        if len(hits) < len(indices):
            missing = [index for index, place in zip(indices, places.tolist(), strict=True) if place == NO_PLACE]
            here = list(dict.fromkeys(cache.divide(missing)[0]))
            by_index = dict(zip(here, self.load(cache, here, in_one_call=True) if here else (), strict=True))
            # Repeated samples, and those that another job was loading, may be READY by now.
            loaded = [by_index.pop(index) if index in by_index else self._serve_one(cache, index) for index in missing]
        # Only now: if loading fails or is interrupted, nobody gets the hits, and the batch may come again.
        count(self.opened.counters, hits=len(hits), bytes_from_cache=nbytes, gather_ns=gather_ns)
        return ready if rows and not loaded else self._in_order(cache, indices, places, iter(ready), iter(loaded))

    def _in_order(
        self, cache: Store, indices: list[int], places: Integers, hits: Iterator[Any], loaded: Iterator[Any]
    ) -> Iterator[Any]:
        """The samples of a batch in its order. Records are decoded as the caller iterates."""
        gather_ns = 0
        for index, place in zip(indices, places.tolist(), strict=True):
            if place == NO_PLACE:
                yield next(loaded)
                continue
            start = time.perf_counter_ns()
            sample = next(hits)
            gather_ns += time.perf_counter_ns() - start
            if sample is UNREADABLE:
                count(self.opened.counters, hits=-1)
                sample = self.load(cache, [index])[0]
            yield sample
        count(self.opened.counters, gather_ns=gather_ns)

    def _uncached(self, source: Any, indices: Sequence[Any], finish: Callable[[Any], Any]) -> list[Any]:
        """Finished samples of a source, one after the other as without a cache, counted when all have come."""
        samples, source_ns = [], 0
        for index in indices:
            start = time.perf_counter_ns()
            sample = source[index]
            source_ns += time.perf_counter_ns() - start
            samples.append(finish(sample))
        count(self.opened.counters, bypasses=len(samples), source_ns=source_ns)
        return samples

    # ---- loading and storing ----

    def load(
        self,
        cache: Store,
        indices: list[int],
        *,
        in_one_call: bool = False,
        batch: Memory | None = None,
        rows: Sequence[int] = (),
        served: bool = True,
    ) -> list[Any]:
        """Load samples, then store them all: storing costs half as much when its code and memory are warm.

        What has been loaded before the source raises is stored, too.

        Args:
            cache: where they are stored.
            indices: the indices of the samples.
            in_one_call: whether the source's `__getitems__` loads them, if it has one.
            batch: a batch into which the samples are copied, except odd ones.
            rows: their rows in the batch.
            served: whether the samples were asked for; else they count as fills alone.
        """
        source: Any = self.opened.source
        samples: list[Any] = []
        # Made anew: a forked worker has no CUDA, whatever its parent had. A sample without a slot cannot be frozen.
        watched = self._recheck is not None and any(map(cache.has_place, indices))
        generators = Generators() if watched else None
        before = {} if generators is None else generators.state()
        start = time.perf_counter_ns()
        try:
            if in_one_call and (read := batch_reader(source)) is not None:
                samples += one_per_index(read(indices), len(indices), source)
            for index in indices[len(samples) :]:
                samples.append(self._read(cache, source, index))
        finally:
            source_ns = time.perf_counter_ns() - start
            try:
                if samples and generators is not None and generators.moved(before):
                    self._leave_random(cache, indices, samples)
                self._store(cache, indices, samples, source_ns, served, batch, rows)
            finally:
                cache.release(indices)
        if self._recheck is not None:
            for index, sample in zip(indices, samples, strict=True):
                if type(sample) is not Odd and cache.has_place(index):
                    self._recheck.after(index, sample)
        return samples

    def _read(self, cache: Store, source: Any, index: int) -> Any:
        """Read a sample. It is odd if the source has not called its transform as usual: the tail cannot finish it.

        A sample without a place for the tail is refused later, by the codec.
        """
        tail = self.opened.tail
        if not isinstance(tail, Tail):
            return source[index]
        before = sum(head.calls for head in tail.heads)
        sample = source[index]
        calls = sum(head.calls for head in tail.heads) - before
        if not cache.codec.is_alike(sample) or calls == tail.calls(sample):
            return sample
        words = f"For sample {index} the transform is called {calls} times, not as for the samples that set-up has read"
        if self.opened.request.strict:
            raise SampleMismatchError(words)
        if self._is_first("odd sample"):
            warn_of_odd(self.source, words)
        return Odd(index, sample, has_all_places=False)

    def _store(
        self,
        cache: Store,
        indices: list[int],
        samples: list[Any],
        source_ns: int,
        served: bool,
        batch: Memory | None,
        rows: Sequence[int],
    ) -> None:
        """Store and count samples, which may be fewer than indices. An odd sample becomes an `Odd` in the list."""
        codec, pauses, start = cache.codec, self._pace is not None and self._pace.pauses, time.perf_counter_ns()
        fills = misses = nbytes = store_ns = 0
        step = max(_AT_ONCE // max(codec.nbytes, 1), 1)
        for first in range(0, len(samples), step):
            fitting = dict[int, Parts]()
            for number in range(first, min(first + step, len(samples))):
                if (parts := self._encode(cache, indices[number], samples, number)) is not None:
                    fitting[number] = parts
                else:
                    sample = samples[number]
                    nbytes += codec.least_bytes(sample.sample if type(sample) is Odd else sample)
            contents = _contents(cache, fitting, batch, rows)
            nbytes += sum(part.nbytes for parts in contents for part in parts)
            begin, positions = time.perf_counter_ns(), [indices[number] for number in fitting]
            if pauses:
                misses += sum(map(cache.has_place, positions))
            else:
                outcomes = cache.put(positions, contents)
                misses += len(outcomes) - outcomes.count(None)
                fills += outcomes.count(True)
            store_ns += time.perf_counter_ns() - begin
        count(
            self.opened.counters,
            misses=misses * served,
            bypasses=(len(samples) - misses) * served,
            fills=fills,
            bytes_from_source=nbytes * served,
            source_ns=source_ns,
            fill_ns=time.perf_counter_ns() - start,
        )
        if self._pace is not None and self._pace.note(source_ns, store_ns) and self._is_first("slow disk"):
            log.warning(
                "the disk of the cache takes longer to store samples than they take to load: storing pauses for %.0f s",
                PAUSE_SECONDS,
            )

    def _encode(self, cache: Store, index: int, samples: list[Any], number: int) -> Parts | None:
        """A loaded sample as the codec's parts; None if it is not stored. An odd sample becomes `Odd` in the list."""
        codec, sample = cache.codec, samples[number]
        if type(sample) is Odd or (not cache.has_room(sample) and codec.is_alike(sample)):
            return None
        try:
            return cast(Parts, codec.encode(sample, index))
        except (SampleMismatchError, UnsupportedSampleError) as error:
            if self.opened.request.strict:
                raise
            if self._is_first("odd sample"):
                warn_of_odd(self.opened.source, str(error))
            samples[number] = Odd(index, sample, codec.is_alike(sample))
            return None

    def _leave_random(self, cache: Store, indices: list[int], samples: list[Any]) -> None:
        """Keep samples out of the cache, because some of them drew random numbers: their draws would be frozen."""
        if self._is_first("random sample"):
            log.warning(
                "%s draws random numbers for some samples, as for one of %s: batches that hold such are not cached.\n"
                "Give its deterministic part to CachedDataset, and the random rest as transform=",
                type(self.opened.source).__name__,
                indices[: len(samples)][:8],
            )
        samples[:] = [
            Odd(index, sample, cache.codec.is_alike(sample)) for index, sample in zip(indices, samples, strict=False)
        ]

    def _is_first(self, matter: Matter) -> bool:
        return _is_first(self.opened.counters, matter)

    # ---- after the cache ----

    def _each_finished(self, samples: Iterable[Any]) -> Any:
        # Generators, not `map`: a StopIteration of a transform must not end the batch.
        if batch_reader(self.opened.source) is None and self.transforms:
            return (self._finished(sample) for sample in samples)
        # Where the source loads whole batches, all of its draws come first, as without a cache.
        if self.cache is not None or self.opened.tail is not None:
            samples = self.opened.with_tails(list(samples))
        return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def _finished(self, sample: Any) -> Any:
        if type(sample) is not Odd:
            return self._transformed(self.opened.with_tail(sample))
        with self._state:  # the whole source may read the sample again
            whole = self.opened.with_tail(sample)
        return self._transformed(whole)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    # ---- changes of the source ----

    @property
    def change(self) -> str | None:
        """The place in the source that has changed since it was cached; None without a change."""
        return self._state.look()

    @property
    def changed(self) -> bool:
        """Whether the source has changed since it was cached. The first process of rank zero to see it warns."""
        if (change := self.change) is None:
            return False
        counters = self.opened.counters
        if self.opened.group.rank == 0 and counters is not None and counters.is_first("changed source"):
            log.warning(
                "%s: its `%s` has changed since it was cached. Epochs that begin now load all samples uncached, as "
                "changed.\nTo keep the cache, change what comes after it: transform= of CachedDataset or "
                "StocacheDataModule, or the model's on_after_batch_transfer",
                type(self.source).__name__,
                change,
            )
        return True

    def refresh(self) -> None:
        """Serve the source itself, uncached, once it has changed."""
        opened = self.opened
        if (opened.cache is not None or opened.source is not self.source) and self.changed:
            self._serve_from(opened.given_up())

    def view(self, transform: Callable[[Any], Any] | None) -> CachedSource:
        """A view that serves the same cache with another transform, and does not close the cache."""
        view = copy.copy(self)
        view.transform, view.opened = transform, replace(self.opened, borrowed=True)
        return view

    def around(self, source: Dataset[Any]) -> CachedSource:
        """A view that serves a copy of the source, which may change by itself, from the same cache."""
        self.refresh()
        opened, request = self.opened, replace(self.opened.request, source=source)
        inner = source if opened.source is self.source else opened.source
        return CachedSource(replace(opened, request=request, source=inner, borrowed=True), self.transform)

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through."""
        self.opened.close()
        self._serve_from(OpenCache.without(self.opened.request, self.opened.group))

    def __getstate__(self) -> dict[str, Any]:
        # Also for a copy: batch memory and the `Recheck` belong to one process.
        return {name: value for name, value in vars(self).items() if name != "_recheck"} | {"_pool": BatchPool()}


def _contents(
    cache: Store, fitting: dict[int, Parts], batch: Memory | None, rows: Sequence[int]
) -> Sequence[Sequence[memoryview]]:
    """The bytes of encoded samples, copied to their rows if there is a batch."""
    parts, codec, count = list(fitting.values()), cache.codec, len(fitting)
    if not parts or (batch is None and (count < 2 or not gathers(cache))):
        return [codec.contents(part) for part in parts]
    places: Sequence[int] = range(count)
    if batch is None:  # a copy of many small samples at once costs less than a view of each
        batch = codec.rows([np.empty(size, dtype=np.uint8) for size in codec.sizes(count)], count)
    else:
        places = [rows[number] for number in fitting]
    copied: list[list[memoryview]] = codec.put_many(batch, places, parts)
    return copied


def _is_first(counters: Counters | None, matter: Matter) -> bool:
    """Whether no process on the node has warned of this. A function: a `Recheck` would keep a method's cache alive."""
    return counters is None or counters.is_first(matter)

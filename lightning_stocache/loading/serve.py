"""A source as this process serves it: samples from the cache where they are READY, else loaded, stored and counted.

A sample is a hit (its slot is READY: a copy of it), a miss (it has a slot that is not READY: it is loaded, and stored
if nobody else is doing so), or a bypass (it has no slot or no room, is odd, or there is no cache: it is loaded). A
loaded sample that differs from the cache's codec is odd: it is served as it is and never stored, with one warning for
the dataset on the node. Random steps come after the cache: first the tail that was cut off the source, then the user's
transform.

A sampler's key reaches the source as it is. If it is an index, it also says where the sample is looked up. A list of
indices is served from the samples if set-up has proved that the source gives their stack for it.

A batch is looked up at once. The hits of rows are copied by one gather per field, those of records one by one when
they are asked for. The other samples are loaded in one call if the source has `__getitems__`. Samples that a batch
holds twice, that another job is loading or that cannot be decoded are served one by one after that. Samples
are counted when they have been served. If loading fails, what was loaded before is stored and counted, and the hits of
the batch are not counted.

A source that has changed is served as it is now, uncached, by every process of the job: one number in shared memory
says so. It is read before each look-up, and again after the gather; what was made of stored samples meanwhile is made
anew. Stored samples are read again from time to time to find that out (`source.looks`).
"""

from __future__ import annotations

import copy
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar, cast

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
from lightning_stocache.source.access import Odd, batch_reader, one_per_index, position_of, positions_of, warn_of_odd
from lightning_stocache.source.common_state import CommonState
from lightning_stocache.source.generators import Generators, are_draws_evidence
from lightning_stocache.source.looks import AT_ONCE, LOST_CUT, Due, Look, Schedule, judged, read_again
from lightning_stocache.source.proof import CutProof
from lightning_stocache.source.samples import Bits, bits, stacked
from lightning_stocache.source.transform_split import Head, Tail, UncuttableError, reading
from lightning_stocache.source.witness import Witness

__all__ = ["CachedSource"]

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_KEYS_ALONE = 32  # keys that are no indices, after which a cache that has served nothing is given up
_AT_ONCE = 1 << 20  # bytes that are copied into a batch, then stored: they are still in the processor's cache


class CachedSource:
    """Serves the samples of a source.

    Args:
        opened: the opened cache, with the source: the user's dataset with its whole transform.
        transform: the user's transform of each sample after the cache.
        is_copy: whether the source is a copy in the process of the original: if it changes, the original has not.

    Raises:
        SampleMismatchError: (all methods that serve, `strict`) a loaded sample differs from the cache's codec.
        TypeError: (`samples`) the source's `__getitems__` does not give one sample per index.
    """

    def __init__(
        self, opened: OpenCache, transform: Callable[[Any], Any] | None = None, *, is_copy: bool = False
    ) -> None:
        self.transform, self.knows_ranks = transform, False
        self._is_copy = is_copy
        self.witness = Witness(opened.request.source, getattr(opened.tail, "steps", ()))
        self.witness.learn(opened.machinery)
        self._served = _Served()
        self._schedule = Schedule()
        self._epoch = 0  # of the CachedLoaders in this process
        self._common: CommonState | None = None
        self._keys = 0  # that were no indices
        self._lent: list[tuple[Any, Bits]] | None = None  # the samples of the first batch, with their bits
        self._serve_from(opened)

    def _serve_from(self, opened: OpenCache) -> None:
        self.opened, self._pool = opened, BatchPool()
        self._pace = None if opened.request.dir is None else Pace()
        tail = opened.tail
        self._proof = CutProof(opened.request.source, opened.source, tail) if isinstance(tail, Tail) else None

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

    def sample(self, key: Any) -> Any:
        """The finished sample of a sampler's key. The source itself answers for a key that is no index."""
        self.refresh()
        with self.witness:
            position, listed = position_of(key), self._listed(key)
            cache = self.cache
            if position is None and (listed is None or cache is None):
                self._note_key(key)
                return self._uncached(self.source, [key], is_whole=True)[0]
            if cache is None:
                return self._uncached(self.opened.source, [key])[0]
            if self._lent == [] and position is not None:
                return self._lend(cache, [position], [key])[0]
            if position is None:
                samples = list(self._serve(cache, cast("list[int]", listed), {}))
                sample = None if any(type(each) is Odd for each in samples) else stacked(samples)
            else:
                sample = self._serve_one(cache, position, key)
            if self.hears_change or sample is None:
                self.refresh()
                return self._uncached(self.source, [key], is_whole=True)[0]
            return self._transformed(sample) if position is None else self._finished(sample, position)

    def _listed(self, key: Any) -> list[int] | None:
        return positions_of(key, len(cast(Any, self.source))) if self.opened.serves_lists else None

    def samples_of(self, key: Any) -> int:
        """The number of samples that a key asks the cache for."""
        if position_of(key) is not None:
            return 1
        return len(self._listed(key) or ())

    def sample_with(self, *key: Any, **options: Any) -> Any:
        """The finished sample for several arguments, which only the source's own `__getitem__` understands."""
        source: Any = self.source
        self.refresh()
        with self.witness:
            sample = source.__getitem__(*key, **options)
            count(self.opened.counters, bypasses=1)
            return self._transformed(sample)

    def samples(self, keys: Sequence[Any]) -> Any:
        """The finished samples of a batch, each made when it is asked for, so that they are not all in memory at once.

        Without a cache and without transforms they are the result of the source's own `__getitems__`.
        """
        self.refresh()
        with self.witness:
            kinds = set(map(type, keys))
            positions = list(keys)
            if kinds != {int}:
                positions = [position for position in map(position_of, keys) if position is not None]
            are_indices = len(positions) == len(keys)
            if are_indices and not self.knows_ranks:
                self.look_at_ranks()
            cache = self.cache
            if not are_indices:
                self._note_key(next(key for key in keys if position_of(key) is None))
            elif cache is not None and self._lent == []:
                return self._lend(cache, positions, keys)
            elif cache is not None:
                others = {} if kinds == {int} else dict(zip(positions, keys, strict=True))
                unfinished = self._serve(cache, positions, others)
                if not self.hears_change:
                    return self._each_finished(unfinished, positions)
                self.refresh()  # before the tail draws: the whole source draws for this batch
            source = self.opened.source if are_indices else self.source
            if (read := batch_reader(source)) is None:
                return self._uncached(source, keys, is_whole=not are_indices)
            start = time.perf_counter_ns()
            samples = read(cast(Any, keys))
            count(self.opened.counters, bypasses=len(keys), source_ns=time.perf_counter_ns() - start)
            if are_indices:
                return self._each_finished(samples, positions)
            return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def _note_key(self, key: Any) -> None:
        """Warn once of keys that are no indices. A cache from which nothing else was asked for is given up later."""
        counters = self.opened.counters
        if self.cache is None or counters is None or isinstance(key, slice):
            return
        self._keys += 1
        if self._keys == 1 and counters.is_first("keys"):
            log.warning(
                "%s is asked for keys that are no indices, as %.60s: such samples are not cached, but loaded every "
                "time.\nTo cache them, let the sampler draw indices, and the loader make the batches",
                type(self.source).__name__,
                repr(key),  # a handler may keep the record
            )

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

    def load_into(self, batch: Memory, indices: list[int], rows: Sequence[int]) -> dict[int, Any]:
        """Serve samples that were not READY a moment ago into their rows of a batch, untransformed, and store them.

        Returns:
            The odd samples, by row; the content of their rows is undefined.
        """
        with self.witness:
            cache = cast(Store, self.opened.cache)
            places = cache.lookup(np.array(indices, dtype=np.int64), verify=True)
            once = len(set(indices)) == len(indices)
            if once and (places == NO_PLACE).all() and not cache.divide(indices)[1]:
                samples = self.load(cache, indices, in_one_call=True, batch=batch, rows=rows)
            else:  # some are READY by now (or verified on a disk), drawn twice, or loaded by another job
                samples = list(self._serve(cache, indices, {}))
                fitting = [number for number, sample in enumerate(samples) if type(sample) is not Odd]
                if fitting:
                    parts = [cache.codec.encode(samples[number], indices[number]) for number in fitting]
                    cache.codec.put_many(batch, [rows[number] for number in fitting], parts)
        return {row: sample.sample for row, sample in zip(rows, samples, strict=True) if type(sample) is Odd}

    def load_ahead(self, index: int) -> bool:
        """Load a sample before it is asked for. Returns whether there is room for more."""
        self.refresh()
        if (cache := self.cache) is None:
            return False
        with self.witness:
            mine, _ = cache.divide([index])
            return not mine or cache.has_room(self.load(cache, mine, served=False)[0])

    def count_hits(self, samples: int) -> None:
        """Count samples that the caller has copied out of the cache."""
        if (cache := self.opened.cache) is not None:
            count(self.opened.counters, hits=samples, bytes_from_cache=samples * cache.codec.nbytes)

    def _serve_one(self, cache: Store, index: int, key: Any) -> Any:
        """The unfinished sample of an index, with the key for the source, which raises outside of the dataset."""
        start = time.perf_counter_ns()
        while (place := cache.place(index, verify=True)) == NO_PLACE:
            if not (cache.divide([index])[1] and cache.wait(index)):
                return self.load(cache, [index], {index: key})[0]
        places = np.array([place])
        [sample] = cache.read(places, self._pool.lend)
        if sample is UNREADABLE:
            return self.load(cache, [index], {index: key})[0]
        nbytes, gather_ns = cache.stored_bytes(places), time.perf_counter_ns() - start
        count(self.opened.counters, hits=1, bytes_from_cache=nbytes, gather_ns=gather_ns)
        return sample

    def _serve(self, cache: Store, indices: list[int], keys: Mapping[int, Any]) -> Iterable[Any]:
        """The unfinished samples of a batch. Samples that are not READY are loaded now, records read when asked for.

        `keys` has, for some indices, the key that the source gets.
        """
        start, rows = time.perf_counter_ns(), gathers(cache)
        places = cache.lookup(np.array(indices, dtype=np.int64), verify=True)
        hits = places[places != NO_PLACE]
        ready: Iterable[Any] = cache.read(hits, self._pool.take if rows else self._pool.lend) if len(hits) else ()
        nbytes, gather_ns = cache.stored_bytes(hits), time.perf_counter_ns() - start
        loaded: list[Any] = []
        if len(hits) < len(indices):
            missing = [index for index, place in zip(indices, places.tolist(), strict=True) if place == NO_PLACE]
            here = list(dict.fromkeys(cache.divide(missing)[0]))
            by_index = dict(zip(here, self.load(cache, here, keys, in_one_call=True) if here else (), strict=True))
            # Repeated samples, and those that another job was loading, may be READY by now.
            loaded = [
                by_index.pop(index) if index in by_index else self._serve_one(cache, index, keys.get(index, index))
                for index in missing
            ]
        # Only now: if loading fails or is interrupted, nobody gets the hits, and the batch may come again.
        count(self.opened.counters, hits=len(hits), bytes_from_cache=nbytes, gather_ns=gather_ns)
        return ready if rows and not loaded else self._in_order(cache, indices, keys, places, iter(ready), iter(loaded))

    def _in_order(
        self,
        cache: Store,
        indices: list[int],
        keys: Mapping[int, Any],
        places: Integers,
        hits: Iterator[Any],
        loaded: Iterator[Any],
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
                sample = self.load(cache, [index], keys)[0]
            yield sample
        count(self.opened.counters, gather_ns=gather_ns)

    def _uncached(self, source: Any, indices: Sequence[Any], *, is_whole: bool = False) -> list[Any]:
        """Finished samples of a source, one after the other as without a cache, counted when all have come.

        Args:
            source: the user's dataset, or its part that is cached.
            indices: the indices, or other keys.
            is_whole: whether `source` is the user's dataset.
        """
        samples, source_ns = [], 0
        for index in indices:
            start = time.perf_counter_ns()
            sample = source[index]
            source_ns += time.perf_counter_ns() - start
            samples.append(self._transformed(sample) if is_whole else self._finished(sample, index))
        count(self.opened.counters, bypasses=len(samples), source_ns=source_ns)
        return samples

    # ---- loading and storing ----

    def load(
        self,
        cache: Store,
        indices: list[int],
        keys: Mapping[int, Any] | None = None,
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
            keys: for some indices, the key that the source gets.
            in_one_call: whether the source's `__getitems__` loads them, if it has one.
            batch: a batch into which the samples are copied, except odd ones.
            rows: their rows in the batch.
            served: whether the samples were asked for; else they count as fills alone.
        """
        source: Any = self.opened.source
        asked = [keys.get(index, index) for index in indices] if keys else indices
        samples: list[Any] = []
        placed = np.flatnonzero(cache.have_places(indices)).tolist()
        # Made anew: a forked worker has no CUDA, whatever its parent had. A sample without a slot cannot be frozen.
        watched = bool(placed) and not self.opened.request.allow_random
        is_cut = self._proof is not None
        is_alone = are_draws_evidence()  # else a generator that has moved is no evidence
        generators = Generators() if watched and is_alone else None
        before = {} if generators is None else generators.state()
        start = time.perf_counter_ns()
        try:
            with reading(self._heads):
                if in_one_call and (read := batch_reader(source)) is not None:
                    samples += self._read(lambda some: one_per_index(read(some), len(some), source), indices, asked)
                for index, key in list(zip(indices, asked, strict=True))[len(samples) :]:
                    samples += self._read(lambda some: [source[some[0]]], [index], [key])
            if self._proof is not None:
                self._proof.go_on(indices)
        except UncuttableError as error:
            self._give_up(LOST_CUT % error)
            samples[:] = [Odd(key, None, has_all_places=False) for key in asked]
        finally:
            source_ns = time.perf_counter_ns() - start
            try:
                if any(head.is_strayed for head in self._heads):
                    self._leave_strayed(asked, samples)
                elif samples and generators is not None and generators.moved(before) and are_draws_evidence():
                    self._leave_random(cache, asked, samples)
                # Without a slot there is nothing to encode, unless for a batch, or to see if the tail can finish it.
                if is_cut or batch is not None or self.opened.request.strict:
                    placed = list(range(len(samples)))
                self._store(cache, indices, asked, samples, placed, source_ns, served, batch, rows)
            finally:
                cache.release(indices)
        return samples

    @property
    def _heads(self) -> Sequence[Head]:
        return getattr(self.opened.tail, "heads", ())

    def _read(self, read: Callable[[list[Any]], list[Any]], indices: list[int], keys: list[Any]) -> list[Any]:
        """Read samples. One is odd if the source has not called its transform as usual: the tail cannot finish it.

        A sample without a place for the tail is refused later, by the codec.

        Raises:
            UncuttableError: the cut is wrong.
        """
        if self._proof is None:
            return read(keys)
        samples, objection = self._proof.read(partial(read, keys), indices)
        if objection is None or any(head.is_strayed for head in self._heads):  # `load` leaves these
            return samples
        if len(indices) > 1:
            return [
                sample for index, key in zip(indices, keys, strict=True) for sample in self._read(read, [index], [key])
            ]
        if not cast(Store, self.opened.cache).codec.is_alike(samples[0]):
            return samples
        words = f"For sample {indices[0]} {objection}, not as for the samples that set-up has read"
        if self.opened.request.strict:
            raise SampleMismatchError(words)
        if self._is_first("odd sample"):
            warn_of_odd(self.source, words)
        return [Odd(keys[0], samples[0], has_all_places=False)]

    def _store(
        self,
        cache: Store,
        indices: list[int],
        keys: list[Any],
        samples: list[Any],
        numbers: list[int],
        source_ns: int,
        served: bool,
        batch: Memory | None,
        rows: Sequence[int],
    ) -> None:
        """Store and count samples, which may be fewer than indices. An odd sample becomes an `Odd` in the list.

        `numbers` are the positions of those that are encoded, rising; the others have no slot.
        """
        codec, pauses, start = cache.codec, self._pace is not None and self._pace.pauses, time.perf_counter_ns()
        fills = misses = store_ns = 0
        numbers = [number for number in numbers if number < len(samples)]
        nbytes = (len(samples) - len(numbers)) * codec.nbytes
        step = max(_AT_ONCE // max(codec.nbytes, 1), 1)
        for first in range(0, len(numbers), step):
            fitting = dict[int, Parts]()
            for number in numbers[first : first + step]:
                if (parts := self._encode(cache, keys[number], samples, number)) is not None:
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

    def _encode(self, cache: Store, key: Any, samples: list[Any], number: int) -> Parts | None:
        """A loaded sample as the codec's parts; None if it is not stored. An odd sample becomes `Odd` in the list."""
        codec, sample = cache.codec, samples[number]
        if type(sample) is Odd or (not cache.has_room(sample) and codec.is_alike(sample)):
            return None
        try:
            return cast(Parts, codec.encode(sample, key))
        except (SampleMismatchError, UnsupportedSampleError) as error:
            if self.opened.request.strict:
                raise
            if self._is_first("odd sample"):
                warn_of_odd(self.opened.source, str(error))
            samples[number] = Odd(key, sample, codec.is_alike(sample))
            return None

    def _leave_random(self, cache: Store, indices: list[Any], samples: list[Any]) -> None:
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

    def _leave_strayed(self, indices: list[Any], samples: list[Any]) -> None:
        """Keep samples out of the cache: another thread has called the transform, nobody knows for which of them."""
        self._give_up(
            "its transform is called by another thread than the one that reads the sample, so that it cannot be cut. "
            "All samples are loaded uncached"
        )
        samples[:] = [Odd(index, sample, has_all_places=False) for index, sample in zip(indices, samples, strict=False)]

    def _is_first(self, matter: Matter) -> bool:
        """Whether no process on the node has warned of this."""
        return self.opened.counters is None or self.opened.counters.is_first(matter)

    # ---- after the cache ----

    def _each_finished(self, samples: Iterable[Any], indices: Sequence[int]) -> Any:
        # Generators, not `map`: a StopIteration of a transform must not end the batch.
        if batch_reader(self.opened.source) is None and self.transforms:
            return (self._finished(sample, index) for sample, index in zip(samples, indices, strict=True))
        # Where the source loads whole batches, all of its draws come first, as without a cache.
        if self.cache is not None or self.opened.tail is not None:
            samples = self.opened.with_tails(list(samples), indices)
        return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def _finished(self, sample: Any, index: int) -> Any:
        if type(sample) is not Odd:
            return self._transformed(self.opened.with_tail(sample, index))
        with self.witness:  # the whole source may read the sample again
            whole = self.opened.with_tail(sample, index)
        return self._transformed(whole)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    # ---- changes of the source ----

    @property
    def change(self) -> str | None:
        """The place in the source that has changed since it was cached; None without a change."""
        return self.witness.look()

    @property
    def hears_change(self) -> bool:
        """Whether a process of the job has said that the source has changed."""
        counters = self.opened.counters
        return counters is not None and counters.says_changed

    @property
    def changed(self) -> bool:
        """Whether the source has changed since it was cached: another process says so, or it is seen here."""
        if self._keys >= _KEYS_ALONE and self.opened.counters is not None:
            totals, self._keys = self.opened.counters.totals(), 1
            if not totals.hits + totals.misses and not self._is_copy:
                self.opened.counters.say_changed()  # no process reads what set-up has stored
        if self.hears_change:
            return True
        change = self.change
        if change is None and self.witness.doubtful:
            change = self._look_for(self.witness.take_doubtful())
        if change is None:
            return False
        self._give_up(_changed(f"its `{change}`"))
        return True

    def refresh(self) -> None:
        """Serve the source itself, uncached, once it has changed."""
        opened = self.opened
        if (opened.cache is not None or opened.source is not self.source) and self.changed:
            self._serve_from(opened.given_up())

    def made(self, make: Callable[[], _T]) -> _T:
        """What `make` makes of served samples; made anew if the source is said to have changed meanwhile."""
        self.refresh()
        was_cached = self.cache is not None
        result = make()
        return make() if was_cached and self.hears_change and self.cache is not None else result

    def _give_up(self, words: str) -> None:
        """Say to every process that no stored sample may be served, and warn, once on the node."""
        counters = self.opened.counters
        if counters is None:
            return
        if not self._is_copy:
            counters.say_changed()
        if counters.is_first("changed source"):
            log.warning("%s: %s", type(self.source).__name__, words)

    # ---- looks ----

    def due(self) -> Due:
        """What to do in an epoch of a CachedLoader that begins now."""
        self._epoch += 1
        return self._due(self._epoch)

    def _due(self, epoch: int) -> Due:
        counters = self.opened.counters
        if counters is None or not self._can_look:
            return Due()
        elapsed_ns, spent_ns = counters.begin_looks(), counters.looks[1]
        samples = self._schedule.samples(epoch, spent_ns, elapsed_ns)
        is_compared = self._schedule.compares(epoch, elapsed_ns)
        return Due(samples, self._schedule.at_once(spent_ns, elapsed_ns), is_compared)

    @property
    def _can_look(self) -> bool:
        """Whether there are stored samples that can be read again."""
        return self.cache is not None and not self.opened.request.allow_random

    def compared(self, due: Due) -> tuple[Due, int]:
        """What to do, with what has moved in the source's state. Also the nanoseconds that it took to find that out."""
        if not due.is_compared:
            return due, 0
        begun = time.thread_time_ns()  # without the time of other processes: a comparison that seems slow is left out
        moved = tuple(self.witness.differences())
        return due._replace(is_compared=False, differences=(*due.differences, *moved)), time.thread_time_ns() - begun

    def look_around(self, init: Callable[[], Any]) -> None:
        """In a worker: compare the source's state after its `worker_init_fn`. Each worker may have another state."""
        due = self._due(self._epoch)
        is_compared = due.is_compared
        due, _ = self.compared(due)
        init()
        if not is_compared:
            return
        moved = [difference for difference in self.witness.differences() if difference.kind != "machinery"]
        look = self.look(due._replace(samples=0, differences=(*due.differences, *moved)))
        if moved and look.change is None and not look.samples:  # nothing is stored yet that another worker would get
            look = replace(look, change=f"its `{moved[0].path}`")
        self.end_look(look)

    def look(self, due: Due, *, finds_lent: bool = False) -> Look:
        """Read stored samples again in this process, and compare them, as the source's state is compared."""
        self.refresh()
        if not self._can_look:
            return Look()
        due, compare_ns = self.compared(due)
        verdict = judged(due.differences, due.at_once)
        if verdict.change is not None:
            return Look(change=f"its `{verdict.change}`", compare_ns=compare_ns)
        has_moved = verdict.path is not None
        look = self._read_again(
            max(due.samples, verdict.samples), verdict.indices, exact=has_moved, finds_lent=finds_lent
        )
        if look.change is None and look.samples:
            self.witness.excuse_unread(due.differences)
        if look.cause not in ("written", "uncut") and look.change is not None and has_moved:
            look = replace(look, change=f"its `{verdict.path}`", cause="changed")
        return replace(look, hastens=verdict.hastens, compare_ns=compare_ns, machinery=self.witness.machinery)

    def _read_again(
        self, samples: int, indices: Sequence[int] = (), *, exact: bool = False, finds_lent: bool = False
    ) -> Look:
        """Read stored samples again. What that moves is learned, and what others reach is put back."""
        if not samples and not indices:
            return Look()
        common = self._common
        content = common.content() if common else None
        with self.witness, self.witness.reading(), reading(self._heads):
            look = read_again(
                self.opened.source,
                cast(Store, self.cache),
                samples,
                indices,
                exact=exact,
                finds_lent=finds_lent,
                proof=self._proof,
            )
        if common is not None and content is not None:
            place = common.written(content)
            if place is not None:
                return Look(look.samples, look.spent_ns, _WRITES % place, "written")
        return look

    def end_look(self, look: Look, epoch: int | None = None) -> None:
        """Note a look of this or another process: what it took, and what follows from it."""
        epoch = self._epoch if epoch is None else epoch
        self.witness.learn(look.machinery)
        if look.compare_ns:
            self._schedule.note_comparison(look.compare_ns)
        if look.samples:
            self._schedule.load_ns = look.load_ns // look.samples
            self._schedule.end(epoch, look.samples, look.spent_ns)
            self._count_look(look)
        if look.hastens:
            self._schedule.hasten(epoch)
        if look.change is not None:
            words = {
                "random": _RANDOM % look.change,
                "changed": _changed(look.change, self.opened.group.world),
                "written": look.change,
                "uncut": look.change,
            }
            self._give_up(words[look.cause])
            self.refresh()

    def share_with(self, others: Sequence[Any], datasets: Sequence[Any]) -> None:
        """Say what else may reach the source's state: the samplers and the `collate_fn` of a loader.

        Args:
            others: these objects.
            datasets: the wrappers around the source, which these may hold.
        """
        if self._can_look and self._common is None:
            self._common = CommonState(self.source, others, datasets)

    def _count_look(self, look: Look) -> None:
        log.debug("%s: %d stored samples were read again", type(self.source).__name__, look.samples)
        if self.opened.counters is not None:
            self.opened.counters.add_look(look.samples, look.spent_ns)

    def _look_for(self, paths: set[str]) -> str | None:
        """Read samples again because attributes have moved, and it is not known why. Returns one that is a change."""
        if not self._can_look:
            return None
        look = self._read_again(AT_ONCE, exact=True)
        self._count_look(look)
        if look.change is not None:
            return min(paths)
        if look.samples:
            self.witness.excuse(paths)
        elif cast(Store, self.cache).some_stored(1):  # which cannot be read now
            self.witness.doubtful.update(paths)
        return None

    def look_by_itself(self, samples: int) -> None:
        """Where no CachedLoader iterates: look at the first call of a process, and after each pass over the dataset.

        Args:
            samples: how many are asked for now.
        """
        self._take_back()
        if samples and self._can_look and self._served.passes(samples, len(cast(Any, self.source))):
            counters = cast(Counters, self.opened.counters)
            epoch = 1 + counters.totals().served // max(len(cast(Any, self.source)), 1)
            due = self._due(epoch)
            look = self.look(due, finds_lent=epoch == 1 and not self.transforms)
            self.end_look(look, epoch)
            if due.samples:
                self._lent = [] if look.lends else None

    def _lend(self, cache: Store, indices: Sequence[int], keys: Sequence[Any]) -> list[Any]:
        """The source's own samples for its first batch: nobody knows yet whether they are changed in place."""
        by_key = dict(zip(indices, keys, strict=True))
        different = list(by_key)
        ready = int((cache.lookup(np.array(different, dtype=np.int64)) != NO_PLACE).sum())
        loaded = self.load(cache, different, by_key, in_one_call=True)
        by_index = {
            index: sample.sample if type(sample) is Odd else sample
            for index, sample in zip(different, loaded, strict=True)
        }
        # As in a look, stored samples that are read again are hits.
        count(self.opened.counters, hits=ready + len(indices) - len(different), misses=-ready)
        self._lent = [(sample, bits(sample)) for sample in by_index.values()]
        return [by_index[index] for index in indices]

    def _take_back(self) -> None:
        """Before the second batch: give up if the samples of the first, the source's own memory, have been changed."""
        if not self._lent:
            return
        lent, self._lent = self._lent, None
        if any(bits(sample) != before for sample, before in lent):
            self._give_up(_CHANGED_IN_PLACE)

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
        return CachedSource(replace(opened, request=request, source=inner, borrowed=True), self.transform, is_copy=True)

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through."""
        self.opened.close()
        self._serve_from(OpenCache.without(self.opened.request, self.opened.group))

    def __getstate__(self) -> dict[str, Any]:
        # Also for a copy: batch memory belongs to one process.
        return vars(self) | {"_pool": BatchPool(), "_lent": None, "_copied_in": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._is_copy = state.pop("_copied_in") == os.getpid()
        vars(self).update({**state, "_is_copy": self._is_copy or state["_is_copy"]})


class _Served:
    """The samples that a process has served since its last look."""

    def __init__(self) -> None:
        self._process = self._samples = 0

    def passes(self, samples: int, length: int) -> bool:
        """Count samples. Returns whether they are the process's first, or begin another pass over the dataset."""
        is_first = self._process != os.getpid()
        if is_first or self._samples >= length:
            self._process, self._samples = os.getpid(), samples
            return True
        self._samples += samples
        return False


_WAYS_OUT = (
    "From now on all samples are loaded uncached, as changed.\nTo keep the cache, let it hold what stays: give what "
    "changes as transform= of CachedDataset or StocacheDataModule, which runs after the cache, or the label beside the "
    "cached image. For data that grows or is replaced there is RollingCache"
)
_RANDOM = (
    "%s is another one each time it is read: its source is random, and the cache would freeze its first draw. All "
    "samples are loaded uncached.\nGive its deterministic part to CachedDataset, and the random rest as transform="
)
_WRITES = (
    "reading a sample writes into `%s`, which the loader's sampler, batch sampler or collate_fn reads, too. A sample "
    "from the cache would write nothing, so all samples are loaded uncached.\nTo cache it, count elsewhere: in the "
    "sampler, or in transform= of CachedDataset, which runs after the cache"
)

_CHANGED_IN_PLACE = (
    "collate_fn, or the model, changes samples in place that are the dataset's own memory: the next epoch reads them "
    "as changed. All samples are loaded uncached.\nTo cache it, let the dataset give a copy, or change a copy"
)


def _changed(what: str, ranks: int = 1) -> str:
    """The warning of a change; a sample may be another rank's."""
    if ranks > 1 and what.startswith("sample "):
        return f"{what} has changed since it was cached, or the ranks hold different data of it. {_WAYS_OUT}"
    return f"{what} has changed since it was cached. {_WAYS_OUT}"


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

"""A source as this process serves it: samples from the cache where they are READY, else loaded, stored and counted.

A sample is a hit (its slot is READY: a copy of it), a miss (it has a slot that is not READY: it is loaded, and stored
if nobody else is doing so), or a bypass (it has no slot or no room, is odd, or there is no cache: it is loaded). A
loaded sample that differs from the cache's codec is odd: it is served as it is and never stored, with one warning for
the dataset on the node. Random steps come after the cache: first the tail that was cut off the source, then the user's
transform.

A sampler's key reaches the source as it is. If it is an index, it also says where the sample is looked up. A list of
indices is served from the samples if set-up has proved that the source gives their stack for it.

A batch is looked up at once, after the question whether the source has changed (`changes`). The hits of rows are copied
by one gather per field, those of records one by one when they are asked for. Hits are copied again, or loaded, if
samples have changed (`invalidate`) since they were looked up; loaded samples stay. The other samples are loaded in one
call if the source has `__getitems__`. Samples that a batch holds twice, that another job is loading or that cannot be
decoded are served one by one after that. Samples are counted when they have been served. If loading fails, what was
loaded before is stored and counted, and the hits of the batch are not counted.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, get_worker_info

from lightning_stocache.cache.codec import Memory, Parts, SampleMismatchError, UnsupportedSampleError, nbytes_of
from lightning_stocache.cache.counters import Matter, count
from lightning_stocache.cache.shortage import PAUSE_SECONDS, Pace
from lightning_stocache.cache.store import NO_SLOT, UNREADABLE, Store
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.changes import Changes
from lightning_stocache.node.group import job_ranks
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.access import Odd, batch_reader, one_per_index, position_of, positions_of, warn_of_odd
from lightning_stocache.source.generators import Generators, are_draws_evidence
from lightning_stocache.source.samples import stacked
from lightning_stocache.source.transforms import UncuttableError, reading

__all__ = ["CachedSource"]

log = logging.getLogger(__name__)

_NO_KEYS: Mapping[int, Any] = {}
_TRIES = 3  # to copy the hits of a batch while samples change; then they are loaded, so that no reader waits for ever
_AT_ONCE = 1 << 20  # bytes that are copied into a batch, then stored: they are still in the processor's cache


class CachedSource:
    """Serves the samples of a source.

    Args:
        opened: the opened cache, with the source: the user's dataset with its whole transform.
        transform: the user's transform of each sample after the cache.
        original: of the source of which this one is a copy in the same process.

    Raises:
        SampleMismatchError: (all methods that serve, `strict`) a loaded sample differs from the cache's codec.
        TypeError: (`samples`) the source's `__getitems__` does not give one sample per index.
    """

    def __init__(
        self, opened: OpenCache, transform: Callable[[Any], Any] | None = None, *, original: Changes | None = None
    ) -> None:
        self.transform, self.knows_ranks = transform, False
        self.is_view = False
        self.changes = Changes(opened, original)
        self._pool = BatchPool()
        self._pace = None if opened.request.dir is None else Pace()

    @property
    def opened(self) -> OpenCache:
        """The cache and its source as they are served now."""
        return self.changes.opened

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
        self.changes.refresh()
        with self.changes.witness:
            position, listed = position_of(key), self._listed(key)
            cache = self.cache
            if position is None and (listed is None or cache is None):
                self.changes.note_key(key)
                return self._uncached(self.source, [key], is_whole=True)[0]
            if cache is None:
                return self._uncached(self.opened.source, [key])[0]
            if self.changes.lends and position is not None:
                return self._lend(cache, [position], [key])[0]
            if position is None:
                samples = list(self._serve(cache, cast("list[int]", listed)))
                sample = None if any(type(each) is Odd for each in samples) else stacked(samples)
            else:
                sample = self._serve_one(cache, position, key)
            if self.changes.source_has_changed or sample is None:
                self.changes.refresh()
                return self._uncached(self.source, [key], is_whole=True)[0]
            return self._transformed(sample) if position is None else self._finished(sample, position)

    def check_keys(self, keys: Any) -> None:
        """Warn if one of the keys that a loader's sampler has drawn is no index."""
        if self.cache is None or self.changes.has_other_keys or not isinstance(keys, Sequence | torch.Tensor):
            return
        if set(map(type, keys)) == {int}:
            return
        for key in keys:
            if position_of(key) is None and self._listed(key) is None:
                self.changes.warn_of_key(key)
                return

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
        self.changes.refresh()
        with self.changes.witness:
            sample = source.__getitem__(*key, **options)
            count(self.opened.counters, bypasses=1)
            return self._transformed(sample)

    def samples(self, keys: Sequence[Any]) -> Any:
        """The finished samples of a batch, each made when it is asked for, so that they are not all in memory at once.

        Without a cache and without transforms they are the result of the source's own `__getitems__`.
        """
        self.changes.refresh()
        are_plain = set(map(type, keys)) == {int}
        positions = list(keys) if are_plain else [each for each in map(position_of, keys) if each is not None]
        are_indices = len(positions) == len(keys)
        if positions and not are_indices and self.cache is not None and batch_reader(self.source) is None:
            return [self.sample(key) for key in keys]  # the source loads each by itself
        with self.changes.witness:
            if are_indices and not self.knows_ranks:
                self.look_at_ranks()
            cache = self.cache
            if not are_indices:
                other = next(key for key in keys if position_of(key) is None)
                self.changes.note_key(other, len(keys) - len(positions))
            elif cache is not None and self.changes.lends:
                return self._lend(cache, positions, keys)
            elif cache is not None:
                others = {} if are_plain else dict(zip(positions, keys, strict=True))
                unfinished = self._serve(cache, positions, others)
                if not self.changes.source_has_changed:
                    return self._each_finished(unfinished, positions)
                self.changes.refresh()  # before the tail draws: the whole source draws for this batch
            source = self.opened.source if are_indices else self.source
            if (read := batch_reader(source)) is None:
                return self._uncached(source, keys, is_whole=not are_indices)
            start = time.perf_counter_ns()
            samples = read(cast(Any, keys))
            count(self.opened.counters, bypasses=len(keys), source_ns=time.perf_counter_ns() - start)
            if are_indices:
                return self._each_finished(samples, positions)
            return samples if self.transform is None else (self._transformed(sample) for sample in samples)

    def look_at_ranks(self) -> None:
        """Warn once, on rank zero, if the ranks of a job do not share the cache.

        Processes have counters in common. Before `share` there are none, so the first worker warns for all.
        """
        self.knows_ranks = True
        world, rank = job_ranks()
        worker = get_worker_info()
        if rank or self.opened.group.world >= world or (self.opened.counters is None and worker and worker.id):
            return
        if self._is_first("ranks alone"):
            log.warning(
                "each of %d ranks %s: after init_process_group, call share() of the dataset on every rank, and give "
                "its loader a DistributedSampler (or CachedLoader locality=True), without which each trains on "
                "all samples",
                world,
                "loads its samples uncached" if self.cache is None else "has a cache of its own",
            )

    def load_into(self, batch: Memory, indices: list[int], rows: Sequence[int]) -> dict[int, Any]:
        """Serve samples that were not READY a moment ago into their rows of a batch, untransformed, and store them.

        Returns:
            The odd samples, by row; the content of their rows is undefined.
        """
        with self.changes.witness:
            cache = cast(Store, self.opened.cache)
            slots = cache.lookup(np.array(indices, dtype=np.int64), verify=True)
            once = len(set(indices)) == len(indices)
            samples = None
            try:
                if once and (slots == NO_SLOT).all() and not cache.divide(indices)[1]:
                    samples = self.load(cache, indices, in_one_call=True, into=_Rows(batch, rows))
            finally:
                cache.release(indices)
            if samples is None:  # some are READY by now (or verified on a disk), drawn twice, or loaded by another job
                samples = list(self._serve(cache, indices))
                fitting = [number for number, sample in enumerate(samples) if type(sample) is not Odd]
                if fitting:
                    parts = [cache.codec.encode(samples[number], indices[number]) for number in fitting]
                    cache.codec.put_many(batch, [rows[number] for number in fitting], parts)
        return {row: sample.sample for row, sample in zip(rows, samples, strict=True) if type(sample) is Odd}

    def load_ahead(self, index: int) -> bool:
        """Load a sample before it is asked for. Returns whether there is room for more."""
        self.changes.refresh()
        if (cache := self.cache) is None:
            return False
        with self.changes.witness:
            try:
                mine, _ = cache.divide([index])
                return not mine or cache.has_room(self.load(cache, mine, served=False)[0])
            finally:
                cache.release([index])

    def count_hits(self, samples: int) -> None:
        """Count samples that the caller has copied out of the cache."""
        if (cache := self.opened.cache) is not None:
            count(self.opened.counters, hits=samples, bytes_from_cache=samples * cache.codec.nbytes)

    def _serve_one(self, cache: Store, index: int, key: Any) -> Any:
        """The unfinished sample of an index, with the key for the source, which raises outside of the dataset."""
        start = time.perf_counter_ns()
        seen = cache.changes
        while (slot := cache.ready_slot(index, verify=True)) == NO_SLOT:
            try:
                if not (cache.divide([index])[1] and cache.wait(index)):
                    return self.load(cache, [index], {index: key})[0]
            finally:
                cache.release([index])
        slots = np.array([slot])
        [sample] = cache.read(slots, self._pool.lend)
        if sample is UNREADABLE or cache.changes != seen:
            return self.load(cache, [index], {index: key})[0]
        nbytes = cache.stored_bytes(slots)
        gather_ns = time.perf_counter_ns() - start
        count(self.opened.counters, hits=1, bytes_from_cache=nbytes, gather_ns=gather_ns)
        return sample

    def _serve(self, cache: Store, indices: list[int], keys: Mapping[int, Any] = _NO_KEYS) -> Iterable[Any]:
        """The unfinished samples of a batch. Samples that are not READY are loaded now, records read when asked for.

        `keys` has, for some indices, the key that the source gets.
        """
        start = time.perf_counter_ns()
        rows = cache.codec.is_fixed
        positions = np.array(indices, dtype=np.int64)
        for _ in range(_TRIES):
            seen = cache.changes
            slots = cache.lookup(positions, verify=True)
            are_ready = slots != NO_SLOT
            hits = slots[are_ready]
            if not len(hits):
                return self._load_missing(cache, indices, keys)
            ready: Iterable[Any] = cache.read(hits, self._pool.take if rows else self._pool.lend)
            if cache.changes == seen:
                break
        else:  # samples change all the time
            return self._load_missing(cache, indices, keys)
        nbytes = cache.stored_bytes(hits)
        gather_ns = time.perf_counter_ns() - start
        loaded: list[Any] = []
        if len(hits) < len(indices):
            loaded = self._load_missing(cache, positions[~are_ready].tolist(), keys)
        # Only now: if loading fails or is interrupted, nobody gets the hits, and the batch may come again.
        count(self.opened.counters, hits=len(hits), bytes_from_cache=nbytes, gather_ns=gather_ns)
        if not rows:
            return self._decoded(cache, indices, keys, are_ready, iter(ready), iter(loaded))
        if not loaded:
            return ready
        for position, sample in zip(np.flatnonzero(are_ready).tolist(), ready, strict=True):
            loaded.insert(position, sample)
        return loaded

    def _load_missing(self, cache: Store, missing: list[int], keys: Mapping[int, Any]) -> list[Any]:
        """The samples of a batch that are not READY, loaded unless another job does it."""
        try:
            here = list(dict.fromkeys(cache.divide(missing)[0]))
            samples = self.load(cache, here, keys, in_one_call=True) if here else []
        finally:
            cache.release(missing)
        if len(here) == len(missing):
            return samples
        by_index = dict(zip(here, samples, strict=True))
        # Repeated samples, and those that another job was loading, may be READY by now.
        return [
            by_index.pop(index) if index in by_index else self._serve_one(cache, index, keys.get(index, index))
            for index in missing
        ]

    def _decoded(
        self,
        cache: Store,
        indices: list[int],
        keys: Mapping[int, Any],
        are_ready: npt.NDArray[np.bool_],
        hits: Iterator[Any],
        loaded: Iterator[Any],
    ) -> Iterator[Any]:
        """The samples of a batch in its order. Records are decoded as the caller iterates."""
        gather_ns = 0
        for index, is_ready in zip(indices, are_ready.tolist(), strict=True):
            if not is_ready:
                yield next(loaded)
                continue
            start = time.perf_counter_ns()
            sample = next(hits)
            gather_ns += time.perf_counter_ns() - start
            if sample is UNREADABLE:
                count(self.opened.counters, hits=-1)
                sample = self._serve_one(cache, index, keys.get(index, index))
            yield sample
        count(self.opened.counters, gather_ns=gather_ns)

    def _uncached(self, source: Any, keys: Sequence[Any], *, is_whole: bool = False) -> list[Any]:
        """Finished samples, one after the other as without a cache, counted when all have come.

        They are those of the user's dataset if that `is_whole`, else of its part that is cached.
        """
        start = time.perf_counter_ns()
        if self.transform is None and (is_whole or self.opened.tail is None):
            samples = [source[key] for key in keys]
            source_ns = time.perf_counter_ns() - start
        else:
            samples, source_ns = [], 0
            for key in keys:
                start = time.perf_counter_ns()
                sample = source[key]
                source_ns += time.perf_counter_ns() - start
                samples.append(self._transformed(sample) if is_whole else self._finished(sample, key))
        count(self.opened.counters, bypasses=len(samples), source_ns=source_ns)
        return samples

    def _lend(self, cache: Store, indices: Sequence[int], keys: Sequence[Any]) -> list[Any]:
        """The source's own samples for an epoch's first batch: nobody knows yet whether they are changed in place."""
        by_key = dict(zip(indices, keys, strict=True))
        different = list(by_key)
        ready = int((cache.lookup(np.array(different, dtype=np.int64)) != NO_SLOT).sum())
        loaded = self.load(cache, different, by_key, in_one_call=True)
        samples = [sample.sample if type(sample) is Odd else sample for sample in loaded]
        # As in a look, stored samples that are read again are hits.
        count(self.opened.counters, hits=ready + len(indices) - len(different), misses=-ready)
        self.changes.lend(samples)
        by_index = dict(zip(different, samples, strict=True))
        return [by_index[index] for index in indices]

    # ---- loading and storing ----

    def load(
        self,
        cache: Store,
        indices: list[int],
        keys: Mapping[int, Any] = _NO_KEYS,
        *,
        in_one_call: bool = False,
        into: _Rows | None = None,
        served: bool = True,
    ) -> list[Any]:
        """Load samples, then store them all: storing costs half as much when its code and memory are warm.

        What has been loaded before the source raises is stored, too.

        Args:
            cache: where they are stored.
            indices: the indices of the samples.
            keys: for some indices, the key that the source gets.
            in_one_call: whether the source's `__getitems__` loads them, if it has one.
            into: the rows of a batch into which the samples are copied, except odd ones.
            served: whether the samples were asked for; else they count as fills alone.
        """
        seen = self.changes.seen
        if seen != cache.invalidations:
            self.changes.warn_of_copies()
        asked = [keys.get(index, index) for index in indices] if keys else indices
        samples: list[Any] = []
        placed = np.flatnonzero(cache.have_slots(indices)).tolist()
        if len(placed) < len(indices):
            self._note_outside(cache, indices)
        # A sample without a slot cannot be frozen, and with other threads a generator that has moved is no evidence.
        is_watched = placed and not self.opened.request.freeze_random and are_draws_evidence()
        generators = Generators() if is_watched else None  # anew: a forked worker has no CUDA, whatever its parent had
        before = {} if generators is None else generators.state()
        start = time.perf_counter_ns()
        try:
            self._load_from_source(samples, indices, asked, in_one_call=in_one_call)
        finally:
            source_ns = time.perf_counter_ns() - start
            if any(head.is_strayed for head in self.changes.heads):  # nobody knows for which sample it was called
                self.changes.give_up("strayed")
                samples[:] = map(_odd_without_places, asked, samples)
            elif samples and generators is not None and generators.moved(before) and are_draws_evidence():
                self._leave_random(cache, asked, samples)
            # Without a slot there is nothing to encode, unless for a batch, or to see if the tail can finish it.
            if self.changes.proof is not None or into is not None or self.opened.request.strict:
                placed = list(range(len(samples)))
            self._store(cache, indices, asked, samples, placed, into, source_ns, seen, served=served)
        return samples

    def _load_from_source(self, samples: list[Any], indices: list[int], keys: list[Any], *, in_one_call: bool) -> None:
        """Add the samples of some keys to a list, which after an error has those that were loaded before."""
        source: Any = self.opened.source
        proof = self.changes.proof
        read = batch_reader(source) if in_one_call else None
        try:
            with reading(self.changes.heads):
                if read is not None:
                    samples += self._read(lambda some: one_per_index(read(some), len(some), source), indices, keys)
                elif proof is None:
                    for key in keys:
                        samples.append(source[key])
                else:
                    for index, key in zip(indices, keys, strict=True):
                        samples += self._read(lambda some: [source[some[0]]], [index], [key])
            if proof is not None:
                proof.go_on(indices)
        except UncuttableError as error:
            self.changes.give_up("uncut", str(error))
            samples[:] = [_odd_without_places(key, None) for key in keys]

    def _note_outside(self, cache: Store, numbers: list[int]) -> None:
        if min(numbers) < 0 or max(numbers) >= cache.length:
            outside = [number for number in numbers if not 0 <= number < cache.length]
            self.changes.note_key(outside[0], len(outside))

    def _read(self, read: Callable[[list[Any]], list[Any]], indices: list[int], keys: list[Any]) -> list[Any]:
        """Read samples of the source.

        A split source must have called its head once for each place of the tail, else the tail would run too often or
        not at all: such a sample is odd. A sample that lacks a place of the tail is refused later, by the codec.

        Raises:
            UncuttableError: the cut is wrong.
        """
        if self.changes.proof is None:
            return read(keys)
        samples, objection = self.changes.proof.read(partial(read, keys), indices)
        if objection is None or any(head.is_strayed for head in self.changes.heads):  # `load` leaves these
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
        return [_odd_without_places(keys[0], samples[0])]

    def _store(
        self,
        cache: Store,
        indices: list[int],
        keys: list[Any],
        samples: list[Any],
        numbers: list[int],
        into: _Rows | None,
        source_ns: int,
        seen: int,
        *,
        served: bool,
    ) -> None:
        """Store and count samples, which may be fewer than indices. An odd sample becomes an `Odd` in the list.

        `numbers` are the positions of those that are encoded, rising; the others have no slot.
        """
        start = time.perf_counter_ns()
        codec = cache.codec
        pauses = self._pace is not None and self._pace.pauses
        fills = misses = store_ns = 0
        numbers = [number for number in numbers if number < len(samples)]
        nbytes = (len(samples) - len(numbers)) * codec.nbytes
        step = max(_AT_ONCE // max(codec.nbytes, 1), 1)
        for first in range(0, len(numbers), step):
            chunk = numbers[first : first + step]
            fitting = self._encoded(cache, keys, samples, chunk)
            for number in chunk if len(fitting) < len(chunk) else ():
                if number not in fitting:
                    sample = samples[number]
                    nbytes += codec.least_bytes(sample.sample if type(sample) is Odd else sample)
            contents = _contents(cache, fitting, into)
            nbytes += nbytes_of(contents)
            stored = [indices[number] for number in fitting]
            begin = time.perf_counter_ns()
            if pauses:
                misses += sum(map(cache.has_slot, stored))
            else:
                outcomes = cache.put(stored, contents, seen)
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

    def _encoded(
        self, cache: Store, keys: Sequence[Any], samples: list[Any], numbers: Sequence[int]
    ) -> dict[int, Parts]:
        """The codec's parts of the samples that can be stored, by their numbers in the list."""
        together = [samples[number] for number in numbers]
        alike = cache.codec.encode_all(together) if len(together) > 1 else None
        if alike is not None and cache.has_room(together[0]):
            return dict(zip(numbers, alike, strict=True))
        encoded = {number: self._encode(cache, keys[number], samples, number) for number in numbers}
        return {number: parts for number, parts in encoded.items() if parts is not None}

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

    def _is_first(self, matter: Matter) -> bool:
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
        with self.changes.witness:  # the whole source may read the sample again
            whole = self.opened.with_tail(sample, index)
        return self._transformed(whole)

    def _transformed(self, sample: Any) -> Any:
        return sample if self.transform is None else self.transform(sample)

    # ---- other objects that serve the same cache ----

    def view(self, transform: Callable[[Any], Any] | None) -> CachedSource:
        """A view that serves the same cache with another transform, and does not close the cache."""
        view = copy.copy(self)
        view.transform, view.is_view = transform, True
        return view

    def around(self, source: Dataset[Any]) -> CachedSource:
        """A view that serves a copy of the source, which may change by itself, from the same cache."""
        self.changes.refresh()
        opened = self.opened
        request = replace(self.opened.request, source=source)
        inner = source if opened.source is self.source else opened.source
        borrowed = replace(opened, request=request, source=inner, borrowed=True)
        return CachedSource(borrowed, self.transform, original=self.changes)

    def close(self) -> None:
        """Give the cache up in this process; from then on samples pass through."""
        without = OpenCache.without(self.opened.request, self.opened.group)
        if self.is_view:
            self.changes = Changes(without)
        else:
            self.opened.close()
            self.changes.serve(without)
        self._pool = BatchPool()

    def __getstate__(self) -> dict[str, Any]:
        # Also for a copy: batch memory belongs to one process.
        return vars(self) | {"_pool": BatchPool()}


def _odd_without_places(key: Any, sample: Any) -> Odd:
    return Odd(key, sample, has_all_places=False)


class _Rows(NamedTuple):
    """Some rows of a batch.

    Args:
        memory: the memory of the batch.
        numbers: the number of the row of each sample.
    """

    memory: Memory
    numbers: Sequence[int]


def _contents(cache: Store, fitting: dict[int, Parts], into: _Rows | None) -> Sequence[Sequence[memoryview]]:
    """The bytes of encoded samples, copied to their rows if there is a batch."""
    codec = cache.codec
    parts = list(fitting.values())
    count = len(parts)
    if not parts or (into is None and (count < 2 or not cache.codec.is_fixed)):
        return [codec.contents(part) for part in parts]
    if into is None:  # a copy of many small samples at once costs less than a view of each
        memory = codec.rows([np.empty(size, dtype=np.uint8) for size in codec.sizes(count)], count)
        into = _Rows(memory, range(count))
    else:
        into = _Rows(into.memory, [into.numbers[number] for number in fitting])
    copied: Sequence[Sequence[memoryview]] = codec.put_many(into.memory, into.numbers, parts)
    return copied

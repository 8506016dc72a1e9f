"""Samples that are not to be read from a cache: loaded, checked, stored, and counted.

Each is a miss if it has a slot, else a bypass, as is what finds no room in its slot. What is not of the cache's codec
is odd: a bypass, never stored, with one warning for the dataset on the node. What has been loaded before the source
raised is kept, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_stocache.cache.codec import Parts, SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.counters import Counters, Matter
from lightning_stocache.cache.rows import FieldRows
from lightning_stocache.cache.shortage import PAUSE_SECONDS, Pace
from lightning_stocache.cache.store import Store, gathers
from lightning_stocache.source.access import Odd, one_per_index, warn_of_odd
from lightning_stocache.source.generators import Generators
from lightning_stocache.source.probe import Recheck

__all__ = ["Misses"]

log = logging.getLogger(__name__)

_AT_ONCE = 1 << 20  # bytes that are copied into a batch, then stored: they are still in the processor's cache


class Misses:
    """Loads and stores, in one process.

    Args:
        source: what samples are loaded from.
        cache: where they are stored; it is open.
        counters: where they are counted.
        strict: whether an odd sample is an error.
        frozen: whether the user wants a random source cached as it is: then no sample is read again.
        pace: of a cache on a disk; storing pauses where it is slower than loading.

    Raises:
        SampleMismatchError: (`strict`) a sample differs from the cache's codec.
    """

    def __init__(
        self,
        source: Dataset[Any],
        cache: Store,
        counters: Counters | None,
        strict: bool = False,
        frozen: bool = False,
        pace: Pace | None = None,
    ) -> None:
        self.source, self.cache = source, cache
        self._counters, self._strict = counters, strict
        self._pace = pace
        self._recheck = None if frozen else Recheck(source, partial(_is_first, counters, "random sample"))

    def load(
        self,
        indices: list[int],
        read: Callable[[list[int]], Any] | None = None,
        *,
        batch: FieldRows | None = None,
        rows: Sequence[int] = (),
        served: bool = True,
    ) -> list[Any]:
        """Load samples, then store them all: storing costs half as much when its code and memory are warm.

        Args:
            indices: of the samples.
            read: loads all of them in one call, as the source's `__getitems__` does.
            batch: where else the samples are wanted, but for odd ones.
            rows: theirs in the batch.
            served: whether somebody has asked for them; else they are filled, and no misses.

        Raises:
            TypeError: `read` does not give one sample per index.
        """
        samples: list[Any] = []
        source_ns = 0
        # Made anew: a forked worker has no CUDA, whatever its parent had. What has no slot cannot be frozen.
        watched = self._recheck is not None and any(map(self.cache.has_place, indices))
        generators = Generators() if watched else None
        before = {} if generators is None else generators.state()
        try:
            start = time.perf_counter_ns()
            if read is not None:
                samples += one_per_index(read(indices), len(indices), self.source)
            for index in indices[len(samples) :]:
                samples.append(self.source[index])
                source_ns = time.perf_counter_ns() - start
            source_ns = time.perf_counter_ns() - start
        finally:
            if samples and generators is not None and generators.moved(before):
                self._leave_random(indices, samples)
            try:
                self._keep(indices[: len(samples)], samples, source_ns, served, batch, rows)
            finally:
                self.cache.turns.release(indices)
        if self._recheck is not None:
            for index, sample in zip(indices, samples, strict=True):
                if type(sample) is not Odd and self.cache.has_place(index):
                    self._recheck.after(index, sample)
        return samples

    def _keep(
        self,
        indices: list[int],
        samples: list[Any],
        source_ns: int,
        served: bool,
        batch: FieldRows | None,
        rows: Sequence[int],
    ) -> None:
        """Store samples and count them at once; an odd one becomes an `Odd` in the list."""
        cache, fills, misses, nbytes, store_ns = self.cache, 0, 0, 0, 0
        pauses, start = self._pace is not None and self._pace.pauses, time.perf_counter_ns()
        step = max(_AT_ONCE // max(cache.codec.nbytes, 1), 1)
        try:
            for first in range(0, len(samples), step):
                numbers, fitting = range(first, min(first + step, len(samples))), dict[int, Parts]()
                try:
                    self._check(numbers, indices, samples, fitting)
                finally:  # also what comes before one that is an error
                    contents = self._contents(fitting, batch, rows)
                    nbytes += sum(part.nbytes for parts in contents for part in parts)
                    nbytes += sum(cache.codec.least_bytes(_plain(samples[k])) for k in numbers if k not in fitting)
                    begun, wanted = time.perf_counter_ns(), [indices[number] for number in fitting]
                    if pauses:
                        misses += sum(map(cache.has_place, wanted))
                    else:
                        for stored in cache.put(wanted, contents):
                            misses += stored is not None
                            fills += stored is True
                    store_ns += time.perf_counter_ns() - begun
        except BaseException:
            served = False
            raise
        finally:
            if self._counters is not None:
                self._counters.add(
                    misses=misses * served,
                    bypasses=(len(samples) - misses) * served,
                    fills=fills,
                    bytes_from_source=nbytes * served,
                    source_ns=source_ns,
                    fill_ns=time.perf_counter_ns() - start,
                )
        if self._pace is not None and self._pace.note(source_ns, store_ns) and _is_first(self._counters, "slow disk"):
            log.warning(
                "the disk of the cache takes longer to store samples than they take to load: storing pauses for %.0f s",
                PAUSE_SECONDS,
            )

    def _check(self, numbers: range, indices: list[int], samples: list[Any], fitting: dict[int, Parts]) -> None:
        """Encode those of the samples that are of the cache's codec, by their numbers; the others become `Odd`."""
        codec, has_room = self.cache.codec, self.cache.has_room
        for number in numbers:
            index, sample = indices[number], samples[number]
            if type(sample) is Odd or (not has_room(sample) and codec.is_alike(sample)):
                continue
            try:
                fitting[number] = codec.encode(sample, index)
            except (SampleMismatchError, UnsupportedSampleError) as error:
                if self._strict:
                    raise
                if _is_first(self._counters, "odd sample"):
                    warn_of_odd(self.source, str(error))
                samples[number] = Odd(index, sample, codec.is_alike(sample))

    def _contents(
        self, fitting: dict[int, Parts], batch: FieldRows | None, rows: Sequence[int]
    ) -> Sequence[Sequence[memoryview]]:
        """The bytes of encoded samples, which are copied to their rows of a batch if there is one."""
        parts, codec, count = list(fitting.values()), self.cache.codec, len(fitting)
        if batch is not None and parts:
            return batch.put_many([rows[number] for number in fitting], parts)
        if count < 2 or not gathers(self.cache):
            return [codec.contents(part) for part in parts]
        # A copy of many small ones at once costs less than a view of each.
        memory = [np.empty(size, dtype=np.uint8) for size in codec.sizes(count)]
        copied: list[list[memoryview]] = codec.rows(lambda: memory, count).put_many(range(count), parts)
        return copied

    def _leave_random(self, indices: list[int], samples: list[Any]) -> None:
        """Have samples pass through, of which some drew random numbers: they would be frozen."""
        if _is_first(self._counters, "random sample"):
            log.warning(
                "%s draws random numbers for some samples, as for one of %s: batches that hold such are not cached.\n"
                "Give its deterministic part to CachedDataset, and the random rest as transform=",
                type(self.source).__name__,
                indices[: len(samples)][:8],
            )
        for number, (index, sample) in enumerate(zip(indices, samples, strict=False)):
            samples[number] = Odd(index, sample, self.cache.codec.is_alike(sample))


def _plain(sample: Any) -> Any:
    return sample.sample if type(sample) is Odd else sample


def _is_first(counters: Counters | None, matter: Matter) -> bool:
    """Whether nobody on the node has said this yet. No method: a `Recheck` would hold it, and with it the cache."""
    return counters is None or counters.is_first(matter)

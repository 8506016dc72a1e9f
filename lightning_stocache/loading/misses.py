"""Samples that are not to be read from a cache: loaded, checked, stored, and counted.

Each is a miss if it has a slot, else a bypass. What is not of the cache's spec is odd: a bypass, never stored, with one
warning for the dataset on the node. What has been loaded before the source raised is kept, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.data import Dataset

from lightning_stocache.cache.counters import Counters, Matter
from lightning_stocache.cache.spec import SampleMismatchError
from lightning_stocache.cache.store import SampleStore
from lightning_stocache.loading.generators import Generators
from lightning_stocache.loading.interrupts import LetThrough
from lightning_stocache.loading.odd import Odd, warn_of_odd
from lightning_stocache.loading.recheck import Recheck

__all__ = ["Misses", "Store"]

log = logging.getLogger(__name__)

Store = Callable[[int, Any], bool]
"""Checks the k-th of some samples and stores it, if its slot is nobody else's now; whether it was stored."""


class Misses:
    """Loads and stores, in one process.

    Args:
        source: what samples are loaded from.
        cache: where they are stored; it is open.
        counters: where they are counted.
        strict: whether an odd sample is an error.
        frozen: whether the user wants a random source cached as it is: then no sample is read again.

    Raises:
        SampleMismatchError: (`strict`) a sample differs from the cache's spec.
    """

    def __init__(
        self,
        source: Dataset[Any],
        cache: SampleStore,
        counters: Counters | None,
        strict: bool = False,
        frozen: bool = False,
    ) -> None:
        self.source, self.cache = source, cache
        self._counters, self._strict = counters, strict
        self._recheck = None if frozen else Recheck(source, partial(self._is_first, "random sample"))
        self._frozen = frozen

    def load(self, indices: list[int], store: Store | None = None) -> list[Any]:
        """Load samples, then store them all: storing costs half as much when its code and memory are warm."""
        samples, spent, served = [], [], True
        # Made anew: a forked worker has no CUDA, whatever its parent had. What has no slot cannot be frozen.
        watched = not self._frozen and any(map(self.cache.has_place, indices))
        generators = Generators() if watched else None
        before = None if generators is None else generators.state()
        try:
            with LetThrough():
                for index in indices:
                    start = time.perf_counter_ns()
                    samples.append(self.source[index])
                    spent.append(time.perf_counter_ns() - start)
        except KeyboardInterrupt:
            served = False
            raise
        finally:
            if samples and generators is not None and generators.state() != before:
                self._leave_random(indices, samples)
            self.keep(indices[: len(spent)], samples, sum(spent), store, served)
        for index, sample in zip(indices, samples, strict=True):
            if self._recheck is not None and type(sample) is not Odd and self.cache.has_place(index):
                self._recheck.after(index, sample)
        return samples

    def keep(
        self,
        indices: list[int],
        samples: list[Any],
        source_ns: int,
        store: Store | None = None,
        served: bool = True,
    ) -> None:
        """Store samples and count them at once; an odd one becomes an `Odd` in the list."""
        cache, kept, fills, misses = self.cache, 0, 0, 0
        start = time.perf_counter_ns()
        try:
            for number, (index, sample) in enumerate(zip(indices, samples, strict=False)):
                kept += 1
                if type(sample) is Odd:
                    continue
                try:
                    fills += cache.fill(index, sample) if store is None else store(number, sample)
                    misses += cache.has_place(index)
                except SampleMismatchError as error:
                    self._let_pass(error)
                    samples[number] = Odd(index, sample, cache.codec.is_alike(sample))
        finally:
            if self._counters is not None:
                self._counters.add(
                    misses=misses * served,
                    bypasses=(kept - misses) * served,
                    fills=fills,
                    bytes_from_source=kept * cache.codec.nbytes * served,
                    source_ns=source_ns,
                    fill_ns=time.perf_counter_ns() - start,
                )

    def _leave_random(self, indices: list[int], samples: list[Any]) -> None:
        """Have samples pass through, of which some drew random numbers: they would be frozen."""
        if self._is_first("random sample"):
            log.warning(
                "%s draws random numbers for some samples, as for one of %s: batches that hold such are not cached.\n"
                "Give its deterministic part to CachedDataset, and the random rest as transform=",
                type(self.source).__name__,
                indices[: len(samples)][:8],
            )
        for number, (index, sample) in enumerate(zip(indices, samples, strict=False)):
            samples[number] = Odd(index, sample, self.cache.codec.is_alike(sample))

    def _let_pass(self, error: SampleMismatchError) -> None:
        """Say, once for this dataset on the node, that an odd sample is not cached; or raise it."""
        if self._strict:
            raise error
        if self._is_first("odd sample"):
            warn_of_odd(self.source, str(error))

    def _is_first(self, matter: Matter) -> bool:
        return self._counters is None or self._counters.is_first(matter)

"""The maker of batches, run by whoever makes one: a worker, or the trainer's process where there are no workers.

A batch of rows is made in place: the samples that are READY are gathered into the memory of the batch, the others are
loaded into their rows. Any other batch is collated from its samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.counters import Served, count, noted, served_in
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_PLACE, Store, gathers
from lightning_stocache.loading.arena import Slot
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collate import BatchRows, Collator
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.source.samples import is_plain
from lightning_stocache.torch_internals import collate, default_collate_fn_map

__all__ = ["Maker"]


class Maker:
    """Makes batches.

    Args:
        collate_fn: the loader's collate function.
        pinned: whether the memory of batches is page-locked.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] = default_collate, *, pinned: bool = False) -> None:
        self._collate_fn = collate_fn
        self._pinned = pinned
        self.served: Served = (0, 0, 0)
        """Where the samples of the last batch came from."""
        self._collator: tuple[SampleSpec, Collator | None] | None = None

    def make(self, cached: CachedSource, keys: Any, memory: Slot | BatchPool) -> Any:
        """The batch of these keys, whose samples are counted.

        Args:
            cached: the cached source.
            keys: indices, int64 `[samples]`, or a sampler's keys.
            memory: where to make it, as far as there is room.
        """
        indices = keys.tolist() if isinstance(keys, np.ndarray) else keys

        def make() -> Any:
            with noted(cached.opened.counters) as note:
                batch = self._from_rows(cached, keys, indices, memory) if isinstance(keys, np.ndarray) else None
                if batch is None:
                    batch = self._collated(cached, indices, memory)
            self.served = served_in(note)
            return batch

        return cached.changes.make_current(make)

    def _from_rows(self, cached: CachedSource, keys: Integers, indices: list[int], memory: Slot | BatchPool) -> Any:
        """A batch of rows, made in place; None if it is none, or if most of what is missing has no slot."""
        cache = cached.cache
        samples = len(keys)
        if cache is None or not samples or not gathers(cache) or cached.transforms:
            return None
        if self._collate_fn is not default_collate:
            return None
        places = cache.lookup(keys)
        missing = np.flatnonzero(places == NO_PLACE)
        if 2 * np.count_nonzero(cache.have_places(keys[missing])) < len(missing):
            return None  # to copy samples into rows, and store none of them, would cost more than to collate them
        collator = self._collator_of(cache)
        if collator is None:
            return None
        if isinstance(memory, Slot):
            memory.clear()
        codec = cache.codec
        rows: list[int] = missing.tolist()
        odd: dict[int, Any] = {}
        fields: Memory = memory.take(collator.sizes(samples))
        start = time.perf_counter_ns()
        if len(rows) < samples:
            # `gather` reads each place: for what is missing that of a READY sample, so that no empty page is touched.
            places[missing] = places.max()
            cache.gather(places, fields)
            count(cached.opened.counters, gather_ns=time.perf_counter_ns() - start)
        if rows:
            odd = cached.load_into(codec.rows(fields, samples), [indices[row] for row in rows], rows)
        cached.count_hits(samples - len(rows))
        if odd:
            return default_collate([odd.get(row, sample) for row, sample in enumerate(codec.split(fields, samples))])
        return collator.batch(fields, samples)

    def _collated(self, cached: CachedSource, keys: Any, memory: Slot | BatchPool) -> Any:
        samples = cached.samples(keys)
        if self._collate_fn is not default_collate:
            return self._collate_fn(list(samples))
        if not isinstance(memory, Slot):
            return default_collate(list(samples) if cached.transforms else samples)
        memory.clear()
        rows = BatchRows(memory, len(keys))
        samples = [rows.put(number, sample) for number, sample in enumerate(samples)]
        if not samples or not is_plain(samples[0]):
            return default_collate(samples)
        return collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: rows.stack})

    def _collator_of(self, cache: Store) -> Collator | None:
        """The collator of a cache; None if `default_collate` makes something else of its samples."""
        if self._collator is None or self._collator[0] is not cache.codec:
            try:
                collator = Collator(cache.codec, self._pinned)
            except (TypeError, RuntimeError):
                collator = None
            self._collator = cache.codec, collator
        return self._collator[1]

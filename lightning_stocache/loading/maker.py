"""The maker of batches, run by the process that makes one: a worker, or the trainer's process.

A batch of rows is made in place: the samples that are READY are gathered into the memory of the batch, the others are
loaded into their rows. Where nothing is missing, several small batches are gathered together, as a block. Any other
batch is collated from its samples.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.counters import Served, count, noted, served_in
from lightning_stocache.cache.gather_pool import GatherPool
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import NO_SLOT, Store
from lightning_stocache.loading.arena import Slot
from lightning_stocache.loading.batch_pool import BatchPool
from lightning_stocache.loading.collate import BatchRows, Collator
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.source.samples import is_plain
from lightning_stocache.torch_internals import collate, default_collate_fn_map, pinned

__all__ = ["Maker"]


class Maker:
    """Makes batches.

    Args:
        collate_fn: the loader's collate function.
        pins: whether batches lie in page-locked memory.

    Attributes:
        served: where the samples of the last batch of `make` came from.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any] = default_collate, *, pins: bool = False) -> None:
        self.served: Served = (0, 0, 0)
        self._collate_fn = collate_fn
        self._pins = pins
        self._pool = BatchPool(pinned=pins)
        self._collator: tuple[SampleSpec | None, Collator | None] = (None, None)  # of the last cache

    def block(self, cache: Store, slots: Integers, size: int, threads: GatherPool) -> tuple[deque[Any], int]:
        """Batches of `size` READY samples each, of which the last may have fewer; and the nanoseconds that this took.

        Their samples are not counted. Any thread may call this, one at a time.
        """
        start = time.perf_counter_ns()
        collator = self.collator_of(cache)
        assert collator is not None
        samples = len(slots)
        memory = self._pool.take(collator.sizes(samples))
        cache.gather(slots, memory, threads)
        with torch.inference_mode(False):  # a block may outlast the mode
            batches = deque(collator.batches(memory, samples, size))
        return batches, time.perf_counter_ns() - start

    def make(self, cached: CachedSource, keys: Any, slot: Slot | None = None) -> Any:
        """The batch of these keys, whose samples are counted.

        Args:
            cached: the cached source.
            keys: indices, int64 `[samples]`, or a sampler's keys.
            slot: the memory for the batch in a worker, as far as it has room; else the maker has memory of its own.
        """
        indices = keys.tolist() if isinstance(keys, np.ndarray) else keys

        def make() -> Any:
            with noted(cached.opened.counters) as note:
                batch = self._from_rows(cached, keys, indices, slot) if isinstance(keys, np.ndarray) else None
                if batch is None:
                    batch = self._collated(cached, indices, slot)
            self.served = served_in(note)
            return batch

        batch = cached.changes.make_current(make)
        return pinned(batch) if self._pins else batch

    def _from_rows(self, cached: CachedSource, keys: Integers, indices: list[int], slot: Slot | None) -> Any:
        """A batch of rows, made in place.

        None if it is none, if most of what is missing has no slot, or if samples have changed while they were copied.
        """
        cache = cached.cache
        samples = len(keys)
        if cache is None or not samples or not cache.codec.is_fixed or cached.transforms:
            return None
        if self._collate_fn is not default_collate:
            return None
        seen = cache.changes
        slots = cache.lookup(keys)
        missing = np.flatnonzero(slots == NO_SLOT)
        if 2 * np.count_nonzero(cache.have_slots(keys[missing])) < len(missing):
            return None  # to copy samples into rows, and store none of them, would cost more than to collate them
        collator = self.collator_of(cache)
        if collator is None:
            return None
        codec = cache.codec
        rows: list[int] = missing.tolist()
        odd: dict[int, Any] = {}
        if slot is not None:
            slot.clear()
        fields: Memory = (self._pool if slot is None else slot).take(collator.sizes(samples))
        start = time.perf_counter_ns()
        if len(rows) < samples:
            # `gather` reads each slot: for what is missing that of a READY sample, so that no empty page is touched.
            slots[missing] = slots.max()
            cache.gather(slots, fields)
            count(cached.opened.counters, gather_ns=time.perf_counter_ns() - start)
            if cache.changes != seen:
                return None
        if rows:
            odd = cached.load_into(codec.rows(fields, samples), [indices[row] for row in rows], rows)
        cached.count_hits(samples - len(rows))
        if odd:
            return default_collate([odd.get(row, sample) for row, sample in enumerate(codec.split(fields, samples))])
        return collator.batch(fields, samples)

    def _collated(self, cached: CachedSource, keys: Any, slot: Slot | None) -> Any:
        samples = cached.samples(keys)
        if self._collate_fn is not default_collate:
            return self._collate_fn(list(samples))
        if slot is None:
            return default_collate(list(samples) if cached.transforms else samples)
        slot.clear()
        rows = BatchRows(slot, len(keys))
        samples = [rows.put(number, sample) for number, sample in enumerate(samples)]
        if not samples or not is_plain(samples[0]):
            return default_collate(samples)
        return collate(samples, collate_fn_map=default_collate_fn_map | {torch.Tensor: rows.stack})

    def collator_of(self, cache: Store) -> Collator | None:
        """The collator of a cache of rows; None if `default_collate` makes something else of its samples."""
        codec, collator = self._collator
        if codec is not cache.codec:
            try:
                collator = Collator(cache.codec, self._pins)
            except (TypeError, RuntimeError):
                collator = None
            self._collator = cache.codec, collator
        return collator

"""What is kept of a stream, as the store of a dataset of just these samples.

Slots that are READY are numbered from 0 on, without a gap. All of them can be read, and nothing is added: a store that
is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from lightning_stocache.cache.codec import Lend, Memory, SampleCodec
from lightning_stocache.cache.placement import NO_SLOT, Integers
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.store import ReadOnly

__all__ = ["KeptRows", "KeptSamples"]


class KeptSamples(ReadOnly):
    """A full store over the samples that another store has; a `SampleStore`.

    Args:
        store: where they lie; given up by `close`.
        slots: theirs, in order, int64 `[samples]`.
        shards: the number of the shard that each came from, in rising order, int64 `[samples]`.
    """

    def __init__(self, store: SegmentStore[Any], slots: Integers, shards: Integers) -> None:
        self._store, self._slots, self.shards = store, slots, shards

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._store, self._slots, self.shards)

    @property
    def codec(self) -> SampleCodec:
        """What samples look like."""
        codec: SampleCodec = self._store.codec
        return codec

    @property
    def length(self) -> int:
        """Number of samples."""
        return len(self._slots)

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._slots)

    def has_place(self, index: int) -> bool:
        """Whether there is such a sample."""
        return -len(self) <= index < len(self)

    def place(self, index: int) -> int:
        """Where the sample of an index lies, or NO_PLACE."""
        return int(self._slots[index]) if self.has_place(index) else NO_SLOT

    def lookup(self, indices: Integers) -> Integers:
        """Where the samples of those indices lie (int64 `[samples]`), NO_PLACE outside."""
        if len(indices) and indices.min() >= 0 and indices.max() < len(self._slots):
            return self._slots[indices]
        return np.array([self.place(index) for index in indices.tolist()], dtype=np.int64)

    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copies of the samples of places (int64 `[samples]`)."""
        return self._store.read(places, lend)

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples of places (int64 `[samples]`)."""
        return self._store.stored_bytes(places) if len(places) else 0

    @property
    def filled(self) -> int:
        """Number of samples."""
        return len(self)

    @property
    def fill_fraction(self) -> float:
        """1: all that is there can be read."""
        return 1.0

    @property
    def capacity(self) -> int:
        """Number of samples."""
        return len(self)

    @property
    def full(self) -> bool:
        """Whether every sample can be read: always."""
        return True

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now."""
        return self._store.memory_bytes

    @property
    def promised_bytes(self) -> int:
        """0: nothing is added."""
        return 0

    @property
    def granted_bytes(self) -> int:
        """Bytes that the samples may take."""
        return self._store.granted_bytes

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self._store.closed

    def close(self) -> None:
        """Give it up in this process."""
        self._store.close()


class KeptRows(KeptSamples):
    """Where the samples are rows: a `RowSampleStore`."""

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy places (int64 `[samples]`) into the memory of a batch."""
        store: Any = self._store
        store.gather(places, into)

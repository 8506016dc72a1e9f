"""A store of rows: samples of fixed fields, one array per field."""

from __future__ import annotations

from typing import Any

import numpy as np

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import Lend, Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.slots import FieldSlots
from lightning_stocache.cache.spec import SampleSpec

__all__ = ["RowStore"]


class RowStore(SegmentStore[SampleSpec]):
    """Rows in a segment, which is a `RowSampleStore`: it can gather a batch.

    Args:
        segment: where they lie.
        codec: what a sample looks like.
        arc: which indices have a slot, and where.

    Example:
        >>> from lightning_stocache.cache.placement import Arc
        >>> store = RowStore.create(SampleSpec.infer(1), Arc(size=10, slots=5))
        >>> store.fill(4, 16), store.get(4), store.fill(7, 49), store.filled
        (True, 16, False, 1)
        >>> store.close()
    """

    slots: FieldSlots

    @property
    def spec(self) -> SampleSpec:
        """What samples look like."""
        return self.codec

    def read(self, places: Integers, lend: Lend | None = None) -> list[Any]:
        """Copies of the samples of READY slots (int64 `[samples]`), which own their memory together."""
        if lend is None and len(places) == 1:
            return [self.codec.unflatten(self.slots.read(int(places[0])))]
        sizes = self.codec.sizes(len(places))
        memory = [np.empty(size, dtype=np.uint8) for size in sizes] if lend is None else lend(sizes)
        self.gather(places, memory)
        return self.codec.split(memory, len(places))

    def contents(self, place: int) -> list[memoryview]:
        """A copy of the row of a READY slot, per field."""
        return [part.numpy().data for part in self.slots.read(place)]

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples of so many slots."""
        return len(places) * self.codec.nbytes

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy READY slots (int64 `[samples]`) into the memory of a batch, uint8 `[samples * nbytes]` per field."""
        self.slots.gather(places, into)

    @property
    def granted_bytes(self) -> int:
        """Bytes that all slots take when they are filled, as budgets count: no header, no rest of whole pages."""
        return len(self) * self.codec.slot_bytes

    @classmethod
    def bytes_for(cls, codec: SampleSpec, slots: int, granted: int = 0) -> int:
        """Bytes of address space that so many slots take, whatever is granted."""
        return FieldSlots.bytes_for(codec.row_bytes, slots)

    @staticmethod
    def reserved_bytes(slots: int) -> int:
        """Bytes of the states."""
        return slots

    def _open_slots(self, claims: Claims) -> FieldSlots:
        return FieldSlots(self.segment, self.codec.row_bytes, self.arc.slots)

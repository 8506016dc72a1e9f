"""A store of rows that other processes append to while it is read: the oldest samples leave first.

Processes that append and processes that read share nothing but the segment (`rolling_ring`, `rolling_slots`), and
readers wait for nobody: a batch is one `take` per field, between two looks at the generations of its slots. Only what
has changed meanwhile is taken again, after a few tries from another slot. So a sample that leaves during an epoch that
wanted it is replaced by the newer one of its slot, or, while that is being written, by another resident one: all are
draws from one source, and the number of batches stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from lightning_stocache.cache.codec import Lend, Memory
from lightning_stocache.cache.placement import Integers
from lightning_stocache.cache.rolling_ring import RollingRing, manifest_of
from lightning_stocache.cache.rolling_slots import RollingSlots
from lightning_stocache.cache.rolling_store import RollingStore
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment

__all__ = ["RollingRows"]

_TRIES = 3  # of one slot, before another one is read
_MOST_TRIES = 1000  # in all: then the writers are faster than any copy


class RollingRows(RollingStore[SampleSpec]):
    """Rows in a ring of slots, which is a `RowSampleStore`: index k is whatever lies in slot k.

    Args:
        segment: where they lie.
        codec: what a sample looks like.
        count: number of slots.

    Raises:
        RuntimeError: (`gather`, `read`) no sample is resident, or writers overtake every copy.

    Example:
        >>> store = RollingRows.create(SampleSpec.infer(0), 3)
        >>> [store.append(number) for number in range(5)]
        [True, True, True, True, True]
        >>> sorted(store.read(store.lookup(np.arange(3)))), store.ring.evicted
        ([2, 3, 4], 2)
        >>> store.close()
    """

    _slots: RollingSlots

    @classmethod
    def create(
        cls,
        codec: SampleSpec,
        count: int,
        *,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make an empty store.

        Args:
            codec: what a sample looks like.
            count: number of slots.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: what the segment says about itself, see `lightning_stocache.node.manifest`.

        Raises:
            OSError: there is no memory.
        """
        size = RollingSlots.bytes_for(codec.row_bytes, count)
        reserved = RollingRing.bytes_for(count)
        return cls(Segment.create(size, backend, manifest_of(count, whose), reserved=reserved), codec, count)

    @staticmethod
    def slot_bytes(codec: SampleSpec) -> int:
        """Bytes that a slot costs."""
        return codec.nbytes + 2 * 8

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy whole samples into the memory of a batch, uint8 `[samples * nbytes]` per field, waiting for nobody."""
        slots, seen = self.readable(places)
        columns = [m.reshape(len(slots), nbytes) for m, nbytes in zip(into, self.codec.row_bytes, strict=True)]
        self._slots.gather(slots, columns)
        fence()
        torn = np.flatnonzero(self.ring.generations.take(slots) != seen)
        tries = 0
        while len(torn):
            tries += 1
            if tries > _MOST_TRIES:
                raise RuntimeError(
                    f"a rolling cache of {self.ring.limit} samples is overwritten faster than it can be read: give it "
                    "a larger budget, or fewer fillers"
                )
            again, generations = self.readable(slots[torn] if tries < _TRIES else self.others(len(torn)))
            self._slots.copy(again, columns, torn)
            fence()
            seen[torn] = generations
            torn = torn[self.ring.generations.take(again) != generations]
        self.renewed += self.ring.newer(seen)

    def read(self, places: Integers, lend: Lend | None = None) -> list[Any]:
        """Copies of the samples in those slots (int64 `[samples]`), which own their memory together."""
        sizes = self.codec.sizes(len(places))
        memory = [np.empty(size, dtype=np.uint8) for size in sizes] if lend is None else lend(sizes)
        self.gather(places, memory)
        return self.codec.split(memory, len(places))

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of so many samples."""
        return len(places) * self.codec.nbytes

    @property
    def granted_bytes(self) -> int:
        """Bytes that all slots take when they are filled."""
        return self.ring.count * self.slot_bytes(self.codec)

    def _open_slots(self) -> RollingSlots:
        return RollingSlots(self.segment, self.ring, self.codec.row_bytes)

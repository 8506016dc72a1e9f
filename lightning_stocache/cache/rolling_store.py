"""What rolling stores have in common: a ring of slots that others write, and readers that look at generations.

Processes that append and processes that read share nothing but the segment, and readers wait for nobody: what changes
while it is copied is taken again, after a few tries from another slot. So a sample that leaves during an epoch that
wanted it is replaced by another one: all are draws from one source, and the number of batches stays.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, Self, TypeVar

import numpy as np

from lightning_stocache.cache.codec import Lend, SampleCodec
from lightning_stocache.cache.placement import NO_SLOT, Integers
from lightning_stocache.cache.rolling_filling import RollingFilling
from lightning_stocache.cache.rolling_ring import RollingRing, is_even
from lightning_stocache.cache.segment_memory import SegmentMemory
from lightning_stocache.cache.store import ReadOnly
from lightning_stocache.node.fence import fence
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.node.waiting import moments

__all__ = ["RollingHandle", "RollingStore"]

Codec = TypeVar("Codec", bound=SampleCodec)


@dataclass(frozen=True)
class RollingHandle:
    """How another process of the node opens a rolling store. It can be pickled and sent anywhere."""

    segment: SegmentHandle
    codec: SampleCodec
    count: int


class RollingStore(ReadOnly, SegmentMemory, Generic[Codec]):
    """A `SampleStore` that rolls: index k is whatever lies in slot k.

    Args:
        segment: where it lies.
        codec: what a sample looks like.
        count: number of slots.

    Raises:
        RuntimeError: (`read`) no sample is resident, or writers overtake every copy.
    """

    def __init__(self, segment: Segment, codec: Codec, count: int) -> None:
        self.segment, self.codec = segment, codec
        self.ring = RollingRing(segment, count)
        self.renewed = self.substituted = 0
        self._slots = self._open_slots()
        self._filling = RollingFilling(segment, codec, self.ring, self._slots)
        self._chance = np.random.default_rng()

    @abstractmethod
    def _open_slots(self) -> Any:
        """How samples lie behind the ring."""

    @classmethod
    def attach(cls, handle: RollingHandle) -> Self:
        """Open a store that another process of the node has open.

        Raises:
            OSError: its segment cannot be reached from here.
        """
        return cls(Segment.attach(handle.segment), handle.codec, handle.count)  # type: ignore[arg-type]

    @property
    def handle(self) -> RollingHandle:
        """What another process needs to open the same store."""
        return RollingHandle(self.segment.handle, self.codec, self.ring.count)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.segment, self.codec, self.ring.count)

    # ---- writers ----

    def append(self, sample: Any, index: int = -1) -> bool:
        """Store a sample in the place of the oldest, see `RollingFilling`."""
        return self._filling.append(sample, index)

    # ---- readers ----

    def lookup(self, indices: Integers) -> Integers:
        """The slots of those indices, NO_PLACE outside of the store; who reads one gets what lies there then."""
        return np.where((indices >= 0) & (indices < self.length), indices, NO_SLOT)

    def place(self, index: int) -> int:
        """The slot of an index, or NO_PLACE."""
        return int(self.lookup(np.array([index]))[0])

    @abstractmethod
    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copies of the samples in those slots (int64 `[samples]`)."""

    def readable(self, slots: Integers) -> tuple[Integers, Integers]:
        """Those slots, others in place of what cannot be read now, and their generations."""
        generations = self.ring.generations.take(slots)
        whole = is_even(generations)
        if not whole.all():
            slots = slots.copy()
            while len(missing := np.flatnonzero(~whole)):
                slots[missing] = self.others(len(missing))
                generations[missing] = self.ring.generations.take(slots[missing])
                whole = is_even(generations)
                self.substituted += len(missing)
        fence()
        return slots, generations

    def others(self, count: int) -> Integers:
        """Slots that can be read, others each time."""
        # A few at random: a look at all of them takes half a millisecond where there are a hundred thousand.
        slots = self._chance.integers(0, self.length, 64 + 8 * count)
        slots = slots[self.ring.readable(slots)]
        if len(slots) < count:
            for seconds in moments(pause=0.001):
                if len(slots := self.ring.readable_slots()):
                    break
                if seconds or not self.ring.appended:  # else all of few slots are being written
                    raise RuntimeError(
                        "the rolling cache is empty: no sample has been appended yet, or all are being written"
                    )
            slots = slots[self._chance.integers(0, len(slots), count)]
        return slots[:count]

    # ---- what every store has ----

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.ring.count

    def __len__(self) -> int:
        return self.length

    def has_place(self, index: int) -> bool:
        """Whether an index has a slot."""
        return 0 <= index < self.length

    @abstractmethod
    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples in those slots."""

    @property
    def filled(self) -> int:
        """Number of samples that are resident."""
        return len(self.ring.resident())

    @property
    def fill_fraction(self) -> float:
        """Share of the slots that can be read."""
        return self.filled / max(min(self.length, self.ring.limit), 1)

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room."""
        return min(self.length, self.ring.limit)

    @property
    def full(self) -> bool:
        """Whether every index can be read: one whose own slot cannot gives another's sample."""
        return not self.closed and bool(len(self.ring.resident()))

    def close(self) -> None:
        """Give the store up in this process; the memory is free when all processes have."""
        if not self._given_up:
            self._given_up = True
            self._slots.close()
            self.ring.close()
            self.segment.close()

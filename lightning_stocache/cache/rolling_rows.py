"""A store of rows that other processes append to while it is read: the oldest samples leave first.

Processes that append and processes that read share nothing but the segment (`rolling_ring`, `rolling_slots`), and
readers wait for nobody: a batch is one `take` per field, between two looks at the generations of its slots. Only what
has changed meanwhile is taken again, after a few tries from another slot. So a sample that leaves during an epoch that
wanted it is replaced by the newer one of its slot, or, while that is being written, by another resident one: all are
draws from one source, and the number of batches stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from lightning_stocache.cache.codec import Lend, Memory
from lightning_stocache.cache.placement import NO_SLOT, Integers
from lightning_stocache.cache.rolling_filling import RollingFilling
from lightning_stocache.cache.rolling_ring import RollingRing, is_even
from lightning_stocache.cache.rolling_slots import RollingSlots
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.manifest import Geometry, Manifest
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["RollingHandle", "RollingRows"]

_TRIES = 3  # of one slot, before another one is read
_MOST_TRIES = 1000  # in all: then the writers are faster than any copy


@dataclass(frozen=True)
class RollingHandle:
    """How another process of the node opens a rolling store. It can be pickled and sent anywhere."""

    segment: SegmentHandle
    codec: SampleSpec
    count: int
    window: int = 0


class RollingRows:
    """Rows in a ring of slots, which is a `RowSampleStore`: index k is whatever lies in slot k.

    Args:
        segment: where they lie.
        codec: what a sample looks like.
        count: number of slots.
        window: how many are read at a time, see `RollingRing`; 0: all.

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

    def __init__(self, segment: Segment, codec: SampleSpec, count: int, window: int = 0) -> None:
        self.segment, self.codec = segment, codec
        self.ring = RollingRing(segment, count, window)
        self.renewed = self.substituted = 0
        self._slots = RollingSlots(segment, codec.row_bytes, count)
        self._filling = RollingFilling(segment, codec, self.ring, self._slots)
        self._turn = 0
        self._given_up = False

    @classmethod
    def create(
        cls,
        codec: SampleSpec,
        count: int,
        *,
        window: int = 0,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
    ) -> Self:
        """Make an empty store.

        Args:
            codec: what a sample looks like.
            count: number of slots.
            window: how many are read at a time; then all memory is taken now.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: what the segment says about itself, see `lightning_stocache.node.manifest`.

        Raises:
            OSError: there is no memory.
        """
        manifest = Manifest(Geometry(size=count, slots=count), **(whose or {}))
        size = RollingSlots.bytes_for(codec.row_bytes, count)
        segment = Segment.create(size, backend, manifest)
        try:
            segment.reserve(0, size if window else RollingRing.bytes_for(count))
            return cls(segment, codec, count, window)
        except OSError:
            segment.close()
            raise

    @classmethod
    def attach(cls, handle: RollingHandle) -> Self:
        """Open a store that another process of the node has open.

        Raises:
            OSError: its segment cannot be reached from here.
        """
        known = Segment.opened(handle.segment.token)
        segment = Segment.attach(handle.segment) if known is None else known.hold()
        return cls(segment, handle.codec, handle.count, handle.window)

    @staticmethod
    def slot_bytes(codec: SampleSpec) -> int:
        """Bytes that a slot costs."""
        return codec.nbytes + 3 * 8

    @property
    def handle(self) -> RollingHandle:
        """What another process needs to open the same store."""
        return RollingHandle(self.segment.handle, self.codec, self.ring.count, self.ring.window)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.segment, self.codec, self.ring.count, self.ring.window)

    # ---- writers ----

    def append(self, sample: Any, index: int = -1, position: int | None = None) -> bool:
        """Store a sample in the place of the oldest, see `RollingFilling`."""
        return self._filling.append(sample, index, position)

    def skip(self, position: int) -> None:
        """Say of a position of the window that its sample cannot be had."""
        self._filling.skip(position)

    # ---- readers ----

    def lookup(self, indices: Integers) -> Integers:
        """The slots of those indices, NO_PLACE outside of the store; who reads one gets what lies there then."""
        places = self.ring.slots_of(indices)
        return np.where((indices >= 0) & (indices < self.length), places, NO_SLOT)

    def place(self, index: int) -> int:
        """The slot of an index, or NO_PLACE."""
        return int(self.lookup(np.array([index]))[0])

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy whole samples into the memory of a batch, uint8 `[samples * nbytes]` per field, waiting for nobody."""
        slots, seen = self._resident(places)
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
            again, generations = self._resident(slots[torn] if tries < _TRIES else self._others(len(torn)))
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

    def _resident(self, slots: Integers) -> tuple[Integers, Integers]:
        """Those slots, others in place of what cannot be read now, and their generations."""
        generations = self.ring.generations.take(slots)
        whole = is_even(generations)
        if not whole.all():
            slots = slots.copy()
            while len(missing := np.flatnonzero(~whole)):
                slots[missing] = self._others(len(missing))
                generations[missing] = self.ring.generations.take(slots[missing])
                whole = is_even(generations)
                self.substituted += len(missing)
        fence()
        return slots, generations

    def _others(self, count: int) -> Integers:
        """Slots that can be read, another few each time."""
        slots = self.ring.readable_slots()
        if not len(slots):
            raise RuntimeError("the rolling cache is empty: no sample has been appended yet")
        self._turn += count
        return slots[(self._turn + np.arange(count)) * 7919 % len(slots)]

    # ---- what every store has ----

    @property
    def length(self) -> int:
        """Number of indices."""
        return self.ring.window or self.ring.count

    def __len__(self) -> int:
        return self.length

    def has_place(self, index: int) -> bool:
        """Whether an index has a slot."""
        return 0 <= index < self.length

    def has_room(self, sample: Any) -> bool:
        """Whether a sample that was loaded beside the writers is wanted: no."""
        return False

    def fill(self, index: int, sample: Any) -> bool:
        """Store nothing: only writers append."""
        return False

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store nothing: only writers append."""
        return (None for _ in indices)

    def stored_bytes(self, places: Integers) -> int:
        """Bytes of so many samples."""
        return len(places) * self.codec.nbytes

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

    @property
    def granted_bytes(self) -> int:
        """Bytes that all slots take when they are filled."""
        return self.ring.count * self.slot_bytes(self.codec)

    @property
    def memory_bytes(self) -> int:
        """Bytes of them that the store holds on this node right now."""
        return min(max(self.segment.allocated_bytes - HEADER_BYTES, 0), self.granted_bytes)

    @property
    def promised_bytes(self) -> int:
        """Bytes of them that it may still take."""
        return 0 if self.closed else self.granted_bytes - self.memory_bytes

    def unlink(self) -> None:
        """Take the name of its file away, if it has one."""
        self.segment.unlink()

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self._given_up or self.segment.closed

    def close(self) -> None:
        """Give the store up in this process; the memory is free when all processes have."""
        if not self._given_up:
            self._given_up = True
            self._slots.close()
            self.ring.close()
            self.segment.close()

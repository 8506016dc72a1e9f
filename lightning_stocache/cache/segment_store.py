"""What the stores have in common that lie in one segment, in slots that are EMPTY or READY.

A sample that was loaded is encoded by the codec and stored by `Filling`. A reader looks at the slot's state, fences,
and copies the bytes out; nobody is ever handed a view. A place is the number of a slot. How samples lie in the slots,
`slots` knows (rows) or `record_slots` (records).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import Any, Generic, Self, TypeVar

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import Lend, SampleCodec
from lightning_stocache.cache.domain import Domain
from lightning_stocache.cache.filling import Filling
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.segment_memory import SegmentMemory
from lightning_stocache.cache.slots import EMPTY, READY
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.cache.turns import Turns
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import Backend
from lightning_stocache.node.header import Geometry, Manifest, read_manifest
from lightning_stocache.node.segment import Segment

__all__ = ["SegmentStore"]

Codec = TypeVar("Codec", bound=SampleCodec)

_WINDOW = 1 << 24  # slots that are looked through for some that are READY
_ALONE = 1 << 40  # a byte of the lock file, behind those of all slots


class SegmentStore(SegmentMemory, Generic[Codec]):
    """Samples in a segment, of a codec and of the indices of an arc."""

    slots: Any

    def __init__(self, segment: Segment, codec: Codec, arc: Arc) -> None:
        self.segment, self.codec, self.arc = segment, codec, arc
        claims = Claims(segment)
        self.slots = self._open_slots(claims)
        self.turns = Turns(segment, claims, self.slots, arc)
        self._filling = self._open_filling(claims)

    @abstractmethod
    def _open_slots(self, claims: Claims) -> Any:
        """The slots in the segment."""

    def _open_filling(self, claims: Claims) -> Filling:
        return Filling(self.segment, self.slots, claims, self.turns)

    @classmethod
    @abstractmethod
    def bytes_for(cls, codec: Any, slots: int, granted: int = 0) -> int:
        """Bytes of a segment for so many slots, where so many are granted."""

    @classmethod
    def fits(cls, size: int, codec: Any, slots: int) -> bool:
        """Whether a segment of so many bytes can hold a store of so many slots."""
        return size == cls.bytes_for(codec, slots)

    @staticmethod
    @abstractmethod
    def reserved_bytes(slots: int) -> int:
        """Bytes at the beginning of the segment that are read before anything is stored."""

    @classmethod
    def create(
        cls,
        codec: Codec,
        arc: Arc,
        backend: Backend | None = None,
        whose: Mapping[str, Any] | None = None,
        *,
        granted: int = 0,
        directory: str | None = None,
    ) -> Self:
        """Make an empty store.

        Args:
            codec: what a sample looks like.
            arc: which indices have a slot, and where.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: what the segment says about itself besides the arc, see `lightning_stocache.node.manifest`.
            granted: bytes that it may take, where that does not follow from the number of slots.
            directory: of a store on a disk, where it lies; `check_directory` has found it good.
        """
        size, manifest = cls.layout(codec, arc, whose, granted=granted)
        segment = Segment.create(size, backend, manifest, directory)
        try:
            return cls.found(segment, codec, manifest.geometry, arc.length, arc.domain)
        except OSError:
            segment.close()
            raise

    @classmethod
    def over(cls, segment: Segment, codec: Codec, arc: Arc, *more: Segment) -> Self:
        """Open the store that lies in a segment, or several, of this process."""
        store = cls.__new__(cls)
        start: Any = SegmentStore.__init__ if not more else cls.__init__  # that of `compat` is its users'
        start(store, segment, codec, arc, *more)
        return store

    @classmethod
    def found(
        cls, segment: Segment, codec: Codec, geometry: Geometry, length: int, domain: Domain | None = None
    ) -> Self:
        """Open the store that a segment says it holds, whoever has made it, for a dataset of so many samples.

        Raises:
            ValueError: what it says does not fit its size or the dataset, or a slot is in a state that there is not.
            OSError: the system has no memory for the states of the slots, which are read before anything is stored.
        """
        arc = Arc(**asdict(geometry), domain=domain)
        if arc.length != length or not cls.fits(segment.size, codec, arc.slots):
            raise ValueError(f"{arc.slots:,} slots for {arc.size:,} samples do not fit in its {segment.size:,} bytes")
        # Also by who joins: the maker may have been killed before it came to this.
        segment.reserve(0, cls.reserved_bytes(arc.slots))
        return cls._opened(segment, codec, arc)

    @classmethod
    def _opened(cls, segment: Segment, codec: Codec, arc: Arc) -> Self:
        store = cls.over(segment, codec, arc)
        if bool((store.slots.states > READY).any()):
            store.slots.close()
            raise ValueError("a slot is in a state that there is not")
        return store

    @classmethod
    def layout(
        cls, codec: Codec, arc: Arc, whose: Mapping[str, Any] | None = None, *, granted: int = 0
    ) -> tuple[int, Manifest]:
        """The size of a segment for such a store, and what it is to say about itself."""
        size = cls.bytes_for(codec, arc.slots, granted)
        return size, Manifest(Geometry(**arc.geometry), payload=size, **(whose or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).over, (self.segment, self.codec, self.arc)

    @property
    def handle(self) -> StoreHandle:
        """What another process needs to open the same store."""
        return StoreHandle(self.segment.handle, self.codec, self.arc)

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self.arc.length

    def __len__(self) -> int:
        """Number of slots."""
        return int(self.slots.count)

    # ---- samples ----

    def has_place(self, index: int) -> bool:
        """Whether an index has a slot."""
        return self.arc.slot_within(index) != NO_SLOT

    def get(self, index: int) -> Any | None:
        """A copy of the sample of an index, or None."""
        place = self.place(index)
        return None if place == NO_SLOT else next(iter(self.read(np.array([place]))))

    @abstractmethod
    def read(self, places: Integers, lend: Lend | None = None) -> Iterable[Any]:
        """Copies of the samples of READY slots (int64 `[samples]`), in order."""

    def place(self, index: int) -> int:
        """Where the sample of an index can be read now, or NO_PLACE."""
        slot = self.arc.slot_within(index)
        if slot == NO_SLOT or self.slots.state_bytes[slot] != READY:
            return NO_SLOT
        fence()
        return slot

    def has_room(self, sample: Any) -> bool:
        """Whether a sample that has a slot may find room in it."""
        return True

    @abstractmethod
    def contents(self, place: int) -> list[memoryview]:
        """A copy of what lies in a READY slot, as `put_many` takes it."""

    def recall(self, indices: Sequence[int]) -> bool:
        """Nothing lies further away than here."""
        return False

    @abstractmethod
    def stored_bytes(self, places: Integers) -> int:
        """Bytes of the samples of READY slots (int64 `[samples]`)."""

    def fill(self, index: int, sample: Any) -> bool:
        """Store a sample, if its index has a slot that is empty and nobody else fills; whether this call stored it.

        Raises:
            SampleMismatchError: the sample is not of the codec, with or without a slot.
        """
        return any(self.put_many([index], [self.codec.contents(self.codec.encode(sample, index))]))

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store encoded samples as the iterator comes to them; it gives for each what `Filling.fill` does."""
        return self._filling.fill(map(self.arc.slot_within, indices), samples)

    def lookup(self, indices: Integers) -> Integers:
        """The slots of those indices (int64 `[samples]`) that can be read now, NO_PLACE for the others.

        One outside of the dataset has none: the ring would wrap it around, but what it means, the source knows.
        """
        slots, size = self.arc.slots_of(indices), self.length
        if self.arc.slots == 0:
            return slots
        ready = self.slots.ready(slots)
        fence()
        slots[~ready | (indices >= size) | (indices < -size)] = NO_SLOT
        return slots

    # ---- what there is ----

    @property
    def is_filled(self) -> npt.NDArray[np.bool_]:
        """Which slots are READY, bool `[slots]`."""
        return np.asarray(self.slots.states.numpy() != EMPTY)

    @property
    def is_readable(self) -> npt.NDArray[np.bool_]:
        """Which slots can be read now, bool `[slots]`."""
        return self.is_filled

    def some_filled(self, count: int) -> list[int]:
        """About so many indices whose slots are READY, or all if there are fewer."""
        filled = self.is_filled
        first = int(filled.argmax()) if len(filled) else 0
        slots = np.flatnonzero(filled[first : first + _WINDOW]) + first
        return [self.arc.index(int(slot)) for slot in slots[:: max(len(slots) // count, 1)]]

    def alone(self) -> AbstractContextManager[None]:
        """Wait until no other process is in here; it has nothing to do with claims on slots."""
        return Claims(self.segment).waiting(_ALONE)

    @property
    def filled(self) -> int:
        """Number of slots that are READY."""
        return int(np.count_nonzero(self.is_filled))

    @property
    def full(self) -> bool:
        """Whether every index of the dataset can be read now."""
        return len(self) == self.length and bool(self.is_readable.all())

    @property
    def fill_fraction(self) -> float:
        """Share of the slots that are READY."""
        return self.filled / max(len(self), 1)

    @property
    def capacity(self) -> int:
        """Number of samples for which there is room."""
        return len(self)

    @property
    def disk_bytes(self) -> int:
        """Bytes of them on a disk."""
        return 0

    @property
    def manifest(self) -> Manifest:
        """What the store says about itself, also to other jobs; a ManifestError if that is damaged."""
        return read_manifest(self.segment.header, self.segment.size)

    def close(self) -> None:
        """Give the store up in this process; the memory is free when all processes have."""
        self.slots.close()  # also where another copy has closed the segment: these views are our own
        if not self._given_up:
            self._given_up = True
            self.segment.close()

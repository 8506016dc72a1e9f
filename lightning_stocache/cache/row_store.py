"""A store of rows: samples of fixed fields, in one segment that all processes of a node share.

A sample that was loaded is checked against the spec and stored by `Filling`. A reader looks at the slot's state,
fences, and copies the bytes out; nobody is ever handed a view. A place is the number of a slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from lightning_stocache.cache.codec import Memory
from lightning_stocache.cache.filling import Filling, Slots
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.cache.slots import READY, FieldSlots
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.node.fence import fence
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.manifest import Geometry, Manifest, read_manifest
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["RowStore", "StoreHandle"]


@dataclass(frozen=True)
class StoreHandle:
    """How another process opens a store: where its segment is, and what lies there."""

    segment: SegmentHandle
    spec: SampleSpec
    arc: Arc


class RowStore:
    """Rows in a segment, which is a `SampleStore`.

    Args:
        segment: where they lie.
        spec: what a sample looks like.
        arc: which indices have a slot, and where.

    Example:
        >>> store = RowStore.create(SampleSpec.infer(1), Arc(size=10, slots=5))
        >>> store.fill(4, 16), store.get(4), store.fill(7, 49), store.filled
        (True, 16, False, 1)
        >>> store.close()
    """

    def __init__(self, segment: Segment, spec: SampleSpec, arc: Arc) -> None:
        self.segment, self.spec, self.arc = segment, spec, arc
        self.slots: Slots = FieldSlots(segment, spec.row_bytes, arc.slots)
        self._filling = Filling(segment, self.slots)
        self._given_up = False

    @classmethod
    def create(
        cls, spec: SampleSpec, arc: Arc, backend: Backend | None = None, whose: Mapping[str, Any] | None = None
    ) -> Self:
        """Make an empty store for any sample and any arc of the ring.

        Args:
            spec: what a sample looks like.
            arc: which indices have a slot, and where.
            backend: kind of segment, see `lightning_stocache.node.segment`.
            whose: what the segment says about itself besides the arc, see `lightning_stocache.node.manifest`.
        """
        size, manifest = cls.layout(spec, arc, whose)
        segment = Segment.create(size, backend, manifest)
        try:
            return cls.found(segment, spec, manifest.geometry, arc.size)
        except OSError:
            segment.close()
            raise

    @classmethod
    def over(cls, segment: Segment, spec: SampleSpec, arc: Arc) -> Self:
        """Open the store that lies in a segment of this process."""
        store = cls.__new__(cls)
        RowStore.__init__(store, segment, spec, arc)
        return store

    @classmethod
    def attach(cls, handle: StoreHandle) -> Self:
        """Open a store that another process has open.

        Raises:
            OSError: its segment cannot be reached from here.
        """
        known = Segment.opened(handle.segment.token)  # another dataset of this process has the same name
        segment = Segment.attach(handle.segment) if known is None else known.hold()
        return cls.over(segment, handle.spec, handle.arc)

    @classmethod
    def found(cls, segment: Segment, spec: SampleSpec, geometry: Geometry, length: int) -> Self:
        """Open the store that a segment says it holds, whoever has made it, for a dataset of so many samples.

        Raises:
            ValueError: what it says does not fit its size or the dataset, or a slot is in a state that there is not.
            OSError: the system has no memory for the states of the slots, which are read before anything is stored.
        """
        arc = Arc(**asdict(geometry))
        if arc.size != length or segment.size != FieldSlots.bytes_for(spec.row_bytes, arc.slots):
            raise ValueError(
                f"it says that it has {arc.slots:,} slots for {arc.size:,} samples, which does not fit its "
                f"{segment.size:,} bytes"
            )
        segment.reserve(0, arc.slots)  # also by who joins: the maker may have been killed before it came to this
        store = cls.over(segment, spec, arc)
        if bool((store.slots.states > READY).any()):
            store.slots.close()
            raise ValueError("a slot is in a state that there is not")
        return store

    @staticmethod
    def layout(spec: SampleSpec, arc: Arc, whose: Mapping[str, Any] | None = None) -> tuple[int, Manifest]:
        """The size of a segment for such a store, and what it is to say about itself."""
        return FieldSlots.bytes_for(spec.row_bytes, arc.slots), Manifest(Geometry(**asdict(arc)), **(whose or {}))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).over, (self.segment, self.spec, self.arc)

    @property
    def handle(self) -> StoreHandle:
        """What another process needs to open the same store."""
        return StoreHandle(self.segment.handle, self.spec, self.arc)

    @property
    def codec(self) -> SampleSpec:
        """What samples look like."""
        return self.spec

    @property
    def length(self) -> int:
        """Number of samples in the dataset."""
        return self.arc.size

    def __len__(self) -> int:
        """Number of slots."""
        return self.slots.count

    # ---- one sample ----

    def has_place(self, index: int) -> bool:
        """Whether an index has a slot."""
        return self._slot(index) != NO_SLOT

    def get(self, index: int) -> Any | None:
        """A copy of the sample of an index, or None when its slot is empty or it has none."""
        slot = self._slot(index)
        if slot == NO_SLOT or self.slots.state_bytes[slot] != READY:
            return None
        fence()
        return self.spec.unflatten(self.slots.read(slot))

    def fill(self, index: int, sample: Any) -> bool:
        """Store a sample into the slot of an index, if it has one that is empty and nobody else is filling it.

        Returns:
            Whether this call stored it.

        Raises:
            SampleMismatchError: the sample differs from the spec; checked also where there is no slot.
        """
        return any(self.put_many([index], [self.spec.contents(self.spec.encode(sample, index))]))

    # ---- many samples ----

    def put_many(self, indices: Sequence[int], samples: Sequence[Sequence[memoryview]]) -> Iterator[bool | None]:
        """Store encoded samples as the iterator comes to them, which gives for each what `Filling.fill` does."""
        return self._filling.fill(map(self._slot, indices), samples)

    def lookup(self, indices: Integers) -> Integers:
        """The slots of those indices (int64 `[samples]`) that can be read now, NO_PLACE for the others.

        An index from the end of the dataset has the slot of the same sample. One outside of it has none: the ring would
        wrap it around, but what it means, if anything, the source knows.
        """
        slots, size = self.arc.slots_of(indices), self.arc.size
        if self.arc.slots == 0:
            return slots
        ready = self.slots.ready(slots)
        fence()
        slots[~ready | (indices >= size) | (indices < -size)] = NO_SLOT
        return slots

    def gather(self, places: Integers, into: Memory) -> None:
        """Copy READY slots (int64 `[samples]`) into the memory of a batch, uint8 `[samples * nbytes]` per field."""
        self.slots.gather(places, into)

    # ---- what there is ----

    @property
    def filled(self) -> int:
        """Number of slots that are ready."""
        return int(self.slots.states.count_nonzero())

    @property
    def full(self) -> bool:
        """Whether every index of the dataset is ready."""
        return len(self) == self.length == self.filled

    @property
    def granted_bytes(self) -> int:
        """Bytes that all slots take when they are filled, as budgets count: no header, no rest of whole pages."""
        return len(self) * self.spec.slot_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes of them that the store holds on this node right now."""
        return min(max(self.segment.allocated_bytes - HEADER_BYTES, 0), self.granted_bytes)

    @property
    def promised_bytes(self) -> int:
        """Bytes of them that it may still take."""
        return 0 if self.closed else self.granted_bytes - self.memory_bytes

    @property
    def manifest(self) -> Manifest:
        """What the store says about itself, also to other jobs.

        Raises:
            ManifestError: it is damaged.
        """
        return read_manifest(self.segment.header, self.segment.size)

    def keep_free(self, nbytes: int) -> None:
        """Leave that many bytes of the node's memory to others from now on, in all processes that fill."""
        keep_free(self.segment, nbytes)

    def unlink(self) -> None:
        """Take the name of its file away, if it has one: no other process can open the store any more."""
        self.segment.unlink()

    @property
    def closed(self) -> bool:
        """Whether this process has given the store up."""
        return self._given_up or self.segment.closed

    def close(self) -> None:
        """Give the store up in this process; the memory is free when all processes have."""
        self.slots.close()  # also where another copy has closed the segment: these views are our own
        if not self._given_up:
            self._given_up = True
            self.segment.close()

    def _slot(self, index: int) -> int:
        """The slot of any index, counted from the end of the dataset if it is negative; NO_SLOT outside of it."""
        size = self.arc.size
        return self.arc.slot(index) if -size <= index < size else NO_SLOT

"""Stores in a segment on a disk, which outlive job and machine where the segment has a name.

The slots are those of the stores in memory; behind them lie their checksums. What an earlier job has stored is READY
there, and is not read before this job has found it sound (`proof`, `recall`). What this job stores is trusted
at once.

Where the file is cut off while it is open, nothing of it is looked at any more, through the mapping it would be a
SIGBUS: all samples are loaded until the job ends. The next one gives the file its length again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.domain import Domain
from lightning_stocache.cache.filling import Filling
from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers
from lightning_stocache.cache.proof import Proof, sums_bytes
from lightning_stocache.cache.recall import Recall
from lightning_stocache.cache.record_slots import RecordSlots
from lightning_stocache.cache.record_store import RecordStore
from lightning_stocache.cache.row_store import RowStore
from lightning_stocache.cache.segment_store import Codec, SegmentStore
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.node.header import Manifest
from lightning_stocache.node.segment import Segment

__all__ = ["DiskRecords", "DiskRows", "DiskStore"]


class DiskStore(SegmentStore[Codec]):
    """What the stores on a disk have in common.

    Args:
        segment: where the samples lie.
        codec: what a sample looks like.
        arc: which indices have a slot, and where.
        trusted: in memory, which slots this job may read.

    Raises:
        ImportError: xxhash, which makes the checksums, is not installed.
    """

    def __init__(self, segment: Segment, codec: Codec, arc: Arc, trusted: Segment) -> None:
        self._proof = Proof(segment, arc, trusted)
        super().__init__(segment, codec, arc)
        self._recall = Recall(self.slots, self._proof, Claims(segment))

    @classmethod
    def mend(cls, segment: Segment, manifest: Manifest, domain: Domain | None = None) -> None:
        """Mend what a crash may have left in a segment of the indices of a domain, while nobody else has it open."""

    @classmethod
    def bytes_for(cls, codec: Any, slots: int, granted: int = 0) -> int:
        """Bytes of a segment for so many slots and their checksums, where so many are granted."""
        sums = sums_bytes(slots)
        return super().bytes_for(codec, slots, max(granted - sums, 0)) + sums

    @classmethod
    def _opened(cls, segment: Segment, codec: Codec, arc: Arc) -> Self:
        # What cannot be read is an error here, and would be a SIGBUS later.
        segment.fetch(0, cls.reserved_bytes(arc.slots))
        return cls.over(segment, codec, arc, Proof.begin(arc.slots))

    def _open_filling(self, claims: Claims) -> Filling:
        return Filling(self.segment, self.slots, claims, self.turns, self._proof)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).over, (self.segment, self.codec, self.arc, self._proof.trusted)

    @property
    def handle(self) -> StoreHandle:
        """What another process needs to open the same store."""
        return StoreHandle(self.segment.handle, self.codec, self.arc, self._proof.trusted.handle)

    # ---- samples ----

    def place(self, index: int) -> int:
        """Where the sample of an index can be read now, or NO_PLACE."""
        slot = self.arc.slot_within(index)
        return super().place(index) if slot != NO_SLOT and self._proof.trusts(slot) else NO_SLOT

    def lookup(self, indices: Integers) -> Integers:
        """The slots of those indices (int64 `[samples]`) that can be read now, NO_PLACE for the others."""
        slots = self.arc.slots_of(indices)
        trusted = self._proof.trusted_among(slots)
        if not trusted.any():
            return np.full_like(slots, NO_SLOT)
        slots = super().lookup(indices)
        slots[~trusted] = NO_SLOT
        return slots

    def recall(self, indices: Sequence[int]) -> bool:
        """Look through what an earlier job has stored under those indices, and have it read if it is sound."""
        slots = [self.arc.slot_within(index) for index in indices]
        return self._recall.check(slots)

    # ---- what there is ----

    @property
    def is_filled(self) -> npt.NDArray[np.bool_]:
        """Which slots are READY, bool `[slots]`."""
        return super().is_filled if self._proof.is_whole else np.zeros(len(self), dtype=np.bool_)

    @property
    def is_readable(self) -> npt.NDArray[np.bool_]:
        """Which slots can be read now, bool `[slots]`."""
        # Closed, too, it has as many as before: who ends an epoch asks, and an exception may have closed it by then.
        return self.is_filled & self._proof.trusted_slots if self._proof.is_whole else self.is_filled

    @property
    def memory_bytes(self) -> int:
        """Bytes of samples in memory: none. What the system keeps of a disk in its page cache is nobody's."""
        return 0

    @property
    def disk_bytes(self) -> int:
        """Bytes of samples on the disk."""
        return super().memory_bytes

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that it may still take: none."""
        return 0

    def close(self) -> None:
        """Give the store up in this process."""
        super().close()
        self._proof.close()


class DiskRows(DiskStore[Any], RowStore):
    """Rows on a disk.

    Example:
        >>> import tempfile
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     store = DiskRows.create(SampleSpec.infer(1), Arc(size=10, slots=5), directory=directory)
        ...     store.fill(4, 16), store.get(4)
        ...     store.close()
        (True, 16)
    """


class DiskRecords(DiskStore[Any], RecordStore):
    """Records on a disk.

    Example:
        >>> import tempfile
        >>> from lightning_stocache.cache.records import RecordCodec
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     codec, arc = RecordCodec.infer(["a", "bc"]), Arc(size=10, slots=10)
        ...     store = DiskRecords.create(codec, arc, granted=2**20, directory=directory)
        ...     store.fill(4, "text"), store.get(4)
        ...     store.close()
        (True, 'text')
    """

    @classmethod
    def mend(cls, segment: Segment, manifest: Manifest, domain: Domain | None = None) -> None:
        """Have no record of an earlier job be overwritten by those to come, while nobody else has the segment open."""
        arc = Arc(**asdict(manifest.geometry), domain=domain)
        segment.reserve(0, cls.reserved_bytes(arc.slots))
        proof = Proof(segment, arc, Proof.begin(arc.slots))
        records = RecordSlots(segment, arc.slots, Claims(segment), segment.size - sums_bytes(arc.slots))
        try:
            records.mend(proof.holds)
        finally:
            records.close()
            proof.close()

    def _open_slots(self, claims: Claims) -> RecordSlots:
        return RecordSlots(self.segment, self.arc.slots, claims, self.segment.size - sums_bytes(self.arc.slots))

"""The stores there are, by what they keep and where."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.disk_store import DiskRecords, DiskRows, DiskStore
from lightning_stocache.cache.placement import NO_SLOT, Integers
from lightning_stocache.cache.record_store import RecordStore
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling_records import RollingRecords
from lightning_stocache.cache.rolling_rows import RollingRows
from lightning_stocache.cache.rolling_store import RollingHandle
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.node.segment import Segment

__all__ = [
    "RollingSampleStore",
    "attach_rolling",
    "attach_store",
    "disk_store_for",
    "stored",
    "store_for",
]

RollingSampleStore: TypeAlias = RollingRows | RollingRecords


def store_for(codec: SampleCodec) -> type[SegmentStore[Any]]:
    """The class of stores in memory for samples of this codec."""
    return RecordStore if isinstance(codec, RecordCodec) else SharedCache


def disk_store_for(codec: SampleCodec) -> type[DiskStore[Any]]:
    """The class of stores on a disk for samples of this codec."""
    return DiskRecords if isinstance(codec, RecordCodec) else DiskRows


def attach_store(handle: StoreHandle) -> SegmentStore[Any]:
    """Open a store that another process of the node has open.

    Raises:
        OSError: its segment cannot be reached from here.
    """
    segment = Segment.attach(handle.segment)
    try:
        if handle.trusted is not None:
            return disk_store_for(handle.codec).over(segment, handle.codec, handle.arc, Segment.attach(handle.trusted))
        return store_for(handle.codec).over(segment, handle.codec, handle.arc)
    except BaseException:
        segment.close()
        raise


def stored(store: SegmentStore[Any], indices: Integers) -> npt.NDArray[np.bool_]:
    """Which of those indices (int64 `[samples]`, in the dataset) are stored there, whether or not they are near."""
    slots, filled = store.arc.slots_of(indices), store.is_filled
    if not len(filled):
        return np.zeros(slots.shape, dtype=np.bool_)
    found: npt.NDArray[np.bool_] = filled[slots] & (slots != NO_SLOT)
    return found


def attach_rolling(handle: RollingHandle) -> RollingSampleStore:
    """Open a rolling store that another process of the node has open.

    Raises:
        OSError: its segment cannot be reached from here.
    """
    kind: Any = RollingRecords if isinstance(handle.codec, RecordCodec) else RollingRows
    store: RollingSampleStore = kind.attach(handle)
    return store

"""Which store is for which codec."""

from __future__ import annotations

from typing import Any

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.compat import SharedCache
from lightning_stocache.cache.record_store import RecordStore
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling_records import RollingRecords
from lightning_stocache.cache.rolling_rows import RollingRows
from lightning_stocache.cache.rolling_store import RollingHandle
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.store import StoreHandle

__all__ = ["RollingSampleStore", "attach_rolling", "attach_store", "store_for"]

RollingSampleStore = RollingRows | RollingRecords


def store_for(codec: SampleCodec) -> type[SegmentStore[Any]]:
    """The class of stores for samples of this codec."""
    return RecordStore if isinstance(codec, RecordCodec) else SharedCache


def attach_store(handle: StoreHandle) -> SegmentStore[Any]:
    """Open a store that another process of the node has open.

    Raises:
        OSError: its segment cannot be reached from here.
    """
    return store_for(handle.codec).attach(handle)


def attach_rolling(handle: RollingHandle) -> RollingSampleStore:
    """Open a rolling store that another process of the node has open.

    Raises:
        OSError: its segment cannot be reached from here.
    """
    kind: Any = RollingRecords if isinstance(handle.codec, RecordCodec) else RollingRows
    store: RollingSampleStore = kind.attach(handle)
    return store

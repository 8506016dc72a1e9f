"""The samples of a stream, kept as they pass, by all processes of a node.

A stream has no index: a sample gets the next number, and is stored under it in a store of rows or of records. Which of
the two, and for how many samples there are places, is agreed when the first sample comes (`lay_out`): nothing has to be
read before. A sample that is no row turns all that is kept into records, where that is little (`to_records`). Whoever
lays the memory out anew is alone meanwhile (`stream_ledger`), and counts its generations up; the others see that, and
open the store again.

The samples lie in a segment as their store lays them out; `stream_index` holds the codec, and what is known of each.

When a stream has ended and nothing is added any more, what is kept is a dataset: `kept` gives it, in the order of the
shards, whoever was faster.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.kept_samples import KeptRows, KeptSamples
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.cache.record_store import slots_for
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.cache.store import gathers
from lightning_stocache.cache.stores import store_for
from lightning_stocache.cache.stream_index import Entry, StreamIndex
from lightning_stocache.cache.stream_ledger import Shard, StreamLedger
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["StreamHandle", "StreamStore"]

_SLACK = 4096  # bytes beyond what is granted, for what is as large in every store
_LEAST = 16  # bytes that a sample takes at least, with its slot
_FEW = 64 * 2**20  # bytes that are copied from rows to records while all others wait
_SMALLER = 16  # how much smaller than the first sample the mean may be without running out of slots


@dataclass(frozen=True)
class StreamHandle:
    """How another process of the node opens the same store."""

    ledger: SegmentHandle
    samples: SegmentHandle
    index: SegmentHandle
    ranks: int
    granted: int


class StreamStore:
    """What is kept of a stream.

    Args:
        ledger: how far the stream has come.
        samples: the segment for samples.
        index: their codec, and what is known of each.
        granted: bytes that samples may take.

    Example:
        >>> from lightning_stocache.cache.spec import SampleSpec
        >>> store, shard = StreamStore.create(2**20), Shard()
        >>> epoch = store.ledger.begin(shard)
        >>> store.lay_out(SampleSpec.infer(1))
        True
        >>> [store.keep(shard, epoch, number * number, mark=number) for number in range(3)]
        [8, 8, 8]
        >>> kept = store.kept()
        >>> list(kept.read(kept.lookup(np.array([2, 0]))))
        [4, 0]
        >>> store.close()
    """

    def __init__(self, ledger: StreamLedger, samples: Segment, index: StreamIndex, granted: int) -> None:
        self.ledger, self.granted = ledger, granted
        self._samples, self._index = samples, index
        self._generation = 0
        self._store: SegmentStore[Any] | None = None

    @classmethod
    def create(cls, granted: int, ranks: int = 1, backend: Backend | None = None, free: int = 0) -> StreamStore:
        """Make one that is empty.

        Args:
            granted: bytes that samples may take.
            ranks: ranks of the node that read the stream.
            backend: kind of segments.
            free: bytes of the node's memory that filling leaves to others; 0: as many as it does by itself.

        Raises:
            OSError: the memory cannot be had.
        """
        with contextlib.ExitStack() as undo:
            ledger = StreamLedger.create(ranks, backend)
            undo.callback(ledger.close)
            samples = Segment.create(granted + _SLACK, backend)
            undo.callback(samples.close)
            index = StreamIndex.create(granted // _LEAST, backend)
            undo.callback(index.segment.close)
            if free:
                keep_free(samples, free)
            undo.pop_all()
        return cls(ledger, samples, index, granted)

    @classmethod
    def attach(cls, handle: StreamHandle) -> StreamStore:
        """Open the store that another process of the node made.

        Raises:
            OSError: it cannot be reached from here.
        """
        ledger = StreamLedger(Segment.attach(handle.ledger), handle.ranks)
        index = StreamIndex(Segment.attach(handle.index))
        return cls(ledger, Segment.attach(handle.samples), index, handle.granted)

    @property
    def handle(self) -> StreamHandle:
        """What another process of the node needs to open it."""
        ledger = self.ledger
        return StreamHandle(ledger.handle, self._samples.handle, self._index.segment.handle, ledger.ranks, self.granted)

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherit, (self.ledger, self._samples, self._index.segment, self.granted)

    # ---- keep ----

    @property
    def codec(self) -> SampleCodec | None:
        """What samples look like; None as long as none has come."""
        store = self._opened()
        return None if store is None else store.codec

    def lay_out(self, codec: SampleCodec) -> bool:
        """Lay the memory out for samples of a codec, unless that was done already; whether samples can be kept.

        Raises:
            OSError: there is no memory even for the states of its slots.
        """
        with self.ledger.alone():
            return self._opened() is not None or self._lay_out(codec)

    def keep(self, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Store a sample of a shard, if there is room for it and its epoch goes on; its bytes, None if it was not.

        Raises:
            SampleMismatchError: it is not of the codec.
            UnsupportedSampleError: it cannot be kept as bytes.
        """
        while (store := self._opened()) is not None:
            room = store.has_room(sample)
            contents = store.codec.contents(store.codec.encode(sample)) if room else ()
            with self.ledger.holding(shard):
                if self.ledger.generation != self._generation:
                    continue
                if not self.ledger.is_current(shard, epoch):
                    return None
                number, entry = self.ledger.next_number(), (mark, self.ledger.position(shard))
                kept = room and self._put(store, number, contents, entry)
                self.ledger.note(shard, kept=kept)
                return sum(part.nbytes for part in contents) if kept else None
        self.leave(shard, epoch)
        return None

    def leave(self, shard: Shard, epoch: int) -> None:
        """A sample of a shard has passed, and is not kept."""
        with self.ledger.holding(shard):
            if self.ledger.is_current(shard, epoch):
                self.ledger.note(shard, kept=False)

    def to_records(self) -> bool:
        """Turn the rows that are kept into records; False where that is too much to be done while others wait."""
        with self.ledger.alone():
            rows = self._opened()
            if rows is None or isinstance(rows.codec, RecordCodec):
                return True
            places = np.flatnonzero(rows.lookup(np.arange(len(rows))) >= 0)
            if len(places) * rows.codec.nbytes > _FEW:
                return False
            samples, entries = list(rows.read(places)), self._index.entries(self.ledger.count)[places].tolist()
            codec = RecordCodec.infer(samples[:_SMALLER] or [0])
            self._clear()
            if self._lay_out(codec) and (store := self._opened()) is not None:
                for number, (sample, (mark, position)) in enumerate(zip(samples, entries, strict=True)):
                    self._put(store, number, codec.contents(codec.encode(sample)), (mark, position))
                self.ledger.numbers_from(len(samples))
            return True

    def clear(self) -> None:
        """Forget all samples, and give their memory back."""
        with self.ledger.alone():
            self._clear()

    # ---- what is kept ----

    def kept(self) -> KeptSamples:
        """The samples as a store of their own, numbered from 0 without a gap; nothing may be added any more.

        Raises:
            ValueError: there is none.
        """
        store = self._opened()
        if store is None:
            raise ValueError("nothing is kept of the stream")
        view: Any = type(store).over(self._samples.hold(), store.codec, store.arc)
        entries = self._index.entries(min(self.ledger.count, len(view)))
        slots = view.lookup(np.argsort(entries[:, 1], kind="stable"))
        slots = slots[slots != NO_SLOT]
        kind = KeptRows if gathers(view) else KeptSamples
        return kind(view, slots)

    def marked(self, mark: int) -> list[Any]:
        """Copies of the samples that have a mark."""
        store = self._opened()
        if store is None:
            return []
        numbers = np.flatnonzero(self._index.entries(min(self.ledger.count, len(store)))[:, 0] == np.uint64(mark))
        places = store.lookup(numbers)
        return list(store.read(places[places >= 0]))

    @property
    def filled(self) -> int:
        """Number of samples that are kept."""
        store = self._opened()
        return 0 if store is None else store.filled

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now."""
        store = self._opened()
        return 0 if store is None else store.memory_bytes

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self.ledger.closed

    def unlink(self) -> None:
        """Take the names of its files away, if they have any."""
        for part in (self.ledger, self._samples, self._index.segment):
            part.unlink()

    def close(self) -> None:
        """Give it up in this process."""
        if not self.closed:
            self._drop()
            for part in (self.ledger, self._samples, self._index.segment):
                part.close()

    def _opened(self) -> SegmentStore[Any] | None:
        """The store as it is laid out now."""
        generation = self.ledger.generation
        if generation != self._generation:
            self._drop()
            if (layout := self._index.layout()) is not None:
                codec, slots = layout
                self._store = store_for(codec).over(self._samples.hold(), codec, Arc(slots, slots))
            self._generation = generation
        return self._store

    def _drop(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()

    def _lay_out(self, codec: SampleCodec) -> bool:
        kind, size = store_for(codec), self._samples.size
        slots = self.granted // codec.slot_bytes
        if isinstance(codec, RecordCodec):
            slots = min(max(slots, slots_for(self.granted, codec, slots * _SMALLER)), self.granted // _LEAST)
        slots = min(slots, self._index.places)
        while slots > 0 and kind.bytes_for(codec, slots) > size:
            slots -= max((kind.bytes_for(codec, slots) - size) // codec.slot_bytes, 1)
        if slots <= 0:
            return False
        self._samples.reserve(0, kind.reserved_bytes(slots))
        laid_out = self._index.lay_out(codec, slots)
        self.ledger.lay_out()
        return laid_out

    def _clear(self) -> None:
        self._drop()
        self._index.clear()
        self._samples.discard(0)
        self.ledger.lay_out()

    def _put(self, store: SegmentStore[Any], number: int, contents: Sequence[memoryview], entry: Entry) -> bool:
        """Store a sample under its number; whether there was room for it."""
        return number < len(store) and self._index.write(number, entry) and any(store.put_many([number], [contents]))


def _inherit(ledger: StreamLedger, samples: Segment, index: Segment, granted: int) -> StreamStore:
    return StreamStore(ledger, samples, StreamIndex(index), granted)

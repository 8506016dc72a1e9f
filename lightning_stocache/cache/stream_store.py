"""The samples of a stream, kept as they pass, by all processes of a node.

A stream has no index: a sample gets the next number, and is stored under it in a store of rows or of records. Which of
the two, and for how many samples there are places, is agreed when the first sample comes (`lay_out`): nothing has to be
read before. Whoever lays the memory out anew is alone meanwhile (`stream_ledger`), and counts its generations up; the
others see that, and open the store again.

The samples lie in a segment as their store lays them out; `stream_index` holds the codec, and what is known of each.
States of slots are written through the mapping, so their memory is taken before, for a block of numbers at a time.

When a stream has ended and nothing is added any more, what is kept is a dataset: `kept` gives it, in the order of the
shards, whoever was faster.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.kept_samples import KeptRows, KeptSamples
from lightning_stocache.cache.placement import NO_SLOT, Arc
from lightning_stocache.cache.record_slots import RecordSlots
from lightning_stocache.cache.record_store import RecordStore
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.segment_store import SegmentStore
from lightning_stocache.cache.store import gathers
from lightning_stocache.cache.stores import store_for
from lightning_stocache.cache.stream_decision import Decision
from lightning_stocache.cache.stream_index import ENTRY_BYTES, Entry
from lightning_stocache.cache.stream_ledger import POSITION_BITS, Shard
from lightning_stocache.cache.stream_segments import StreamHandle, StreamSegments
from lightning_stocache.node.files import Backend
from lightning_stocache.node.header import HEADER_BYTES

__all__ = ["StreamStore"]

_BLOCK = 1 << 12  # slots whose states get their memory together
_DIRECTORY_SHARE = 28  # at most this part of the bytes granted is for slots of records that may find no room
_SMALLER = 16  # how much smaller than the first sample the mean may be without running out of slots


class StreamStore:
    """What is kept of a stream.

    Args:
        segments: where it lies.

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

    def __init__(self, segments: StreamSegments) -> None:
        self.ledger, self.granted = segments.ledger, segments.granted
        self._segments, self._samples, self._index = segments, segments.samples, segments.index
        self._generation = self._reserved = 0
        self._store: SegmentStore[Any] | None = None
        self._kept: KeptSamples | None = None

    @classmethod
    def create(cls, granted: int, ranks: int = 1, backend: Backend | None = None, free: int = 0) -> StreamStore:
        """Make one that is empty; see `StreamSegments.create`."""
        return cls(StreamSegments.create(granted, ranks, backend, free))

    @classmethod
    def attach(cls, handle: StreamHandle) -> StreamStore:
        """Open the store that another process of the node made; an OSError where it cannot be reached."""
        return cls(StreamSegments.attach(handle))

    @property
    def handle(self) -> StreamHandle:
        """What another process of the node needs to open it."""
        return self._segments.handle

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._segments,)

    # ---- keep ----

    @property
    def codec(self) -> SampleCodec | None:
        """What samples look like; None as long as none has come."""
        store = self._opened()
        return None if store is None else store.codec

    def lay_out(self, codec: SampleCodec) -> bool:
        """Lay the memory out for samples of a codec, unless that was done already; whether samples can be kept.

        Raises:
            OSError: there is no memory even for the states of its first slots.
        """
        with self.ledger.alone():
            return self._reopened() is not None or self._lay_out(codec)

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
        if self._kept is not None:
            return self._kept
        view: Any = type(store).over(self._samples.share(), store.codec, store.arc)
        entries = self._index.entries(len(view), min(self.ledger.count, len(view)))
        order = np.argsort(entries[:, 1], kind="stable")
        slots, shards = view.lookup(order), (entries[order, 1] >> np.uint64(POSITION_BITS)).astype(np.int64)
        ready = slots != NO_SLOT
        kind = KeptRows if gathers(view) else KeptSamples
        self._kept = kind(view, slots[ready], shards[ready])
        return self._kept

    def marked(self, mark: int) -> Iterator[Any]:
        """Copies of the samples that have a mark, each made when it is asked for."""
        store = self._opened()
        if store is None:
            return
        marks = self._index.entries(len(store), min(self.ledger.count, len(store)))[:, 0]
        numbers = np.flatnonzero(marks == np.uint64(mark))
        places = store.lookup(numbers)
        for place in places[places >= 0].tolist():
            yield from store.read(np.array([place]))

    @property
    def filled(self) -> int:
        """Number of samples that are kept."""
        store = self._opened()
        return 0 if store is None else int(self._samples.bytes(0, min(self.ledger.count, len(store))).count_nonzero())

    def __len__(self) -> int:
        """Number of samples that an epoch has, as far as it is known."""
        return self.filled

    @property
    def lacks_slots(self) -> bool:
        """Whether there is memory for more samples than there are slots."""
        store = self._opened()
        return store is not None and self.ledger.count > len(store) and self.memory_bytes < self.granted // 2

    @property
    def full(self) -> bool:
        """Whether nothing is added any more."""
        return Decision(self.ledger).mode == "cache"

    @property
    def capacity(self) -> int:
        """Number of samples that are kept when nothing is added any more, as far as it is known."""
        return self.filled if self.full else self.filled + 1

    @property
    def fill_fraction(self) -> float:
        """1 when all samples of an epoch have been kept; while they come, the share of the memory that they take."""
        return 1.0 if self.full or self.ledger.all_kept else min(self.memory_bytes / self.granted, 1.0)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now, with their index."""
        return min(max(self._samples.allocated_bytes - HEADER_BYTES, 0), self.granted)

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self.ledger.closed

    def unlink(self) -> None:
        """Take the names of its files away, if they have any."""
        self._segments.unlink()

    def close(self) -> None:
        """Give it up in this process."""
        if not self.closed:
            self._drop()
            self._segments.close()

    def _opened(self) -> SegmentStore[Any] | None:
        """The store as it is laid out now."""
        if self.ledger.generation == self._generation:
            return self._store
        with self.ledger.same_layout():
            return self._reopened()

    def _reopened(self) -> SegmentStore[Any] | None:
        """The store as it is laid out now, while nobody else can lay it out anew."""
        generation = self.ledger.generation
        if generation != self._generation:
            self._drop()
            if (layout := self._index.layout()) is not None:
                codec, slots = layout
                kind: Any = _Records if isinstance(codec, RecordCodec) else store_for(codec)
                self._store = kind.over(self._samples.share(), codec, Arc(slots, slots))
            self._generation, self._reserved = generation, 0
        return self._store

    def _drop(self) -> None:
        opened, self._store, self._kept = (self._store, self._kept), None, None
        for part in opened:
            if part is not None:
                part.close()

    def _lay_out(self, codec: SampleCodec) -> bool:
        slots = _slots_within(self._samples.size, self.granted, codec)
        if slots <= 0 or not self._index.lay_out(codec, slots):
            return False
        self.ledger.lay_out()
        if (store := self._reopened()) is not None:
            store.slots.reserve_states(0, min(_BLOCK, slots))
        return True

    def _clear(self) -> None:
        self._drop()
        self._index.clear()
        self._samples.discard(0)
        self.ledger.lay_out()

    def _put(self, store: SegmentStore[Any], number: int, contents: Sequence[memoryview], entry: Entry) -> bool:
        """Store a sample under its number; whether there was room for it."""
        if number >= len(store) or not self._has_states(store, number):
            return False
        return self._index.write(len(store), number, entry) and any(store.put_many([number], [contents]))

    def _has_states(self, store: SegmentStore[Any], number: int) -> bool:
        """Whether there is memory for the state of a slot, and for those after it."""
        if number >= self._reserved:
            begin = number // _BLOCK * _BLOCK
            end = min(begin + _BLOCK, len(store))
            try:
                store.slots.reserve_states(begin, end)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return False
            store.slots.states = self._samples.bytes(0, end)  # who looks at all of them takes no memory behind these
            self._reserved = end
        return True


class _Records(RecordStore):
    """Records that end where the index of their stream begins."""

    def _open_slots(self, claims: Claims) -> RecordSlots:
        slots = self.arc.slots
        return RecordSlots(self.segment, slots, claims, self.segment.size - slots * ENTRY_BYTES)


def _slots_within(size: int, granted: int, codec: SampleCodec) -> int:
    """How many slots fit, with their entries of the index."""
    each = codec.slot_bytes + ENTRY_BYTES
    slots = granted // each
    if isinstance(codec, RecordCodec):
        cheap = granted // _DIRECTORY_SHARE // (RecordSlots.slot_bytes + ENTRY_BYTES)
        slots = max(slots, min(cheap, slots * _SMALLER))
    while slots > 0 and (over := store_for(codec).bytes_for(codec, slots) + slots * ENTRY_BYTES - size) > 0:
        slots -= max(over // each, 1)
    return slots

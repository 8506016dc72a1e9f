"""The samples of a stream, stored as they pass, by all processes of a node.

A stream has no index: a sample takes the next number and is stored under it, in rows or records. The first sample
decides which of the two, and how many slots there are (`lay_out`), so nothing has to be read before. A process that
lays the memory out anew holds all locks of the `ledger` and raises its generation; the others see that, and open the
store again.

There are two segments: the ledger with the codec, and the samples. Besides its state a slot has two columns: `mark`, by
which a sample is found again, and `position`, the number of its shard and its number there, which orders all samples.
The columns are written through the mapping, so their memory is reserved before, for a block of slots at a time. The
samples' file has the length that was granted, so that other jobs see how much this one may still take.

When a stream has ended and nothing is added any more, `kept` gives its samples as a store of their own, in the order of
the shards, whichever shard was faster.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.layout import ONCE, READY, Records, layout_of
from lightning_stocache.cache.ledger import POSITION_BITS, Decision, Shard, StreamLedger
from lightning_stocache.cache.placement import Arc, Integers, Order
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import Backend
from lightning_stocache.node.header import HEADER_BYTES
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["StreamHandle", "StreamStore"]

_HEAD = ONCE.plus({"mark": np.uint64, "position": np.uint64})
_HEAD_BYTES = 2 * 8  # more than a slot has in other stores
_BLOCK = 1 << 12  # slots whose columns get their memory together
_SLACK = 4096  # bytes beyond what is granted, for what is as large in every store
_DIRECTORY_SHARE = 28  # at most this part of the bytes granted is for slots of records that may find no room
_SMALLER = 16  # how much smaller than the first sample the mean may be without running out of slots


@dataclass(frozen=True)
class StreamHandle:
    """How another process of the node opens the same."""

    ledger: SegmentHandle
    samples: SegmentHandle
    ranks: int
    granted: int


class StreamStore:
    """The stored samples of a stream.

    Args:
        ledger: how far the stream has come.
        samples: the memory for samples.
        granted: bytes that samples may take, with their columns.

    Example:
        >>> from lightning_stocache import SampleSpec
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

    def __init__(self, ledger: StreamLedger, samples: Segment, granted: int) -> None:
        self.ledger, self.granted, self._samples = ledger, granted, samples
        self._generation = self._reserved = 0
        self._store: Store | None = None
        self._kept: Store | None = None

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
        ledger = StreamLedger.create(ranks, backend)
        try:
            samples = Segment.create(granted + _SLACK, backend)
        except OSError:
            ledger.close()
            raise
        if free:
            keep_free(samples, free)
        return cls(ledger, samples, granted)

    @classmethod
    def attach(cls, handle: StreamHandle) -> StreamStore:
        """Open the store that another process of the node made; an OSError where it cannot be reached."""
        ledger = StreamLedger(Segment.attach(handle.ledger), handle.ranks)
        return cls(ledger, Segment.attach(handle.samples), handle.granted)

    @property
    def handle(self) -> StreamHandle:
        """What another process of the node needs to open it."""
        return StreamHandle(self.ledger.handle, self._samples.handle, self.ledger.ranks, self.granted)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.ledger, self._samples, self.granted)

    # ---- in ----

    @property
    def codec(self) -> SampleCodec | None:
        """What samples look like; None as long as none has come."""
        store = self._opened()
        return None if store is None else store.codec

    def lay_out(self, codec: SampleCodec) -> bool:
        """Lay the memory out for samples of a codec, unless it is laid out. Returns whether samples can be stored.

        Raises:
            OSError: there is no memory even for the columns of its first slots.
        """
        with self.ledger.alone():
            if self._reopened() is not None:
                return True
            slots = _slots_within(self._samples.size, self.granted, codec)
            if slots <= 0 or not self.ledger.lay_out(slots, pickle.dumps(codec)):
                return False
            if (store := self._reopened()) is not None:
                store.layout.reserve(0, min(_BLOCK, slots))
            return True

    def keep(self, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Store a sample of a shard, if there is room and its epoch goes on. Returns its bytes, or None.

        Raises:
            SampleMismatchError: it is not of the codec.
            UnsupportedSampleError: it cannot be stored as bytes.
        """
        while (store := self._opened()) is not None:
            room = store.has_room(sample)
            contents = store.codec.contents(store.codec.encode(sample)) if room else ()
            with self.ledger.locked(shard):
                if self.ledger.generation != self._generation:
                    continue
                if not self.ledger.is_current(shard, epoch):
                    return None
                number, stored = self.ledger.next_number(), False
                if room and number < len(store) and self._has_columns(store, number):
                    columns = store.layout.columns
                    columns["mark"][number], columns["position"][number] = mark, self.ledger.position(shard)
                    stored = any(store.put([number], [contents]))
                self.ledger.note(shard, kept=stored)
                return sum(part.nbytes for part in contents) if stored else None
        self.leave(shard, epoch)
        return None

    def leave(self, shard: Shard, epoch: int) -> None:
        """Count a sample of a shard that has passed unstored."""
        with self.ledger.locked(shard):
            if self.ledger.is_current(shard, epoch):
                self.ledger.note(shard, kept=False)

    def clear(self) -> None:
        """Forget all samples, and give their memory back."""
        with self.ledger.alone():
            self._drop()
            self._samples.discard(0)
            self.ledger.lay_out()

    # ---- out ----

    def kept(self) -> Store:
        """The samples as a store of their own, numbered from 0 without a gap. Nothing may be added any more.

        Raises:
            ValueError: there is none.
        """
        store = self._opened()
        if store is None:
            raise ValueError("nothing is kept of the stream")
        if self._kept is None:
            count = min(self.ledger.count, len(store))
            positions = store.layout.columns["position"][:count]
            order = np.argsort(positions, kind="stable")
            slots = order[store.layout.columns["state"][order] == READY]
            shards = (positions[slots] >> np.uint64(POSITION_BITS)).astype(np.int64)
            self._kept = Store(self._samples.share(), store.codec, Order(slots, shards, len(store)), None, _HEAD)
        return self._kept

    @property
    def shards(self) -> Integers:
        """The number of the shard that each sample of `kept` came from, in rising order, int64 `[samples]`."""
        order: Any = self.kept().arc
        shards: Integers = order.shards
        return shards

    def marked(self, mark: int) -> Iterator[Any]:
        """Copies of the samples that have a mark, each made when it is asked for."""
        store = self._opened()
        if store is None:
            return
        marks = store.layout.columns["mark"][: min(self.ledger.count, len(store))]
        places = store.lookup(np.flatnonzero(marks == np.uint64(mark)))
        for place in places[places >= 0].tolist():
            yield from store.read(np.array([place]))

    @property
    def filled(self) -> int:
        """Number of samples that are stored."""
        store = self._opened()
        if store is None:
            return 0
        store.look_at(min(self.ledger.count, len(store)))
        return store.filled

    def __len__(self) -> int:
        """Number of samples of an epoch, as far as it is known."""
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
        """Number of samples that will be stored, as far as it is known."""
        return self.filled if self.full else self.filled + 1

    @property
    def fill_fraction(self) -> float:
        """1 when a whole epoch is stored; before, the share of the memory that samples take."""
        return 1.0 if self.full or self.ledger.all_kept else min(self.memory_bytes / self.granted, 1.0)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now, with their columns."""
        return min(max(self._samples.allocated_bytes - HEADER_BYTES, 0), self.granted)

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has closed it."""
        return self.ledger.closed

    def unlink(self) -> None:
        """Take the names of its files away, if they have any."""
        self.ledger.unlink()
        self._samples.unlink()

    def close(self) -> None:
        """Close it in this process."""
        if not self.closed:
            self._drop()
            self.ledger.close()
            self._samples.close()

    def _opened(self) -> Store | None:
        """The store as it is laid out now."""
        if self.ledger.generation == self._generation:
            return self._store
        with self.ledger.same_layout():
            return self._reopened()

    def _reopened(self) -> Store | None:
        """The store as it is laid out now, while nobody else can lay it out anew."""
        generation = self.ledger.generation
        if generation != self._generation:
            self._drop()
            slots, codec = self.ledger.layout()
            if slots:
                self._store = Store(self._samples.share(), pickle.loads(codec), Arc(slots, slots), None, _HEAD)
            self._generation, self._reserved = generation, 0
        return self._store

    def _drop(self) -> None:
        opened, self._store, self._kept = (self._store, self._kept), None, None
        for part in opened:
            if part is not None:
                part.close()

    def _has_columns(self, store: Store, number: int) -> bool:
        """Reserve the columns of a slot and those after it. Returns whether there is memory."""
        if number >= self._reserved:
            begin = number // _BLOCK * _BLOCK
            end = min(begin + _BLOCK, len(store))
            try:
                store.layout.reserve(begin, end)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return False
            store.look_at(end)
            self._reserved = end
        return True


def _slots_within(size: int, granted: int, codec: SampleCodec) -> int:
    """How many slots fit, with their columns."""
    each = codec.slot_bytes + _HEAD_BYTES
    slots = granted // each
    if isinstance(codec, RecordCodec):
        cheap = granted // _DIRECTORY_SHARE // (Records.slot_bytes + _HEAD_BYTES)
        slots = max(slots, min(cheap, slots * _SMALLER))
    layout = layout_of(codec)
    while slots > 0 and (beyond := layout.bytes_for(codec, slots, 0, _HEAD) - size) > 0:
        slots -= max(beyond // each, 1)
    return slots

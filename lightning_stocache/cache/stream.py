"""The samples of a stream, stored as they pass, by all processes of a node.

A stream has no index: a sample takes the next number and is stored under it, in rows or records. The first sample
decides which of the two, and how many slots there are (`lay_out`), so nothing has to be read before. A process that
lays the memory out anew holds all locks of the `ledger` and raises its generation; the others see that, and open the
store again.

There are two segments: the ledger with the codec, and the samples. Besides its state a slot has two columns: `mark`, by
which a sample is found again, and `position`, the number of its shard and its number there, which orders all samples.
The columns are written through the mapping, so their memory is reserved before, for a block of slots at a time. The
samples' file has the length that was granted, so that other jobs see how much this one may still take.

When a stream has ended and nothing is added any more, `in_order` gives its samples as a store of their own, in the
order of the shards, whichever shard was faster.
"""

from __future__ import annotations

import errno
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np

from lightning_stocache.cache.layout import ONCE, READY, layout_of
from lightning_stocache.cache.ledger import POSITION_BITS, Shard, StreamLedger
from lightning_stocache.cache.placement import Arc, Integers, Order
from lightning_stocache.cache.records import RecordCodec, SampleCodec
from lightning_stocache.cache.shortage import keep_free
from lightning_stocache.cache.store import Store, slots_for
from lightning_stocache.node.files import Backend
from lightning_stocache.node.header import HEADER_BYTES
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["StreamStore"]

_HEAD = ONCE.plus({"mark": np.uint64, "position": np.uint64})
_HEAD_BYTES = 2 * 8  # more than a slot has in other stores
_BLOCK = 1 << 12  # slots whose columns get their memory together
_SLACK = 4096  # bytes beyond what is granted, for what is as large in every store
_SMALLER = 16  # how much smaller than the first sample the mean may be without running out of slots


class StreamStore:
    """The stored samples of a stream.

    Args:
        ledger: how far the stream has come.
        samples: the memory for samples.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> store, shard = StreamStore.create(2**20), Shard()
        >>> epoch = store.ledger.begin(shard)
        >>> store.lay_out(SampleSpec.infer(1))
        True
        >>> [store.put(shard, epoch, number * number, mark=number) for number in range(3)]
        [8, 8, 8]
        >>> ordered, shards = store.in_order()
        >>> list(ordered.read(ordered.lookup(np.array([2, 0]))))
        [4, 0]
        >>> store.close()
    """

    def __init__(self, ledger: StreamLedger, samples: Segment) -> None:
        self.ledger, self._samples = ledger, samples
        self.granted = samples.size - _SLACK
        """Bytes that samples may take, with their columns."""
        self._generation = self._reserved = 0
        self._store: Store | None = None
        self._ordered: tuple[Store, Integers] | None = None

    @classmethod
    def create(cls, granted: int, ranks: int = 1, backend: Backend | None = None, free: int = 0) -> StreamStore:
        """Make an empty one.

        Args:
            granted: bytes that samples may take, with their columns.
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
        return cls(ledger, samples)

    @classmethod
    def attach(cls, handle: tuple[SegmentHandle, SegmentHandle]) -> StreamStore:
        """Open the store that another process of the node made; an OSError where it cannot be reached."""
        return _opened(*map(Segment.attach, handle))

    @property
    def handle(self) -> tuple[SegmentHandle, SegmentHandle]:
        """The address of this store for other processes: of its ledger and of its samples."""
        return self.ledger.segment.handle, self._samples.handle

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.ledger.segment, self._samples)

    # ---- in ----

    @property
    def codec(self) -> SampleCodec | None:
        """What samples look like; None as long as none has come."""
        store = self._current()
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

    def put(self, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Store a sample of a shard, if there is room and its epoch goes on. Returns its bytes, or None.

        Raises:
            SampleMismatchError: it is not of the codec.
            UnsupportedSampleError: it cannot be stored as bytes.
        """
        while (store := self._current()) is not None:
            room = store.has_room(sample)
            contents = store.codec.contents(store.codec.encode(sample)) if room else ()
            with self.ledger.locked(shard):
                if self.ledger.generation != self._generation:
                    continue
                if not self.ledger.is_current(shard, epoch):
                    return None
                (number, position), stored = self.ledger.take_number(shard), False
                if room and number < len(store) and self._has_columns(store, number):
                    columns = store.layout.columns
                    columns["mark"][number], columns["position"][number] = mark, position
                    stored = any(store.put([number], [contents]))
                self.ledger.note(shard, stored=stored)
                return sum(part.nbytes for part in contents) if stored else None
        self.pass_on(shard, epoch)
        return None

    def pass_on(self, shard: Shard, epoch: int) -> None:
        """Count a sample of a shard that has passed unstored."""
        with self.ledger.locked(shard):
            if self.ledger.is_current(shard, epoch):
                self.ledger.note(shard, stored=False)

    def clear(self) -> None:
        """Forget all samples, and give their memory back."""
        with self.ledger.alone():
            self._drop()
            self._samples.discard(0)
            self.ledger.lay_out()

    # ---- out ----

    def in_order(self) -> tuple[Store, Integers]:
        """The samples as a store of their own, numbered from 0 without a gap. Nothing may be added any more.

        Returns:
            The store, and the number of the shard that each sample came from, in rising order, int64 `[samples]`.

        Raises:
            ValueError: nothing is stored.
        """
        store = self._current()
        if store is None:
            raise ValueError("nothing is stored of the stream")
        if self._ordered is None:
            count = min(self.ledger.count, len(store))
            positions = store.layout.columns["position"][:count]
            order = np.argsort(positions, kind="stable")
            slots = order[store.layout.columns["state"][order] == READY]
            shards = (positions[slots] >> np.uint64(POSITION_BITS)).astype(np.int64)
            self._ordered = Store(self._samples.share(), store.codec, Order(slots, len(store)), None, _HEAD), shards
        return self._ordered

    def marked(self, mark: int) -> Iterator[Any]:
        """Copies of the samples that have a mark, each made when it is asked for."""
        store = self._current()
        if store is None:
            return
        marks = store.layout.columns["mark"][: min(self.ledger.count, len(store))]
        places = store.lookup(np.flatnonzero(marks == np.uint64(mark)))
        for place in places[places >= 0].tolist():
            yield from store.read(np.array([place]))

    @property
    def filled(self) -> int:
        """Number of samples that are stored."""
        store = self._current()
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
        store = self._current()
        return store is not None and self.ledger.count > len(store) and self.memory_bytes < self.granted // 2

    @property
    def full(self) -> bool:
        """Whether nothing is added any more."""
        return self.ledger.mode == "cache"

    @property
    def capacity(self) -> int:
        """Number of samples that will be stored, as far as it is known."""
        return self.filled if self.full else self.filled + 1

    @property
    def fill_fraction(self) -> float:
        """1 when a whole epoch is stored; before, the share of the memory that samples take."""
        return 1.0 if self.full or self.ledger.all_stored else min(self.memory_bytes / self.granted, 1.0)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now, with their columns."""
        return min(max(self._samples.allocated_bytes - HEADER_BYTES, 0), self.granted)

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has closed it."""
        return self.ledger.segment.closed

    def unlink(self) -> None:
        """Remove the names of its files, if they have any."""
        self.ledger.segment.unlink()
        self._samples.unlink()

    def close(self) -> None:
        """Close it in this process."""
        if not self.closed:
            self._drop()
            self.ledger.close()
            self._samples.close()

    def _current(self) -> Store | None:
        """The store as it is laid out now."""
        if self.ledger.generation == self._generation:
            return self._store
        with self.ledger.locked():
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
        if self._store is not None:
            self._store.close()
        if self._ordered is not None:
            self._ordered[0].close()
        self._store = self._ordered = None

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


def _opened(ledger: Segment, samples: Segment) -> StreamStore:
    return StreamStore(StreamLedger(ledger), samples)


def _slots_within(size: int, granted: int, codec: SampleCodec) -> int:
    """How many slots fit, with their columns."""
    each = codec.slot_bytes + _HEAD_BYTES
    slots = granted // each
    if isinstance(codec, RecordCodec):
        slots = slots_for(granted, codec, slots * _SMALLER, _HEAD_BYTES)
    layout = layout_of(codec)
    while slots > 0 and (beyond := layout.bytes_for(codec, slots, 0, _HEAD) - size) > 0:
        slots -= max(beyond // each, 1)
    return slots

"""The samples of a stream, stored as they pass, by all processes of a node.

A stream has no index: a sample takes the next number and is stored under it, in rows or records. There are two
segments: the `ledger`, which counts what has passed, and the samples. Besides its state a slot has two columns: `mark`,
by which a sample is found again, and `position`, the number of its shard and its number there, which orders all
samples. The columns are written through the mapping, so their memory is reserved before, for a block of slots at a
time. The samples' file has the length that was granted, so that other jobs see how much this one may still take.

When a stream has ended and nothing is added any more, `in_order` gives its samples as a store of their own, in the
order of the shards, whichever shard was faster.
"""

from __future__ import annotations

import errno
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
_SMALLER = 16  # how much smaller than the first samples the mean may be without running out of slots


class StreamStore:
    """The stored samples of a stream.

    Args:
        ledger: how far the stream has come.
        samples: the memory for samples.
        codec: what a sample looks like.
        slots: how many may be stored.

    Example:
        >>> from lightning_stocache import SampleSpec
        >>> store, shard = StreamStore.create(SampleSpec.infer(1), 2**20), Shard()
        >>> epoch = store.ledger.begin(shard)
        >>> [store.put(shard, epoch, number * number, mark=number) for number in range(3)]
        [8, 8, 8]
        >>> ordered, shards = store.in_order()
        >>> list(ordered.read(ordered.lookup(np.array([2, 0]))))
        [4, 0]
        >>> store.close()
    """

    def __init__(self, ledger: StreamLedger, samples: Segment, codec: SampleCodec, slots: int) -> None:
        self.ledger, self._samples, self.codec = ledger, samples, codec
        self._store = Store(samples, codec, Arc(slots, slots), None, _HEAD)
        self._store.look_at(0)
        self._reserved = self._cleared = 0
        self._ordered: tuple[Store, Integers] | None = None

    @classmethod
    def create(
        cls, codec: SampleCodec, granted: int, ranks: int = 1, backend: Backend | None = None, free: int = 0
    ) -> StreamStore:
        """Make an empty one.

        Args:
            codec: what a sample looks like.
            granted: bytes that samples may take, with their columns.
            ranks: ranks of the node that read the stream.
            backend: kind of segments.
            free: bytes of the node's memory that filling leaves to others; 0: as many as it does by itself.

        Raises:
            OSError: the memory cannot be had.
        """
        slots, layout = granted // (codec.slot_bytes + _HEAD_BYTES), layout_of(codec)
        if isinstance(codec, RecordCodec):
            slots = slots_for(granted, codec, slots * _SMALLER, _HEAD_BYTES)
        ledger = StreamLedger.create(ranks, backend)
        try:
            samples = Segment.create(layout.bytes_for(codec, slots, granted, _HEAD), backend)
        except OSError:
            ledger.close()
            raise
        if free:
            keep_free(samples, free)
        return cls(ledger, samples, codec, slots)

    @classmethod
    def attach(cls, handle: tuple[SegmentHandle, SegmentHandle, SampleCodec, int]) -> StreamStore:
        """Open the store that another process of the node made; an OSError where it cannot be reached."""
        ledger, samples, codec, slots = handle
        return _opened(Segment.attach(ledger), Segment.attach(samples), codec, slots)

    @property
    def handle(self) -> tuple[SegmentHandle, SegmentHandle, SampleCodec, int]:
        """The address of this store for other processes: of its ledger and of its samples, and what these are."""
        return self.ledger.segment.handle, self._samples.handle, self.codec, len(self._store)

    def __reduce__(self) -> tuple[Any, ...]:
        return _opened, (self.ledger.segment, self._samples, self.codec, len(self._store))

    # ---- in ----

    def put(self, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Store a sample of a shard, if there is room and its epoch goes on. Returns its bytes, or None.

        Raises:
            SampleMismatchError: it is not of the codec.
            UnsupportedSampleError: it cannot be stored as bytes.
        """
        store, ledger = self._store, self.ledger
        room = store.has_room(sample) and ledger.count < len(store)
        contents = store.codec.contents(store.codec.encode(sample)) if room else ()
        with ledger.locked(shard):
            if ledger.mode != "stream" or not ledger.is_current(shard, epoch):
                return None
            stored = False
            if room:
                number, position = ledger.take_number(shard, epoch)
                if number < len(store) and self._has_columns(number):
                    columns = store.layout.columns
                    columns["mark"][number], columns["position"][number] = mark, position
                    stored = any(store.put([number], [contents]))
            ledger.note(shard, epoch, stored=stored)
        return sum(part.nbytes for part in contents) if stored else None

    def clear(self) -> None:
        """Forget all samples, and give their memory back."""
        with self.ledger.alone():
            self._samples.discard(0)
            self.ledger.clear()

    # ---- out ----

    def in_order(self) -> tuple[Store, Integers]:
        """The samples as a store of their own, numbered from 0 without a gap. Nothing may be added any more.

        Returns:
            The store, and the number of the shard that each sample came from, in rising order, int64 `[samples]`.
        """
        if self._ordered is None:
            store, count = self._store, self._count
            columns = store.layout.columns
            order = np.argsort(columns["position"][:count], kind="stable")
            slots = order[columns["state"][order] == READY]
            shards = (columns["position"][slots] >> np.uint64(POSITION_BITS)).astype(np.int64)
            self._ordered = Store(self._samples.share(), self.codec, Order(slots, len(store)), None, _HEAD), shards
        return self._ordered

    def marked(self, mark: int) -> Iterator[Any]:
        """Copies of the samples that have a mark, each made when it is asked for."""
        store = self._store
        places = store.lookup(np.flatnonzero(store.layout.columns["mark"][: self._count] == np.uint64(mark)))
        for place in places[places >= 0].tolist():
            yield from store.read(np.array([place]))

    @property
    def filled(self) -> int:
        """Number of samples that are stored."""
        self._store.look_at(self._count)
        return self._store.filled

    def __len__(self) -> int:
        """Number of samples of an epoch, as far as it is known."""
        return self.filled

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
        return 1.0 if self.full or self.ledger.all_stored else min(self.memory_bytes / self._samples.size, 1.0)

    @property
    def memory_bytes(self) -> int:
        """Bytes that the samples take on this node right now, with their columns."""
        return min(max(self._samples.allocated_bytes - HEADER_BYTES, 0), self._samples.size)

    @property
    def _count(self) -> int:
        """How many of the first slots may have a sample."""
        return min(self.ledger.count, len(self._store))

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
            if self._ordered is not None:
                self._ordered[0].close()
                self._ordered = None
            self._store.close()
            self.ledger.close()

    def _has_columns(self, number: int) -> bool:
        """Reserve the columns of a slot and those after it. Returns whether there is memory."""
        if self._cleared != self.ledger.cleared:  # it cannot be again: the lock of a shard is held
            self._reserved, self._cleared = 0, self.ledger.cleared
        if number >= self._reserved:
            begin = number // _BLOCK * _BLOCK
            end = min(begin + _BLOCK, len(self._store))
            try:
                self._store.layout.reserve(begin, end)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return False
            self._reserved = end
        return True


def _opened(ledger: Segment, samples: Segment, codec: SampleCodec, slots: int) -> StreamStore:
    return StreamStore(StreamLedger(ledger), samples, codec, slots)

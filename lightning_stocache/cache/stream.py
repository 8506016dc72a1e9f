"""The samples of a stream, stored as they pass, and the progress of its epochs, for all processes of a node.

A stream is read by shards: one shard per rank and worker of its loader. A shard begins an epoch, appends each sample
that passes, and ends. Shards of a rank that begin with the same key (the seed of their loader's epoch) are in the same
epoch. A shard that begins twice with one key has begun the next epoch. So each rank counts its epochs without a message
from the loader. A rank has read an epoch to its end if all of its shards have ended, or if as many samples have passed
as the stream has: a loader that knows the length stops there.

The first process that asks after every rank of the node has begun an epoch decides for all shards what the epoch comes
from (`decide`). `clear` precedes each epoch that is read again, so the counts are those of one epoch.

There are two segments. The ledger has columns of int64: numbers for all shards, for each rank, and for each of the
`MOST_WORKERS` shards of every rank. Three bytes of its file are locked, which a process takes in this order:

    deciding   by the process that decides
    storing    shared by all that are storing a sample; alone by `clear`
    counting   while numbers of the ledger are written

The other segment has the samples. A sample takes the next number, which is its slot and its index. Besides the state, a
slot has two columns: `mark`, by which a sample is found again, and `shard`. They are written through the mapping, so
their memory is reserved first, for a block of slots at a time. The file has the length that was granted, so other jobs
see how much this job may still take.

When the stream has ended, `in_order` gives the indices one shard after the other, the samples of each shard as they
came. So the order does not depend on which shard was faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.head import ONCE, columns, offsets
from lightning_stocache.cache.placement import Arc, Integers
from lightning_stocache.cache.seats import READY
from lightning_stocache.cache.store import Store, layout_of
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment

__all__ = ["MOST_WORKERS", "Mode", "Shard", "StreamLedger", "StreamStore"]

MOST_WORKERS = 256
"""The most workers of a rank whose samples can be stored."""

Mode = Literal["stream", "cache", "pass"]
"""The source of an epoch's samples: the stream, which is stored; the store; or the stream, which is not stored."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_RANKS, _NEXT, _RESERVED, _DECIDED, _MODE, _BROKEN, _WORDS = range(7)
_DECIDING, _STORING, _COUNTING = range(3)  # bytes that are locked
_UNCLAIMED = -1
_BLOCK = 1 << 12  # slots whose columns get their memory together
_SMALLER = 16  # how much smaller than the first samples the mean may be without running out of slots


@dataclass(frozen=True)
class Shard:
    """The part of a stream that one process reads: a worker of a rank of the node. `key` tells epochs apart."""

    rank: int = 0
    worker: int = 0
    workers: int = 1
    key: int = 0

    @property
    def number(self) -> int:
        """The number of this shard among all possible shards."""
        return self.rank * MOST_WORKERS + self.worker


class StreamLedger:
    """The progress of one stream on a node, in shared memory.

    Args:
        segment: the memory of the numbers.

    Example:
        >>> ledger, shard = StreamLedger.create(1), Shard()
        >>> epoch = ledger.begin(shard)
        >>> ledger.decide(epoch, lambda late: "stream"), ledger.decide(epoch, lambda late: "cache")
        ('stream', 'stream')
        >>> with ledger.counting():
        ...     ledger.take_number(shard)
        0
        >>> ledger.end(shard, epoch)
        >>> ledger.begin(shard), ledger.passed(1)
        (2, 1)
        >>> ledger.close()
    """

    patience = 60.0
    """Seconds to wait for a rank that does not begin an epoch."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.words: npt.NDArray[np.int64] = columns(segment, {"words": np.int64}, _WORDS)["words"]
        self.ranks = int(self.words[_RANKS])
        self._numbers = {name: array[0] for name, array in columns(segment, _columns(self.ranks), 1).items()}

    @classmethod
    def create(cls, ranks: int, backend: Backend | None = None) -> StreamLedger:
        """Make a ledger for a stream that `ranks` ranks of the node read. Raises OSError without memory."""
        size = offsets(_columns(ranks), 1)[""]
        segment = Segment.create(size, backend, reserved=size)
        columns(segment, {"words": np.int64}, _WORDS)["words"][_RANKS] = ranks
        return cls(segment)

    # ---- epochs ----

    def announce(self, rank: int) -> int:
        """Begin the next epoch of a rank before its shards, which join that epoch. Returns the number of the epoch."""
        with self.counting():
            return self._next_epoch(rank, _UNCLAIMED)

    def begin(self, shard: Shard) -> int:
        """Begin an epoch of a shard: the current or the next epoch of its rank. Returns the number of the epoch."""
        rank = shard.rank
        with self.counting():
            epoch = int(self._numbers["epoch"][rank])
            if self._numbers["key"][rank] == _UNCLAIMED:
                self._numbers["key"][rank] = shard.key
            elif self._numbers["key"][rank] != shard.key or self._numbers["begun"][shard.number] == epoch:
                epoch = self._next_epoch(rank, shard.key)
            self._numbers["begun"][shard.number] = epoch
        return epoch

    def is_current(self, shard: Shard, epoch: int) -> bool:
        """Whether the rank of a shard is still in this epoch."""
        return bool(self._numbers["epoch"][shard.rank] == epoch)

    def end(self, shard: Shard, epoch: int) -> None:
        """Note that a shard has read its part to the end. Call it once per epoch."""
        with self.counting():
            if self.is_current(shard, epoch):
                self._numbers["ended"][shard.rank] += 1
                if self._numbers["ended"][shard.rank] == shard.workers:
                    self._numbers["whole"][shard.rank] = epoch

    def passed(self, epoch: int, length: int | None = None) -> int | None:
        """Count the samples of the epoch that was read last, in all ranks. None if a rank did not read it to its end.

        `length` is the number of samples in the stream of one rank, if that is known.
        """
        whole = self._numbers["whole"] == epoch
        if length is not None:
            whole |= self._numbers["passed"] >= length
        return self.count if whole.all() else None

    @property
    def epoch(self) -> int:
        """The latest epoch of the first rank."""
        return int(self._numbers["epoch"][0])

    def _next_epoch(self, rank: int, key: int) -> int:
        self._numbers["epoch"][rank] += 1
        self._numbers["key"][rank], self._numbers["ended"][rank] = key, 0
        return int(self._numbers["epoch"][rank])

    # ---- decisions ----

    @property
    def mode(self) -> Mode:
        """The last decision."""
        return _MODES[int(self.words[_MODE])]

    def decide(self, epoch: int, choose: Callable[[Sequence[int]], Mode]) -> Mode:
        """Decide where the samples of an epoch come from. The decisions "cache" and "pass" are final.

        One process of the node calls `choose`, when all ranks have begun the epoch.

        Args:
            epoch: an epoch that this rank has begun.
            choose: receives the ranks that have not begun the epoch within `patience`.
        """
        start = time.monotonic()
        while not self._is_decided(epoch):
            if self._late(epoch) and time.monotonic() - start <= self.patience:
                time.sleep(0.002)
                continue
            with self.segment.holding(_DECIDING):
                if not self._is_decided(epoch):
                    self._note_decision(epoch, choose(self._late(epoch)))
        return self.mode

    def _late(self, epoch: int) -> list[int]:
        """The ranks that have not begun an epoch. None is late in the first one."""
        late: list[int] = np.flatnonzero(self._numbers["epoch"] < epoch).tolist() if epoch > 1 else []
        return late

    def _note_decision(self, epoch: int, mode: Mode) -> None:
        with self.counting():
            if self.mode == "stream":
                self.words[_MODE] = _MODES.index(mode)
            self.words[_DECIDED] = epoch

    def pass_by(self) -> Mode:
        """Store nothing from now on. Returns the decision before."""
        with self.counting():
            before = self.mode
            self.words[_MODE] = _MODES.index("pass")
        return before

    def count_broken(self) -> int:
        """Count an epoch that was not read to its end. Call it in `choose`. Returns the number of such epochs."""
        self.words[_BROKEN] += 1
        return int(self.words[_BROKEN])

    def _is_decided(self, epoch: int) -> bool:
        return self.mode != "stream" or bool(self.words[_DECIDED] >= epoch)

    # ---- numbers ----

    def counting(self) -> AbstractContextManager[None]:
        """Exclude other processes and threads that count."""
        return self.segment.holding(_COUNTING)

    def take_number(self, shard: Shard) -> int:
        """Count a sample of a shard. Returns its number in the epoch. Needs `storing`, then `counting`."""
        self.words[_NEXT] += 1
        self._numbers["passed"][shard.rank] += 1
        return self.count - 1

    @property
    def count(self) -> int:
        """Number of samples that have passed in this epoch."""
        return int(self.words[_NEXT])

    def storing(self) -> AbstractContextManager[None]:
        """Store a sample, beside other processes that do."""
        return self.segment.holding(_STORING, shared=True)

    def clear(self, discard: Callable[[], None]) -> None:
        """Call `discard` while no process stores a sample, and begin with number 0 again."""
        with self.segment.holding(_STORING):
            discard()
            self.words[_NEXT] = self.words[_RESERVED] = 0
            self._numbers["passed"][:] = 0

    def close(self) -> None:
        """Close the ledger in this process."""
        self.words, self._numbers = self.words.copy(), {}
        self.segment.close()


def _columns(ranks: int) -> dict[str, npt.DTypeLike]:
    of_ranks = dict.fromkeys(("epoch", "key", "ended", "whole", "passed"), (np.int64, (ranks,)))
    of_shards = {"begun": (np.int64, (ranks * MOST_WORKERS,))}
    return {"words": (np.int64, (_WORDS,)), **of_ranks, **of_shards}


class StreamStore(Store):
    """The stored samples of a stream. The index of a sample is the number of its slot.

    Args:
        segment: the memory for samples.
        codec: what a sample looks like.
        arc: all slots, in their order.
        companion: the memory of the ledger.

    Example:
        >>> from lightning_stocache.cache.rows import SampleSpec
        >>> store, shard = StreamStore.empty(SampleSpec.infer(1), 2**20), Shard()
        >>> epoch = store.ledger.begin(shard)
        >>> [store.append(shard, epoch, number * number, mark=number) for number in range(3)]
        [8, 8, 8]
        >>> indices, shards = store.in_order()
        >>> list(store.read(store.lookup(indices[[2, 0]])))
        [4, 0]
        >>> store.close()
    """

    head = ONCE.plus({"mark": np.uint64, "shard": np.int32})
    stores_misses = False

    def __init__(self, segment: Segment, codec: Codec, arc: Arc, companion: Segment) -> None:
        super().__init__(segment, codec, arc, companion)
        self.ledger = StreamLedger(companion)
        self.stream_length: int | None = None  # samples of one rank, if the stream tells its length

    @classmethod
    def empty(cls, codec: Codec, granted: int, ranks: int = 1, backend: Backend | None = None) -> StreamStore:
        """Make an empty store.

        Args:
            codec: what a sample looks like.
            granted: bytes that samples and their columns may take.
            ranks: ranks of the node that read the stream.
            backend: kind of segments.
        """
        layout = layout_of(codec)
        expected = layout.expected_slots(granted, codec, cls.head)
        slots = layout.slots_for(granted, codec, expected * _SMALLER, cls.head)
        segment = Segment.create(layout.bytes_for(codec, slots, granted, cls.head), backend)
        return cls(segment, codec, Arc(slots, slots), StreamLedger.create(ranks, backend).segment)

    # ---- storing ----

    def append(self, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Store a sample of a shard, if there is room and its epoch is the current one. Returns its bytes, or None.

        Raises:
            SampleMismatchError: the sample does not match the codec.
            UnsupportedSampleError: the sample cannot be stored as bytes.
        """
        codec, layout, ledger = self.codec, self.layout, self.ledger
        has_room = layout.has_room(codec.least_bytes(sample)) and ledger.count < layout.count
        contents = codec.contents(codec.encode(sample)) if has_room else ()
        nbytes, stored = layout.size(contents), False
        with ledger.storing():
            if ledger.mode != "stream" or not ledger.is_current(shard, epoch):
                return None
            with ledger.counting():
                number = ledger.take_number(shard)
                has_room = has_room and self._has_columns(number)
            if has_room and self._has_memory(nbytes):
                layout.columns["mark"][number], layout.columns["shard"][number] = mark, shard.number
                stored = self._write([number], [contents]) == [True]
        return nbytes if stored else None

    def clear(self) -> None:
        """Forget all samples, and return their memory."""
        self.ledger.clear(self.segment.discard)

    def _has_columns(self, number: int) -> bool:
        """Reserve the columns up to a slot. Returns False if there is no such slot, or no memory."""
        reserved = int(self.ledger.words[_RESERVED])
        if reserved <= number < self.layout.count:
            end = min(number // _BLOCK * _BLOCK + _BLOCK, self.layout.count)
            try:
                self.layout.reserve(reserved, end)
            except OSError:
                return False
            self.ledger.words[_RESERVED] = end
        return number < self.layout.count

    # ---- reading ----

    def in_order(self) -> tuple[Integers, Integers]:
        """Sort the samples by shard, and within a shard as they came. No sample may be added any more.

        Returns:
            The indices of the samples, and the shard of each, int64 `[samples]`.
        """
        shards = self.layout.columns["shard"][: self._count]
        indices = np.argsort(shards, kind="stable")
        indices = indices[self._stored[indices]]
        return indices, shards[indices].astype(np.int64)

    def marked(self, mark: int) -> Iterator[Any]:
        """Copy the samples with this mark, one by one as the caller iterates."""
        marks, states = self.layout.columns["mark"], self.layout.states
        for slot in np.flatnonzero(marks[: self._count] == np.uint64(mark)).tolist():
            if states[slot] == READY:
                yield from self.read(np.array([slot]))

    # ---- size ----

    @property
    def _count(self) -> int:
        """Number of the first slots that may have a sample. Reading the columns of other slots would take memory."""
        return 0 if self.closed else min(self.ledger.count, int(self.ledger.words[_RESERVED]))

    def _stored_in(self, first: int, last: int) -> npt.NDArray[np.bool_]:
        return self.layout.stored(first, min(last, self._count))

    def __len__(self) -> int:
        """Number of samples that are stored."""
        return self.filled

    @property
    def full(self) -> bool:
        """Whether later epochs come from the store, and no sample is added any more."""
        return not self.closed and self.ledger.mode == "cache"

    @property
    def capacity(self) -> int:
        """Number of samples that are stored, and one more while the stream is read."""
        return self.filled if self.full else self.filled + 1

    @property
    def fill_fraction(self) -> float:
        """1 when a whole epoch is stored; before that, the share of the memory that samples take."""
        if self.full or self.ledger.passed(self.ledger.epoch, self.stream_length) == self.filled:
            return 1.0
        return min(self.memory_bytes / self.segment.size, 1.0)

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that were granted and are not taken yet."""
        return 0 if self.full else super().promised_bytes

    def close(self) -> None:
        """Close the store in this process."""
        if not self._closed:
            self.ledger.close()
        super().close()

"""How far a stream has come, for all processes of a node.

A stream is read by shards: one per rank and worker of its loader. A shard begins an epoch (`begin`), notes each sample
that passes and whether it was stored (`note`), and ends (`end`). Shards of a rank that begin with the same key (the
seed of their loader's epoch) are in the same epoch; a shard that begins twice has begun the next one. So epochs are
counted per rank, without a message from the loader. An epoch of a rank is whole if all of its shards have ended, or if
as many samples have passed as the stream's length says: a loader that knows the length stops there.

The first process that asks after every rank of the node has begun an epoch decides for all shards what the epoch comes
from (`decide`): then no shard is in the epoch before. The others wait for a rank that does not come, with a message;
then the stream passes through for good.

Layout: columns of int64: one number each for all, then one for each rank, then one for each of the `MOST_WORKERS`
shards of every rank; then the pickle of the samples' codec, up to 64 KiB. All of it is reserved.

Writers take a lock of the lock file, which the kernel frees when they die: byte 0 for the numbers of all and of ranks,
byte 1 for the next number, byte 2 while deciding, and a byte per shard while its process stores a sample. Locks are
taken in the order 2, 0, shards, 1, never back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.layout import columns, offsets
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment
from lightning_stocache.node.waiting import poll

__all__ = ["MOST_WORKERS", "POSITION_BITS", "Mode", "Shard", "StreamLedger", "Totals"]

log = logging.getLogger(__name__)

MOST_WORKERS = 256
"""Workers of a rank whose samples can be stored."""

POSITION_BITS = 40
"""Bits of a position that count the samples of a shard; the bits above are the shard's number."""

Mode = Literal["stream", "cache", "pass"]
"""Where the samples of an epoch come from: the stream, which is stored; the store; the stream, which is not stored."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_FINAL = ("cache", "pass")
_CODEC_BYTES = 1 << 16
_OF_ALL = dict.fromkeys(
    ("ranks", "next", "generation", "slots", "codec_bytes", "decided", "mode", "flags", "broken"), np.int64
)
_OF_RANK = dict.fromkeys(("epoch", "key", "workers", "last", "whole", "passed", "stored"), np.int64)
_OF_SHARD = dict.fromkeys(("begun", "ended", "seen", "stored"), np.int64)
_ALL, _NUMBER, _DECISION, _ROWS = 0, 1, 2, 8  # bytes of the lock file
_UNCLAIMED = -1


@dataclass(frozen=True)
class Shard:
    """The part of a stream that one process reads.

    Args:
        rank: its rank, among those of the node.
        worker: its worker, of the rank's loader; 0 without workers.
        workers: number of workers.
        key: the same for all workers of one epoch.
    """

    rank: int = 0
    worker: int = 0
    workers: int = 1
    key: int = 0

    @property
    def number(self) -> int:
        """Its number among all shards that there can be."""
        return self.rank * MOST_WORKERS + self.worker


@dataclass(frozen=True)
class Totals:
    """Samples of an epoch, over all shards: that have passed, and that were stored."""

    passed: int
    stored: int


class StreamLedger:
    """The numbers of one stream on a node.

    Args:
        segment: where they lie.

    Example:
        >>> ledger, shard = StreamLedger.create(1), Shard()
        >>> epoch = ledger.begin(shard)
        >>> ledger.decide(epoch, lambda: "stream"), ledger.decide(epoch, lambda: "cache")
        ('stream', 'stream')
        >>> ledger.note(shard, stored=True)
        >>> ledger.end(shard, epoch)
        >>> ledger.begin(shard), ledger.totals(1)
        (2, Totals(passed=1, stored=1))
        >>> ledger.close()
    """

    patience = 60.0
    """Seconds to wait for a rank that does not begin an epoch."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self.claims = segment, Claims(segment)
        self._all = columns(segment, _OF_ALL, 1)
        self.ranks = int(self._all["ranks"][0])
        of_rank, of_shard, self._codec, _ = _starts(self.ranks)
        self._ranks = columns(segment, _OF_RANK, self.ranks, of_rank)
        self._shards = columns(segment, _OF_SHARD, self.ranks * MOST_WORKERS, of_shard)

    @classmethod
    def create(cls, ranks: int, backend: Backend | None = None) -> StreamLedger:
        """Make one for a stream that nobody has read.

        Args:
            ranks: number of ranks of the node that read the stream.
            backend: kind of segment.

        Raises:
            OSError: there is no memory for it.
        """
        size = _starts(ranks)[3]
        segment = Segment.create(size, backend, reserved=size)
        columns(segment, _OF_ALL, 1)["ranks"][0] = ranks
        return cls(segment)

    # ---- epochs ----

    def announce(self, rank: int, workers: int) -> int:
        """Begin a rank's next epoch before its shards, which will join it. Returns its number."""
        with self.claims.waiting(_ALL):
            return self._next_epoch(rank, _UNCLAIMED, workers)

    def begin(self, shard: Shard) -> int:
        """Begin an epoch of a shard: the current one of its rank, or the next one. Returns its number."""
        ranks, shards, rank, row = self._ranks, self._shards, shard.rank, shard.number
        with self.claims.waiting(_ALL):
            if ranks["key"][rank] == _UNCLAIMED:
                ranks["key"][rank], ranks["workers"][rank] = shard.key, shard.workers
            elif ranks["key"][rank] != shard.key or shards["begun"][row] == ranks["epoch"][rank]:
                self._next_epoch(rank, shard.key, shard.workers)
            shards["ended"][row] = shards["seen"][row] = shards["stored"][row] = 0
            shards["begun"][row] = epoch = self._epoch_of(rank)
        return epoch

    def is_current(self, shard: Shard, epoch: int) -> bool:
        """Whether a shard's rank is still in this epoch, and not in a later one."""
        return self._epoch_of(shard.rank) == epoch

    def note(self, shard: Shard, *, stored: bool) -> None:
        """Count a sample that has passed, under the lock of the shard (`locked`)."""
        self._shards["stored"][shard.number] += stored
        self._shards["seen"][shard.number] += 1

    def end(self, shard: Shard, epoch: int) -> None:
        """Note that a shard has come to its end."""
        with self.claims.waiting(_ALL):
            if self.is_current(shard, epoch):
                self._shards["ended"][shard.number] = 1

    def totals(self, epoch: int, length: int | None = None) -> Totals | None:
        """Count the samples of an epoch that is over in every rank; None if a rank has broken it off.

        Args:
            epoch: the last epoch before the one that all ranks have begun.
            length: the length of the stream of one rank, if it has one.
        """
        ranks = self._ranks
        whole = (ranks["whole"] > 0) | (length is not None and ranks["passed"] >= length)
        if not ((ranks["last"] == epoch) & whole).all():
            return None
        return Totals(int(ranks["passed"].sum()), int(ranks["stored"].sum()))

    @property
    def all_stored(self) -> bool:
        """Whether the latest epoch has ended in every shard, and all of its samples were stored."""
        counts = map(self._counts, range(self.ranks))
        return all(ended and passed == stored for ended, passed, stored in counts)

    def _epoch_of(self, rank: int) -> int:
        """The number of a rank's latest epoch."""
        return int(self._ranks["epoch"][rank])

    def _next_epoch(self, rank: int, key: int, workers: int) -> int:
        ranks, epoch = self._ranks, self._epoch_of(rank)
        ranks["last"][rank] = epoch
        ranks["whole"][rank], ranks["passed"][rank], ranks["stored"][rank] = self._counts(rank)
        ranks["key"][rank], ranks["workers"][rank] = key, workers
        ranks["epoch"][rank] = epoch + 1
        return epoch + 1

    def _counts(self, rank: int) -> tuple[bool, int, int]:
        """Of a rank's latest epoch: whether all of its shards have ended, samples that passed, samples stored."""
        shards = {name: column[Shard(rank).number : Shard(rank + 1).number] for name, column in self._shards.items()}
        epoch = self._epoch_of(rank)
        begun = (shards["begun"] == epoch) & (epoch > 0)
        ended, passed, stored = (int(shards[name][begun].sum()) for name in ("ended", "seen", "stored"))
        return 0 < ended == int(self._ranks["workers"][rank]), passed, stored

    # ---- decisions ----

    @property
    def mode(self) -> Mode:
        """What was decided last."""
        return _MODES[int(self._all["mode"][0])]

    def decide(self, epoch: int, choose: Callable[[], Mode]) -> Mode:
        """Where the samples of an epoch come from; decides it if no process has.

        Args:
            epoch: an epoch that a shard of this process, or its rank, has begun.
            choose: called by one process of the node, when no shard is in an epoch before.
        """
        start = time.monotonic()
        for seconds in poll(pause=0.002):
            if self._is_decided(epoch):
                break
            late = [rank for rank in range(self.ranks) if self._epoch_of(rank) < epoch] if epoch > 1 else []
            if (not late or time.monotonic() - start > self.patience) and self.claims.take(_DECISION):
                try:
                    if not self._is_decided(epoch):
                        if late:
                            log.warning(
                                "a stream passes through uncached from now on: rank(s) %s of the node did not begin "
                                "epoch %d within %.0f s.\nEvery rank must read the stream as often",
                                ", ".join(map(str, late)),
                                epoch,
                                self.patience,
                            )
                        mode = "pass" if late else choose()
                        with self.claims.waiting(_ALL):
                            if self.mode not in _FINAL:
                                self._all["mode"][0] = _MODES.index(mode)
                            self._all["decided"][0] = epoch
                finally:
                    self.claims.release(_DECISION)
            elif seconds:
                what = f"rank(s) {', '.join(map(str, late))} to begin" if late else "another process to decide on"
                log.warning("a stream waits for %s epoch %d", what, epoch)
        return self.mode

    def pass_by(self) -> Mode:
        """Store nothing from the next epoch on. Returns what was decided before."""
        with self.claims.waiting(_ALL):
            before, self._all["mode"][0] = self.mode, _MODES.index("pass")
        return before

    def count_broken(self, *, reset: bool = False) -> int:
        """Count an epoch that was broken off, or begin to count anew. Returns how many were, one after the other."""
        self._all["broken"][0] = count = 0 if reset else int(self._all["broken"][0]) + 1
        return count

    def is_first(self, flag: int) -> bool:
        """Raise a flag (a power of two). Returns whether no process of the node had raised it."""
        with self.claims.waiting(_ALL):
            first = not self.has(flag)
            self._all["flags"][0] |= flag
        return first

    def has(self, flag: int) -> bool:
        """Whether a flag was raised."""
        return bool(self._all["flags"][0] & flag)

    def _is_decided(self, epoch: int) -> bool:
        return self.mode in _FINAL or bool(self._all["decided"][0] >= epoch)

    # ---- what is stored ----

    @property
    def generation(self) -> int:
        """How often the memory was laid out anew; 0 before the first sample."""
        return int(self._all["generation"][0])

    def lay_out(self, slots: int = 0, codec: bytes = b"") -> bool:
        """Note a new layout of the samples' memory, under all locks (`alone`); numbers start from 0.

        Args:
            slots: number of slots; 0 if nothing is stored.
            codec: the pickled codec of the samples.

        Returns:
            Whether there is room for the codec.
        """
        if len(codec) > _CODEC_BYTES:
            return False
        self.segment.store(self._codec, memoryview(codec))
        self._all["slots"][0], self._all["codec_bytes"][0], self._all["next"][0] = slots, len(codec), 0
        self._all["generation"][0] += 1
        return True

    def layout(self) -> tuple[int, bytes]:
        """The number of slots and the pickled codec; 0 and nothing before the first sample."""
        with self.segment.memory(self._codec, int(self._all["codec_bytes"][0])) as codec:
            return int(self._all["slots"][0]), bytes(codec)

    def take_number(self, shard: Shard) -> tuple[int, int]:
        """Take the next number for a sample of a shard, under its lock (`locked`).

        Returns:
            The number, and the position of the sample, which orders all samples by their shards.
        """
        with self.claims.waiting(_NUMBER):
            number = self.count
            self._all["next"][0] = number + 1
        return number, shard.number << POSITION_BITS | int(self._shards["seen"][shard.number])

    @property
    def count(self) -> int:
        """How many numbers have been taken."""
        return int(self._all["next"][0])

    def locked(self, shard: Shard | None = None) -> AbstractContextManager[None]:
        """Keep other processes from laying the memory out anew; for a shard, while its process stores a sample."""
        return self.claims.waiting(_ALL if shard is None else _ROWS + shard.number)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all shards from storing anything."""
        with ExitStack() as locks:
            locks.enter_context(self.locked())
            for row in range(self.ranks * MOST_WORKERS):
                locks.enter_context(self.claims.waiting(_ROWS + row))
            yield

    def close(self) -> None:
        """Close it in this process."""
        self._all, self._ranks, self._shards = {}, {}, {}
        self.segment.close()


def _starts(ranks: int) -> tuple[int, int, int, int]:
    """Where the columns of ranks and of shards begin, and the codec, and where all end."""
    of_rank = offsets(_OF_ALL, 1)[""]
    of_shard = offsets(_OF_RANK, ranks, of_rank)[""]
    codec = offsets(_OF_SHARD, ranks * MOST_WORKERS, of_shard)[""]
    return of_rank, of_shard, codec, codec + _CODEC_BYTES

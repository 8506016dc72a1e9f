"""How far a stream has come, for all processes of a node.

A stream is read by shards: one per rank and worker of its loader. A shard begins an epoch (`begin`), notes each sample
that passes and whether it was stored (`note`), and ends (`end`). Shards of a rank that begin with the same key (the
seed of their loader's epoch) are in the same epoch; a shard that begins twice has begun the next one. So epochs are
counted per rank, without a message from the loader. An epoch of a rank is whole if all of its shards have ended, or if
as many samples have passed as the stream's length says: a loader that knows the length stops there.

What an epoch comes from is decided once for all shards of a node (`Decision`), by the first process that asks after
every rank of the node has begun the epoch: then no shard is in the epoch before. A rank that does not come is waited
for with a message; then the stream passes by for good.

Layout: columns of int64: one number each for all, then one for each rank, then one for each of the `MOST_WORKERS`
shards of every rank; then the pickle of the samples' codec, up to 64 KiB. All of it is reserved.

Writers hold a lock of the lock file, which the kernel frees when they die: byte 0 for the numbers of all and of ranks,
byte 1 for the next number, byte 2 while deciding, and a byte per shard, which its process holds while it stores a
sample. Locks are taken in the order 2, 0, shards, 1, never back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from lightning_stocache.cache.claims import Claims
from lightning_stocache.cache.layout import columns, offsets
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.node.waiting import moments

__all__ = ["MOST_WORKERS", "POSITION_BITS", "Decision", "Mode", "Shard", "StreamLedger", "Totals"]

log = logging.getLogger(__name__)

MOST_WORKERS = 256
"""Workers of a rank that can keep a stream."""

POSITION_BITS = 40
"""Of a position, those that count the samples of a shard; the others are the shard's number."""

_SHARDS = MOST_WORKERS
_CODEC_BYTES = 1 << 16
_OF_ALL = dict.fromkeys(("next", "generation", "slots", "codec_bytes", "decided", "mode", "flags", "broken"), np.int64)
_OF_RANK = dict.fromkeys(("epoch", "key", "workers", "last", "whole", "passed", "kept"), np.int64)
_OF_SHARD = dict.fromkeys(("begun", "ended", "seen", "stored"), np.int64)
_ALL, _NUMBER, _DECISION, _ROWS = 0, 1, 2, 8  # bytes of the lock file
_UNCLAIMED = -1


@dataclass(frozen=True)
class Shard:
    """The part of a stream that one process reads.

    Args:
        rank: its rank, among those of the node.
        worker: its worker, of the rank's loader; 0 where there are none.
        workers: how many there are.
        key: the same for all workers of one epoch.
    """

    rank: int = 0
    worker: int = 0
    workers: int = 1
    key: int = 0

    @property
    def number(self) -> int:
        """Its number among all shards that there can be."""
        return self.rank * _SHARDS + self.worker


@dataclass(frozen=True)
class Totals:
    """Samples of an epoch, over all shards, that have passed, and that were kept."""

    passed: int
    kept: int


class StreamLedger:
    """The numbers of one stream on a node.

    Args:
        segment: where they lie.
        ranks: how many ranks of the node read the stream.

    Example:
        >>> ledger, shard = StreamLedger.create(1), Shard()
        >>> epoch = ledger.begin(shard)
        >>> ledger.note(shard, kept=True)
        >>> ledger.end(shard, epoch)
        >>> ledger.begin(shard), ledger.totals(1)
        (2, Totals(passed=1, kept=1))
        >>> ledger.close()
    """

    def __init__(self, segment: Segment, ranks: int) -> None:
        self.segment, self.ranks = segment, ranks
        self.claims = Claims(segment)
        of_rank, of_shard, self._codec, _ = _starts(ranks)
        self.all = columns(segment, _OF_ALL, 1)
        """Numbers of all, `[1]` each."""
        self._ranks = columns(segment, _OF_RANK, ranks, of_rank)
        self._shards = columns(segment, _OF_SHARD, ranks * _SHARDS, of_shard)

    @classmethod
    def create(cls, ranks: int, backend: Backend | None = None) -> StreamLedger:
        """Make one for a stream that nobody has read.

        Raises:
            OSError: there is no memory for it.
        """
        size = _starts(ranks)[3]
        return cls(Segment.create(size, backend, reserved=size), ranks)

    def __reduce__(self) -> tuple[type[StreamLedger], tuple[Segment, int]]:
        return type(self), (self.segment, self.ranks)

    @property
    def handle(self) -> SegmentHandle:
        """What another process of the node needs to open the same."""
        return self.segment.handle

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
            shards["begun"][row] = epoch = self.epoch_of(rank)
        return epoch

    def is_current(self, shard: Shard, epoch: int) -> bool:
        """Whether a shard's rank is still in this epoch, and not in one that was begun later."""
        return self.epoch_of(shard.rank) == epoch

    def note(self, shard: Shard, *, kept: bool) -> None:
        """Count a sample that has passed. The caller holds the lock of the shard (`locked`)."""
        self._shards["stored"][shard.number] += kept
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
        return Totals(int(ranks["passed"].sum()), int(ranks["kept"].sum()))

    @property
    def all_kept(self) -> bool:
        """Whether the latest epoch has ended in every shard, and all of its samples were stored."""
        counts = map(self._counts, range(self.ranks))
        return all(ended and passed == kept for ended, passed, kept in counts)

    def epoch_of(self, rank: int) -> int:
        """The number of a rank's latest epoch."""
        return int(self._ranks["epoch"][rank])

    def _next_epoch(self, rank: int, key: int, workers: int) -> int:
        ranks, epoch = self._ranks, self.epoch_of(rank)
        ranks["last"][rank] = epoch
        ranks["whole"][rank], ranks["passed"][rank], ranks["kept"][rank] = self._counts(rank)
        ranks["key"][rank], ranks["workers"][rank] = key, workers
        ranks["epoch"][rank] = epoch + 1
        return epoch + 1

    def _counts(self, rank: int) -> tuple[bool, int, int]:
        """A rank's latest epoch: whether all of its shards have ended, samples that passed, and samples stored."""
        shards = {name: column[rank * _SHARDS : (rank + 1) * _SHARDS] for name, column in self._shards.items()}
        epoch = self.epoch_of(rank)
        begun = (shards["begun"] == epoch) & (epoch > 0)
        ended, passed, stored = (int(shards[name][begun].sum()) for name in ("ended", "seen", "stored"))
        return 0 < ended == int(self._ranks["workers"][rank]), passed, stored

    # ---- what is stored ----

    @property
    def generation(self) -> int:
        """How often the memory was laid out anew; 0 before the first sample."""
        return int(self.all["generation"][0])

    def lay_out(self, slots: int = 0, codec: bytes = b"") -> bool:
        """Note a new layout of the samples' memory; numbers start from 0. The caller holds all locks (`alone`).

        Args:
            slots: number of slots; 0 if nothing is stored.
            codec: the pickled codec of the samples.

        Returns:
            Whether there is room for the codec.
        """
        if len(codec) > _CODEC_BYTES:
            return False
        self.segment.store(self._codec, memoryview(codec))
        self.all["slots"][0], self.all["codec_bytes"][0], self.all["next"][0] = slots, len(codec), 0
        self.all["generation"][0] += 1
        return True

    def layout(self) -> tuple[int, bytes]:
        """The number of slots and the pickled codec; 0 and nothing before the first sample."""
        with self.segment.memory(self._codec, int(self.all["codec_bytes"][0])) as codec:
            return int(self.all["slots"][0]), bytes(codec)

    def next_number(self) -> int:
        """Take the next number for a sample. The caller holds the lock of its shard (`locked`)."""
        with self.claims.waiting(_NUMBER):
            number = self.count
            self.all["next"][0] = number + 1
        return number

    @property
    def count(self) -> int:
        """How many numbers have been taken."""
        return int(self.all["next"][0])

    def position(self, shard: Shard) -> int:
        """The position of a shard's next sample, where all shards come one after the other."""
        return shard.number << POSITION_BITS | int(self._shards["seen"][shard.number])

    @contextmanager
    def locked(self, shard: Shard) -> Iterator[None]:
        """Keep others from laying the memory out anew."""
        with self.claims.waiting(_ROWS + shard.number):
            yield

    @contextmanager
    def same_layout(self) -> Iterator[None]:
        """Keep others from laying the memory out anew, in a process that has no lock of a shard."""
        with self.claims.waiting(_ALL):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all shards from storing anything."""
        with ExitStack() as held:
            held.enter_context(self.claims.waiting(_ALL))
            for row in range(self.ranks * _SHARDS):
                held.enter_context(self.claims.waiting(_ROWS + row))
            yield

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has closed it."""
        return self.segment.closed

    def unlink(self) -> None:
        """Take the name of its file away, if it has one."""
        self.segment.unlink()

    def close(self) -> None:
        """Close it in this process."""
        self.all, self._ranks, self._shards = {}, {}, {}
        self.segment.close()


def _starts(ranks: int) -> tuple[int, int, int, int]:
    """Where the columns of ranks and of shards begin, and the codec, and where all end."""
    of_rank = offsets(_OF_ALL, 1)[""]
    of_shard = offsets(_OF_RANK, ranks, of_rank)[""]
    codec = offsets(_OF_SHARD, ranks * _SHARDS, of_shard)[""]
    return of_rank, of_shard, codec, codec + _CODEC_BYTES


Mode = Literal["stream", "cache", "pass"]
"""Where the samples of an epoch come from: the stream, which is kept; what was kept; the stream, which is not."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_FINAL = ("cache", "pass")


class Decision:
    """The decision for the epoch that was begun last, and what it rests on.

    Args:
        ledger: how far the stream has come.

    Example:
        >>> ledger = StreamLedger.create(1)
        >>> decision, epoch = Decision(ledger), ledger.begin(Shard())
        >>> decision.of(epoch, lambda: "stream"), decision.of(epoch, lambda: "cache")
        ('stream', 'stream')
        >>> ledger.close()
    """

    patience = 60.0
    """Seconds for which a rank that does not begin an epoch is waited for."""

    def __init__(self, ledger: StreamLedger) -> None:
        self._ledger = ledger

    def of(self, epoch: int, decide: Callable[[], Mode]) -> Mode:
        """Where the samples of an epoch come from; decides it if no process has.

        Args:
            epoch: an epoch that a shard of this process, or its rank, has begun.
            decide: is called by one process of the node, when no shard is in an epoch before.
        """
        ledger, start = self._ledger, time.monotonic()
        for seconds in moments(pause=0.002):
            if ledger.all["decided"][0] >= epoch or self.mode in _FINAL:
                break
            late = [rank for rank in range(ledger.ranks) if ledger.epoch_of(rank) < epoch] if epoch > 1 else []
            if (not late or time.monotonic() - start > self.patience) and ledger.claims.take(_DECISION):
                try:
                    if ledger.all["decided"][0] < epoch and self.mode not in _FINAL:
                        if late:
                            log.warning(
                                "a stream passes through uncached from now on: rank(s) %s of the node did not begin "
                                "epoch %d within %.0f s.\nEvery rank must read the stream as often",
                                ", ".join(map(str, late)),
                                epoch,
                                self.patience,
                            )
                        self._decide(epoch, "pass" if late else decide())
                finally:
                    ledger.claims.give_up(_DECISION)
            elif seconds:
                what = f"rank(s) {', '.join(map(str, late))} to begin" if late else "another process to decide on"
                log.warning("a stream waits for %s epoch %d", what, epoch)
        return self.mode

    @property
    def mode(self) -> Mode:
        """What was decided last."""
        return _MODES[int(self._ledger.all["mode"][0])]

    def pass_by(self) -> Mode:
        """Store nothing from the next epoch on. Returns what was decided before."""
        with self._ledger.claims.waiting(_ALL):
            before, self._ledger.all["mode"][0] = self.mode, _MODES.index("pass")
        return before

    def _decide(self, epoch: int, mode: Mode) -> None:
        with self._ledger.claims.waiting(_ALL):
            if self.mode not in _FINAL:
                self._ledger.all["mode"][0] = _MODES.index(mode)
            self._ledger.all["decided"][0] = epoch

    def count_broken(self, *, none: bool = False) -> int:
        """Count an epoch that was broken off; `none` resets. Returns how many were, one after the other."""
        self._ledger.all["broken"][0] = count = 0 if none else int(self._ledger.all["broken"][0]) + 1
        return count

    def is_first(self, flag: int) -> bool:
        """Raise a flag (a power of two). Returns whether no process of the node had."""
        with self._ledger.claims.waiting(_ALL):
            first = not self._ledger.all["flags"][0] & flag
            self._ledger.all["flags"][0] |= flag
        return first

    def has(self, flag: int) -> bool:
        """Whether a flag was raised."""
        return bool(self._ledger.all["flags"][0] & flag)

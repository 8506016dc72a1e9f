"""How far a stream has come: what every process of a node has to know of the epochs of all others.

A stream is read by shards: one per rank and worker of its loader. A shard begins an epoch (`begin`), notes each sample
that passes, and whether it was kept (`note`), and ends (`end`). The shards of a rank that begin with the same key (the
seed of their loader's epoch) are in the same epoch; a shard that begins twice has begun another. So epochs are counted
per rank, without a message from the loader, which may be anybody's. An epoch of a rank is whole if all of its shards
have ended, or if as many samples have passed as the stream says that it has: who knows a length stops there.

Layout: columns of int64, all of them reserved: one number each for all, then one for each rank, then one for each of
the `MOST_WORKERS` shards of every rank. Whoever writes holds a lock: byte 0 for what is of all and of ranks, byte 1 for
the next number, byte 2 while deciding, and a byte per shard, which its process holds while it stores a sample. Locks
are taken in the order 2, 0, shards, 1, never back.

What an epoch comes from is decided once for all shards of a node (`Decision`), by the first process that comes to it
when every rank of the node has begun the epoch, so that nobody is still in the one before. It holds a lock meanwhile,
which the kernel frees when it dies. A rank that does not come is waited for with a message; then the stream passes by
for good.
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
_OF_ALL = dict.fromkeys(("next", "generation", "decided", "mode", "flags", "broken"), np.int64)
_OF_RANK = dict.fromkeys(("epoch", "key", "workers", "last", "whole", "passed", "kept"), np.int64)
_OF_SHARD = dict.fromkeys(("begun", "ended", "seen", "stored"), np.int64)
_ALL, _NUMBER, _DECISION, _ROWS = 0, 1, 2, 8  # bytes of the lock file
_UNCLAIMED = -1


@dataclass(frozen=True)
class Shard:
    """What one process reads of a stream.

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
        of_rank, of_shard, _ = _starts(ranks)
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
        size = _starts(ranks)[2]
        return cls(Segment.create(size, backend, reserved=size), ranks)

    def __reduce__(self) -> tuple[type[StreamLedger], tuple[Segment, int]]:
        return type(self), (self.segment, self.ranks)

    @property
    def handle(self) -> SegmentHandle:
        """What another process of the node needs to open the same."""
        return self.segment.handle

    # ---- epochs ----

    def announce(self, rank: int, workers: int) -> int:
        """Begin a rank's next epoch before its shards do, which join it; its number."""
        with self.claims.waiting(_ALL):
            return self._next_epoch(rank, _UNCLAIMED, workers)

    def begin(self, shard: Shard) -> int:
        """Begin an epoch of a shard: that of its rank, or the next one; its number."""
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
        """A sample has passed; `holding` the shard."""
        self._shards["stored"][shard.number] += kept
        self._shards["seen"][shard.number] += 1

    def end(self, shard: Shard, epoch: int) -> None:
        """A shard has come to its end."""
        with self.claims.waiting(_ALL):
            if self.is_current(shard, epoch):
                self._shards["ended"][shard.number] = 1

    def totals(self, epoch: int, length: int | None = None) -> Totals | None:
        """The samples of an epoch that is over in every rank; None if it was broken off in one.

        Args:
            epoch: the one before that which all ranks have begun.
            length: how many samples the stream of a rank says that it has.
        """
        ranks = self._ranks
        whole = (ranks["whole"] > 0) | (length is not None and ranks["passed"] >= length)
        if not ((ranks["last"] == epoch) & whole).all():
            return None
        return Totals(int(ranks["passed"].sum()), int(ranks["kept"].sum()))

    @property
    def all_kept(self) -> bool:
        """Whether the epoch that was begun last has ended in every shard, and all of its samples were kept."""
        counts = map(self._counts, range(self.ranks))
        return all(ended and passed == kept for ended, passed, kept in counts)

    def epoch_of(self, rank: int) -> int:
        """The number of the epoch that a rank has begun last."""
        return int(self._ranks["epoch"][rank])

    def _next_epoch(self, rank: int, key: int, workers: int) -> int:
        ranks, epoch = self._ranks, self.epoch_of(rank)
        ranks["last"][rank] = epoch
        ranks["whole"][rank], ranks["passed"][rank], ranks["kept"][rank] = self._counts(rank)
        ranks["key"][rank], ranks["workers"][rank] = key, workers
        ranks["epoch"][rank] = epoch + 1
        return epoch + 1

    def _counts(self, rank: int) -> tuple[bool, int, int]:
        """Of a rank's last epoch: whether all of its shards have ended; the samples that passed, and that were kept."""
        of_rank, epoch, workers = (
            slice(rank * _SHARDS, (rank + 1) * _SHARDS),
            self.epoch_of(rank),
            self._ranks["workers"],
        )
        shards = {name: column[of_rank] for name, column in self._shards.items()}
        begun = (shards["begun"] == epoch) & (epoch > 0)
        ended, passed, kept = (int(shards[name][begun].sum()) for name in ("ended", "seen", "stored"))
        return 0 < ended == int(workers[rank]), passed, kept

    # ---- what is stored ----

    @property
    def generation(self) -> int:
        """How often the memory of the samples was laid out anew; 0 as long as there is no sample."""
        return int(self.all["generation"][0])

    def lay_out(self) -> None:
        """The memory of the samples was laid out anew: numbers start from 0; `alone`."""
        self.all["next"][0] = 0
        self.all["generation"][0] += 1

    def next_number(self) -> int:
        """A number for a sample, which no other has since the memory was laid out; `holding` a shard."""
        with self.claims.waiting(_NUMBER):
            number = self.count
            self.all["next"][0] = number + 1
        return number

    @property
    def count(self) -> int:
        """How many numbers have been given."""
        return int(self.all["next"][0])

    def position(self, shard: Shard) -> int:
        """Where the next sample of a shard stands among those of all shards, which come one after the other."""
        return shard.number << POSITION_BITS | int(self._shards["seen"][shard.number])

    @contextmanager
    def holding(self, shard: Shard) -> Iterator[None]:
        """Nobody lays the memory out anew meanwhile."""
        with self.claims.waiting(_ROWS + shard.number):
            yield

    @contextmanager
    def same_layout(self) -> Iterator[None]:
        """Nobody lays the memory out anew meanwhile; for who is no shard, or holds none."""
        with self.claims.waiting(_ALL):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """No shard stores anything meanwhile."""
        with ExitStack() as held:
            held.enter_context(self.claims.waiting(_ALL))
            for row in range(self.ranks * _SHARDS):
                held.enter_context(self.claims.waiting(_ROWS + row))
            yield

    # ---- life ----

    @property
    def closed(self) -> bool:
        """Whether this process has given it up."""
        return self.segment.closed

    def unlink(self) -> None:
        """Take the name of its file away, if it has one."""
        self.segment.unlink()

    def close(self) -> None:
        """Give it up in this process."""
        self.all, self._ranks, self._shards = {}, {}, {}
        self.segment.close()


def _starts(ranks: int) -> tuple[int, int, int]:
    """Where the columns of ranks and of shards begin, and where all end."""
    of_rank = offsets(_OF_ALL, 1)[""]
    of_shard = offsets(_OF_RANK, ranks, of_rank)[""]
    return of_rank, of_shard, offsets(_OF_SHARD, ranks * _SHARDS, of_shard)[""]


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
        """Where an epoch's samples come from, as was decided, or is decided now.

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
        """Keep nothing any more, from the next epoch on; what was decided before."""
        with self._ledger.claims.waiting(_ALL):
            before, self._ledger.all["mode"][0] = self.mode, _MODES.index("pass")
        return before

    def _decide(self, epoch: int, mode: Mode) -> None:
        with self._ledger.claims.waiting(_ALL):
            if self.mode not in _FINAL:
                self._ledger.all["mode"][0] = _MODES.index(mode)
            self._ledger.all["decided"][0] = epoch

    def count_broken(self, *, none: bool = False) -> int:
        """One more epoch was broken off, or none; how many that makes one after the other."""
        self._ledger.all["broken"][0] = count = 0 if none else int(self._ledger.all["broken"][0]) + 1
        return count

    def is_first(self, flag: int) -> bool:
        """Whether nobody on the node has raised a flag (a power of two) before."""
        with self._ledger.claims.waiting(_ALL):
            first = not self._ledger.all["flags"][0] & flag
            self._ledger.all["flags"][0] |= flag
        return first

    def has(self, flag: int) -> bool:
        """Whether a flag was raised."""
        return bool(self._ledger.all["flags"][0] & flag)

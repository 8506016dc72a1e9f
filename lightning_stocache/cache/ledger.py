"""How far a stream has come, for all processes of a node.

A stream is read by shards: one per rank and worker of its loader. A shard begins an epoch (`begin`), notes each sample
that passes and whether it was stored (`note`), and ends (`end`). Shards of a rank that begin with the same key (the
seed of their loader's epoch) are in the same epoch; a shard that begins twice has begun the next one. So epochs are
counted per rank, without a message from the loader. An epoch of a rank is whole if all of its shards have ended, or if
as many samples have passed as the stream's length says: a loader that knows the length stops there.

The first process that asks after every rank of the node has begun an epoch decides for all shards what the epoch comes
from (`decide`): then no shard is in the epoch before.

Layout: columns of int64: one number each for all, then one for each rank, then one for each of the `MOST_WORKERS`
shards of every rank. What is counted has two numbers, for epochs in turn, so that the counts of an epoch stay while the
next one begins. All of it is reserved.

Writers take a lock of the lock file, which the kernel frees when they die: byte 0 for the numbers of all and of ranks,
byte 1 for the next number, byte 2 while deciding, and a byte per shard while its process stores a sample. Locks are
taken in the order 2, 0, shards, 1, never back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
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
_OF_ALL = dict.fromkeys(("ranks", "next", "cleared", "decided", "mode", "broken"), np.int64)
_OF_RANK = {"epoch": "i8", "key": "i8", "workers": "2i8"}
_OF_SHARD = dict.fromkeys(("begun", "ended", "seen", "stored"), "2i8")
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
        >>> ledger.decide(epoch, lambda late: "stream"), ledger.decide(epoch, lambda late: "cache")
        ('stream', 'stream')
        >>> ledger.note(shard, epoch, stored=True)
        >>> ledger.end(shard, epoch)
        >>> ledger.begin(shard), ledger.totals(1)
        (2, Totals(passed=1, stored=1))
        >>> ledger.close()
    """

    patience = 60.0
    """Seconds to wait for a rank that does not begin an epoch."""

    def __init__(self, segment: Segment) -> None:
        self.segment, self._claims = segment, Claims(segment)
        self._all = columns(segment, _OF_ALL, 1)
        self.ranks = int(self._all["ranks"][0])
        of_rank, of_shard, _ = _starts(self.ranks)
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
        size = _starts(ranks)[-1]
        segment = Segment.create(size, backend, reserved=size)
        columns(segment, _OF_ALL, 1)["ranks"][0] = ranks
        return cls(segment)

    # ---- epochs ----

    def announce(self, rank: int, workers: int) -> int:
        """Begin a rank's next epoch before its shards, which will join it. Returns its number."""
        with self._claims.waiting(_ALL):
            return self._next_epoch(rank, _UNCLAIMED, workers)

    def begin(self, shard: Shard) -> int:
        """Begin an epoch of a shard: the current one of its rank, or the next one. Returns its number."""
        ranks, shards, rank, row = self._ranks, self._shards, shard.rank, shard.number
        with self._claims.waiting(_ALL):
            epoch = self._epoch_of(rank)
            if ranks["key"][rank] == _UNCLAIMED:
                ranks["key"][rank], ranks["workers"][rank, epoch % 2] = shard.key, shard.workers
            elif ranks["key"][rank] != shard.key or shards["begun"][row, epoch % 2] == epoch:
                epoch = self._next_epoch(rank, shard.key, shard.workers)
            for name in ("ended", "seen", "stored"):
                shards[name][row, epoch % 2] = 0
            shards["begun"][row, epoch % 2] = epoch
        return epoch

    def is_current(self, shard: Shard, epoch: int) -> bool:
        """Whether a shard's rank is still in this epoch, and not in a later one."""
        return self._epoch_of(shard.rank) == epoch

    def note(self, shard: Shard, epoch: int, *, stored: bool) -> None:
        """Count a sample that has passed, under the lock of the shard (`locked`)."""
        self._shards["stored"][shard.number, epoch % 2] += stored
        self._shards["seen"][shard.number, epoch % 2] += 1

    def end(self, shard: Shard, epoch: int) -> None:
        """Note that a shard has come to its end."""
        with self._claims.waiting(_ALL):
            if self.is_current(shard, epoch):
                self._shards["ended"][shard.number, epoch % 2] = 1

    def totals(self, epoch: int, length: int | None = None) -> Totals | None:
        """Count the samples of the latest epoch, or of the one before, in all ranks; None if one has broken it off.

        Args:
            epoch: its number.
            length: the length of the stream of one rank, if it has one.
        """
        passed_of_all = stored_of_all = 0
        for rank in range(self.ranks):
            rows = slice(Shard(rank).number, Shard(rank + 1).number)
            shards = {name: column[rows, epoch % 2] for name, column in self._shards.items()}
            begun = shards["begun"] == epoch
            ended, passed, stored = (int(shards[name][begun].sum()) for name in ("ended", "seen", "stored"))
            if not 0 < ended == self._ranks["workers"][rank, epoch % 2] and (length is None or passed < length):
                return None
            passed_of_all, stored_of_all = passed_of_all + passed, stored_of_all + stored
        return Totals(passed_of_all, stored_of_all)

    @property
    def all_stored(self) -> bool:
        """Whether the latest epoch has ended in every shard, and all of its samples were stored."""
        totals = self.totals(self._epoch_of(0))
        return totals is not None and totals.passed == totals.stored

    def _epoch_of(self, rank: int) -> int:
        """The number of a rank's latest epoch."""
        return int(self._ranks["epoch"][rank])

    def _next_epoch(self, rank: int, key: int, workers: int) -> int:
        self._ranks["epoch"][rank] = epoch = self._epoch_of(rank) + 1
        self._ranks["key"][rank], self._ranks["workers"][rank, epoch % 2] = key, workers
        return epoch

    # ---- decisions ----

    @property
    def mode(self) -> Mode:
        """What was decided last."""
        return _MODES[int(self._all["mode"][0])]

    def decide(self, epoch: int, choose: Callable[[Sequence[int]], Mode]) -> Mode:
        """Where the samples of an epoch come from; decides it if no process has. "cache" and "pass" are for good.

        Args:
            epoch: an epoch that a shard of this process, or its rank, has begun.
            choose: called by one process of the node, when no shard is in an epoch before. It is given the ranks that
                have not begun the epoch within `patience`.
        """
        start = time.monotonic()
        for seconds in poll(pause=0.002):
            if self._is_decided(epoch):
                break
            late = [rank for rank in range(self.ranks) if self._epoch_of(rank) < epoch] if epoch > 1 else []
            if (not late or time.monotonic() - start > self.patience) and self._claims.take(_DECISION):
                try:
                    if not self._is_decided(epoch):
                        mode = choose(late)
                        with self._claims.waiting(_ALL):
                            if self.mode == "stream":
                                self._all["mode"][0] = _MODES.index(mode)
                            self._all["decided"][0] = epoch
                finally:
                    self._claims.release(_DECISION)
            elif seconds:
                log.warning("a stream waits for epoch %d to begin in rank(s) %s, or to be decided on", epoch, late)
        return self.mode

    def pass_by(self) -> Mode:
        """Store nothing from now on. Returns what was decided before."""
        with self._claims.waiting(_ALL):
            before, self._all["mode"][0] = self.mode, _MODES.index("pass")
        return before

    def count_broken(self, *, reset: bool = False) -> int:
        """Count an epoch that was broken off, or begin to count anew. Returns how many were, one after the other."""
        self._all["broken"][0] = count = 0 if reset else int(self._all["broken"][0]) + 1
        return count

    def _is_decided(self, epoch: int) -> bool:
        return self.mode != "stream" or bool(self._all["decided"][0] >= epoch)

    # ---- numbers ----

    def take_number(self, shard: Shard, epoch: int) -> tuple[int, int]:
        """Take the next number for a sample of a shard, under its lock (`locked`).

        Returns:
            The number, and the position of the sample, which orders all samples by their shards.
        """
        with self._claims.waiting(_NUMBER):
            number = self.count
            self._all["next"][0] = number + 1
        return number, shard.number << POSITION_BITS | int(self._shards["seen"][shard.number, epoch % 2])

    def clear(self) -> None:
        """Begin with number 0 again, while nobody stores anything (`alone`)."""
        self._all["next"][0] = 0
        self._all["cleared"][0] += 1

    @property
    def count(self) -> int:
        """How many numbers have been taken."""
        return int(self._all["next"][0])

    @property
    def cleared(self) -> int:
        """How often the numbers have begun again."""
        return int(self._all["cleared"][0])

    def locked(self, shard: Shard) -> AbstractContextManager[None]:
        """The lock of a shard, while its process stores a sample."""
        return self._claims.waiting(_ROWS + shard.number)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep all shards from storing anything."""
        with ExitStack() as locks:
            for row in range(self.ranks * MOST_WORKERS):
                locks.enter_context(self._claims.waiting(_ROWS + row))
            yield

    def close(self) -> None:
        """Close it in this process."""
        self._all, self._ranks, self._shards = {}, {}, {}
        self.segment.close()


def _starts(ranks: int) -> tuple[int, int, int]:
    """Where the columns of ranks begin, and of shards, and where all end."""
    of_rank = offsets(_OF_ALL, 1)[""]
    of_shard = offsets(_OF_RANK, ranks, of_rank)[""]
    return of_rank, of_shard, offsets(_OF_SHARD, ranks * MOST_WORKERS, of_shard)[""]

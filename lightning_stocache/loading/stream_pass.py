"""One epoch of a stream that is read, in one process: handed on as it is, and kept.

`StreamPass` reads all of it. `MixedPass` reads the head, and between its samples serves those of the tail that came to
this process; it leaves the stream where the head ends. What the stream raises comes through, and a stream that goes on
after an error may be asked again, as without a cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from lightning_stocache.cache.stream_ledger import Shard
from lightning_stocache.cache.stream_order import Chain, StreamOrder
from lightning_stocache.cache.stream_store import StreamStore
from lightning_stocache.loading.stream_choice import BY_HAND
from lightning_stocache.source.stream import DrawsWatch, iterate, mark_of

__all__ = ["MixedPass", "StreamPass"]

_OTHER_ORDER = (
    "it does not fit into its budget, and its order is another one in every epoch, so that it cannot be kept in part. "
    "Raise the budget, or read it in one order"
)


class Serving(Protocol):
    """What a pass belongs to."""

    source: Any

    def keep(self, store: StreamStore, shard: Shard, epoch: int, sample: Any, mark: int) -> int | None:
        """Keep a copy of a sample that has come, if that is possible; its bytes."""

    def count(self, **counts: int) -> None:
        """Count what has been served or filled."""

    def finished(self, sample: Any) -> Any:
        """A sample as it is handed out."""

    def pass_by(self, store: StreamStore, reason: str) -> None:
        """Keep nothing from now on, and say so once."""


class StreamPass:
    """Reads a stream, and keeps it.

    Args:
        serving: what it belongs to.
        store: where samples are kept; None where they are not.
        shard: what this process reads.
        epoch: the number of the epoch.
        tail: whether the tail of the shard alone is to be kept.
        watches: whether draws are watched for.
    """

    def __init__(
        self,
        serving: Serving,
        store: StreamStore | None,
        shard: Shard,
        epoch: int,
        *,
        tail: bool = False,
        watches: bool = True,
    ) -> None:
        self._serving, self._store, self._shard, self._epoch, self._tail = serving, store, shard, epoch, tail
        self._watch = DrawsWatch(serving.source) if store is not None and watches else None
        self._chain, self._failed = Chain(), False
        self._order = None if store is None else StreamOrder(store.ledger)
        self._length, self._head, _ = (0, 0, 0) if self._order is None or not tail else self._order.parts(shard)
        self._stream = iterate(serving.source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next sample of the stream."""
        watch, start = self._watch, time.perf_counter_ns()
        if watch is not None:
            watch.before()
        try:
            sample = next(self._stream)
        except StopIteration:
            self._end()
            raise
        except BaseException:
            self._failed = True
            raise
        ended = time.perf_counter_ns()
        source_ns = ended - start if watch is None else watch.after()
        nbytes = self._kept(sample)
        if nbytes is None:
            self._serving.count(bypasses=1, source_ns=source_ns)
        else:
            fill_ns = time.perf_counter_ns() - ended
            self._serving.count(misses=1, fills=1, bytes_from_source=nbytes, source_ns=source_ns, fill_ns=fill_ns)
        return self._serving.finished(sample)

    def _kept(self, sample: Any) -> int | None:
        store, order = self._store, self._order
        if store is None or order is None:
            return None
        if store.closed or (reason := self._obstacle(order)) is not None:
            self._store = self._watch = None
            if not store.closed:
                self._serving.pass_by(store, str(reason))
            return None
        mark, position = mark_of(sample), self._chain.length
        self._chain.add(mark)
        if self._tail and position < self._head:
            store.leave(self._shard, self._epoch)
            return None
        return self._serving.keep(store, self._shard, self._epoch, sample, mark)

    def _end(self) -> None:
        """The stream has ended in this process."""
        store, self._store = self._store, None
        if store is None or self._order is None or store.closed or self._failed:
            return
        if not store.ledger.is_current(self._shard, self._epoch):
            return
        if not self._tail:
            self._order.note(self._shard, self._chain)
        elif self._chain.length != self._length:
            self._serving.pass_by(store, f"it had {self._length:,} samples, and now {self._chain.length:,}")
            return
        else:
            self._order.note_tail(self._shard)
        store.ledger.end(self._shard, self._epoch)

    def _obstacle(self, order: StreamOrder) -> str | None:
        """Why the stream cannot be kept, as has been seen by now."""
        if self._watch is not None and self._watch.moved is not None:
            return f"it moves the generators of {self._watch.moved} while samples are read: it is random.\n{BY_HAND}"
        if self._tail and self._chain.length == self._head and not order.is_head(self._shard, self._chain):
            return _OTHER_ORDER
        return None


class MixedPass:
    """Reads the head of a shard, and serves a share of all tails.

    Args:
        serving: what it belongs to.
        store: where tails are kept.
        shard: what this process reads.
        epoch: the number of the epoch.
        tail: gives the finished samples that come from memory, counted.
        count: how many these are.
        after: whether they come after the head, not in between.

    Raises:
        RuntimeError: (`next`) another epoch of the stream has begun, or it was closed: the memory may be another's.
    """

    def __init__(
        self,
        serving: Serving,
        store: StreamStore,
        shard: Shard,
        epoch: int,
        tail: Iterator[Any],
        count: int,
        *,
        after: bool = False,
    ) -> None:
        self._serving, self._store, self._shard, self._rest, self._count = serving, store, shard, tail, count
        self._epoch, self._after = epoch, after
        self._order, self._chain, self._served = StreamOrder(store.ledger), Chain(), 0
        _, self._head, _ = self._order.parts(shard)
        self._stream: Iterator[Any] | None = iterate(serving.source)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """The next sample, of the head or of a tail, in the proportion in which they are left."""
        read = self._chain.length
        due = 0 if self._after else (read + self._served + 1) * self._count // max(self._head + self._count, 1)
        if self._stream is not None and (read == self._head or self._served >= due):
            if read < self._head:
                return self._read(self._stream)
            self._leave()
        if self._served < self._count:
            if self._store.closed or not self._store.ledger.is_current(self._shard, self._epoch):
                raise RuntimeError(
                    "a stream that is kept in part was closed, or begun again, in the middle of an epoch: read each "
                    "iterator to its end, or leave it, before the next one"
                )
            self._served += 1
            return next(self._rest)
        if read < self._head and self._stream is not None:
            return self._read(self._stream)
        self._leave()
        raise StopIteration

    def _read(self, stream: Iterator[Any]) -> Any:
        start = time.perf_counter_ns()
        try:
            sample = next(stream)
        except StopIteration:
            self._stream = None
            if not self._store.closed:
                reason = f"it ended after {self._chain.length:,} samples, and had {self._head:,} and more before"
                self._serving.pass_by(self._store, reason)
            return next(self)
        self._serving.count(bypasses=1, source_ns=time.perf_counter_ns() - start)
        self._chain.add(mark_of(sample))
        return self._serving.finished(sample)

    def _leave(self) -> None:
        """The head has been read: the rest of the stream is not."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        close: Callable[[], None] | None = getattr(stream, "close", None)
        if close is not None:
            close()
        if not self._store.closed and not self._order.is_head(self._shard, self._chain):
            self._serving.pass_by(self._store, _OTHER_ORDER)

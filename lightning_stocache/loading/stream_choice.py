"""What the next epoch of a stream comes from, by what the one before has shown.

    stream   it is read, and kept
      -> stream   the epoch was broken off, or raised: from nothing, for no sample may come twice; or there was memory,
                  but the first sample has misled about the layout: later ones are no rows, or far more, and small
      -> cache    all of it was kept, and its first samples, read again, are among them
      -> tail     not all of it could be kept
    tail     it is read, and of each shard the last part is kept, as much as has room
      -> tail     it was broken off, or still too much: then a tenth less
      -> mixed    every shard had its head in the same order as before, and its tail is kept
    mixed    of each shard the head is read and left, the tails come from memory, shuffled over all, in proportion
    cache    all comes from memory, shuffled
    pass     it is read, and nothing is kept

A stream passes for good when it is random, another one in every epoch, or never read to its end: three epochs that were
broken off one after the other. Another number of workers begins anew where shards matter.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from lightning_stocache.cache.stream_decision import Decision, Mode
from lightning_stocache.cache.stream_order import StreamOrder
from lightning_stocache.cache.stream_store import StreamStore
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.source.stream import difference, draws_shards

__all__ = ["BY_HAND", "NO_ROW", "StreamChoice"]

log = logging.getLogger(__name__)

BY_HAND = "Give its deterministic part to CachedStream, and the random rest as transform=; or allow_random=True"
NO_ROW, _TURNED = 1, 2
"""Flags of the decision: a sample was no row; the stream was begun anew for that."""

_MOST_BROKEN, _MOST_LESS = 3, 3
_ROOM = 0.95  # of what fitted in the order in which it came: other samples may be larger


class StreamChoice:
    """Decides for one epoch, in the process that is chosen to.

    Args:
        source: the user's stream.
        store: what is kept of it.
        allow_random: whether a random stream is kept as it is.
        tell: is given the reason why nothing is kept any more.
    """

    def __init__(self, source: Any, store: StreamStore, allow_random: bool, tell: Callable[[str], None]) -> None:
        self._source, self._store, self._allow_random, self._tell = source, store, allow_random, tell
        self._decision, self._order = Decision(store.ledger), StreamOrder(store.ledger)

    def of(self, epoch: int) -> Mode:
        """What an epoch comes from that all ranks have begun."""
        mode = self._decision.mode
        if epoch == 1:
            return self._first()
        if mode == "mixed":
            return mode if self._order.same_shards else self._anew("stream")
        totals = self._store.ledger.totals(epoch - 1, self._length())
        if totals is None:
            if self._decision.count_broken() >= _MOST_BROKEN:
                return self._pass(
                    f"{_MOST_BROKEN} epochs were broken off before it came to its end (limit_train_batches, break, an "
                    "error), so nobody knows what is in it. Read it to its end once"
                )
            return self._anew(mode if self._order.same_shards else "stream")
        self._decision.count_broken(none=True)
        if not totals.passed:
            return "stream"
        if mode == "tail":
            return self._after_tail()
        if self._store.filled != totals.kept:  # a process was killed while all was turned into records
            return self._anew("stream")
        if totals.kept == totals.passed:
            found = None if self._allow_random else difference(self._source, self._store.marked)
            if found is None:
                return "cache"
            return self._pass(
                f"{found}: it is random, or another one in every epoch, as batches are that it makes of shuffled "
                f"samples (make them in the loader).\n{BY_HAND}"
            )
        if self._decision.has(NO_ROW) and self._decision.is_first(_TURNED):
            return self._anew("stream")
        if self._store.lacks_slots:  # nobody knew how many samples there are: next time there are sixteen times as many
            self._decision.grow()
            return self._anew("stream")
        share = _ROOM * totals.kept / totals.passed
        planned = self._order.plan(share) if self._order.same_shards else 0
        if not planned:
            return self._pass(
                f"{totals.kept:,} of its {totals.passed:,} samples could be kept in {format_bytes(self._store.granted)}"
            )
        log.info("of a stream of %s samples the last %s are kept", f"{totals.passed:,}", f"{planned:,}")
        return self._anew("tail")

    def _first(self) -> Mode:
        if self._allow_random or not draws_shards(self._source):
            return "stream"
        return self._pass(
            "it draws its shards anew in every epoch (resampled=True), and what is kept would be one draw of them. "
            "resampled=False reads each once; allow_random=True keeps the first draw"
        )

    def _after_tail(self) -> Mode:
        if not self._order.same_shards:
            return self._anew("stream")
        if self._order.has_tails:
            return "mixed"
        tries = self._decision.count_less()
        lengths = [self._order.parts(shard) for shard in self._order.shards()]
        kept, passed = sum(tail for *_, tail in lengths), sum(length for length, *_ in lengths)
        if tries > _MOST_LESS or not self._order.plan(0.9 * kept / max(passed, 1)):
            return self._pass(f"its samples differ too much in size for {format_bytes(self._store.granted)}")
        return self._anew("tail")

    def _anew(self, mode: Mode) -> Mode:
        self._store.clear()
        return mode

    def _pass(self, reason: str) -> Mode:
        self._tell(reason)
        return self._anew("pass")

    def _length(self) -> int | None:
        try:
            return len(self._source)
        except Exception:  # whatever the user's code raises: most streams have none
            return None

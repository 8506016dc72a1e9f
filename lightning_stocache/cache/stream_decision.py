"""What an epoch of a stream comes from: decided once for all shards of a node.

The first process that comes to it decides, when every rank of the node has begun the epoch, so that nobody is still in
the one before. It holds a lock meanwhile, which the kernel frees when it dies. A rank that does not come is waited for
with a message; then the stream passes by for good.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, get_args

from lightning_stocache.cache.stream_ledger import StreamLedger
from lightning_stocache.node.waiting import moments

__all__ = ["Decision", "Mode"]

log = logging.getLogger(__name__)

Mode = Literal["stream", "cache", "pass"]
"""Where the samples of an epoch come from: the stream, which is kept; what was kept; the stream, which is not."""

_MODES: tuple[Mode, ...] = get_args(Mode)
_DECIDED, _MODE, _FLAGS, _BROKEN = range(4)
_ALL, _DECISION = 0, 2
_FINAL = ("cache", "pass")


class Decision:
    """The decision for the epoch that was begun last, and what it rests on.

    Args:
        ledger: how far the stream has come.

    Example:
        >>> from lightning_stocache.cache.stream_ledger import Shard
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
            if ledger.shared[_DECIDED] >= epoch or self.mode in _FINAL:
                break
            late = [rank for rank in range(ledger.ranks) if ledger.epoch_of(rank) < epoch] if epoch > 1 else []
            if (not late or time.monotonic() - start > self.patience) and ledger.claims.take(_DECISION):
                try:
                    if ledger.shared[_DECIDED] < epoch and self.mode not in _FINAL:
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
        return _MODES[self._ledger.shared[_MODE]]

    def pass_by(self) -> Mode:
        """Keep nothing any more, from the next epoch on; what was decided before."""
        with self._ledger.claims.waiting(_ALL):
            before, self._ledger.shared[_MODE] = self.mode, _MODES.index("pass")
        return before

    def _decide(self, epoch: int, mode: Mode) -> None:
        with self._ledger.claims.waiting(_ALL):
            if self.mode not in _FINAL:
                self._ledger.shared[_MODE] = _MODES.index(mode)
            self._ledger.shared[_DECIDED] = epoch

    def count_broken(self, *, none: bool = False) -> int:
        """One more epoch was broken off, or none; how many that makes one after the other."""
        self._ledger.shared[_BROKEN] = 0 if none else self._ledger.shared[_BROKEN] + 1
        return self._ledger.shared[_BROKEN]

    def is_first(self, flag: int) -> bool:
        """Whether nobody on the node has raised a flag (a power of two) before."""
        with self._ledger.claims.waiting(_ALL):
            first = not self._ledger.shared[_FLAGS] & flag
            self._ledger.shared[_FLAGS] |= flag
        return first

    def has(self, flag: int) -> bool:
        """Whether a flag was raised."""
        return bool(self._ledger.shared[_FLAGS] & flag)

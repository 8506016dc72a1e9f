"""How a sample gets into a rolling store, by whoever has loaded it.

    check it -> take the next slot -> write the bytes -> publish

Where memory ends, the store stops growing, with one warning per node, and rolls within what it has.
"""

from __future__ import annotations

import errno
import logging
from typing import Any

from lightning_stocache.cache.rolling_ring import RollingRing, Taken
from lightning_stocache.cache.rolling_slots import RollingSlots
from lightning_stocache.cache.spec import SampleSpec
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.segment import Segment

__all__ = ["RollingFilling"]

log = logging.getLogger(__name__)

_WARNED = 1  # lock bytes behind those of the ring


class RollingFilling:
    """Appends samples.

    Args:
        segment: where the locks are.
        codec: what a sample looks like.
        ring: who writes which slot.
        slots: where the bytes go.
    """

    def __init__(self, segment: Segment, codec: SampleSpec, ring: RollingRing, slots: RollingSlots) -> None:
        self._segment, self._codec, self._ring, self._slots = segment, codec, ring, slots

    def append(self, sample: Any, index: int = -1, position: int | None = None) -> bool:
        """Check a sample and store it in the place of the oldest.

        Args:
            sample: of the codec.
            index: in its source, -1 where it has none.
            position: where the store has a window, in the order of its samples.

        Returns:
            Whether it was stored; not while every slot is being written, or its position is still read.

        Raises:
            SampleMismatchError: it is not of the codec.
            OSError: there is no memory for a single sample.
        """
        contents = self._codec.contents(self._codec.encode(sample, None if index < 0 else index))
        while True:
            taken = self._ring.take() if position is None else self._ring.take_at(position)
            if taken is None:
                return False
            short = None
            try:
                if taken.held:
                    self._slots.overwrite(taken.slot, contents)
                else:
                    short = self._slots.store(taken.slot, contents)
            except BaseException:
                self._ring.drop(taken)
                raise
            if short is not None:
                self._stop_growing(taken, short)
                continue
            self._ring.publish(taken, index)
            return True

    def skip(self, position: int) -> None:
        """Say of a position of the window that its sample cannot be had."""
        if (taken := self._ring.take_at(position)) is not None:
            self._ring.drop(taken)

    def _stop_growing(self, taken: Taken, short: str) -> None:
        """Roll within what there is from now on, and say why, once on the node."""
        if taken.slot == 0:
            self._ring.drop(taken)
            needed = format_bytes(self._codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")
        self._ring.drop(taken, limit=True)
        if self._segment.lock(self._ring.count + _WARNED):  # kept until this process ends: one warning per node
            log.warning(
                "the rolling cache stops growing at %s samples, %s: %s.\nIt rolls within these. Give the job more "
                "memory, or lower the budget to have no such warning",
                f"{self._ring.limit:,}",
                format_bytes(self._ring.limit * self._codec.nbytes),
                short,
            )

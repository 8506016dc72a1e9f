"""How a sample gets into a rolling store, by whoever has loaded it.

    check it -> take the next slot -> write the bytes -> publish

Where memory ends, the store stops growing, with one warning per node, and rolls within what it has.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from typing import Any, Protocol

from lightning_stocache.cache.codec import SampleCodec
from lightning_stocache.cache.rolling_ring import RollingRing, Taken
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.node.files import memory_directory
from lightning_stocache.node.segment import Segment

__all__ = ["RollingFilling"]

log = logging.getLogger(__name__)

_WARNED = 1  # lock bytes behind those of the ring


class Slots(Protocol):
    """What has to be known about the place where samples lie to fill it."""

    def take(self, contents: Sequence[memoryview]) -> Taken | None:
        """A slot for a sample; None where there is none at this moment."""

    def store(self, taken: Taken, contents: Sequence[memoryview]) -> str | None:
        """Write a sample; or what memory is short, in words. Or raise OSError (ENOSPC)."""

    def end_at(self, taken: Taken) -> bool:
        """Use nothing from this slot on; whether anything is left."""


class RollingFilling:
    """Appends samples.

    Args:
        segment: where the locks are.
        codec: what a sample looks like.
        ring: who writes which slot.
        slots: where the bytes go.
    """

    def __init__(self, segment: Segment, codec: SampleCodec, ring: RollingRing, slots: Slots) -> None:
        self._segment, self._codec, self._ring, self._slots = segment, codec, ring, slots

    def append(self, sample: Any, index: int = -1) -> bool:
        """Check a sample and store it in the place of the oldest.

        Args:
            sample: of the codec.
            index: in its source, for messages; -1 where it has none.

        Returns:
            Whether it was stored; not while every slot is being written.

        Raises:
            SampleMismatchError: it is not of the codec.
            ValueError: it is larger than the whole store.
            OSError: there is no memory for a single sample.
        """
        contents = self._codec.contents(self._codec.encode(sample, None if index < 0 else index))
        while True:
            taken = self._slots.take(contents)
            if taken is None:
                return False
            try:
                short = self._stored(taken, contents)
            except BaseException:
                self._ring.drop(taken)
                raise
            if short is None:
                self._ring.publish(taken)
                return True
            self._stop_growing(taken, short)

    def _stored(self, taken: Taken, contents: Sequence[memoryview]) -> str | None:
        try:
            return self._slots.store(taken, contents)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            return f"no space left in {memory_directory()}; enlarge it (Docker: --shm-size)"

    def _stop_growing(self, taken: Taken, short: str) -> None:
        """Roll within what there is from now on, and say why, once on the node."""
        if not self._slots.end_at(taken):
            needed = format_bytes(self._codec.nbytes)
            raise OSError(errno.ENOSPC, f"a rolling cache needs {needed} for its first sample: {short}")
        if self._segment.lock(self._ring.count + _WARNED):  # kept until this process ends: one warning per node
            log.warning(
                "the rolling cache stops growing at %s samples: %s.\nIt rolls within these. Give the job more memory, "
                "or lower the budget to have no such warning",
                f"{len(self._ring.resident()):,}",
                short,
            )

"""How many samples a rolling cache has room for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling import Roll
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Grant, Reserve, grant, margin

__all__ = ["RollingMemory"]

log = logging.getLogger(__name__)

_ROOMY = 2


@dataclass(frozen=True)
class RollingMemory:
    """The slots of a rolling cache on one node.

    Args:
        count: slots; of records, how many samples are expected to find room.
        granted: bytes that they take.
        backend: kind of segment; None is the system's default.
        holds_all: whether there is room for the whole source.
        keep_free: bytes that filling leaves to others, see `shortage.keep_free`.
    """

    count: int
    granted: int
    backend: Backend | None = None
    holds_all: bool = False
    keep_free: int = 0

    @classmethod
    def grant(
        cls,
        budget: Budget,
        codec: SampleSpec | RecordCodec,
        length: int | None,
        writers: int,
        ranks: int,
    ) -> RollingMemory:
        """Divide what is asked for, and free, into slots.

        Args:
            budget: of this node.
            codec: what a sample looks like.
            length: samples in the source; None for a stream.
            writers: processes that append at the same time.
            ranks: of this node.

        Raises:
            ValueError: there is no room for the least number of samples, or the budget is a share of a stream.
        """
        rows = isinstance(codec, SampleSpec)
        each = Roll.slot_bytes(codec)
        if length is None and budget.unit == "% of dataset":
            raise ValueError(f'budget must be bytes ("8GiB") or a share of what is free for a stream, got {budget}')
        # How large records are, nobody knows from two of them: all have room where there is room for twice as much.
        part = budget.unit == "% of dataset" and budget.amount < 100
        size = None if length is None else length * each * (1 if rows or part else _ROOMY)
        backend: Backend | None = None
        given = _given(budget, size, ranks, memory_directory())
        if given.limited_by is not None and hasattr(os, "memfd_create"):
            roomier = _given(budget, size, ranks, None)
            if roomier.bytes > given.bytes:
                given, backend = roomier, "memfd"
        kept = margin(FreeMemory.measure(None), ranks) // 2  # the other half has come by the time that slots are filled
        slots = given.bytes // each
        holds_all = length is not None and slots >= length * (1 if rows else _ROOMY)
        if rows and length is not None:
            slots = min(slots, length)
        least = 1 if holds_all else writers + 2
        if slots < least:
            raise ValueError(
                f"a rolling cache needs room for {least} samples of {format_bytes(each)} at least, so that one can be "
                f"read while others are written; budget={str(budget)!r} gives {format_bytes(given.bytes)}"
                + (f", limited by {given.limited_by}" if given.limited_by else "")
            )
        if given.limited_by is not None:
            log.warning(
                "the rolling cache has room for %s samples, %s of the %s that budget=%r asks for: limited by %s",
                f"{slots:,}",
                format_bytes(given.bytes),
                format_bytes(given.wanted),
                str(budget),
                given.limited_by,
            )
        return cls(slots, slots * each if rows else given.bytes, backend, holds_all, kept)


def _given(budget: Budget, size: int | None, ranks: int, directory: str | None) -> Grant:
    return grant(budget, 2**62 if size is None else size, FreeMemory.measure(directory), Reserve(), ranks)

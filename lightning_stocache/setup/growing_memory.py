"""How much memory what grows may take, and of which kind; how many samples a rolling cache has room for."""

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

__all__ = ["RollingMemory", "grant_memory"]

log = logging.getLogger(__name__)

_ROOMY = 2
_UNKNOWN = 1 << 60  # the size of what has no end


def grant_memory(
    budget: Budget, size: int | None, ranks: int, reserve: Reserve, backend: Backend | None = None
) -> tuple[Grant, Backend | None, int]:
    """What a budget gives on this node, and warn where that is less than a number of bytes that was asked for.

    Args:
        budget: of this node.
        size: bytes of all samples; None where nobody knows.
        ranks: of this node.
        reserve: memory that stays free for others.
        backend: kind of segment; None: /dev/shm, or a memfd where /dev/shm is short of what memory allows (Docker).

    Returns:
        What is granted, the kind of segment, and the bytes that filling leaves to others (`shortage.keep_free`).
    """

    def given(directory: str | None) -> Grant:
        return grant(budget, _UNKNOWN if size is None else size, FreeMemory.measure(directory), reserve, ranks)

    granted = given(None if backend == "memfd" else memory_directory())
    if backend is None and granted.limited_by is not None and hasattr(os, "memfd_create"):
        roomier = given(None)
        if roomier.bytes > granted.bytes:
            granted, backend = roomier, "memfd"
    if granted.limited_by is not None and budget.unit != "% of free":
        log.warning(
            "%s of the %s that budget=%r asks for are granted: limited by %s",
            format_bytes(granted.bytes),
            format_bytes(granted.wanted),
            str(budget),
            granted.limited_by,
        )
    return granted, backend, margin(FreeMemory.measure(None), ranks) // 2  # the other half has come by then


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
        cls, budget: Budget, codec: SampleSpec | RecordCodec, length: int | None, writers: int, ranks: int
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
        given, backend, kept = grant_memory(budget, size, ranks, Reserve())
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
        return cls(slots, slots * each if rows else given.bytes, backend, holds_all, kept)

"""How much memory what grows may take, and of which kind; how many samples a rolling cache has room for."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rolling import Roll
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.cache.stream import StreamStore
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Grant, Reserve, grant, margin
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment, SegmentHandle

__all__ = ["OpenMemory", "RollingMemory", "grant_memory"]

log = logging.getLogger(__name__)

Kept = TypeVar("Kept", Store, StreamStore)

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
class OpenMemory(Generic[Kept]):
    """The memory of what grows, in this process.

    Args:
        store: what is kept; None while nothing is.
        counters: what was served; None where counting is impossible.
        group: the ranks that share it.
        budget_bytes: memory that was granted on this node.
    """

    store: Kept | None = None
    counters: Counters | None = None
    group: NodeGroup = field(default_factory=NodeGroup)
    budget_bytes: int = 0

    @property
    def live(self) -> Kept | None:
        """The store, unless this process has closed it."""
        return None if self.store is None or self.store.closed else self.store

    @property
    def rank(self) -> int:
        """The number of this rank among those of its node."""
        return self.group.nodes[self.group.node].index(self.group.rank)

    @property
    def ranks(self) -> int:
        """How many ranks of this node share it."""
        return len(self.group.nodes[self.group.node])

    def __getstate__(self) -> dict[str, Any]:
        # What this process has closed cannot be sent to another one, which passes samples through just the same.
        counters = None if self.counters is None or self.counters.closed else self.counters
        return self.__dict__ | {"store": self.live, "counters": counters}

    @property
    def address(self) -> _Address:
        """Where the memory is, for the other ranks."""
        assert self.counters is not None
        handle = None if self.store is None else self.store.handle
        return _Address(type(self.store), handle, self.counters.segment.handle, self.budget_bytes)

    def unlink(self) -> None:
        """Take the names of its files away."""
        for part in (self.counters, self.store):
            if part is not None:
                part.unlink()

    def close(self) -> None:
        """Give it up in this process."""
        if self.store is not None:
            self.store.close()
        if self.counters is not None and not self.counters.closed:
            self.counters.close()


@dataclass(frozen=True)
class _Address:
    kind: Any
    store: Any
    counters: SegmentHandle
    granted: int

    def attach(self, group: NodeGroup) -> OpenMemory[Any]:
        store = None if self.store is None else self.kind.attach(self.store)
        return OpenMemory(store, Counters(Segment.attach(self.counters), group.rank), group, self.granted)


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

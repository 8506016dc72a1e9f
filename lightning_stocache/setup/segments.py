"""The memory of a job on one node: made by the leader, attached by the other ranks.

Where they cannot be reached without a name (another pid namespace), named files are tried, whose names go again as soon
as all are attached.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.store import Store, StoreHandle
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.header import printable
from lightning_stocache.node.segment import Segment, SegmentHandle
from lightning_stocache.setup.find import Finding
from lightning_stocache.setup.named_cache import join_cache, open_cache
from lightning_stocache.setup.request import CacheRequest

__all__ = ["CacheMemoryError", "Segments", "make_and_attach"]

_LONGEST = 200  # characters of a source's title that its segment tells


class CacheMemoryError(OSError):
    """The memory for a cache cannot be had, or not be reached by all ranks of a node."""


class Shareable(Protocol):
    """What the leader of a node makes, and its other ranks reach."""

    @property
    def address(self) -> Any:
        """Something that can be sent; its `attach(group)` gives the same in another process."""

    def unlink(self) -> None:
        """Take the names of its files away."""

    def close(self) -> None:
        """Give it up in this process."""


Made = TypeVar("Made", bound=Shareable)


@dataclass(frozen=True)
class _Address:
    """Where the segments of one request are, for the other ranks of the node."""

    counters: SegmentHandle
    cache: StoreHandle | None
    keeps_name: bool
    refusal: str | None

    def attach(self, group: NodeGroup) -> Segments:
        counters = Counters(Segment.attach(self.counters), group.rank)
        if self.cache is None:
            return Segments(counters, None, refusal=self.refusal)
        return Segments(counters, Store.attach(self.cache), self.keeps_name)


@dataclass(frozen=True)
class Segments:
    """The segments of one request, open in this process.

    Args:
        counters: what is counted.
        cache: what is cached.
        keeps_name: whether the cache is there for other jobs.
        refusal: why the cache that has the name is not used, in words.
    """

    counters: Counters | None
    cache: Store | None
    keeps_name: bool = False
    refusal: str | None = None

    @classmethod
    def make(
        cls,
        request: CacheRequest,
        found: Finding,
        arc: Arc,
        group: NodeGroup,
        backend: Backend | None,
        joined: Store | None,
        budget: Budget,
        granted: int,
        keep_free: int,
        refuse: Callable[[Store, Counters], str | None],
    ) -> Segments:
        """Make them, or join the cache that has the request's name, unless `refuse` says why it must not be used."""
        cache, codec, refusal = joined, found.codec, None
        whose = {"dataset": printable(request.title, _LONGEST), "node": group.node, "nodes": len(group.nodes)}
        if codec is not None and request.name is not None:
            if joined is None:  # it may have come since, or this is the second try
                if arc.slots:
                    cache = open_cache(request, codec, budget, arc, granted, found.digest)
                else:
                    cache = join_cache(request, codec, budget)
        elif codec is not None and joined is None and arc.slots and request.dir is not None:
            cache = Store.create(codec, arc, None, whose, granted=granted, directory=request.dir)
        elif codec is not None and joined is None and arc.slots:
            cache = Store.create(codec, arc, backend, whose, granted=granted)
        counters = Counters.create(group.rank, backend)
        if cache is not None:
            cache.keep_free(keep_free)
            try:
                refusal = refuse(cache, counters)
            except BaseException:
                cache.close()
                raise
            if refusal is not None:
                cache.close()
                cache = None
        return cls(counters, cache, cache is not None and request.name is not None, refusal)

    @property
    def address(self) -> _Address:
        """Where they are, for the other ranks."""
        assert self.counters is not None
        handle = None if self.cache is None else self.cache.handle
        return _Address(self.counters.segment.handle, handle, self.keeps_name, self.refusal)

    def bytes_of(self, granted: int) -> int:
        """The memory that the cache may take: what was granted, or what a named one was made with."""
        if self.refusal is not None:
            return 0
        return granted if self.cache is None or not self.keeps_name else self.cache.granted_bytes

    def unlink(self) -> None:
        """Take their names away, but that of a cache which keeps it."""
        for part in (self.counters, None if self.keeps_name else self.cache):
            if part is not None:
                part.unlink()

    def close(self) -> None:
        """Give them up in this process."""
        for part in (self.counters, self.cache):
            if part is not None:
                part.close()


def make_and_attach(
    make: Callable[[Backend | None], list[Made]], backend: Backend | None, group: NodeGroup
) -> list[Made]:
    """Make segments on every leader and attach elsewhere; by name, where they cannot be reached without one."""
    troubles: list[str | None] = []
    failure: Exception | None = None
    for kind in dict.fromkeys((backend, "file")):
        segments: list[Made] = []
        addresses: list[Any] = []
        failure = None
        try:
            if group.is_leader:
                segments += make(kind)
                addresses = [made.address for made in segments]
        except Exception as error:  # whatever it is, the others are waiting for the addresses
            failure = error
        addresses = group.exchange(addresses)[group.leader]
        try:
            if not group.is_leader:
                segments += [address.attach(group) for address in addresses]
        except Exception as error:  # likewise
            failure = error
        troubles = group.exchange(repr(failure) if failure else None)  # by now everybody has attached, or will not
        for made in segments:
            made.unlink()
        if not any(troubles):
            return segments
        for made in segments:
            made.close()
    rank, words = next((rank, words) for rank, words in enumerate(troubles) if words)
    raise CacheMemoryError(f"rank {rank} could not make or reach the shared memory of its node: {words}") from failure

"""The memory of a cache, a stream or a pool: made by the leader of each node, attached by its other ranks.

Where a rank cannot reach memory without a name (another pid namespace), named files are tried. Their names are removed
as soon as all ranks have attached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import Backend
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment

__all__ = ["CacheMemoryError", "OpenMemory", "make_and_attach"]

Kept = TypeVar("Kept", bound=Store)


class CacheMemoryError(OSError):
    """The memory for a cache cannot be had, or not be reached by all ranks of a node."""


@dataclass(frozen=True)
class OpenMemory(Generic[Kept]):
    """Memory that is open in this process.

    Args:
        store: None if nothing is kept.
        counters: None where counting is impossible.
        group: the ranks that share it.
        budget_bytes: memory that was granted on this node.
        keeps_name: whether the store has a name for later jobs.
    """

    store: Kept | None = None
    counters: Counters | None = None
    group: NodeGroup = field(default_factory=NodeGroup)
    budget_bytes: int = 0
    keeps_name: bool = False

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

    def unlink(self) -> None:
        """Remove the names of its files, but that of a store which keeps it."""
        for part in (self.counters, None if self.keeps_name else self.store):
            if part is not None:
                part.unlink()

    def close(self) -> None:
        """Close it in this process."""
        for part in (self.store, self.counters):
            if part is not None and not part.closed:
                part.close()


def make_and_attach(
    make: Callable[[Backend | None], Sequence[OpenMemory[Any]]], backend: Backend | None, group: NodeGroup
) -> list[OpenMemory[Any]]:
    """Make memory on every leader and attach it elsewhere. Collective.

    Args:
        make: makes the stores, of this kind of segment. Their counters are made here.
        backend: the kind to try first.
        group: which ranks share memory.

    Raises:
        CacheMemoryError: a rank could not make or reach it, not even by name; on all ranks alike.
    """
    troubles: list[str | None] = []
    failure: Exception | None = None
    for kind in dict.fromkeys((backend, "file")):
        memories, addresses, failure = list[OpenMemory[Any]](), list[tuple[Any, ...]](), None
        try:
            if group.is_leader:
                memories = list(make(kind))
                memories = [replace(memory, counters=Counters.create(group.rank, kind)) for memory in memories]
                addresses = list(map(_address, memories))
        except Exception as error:  # whatever it is, the others are waiting for the addresses
            failure = error
        addresses = group.exchange(addresses)[group.leader]
        try:
            if not group.is_leader:
                memories += [_attach(group, *address) for address in addresses]
        except Exception as error:  # likewise
            failure = error
        troubles = group.exchange(repr(failure) if failure else None)  # by now everybody has attached, or will not
        for memory in memories:
            memory.unlink()
        if not any(troubles):
            return memories
        for memory in memories:
            memory.close()
    rank, words = next((rank, words) for rank, words in enumerate(troubles) if words)
    raise CacheMemoryError(f"rank {rank} could not make or reach the shared memory of its node: {words}") from failure


def _address(memory: OpenMemory[Any]) -> tuple[Any, ...]:
    """Where memory is, for the other ranks of its node."""
    store, counters = memory.store, memory.counters
    assert counters is not None
    kind, handle = type(store), None if store is None else store.handle
    return kind, handle, counters.segment.handle, replace(memory, store=None, counters=None)


def _attach(group: NodeGroup, kind: Any, handle: Any, counters: Any, memory: OpenMemory[Any]) -> OpenMemory[Any]:
    store = None if handle is None else kind.attach(handle)
    return replace(memory, store=store, counters=Counters(Segment.attach(counters), group.rank), group=group)

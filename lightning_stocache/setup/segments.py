"""The memory of caches: made by the leader of each node, attached by its other ranks.

Where a rank cannot reach memory without a name (another pid namespace), named files are tried. Their names are removed
as soon as all ranks have attached. Only a cache that outlives its job keeps its name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.store import Store
from lightning_stocache.node.errors import description
from lightning_stocache.node.files import Backend
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.source.probe import attributed, words_of

__all__ = ["CacheMemoryError", "make_and_attach"]


class CacheMemoryError(OSError):
    """The memory for a cache could not be made, or not be reached by all ranks of a node."""


def make_and_attach(
    caches: Sequence[OpenCache], make: Callable[[Backend | None], Iterable[Store | None]], backend: Backend | None
) -> list[OpenCache]:
    """Make the memory of caches on the leader of each node, and attach it on the other ranks. Collective.

    Args:
        caches: without memory, all of one group.
        make: makes the stores of all caches in one kind of segment; None for a cache that passes through. Their
            counters are made here.
        backend: the kind to try first; None is the system's default.

    Raises:
        CacheMemoryError: a rank could not make or reach it, not even by name; on all ranks alike.
    """
    group = caches[0].group
    troubles: list[str | None] = []
    failure: Exception | None = None
    for kind in dict.fromkeys((backend, "file")):
        stores, counters, addresses, failure = list[Store | None](), list[Counters](), list[Any](), None
        try:
            if group.is_leader:
                stores += make(kind)
                counters += [Counters.create(group.rank, kind) for _ in caches]
                addresses = [
                    (type(store), None if store is None else store.handle, counted.segment.handle)
                    for store, counted in zip(stores, counters, strict=True)
                ]
        except Exception as error:  # whatever it is, the others are waiting for the addresses
            failure = error
        addresses = group.exchange(addresses)[group.leader]
        try:
            for kind_of_store, store, counted in () if group.is_leader else addresses:
                stores.append(None if store is None else kind_of_store.attach(store))
                counters.append(Counters(Segment.attach(counted), group.rank))
        except Exception as error:  # whatever it is, the others are waiting for `troubles`
            failure = error
        # By now everybody has attached, or will not.
        troubles = group.exchange(None if failure is None else _words(failure))
        names = [store for cache, store in zip(caches, stores, strict=False) if cache.request.name is None]
        for part in (*names, *counters):
            if part is not None:
                part.unlink()
        if not any(troubles):
            return [
                replace(cache, cache=store, counters=counted)
                for cache, store, counted in zip(caches, stores, counters, strict=True)
            ]
        for part in (*stores, *counters):
            if part is not None:
                part.close()
    rank, words = next((rank, words) for rank, words in enumerate(troubles) if words)
    raise CacheMemoryError(f"rank {rank} could not {words}") from failure


def _words(failure: Exception) -> str:
    """What a rank could not do, and why."""
    if isinstance(failure, OSError | MemoryError):
        return f"make or reach the shared memory of its node: {description(failure)}"
    return f"open a cache: {words_of(attributed(failure), 'it')}"

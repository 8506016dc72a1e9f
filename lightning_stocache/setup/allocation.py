"""How the memory of a node is divided among the sources that are to be cached.

A pot is a budget that several requests share; each gets of it by the size of its dataset. The pots are served in
order, and what one has taken is no longer free for the next. What the loaders, their workers and the training need is
kept back before anything is granted. This runs on the leader of a node only; nothing here touches memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from lightning_stocache.cache.checksums import SUM_BYTES
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve, grant, loader_reserve, margin
from lightning_stocache.setup.request import BackendChoice, CacheRequest

__all__ = ["Allocation", "allocate", "allocate_on_disk"]

_MIB = 2**20


@dataclass(frozen=True)
class Allocation:
    """What the requests get on one node.

    Args:
        slots: slots per request.
        granted: bytes per request that these slots may take.
        backend: kind of segment; None is the system's default.
        warnings: one sentence per pot that gets less than it asked for.
        keep_free: bytes per request that filling leaves to others, see `shortage.keep_free`.
    """

    slots: tuple[int, ...]
    granted: tuple[int, ...]
    backend: Backend | None
    warnings: tuple[str, ...]
    keep_free: tuple[int, ...] = ()


def allocate(
    requests: Sequence[CacheRequest],
    codecs: Sequence[SampleCodec | None],
    budgets: Mapping[str, Budget],
    ranks: int,
    choice: BackendChoice = "auto",
    promised: int = 0,
    *,
    worker_bytes: int = 0,
    later_bytes: int = 0,
) -> Allocation:
    """Divide this node's memory.

    Args:
        requests: what is to be cached.
        codecs: what the samples of each look like; None for what is not to be cached after all.
        budgets: the budget of every pot, in the order in which they are served.
        ranks: ranks on this node, each of which has loaders of its own.
        choice: kind of segment. "auto" is /dev/shm, or a memfd where /dev/shm is short of what memory allows (Docker).
        promised: bytes that a named cache which exists may still take.
        worker_bytes: what a worker was measured to hold for itself; an estimate is the least.
        later_bytes: what each rank's training will take that it does not hold yet.
    """
    later = Reserve(promised, later_bytes * ranks)

    def divide(directory: str | None) -> Allocation:
        free = FreeMemory.measure(directory)
        reserves = [
            _reserve(request, codec, ranks, worker_bytes, free.own)
            for request, codec in zip(requests, codecs, strict=True)
        ]
        return _divide(requests, codecs, budgets, ranks, free, reserves, later)

    division = divide(None if choice == "memfd" else memory_directory())
    if choice != "auto":
        return replace(division, backend=choice)
    if division.warnings and hasattr(os, "memfd_create"):
        roomier = divide(None)
        if sum(roomier.slots) > sum(division.slots):
            return replace(roomier, backend="memfd")
    return division


def allocate_on_disk(
    requests: Sequence[CacheRequest], codecs: Sequence[SampleCodec | None], budgets: Mapping[str, Budget]
) -> Allocation:
    """Divide this node's disk. A hundredth of what is free is left to others, also while the caches fill.

    Args:
        requests: what is to be cached, all in the same directory.
        codecs: what the samples of each look like; None for what is not to be cached after all.
        budgets: the budget of every pot, in the order in which they are served.
    """
    directory = next(request.dir for request in requests if request.dir is not None)
    stats, nothing = os.statvfs(directory), Reserve()
    free = stats.f_frsize * stats.f_bavail
    facts = FreeMemory(free, None, None, directory)
    division = _divide(requests, codecs, budgets, 1, facts, [nothing] * len(requests), nothing, SUM_BYTES)
    kept = max(free // 100, 16 * _MIB)  # no more than `grant` has left, or the end found no room
    return replace(division, keep_free=(kept,) * len(requests))


def _divide(
    requests: Sequence[CacheRequest],
    codecs: Sequence[SampleCodec | None],
    budgets: Mapping[str, Budget],
    ranks: int,
    free: FreeMemory,
    reserves: Sequence[Reserve],
    later: Reserve,
    more: int = 0,
) -> Allocation:
    """Divide what is free; `more` bytes are needed per slot besides those that the codec knows of."""
    slots, granted, warnings = [0] * len(requests), [0] * len(requests), []
    loaders = sum(reserves, Reserve())
    kept_back = loaders + later
    for pot, budget in budgets.items():
        members = [
            (number, request, codec, request.samples * (codec.most_slot_bytes + more))
            for number, (request, codec) in enumerate(zip(requests, codecs, strict=True))
            if request.pot == pot and codec is not None
        ]
        if not members:
            continue
        size = sum(nbytes for *_, nbytes in members)
        given = grant(budget, size, free, kept_back, ranks)
        kept_back += Reserve(files=given.bytes)
        for number, request, codec, nbytes in members:
            granted[number] = given.bytes * nbytes // size
            slots[number] = min(granted[number] // (codec.slot_bytes + more), budget.part_of(request.samples))
        got, samples = sum(slots[number] for number, *_ in members), sum(request.samples for _, request, *_ in members)
        if given.limited_by is not None or not got:
            whose = f" ({pot})" if pot else ""
            limit = f"limited by {given.limited_by}" if given.limited_by else "less than one sample"
            warnings.append(
                f"the cache{whose} has room for {got:,} of {samples:,} samples, {format_bytes(given.bytes)} of the "
                f"{format_bytes(min(given.wanted, size))} that budget={str(budget)!r} asks for: {limit}"
            )
    # Half of the margin: a part of what was kept back has come by the time at which slots are filled. A cache is filled
    # by its own loader; those of the others may come after that.
    keep_free = tuple(margin(free, ranks) // 2 + loaders.bytes - reserve.bytes for reserve in reserves)
    return Allocation(tuple(slots), tuple(granted), None, tuple(warnings), keep_free)


def _reserve(request: CacheRequest, codec: SampleCodec | None, ranks: int, worker_bytes: int, own: int) -> Reserve:
    """What the request's loaders need on this node."""
    loader = request.reader
    if loader is None or codec is None:
        return Reserve()
    return loader_reserve(
        loader.batch_size * codec.batch_bytes,
        loader.num_workers,
        loader.prefetch_factor,
        ranks,
        start_method=loader.start_method,
        worker_bytes=worker_bytes,
        own=own,
    )

"""How the memory, or the disk, of a node is divided among the datasets, streams and pools that are to be cached.

A pot is a budget that several requests share; each gets a part by the size of its dataset. The pots are served in
order: what the first has taken is not free for the second. What the loaders, their workers and the training need is
kept back before anything is granted. A pool opens alone. Only the leader of a node divides; no memory is taken here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import cast

from torch.utils.data import Dataset

from lightning_stocache.cache.codec import Codec
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import Store
from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.files import Backend, memory_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve, grant, loader_reserve, margin
from lightning_stocache.setup.request import ENDLESS, BackendChoice, CacheRequest, LoaderSettings

__all__ = ["Allocation", "allocate", "holds_all", "largest_grant"]

_MIB = 2**20
_READERS = 4  # processes per rank that map the memory of a stream
_PAGE = 4096  # disks give whole blocks
_TABLES_SHARE = 1024  # 1/1024 of a file is left for the filesystem's own tables of its blocks
_ROOMY = 2  # two records do not show the size of all: a pool with room for twice as much holds all


@dataclass(frozen=True)
class Allocation:
    """The memory that requests get on one node.

    Args:
        slots: slots per request.
        granted: bytes per request that these slots may take.
        keep_free: bytes per request that filling leaves free, see `Store.keep_free`.
        backend: kind of segment; None is the system's default.
        warnings: one sentence for each pot that gets less than its budget.
    """

    slots: tuple[int, ...]
    granted: tuple[int, ...]
    keep_free: tuple[int, ...]
    backend: Backend | None = None
    warnings: tuple[str, ...] = ()


def allocate(
    requests: Sequence[CacheRequest],
    codecs: Sequence[Codec | None],
    budgets: Mapping[str, Budget],
    ranks: int,
    choice: BackendChoice = "auto",
    later: Reserve | None = None,
) -> Allocation:
    """Divide the memory of this node, or its disk if the requests have a directory.

    Args:
        requests: the sources to cache.
        codecs: the codec of each source; None: it is not cached.
        budgets: the budget of every pot, in the order in which pots are served.
        ranks: number of ranks on this node. Each has its own loaders.
        choice: kind of segment. "auto" is /dev/shm, or a memfd if that has more room (Docker).
        later: memory that open caches and the training will still take.
    """
    if all(codec is None for codec in codecs):  # measuring the free memory takes time
        nothing = (0,) * len(requests)
        return Allocation(nothing, nothing, nothing)
    for request in requests:
        budget = budgets[request.pot]
        if request.writers and request.samples == ENDLESS and budget.unit == "% of dataset":
            raise ValueError(f'budget must be bytes ("8GiB") or a share of what is free for a stream, got {budget}')
    sizes = [
        (0, 0) if codec is None else _slot_sizes(request, codec, budgets[request.pot])
        for request, codec in zip(requests, codecs, strict=True)
    ]
    directory = next((request.dir for request in requests if request.dir is not None), None)
    if directory is None:

        def divide(free: FreeMemory) -> Allocation:
            reserves = [
                _reserve(request, codec, ranks, free.own) for request, codec in zip(requests, codecs, strict=True)
            ]
            return _divide(requests, sizes, budgets, free, reserves, later or Reserve(), ranks)

        allocation = _in_memory(divide, choice)
    else:
        allocation = _on_disk(directory, requests, sizes, budgets)
    if requests[0].writers and codecs[0] is not None:
        return _of_pool(allocation, requests[0], codecs[0], budgets[requests[0].pot])
    return allocation


def holds_all(request: CacheRequest, codec: Codec, granted: int) -> bool:
    """Whether a rolling cache surely has room for its whole source."""
    return request.samples < ENDLESS and granted >= request.samples * _roomy_bytes(request, codec)


def largest_grant(
    codec: Codec | None, reader: LoaderSettings | None = None, ranks: int = 1, choice: BackendChoice = "auto"
) -> tuple[int, Backend | None]:
    """The bytes that a dataset larger than the memory would get now, and the kind of segment.

    Args:
        codec: codec of the samples; None: nothing is granted.
        reader: the loader that reads the dataset. Its batches and workers keep their memory.
        ranks: number of ranks on this node. Each has such a loader.
        choice: kind of segment, as in `allocate`.
    """
    endless = CacheRequest(cast("Dataset[object]", range(ENDLESS)), reader=reader)
    division = allocate([endless], [codec], {endless.pot: Budget.parse("auto")}, ranks, choice)
    return division.granted[0], division.backend


def _on_disk(
    directory: str,
    requests: Sequence[CacheRequest],
    sizes: Sequence[tuple[int, int]],
    budgets: Mapping[str, Budget],
) -> Allocation:
    """Divide the free disk. 1 % of it stays free, also while the caches fill."""
    stats = os.statvfs(directory)
    nbytes = stats.f_frsize * stats.f_bavail
    free = FreeMemory(nbytes, None, None, directory)
    division = _divide(requests, sizes, budgets, free, [Reserve()] * len(requests), Reserve(), 1)
    return replace(division, keep_free=(max(nbytes // 100, 16 * _MIB),) * len(requests))


def _in_memory(divide: Callable[[FreeMemory], Allocation], choice: BackendChoice) -> Allocation:
    """Divide the free memory of /dev/shm, or the memory for a memfd if that is more."""
    free = FreeMemory.measure(memory_directory())
    anywhere = replace(free, filesystem=None, directory=None)  # no filesystem limits a memfd
    allocation = divide(anywhere if choice == "memfd" else free)
    if choice != "auto":
        return replace(allocation, backend=choice)
    if hasattr(os, "memfd_create"):
        roomier = divide(anywhere)
        if sum(roomier.granted) > sum(allocation.granted):
            return replace(roomier, backend="memfd")
    return allocation


def _slot_sizes(request: CacheRequest, codec: Codec, budget: Budget) -> tuple[int, int]:
    """The bytes of a slot, as an upper estimate and as expected."""
    if request.writers:
        expected = RollingStore.slot_bytes(codec, on_disk=request.dir is not None)
        is_part = budget.unit == "% of dataset" and budget.amount < 100
        return (expected if is_part else _roomy_bytes(request, codec)), expected
    checksum = 0 if request.dir is None else Store.checksum_bytes(codec)
    return codec.most_slot_bytes + checksum, codec.slot_bytes + checksum


def _roomy_bytes(request: CacheRequest, codec: Codec) -> int:
    """The bytes per sample with which a rolling cache surely has room for a whole source."""
    expected = RollingStore.slot_bytes(codec, on_disk=request.dir is not None)
    return expected if codec.is_fixed else expected * _ROOMY


def _of_pool(allocation: Allocation, request: CacheRequest, codec: Codec, budget: Budget) -> Allocation:
    """The allocation of a rolling cache. On a disk, a budget in bytes limits the whole file.

    Raises:
        ValueError: there is no room for the minimum number of samples.
    """
    on_disk = request.dir is not None
    each = RollingStore.slot_bytes(codec, on_disk=on_disk)
    [slots], [granted] = allocation.slots, allocation.granted
    if on_disk and budget.unit == "bytes":
        file_bytes = int(budget.amount - budget.amount // _TABLES_SHARE) // _PAGE * _PAGE
        fitting, granted = RollingStore.fit(codec, slots, granted, file_bytes)
        slots = fitting if codec.is_fixed else granted // each
    least = 1 if holds_all(request, codec, granted) else request.writers + 2
    if slots < least:
        gives = " ".join(allocation.warnings) or f"budget={budget.written!r} gives {format_bytes(granted)}"
        raise ValueError(
            f"a rolling cache needs room for {least} samples of {format_bytes(each)} at least, so that one can be read "
            f"while others are written; {gives}"
        )
    return replace(allocation, slots=(slots,), granted=(granted,))


def _divide(
    requests: Sequence[CacheRequest],
    sizes: Sequence[tuple[int, int]],
    budgets: Mapping[str, Budget],
    free: FreeMemory,
    reserves: Sequence[Reserve],
    later: Reserve,
    ranks: int,
) -> Allocation:
    """Divide the free memory; `sizes` are those of `_slot_sizes`, or 0 if a source is not cached."""
    slots, granted, warnings = [0] * len(requests), [0] * len(requests), []
    loaders = sum(reserves, Reserve())
    kept_back = loaders + later
    for pot, budget in budgets.items():
        members = [
            (number, request, each, request.samples * most)
            for number, (request, (most, each)) in enumerate(zip(requests, sizes, strict=True))
            if request.pot == pot and each
        ]
        if not members:
            continue
        size = sum(nbytes for *_, nbytes in members)
        given = grant(budget, size, free, kept_back, ranks)
        kept_back += Reserve(files=given.bytes)
        for number, request, each, nbytes in members:
            granted[number] = given.bytes * nbytes // size
            slots[number] = min(granted[number] // each, budget.part_of(request.samples))
        got, samples = sum(slots[number] for number, *_ in members), sum(request.samples for _, request, *_ in members)
        is_unknown = samples >= ENDLESS and budget.unit == "% of dataset"  # nobody knows how much all samples take
        if (given.limited_by is not None and not is_unknown) or not got:
            whose = f" ({pot})" if pot else ""
            limit = f"limited by {given.limited_by}" if given.limited_by else "less than one sample"
            room = f"room for {got:,} of {samples:,} samples, " if samples < ENDLESS else ""
            warnings.append(
                f"the cache{whose} has {room}{format_bytes(given.bytes)} of the "
                f"{format_bytes(min(given.wanted, size))} that budget={budget.written!r} asks for: {limit}"
            )
    # Half of the margin: while slots are filled, the training has taken a part of the memory that was kept back. Each
    # cache is filled by its own loader; the other loaders may start later.
    keep_free = tuple(margin(free, ranks) // 2 + loaders.bytes - reserve.bytes for reserve in reserves)
    return Allocation(tuple(slots), tuple(granted), keep_free, None, tuple(warnings))


def _reserve(request: CacheRequest, codec: Codec | None, ranks: int, own: int) -> Reserve:
    """The memory that the loader of a request needs on this node."""
    loader = request.reader
    if request.as_stream and not request.writers:
        return Reserve(readers=ranks * _READERS)
    if loader is None or codec is None or request.writers:
        return Reserve()
    batch_bytes = loader.batch_size * codec.batch_bytes
    workers = loader.num_workers, loader.prefetch_factor
    return loader_reserve(batch_bytes, *workers, ranks, start_method=loader.start_method, own=own, pins=loader.pins)

"""What a cache may take: the user's budget, limited by the memory that is free now and later.

`grant` gives the smallest of three numbers: the budget, the size of the dataset, and the free memory (`FreeMemory`)
less a margin, less the `Reserve` for what comes beside the caches (batches, workers, gradients, the optimizer's state),
less the promises to caches of other jobs. A job gets at least half of the memory that is left. So a job that was
granted everything, and never fills it, does not keep the others from caching. Filling looks at the free memory again.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.free import FreeMemory

__all__ = ["Grant", "Reserve", "grant", "loader_reserve", "margin"]

_MIB = 2**20
_FORKED_WORKER = 32 * _MIB  # measured: a worker writes to 12 to 18 MiB of pages, with its page tables
_READER_SHARE = 512  # page tables take this part of the memory that a process maps: 8 bytes per page of 4 KiB


@dataclass(frozen=True)
class Reserve:
    """Memory that stays free beside the caches of a node. Reserves of several loaders add up."""

    files: int = 0  # bytes in /dev/shm: batches on their way, other caches
    private: int = 0  # bytes of processes: workers, and the training steps
    readers: int = 0  # processes that map the cache, each of which needs page tables

    def __add__(self, other: Reserve) -> Reserve:
        return Reserve(self.files + other.files, self.private + other.private, self.readers + other.readers)

    @property
    def bytes(self) -> int:
        """Bytes of files and processes, without page tables."""
        return self.files + self.private


@dataclass(frozen=True)
class Grant:
    """What a cache gets."""

    bytes: int  # slot states included
    wanted: int  # bytes that the budget asks for; may be more than the dataset needs
    limited_by: str | None  # the shortage that made `bytes` smaller than budget and dataset, in words


def grant(budget: Budget, dataset_bytes: int, free: FreeMemory, reserve: Reserve, ranks: int = 1) -> Grant:
    """Grant the bytes that the budget asks for, at most what the dataset needs and what is safely free.

    Args:
        budget: The user's budget.
        dataset_bytes: Bytes of the whole dataset in the cache, slot states included.
        free: The node's free memory, measured before the cache takes any.
        reserve: Memory that stays free for others.
        ranks: Ranks on this node.

    Example:
        >>> free = FreeMemory(filesystem=2**30, available=2**33, cgroup=None, directory="/dev/shm")
        >>> grant(Budget.parse("8GiB"), dataset_bytes=2**34, free=free, reserve=Reserve(files=2**20)).limited_by
        '/dev/shm (1 GiB free)'
    """
    rooms = []
    if free.filesystem is not None:
        # A full filesystem kills nobody. 16 MiB stay free for small files of others, little of Docker's 64 MiB. All
        # promises count here: workers whose batches find no room in a full filesystem die.
        promised = free.promised.in_directory
        room = free.filesystem - promised - reserve.files - max(free.filesystem // 50, 16 * _MIB)
        rooms.append((room, f"{free.directory or 'the filesystem'} ({_free(free.filesystem, promised)})"))
    for size, name, promised in free.limits_of_memory:
        spare = reserve.bytes + margin(free, ranks)
        room = max(size - spare - promised, (size - spare) // (2 if promised else 1))
        room = room * _READER_SHARE // (_READER_SHARE + reserve.readers)
        rooms.append((room, f"{name} ({_free(size, promised)}, {format_bytes(spare)} kept for the training)"))
    room, limit = min(rooms, default=(0, "memory that cannot be measured here"))
    safe = max(0, room)
    wanted = budget.wanted(dataset_bytes, safe)
    useful = min(wanted, dataset_bytes)
    return Grant(min(useful, safe), wanted, limit if safe < useful else None)


def _free(size: int, promised: int) -> str:
    others = f", of which caches of other jobs may take {format_bytes(promised)}" if promised else ""
    return f"{format_bytes(size)} free{others}"


def margin(free: FreeMemory, ranks: int = 1) -> int:
    """Bytes of memory that stay free for the unforeseen, because above a cgroup's limit the kernel kills.

    At least as much as the trainers have already. A trainer's heap grows in its first steps, and workers that start
    later share pages that it then writes to (measured: 0.5 to 1.4 GB within two epochs, without any cache).
    """
    tightest = free.memory
    return max((tightest[0] if tightest else 0) // 50, 64 * _MIB, free.own * ranks)


def loader_reserve(
    batch_bytes: int,
    num_workers: int,
    prefetch_factor: int | None,
    ranks: int,
    *,
    start_method: str | None = None,
    own: int = 0,
    pins: bool = False,
) -> Reserve:
    """The memory that a loader will need on this node, beside the cache that it reads.

    Args:
        batch_bytes: One batch of one rank.
        num_workers: Worker processes of each rank.
        prefetch_factor: Batches that each worker makes ahead; None for DataLoader's default, 2.
        ranks: Ranks on this node.
        start_method: Start method of workers; None for the system's default.
        own: This process's anonymous memory. A worker that is not forked takes as much.
        pins: Whether batches are copied to page-locked memory, where as many may wait as workers make.
    """
    ahead = num_workers * (2 if prefetch_factor is None else prefetch_factor)
    forked = (start_method or multiprocessing.get_context().get_start_method()) == "fork"
    worker_bytes = max(_FORKED_WORKER, 0 if forked else own)
    # Five batches beside those of the workers: the batch of the running step, the batch that Lightning fetches ahead,
    # the batch that is gathered or copied to pinned memory meanwhile, and two spare. Each worker also has the samples
    # of the batch that it is loading.
    batches = ahead + 5
    pinned_bytes = batches * batch_bytes if pins else 0
    return Reserve(
        ranks * batches * batch_bytes,
        ranks * (num_workers * (worker_bytes + batch_bytes) + pinned_bytes),
        ranks * (num_workers + 1),
    )

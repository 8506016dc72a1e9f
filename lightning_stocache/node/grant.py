"""What a cache may take: what the user asked for, no more than is really free, now and later.

Three facts, in the order in which they are made:

1. `FreeMemory.measure` asks the kernel, when a cache opens, what may be taken at all, and other caches (`open_files`).
2. A `Reserve` says what will still come beside the caches: batches, workers, gradients, the optimiser's state.
3. `grant` takes the smallest: the wish, the dataset, and the free memory less the reserve, a margin, and what caches of
   other jobs were promised: of memory, which is looked at again while a cache is filled, a job gets an even share at
   least, so that one that was granted all there is, and never fills it, does not keep the others from caching.

Not promised: that the memory is still free later. Others allocate too, which is why a slot's memory is taken where that
can fail, and why free memory is looked at again while the cache is filled.
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass

from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.free import FreeMemory

__all__ = ["Grant", "Reserve", "grant", "loader_reserve", "margin"]

_MIB = 2**20
_FORKED_WORKER = 32 * _MIB  # measured: 12 to 18 MiB of pages that a worker writes to, with its page tables
_READER_SHARE = 512  # of what it reads, a process pays one part for page tables: 8 bytes per page of 4 KiB


@dataclass(frozen=True)
class Reserve:
    """What is to stay free beside the caches of a node. The reserves of several loaders add up.

    Args:
        files: Bytes that lie where the cache does, in /dev/shm: batches on their way, other caches.
        private: Bytes of processes: workers, and what a training step will hold.
        readers: Processes that map the cache: each needs page tables for what it reads.
    """

    files: int = 0
    private: int = 0
    readers: int = 0

    def __add__(self, other: Reserve) -> Reserve:
        return Reserve(self.files + other.files, self.private + other.private, self.readers + other.readers)

    @property
    def bytes(self) -> int:
        """All but the page tables."""
        return self.files + self.private


@dataclass(frozen=True)
class Grant:
    """What a cache gets.

    Args:
        bytes: What it may use, slot states included.
        wanted: What the budget asks for; may be more than the dataset needs.
        limited_by: Which shortage of memory made it less, in words with what is free; None if none did (a dataset
            smaller than the budget is none).
    """

    bytes: int
    wanted: int
    limited_by: str | None


def grant(budget: Budget, dataset_bytes: int, free: FreeMemory, reserve: Reserve, ranks: int = 1) -> Grant:
    """Give what is asked for, but no more than the dataset needs and no more than is safely free.

    Args:
        budget: The user's wish.
        dataset_bytes: What the whole dataset takes in the cache, slot states included.
        free: The node's free memory, measured before the cache takes any.
        reserve: What is to stay free for others.
        ranks: Ranks on this node.

    Example:
        >>> free = FreeMemory(filesystem=2**30, available=2**33, cgroup=None, directory="/dev/shm")
        >>> given = grant(Budget.parse("8GiB"), dataset_bytes=2**34, free=free, reserve=Reserve(files=2**20))
        >>> format_bytes(given.bytes), given.limited_by
        ('1002.5 MiB', '/dev/shm (1 GiB free)')
    """
    rooms = []
    if free.filesystem is not None:
        # A full one kills nobody. 16 MiB are for others' small files, yet little of Docker's 64 MiB.
        # What is promised to others is gone: the workers of a loader that put their batches there die where it is full.
        others = free.promised.files
        room = free.filesystem - others.nbytes - reserve.files - max(free.filesystem // 50, 16 * _MIB)
        rooms.append((room, f"{free.directory or 'the filesystem'} ({format_bytes(free.filesystem)} free{others})"))
    for size, name, others in free.limits_of_memory:
        kept = reserve.bytes + margin(free, ranks)
        room = others.share(size - kept) * _READER_SHARE // (_READER_SHARE + reserve.readers)
        rooms.append((room, f"{name} ({format_bytes(size)} free{others}, {format_bytes(kept)} kept for the training)"))
    room, limit = min(rooms, default=(0, "memory that cannot be measured here"))
    safe = max(0, room)
    wanted = budget.wanted(dataset_bytes, safe)
    useful = min(wanted, dataset_bytes)
    return Grant(min(useful, safe), wanted, limit if safe < useful else None)


def margin(free: FreeMemory, ranks: int = 1) -> int:
    """Bytes of memory that are left alone for what nobody can foresee, because above a cgroup's limit the kernel kills.

    As much as the trainers hold already: a trainer's heap grows with its first steps, and workers that are started for
    a later epoch hold the pages that it then writes to (measured: 0.5 to 1.4 GB within two epochs, without any cache).

    Args:
        free: What was measured when the cache opened.
        ranks: Ranks on this node.
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
    worker_bytes: int = 0,
    own: int = 0,
) -> Reserve:
    """What a loader will need on this node, beside the cache that it reads.

    Args:
        batch_bytes: One batch of one rank.
        num_workers: Worker processes of each rank.
        prefetch_factor: Batches that each worker makes ahead; None means DataLoader's own default, 2.
        ranks: Ranks on this node.
        start_method: How workers are started; None means the system's default.
        worker_bytes: What a worker was measured to hold for itself; an estimate is the least.
        own: What this process holds for itself: as much as a worker that is not forked will.

    Example:
        >>> reserve = loader_reserve(batch_bytes=10, num_workers=4, prefetch_factor=None, ranks=2, worker_bytes=2**26)
        >>> reserve.files, reserve.private, reserve.readers
        (260, 536870992, 10)
    """
    ahead = num_workers * (2 if prefetch_factor is None else prefetch_factor)
    forked = (start_method or multiprocessing.get_context().get_start_method()) == "fork"
    worker_bytes = max(worker_bytes, _FORKED_WORKER, 0 if forked else own)
    # Five more than the workers hold: the batch of the running step, the one that Lightning fetches ahead, the one that
    # is gathered or copied to pinned memory meanwhile, and two to spare, of those that workers write to and of others.
    # Besides, each worker holds the samples of the batch that it is loading.
    return Reserve(
        ranks * (ahead + 5) * batch_bytes, ranks * num_workers * (worker_bytes + batch_bytes), ranks * (num_workers + 1)
    )

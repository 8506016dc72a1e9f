"""In which order the samples in memory of a stream or a rolling cache are served, and by which rank.

The order follows from the seed, the epoch and the node alone, so every process computes it, and nothing is sent but one
number per rank of a rolling cache: how much is resident differs from node to node, and all ranks run the same number of
batches. Each node divides its samples evenly among its ranks, and the smallest share of any rank is the share of all.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Protocol, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.group import NodeGroup

__all__ = ["RollingSampler", "StreamBatches", "batches_in_turn", "batches_of", "deal", "permutation"]

_LOOK_SECONDS = 1.0
_GROUP = 16  # indices that are handed on at a time: between two of them there is a look


def permutation(samples: int, *seeds: int) -> Integers:
    """So many samples in an order that follows from the seeds, int64 `[samples]`.

    Example:
        >>> permutation(5, 0, 2).tolist()
        [4, 2, 1, 0, 3]
    """
    return np.random.default_rng(seeds).permutation(samples).astype(np.int64, copy=False)


def deal(order: Integers, rank: int, ranks: int) -> Integers:
    """What one of some ranks takes of an order: as many as each, the first samples twice where they do not come out.

    Example:
        >>> [deal(np.arange(5), rank, 2).tolist() for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """
    return np.resize(order, -(-len(order) // ranks) * ranks)[rank::ranks]


# ---- streams ----


def batches_in_turn(shards: Sequence[Integers], size: int, *, drop_last: bool = False) -> list[Integers]:
    """The batches of a stream as a DataLoader makes them: one of each worker in turn, given the samples of each.

    Example:
        >>> [batch.tolist() for batch in batches_in_turn([np.array([0, 1, 2]), np.array([7])], 2)]
        [[0, 1], [7], [2]]
    """
    cut = [[mine[first : first + size] for first in range(0, len(mine), size)] for mine in shards]
    turns = (batch for turn in zip_longest(*cut) for batch in turn if batch is not None)
    return [batch for batch in turns if not drop_last or len(batch) == size]


def batches_of(order: Integers, rank: int, ranks: int, size: int, *, drop_last: bool = False) -> list[Integers]:
    """The batches of a rank: as many on each, and every sample on one of them.

    Where a rank would have a batch less than others, its last one is divided; with fewer samples than ranks have
    batches some come twice. With `drop_last` what is left over after the last whole batch of all ranks is left out.

    Example:
        >>> [[len(batch) for batch in batches_of(np.arange(9), rank, 2, 4)] for rank in (0, 1)]
        [[4, 1], [3, 1]]
    """
    whole = ranks * size
    if drop_last:
        mine = order[: len(order) // whole * whole][rank::ranks]
        return [mine[first : first + size] for first in range(0, len(mine), size)]
    count, mine = -(-len(order) // whole), order[rank::ranks]
    if len(mine) < count:
        mine = deal(order, rank, ranks)
    cuts = [min(number * size, len(mine) - (count - number)) for number in range(count)] + [len(mine)]
    return [mine[begin:end] for begin, end in pairwise(cuts)]


class StreamBatches(Sampler[list[int]]):
    """The batches of a rank in one epoch.

    Args:
        batches: all of them; all but the last few have `batch_size`.
        batch_size: samples per batch.
        drop_last: whether all batches have that size.
    """

    def __init__(self, batches: Sequence[Integers], batch_size: int, drop_last: bool) -> None:
        self.batches, self.batch_size, self.drop_last = batches, batch_size, drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)

    def groups(self) -> Iterator[Integers]:
        """The indices of several batches at a time, all but the last of which have `batch_size`."""
        batches = self.batches
        whole = next((number for number, batch in enumerate(batches) if len(batch) < self.batch_size), len(batches))
        if whole:
            yield np.concatenate(batches[:whole])
        yield from batches[whole:]


# ---- rolling caches ----


class _Pool(Protocol):
    @property
    def group(self) -> NodeGroup: ...

    def begin_epoch(self) -> Integers: ...

    def resident(self) -> Integers: ...

    def look_after(self) -> None: ...


class RollingSampler(DistributedSampler[int]):
    """Each epoch draws what is resident when it begins, shuffled, and deals it to the ranks of the node.

    Made by `RollingCache.sampler`. It is a DistributedSampler only in that Lightning leaves it in its place.

    Args:
        pool: the rolling cache.
        shuffle: another order in every epoch, or by slot.
        seed: of the order.
        epoch_samples: samples per epoch and rank, whatever is resident: fewer than that are drawn again and again,
            each round in another order. None: each resident sample once.
    """

    def __init__(self, pool: _Pool, *, shuffle: bool = True, seed: int = 0, epoch_samples: int | None = None) -> None:
        group = pool.group
        super().__init__(cast("Dataset[Any]", pool), group.world, group.rank, shuffle, seed)
        self.pool, self.epoch_samples = pool, epoch_samples
        self.look_again()

    def look_again(self) -> None:
        """Count what is resident now, for who asks for the length before an epoch begins. Collective."""
        self.num_samples = self._share(len(self.pool.resident()))

    def __len__(self) -> int:
        return int(self.num_samples)

    def __iter__(self) -> Iterator[int]:
        return (index for group in self.groups(_GROUP) for index in group.tolist())

    def groups(self, size: int) -> Iterator[Integers]:
        """The epoch in arrays of so many indices, but the last; it begins when the first of them is asked for."""
        order = self._order()
        look_at = time.monotonic() + _LOOK_SECONDS
        for first in range(0, len(order), size):
            if time.monotonic() > look_at:
                self.pool.look_after()
                look_at = time.monotonic() + _LOOK_SECONDS
            yield order[first : first + size]

    def _order(self) -> Integers:
        """What this rank draws in the epoch that begins now: its part of one or more permutations."""
        resident = self.pool.begin_epoch()
        self.num_samples = self._share(len(resident))
        group, epoch = self.pool.group, self.epoch
        self.epoch += 1  # who calls `set_epoch`, as Lightning does, has the last word
        ranks = group.nodes[group.node]
        mine = slice(ranks.index(group.rank), None, len(ranks))
        rounds = []
        for turn in range(-(-self.num_samples // len(resident[mine]))):
            order = permutation(len(resident), self.seed, epoch, turn, group.node) if self.shuffle else slice(None)
            rounds.append(resident[order][mine])
        return np.concatenate(rounds)[: self.num_samples]

    def _share(self, resident: int) -> int:
        """How many samples every rank draws. Collective."""
        group = self.pool.group
        least = min(group.exchange(resident // len(group.nodes[group.node])))
        if not least:
            raise RuntimeError(
                "a node has fewer samples resident than ranks: give RollingCache a minimum of one sample per rank"
            )
        return least if self.epoch_samples is None else self.epoch_samples

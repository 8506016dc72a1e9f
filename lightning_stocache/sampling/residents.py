"""The order in which the samples in memory of a stream or a rolling cache are served, and their ranks.

The order follows from the seed, the epoch and the node alone, so every process computes it. Only one number per rank of
a rolling cache is sent: nodes differ in how many samples are resident, and all ranks run the same number of batches.
Each node divides its samples evenly among its ranks, and every rank draws as many as the rank with the fewest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler, Sampler

from lightning_stocache.cache.placement import Integers

__all__ = ["RollingSampler", "StreamBatches", "batches_in_turn", "batches_of_rank", "deal", "permutation"]

_LOOK_SECONDS = 1.0
_GROUP = 16  # indices that are drawn at a time; the pool is looked after between two groups


def permutation(samples: int, *seeds: int) -> Integers:
    """A permutation of the numbers below `samples` that follows from the seeds, int64 `[samples]`.

    Example:
        >>> permutation(5, 0, 2).tolist()
        [4, 2, 1, 0, 3]
    """
    return np.random.default_rng(seeds).permutation(samples).astype(np.int64, copy=False)


def deal(order: Integers, rank: int, ranks: int) -> Integers:
    """The part of an order for one rank. All parts have one length, so the first samples may come twice.

    Example:
        >>> [deal(np.arange(5), rank, 2).tolist() for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """
    return np.resize(order, -(-len(order) // ranks) * ranks)[rank::ranks]


# ---- streams ----


def batches_in_turn(shards: Sequence[Integers], size: int, *, drop_last: bool = False) -> list[Integers]:
    """The batches of a stream in the order of a DataLoader: a batch of each worker in turn.

    Args:
        shards: the samples of each worker.
        size: samples per batch.
        drop_last: whether to leave out batches with fewer samples.

    Example:
        >>> [batch.tolist() for batch in batches_in_turn([np.array([0, 1, 2]), np.array([7])], 2)]
        [[0, 1], [7], [2]]
    """
    cut = [[mine[first : first + size] for first in range(0, len(mine), size)] for mine in shards]
    turns = (batch for turn in zip_longest(*cut) for batch in turn if batch is not None)
    return [batch for batch in turns if not drop_last or len(batch) == size]


def batches_of_rank(order: Integers, rank: int, ranks: int, size: int, *, drop_last: bool = False) -> list[Integers]:
    """The batches of a rank. All ranks have the same number of batches, and every sample is on one rank.

    A rank that would have a batch less than others divides its last batch. If there are fewer samples than batches,
    some samples come twice. With `drop_last`, the samples after the last whole batch of all ranks are left out.

    Example:
        >>> [[len(batch) for batch in batches_of_rank(np.arange(9), rank, 2, 4)] for rank in (0, 1)]
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
        batches: the indices of each batch. All but the last few batches have `batch_size` samples.
        batch_size: samples per batch.
        drop_last: whether every batch has that size.
    """

    def __init__(self, batches: Sequence[Integers], batch_size: int, drop_last: bool) -> None:
        self.batches = batches
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self.batches)

    def __len__(self) -> int:
        return len(self.batches)


# ---- rolling caches ----


class RollingSampler(DistributedSampler[int]):
    """Draws the samples that are resident when an epoch begins, shuffled, and deals them to the ranks of the node.

    `RollingCache.sampler` makes it. It is a DistributedSampler only because Lightning does not replace those.

    Args:
        pool: the rolling cache.
        shuffle: whether each epoch has another order; else samples come in the order of their slots.
        seed: seed of the order.
        epoch_samples: samples per epoch and rank. If fewer are resident, they are drawn in several rounds, each in
            another order. None: each resident sample once.
    """

    def __init__(self, pool: Any, *, shuffle: bool = True, seed: int = 0, epoch_samples: int | None = None) -> None:
        group = pool.group
        super().__init__(cast("Dataset[Any]", pool), group.world, group.rank, shuffle, seed)
        self.pool, self.epoch_samples = pool, epoch_samples
        self.fixed: int | None = None
        """Samples of each epoch while a Trainer counts on its length, whatever is resident."""
        self.look_again()

    def look_again(self) -> None:
        """Set the length to the samples that are resident now, before an epoch begins. Collective."""
        self.num_samples = self._share(len(self.pool.resident()))

    def __len__(self) -> int:
        return int(self.num_samples)

    def __iter__(self) -> Iterator[int]:
        order = self._order()
        look_at = time.monotonic() + _LOOK_SECONDS
        for first in range(0, len(order), _GROUP):
            if time.monotonic() > look_at:
                self.pool.look_after()
                look_at = time.monotonic() + _LOOK_SECONDS
            yield from order[first : first + _GROUP].tolist()

    def _order(self) -> Integers:
        """Begin an epoch. Returns the indices that this rank draws: its part of one or more permutations."""
        resident = self.pool.begin_epoch()
        share = self._share(len(resident))
        self.num_samples = share if self.fixed is None else self.fixed
        group, epoch = self.pool.group, self.epoch
        self.epoch += 1  # `set_epoch`, which Lightning calls, may change it again
        mine = slice(group.local_rank, None, len(group.members))
        rounds = []
        for turn in range(-(-self.num_samples // len(resident[mine]))):
            order = permutation(len(resident), self.seed, epoch, turn, group.node) if self.shuffle else slice(None)
            rounds.append(resident[order][mine])
        return np.concatenate(rounds)[: self.num_samples]

    def _share(self, resident: int) -> int:
        """The number of samples that every rank draws. Collective."""
        group = self.pool.group
        least = min(group.exchange(resident // len(group.members)))
        if not least:
            raise RuntimeError(
                "a node has fewer samples resident than ranks: give RollingCache a minimum of one sample per rank"
            )
        return least if self.epoch_samples is None else self.epoch_samples

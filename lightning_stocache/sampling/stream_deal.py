"""In which order what is kept of a stream is served, and by whom: the same arithmetic in every process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest

import numpy as np
from torch.utils.data import Sampler

from lightning_stocache.cache.placement import Integers

__all__ = ["StreamBatches", "batches_in_turn", "batches_of", "deal", "permutation"]


def permutation(samples: int, *seeds: int) -> Integers:
    """All samples in an order, int64 `[samples]`; the same in every process.

    Args:
        samples: how many there are.
        seeds: what the order follows from: the user's seed, the epoch, and whatever else there is.

    Example:
        >>> permutation(5, 0, 2).tolist()
        [4, 2, 1, 0, 3]
    """
    return np.random.default_rng(seeds).permutation(samples).astype(np.int64, copy=False)


def deal(order: Integers, rank: int, ranks: int) -> Integers:
    """What one of some ranks takes of an order, int64 `[samples]`: as many as each, as by DistributedSampler.

    Where they do not come out even the first samples come twice.

    Example:
        >>> [deal(np.arange(5), rank, 2).tolist() for rank in (0, 1)]
        [[0, 2, 4], [1, 3, 0]]
    """
    return np.resize(order, -(-len(order) // ranks) * ranks)[rank::ranks]


def batches_in_turn(shards: Sequence[Integers], size: int, *, drop_last: bool = False) -> list[Integers]:
    """The batches of a stream as a DataLoader makes them: one of each worker in turn.

    Args:
        shards: the samples of every worker, int64 `[samples]`.
        size: samples per batch.
        drop_last: whether all batches are to have that size.

    Example:
        >>> [batch.tolist() for batch in batches_in_turn([np.array([0, 1, 2]), np.array([7])], 2)]
        [[0, 1], [7], [2]]
    """
    cut = [[mine[first : first + size] for first in range(0, len(mine), size)] for mine in shards]
    turns = (batch for turn in zip_longest(*cut) for batch in turn if batch is not None)
    return [batch for batch in turns if not drop_last or len(batch) == size]


def batches_of(order: Integers, rank: int, ranks: int, size: int, *, drop_last: bool = False) -> Sequence[Integers]:
    """The batches of a rank: as many on each, and every sample on one of them.

    Where a rank would have a batch less than others, its last one is divided. Only with fewer samples than ranks have
    batches do some come twice. With `drop_last` what is left over after the last whole batch of all ranks is left out.

    Args:
        order: the samples of all, int64 `[samples]`.
        rank: which of the ranks.
        ranks: how many there are.
        size: samples per batch.
        drop_last: whether all batches are to have that size.

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

"""A sampler of what is resident in a rolling cache when an epoch begins.

The number of samples differs from epoch to epoch, and from node to node. All ranks run the same number of batches: each
node divides its resident samples evenly among its ranks, and the smallest share of any rank is the share of all. Which
samples a rank gets follows from the seed, the epoch and the node alone, so nothing is sent but one number per rank.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Protocol, cast

import numpy as np
from torch.utils.data import Dataset, DistributedSampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.sampling.stream_deal import permutation

__all__ = ["RollingSampler"]

_LOOK_SECONDS = 1.0
_GROUP = 16  # indices that are handed on at a time: between two of them there is a look


class Pool(Protocol):
    """What the sampler has to know of a rolling cache."""

    @property
    def group(self) -> NodeGroup:
        """The ranks that share it."""

    def begin_epoch(self) -> Integers:
        """The indices that are resident now, int64, the same on all ranks of the node. Collective."""

    def resident(self) -> Integers:
        """The same, without a new epoch."""

    def look_after(self) -> None:
        """Look whether those who fill it are well."""


class RollingSampler(DistributedSampler[int]):
    """Each epoch draws what is resident when it begins, shuffled, and deals it to the ranks of the node.

    Made by `RollingCache.sampler`. It is a DistributedSampler only in that Lightning leaves it in its place.

    Args:
        pool: the rolling cache.
        shuffle: another order in every epoch, or by age.
        seed: of the order.
        epoch_samples: samples per epoch and rank, whatever is resident: fewer than that are drawn again and again,
            each round in another order. None: each resident sample once.
    """

    def __init__(self, pool: Pool, *, shuffle: bool = True, seed: int = 0, epoch_samples: int | None = None) -> None:
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

"""A DistributedSampler that sends every sample to a node that has it cached.

The order of an epoch, its padding and its dropped tail are DistributedSampler's for the same seed, `shuffle` and
`drop_last`. DistributedSampler gives rank r the positions r, r + R, ... of that order, so the R ranks train together on
`batch_size * R` consecutive positions at a time: the global batch. This sampler cuts the same global batches and
changes only which rank takes which sample of one (`assignment.Dealer`). The mean gradient of a global batch is the same
up to the order of summation. Values that a rank computes from its own part alone differ, such as the statistics of an
unsynchronised BatchNorm. Nothing is sent: every rank computes the deal from the seed, the epoch and the ring.

The indices of a user's sampler (one fold, by weight) are dealt, too. The order of an epoch is then that of Lightning's
and Fabric's wrapper: it lists all indices of the sampler when the epoch begins, and DistributedSampler shuffles the
list. Every rank draws the list for itself, so the ranks' generators must be in step (`seed_everything`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import replace
from itertools import chain
from typing import Any, Literal, cast, get_args

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from lightning_stocache.cache.placement import Integers, Ring
from lightning_stocache.sampling.assignment import Dealer

__all__ = ["LocalitySampler", "Mode"]

Mode = Literal["locality", "global", "sticky"]


class LocalitySampler(DistributedSampler[int]):
    """Deals the global batches of DistributedSampler so that samples go to nodes that have them.

    Modes:
        `locality`: each global batch holds the same indices as DistributedSampler's, dealt by the ring. On one node,
        or without a ring, each rank's order is DistributedSampler's.
        `global`: DistributedSampler itself. For comparison, or where every node has memory for the whole dataset.
        `sticky`: each node trains on a fixed part of the dataset, its own part of the ring, in the order of the epoch.
        No sample ever moves to another node: the global batches are *not* DistributedSampler's, samples of different
        nodes never change places, and each node's part pads and drops by itself. For batches too small for `locality`.

    Args:
        dataset: the dataset, of which only the length is used.
        num_replicas: number of ranks; by default that of the process group.
        rank: this process's rank; by default that in the process group.
        shuffle: whether each epoch (`set_epoch`) has another order; else the dataset's own order.
        seed: seed of the order; the same on all ranks.
        drop_last: drop the tail that does not divide by the ranks, instead of padding it from the beginning.
        batch_size: that of each rank's loader; with another one, the global batches are not those that are trained on.
        ring: tells which node has which indices; None: DistributedSampler's order.
        nodes: the ranks of each node, in the order of the ring's arcs (`NodeGroup.nodes`).
        mode: see above.
        draws: a sampler or a list, whose indices are dealt, each as often as it comes; by default each index of the
            dataset once.

    Attributes:
        skip: samples of this rank that the next iteration leaves out at its beginning, to resume in the middle of an
            epoch. It holds for one iteration, and the length stays that of the whole epoch.
        imbalance: the difference between the most and the fewest misses of a rank in one global batch, the largest of
            the latest iteration; counted by the ring, as if all caches were full.

    Raises:
        TypeError: `draws` has no length.
        ValueError: `batch_size` is below 1, there is no such `mode`, `nodes` does not have each rank once, or `ring`
            does not fit the nodes and the dataset.

    Example:
        >>> from lightning_stocache.cache.placement import Arc
        >>> ring = Ring((Arc(size=8, slots=4, start=0), Arc(size=8, slots=4, start=4)))  # node 0 has the first half
        >>> [list(LocalitySampler(range(8), 2, rank, batch_size=2, ring=ring, nodes=((0,), (1,)))) for rank in range(2)]
        [[0, 3, 2, 1], [4, 7, 5, 6]]
        >>> [list(DistributedSampler(range(8), 2, rank)) for rank in range(2)]
        [[4, 7, 2, 1], [0, 3, 5, 6]]
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        batch_size: int,
        ring: Ring | None,
        nodes: tuple[tuple[int, ...], ...],
        mode: Mode = "locality",
        draws: Iterable[int] | None = None,
    ) -> None:
        dealt = cast("Dataset[Any]", dataset if draws is None else draws)
        super().__init__(dealt, num_replicas, rank, shuffle, seed, drop_last)
        size = len(dataset)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if mode not in get_args(Mode):
            raise ValueError(f"mode must be one of {', '.join(get_args(Mode))}, got {mode!r}")
        if sorted(rank for ranks in nodes for rank in ranks) != list(range(self.num_replicas)):
            raise ValueError(f"nodes must name each of the {self.num_replicas} ranks once, got {nodes}")
        if ring is not None and (len(ring.arcs) != len(nodes) or any(arc.length != size for arc in ring.arcs)):
            raise ValueError(f"ring must have one arc of size {size} for each of the {len(nodes)} nodes, got {ring}")
        self.batch_size = batch_size
        self.ring = ring
        self.nodes = nodes
        self.mode = mode
        self.draws = draws
        self.skip = 0
        self.imbalance = 0
        self._dealer = None
        if mode == "locality" and ring is not None and len(nodes) > 1 and size > 0:
            self._dealer = Dealer(ring, nodes)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(np.ndarray.tolist, self.batches()))

    def batches(self) -> Iterator[Integers]:
        """This rank's part of each global batch: `batch_size` indices, int64, but in the last one."""
        # As in DistributedSampler, the order is drawn here, not with the first index: set_epoch may come in between.
        skip, self.skip = self.skip, 0
        self.imbalance = 0
        order = self._order()
        ranks: Sequence[int] = range(self.num_replicas)
        if self.mode == "sticky" and self.ring is not None and order.dtype != object:
            node, ranks = next((node, ranks) for node, ranks in enumerate(self.nodes) if self.rank in ranks)
            order = self._shard(order, node)
        return self._draw(order, ranks, skip)

    def _order(self) -> Integers:
        """DistributedSampler's order of the epoch, before padding."""
        drawn = None if self.draws is None else _as_array(self.draws)
        size = len(cast(Sized, self.dataset))
        order = np.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).numpy()
        return order if drawn is None else drawn[order]

    def _draw(self, order: Integers, ranks: Sequence[int], skip: int) -> Iterator[Integers]:
        """This rank's part of an order that some ranks train on together, but for its first `skip` samples."""
        total, step = self.num_samples * len(ranks), self.batch_size * len(ranks)
        for begin in range(skip * len(ranks), total, step):
            end = min(begin + step, total)
            # Positions beyond the order are DistributedSampler's padding: the order over again.
            if self._dealer is None or order.dtype == object:  # keys that only the source understands
                positions = np.arange(begin + ranks.index(self.rank), end, len(ranks))
            else:
                deal = self._dealer.deal(order[np.arange(begin, end) % len(order)])
                self.imbalance = max(self.imbalance, deal.imbalance)
                positions = begin + self._dealer.share(deal, self.rank, turn=begin // step)
            yield order[positions % len(order)]

    def _shard(self, order: Integers, node: int) -> Integers:
        """The indices on the node's own part of the ring, in the order of the epoch."""
        assert self.ring is not None
        arcs = self.ring.arcs
        around = sorted(range(len(arcs)), key=lambda other: (arcs[other].start, other))
        before = sum(len(self.nodes[other]) for other in around[: around.index(node)])
        # Whole numbers, rounded down: every index lies in one part, and no part has more than its ranks will take.
        begin, end = (len(order) * ranks // self.num_replicas for ranks in (before, before + len(self.nodes[node])))
        if begin == end:
            return order  # fewer indices than ranks
        slots = replace(arcs[around[0]], slots=arcs[0].size).slots_of(order)
        return order[np.sort(np.argsort(slots, kind="stable")[begin:end])]


def _as_array(draws: Iterable[int]) -> Integers:
    """All indices of a sampler, int64. If it gives other keys, an array of objects."""
    given = list(draws)
    try:
        indices = np.asarray(given)
    except (TypeError, ValueError):  # lists of unlike lengths, tensors on a device
        indices = np.empty(0)
    if indices.ndim == 1 and indices.dtype.kind in "iu":
        return indices.astype(np.int64, copy=False)
    return np.fromiter(given, dtype=object, count=len(given))

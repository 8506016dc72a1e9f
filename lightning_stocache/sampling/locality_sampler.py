"""A DistributedSampler that sends every sample to a node that has it cached.

The order of an epoch, its padding and its dropped tail are DistributedSampler's for the same seed, `shuffle` and
`drop_last`. DistributedSampler gives rank r the positions r, r + R, ... of that order, so the R ranks train together on
`batch_size * R` consecutive positions at a time: the global batch. This sampler cuts the same global batches and
changes only which rank takes which sample of one (`assignment.Dealer`). The mean gradient of a global batch is the same
up to the order of summation. Values that a rank computes from its own part alone differ, such as the statistics of an
unsynchronised BatchNorm. Nothing is sent: every rank computes the deal from the seed, the epoch and the ring. In
a large job that takes milliseconds, so a thread deals the next global batch while the rank trains on the one before.

The indices of a user's sampler (one fold, by weight) are dealt, too. The order of an epoch is then that of Lightning's
and Fabric's wrapper: it lists all indices of the sampler when the epoch begins, and DistributedSampler shuffles the
list. Every rank draws the list for itself, so the ranks' generators must be in step (`seed_everything`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sized
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler

from lightning_stocache.cache.placement import Integers, Ring
from lightning_stocache.node.processes import THREAD_PREFIX
from lightning_stocache.sampling.assignment import Dealer

__all__ = ["LocalitySampler"]

_T = TypeVar("_T")

_THREAD_INDICES = 4096  # of a global batch; fewer are dealt in 0.2 ms, about as fast as a thread wakes


class LocalitySampler(DistributedSampler[int]):
    """Deals the global batches of DistributedSampler so that samples go to nodes that have them.

    Each global batch holds the same indices as DistributedSampler's, dealt by the ring. On one node, or without a ring,
    each rank's order is DistributedSampler's.

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
        draws: a sampler or a list, whose indices are dealt, each as often as it comes; by default each index of the
            dataset once.

    Attributes:
        skip: samples of this rank that the next iteration leaves out at its beginning, to resume in the middle of an
            epoch. It holds for one iteration, and the length stays that of the whole epoch.

    Raises:
        TypeError: `draws` has no length.
        ValueError: `batch_size` is below 1, `nodes` does not have each rank once, or `ring` does not fit the nodes and
            the dataset.

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
        draws: Iterable[int] | None = None,
    ) -> None:
        dealt = cast("Dataset[Any]", dataset if draws is None else draws)
        super().__init__(dealt, num_replicas, rank, shuffle, seed, drop_last)
        size = len(dataset)
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if sorted(rank for ranks in nodes for rank in ranks) != list(range(self.num_replicas)):
            raise ValueError(f"nodes must name each of the {self.num_replicas} ranks once, got {nodes}")
        if ring is not None and (len(ring.arcs) != len(nodes) or any(arc.length != size for arc in ring.arcs)):
            raise ValueError(f"ring must have one arc of size {size} for each of the {len(nodes)} nodes, got {ring}")
        self.batch_size = batch_size
        self.ring = ring
        self.nodes = nodes
        self.draws = draws
        self.skip = 0
        self._dealer = None
        if ring is not None and len(nodes) > 1 and size > 0:
            self._dealer = Dealer(ring, nodes)

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(map(np.ndarray.tolist, self.batches()))

    def batches(self) -> Iterator[Integers]:
        """This rank's part of each global batch: `batch_size` indices, int64, but in the last one."""
        # As in DistributedSampler, the order is drawn here, not with the first index: set_epoch may come in between.
        skip, self.skip = self.skip, 0
        order = self._order()
        step = self.batch_size * self.num_replicas
        begins = range(skip * self.num_replicas, self.total_size, step)
        parts = (partial(self._part, order, begin) for begin in begins)
        return _one_ahead(parts) if step >= _THREAD_INDICES else (part() for part in parts)

    def _order(self) -> Integers:
        """DistributedSampler's order of the epoch, before padding."""
        drawn = None if self.draws is None else _as_array(self.draws)
        size = len(cast(Sized, self.dataset))
        order = np.arange(size)
        if self.shuffle:
            order = torch.randperm(size, generator=torch.Generator().manual_seed(self.seed + self.epoch)).numpy()
        return order if drawn is None else drawn[order]

    def _part(self, order: Integers, begin: int) -> Integers:
        """This rank's part of the global batch that begins at a position. A thread may call it."""
        step = self.batch_size * self.num_replicas
        # Positions beyond the order are DistributedSampler's padding: the order over again.
        batch = order[np.arange(begin, min(begin + step, self.total_size)) % len(order)]
        if self._dealer is None or order.dtype == object:  # keys that only the source understands
            return batch[self.rank :: self.num_replicas]
        return batch[self._dealer.share(self._dealer.deal(batch), self.rank, turn=begin // step)]


def _one_ahead(calls: Iterator[Callable[[], _T]]) -> Iterator[_T]:
    """The results of calls: the first is made by the consumer, each other by a thread while the consumer has the last.

    The thread ends when the iterator is exhausted or dropped, and with it the executor; a call under way is finished.
    """
    process = os.getpid()
    thread = ThreadPoolExecutor(1, f"{THREAD_PREFIX}deal")
    coming: Future[_T] | None = None
    call = next(calls, None)
    while call is not None:
        has_thread = os.getpid() == process  # a fork does not have it
        result = coming.result() if coming and has_thread else call()
        call = next(calls, None)
        coming = thread.submit(call) if call and has_thread else None
        yield result


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

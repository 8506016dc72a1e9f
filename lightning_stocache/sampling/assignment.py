"""Which rank trains on which sample of a global batch, so that a sample goes where it is cached.

A `Dealer` knows the `Ring` and the ranks of every node. A deal is a pure function of one global batch: every rank
computes all of it and takes its share, and no message is sent.

1. An index goes to its first home: of the nodes that have a slot for it, the one with the smallest slot number. That is
   the node in whose own part of the ring the index lies, if the node's arc reaches that far. A node's own part begins
   where its arc begins, and is as long as the node's share of training.
2. A node has as many places as DistributedSampler gives its ranks. While one node has more indices than places and
   another has free places, indices move to another home, over several nodes if need be (augmenting paths, as in a
   maximum flow; of the nodes in reach, the one with the most free places per rank comes first). No deal could give more
   indices to nodes that have them. A stretch of the ring that nodes share is cut by ring position, so that the same
   indices go to the same node in every epoch, but for those next to the cut.
3. A node that still has too many indices gives some away: first those beyond its own part of the ring, the farthest
   first, then the last in the order of the batch. These, and the indices that no node has, are the misses of the batch;
   they take the free places. Any other deal of misses would take places from indices that are hits there.
4. A node's misses, then its other indices, go to its ranks in turn, beginning with another rank in each batch. So the
   misses of its ranks differ by one at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from lightning_stocache.cache.placement import NO_SLOT, Arc, Integers, Ring

__all__ = ["Deal", "Dealer"]


@dataclass(frozen=True)
class Deal:
    """The node of each sample of one global batch.

    Args:
        nodes: number of the node, for each position of the batch.
        misses: whether that node has no slot for the sample, for each position.
    """

    nodes: Integers
    misses: NDArray[np.bool_]


class Dealer:
    """Deals global batches to the nodes and ranks of a job.

    Args:
        ring: the arcs of the nodes, all of the same size and step.
        nodes: the global ranks of each node, in the order of the arcs (`NodeGroup.nodes`).

    Example:
        >>> ring = Ring((Arc(size=8, slots=4, start=0), Arc(size=8, slots=4, start=4)))  # node 0 has the first half
        >>> dealer = Dealer(ring, nodes=((0, 1), (2, 3)))
        >>> deal = dealer.deal(np.array([5, 0, 1, 2]))
        >>> deal.nodes.tolist(), deal.misses.tolist()
        ([1, 0, 0, 1], [False, False, False, True])
        >>> [dealer.share(deal, rank).tolist() for rank in range(4)]
        [[1], [2], [3], [0]]
    """

    def __init__(self, ring: Ring, nodes: Sequence[Sequence[int]]) -> None:
        arcs = ring.arcs
        self._nodes = nodes
        self._ranks = np.array([len(ranks) for ranks in nodes])
        self._size = size = arcs[0].size
        # Slot numbers of this arc are positions on the ring. Indices outside of the domain lie behind all positions.
        self._circle = Arc(size, size, step=arcs[0].step, domain=arcs[0].domain)
        # The ring is cut where an arc begins or ends; all indices of a stretch between two cuts have the same homes.
        cuts = sorted({0, *(end % size for arc in arcs for end in (arc.start, arc.start + arc.slots))})
        self._edges = np.array([*cuts, size, size + 1])  # the last stretch has the indices outside of the domain
        nowhere = len(arcs)  # stands for the node of indices that no node has
        first: list[int] = []  # home of each stretch
        pairs: list[tuple[int, int]] = []  # stretches and their homes, along the ring: first the arc that began first
        stretches: list[list[tuple[int, int]]] = [[] for _ in arcs]  # of each node, with the slot in which each begins
        self._homes: list[int] = []  # of each stretch, as a bit mask
        for stretch, cut in enumerate(cuts):
            slots = [(cut - arc.start) % size for arc in arcs]
            homes = [node for node, arc in enumerate(arcs) if slots[node] < arc.slots]
            first.append(min(homes, key=slots.__getitem__, default=nowhere))
            pairs += [(stretch, node) for node in sorted(homes, key=slots.__getitem__, reverse=True) or [nowhere]]
            self._homes.append(sum(1 << node for node in homes))
            for node in homes:
                stretches[node].append((slots[node], stretch))
        self._first = np.array([*first, nowhere])
        self._overlap = len(pairs) > len(cuts)
        self._pair_stretch, self._pair_node = np.array([*pairs, (len(cuts), nowhere)]).T
        self._stretches = [[stretch for _, stretch in sorted(begins)] for begins in stretches]
        self._starts = np.array([*(arc.start for arc in arcs), 0])
        self._own = np.array([*(size * self._ranks // self._ranks.sum()), 0])  # of the ring, as long as its share

    def deal(self, batch: Integers) -> Deal:
        """Deal one global batch, which has the same number of indices for each rank."""
        places = self._ranks * (len(batch) // self._ranks.sum())
        positions = self._circle.slots_of(batch)
        positions[positions == NO_SLOT] = self._size
        ascending = np.lexsort(_digits(positions))
        counts = np.diff(np.searchsorted(positions[ascending], self._edges))
        held = self._level(counts, places)
        nodes = np.empty_like(positions)
        nodes[ascending] = np.repeat(self._pair_node, held[self._pair_stretch, self._pair_node])
        nowhere = len(places)
        misses = nodes == nowhere
        load = held.sum(0)
        if (load[:nowhere] > places).any():
            slots = (positions - self._starts[nodes]) % self._size
            beyond = np.maximum(slots, self._own[nodes])
            lines = np.lexsort((*_digits(beyond), *_digits(nodes)))  # stable: ties stay in the batch's order
            line_of = nodes[lines]
            place = np.arange(len(lines)) - (load.cumsum() - load)[line_of]
            misses[lines[place >= np.append(places, len(batch))[line_of]]] = True
        nodes[misses] = np.repeat(np.arange(nowhere), np.maximum(places - load[:nowhere], 0))
        return Deal(nodes, misses)

    def share(self, deal: Deal, rank: int, turn: int = 0) -> Integers:
        """The positions in a dealt batch that a global rank trains on, rising; `turn` is the number of the batch."""
        node = next(number for number, ranks in enumerate(self._nodes) if rank in ranks)
        ranks = self._nodes[node]
        dealt = np.flatnonzero(deal.nodes == node)
        late = deal.misses[dealt]
        line = np.concatenate((dealt[late], dealt[~late]))
        return np.sort(line[(ranks.index(rank) - turn) % len(ranks) :: len(ranks)])

    def _level(self, counts: Integers, places: Integers) -> Integers:
        """Number of indices of each stretch of the ring (row) that each node gets (column), before steps 3 and 4."""
        held = np.zeros((len(counts), len(places) + 1), dtype=np.int64)
        held[np.arange(len(counts)), self._first] = counts
        spare = held.sum(0)[:-1] - places
        if self._overlap and (spare > 0).any() and (spare < 0).any():
            for node, hand in enumerate(self._relieve(held, spare.tolist())):
                held[:, node] = 0
                held[list(hand), node] = list(hand.values())
        return held

    def _relieve(self, held: Integers, spare: list[int]) -> list[dict[int, int]]:
        """Move indices from nodes that have too many to nodes with free places, as long as a path joins two such nodes.

        Python's own numbers, with sets of nodes as bit masks, are several times as fast as NumPy with 32 nodes.
        """
        hands = [{int(stretch): int(column[stretch]) for stretch in np.flatnonzero(column)} for column in held.T[:-1]]
        while any(more > 0 for more in spare):
            giver = max(range(len(spare)), key=spare.__getitem__)
            path = self._path(hands, spare, giver)
            if path is None:
                spare[giver] = 0  # no later move opens a path: its surplus has to leave
                continue
            links = list(pairwise(path))
            joint = (sum(hands[fro].get(stretch, 0) for stretch in self._stretches[to]) for fro, to in links)
            amount = min(spare[giver], -spare[path[-1]], *joint)
            for fro, to in links:
                self._move(hands[fro], hands[to], self._stretches[to], amount)
            spare[giver] -= amount
            spare[path[-1]] += amount
        return hands

    def _path(self, hands: list[dict[int, int]], spare: list[int], giver: int) -> list[int] | None:
        """The shortest way from `giver` to a node with free places, over nodes that can take from the one before."""
        before = {giver: giver}
        seen = 1 << giver
        frontier = [giver]
        while frontier:
            reached = []
            for node in frontier:
                takers = 0  # the nodes that have a slot for an index of this node
                for stretch in hands[node]:
                    takers |= self._homes[stretch]
                new = takers & ~seen
                seen |= new
                while new:
                    taker = new.bit_length() - 1
                    new ^= 1 << taker
                    before[taker] = node
                    reached.append(taker)
            needy = [node for node in reached if spare[node] < 0]
            if needy:
                path = [min(needy, key=lambda node: (spare[node] / self._ranks[node], node))]
                while path[-1] != giver:
                    path.append(before[path[-1]])
                return path[::-1]
            frontier = reached
        return None

    @staticmethod
    def _move(fro: dict[int, int], to: dict[int, int], stretches: list[int], amount: int) -> None:
        """Move indices from one node to another, first those nearest to the beginning of the other node's arc."""
        for stretch in stretches:
            moved = min(fro.get(stretch, 0), amount)
            if moved:
                to[stretch] = to.get(stretch, 0) + moved
                fro[stretch] -= moved
                amount -= moved
                if not fro[stretch]:
                    del fro[stretch]


def _digits(values: Integers) -> Integers:
    """The digits of int64 numbers that are not negative, uint16 `[4, numbers]`, the lowest first.

    By such short keys `np.lexsort` sorts in linear time: 65,536 numbers in 0.7 ms, by the numbers themselves in 5 ms.
    """
    return values.astype("<i8", copy=False).view("<u2").reshape(-1, 4).T

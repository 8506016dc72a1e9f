"""What LocalitySampler should reach on several nodes: the rates that real processes are compared with."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from lightning_stocache.cache.placement import Ring
from lightning_stocache.sampling.assignment import Dealer

__all__ = ["moved_share", "rates_of"]


def rates_of(ring: Ring, nodes: Sequence[Sequence[int]], batch_size: int, epochs: int) -> list[float]:
    """The hit rate of each epoch. Epoch two loses the samples that are moved now and those that were moved in one."""
    moved, reach = moved_share(ring, nodes, batch_size), _reach(ring, nodes)
    return [max(reach - moved, 0.0) * (1 - (moved / reach) ** epoch) for epoch in range(epochs)]


def moved_share(ring: Ring, nodes: Sequence[Sequence[int]], batch_size: int, batches: int = 256) -> float:
    """The share of samples that levelling takes from nodes that have them, in random global batches.

    For K equal nodes that hold the dataset once between them and batches of M it is `sqrt((K - 1) / (2 pi M))`.
    """
    size, world = ring.arcs[0].size, sum(map(len, nodes))
    length = min(world * batch_size, size // world * world)
    dealer = Dealer(Ring(tuple(replace(arc, domain=None) for arc in ring.arcs)), nodes)  # indices are ranks here
    drawn = islice(_batches(size, length, torch.Generator().manual_seed(0)), batches)
    hits = sum(int((~dealer.deal(batch.numpy()).misses).sum()) for batch in drawn)
    return max(_reach(ring, nodes) - hits / (batches * length), 0.0)


def _batches(size: int, length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    while True:
        yield from torch.randperm(size, generator=generator)[: size // length * length].view(-1, length)


def _reach(ring: Ring, nodes: Sequence[Sequence[int]]) -> float:
    world = sum(map(len, nodes))
    return math.fsum(min(len(ranks) / world, arc.slots / arc.size) for ranks, arc in zip(nodes, ring.arcs, strict=True))

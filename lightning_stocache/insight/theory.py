"""The hit rate that theory predicts: per epoch, for each way of dealing samples to nodes.

Notation: node k trains on a share s_k of every global batch and has slots for a part a_k of the dataset. Epochs count
from 0, the one in which nothing is cached yet. A cache fills lazily and never evicts.

- `locality`: nodes hit `sum_k min(s_k, a_k)`, less the moved share m. A moved sample is one that only full nodes had:
  it was trained on elsewhere, because random batches do not come in exact proportions. Nor did its owner fill it, so
  before epoch e a part `(m / sum)^e` of what could be hit has always been away: epoch two (e = 1) pays m twice,
  later ones once.
- `sticky`: `sum_k min(s_k, a_k)` from epoch two on; nothing moves.
- `global`, DistributedSampler's deal: an index comes to node k with probability s_k, has a slot there with
  probability a_k, and has been there before with probability `1 - (1 - s_k)^e`.

A cache per rank is `global` with every rank a node of its own: `1 - (1 - 1/R)^e` if the dataset fits R times.

An epoch that draws only a part q of the samples, another one each time (`limit_train_batches`), has met an index with
probability q: what epochs have not met is the product of `1 - q`, where it is written as a power above.

On one node there is a theory for more samplers: `first_draws`.

Not in the formula: where arcs overlap, an index that moves to another home is missed there until that home has
filled it too. It concerns only the indices near the cuts; three nodes with half of the dataset each, 256 samples per
node, hit 0.96, 0.98, 0.99 where the formula says 1.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

import torch

from lightning_stocache.cache.placement import Ring
from lightning_stocache.sampling.assignment import Dealer
from lightning_stocache.sampling.locality_sampler import Mode

__all__ = ["expected_hit_rate", "moved_share"]


def expected_hit_rate(
    ring: Ring,
    shares: Sequence[float],
    epoch: int,
    moved: float = 0.0,
    mode: Mode = "locality",
    drawn: Sequence[float] | None = None,
) -> float:
    """The predicted hit rate of one epoch.

    Args:
        ring: the arcs of the nodes.
        shares: share of every global batch that each node trains on (`NodeGroup.shares`).
        epoch: number of epochs that have filled the caches before.
        moved: what `moved_share` says; it counts in `locality` only.
        mode: the sampler's.
        drawn: share of the dataset that each of the epochs before has drawn; by default all of it.

    Raises:
        ValueError: shares and arcs or drawn and epoch differ in number, epoch is negative, or moved is no share.

    Example:
        >>> ring = Ring.cut(size=1000, shares=(0.25,) * 4, slots=(250,) * 4)
        >>> [round(expected_hit_rate(ring, (0.25,) * 4, epoch, moved=0.02), 3) for epoch in range(3)]
        [0.0, 0.96, 0.98]
        >>> [round(expected_hit_rate(ring, (0.25,) * 4, epoch, mode="global"), 3) for epoch in range(3)]
        [0.0, 0.062, 0.109]
        >>> expected_hit_rate(Ring.cut(1000, (1,), (1000,)), (1,), epoch=2, drawn=(0.5, 0.5))
        0.75
    """
    if len(shares) != len(ring.arcs):
        raise ValueError(f"shares must have one number for each of the {len(ring.arcs)} arcs, got {shares!r}")
    if epoch < 0:
        raise ValueError(f"epoch must be 0 or more, got {epoch}")
    if not 0 <= moved <= 1:
        raise ValueError(f"moved must be between 0 and 1, got {moved}")
    drawn = (1.0,) * epoch if drawn is None else drawn
    if len(drawn) != epoch:
        raise ValueError(f"drawn must have one share for each of the {epoch} epochs before, got {drawn!r}")
    if mode == "global":
        pairs = zip(shares, _parts(ring), strict=True)
        return math.fsum(share * part * _met(share, drawn) for share, part in pairs)
    reach = _reach(ring, shares)
    if mode == "sticky" or len(shares) == 1 or reach == 0:
        return reach * _met(1.0, drawn)
    return max(reach - moved, 0.0) * _met(1 - min(moved / reach, 1.0), drawn)


def moved_share(
    ring: Ring, nodes: Sequence[Sequence[int]], batch_size: int, batches: int = 256, seed: int = 0
) -> float:
    """The share of samples that levelling takes from nodes that have them, by dealing random global batches.

    For arcs that do not overlap it is `sum_k E[max(n_k - q_k, 0)] / M`, with n_k the indices of a batch of M that node
    k has, and q_k its places: for K equal nodes that hold the dataset once between them, `sqrt((K - 1) / (2 pi M))`.

    Args:
        ring: the arcs of the nodes.
        nodes: the ranks of each node (`NodeGroup.nodes`).
        batch_size: of one rank.
        batches: number of global batches; 256 give the share to about one part in twenty.
        seed: of the batches.

    Example:
        >>> ring = Ring.cut(size=100_000, shares=(0.5, 0.5), slots=(50_000, 50_000))
        >>> 0.015 < moved_share(ring, nodes=((0,), (1,)), batch_size=256) < 0.02
        True
    """
    size = ring.arcs[0].size
    world = sum(len(ranks) for ranks in nodes)
    length = min(world * batch_size, size // world * world)
    if length == 0 or len(nodes) == 1:
        return 0.0
    dealer = Dealer(Ring(tuple(replace(arc, domain=None) for arc in ring.arcs)), nodes)  # indices are ranks here
    drawn = islice(_batches(size, length, torch.Generator().manual_seed(seed)), batches)
    hits = sum(int((~dealer.deal(batch.numpy()).misses).sum()) for batch in drawn)
    reach = _reach(ring, [len(ranks) / world for ranks in nodes])
    return max(reach - hits / (batches * length), 0.0)


def _batches(size: int, length: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Random global batches without end."""
    while size > 64 * length:  # hardly an index comes twice, and no permutation of a large dataset is drawn
        yield torch.randint(size, (length,), generator=generator)
    while True:  # batches that are a large part of a dataset are closer to its proportions: drawn as epochs draw them
        yield from torch.randperm(size, generator=generator)[: size // length * length].view(-1, length)


def _met(chance: float, drawn: Sequence[float]) -> float:
    """How likely an index has been met, if an epoch that draws it meets it with this chance."""
    return 1 - math.prod(1 - chance * share for share in drawn)


def _parts(ring: Ring) -> list[float]:
    return [arc.slots / max(arc.size, 1) for arc in ring.arcs]


def _reach(ring: Ring, shares: Sequence[float]) -> float:
    """What the nodes could hit if every batch came in the same proportions."""
    return math.fsum(min(share, part) for share, part in zip(shares, _parts(ring), strict=True))

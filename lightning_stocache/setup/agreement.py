"""The facts on which the ranks of a job must agree before they open caches.

One cache serves the ranks of a node, by index. If ranks hold different data under one index (each has a share of the
files, or draws its own random split), a rank would get samples of another rank. The drawn indices may differ between
ranks: each index that any rank draws gets a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

from lightning_stocache.cache.placement import Domain
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.identity import data_digest

__all__ = ["check_lengths", "drawn_by_any", "ranks_apart", "united"]


def check_lengths(requests: Sequence[CacheRequest], group: NodeGroup) -> None:
    """Refuse sources of different lengths. Collective.

    Raises:
        ValueError: the ranks have sources of different lengths.
    """
    lengths = group.exchange([request.length for request in requests])
    for rank, others in enumerate(lengths):
        if others != lengths[0]:
            raise ValueError(
                f"all ranks must open the same sources; those of rank 0 have {lengths[0]} samples, those of rank "
                f"{rank} {others}. Give every rank the whole dataset and let a DistributedSampler divide it"
            )


def drawn_by_any(domains: Sequence[Domain | None], group: NodeGroup) -> list[Domain | None]:
    """The indices of each dataset that any rank draws, given the indices of this rank; None: all. Collective."""
    digests = [None if domain is None else domain.digest for domain in domains]
    known = group.exchange(digests)
    if all(others == digests for others in known) or any(len(others) != len(digests) for others in known):
        return list(domains)  # `check_lengths` refuses other numbers of datasets
    return [united(parts) for parts in zip(*group.exchange(domains), strict=True)]


def united(domains: Sequence[Domain | None]) -> Domain | None:
    """The indices that any of several samplers draws; None: all."""
    known = [domain for domain in domains if domain is not None]
    return reduce(Domain.__or__, known) if len(known) == len(domains) else None


def ranks_apart(requests: Sequence[CacheRequest], group: NodeGroup) -> list[bool]:
    """Whether the ranks hold different data, for each request. Collective."""
    if group.world == 1:
        return [False] * len(requests)
    digests = group.exchange(["" if request.as_stream else data_digest(request.source) for request in requests])
    return [len(set(of_ranks)) > 1 for of_ranks in zip(*digests, strict=True)]

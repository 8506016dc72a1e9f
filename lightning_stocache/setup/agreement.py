"""Whether all ranks have the same data.

One cache serves the ranks of a node, by index. Ranks that hold other data under the same index (a share of the files
each, a random split that each has drawn for itself) would get each other's samples. What a source holds is told by its
`data_digest`.

Which of the indices are drawn may differ: a rank may have a sampler of its own. What any rank draws gets a slot.
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
    """Refuse sources of other lengths. Collective.

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
    """What any rank draws of each dataset, where each has a sampler of its own. Collective.

    Args:
        domains: what this rank draws; None for all of it, or where that is not known.
        group: the ranks.
    """
    digests = [None if domain is None else domain.digest for domain in domains]
    told = group.exchange(digests)
    if all(others == digests for others in told) or any(len(others) != len(digests) for others in told):
        return list(domains)  # of other numbers of datasets `check_lengths` tells
    return [united(parts) for parts in zip(*group.exchange(domains), strict=True)]


def united(domains: Sequence[Domain | None]) -> Domain | None:
    """What is drawn by any of several samplers."""
    known = [domain for domain in domains if domain is not None]
    return reduce(Domain.__or__, known) if len(known) == len(domains) else None


def ranks_apart(requests: Sequence[CacheRequest], group: NodeGroup) -> list[bool]:
    """Whether the ranks hold different data, for each request. Collective."""
    if group.world == 1:
        return [False] * len(requests)
    digests = group.exchange([data_digest(request.source) for request in requests])
    return [len({digest[number] for digest in digests}) > 1 for number in range(len(requests))]

"""What the ranks of a job agree on: that all have the same data, which indices are drawn, and the names on a disk.

One cache serves the ranks of a node, by index. Ranks that hold other data under the same index (a share of the files
each, a random split that each has drawn for itself) would get each other's samples. What a source holds is told by its
`data_digest`.

Which of the indices are drawn may differ: a rank may have a sampler of its own. What any rank draws gets a slot.

A directory on a disk belongs to one machine, and its cache to one node. Where several nodes of a job see the same
directory (containers that share a volume), the second one's cache has another name there, and so on.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

from lightning_stocache.cache.checksums import checksum
from lightning_stocache.cache.placement import Domain
from lightning_stocache.node.disk import check_directory
from lightning_stocache.node.group import NodeGroup, memory_key
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.source.identity import data_digest

__all__ = ["check_lengths", "drawn_by_any", "ranks_apart", "united", "with_directories"]


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
    return [len(set(told)) > 1 for told in zip(*digests, strict=True)]


def with_directories(requests: Sequence[CacheRequest], group: NodeGroup) -> list[CacheRequest]:
    """The requests with directories that can hold a cache, and names that no other node has there. Collective.

    Raises:
        DiskError: a directory cannot hold one, on this node; a RuntimeError on the others.
        ImportError: xxhash is not installed.
    """
    if all(request.dir is None for request in requests):
        return list(requests)

    def check(request: CacheRequest) -> tuple[CacheRequest, tuple[str, int, int] | None]:
        """The request, and what two nodes have in common that see the same directory."""
        if request.dir is None:
            return request, None
        checksum()
        directory = check_directory(request.dir)
        facts = os.stat(directory)
        return replace(request, dir=directory), (memory_key()[0], facts.st_dev, facts.st_ino)

    checked, keys = zip(*group.together(lambda: list(map(check, requests))), strict=True)
    told = group.exchange(keys)
    nodes = [told[ranks[0]] for ranks in group.nodes[: group.node]]
    numbers = [[node[at] for node in nodes].count(key) for at, key in enumerate(keys)]
    return [
        replace(request, name=f"{request.name}-node{number}") if number and request.name is not None else request
        for request, number in zip(checked, numbers, strict=True)
    ]

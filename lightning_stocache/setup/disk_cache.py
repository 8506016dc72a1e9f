"""What is different about caches on a disk before they open: where they lie, and what they get.

A directory belongs to one machine, and its cache to one node. Where several nodes of a job see the same directory
(containers that share a volume), the second one's cache has another name there, and so on. The budget is of the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from lightning_stocache.cache.checksums import checksum
from lightning_stocache.cache.records import SampleCodec
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.disk import check_directory
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.group import NodeGroup, memory_key
from lightning_stocache.setup.allocation import Allocation, divide_disk
from lightning_stocache.setup.request import CacheRequest

__all__ = ["allocate_on_disk", "free_on", "with_directories"]


def with_directories(requests: Sequence[CacheRequest], group: NodeGroup) -> list[CacheRequest]:
    """The requests with directories that can hold a cache, and names that no other node has there. Collective.

    Raises:
        DiskError: a directory cannot hold one, on this node; a RuntimeError on the others.
        ImportError: xxhash is not installed.
    """
    if all(request.dir is None for request in requests):
        return list(requests)
    checked = group.together(lambda: [_checked(request) for request in requests])
    keys = group.exchange([_key(request) for request in checked])
    same = [
        [keys[ranks[0]][number] for ranks in group.nodes[: group.node]].count(_key(request))
        for number, request in enumerate(checked)
    ]
    return [
        replace(request, name=f"{request.name}-node{before}") if before and request.name is not None else request
        for request, before in zip(checked, same, strict=True)
    ]


def allocate_on_disk(
    requests: Sequence[CacheRequest], codecs: Sequence[SampleCodec | None], budgets: Mapping[str, Budget]
) -> Allocation:
    """Divide the room of this node's disk among the requests, all for the same directory."""
    directory = next(request.dir for request in requests)
    assert directory is not None
    return divide_disk(requests, codecs, budgets, free_on(directory))


def free_on(directory: str, held: int = 0) -> FreeMemory:
    """What is free on a disk, with so many bytes that caches hold and a new one would find."""
    stats = os.statvfs(directory)
    return FreeMemory(stats.f_frsize * stats.f_bavail + held, None, None, directory)


def _checked(request: CacheRequest) -> CacheRequest:
    if request.dir is None:
        return request
    checksum()
    return replace(request, dir=check_directory(request.dir))


def _key(request: CacheRequest) -> tuple[str, int, int] | None:
    """What two nodes have in common that see the same directory."""
    if request.dir is None:
        return None
    machine, *_ = memory_key()
    facts = os.stat(request.dir)
    return machine, facts.st_dev, facts.st_ino

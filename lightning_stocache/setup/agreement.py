"""Whether all ranks have the same data.

One cache serves the ranks of a node, by index. Ranks that hold other data under the same index (a share of the files
each, a random split that each has drawn for itself) would get each other's samples. What a source holds is told by its
class, its length, and a digest of the lists, arrays and tensors in its attributes, through the datasets inside it:
their sizes and their ends, for they may be large.

Which of the indices are drawn may differ: a rank may have a sampler of its own. What any rank draws gets a slot.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from lightning_stocache.cache.placement import Domain
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.setup.request import CacheRequest

__all__ = ["check_lengths", "data_digest", "drawn_by_any", "ranks_apart", "united"]

_ENDS = 8  # items at either end of a container
_DEEP = 4  # datasets inside each other


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


def data_digest(source: Any) -> str:
    """A digest of what a source holds, as far as its attributes show it.

    Example:
        >>> from torch.utils.data import Subset
        >>> halves = [Subset(range(10), range(rank, 10, 2)) for rank in (0, 1)]
        >>> data_digest(halves[0]) == data_digest(halves[1]), data_digest(range(10)) == data_digest(range(10))
        (False, True)
    """
    digest = hashlib.sha256()
    for part in _parts(source, _DEEP):
        digest.update(part.encode(errors="replace") + b"\0")
    return digest.hexdigest()


def _parts(node: Any, deep: int) -> list[str]:
    kind = type(node)
    parts = [f"{kind.__module__}.{kind.__qualname__}"]
    if isinstance(node, torch.Tensor | np.ndarray):
        first = (slice(_ENDS), *[slice(2)] * (node.ndim - 1))[: node.ndim]  # to flatten it might copy all of it
        last = (slice(-_ENDS, None), *[slice(-2, None)] * (node.ndim - 1))[: node.ndim]
        ends = [] if node.dtype == object else [node[first].tolist(), node[last].tolist()]
        return [*parts, f"{tuple(node.shape)} {ends}"]
    if isinstance(node, list | tuple | range):
        parts.append(str(len(node)))
        for item in (*node[:_ENDS], *node[-_ENDS:]):
            parts += [repr(item)] if isinstance(item, str | bytes | int | float) else _parts_of_item(item, deep)
    elif deep and isinstance(getattr(node, "__dict__", None), dict):
        for name, value in sorted(vars(node).items()):
            if isinstance(value, torch.Tensor | np.ndarray | list | tuple | range | Dataset):
                parts += [name, *_parts_of_item(value, deep)]
    return parts


def _parts_of_item(item: Any, deep: int) -> list[str]:
    try:
        return _parts(item, deep - 1) if deep else []
    except Exception:  # an object of the user's that only looks like one of these
        return []

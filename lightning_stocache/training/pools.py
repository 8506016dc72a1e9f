"""Rolling caches in a Trainer call: one for all ranks of a node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_stocache.loading.rolling_cache import RollingCache
from lightning_stocache.node.group import NodeGroup

__all__ = ["share_pools"]


def share_pools(datasets: Iterable[Any], group: NodeGroup | None = None) -> None:
    """Have the rolling caches among some datasets shared by the ranks, unless they are. Collective."""
    for dataset in datasets:
        if isinstance(dataset, RollingCache):
            group = NodeGroup.discover() if group is None else group
            if not dataset.is_open or dataset.group != group:
                dataset.share(group)

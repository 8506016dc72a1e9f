"""Rolling caches in a Trainer call: one for all ranks of a node, and what is logged of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from lightning_stocache.loading.rolling_cache import RollingCache
from lightning_stocache.loading.rolling_pool import RollingStats
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.training.loaders import loaders_in

__all__ = ["PoolRates", "share_pools"]


def share_pools(datasets: Iterable[Any], group: NodeGroup | None = None) -> None:
    """Have the rolling caches among some datasets shared by the ranks, unless they are. Collective."""
    for dataset in datasets:
        if isinstance(dataset, RollingCache):
            group = NodeGroup.discover() if group is None else group
            if not dataset.is_open or dataset.group != group:
                dataset.share(group)


class PoolRates:
    """The numbers of the rolling cache that a Trainer trains on, from one epoch's end to the next."""

    def __init__(self) -> None:
        self._before: tuple[RollingStats, float] | None = None

    def start(self, trainer: Any) -> None:
        """From here on rates are counted."""
        if (pool := _pool_of(trainer)) is not None:
            self._before = pool.stats(), time.monotonic()

    def metrics(self, trainer: Any) -> dict[str, float]:
        """What is resident, and rates since the last call; nothing where no rolling cache is trained on."""
        if (pool := _pool_of(trainer)) is None:
            return {}
        now, at = pool.stats(), time.monotonic()
        metrics: dict[str, float] = {
            "rolling/resident": now.resident,
            "rolling/oldest_seconds": now.oldest_seconds,
            "rolling/times_seen": now.times_seen,
        }
        if self._before is not None:
            before, seconds = self._before[0], max(at - self._before[1], 1e-9)
            metrics |= {
                "rolling/appended_per_second": (now.appended - before.appended) / seconds,
                "rolling/evicted_per_second": (now.evicted - before.evicted) / seconds,
                "rolling/renewed": now.renewed - before.renewed,
            }
        self._before = now, at
        return metrics


def _pool_of(trainer: Any) -> RollingCache | None:
    """The rolling cache that training reads; None if there is none, or more than one."""
    pools = [
        loader.dataset for loader in loaders_in(trainer.train_dataloader) if isinstance(loader.dataset, RollingCache)
    ]
    return pools[0] if len(pools) == 1 else None

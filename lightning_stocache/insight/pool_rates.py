"""The numbers of a rolling cache that is trained on: what is resident, what came and went."""

from __future__ import annotations

import time
from typing import Any

from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.growing.rolling_pool import RollingStats
from lightning_stocache.loading.loader_tree import leaves_in

__all__ = ["PoolRates"]


class PoolRates:
    """The numbers of the rolling cache that some loaders read, from one epoch's end to the next."""

    def __init__(self) -> None:
        self._before: tuple[RollingStats, float] | None = None

    def start(self, loaders: Any) -> None:
        """Count rates from now on."""
        if (pool := _pool_in(loaders)) is not None:
            self._before = pool.stats(), time.monotonic()

    def metrics(self, loaders: Any) -> dict[str, float]:
        """What is resident, and rates since the last call; nothing where no rolling cache is read."""
        if (pool := _pool_in(loaders)) is None:
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


def _pool_in(loaders: Any) -> RollingCache | None:
    """The rolling cache that loaders read; None if there is none, or more than one."""
    datasets = (getattr(leaf, "dataset", None) for leaf in leaves_in(loaders))
    pools = [dataset for dataset in datasets if isinstance(dataset, RollingCache)]
    return pools[0] if len(pools) == 1 else None

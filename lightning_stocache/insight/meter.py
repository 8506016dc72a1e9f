"""The metrics of CacheMonitor for training loops without a Trainer: plain PyTorch, or Fabric.

`CacheMeter` counts from one call of `epoch` to the next, and sums over the ranks as the monitor does (`tallies`). The
CachedLoader measures the seconds: the loop waits for data inside of the loader, and computes between two batches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from lightning_stocache.insight.dashboards import hyperparameters
from lightning_stocache.insight.metrics import PREFIXES, Tally
from lightning_stocache.insight.tallies import Tallies
from lightning_stocache.loading.loader_tree import cached_in_leaves

__all__ = ["CacheMeter"]

Stage = Literal["train", "val", "test", "predict"]


class CacheMeter:
    """The metrics of `CacheMonitor`, under the same keys, for your own training loop.

    With several ranks, each rank has a meter around its own loader, and all ranks call `epoch` after the same epochs.

    Args:
        loader: a loader with a CachedDataset, CachedStream or RollingCache, as it is or as Fabric has set it up.
        stage: the stage of these epochs. "train" gives the keys `stocache/<metric>`, any other stage gives
            `stocache/<stage>/<metric>`.

    Raises:
        ValueError: the stage is none of these.
        TypeError: there is no cached dataset behind the loader, or several loaders are given.

    Example:
        >>> from lightning_stocache import CachedDataset, CachedLoader
        >>> dataset = CachedDataset([1.0, 2.0, 3.0, 4.0], spec=1.0)  # set-up reads and stores none
        >>> loader = CachedLoader(dataset, batch_size=2)
        >>> meter = CacheMeter(loader)
        >>> for epoch in range(2):
        ...     for batch in loader:
        ...         pass  # train on it
        ...     metrics = meter.epoch()  # fabric.log_dict(metrics, step=epoch)
        ...     print(metrics["stocache/hits"], metrics["stocache/hit_rate"])
        0 0.0
        4 1.0
        >>> dataset.close()
    """

    patience = 60.0
    """The most seconds that `epoch` waits for the slowest rank."""

    def __init__(self, loader: Any, stage: Stage = "train") -> None:
        if stage not in PREFIXES:
            raise ValueError(f"stage must be one of {', '.join(PREFIXES)}, got {stage!r}")
        if isinstance(loader, list | tuple | Mapping):
            raise TypeError(f"loader must be one loader, got a {type(loader).__name__}: make a CacheMeter of each")
        if not cached_in_leaves(loader):
            raise TypeError(
                f"there is no cached dataset behind {type(loader).__name__}: make its dataset a CachedDataset, a "
                "CachedStream or a RollingCache"
            )
        self.loader, self.stage = loader, stage
        self._tallies = Tallies()
        self._tallies.settle(stage, loader)
        self._tallies.count("before the first epoch", loader)
        self._tallies.pools.metrics(loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches."""
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self) -> dict[str, float]:
        """End an epoch: the metrics since the last call, over all ranks. Every rank calls this.

        If a rank's counts do not arrive in time, a warning is given and the result is empty.

        Returns:
            The keys of `CacheMonitor` for this stage. Seconds are those of the host: `compute_seconds` between two
            batches, `epoch_seconds` the sum of waiting and computing. If the loader is no CachedLoader, these and
            `samples_per_second` are left out.
        """
        self._tallies.post(self.stage, self.loader, self._loop())
        metrics = self._tallies.metrics(self.stage, self.loader, self.patience)
        return {PREFIXES[self.stage] + name: value for name, value in metrics.items()}

    def live(self) -> dict[str, float]:
        """This rank's metrics of the training epoch so far, without a message to other ranks.

        Returns:
            The keys `stocache/live/<metric>` of `CacheMonitor`; empty for other stages than training.
        """
        return self._tallies.live(self.loader, self._loop()) if self.stage == "train" else {}

    def hyperparameters(self) -> dict[str, Any]:
        """The options and decisions of the cache, as plain values under the key `stocache`.

        They suit `logger.log_hyperparams`, or a config that is stored with the run. `CacheMonitor` lists the keys.
        """
        return hyperparameters({self.stage: self.loader})

    def _loop(self) -> Tally | None:
        """The seconds of the loop since the last epoch's end, or None if the loader has no clock."""
        waited, computed = self._tallies.seconds(self.stage, self.loader)
        return None if math.isnan(waited) else Tally(wait_seconds=waited, loop_seconds=waited + computed, ranks=1)

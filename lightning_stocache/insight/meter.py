"""The metrics of CacheMonitor for training loops without a Trainer: plain PyTorch, or Fabric.

`CacheMeter` counts from one call of `epoch` to the next, and sums over the ranks as the monitor does (`tallies`). The
CachedLoader measures the seconds: the loop waits for data inside of the loader's `__next__`, and computes between two
calls of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

from lightning_stocache.insight.dashboards import hyperparameters
from lightning_stocache.insight.metrics import PREFIXES, Tally
from lightning_stocache.insight.tallies import Tallies, loader_seconds
from lightning_stocache.loading.loader_tree import cached_in_leaves

__all__ = ["CacheMeter"]

Stage = Literal["train", "val", "test", "predict"]


class CacheMeter:
    """The metrics of `CacheMonitor`, under the same keys, for your own training loop.

    With several ranks, each rank has a meter around its own loader, and all ranks call `epoch` after the same epochs.
    If a training loader and a validation loader read one dataset, both their meters count it.

    Args:
        loader: a loader with a CachedDataset, CachedStream or RollingCache, as it is or as Fabric has set it up; or
            several loaders, in a list or dict.
        stage: the stage of these epochs. "train" gives the keys `stocache/<metric>`, any other stage gives
            `stocache/<stage>/<metric>`.

    Raises:
        ValueError: the stage is none of these.
        TypeError: there is no cached dataset behind the loader, or a meter of several loaders is iterated over.

    Example:
        >>> from lightning_stocache import CachedDataset, CachedLoader, SampleSpec
        >>> dataset = CachedDataset([1.0, 2.0, 3.0, 4.0], spec=SampleSpec.infer(1.0))  # set-up reads and stores none
        >>> loader = CachedLoader(dataset, batch_size=2)
        >>> meter = CacheMeter(loader)
        >>> for epoch in range(2):
        ...     for batch in loader:
        ...         pass  # train on it
        ...     metrics = meter.epoch()  # fabric.log_dict(metrics, step=epoch)
        ...     print(metrics["stocache/hits"], metrics["stocache/hit_rate"], metrics["stocache/hit_rate_expected"])
        0 0.0 0.0
        4 1.0 1.0
        >>> dataset.close()
    """

    patience = 60.0
    """The most seconds that `epoch` waits for the slowest rank."""

    def __init__(self, loader: Any, stage: Stage = "train") -> None:
        if stage not in PREFIXES:
            raise ValueError(f"stage must be one of {', '.join(PREFIXES)}, got {stage!r}")
        if not cached_in_leaves(loader):
            raise TypeError(
                f"there is no cached dataset behind {type(loader).__name__}: make its dataset a CachedDataset, a "
                "CachedStream or a RollingCache"
            )
        self.loader, self.stage = loader, stage
        self._tallies, self._begun = Tallies(), loader_seconds(loader)
        self._tallies.count("before the first epoch", loader)
        self._tallies.pools.metrics(loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches."""
        if isinstance(self.loader, list | tuple | dict):
            kind = type(self.loader).__name__
            raise TypeError(f"only a CacheMeter of one loader can be iterated over, this one has a {kind} of them")
        return iter(self.loader)

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self) -> dict[str, float]:
        """End an epoch: the metrics since the last call, over all ranks. Every rank calls this.

        If a rank's counts do not arrive in time, a warning is given and the result is empty.

        Returns:
            The keys of `CacheMonitor` for this stage; `hit_rate_expected` for training alone. The seconds of waiting
            and computing are left out if a loader is no CachedLoader.
        """
        loop, self._begun = self._loop(), loader_seconds(self.loader)
        self._tallies.post(self.stage, self.loader, loop)
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
        """The seconds of the loop since the last epoch's end, or None if a loader has no clock."""
        waited, computed = (now - before for now, before in zip(loader_seconds(self.loader), self._begun, strict=True))
        if math.isnan(waited):
            return None
        return Tally(wait_seconds=waited, compute_seconds=computed, loop_seconds=waited + computed, ranks=1)

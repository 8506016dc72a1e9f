"""The monitor's numbers for loops of one's own: plain PyTorch, Fabric, anything that has a logger or a print.

`CacheMeter` counts from one call of `epoch` to the next, and sums over the ranks as the monitor does (`tallies`). The
seconds are those of the CachedLoader itself: inside of its `__next__` the loop waits for data, and between two calls
it computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

from lightning_stocache.insight.dashboards import hyperparameters
from lightning_stocache.insight.tallies import Seconds, Tallies, loader_seconds
from lightning_stocache.loading.loader_tree import cached_in_leaves

__all__ = ["CacheMeter"]

Stage = Literal["train", "val", "test", "predict"]


class CacheMeter:
    """Says after each epoch of a loop of one's own what `CacheMonitor` logs, under the same keys.

    With several ranks each has one, around its own loader, and all call `epoch` after the same epochs. A dataset that
    two loaders read, one for training and one for validation, is counted by both meters.

    Args:
        loader: a loader with a CachedDataset, CachedStream or RollingCache, as it is or as Fabric has set it up; or
            several, in a list or dict.
        stage: whose epochs they are: "train" gives `stocache/<metric>`, another one `stocache/<stage>/<metric>`.

    Raises:
        ValueError: the stage is none of these.
        TypeError: there is no cached dataset behind the loader; (iteration) it is several.

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
    """Seconds that `epoch` waits for the slowest rank, at most."""

    def __init__(self, loader: Any, stage: Stage = "train") -> None:
        if stage not in get_args(Stage):
            raise ValueError(f"stage must be one of {', '.join(get_args(Stage))}, got {stage!r}")
        if not cached_in_leaves(loader):
            raise TypeError(
                f"there is no cached dataset behind {type(loader).__name__}: make its dataset a CachedDataset, a "
                "CachedStream or a RollingCache"
            )
        self.loader, self.stage = loader, stage
        self._tallies, self._begun = Tallies(), loader_seconds(loader)
        self._tallies.skip(loader)
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
        """The metrics of what was served since the last call, over all ranks, every one of which calls this.

        Where the words of other ranks do not come in time, a warning is given and nothing is returned.

        Returns:
            The keys of `CacheMonitor` for this stage, `hit_rate_expected` among those of training. What an epoch waited
            for and computed is left out where a loader is no CachedLoader.
        """
        seconds, self._begun = self._seconds(), loader_seconds(self.loader)
        self._tallies.post(self.stage, self.loader, seconds)
        metrics = self._tallies.metrics(self.stage, self.loader, self.patience)
        prefix = "stocache/" if self.stage == "train" else f"stocache/{self.stage}/"
        return {prefix + name: value for name, value in metrics.items()}

    def live(self) -> dict[str, float]:
        """This rank's values of training's epoch so far, to be logged once in a while; no message is sent for them.

        Returns:
            The keys `stocache/live/<metric>` of `CacheMonitor`; nothing for another stage than training.
        """
        return self._tallies.live(self.loader, self._seconds()) if self.stage == "train" else {}

    def hyperparameters(self) -> dict[str, Any]:
        """The options and decisions of the cache, as plain values under the key `stocache`.

        For `logger.log_hyperparams`, or a config that is kept with the run; see `CacheMonitor` for the keys.
        """
        return hyperparameters({self.stage: self.loader})

    def _seconds(self) -> Seconds | None:
        """Seconds since the last epoch's end; None where the loaders do not tell."""
        waited, away = (now - before for now, before in zip(loader_seconds(self.loader), self._begun, strict=True))
        return None if math.isnan(waited) else Seconds(waited, away, waited + away)

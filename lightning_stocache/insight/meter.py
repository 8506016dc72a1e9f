"""The monitor's numbers for loops of one's own: plain PyTorch, Fabric, anything that has a logger or a print.

`CacheMeter` counts from one call of `epoch` to the next, and sums over the ranks as the monitor does (`tallies`): each
posts what it has counted and waits for the others' words, in no collective of theirs. Where it is iterated over in
place of its loader it has the monitor's clock, too (`Stall`): what passes between a request for a batch and the batch
is waiting for data, and what passes until the next request is computing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, Literal, get_args

from lightning_stocache.insight.expectation import Expectation
from lightning_stocache.insight.hyperparameters import hyperparameters
from lightning_stocache.insight.pool_rates import PoolRates
from lightning_stocache.insight.stall import Stall
from lightning_stocache.insight.tallies import Tallies
from lightning_stocache.loading.loader_tree import cached_in_leaves

__all__ = ["CacheMeter"]

log = logging.getLogger(__name__)

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
        >>> meter = CacheMeter(CachedLoader(dataset, batch_size=2))
        >>> for epoch in range(2):
        ...     for batch in meter:
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
        self.loader, self.stage = loader, stage
        self._tallies, self._pools = Tallies(), PoolRates()
        self._stall, self._timed = Stall(), False
        self._expectation = Expectation()
        if not (datasets := cached_in_leaves(loader)):
            raise TypeError(
                f"there is no cached dataset behind {type(loader).__name__}: make its dataset a CachedDataset, a "
                "CachedStream or a RollingCache"
            )
        self._tallies.skip(datasets)
        self._pools.start(loader)

    def __iter__(self) -> Iterator[Any]:
        """The loader's batches, timed."""
        if isinstance(self.loader, list | tuple | dict):
            kind = type(self.loader).__name__
            raise TypeError(f"only a CacheMeter of one loader can be iterated over, this one has a {kind} of them")
        batches = iter(self.loader)  # workers that start with an epoch do so before its first wait
        self._timed = True
        self._stall.resume()
        while True:
            try:
                with self._stall.waiting:
                    batch = next(batches)
            except StopIteration:
                self._stall.end()
                return
            try:
                with self._stall.computing:
                    yield batch
            finally:
                self._stall.end()

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self) -> dict[str, float]:
        """The metrics of what was served since the last call, over all ranks, every one of which calls this.

        Where the words of other ranks do not come in time, a warning is given and nothing is returned.

        Returns:
            The keys of `CacheMonitor` for this stage, `hit_rate_expected` among those of training. What an epoch waited
            for and computed is left out where the loader was not read through this meter.
        """
        seconds, self._timed = self._stall.take() if self._timed else None, False
        datasets = cached_in_leaves(self.loader)
        self._tallies.post(self.stage, datasets, seconds)
        metrics = self._tallies.metrics(self.stage, datasets, self.patience)
        if metrics and self.stage == "train":
            group, served = datasets[0].group, self._tallies.served["train"]
            complaint = self._expectation.compare(metrics, served, datasets, self.loader, world=group.world)
            if complaint is not None and group.rank == 0:
                log.warning(complaint)
        if metrics:
            metrics |= self._pools.metrics(self.loader)
        prefix = "stocache/" if self.stage == "train" else f"stocache/{self.stage}/"
        return {prefix + name: value for name, value in metrics.items()}

    def live(self) -> dict[str, float]:
        """This rank's values of training's epoch so far, to be logged once in a while; no message is sent for them.

        Returns:
            The keys `stocache/live/<metric>` of `CacheMonitor`; nothing for another stage than training. What was
            waited for and computed is left out where the loader is not read through this meter.

        Example:
            >>> from lightning_stocache import CachedDataset, CachedLoader, SampleSpec
            >>> dataset = CachedDataset([1.0, 2.0, 3.0, 4.0], spec=SampleSpec.infer(1.0))
            >>> meter = CacheMeter(CachedLoader(dataset, batch_size=1))
            >>> for step, batch in enumerate(meter):
            ...     if step == 2:
            ...         print(meter.live()["stocache/live/fill_fraction"])  # fabric.log_dict(meter.live(), step=step)
            0.75
            >>> dataset.close()
        """
        if self.stage != "train":
            return {}
        return self._tallies.live(cached_in_leaves(self.loader), self._stall.peek() if self._timed else None)

    def hyperparameters(self) -> dict[str, Any]:
        """What was asked of the cache, granted and decided, as plain values under the key `stocache`.

        For `logger.log_hyperparams`, or a config that is kept with the run; see `CacheMonitor` for the keys.
        """
        return hyperparameters({self.stage: self.loader})

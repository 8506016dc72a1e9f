"""The cache in the Trainer's progress bar, and the line that says when it is full."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lightning_stocache.cache.counters import Counts
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.insight.metrics import LIVE
from lightning_stocache.insight.tallies import Tallies, samples_of
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.training.lightning_internals import say
from lightning_stocache.training.loaders import running_datasets

__all__ = ["Progress", "log_every"]

_FILL, _HIT = "cache_fill", "cache_hit"


class Progress:
    """Shows the caches of one fit.

    Args:
        verbose: whether to print the line when they are full.
    """

    def __init__(self, *, verbose: bool) -> None:
        self._verbose = verbose
        self._is_full, self._is_first_epoch = False, True
        self._cadence = 1  # batches between two updates
        self._waited = 0.0  # seconds, in the epochs that have ended

    def begin(self, trainer: Any) -> None:
        """Begin a fit. A kept cache may be full already."""
        self._is_full, self._is_first_epoch, self._waited = _are_full(_caches(trainer)), True, 0.0
        tenth = int(min(trainer.num_training_batches, 10**6)) // 10 + 1  # inf if the loader has no length
        # Every training batch counts as a step here, also where gradients are accumulated.
        self._cadence = min(log_every(trainer) or tenth, tenth)

    def step(self, trainer: Any, batch: int, tallies: Tallies) -> None:
        """Show the cache after some batches. A stream is known to be full in a later epoch's first batch."""
        if batch % self._cadence == 0:
            self._show(trainer, tallies.live(trainer.train_dataloader).get(f"{LIVE}hit_rate", 0.0))
        if batch == 0 and not self._is_first_epoch:  # workers may fill a cache during the very first batch
            self._say_when_full(trainer)

    def end_epoch(self, trainer: Any, metrics: Mapping[str, float], *, shows: bool) -> None:
        """Show the values of an epoch, and say when the cache is full."""
        if shows and metrics:
            self._show(trainer, metrics["hit_rate"])
        self._is_first_epoch = False
        self._waited += metrics.get("data_wait_seconds", math.nan)
        self._say_when_full(trainer)

    def _show(self, trainer: Any, hit_rate: float) -> None:
        caches = _caches(trainer)
        slots = sum(map(len, caches))
        if not slots or trainer.barebones:  # it has no bar
            return
        bar: dict[str, float] = trainer.progress_bar_metrics  # `log` takes 300 us
        if self._is_first_epoch and not self._is_full:
            bar[_FILL] = sum(cache.fill_fraction * len(cache) for cache in caches) / slots
        else:
            bar.pop(_FILL, None)
            bar[_HIT] = hit_rate

    def _say_when_full(self, trainer: Any) -> None:
        datasets, caches = running_datasets(trainer, "train"), _caches(trainer)
        if self._is_full or not _are_full(caches):
            return
        self._is_full = True
        if not self._verbose:
            return
        filled = sum(cache.filled for cache in caches)
        counts = sum((dataset.counters.totals() for dataset in datasets if dataset.counters is not None), Counts())
        share = min(filled / max(counts.misses + counts.bypasses, 1), 1.0)  # of what was loaded until now
        saved = share * self._waited
        after = f"; {saved:.1f} s of waiting for data will not be repeated" if saved > 0 else ""
        if any(isinstance(cache, RollingStore) for cache in caches):
            after = "; from now on new samples replace the oldest"
        memory, samples = sum(cache.memory_bytes for cache in caches), sum(map(samples_of, datasets))
        nodes = len(datasets[0].group.nodes)
        where = "this node" if nodes == 1 else f"each of {nodes} nodes"
        say(f"the cache is full: {filled:,} of {samples:,} samples, {format_bytes(memory)} on {where}{after}")


def log_every(trainer: Any) -> int:
    """The Trainer's logging cadence in steps; 0: it logs nothing during an epoch."""
    return int(getattr(trainer, "log_every_n_steps", 0))


def _caches(trainer: Any) -> list[Any]:
    """The caches of the training loaders on this node."""
    return [dataset.cache for dataset in running_datasets(trainer, "train") if dataset.cache is not None]


def _are_full(caches: list[Any]) -> bool:
    """Whether no further sample of the usual size has room."""
    return any(map(len, caches)) and all(cache.filled >= cache.capacity for cache in caches)

"""The cache in the Trainer's progress bar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning_stocache.insight.metrics import LIVE
from lightning_stocache.insight.tallies import Tallies
from lightning_stocache.training.loaders import running_datasets

__all__ = ["Progress", "log_every"]

_FILL, _HIT = "cache_fill", "cache_hit"


class Progress:
    """Shows the caches of one fit."""

    def __init__(self) -> None:
        self._is_full = False
        self._is_first_epoch = True
        self._cadence = 1  # batches between two updates

    def begin(self, trainer: Any) -> None:
        """Begin a fit. A kept cache may be full already."""
        self._is_full = _are_full(_caches(trainer))
        self._is_first_epoch = True
        tenth = int(min(trainer.num_training_batches, 10**6)) // 10 + 1  # inf if the loader has no length
        # Every training batch counts as a step here, also where gradients are accumulated.
        self._cadence = min(log_every(trainer) or tenth, tenth)

    def step(self, trainer: Any, batch: int, tallies: Tallies) -> None:
        """Show the cache after some batches."""
        if batch % self._cadence == 0:
            self._show(trainer, tallies.live(trainer.train_dataloader).get(f"{LIVE}hit_rate", 0.0))

    def end_epoch(self, trainer: Any, metrics: Mapping[str, float], *, shows: bool) -> None:
        """Show the values of an epoch that has ended."""
        if shows and metrics:
            self._show(trainer, metrics["hit_rate"])
        self._is_first_epoch = False

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


def log_every(trainer: Any) -> int:
    """The Trainer's logging cadence in steps; 0: it logs nothing during an epoch."""
    return int(getattr(trainer, "log_every_n_steps", 0))


def _caches(trainer: Any) -> list[Any]:
    """The caches of the training loaders on this node."""
    return [dataset.cache for dataset in running_datasets(trainer, "train") if dataset.cache is not None]


def _are_full(caches: list[Any]) -> bool:
    """Whether no further sample of the usual size has room."""
    return any(map(len, caches)) and all(cache.filled >= cache.capacity for cache in caches)

"""The StochasticCache that `STOCACHE=...` adds to every Trainer of an application (`lightning_stocache.switch`).

The application does not know of it. So it does nothing where the application has a cache of its own, and it leaves
alone what the application reads or ships: its values go to TensorBoard, W&B and MLflow, not into
`trainer.callback_metrics` or other loggers; no hyperparameters are logged, unless a variable asks for them; a
checkpoint that is saved between two epochs has no state of it.
"""

from __future__ import annotations

from typing import ClassVar

from lightning.pytorch import LightningModule, Trainer

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor

__all__ = ["GuestMonitor", "SwitchedCache"]


class GuestMonitor(CacheMonitor):
    """The CacheMonitor that it brings."""

    is_guest: ClassVar[bool] = True


class SwitchedCache(StochasticCache):
    """The StochasticCache of the switch. It gives way to every other one, and to a DataModule that caches."""

    is_guest: ClassVar[bool] = True
    monitor_class: ClassVar[type[CacheMonitor]] = GuestMonitor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Cache the loaders of the call, without a state in checkpoints between epochs."""
        super().setup(trainer, pl_module, stage)
        if self.caches_loaders(trainer):
            self.resume_point.for_trainer(trainer).leaves_ends = True

"""The callbacks for Trainers of the package `pytorch_lightning`, which has the same classes as `lightning.pytorch`.

Its Trainer of 2.5 refuses a callback of the other package ("Expected a parent"). Imported only where such a Trainer is.
"""

from __future__ import annotations

from typing import ClassVar

import pytorch_lightning

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.resume import ResumePoint

__all__ = ["MonitorOfOther", "ResumePointOfOther", "StochasticCacheOfOther", "SwitchedCacheOfOther"]


class MonitorOfOther(CacheMonitor, pytorch_lightning.Callback):
    """The CacheMonitor of such a Trainer."""


class ResumePointOfOther(ResumePoint, pytorch_lightning.Callback):
    """The ResumePoint of such a Trainer."""


class StochasticCacheOfOther(StochasticCache, pytorch_lightning.Callback):
    """The StochasticCache that a cached DataModule brings in such a Trainer."""

    monitor_class: ClassVar[type[CacheMonitor]] = MonitorOfOther
    resume_point: ClassVar[type[ResumePoint]] = ResumePointOfOther


class SwitchedCacheOfOther(StochasticCacheOfOther):
    """The callback of the switch in such a Trainer; see `SwitchedCache`."""

    is_guest: ClassVar[bool] = True

"""The callbacks for Trainers of the package `pytorch_lightning`, which has the same classes as `lightning.pytorch`.

Its Trainer of 2.5 refuses a callback of the other package ("Expected a parent"). Imported only where such a Trainer is.
"""

from __future__ import annotations

from typing import ClassVar

import pytorch_lightning

from lightning_stocache.training.resume import ResumePoint
from lightning_stocache.training.switched import SwitchedCache

__all__ = ["ResumePointOfOther", "SwitchedCacheOfOther"]


class ResumePointOfOther(ResumePoint, pytorch_lightning.Callback):
    """The ResumePoint of such a Trainer."""


class SwitchedCacheOfOther(SwitchedCache, pytorch_lightning.Callback):
    """The callback of the switch in such a Trainer."""

    resume_point: ClassVar[type[ResumePoint]] = ResumePointOfOther

"""Values of the epoch so far, at the Trainer's logging cadence. Their keys are their own: a curve is of one kind.

They are numbered as Lightning numbers the values of a step, and logged once for each: with accumulated gradients
several batches are one step. `logger.log_metrics` once in a while takes 6 us a batch; `log_dict` would take a
millisecond of each.
"""

from __future__ import annotations

from lightning.pytorch import Trainer

from lightning_stocache.insight.stall import Stall
from lightning_stocache.insight.tallies import Tallies
from lightning_stocache.training.loaders import running_datasets
from lightning_stocache.training.profiler import log_every

__all__ = ["LiveValues"]


class LiveValues:
    """What rank zero logs while a training epoch runs."""

    def __init__(self) -> None:
        self._step = -1

    def log(self, trainer: Trainer, tallies: Tallies, stall: Stall) -> None:
        """Log this rank's values of the epoch so far, if it is time to.

        Args:
            trainer: after a training batch.
            tallies: what has been served.
            stall: the seconds of the loop.
        """
        step = trainer.global_step - 1  # as Lightning numbers the values of a step
        if not (trainer.is_global_zero and trainer.loggers) or step == self._step or (step + 1) % log_every(trainer):
            return
        self._step = step
        if not (values := tallies.live(running_datasets(trainer, "train"), stall.peek())):
            return
        for logger in trainer.loggers:
            logger.log_metrics(values, step=step)

"""What the steps of a Trainer's run are made of.

The parts are heard from the Trainer's profiler, under names that stand in `lightning_internals`, and from callback
hooks (backward: the profiler does not tell of it in manual optimisation). `StepClock` has the protocol: parts lie in
each other, and the innermost counts. A step ends with `on_train_batch_end`, or, if another follows at once, where that
one asks for its batch: so what callbacks and loggers do after a batch is its rest, and validation is of no step. (Of
the last batch before a validation or an epoch's end, what comes after this callback's hook is lost; and of a dataset
without a length Lightning fetches the first batch before training starts.)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.insight.breakdown import Breakdown
from lightning_stocache.insight.picture import check_matplotlib
from lightning_stocache.insight.step_clock import StepClock
from lightning_stocache.insight.step_table import as_text, save
from lightning_stocache.insight.timeline import Timeline, timeline_of
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.training.lightning_internals import step_actions
from lightning_stocache.training.loaders import settings_of
from lightning_stocache.training.profiler import Contexts, listen, log_every, stop_listening
from lightning_stocache.training.say import say, warn

__all__ = ["StepTimer"]


class StepTimer(Callback):
    """Splits every training step into waiting for data, transfer, forward, backward, optimiser and the rest.

    While training, the loggers get the mean seconds per step since the last values, at the Trainer's cadence:

    - `stocache/step/wait_seconds`: until the batch has come; an epoch's first step has what its workers need to start.
    - `stocache/step/transfer_seconds`: moving the batch to the device.
    - `stocache/step/forward_seconds`: `training_step`, without what lies in it (manual optimisation has all in it).
    - `stocache/step/backward_seconds`: backward, with DDP's all-reduce, and with what gradient checkpointing computes
      again. A backward without `manual_backward` is in forward.
    - `stocache/step/optimizer_seconds`: the optimisers' steps, clipping, the scaler of AMP, and `zero_grad`.
    - `stocache/step/rest_seconds`: all else: callbacks, loggers, `on_after_batch_transfer`, schedulers.

    At the end of `fit`, also after Ctrl-C, a table says the same of the whole run, with medians and 95 % quantiles, and
    what the loader gives beside what the steps could take. A step is one batch: where gradients are accumulated, most
    steps have no optimiser.

    On a CUDA device the parts are what the device needed, by events in its stream: waiting is the time in which it
    stood still, which is less than the host waited where work was queued. The host waits for these events at the end of
    `fit` alone. On other devices the host's clock is read: what was only launched counts where the host waits for it.
    Values are those of rank zero; there, waiting of another rank is seen as backward, which ends when all are there.

    Args:
        picture: a PNG file for the parts of each epoch, drawn at the end (needs the extra `report`); None: none.

    Raises:
        ValueError: the picture's name does not end in `.png`.
        ModuleNotFoundError: there is no matplotlib for the picture; raised before training.

    Example:
        >>> trainer = Trainer(callbacks=[StepTimer()], logger=False, enable_checkpointing=False)
    """

    def __init__(self, picture: str | Path | None = None) -> None:
        if picture is not None and Path(picture).suffix != ".png":
            raise ValueError(f"picture must be a file that ends in .png, got {str(picture)!r}")
        self.picture = None if picture is None else Path(picture)
        self._clock = StepClock()
        self._parts: Contexts = {}
        self._running = self._heard = self._warned = False
        self._batch_size, self._ahead = 0, True
        self._batches, self._log_every = 0, 1

    @property
    def epochs(self) -> list[Breakdown]:
        """The steps of the last `fit`, by epoch."""
        return self._clock.epochs

    def timeline(self, device: torch.device) -> Timeline:
        """Where moments are read for a model on a device; to be replaced for a device with events of its own."""
        return timeline_of(device.type)  # Lightning has made it the current one: its stream need not be looked up

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find out before training whether a picture can be drawn after it."""
        if stage == "fit" and self.picture is not None:
            check_matplotlib()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        self._clock = StepClock(timeline=self.timeline(trainer.strategy.root_device))
        self._parts = {action: self._clock(part) for action, part in step_actions(trainer).items()}
        loaders = list(loaders_in(trainer.train_dataloader))
        self._batch_size = settings_of(loaders[0]).batch_size if len(loaders) == 1 else 0
        self._ahead = not loaders or any(loader.num_workers or isinstance(loader, CachedLoader) for loader in loaders)
        # Batches are counted here: to ask the Trainer for its step takes longer than all else that is done in one.
        self._log_every = log_every(trainer) * trainer.accumulate_grad_batches
        self._batches, self._running = trainer.global_step * trainer.accumulate_grad_batches, True
        self._heard = False
        listen(trainer, self._parts)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with an epoch's first step."""
        self._clock.begin_epoch()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        """Backward begins."""
        self._clock.start("backward")

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Backward is done."""
        self._clock.stop("backward")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End the step, and log at the Trainer's cadence."""
        if not self._running:
            return
        if not self._heard:  # after the first step it is known for all
            self._heard = self._clock("wait").heard and self._clock("forward").heard
            if not self._heard:
                return self._complain(trainer)
        self._clock.end_step(self._batch_size)
        self._batches += 1
        if self._batches % self._log_every or not trainer.loggers:
            return
        values = {f"stocache/step/{part}_seconds": seconds for part, seconds in self._clock.take().items()}
        for logger in trainer.loggers if values else ():
            logger.log_metrics(values, step=trainer.global_step - 1)  # as Lightning numbers the values of a step

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What comes between two epochs is of no step."""
        self._clock.pause()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is of no step."""
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the next step."""
        self._clock.resume()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the steps were made of."""
        if self._running:
            self._stop(trainer)
            self._tell(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say so after Ctrl-C too; Lightning calls neither `on_train_end` nor `teardown` after an exception."""
        told = self._running and isinstance(exception, KeyboardInterrupt)
        self._stop(trainer)
        if told:
            self._tell(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the profiler back."""
        self._stop(trainer)

    def _stop(self, trainer: Trainer) -> None:
        stop_listening(trainer, self._parts)
        self._clock.pause()
        self._running = False

    def _complain(self, trainer: Trainer) -> None:
        self._stop(trainer)
        self._clock = StepClock()
        if not self._warned:
            self._warned = True
            warn(
                "this version of Lightning does not say when its loop waits for a batch and when it computes: "
                "StepTimer times nothing"
            )

    def _tell(self, trainer: Trainer) -> None:
        epochs = self.epochs if trainer.is_global_zero else []
        if not epochs:
            return
        whose = f" of rank 0 of {trainer.world_size}" if trainer.world_size > 1 else ""
        say(f"what the training steps{whose} are made of\n{as_text(epochs, ahead=self._ahead)}")
        if self.picture is not None:
            try:
                save(epochs, self.picture, ahead=self._ahead)
            except OSError as error:  # no reason to fail after training
                warn(f"the picture of the training steps cannot be written: {error}")

"""The parts of a Trainer's steps.

While a fit runs, the methods that make up a step (`lightning_internals.step_calls`) tell a clock (`insight.steps`) when
they begin and end. Not counted: what comes after this callback's hook in the last batch before a validation or an
epoch's end, and the first batch of a dataset without a length, which Lightning fetches before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.insight.steps import StepClock, cuda_moment
from lightning_stocache.training.lightning_internals import say, step_calls
from lightning_stocache.training.monitor import log_epoch

__all__ = ["StepTimer"]


class StepTimer(Callback):
    """Logs what training steps are made of: waiting for data, transfer, forward, backward, optimiser and the rest.

    At the end of each epoch, mean seconds per step:

    - `stocache/step/wait_seconds`: until the batch has come; an epoch's first step has what its workers need to start.
    - `stocache/step/transfer_seconds`: moving the batch to the device.
    - `stocache/step/forward_seconds`: `training_step`, without what lies in it (manual optimisation has all in it).
    - `stocache/step/backward_seconds`: backward, with DDP's all-reduce, and with what gradient checkpointing computes
      again. A backward without `manual_backward` is in forward.
    - `stocache/step/optimizer_seconds`: the optimisers' steps, clipping, the scaler of AMP, and `zero_grad`.
    - `stocache/step/rest_seconds`: all else: callbacks, loggers, `on_after_batch_transfer`, schedulers.

    A step is one batch: where gradients are accumulated, most steps have no optimiser. At the end of `fit`, also after
    Ctrl-C, one line has the shares of the last epoch.

    On a CUDA device the parts are what the device needed, by events in its stream: waiting is the time in which it
    stood still, which is less than the host waited where work was queued. The host waits for these events at the end of
    an epoch alone. On other devices the host's clock is read. Values are those of rank zero; there, waiting of another
    rank is seen as backward, which ends when all are there.

    Example:
        >>> trainer = Trainer(callbacks=[StepTimer()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        """Mean seconds of each part, for every epoch of the last `fit`."""
        self._clock = StepClock()
        self._timed: list[tuple[Any, str, Any]] = []  # objects, names of methods, and what was set under them before

    def clock(self, device: torch.device) -> StepClock:
        """The clock for a model on a device; to be replaced for a device with events of its own."""
        return StepClock(cuda_moment if device.type == "cuda" else time.perf_counter)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        clock = self._clock = self.clock(trainer.strategy.root_device)
        self.epochs = []
        for owner, name, part, begins, ends in step_calls(trainer):
            method = getattr(owner, name)
            timed = partial(_timed, clock, part, begins, ends, method)
            self._timed.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, update_wrapper(timed, method))  # Lightning looks through it for what is overridden
        self.on_train_epoch_start(trainer, pl_module)  # which Lightning does not call in a resumed epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with waiting: the workers of the epoch start."""
        if self._timed:
            self._clock.pause()
            self._clock.resume("wait")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End the step."""
        self._clock.end_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Validation is of no step."""
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on with the next step."""
        if self._timed:
            self._clock.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the means of the epoch."""
        if self._end_epoch():
            log_epoch(trainer, {f"stocache/step/{part}_seconds": mean for part, mean in self.epochs[-1].items()})

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what a step of the last epoch was made of."""
        self._stop()
        self._say()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Say so after Ctrl-C too; Lightning calls neither `on_train_end` nor `teardown` after an exception."""
        if self._timed:
            self._end_epoch()
            self._stop()
            if isinstance(exception, KeyboardInterrupt):
                self._say()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Give the methods back."""
        self._stop()

    def _end_epoch(self) -> bool:
        """Note the means of an epoch; whether it had a step."""
        self._clock.pause()
        if means := self._clock.take():
            self.epochs.append(means)
        return bool(means)

    def _stop(self) -> None:
        self._clock.pause()
        while self._timed:
            owner, name, before = self._timed.pop()
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)

    def _say(self) -> None:
        if self.epochs:
            last = self.epochs[-1]
            step = sum(last.values())
            shares = ", ".join(f"{part} {100 * seconds / step:.0f} %" for part, seconds in last.items())
            say(f"a training step took {1000 * step:.2f} ms in the last epoch: {shares}")


def _timed(
    clock: StepClock, part: str, begins: bool, ends: bool, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a method with which a part of the step begins, or ends."""
    if begins:
        clock.start(part)
    try:
        return method(*args, **kwargs)
    finally:
        if ends:
            clock.stop(part)

"""The parts of a Trainer's steps.

While a fit runs, the methods of a step (`lightning_internals.step_calls`) tell a clock (`insight.steps`) when they
begin and end. Two intervals are not counted: the time after this callback's hook in the last batch before a validation
or an epoch's end, and the first batch of a dataset without a length, which Lightning fetches before training starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.insight.steps import StepClock, cuda_moment
from lightning_stocache.training.lightning_internals import say, step_calls
from lightning_stocache.training.monitor import log_epoch

__all__ = ["StepTimer"]

_numbers = count()
_timers: WeakValueDictionary[int, StepTimer] = WeakValueDictionary()  # of this process, by their numbers


class StepTimer(Callback):
    """Logs the parts of training steps: waiting for data, transfer, forward, backward, optimiser and the rest.

    At the end of each epoch it logs mean seconds per step:

    - `stocache/step/wait_seconds`: waiting for the batch; in an epoch's first step also the start of its workers.
    - `stocache/step/transfer_seconds`: moving the batch to the device.
    - `stocache/step/forward_seconds`: `training_step`, without other parts that run inside of it (as in manual
      optimisation).
    - `stocache/step/backward_seconds`: backward, with DDP's all-reduce and the recomputation of gradient checkpointing.
      A backward without `manual_backward` counts as forward.
    - `stocache/step/optimizer_seconds`: the optimisers' steps, clipping, the scaler of AMP, and `zero_grad`.
    - `stocache/step/rest_seconds`: everything else: callbacks, loggers, `on_after_batch_transfer`, schedulers.

    A step is one batch: if gradients are accumulated, most steps have no optimiser. At the end of `fit`, also after
    Ctrl-C, one line has the shares of the last epoch.

    On a CUDA device the parts are seconds of the device, measured by events in its stream. There waiting is the time in
    which the device is idle: less than the host waits if work is queued. The host waits for these events only at the
    end of an epoch. On other devices the parts are seconds of the host. Rank zero logs its own values; if it waits for
    another rank, that time is in backward, which ends when all ranks are ready.

    Example:
        >>> trainer = Trainer(callbacks=[StepTimer()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        """Mean seconds of each part, for each epoch of the last `fit`; those of rank zero, if it ran elsewhere."""
        self._number = next(_numbers)
        _timers[self._number] = self
        self._clock = StepClock()
        self._methods: list[tuple[Any, str, Any]] = []  # replaced methods: object, name, former attribute

    def clock(self, device: torch.device) -> StepClock:
        """The clock for a model on a device. Override it for a device with its own events."""
        return StepClock(cuda_moment if device.type == "cuda" else time.perf_counter)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock."""
        clock = self._clock = self.clock(trainer.strategy.root_device)
        self.epochs = []
        for owner, name, part, begins, ends in step_calls(trainer):
            method = getattr(owner, name)
            timed = partial(_call_timed, clock, part, begins, ends, method)
            self._methods.append((owner, name, vars(owner).get(name)))
            setattr(owner, name, update_wrapper(timed, method))  # Lightning looks for overrides in the inner one
        self.on_train_epoch_start(trainer, pl_module)  # which Lightning does not call in a resumed epoch

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the epoch with waiting, because its workers start."""
        if self._methods:
            self._clock.pause()
            self._clock.resume("wait")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """End the step."""
        self._clock.end_step()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop counting: validation belongs to no step."""
        self._clock.pause()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count again from the next step on."""
        if self._methods:
            self._clock.resume()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the means of the epoch."""
        if self._end_epoch():
            values = {f"stocache/step/{part}_seconds": mean for part, mean in self.epochs[-1].items()}
            log_epoch(trainer, values, trainer.loggers)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the shares of the last epoch's steps."""
        self._stop()
        self._say()
        vars(trainer.state)["stocache_step"] = _Returned(self._number, self.epochs)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the methods, because Lightning calls no `teardown` now. After Ctrl-C, print the shares, too.

        After any other error the clock is not read: each call of a device that has failed raises an error of its own.
        """
        was_running = bool(self._methods)
        self._stop()
        if was_running and isinstance(exception, KeyboardInterrupt):
            with suppress(RuntimeError):  # the device may have failed, too
                self._end_epoch()
                self._say()

    def _end_epoch(self) -> bool:
        """Note the means of an epoch. Returns whether the epoch had a step."""
        self._clock.pause()
        means = self._clock.take()
        if means:
            self.epochs.append(means)
        return bool(means)

    def _stop(self) -> None:
        self._clock.pause()
        while self._methods:
            owner, name, before = self._methods.pop()
            delattr(owner, name)
            if before is not None:
                setattr(owner, name, before)

    def _say(self) -> None:
        if self.epochs:
            last = self.epochs[-1]
            step = sum(last.values())
            shares = ", ".join(f"{part} {100 * seconds / step:.0f} %" for part, seconds in last.items())
            say(f"a training step took {1000 * step:.2f} ms in the last epoch: {shares}")


@dataclass
class _Returned:
    """The epochs of a timer on their way back from a process in which a strategy trains (`ddp_spawn`, `ddp_fork`).

    Of callbacks such a strategy brings nothing back, but it pickles the Trainer's state.
    """

    number: int
    epochs: list[dict[str, float]]

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self.number in _timers:
            _timers[self.number].epochs = self.epochs


def _call_timed(
    clock: StepClock, part: str, begins: bool, ends: bool, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call a method that begins or ends a part of the step."""
    if begins:
        clock.start(part)
    try:
        result = method(*args, **kwargs)
    except BaseException:
        if ends:
            with suppress(RuntimeError):  # of a device that has failed: the error of the method counts
                clock.stop(part)
        raise
    if ends:
        clock.stop(part)
    return result

"""Every private name of Lightning that the package uses. They are the same in Lightning 2.5.0 to 2.6.

- `trainer._accelerator_connector.use_distributed_sampler`: whether the Trainer leaves the user's samplers alone.
- `loop._data_source`: the source of loaders: a DataModule, a module, or the arguments of `fit`.
- `epoch_loop._on_before_fetch`, `_on_after_fetch`: the loop calls them before and after it asks for a batch.
- `epoch_loop._batches_that_stepped`: the number under which Lightning logs the values of a step, and
  `_should_accumulate`: whether the step goes on with the next batch.
- `call._call_callback_hooks`: calls a hook of each callback, and skips a hook that is None.

If a version of Lightning lacks a name, the feature that needs it is off, with one warning.
"""

from __future__ import annotations

import logging
import re
from functools import cache
from types import SimpleNamespace
from typing import Any

from lightning.pytorch import Callback
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import rank_zero_only

from lightning_stocache import console

__all__ = [
    "data_sources",
    "leaves_samplers_alone",
    "logged_step",
    "put_first",
    "say",
    "skip_empty_hooks",
    "step_calls",
    "step_under_way",
    "warn",
]

log = logging.getLogger(__name__)

_BATCH_HOOKS = [name for name in dir(Callback) if re.match("on_(before|after)_|.*_batch_", name)]


@rank_zero_only
def say(text: str) -> None:
    """Log a line for people on rank zero, above the progress bar."""
    console.say(text)


@rank_zero_only
def warn(text: str) -> None:
    """Log a warning on rank zero."""
    log.warning(text)


_warn_once = cache(warn)


def put_first(trainer: Any, callback: Any) -> None:
    """Make a callback the first of a Trainer, in a new list, because Lightning may iterate over the old list."""
    trainer.callbacks = [callback, *(other for other in trainer.callbacks if other is not callback)]


@cache
def _skips_none() -> bool:
    """Whether Lightning skips a hook that is None."""
    trainer: Any = SimpleNamespace(callbacks=[SimpleNamespace(hook=None)], lightning_module=None)
    call_hooks = getattr(call, "_call_callback_hooks", None)
    try:
        call_hooks(trainer, "hook")  # type: ignore[misc]
    except (AttributeError, TypeError):
        return False
    return True


def skip_empty_hooks(callback: Any) -> None:
    """Let Lightning skip the hooks of a batch that a callback does not define: to call one takes 2 us.

    A subclass may still define such a hook, and call `super()` in it.
    """
    for name in _BATCH_HOOKS:
        if getattr(type(callback), name) is getattr(Callback, name) and _skips_none():
            setattr(callback, name, None)


def leaves_samplers_alone(trainer: Any) -> bool:
    """Whether the Trainer was given `use_distributed_sampler=False`."""
    connector = getattr(trainer, "_accelerator_connector", None)
    wanted = getattr(connector, "use_distributed_sampler", None)
    if wanted is None and hasattr(trainer, "fit_loop"):
        _warn_once("this version of Lightning hides use_distributed_sampler=False: samplers are made for all ranks")
    return wanted is False


def logged_step(trainer: Any) -> int:
    """The step number under which Lightning logs values at an epoch's end: in a fit the step of the last batch."""
    if trainer.state.fn != "fit":
        return int(trainer.global_step)
    stepped = int(getattr(trainer.fit_loop.epoch_loop, "_batches_that_stepped", trainer.global_step))
    return stepped if trainer.validating else stepped - 1  # a batch is counted after the validation that follows it


def step_under_way(trainer: Any) -> int | None:
    """In `on_train_batch_end`: the number under which Lightning logs the step; None if gradients are accumulated."""
    loop = trainer.fit_loop.epoch_loop
    accumulates = getattr(loop, "_should_accumulate", lambda: False)
    if trainer.lightning_module.automatic_optimization and accumulates():
        return None
    return int(getattr(loop, "_batches_that_stepped", trainer.global_step - 1))


def step_calls(trainer: Any) -> list[tuple[Any, str, str, bool, bool]]:
    """The methods that make up a training step. Only the two of the loop are private.

    Returns:
        For each method its object, its name, the part of the step, and whether the call begins and ends that part.
    """
    loop = trainer.fit_loop.epoch_loop
    strategy = trainer.strategy
    if not (hasattr(loop, "_on_before_fetch") and hasattr(loop, "_on_after_fetch")):
        _warn_once("this version of Lightning hides when its loop waits for a batch: StepTimer times nothing")
        return []
    movers = [mover for mover in (trainer.lightning_module, trainer.datamodule) if mover is not None]
    return [
        (loop, "_on_before_fetch", "wait", True, False),
        (loop, "_on_after_fetch", "wait", False, True),
        *((mover, "transfer_batch_to_device", "transfer", True, True) for mover in movers),
        (strategy, "training_step", "forward", True, True),
        (strategy, "backward", "backward", True, True),
        (strategy, "optimizer_step", "optimizer", True, True),
    ]


def data_sources(trainer: Any, call: str) -> dict[str, Any]:
    """Lightning's data sources of a call ("fit", "validate", ...), by stage."""
    loops: dict[str, dict[str, Any]] = {
        "fit": {"train": trainer.fit_loop, "val": trainer.fit_loop.epoch_loop.val_loop},
        "validate": {"val": trainer.validate_loop},
        "test": {"test": trainer.test_loop},
        "predict": {"predict": trainer.predict_loop},
    }
    if not trainer.enable_validation:
        del loops["fit"]["val"]
    sources = {stage: getattr(loop, "_data_source", None) for stage, loop in loops[call].items()}
    if None in sources.values():
        _warn_once(
            "this version of Lightning hides where its loaders come from: nothing is cached. Make your loaders with "
            "CachedDataset and CachedLoader"
        )
        return {}
    return sources

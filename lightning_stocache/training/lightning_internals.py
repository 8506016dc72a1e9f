"""What is private of Lightning's and is used here, all of it, and what happens where a version has it no more.

- `trainer._accelerator_connector.use_distributed_sampler`: whether the user wants samplers left alone. Without it he is
  taken not to, with one warning.
- `loop._data_source`: the one place through which loaders of a DataModule, of a module and of `fit`'s arguments all
  come. Without it `StochasticCache` caches nothing, with one warning.
- `__pl_saved_args` and its relatives: from these Lightning makes a loader anew. Where it keeps none, there are none to
  be changed.
- `_SubprocessScriptLauncher`: the name of the launcher that starts ranks by the program's own command line. Under
  another name a sweep of such ranks is not refused.
- `epoch_loop._on_before_fetch`, `_on_after_fetch`: what Lightning calls before and after it asks the loaders for a
  batch. Without them `StepTimer` times nothing, with one warning.
- The logger behind `rank_zero_info`. Under another name a progress bar may be drawn over a line.

The names are the same from Lightning 2.5.0 to 2.6.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_stocache.console import PREFIX, above_bars

__all__ = [
    "ARGS",
    "ARG_NAMES",
    "DATASET",
    "KWARGS",
    "data_sources",
    "forget_loaders",
    "leaves_samplers_alone",
    "say",
    "starts_ranks_itself",
    "step_calls",
    "warn",
]

# Where Lightning keeps a loader's arguments (`lightning.fabric.utilities.data`).
ARGS, KWARGS, ARG_NAMES, DATASET = "__pl_saved_args", "__pl_saved_kwargs", "__pl_saved_arg_names", "__dataset"


def say(text: str) -> None:
    """Log a line on rank zero, above the progress bar."""
    with above_bars("lightning.pytorch.utilities.rank_zero"):
        rank_zero_info(f"{PREFIX}{text}")


def warn(text: str) -> None:
    """Warn on rank zero."""
    rank_zero_warn(f"{PREFIX}{text}")


_warn_once = cache(warn)


def leaves_samplers_alone(trainer: Any) -> bool:
    """Whether the Trainer was given `use_distributed_sampler=False`."""
    connector = getattr(trainer, "_accelerator_connector", None)
    wanted = getattr(connector, "use_distributed_sampler", None)
    if wanted is None and hasattr(trainer, "fit_loop"):
        _warn_once(
            "this version of Lightning does not show whether it was given use_distributed_sampler=False: samplers are "
            "made for all ranks, as by default"
        )
    return wanted is False


def step_calls(trainer: Any) -> list[tuple[Any, str, str, bool, bool]]:
    """The methods of which a training step is made, all but those of waiting public.

    Returns:
        Of each method its object, its name, the part of the step, and whether that begins and ends with a call.
    """
    loop, strategy = trainer.fit_loop.epoch_loop, trainer.strategy
    if not (hasattr(loop, "_on_before_fetch") and hasattr(loop, "_on_after_fetch")):
        _warn_once("this version of Lightning does not say when its loop waits for a batch: StepTimer times nothing")
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


def _loops(trainer: Any) -> dict[tuple[str, str], Any]:
    """The loops that read loaders, by call and stage; what Lightning calls a data source lies on them."""
    return {
        ("fit", "train"): trainer.fit_loop,
        ("fit", "val"): trainer.fit_loop.epoch_loop.val_loop,
        ("validate", "val"): trainer.validate_loop,
        ("test", "test"): trainer.test_loop,
        ("predict", "predict"): trainer.predict_loop,
    }


def data_sources(trainer: Any, call: str) -> dict[str, Any]:
    """Lightning's data sources for a call ("fit", "validate", ...), by the stage of the loaders that they give."""
    loops = {stage: loop for (of, stage), loop in _loops(trainer).items() if of == call}
    if call == "fit" and not trainer.enable_validation:
        del loops["val"]
    sources = {stage: getattr(loop, "_data_source", None) for stage, loop in loops.items()}
    if None in sources.values():
        _warn_once(
            "this version of Lightning does not show where its loaders come from: StochasticCache caches nothing. Use "
            "cache_datamodule or StocacheDataModule"
        )
        return {}
    return sources


def forget_loaders(trainer: Any) -> None:
    """Have the hook that `StochasticCache` has put on Lightning's data sources gone."""
    for loop in _loops(trainer).values():
        if (source := getattr(loop, "_data_source", None)) is not None:
            vars(source).pop("dataloader", None)


def starts_ranks_itself(trainer: Any) -> bool:
    """Whether the Trainer's strategy starts its ranks once, by the program's own command line, as `ddp` does."""
    return type(trainer.strategy.launcher).__name__ == "_SubprocessScriptLauncher"

"""The StochasticCache that `STOCACHE=...` adds to every Trainer of an application (`lightning_stocache.switch`).

The application does not know of it. So it does nothing where the application has a cache of its own, and it leaves
alone what the application reads or ships: its values go to TensorBoard, W&B and MLflow, not into
`trainer.callback_metrics` or other loggers; no hyperparameters are logged; a checkpoint that is saved between two
epochs has no state of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

import yaml
from lightning.pytorch import LightningModule, Trainer

from lightning_stocache.switch import SWITCH
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.lightning_internals import warn_once
from lightning_stocache.training.resume import ResumePoint

__all__ = ["SwitchedCache", "options_of", "switched_cache"]

_ON = ("1", "true", "on", "auto")
_TEXTS = ("name", "fingerprint", "dir", "store", "sampling")
_OPTIONS = tuple(name for name in inspect.signature(StochasticCache).parameters if name != "budget")


def options_of(variables: Mapping[str, str]) -> dict[str, Any] | None:
    """The arguments of StochasticCache in variables of the environment; None, after a warning, without the switch.

    Args:
        variables: `STOCACHE`, the budget, and `STOCACHE_<OPTION>`. Names and paths are taken as they are, other values
            are read as YAML. An empty one counts as unset.

    Raises:
        ValueError: a variable belongs to no option, or its value cannot be the option's.

    Example:
        >>> options_of({"STOCACHE": "60%", "STOCACHE_NAME": "photos", "STOCACHE_PREFILL": "true"})
        {'hyperparameters': False, 'budget': '60%', 'name': 'photos', 'prefill': True}
    """
    known = {f"{SWITCH}_{name.upper()}": name for name in _OPTIONS}
    options: dict[str, Any] = {"hyperparameters": False}
    for variable, text in variables.items():
        if variable == SWITCH:
            options["budget"] = "auto" if text.strip().lower() in _ON else text.strip()
        elif variable not in known:
            near = get_close_matches(variable, (SWITCH, *known), n=1, cutoff=0.0)
            raise ValueError(f"{variable} is no variable of lightning_stocache. Did you mean {near[0]}?")
        elif text.strip():
            options[known[variable]] = text if known[variable] in _TEXTS else _parsed(variable, text)
    if "budget" not in options:
        others = ", ".join(sorted(variables))
        warn_once(f"{others} is set, and {SWITCH} is not: nothing is cached. Set {SWITCH}=1, or a budget")
        return None
    try:
        StochasticCache(**options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{variable}={text!r}" for variable, text in sorted(variables.items()))
        raise ValueError(f"{error}. The variables are {given}") from None
    return options


def _parsed(variable: str, text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{variable}={text!r} is no YAML: {error}") from None


def switched_cache(options: Mapping[str, Any], *, is_other_package: bool) -> SwitchedCache:
    """The callback of the switch.

    Args:
        options: the arguments of StochasticCache.
        is_other_package: whether it is for a Trainer of `pytorch_lightning`.
    """
    if is_other_package:
        from lightning_stocache.training.other_package import SwitchedCacheOfOther

        return SwitchedCacheOfOther(**options)
    return SwitchedCache(**options)


class SwitchedCache(StochasticCache):
    """The StochasticCache of the switch. It gives way to every other one, and to a DataModule that caches."""

    is_guest: ClassVar[bool] = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Cache the loaders of the call, without a state in checkpoints between epochs."""
        super().setup(trainer, pl_module, stage)
        if self.caches_loaders:
            ResumePoint.of(trainer).leaves_ends = True

    @property
    def monitors(self) -> bool:
        """Whether this callback logs: it does not where nothing is cached."""
        return super().monitors and self.caches.has_slots

"""The switch: `STOCACHE=60% python train.py` caches the training of an application that nobody edits.

Lightning asks the entry points `lightning.pytorch.callbacks_factory` and `pytorch_lightning.callbacks_factory` for
callbacks in every `Trainer()`. The two functions here are such factories. They only look at the environment: where the
switch is off, a Trainer imports nothing else. The callback itself is in `training.switched`.
"""

from __future__ import annotations

import os
from functools import cache
from logging import getLogger
from typing import Any

__all__ = ["OFF", "SWITCH", "callbacks", "callbacks_of_pytorch_lightning"]

SWITCH = "STOCACHE"
"""The variable. Those of further options begin with it and an underscore."""

OFF = ("", "0", "false", "off")
"""Values of the variable that switch the cache off, in any case."""


def callbacks() -> list[Any]:
    """The callbacks that the environment asks for, for a Trainer of `lightning.pytorch`.

    Raises:
        ValueError: a variable has a value that its option cannot have, or belongs to no option.
    """
    return _callbacks(is_other_package=False)


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The same for a Trainer of the package `pytorch_lightning`, whose callbacks have a base class of their own.

    Raises:
        ValueError: a variable has a value that its option cannot have, or belongs to no option.
    """
    return _callbacks(is_other_package=True)


def _callbacks(*, is_other_package: bool) -> list[Any]:
    variables = {name: value for name, value in os.environ.items() if name == SWITCH or name.startswith(f"{SWITCH}_")}
    if not variables or variables.get(SWITCH, "on").strip().lower() in OFF:
        return []
    try:
        from lightning_stocache.training.switched import options_of, switched_cache
    except Exception as error:  # of another library, or of another version of one: the application trains without
        _warn_once(f"{type(error).__name__}: {error}")
        return []
    options = options_of(variables)
    if options is None:
        return []
    try:
        return [switched_cache(options, is_other_package=is_other_package)]
    except Exception as error:  # as above
        _warn_once(f"{type(error).__name__}: {error}")
        return []


@cache
def _warn_once(words: str) -> None:
    getLogger(__name__).warning("%s is set, and nothing is cached: %s", SWITCH, words)

"""The switch: `STOCACHE=60% python train.py` caches the training of an application that nobody edits.

Lightning asks the entry points `lightning.pytorch.callbacks_factory` and `pytorch_lightning.callbacks_factory` for
callbacks in every `Trainer()`. The two functions here are such factories. They only read variables: where the switch is
off, a Trainer imports nothing else. The callback itself is in `training.callbacks`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from logging import getLogger
from typing import Any

__all__ = ["callbacks", "callbacks_of_pytorch_lightning", "options_in"]

log = getLogger(__name__)

_SWITCH = "STOCACHE"
_OFF = ("", "0", "false", "off", "no")
_ON = ("1", "true", "on", "yes", "auto")
_LEAST = 1 << 20  # bytes that may be meant by a number without a unit
_TEXTS = ("name", "fingerprint", "dir", "store")  # options that are taken as they are typed


def callbacks() -> list[Any]:
    """The callbacks that the environment asks for, for a Trainer of `lightning.pytorch`.

    Raises:
        ValueError: a variable has a value that its option cannot have, or belongs to no option.
    """
    return _callbacks("callbacks", "SwitchedCache")


def callbacks_of_pytorch_lightning() -> list[Any]:
    """The callbacks that the environment asks for, for a Trainer of `pytorch_lightning`, which has its own base class.

    Raises:
        ValueError: a variable has a value that its option cannot have, or belongs to no option.
    """
    return _callbacks("other_package", "SwitchedCacheOfOther")


def _callbacks(module: str, kind: str) -> list[Any]:
    """The callback of a class, which is imported only if the switch is on."""
    variables = {
        name: text
        for name, text in os.environ.items()
        if name == _SWITCH or (name.startswith(f"{_SWITCH}_") and text.strip())
    }
    if not variables or variables.get(_SWITCH, "on").strip().lower() in _OFF:
        return []
    try:
        callback = getattr(import_module(f"lightning_stocache.training.{module}"), kind)
    except Exception as error:  # of another library, or of another version of one: the application trains without
        _warn_once("STOCACHE is set, and nothing is cached: %s", f"{type(error).__name__}: {error}")
        return []
    options = options_in(variables, callback)
    if _SWITCH not in variables:
        others = ", ".join(sorted(variables))
        _warn_once("%s is set, and STOCACHE is not: nothing is cached. Set STOCACHE=1, or a budget", others)
        return []
    try:
        return [callback(**options)]
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{variable}={text!r}" for variable, text in sorted(variables.items()))
        raise ValueError(f"{error}. The variables are {given}") from None


def options_in(variables: Mapping[str, str], kind: Any) -> dict[str, Any]:
    """The arguments of a class of callbacks in variables of the environment.

    Args:
        variables: `STOCACHE`, the budget or a mapping from stages to budgets, and `STOCACHE_<OPTION>`. Names and paths
            are taken as they are, other values are read as YAML. An empty one counts as unset.
        kind: the class.

    Raises:
        ValueError: a variable belongs to no option, its value is no YAML, or the budget is a few bytes.

    Example:
        >>> from lightning_stocache import StochasticCache
        >>> options_in({"STOCACHE": "60%", "STOCACHE_NAME": "photos", "STOCACHE_PREFILL": "true"}, StochasticCache)
        {'budget': '60%', 'name': 'photos', 'prefill': True}
    """
    from difflib import get_close_matches
    from inspect import signature

    import yaml

    parameters = signature(kind).parameters
    known = {_SWITCH: "budget"} | {f"{_SWITCH}_{name.upper()}": name for name in parameters if name != "budget"}
    options: dict[str, Any] = {}
    for variable, text in variables.items():
        if variable == f"{_SWITCH}_SAMPLING":  # of version 0.2
            raise ValueError(f"{variable} must be unset: on several nodes each sample goes to a node that has it")
        if variable not in known:
            names = {f"{_SWITCH}_BUDGET": _SWITCH} | {name: name for name in known}
            [nearest] = get_close_matches(variable.upper(), names, n=1, cutoff=0.0)
            raise ValueError(f"{variable} is no variable of lightning_stocache. Did you mean {names[nearest]}?")
        name = known[variable]
        if not text.strip():
            continue
        if name in _TEXTS:
            options[name] = text
        elif name == "budget" and not text.strip().startswith("{"):
            options[name] = _budget(text.strip())
        else:
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError as error:
                raise ValueError(f"{variable}={text!r} is no YAML: {error}") from None
            is_flag = parameters[name].annotation in (bool, "bool")
            options[name] = bool(value) if is_flag and value in (0, 1) else value
    return options


def _budget(text: str) -> str:
    if text.lower() in _ON:
        return "auto"
    if text.isdecimal() and 100 < int(text) < _LEAST:
        raise ValueError(f"{_SWITCH}={text} would be {text} bytes. Did you mean {_SWITCH}={text}MB?")
    return text


@cache
def _warn_once(words: str, *values: str) -> None:
    log.warning(words, *values)

"""The states of random number generators as plain values, which `==` compares; as text, for a checkpoint.

Text, because a checkpoint may be read where nothing but plain values is let in (`torch.load(weights_only=True)`), and
nothing in it is ever unpickled: the state of each is JSON, with bytes and arrays as hexadecimal digits.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

__all__ = ["PROCESS_WIDE", "as_text", "put_back", "restore", "states_of"]

PROCESS_WIDE: Mapping[str, Any] = {"torch": torch.default_generator, "numpy.random": np.random, "random": random}
"""The generators that all code of a process draws from; modules stand for those that are theirs."""


def states_of(generators: Mapping[str, Any]) -> dict[str, Any]:
    """The state of each generator, by its name; None for one that has none, as the system's.

    Args:
        generators: objects of `source.generators.KINDS`, or the modules of `PROCESS_WIDE`.
    """
    return {name: _state_of(generator) for name, generator in generators.items()}


def restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    """Put generators into states that `states_of` gave; of names that only one of both has, nothing is changed.

    Raises:
        ValueError, TypeError, KeyError: a state that is none, or of another kind of generator.
    """
    for name in generators.keys() & states.keys():
        _restore(generators[name], states[name])


def as_text(states: Mapping[str, Any]) -> dict[str, str]:
    """The states of generators as text, for a checkpoint.

    Example:
        >>> generators = {"mine": random.Random(7)}
        >>> state = as_text(states_of(generators))
        >>> drawn = generators["mine"].random()
        >>> put_back(generators, state)
        >>> generators["mine"].random() == drawn
        True
    """
    return {name: json.dumps(state) for name, state in states.items()}


def put_back(generators: Mapping[str, Any], texts: Mapping[str, str]) -> None:
    """Put generators into states that `as_text` gave, as `restore` does."""
    restore(generators, {name: json.loads(texts[name]) for name in generators.keys() & texts.keys()})


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    if isinstance(generator, np.random.Generator):
        return _plain(generator.bit_generator.state)
    if hasattr(generator, "get_state"):
        return _plain(generator.get_state(legacy=False))
    try:
        return generator.getstate()
    except NotImplementedError:  # random.SystemRandom, and what is made after it
        return None


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = _with_arrays(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(_with_arrays(state))
    elif state is not None and not isinstance(generator, random.SystemRandom):
        generator.setstate(_as_tuples(state))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return {"dtype": value.dtype.str, "bytes": value.tobytes().hex()}
    return value.item() if isinstance(value, np.generic) else value


def _as_tuples(state: Any) -> Any:
    """What was a tuple before it was text, which has lists alone."""
    return tuple(map(_as_tuples, state)) if isinstance(state, list | tuple) else state


def _with_arrays(state: Any) -> Any:
    if not isinstance(state, dict):
        return state
    if state.keys() == {"dtype", "bytes"}:
        return np.frombuffer(bytes.fromhex(state["bytes"]), state["dtype"])
    return {key: _with_arrays(item) for key, item in state.items()}

"""Batches of any library, made comparable: nested tuples of types, dtypes, shapes, bytes and attributes."""

import dataclasses
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch

__all__ = ["fingerprint"]


def fingerprint(value: Any) -> Any:
    """A value that equals another's fingerprint exactly if every bit, type and attribute of the two is equal."""
    kind = type(value).__qualname__
    if isinstance(value, torch.Tensor):
        plain = value.detach().as_subclass(torch.Tensor).contiguous()
        dense = plain.to_dense() if plain.layout != torch.strided else plain
        data = dense.reshape(-1).view(torch.uint8).numpy().tobytes()
        return kind, str(value.dtype), tuple(value.shape), data, fingerprint(vars(value))
    if isinstance(value, np.ndarray):
        content = value.tolist() if value.dtype.hasobject else value.tobytes()
        return kind, str(value.dtype), value.shape, content
    if isinstance(value, np.generic):
        return kind, str(value.dtype), value.tobytes()
    if value is None or isinstance(value, str | bytes | int | float | complex | Enum | slice | type | torch.dtype):
        return kind, repr(value)  # nan is not equal to itself, its text is
    if callable(getattr(value, "to_dict", None)):  # TensorDict, Data and Batch of PyG
        return kind, fingerprint(value.to_dict())
    if isinstance(value, Mapping):
        # MONAI notes the address of a transform as its id
        items = [(key, fingerprint(item)) for key, item in value.items() if not (key == "id" and "class" in value)]
        return kind, tuple(items)
    if isinstance(value, list | tuple):
        return kind, tuple(map(fingerprint, value))
    if hasattr(value, "tobytes"):  # an image of PIL
        return kind, value.mode, value.size, value.tobytes()
    if dataclasses.is_dataclass(value) or hasattr(value, "__dict__"):
        return kind, fingerprint(vars(value))
    raise TypeError(f"no fingerprint of a {type(value)}")

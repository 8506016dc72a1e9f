"""The identity of a source, in words that other processes and other jobs can compare."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import module_name

__all__ = ["class_name", "identity"]


def class_name(source: Any) -> str:
    """The class of a source, with its module."""
    return f"{module_name(type(source).__module__)}.{type(source).__qualname__}"


def identity(source: Dataset[Any]) -> str:
    """The class of a source; for a Subset also a digest of its indices, which tells two random splits apart.

    Example:
        >>> identity(Subset("abc", [2, 0]))
        'Subset b1535c7783ea8829 of builtins.str'
    """
    if type(source) is Subset:
        if isinstance(source.indices, range):  # perhaps a long one
            content = str(source.indices).encode()
        else:
            content = torch.as_tensor(list(source.indices), dtype=torch.int64, device="cpu").numpy().tobytes()
        digest = hashlib.sha256(content).hexdigest()[:16]
        return f"Subset {digest} of {identity(source.dataset)}"
    return class_name(source)

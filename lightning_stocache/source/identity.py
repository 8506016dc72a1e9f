"""The identity of a source, in words and digests that other processes and other jobs can compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset

from lightning_stocache.cache.codec import module_name
from lightning_stocache.source.samples import mark_of

__all__ = ["class_name", "data_digest", "identity"]

_ENDS = 8  # items at either end of a container
_DEEP = 4  # datasets inside each other


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
        indices = torch.as_tensor(list(source.indices), dtype=torch.int64, device="cpu")
        digest = hashlib.sha256(indices.numpy().tobytes()).hexdigest()[:16]
        return f"Subset {digest} of {identity(source.dataset)}"
    return class_name(source)


def data_digest(source: Any) -> str:
    """A digest of the class and of the lists, arrays and tensors in the attributes, through the datasets inside.

    Of a container only the size and the ends count, because it may be large.

    Example:
        >>> halves = [Subset(range(10), range(rank, 10, 2)) for rank in (0, 1)]
        >>> data_digest(halves[0]) == data_digest(halves[1]), data_digest(range(10)) == data_digest(range(10))
        (False, True)
    """
    digest = hashlib.sha256()
    with suppress(Exception):  # an object of the user's that only looks like a list, for instance
        for part in _parts(source, _DEEP):
            digest.update(part.encode(errors="replace") + b"\0")
    return digest.hexdigest()


def _parts(node: Any, deep: int) -> Iterator[str]:
    yield class_name(node)
    if isinstance(node, torch.Tensor | np.ndarray):
        ends = [node[:_ENDS], node[-_ENDS:]] if node.ndim else node
        yield f"{tuple(node.shape)} {mark_of(ends)}"
    elif isinstance(node, list | tuple | range):
        yield str(len(node))
        for item in (*node[:_ENDS], *node[-_ENDS:]):
            if isinstance(item, str | bytes | int | float):
                yield repr(item)
            elif deep:
                yield from _parts(item, deep - 1)
    elif deep and isinstance(getattr(node, "__dict__", None), dict):
        for name, value in sorted(vars(node).items()):
            if isinstance(value, torch.Tensor | np.ndarray | list | tuple | range | Dataset):
                yield name
                yield from _parts(value, deep - 1)

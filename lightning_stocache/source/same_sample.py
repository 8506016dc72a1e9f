"""Whether two samples are the same, of which another job, on another machine perhaps, has read one.

They are compared as a user has them, never as pickles: sets and dicts have no order. Floating-point numbers may differ
in their last bits, for another processor or decoder may have computed them.
"""

from __future__ import annotations

from types import BuiltinFunctionType, FunctionType
from typing import Any

import numpy as np
import torch

from lightning_stocache.source.probe import bits, is_pil

__all__ = ["same_sample"]

_DEEP = 16  # objects inside each other that are looked into
_LAST_BITS = 16  # differences that count for nothing, as multiples of what the last bit of the largest number is worth
_LAST_BITS_OF_HALF = 2
_LAST_BIT = 2**-23  # of 1.0 in 32 bits: a number of 64 bits may have been computed from such
_PLAIN = (str, bytes, int, bool, type(None))


def same_sample(left: Any, right: Any) -> bool:
    """Whether two samples are the same, but for the last bits of floating-point numbers.

    Example:
        >>> same_sample({"x": 0.1 + 0.2, "tags": {"a", "b"}}, {"x": 0.3, "tags": {"b", "a"}}), same_sample([1], [2])
        (True, False)
    """
    return bits(left) == bits(right) or _alike(left, right, _DEEP)


def _alike(left: Any, right: Any, deep: int) -> bool:
    """Whether two objects are the same, as far as that can be told."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor | np.ndarray | np.generic | float | complex):
        return bits(left) == bits(right) or _is_near(left, right)
    if isinstance(left, set | frozenset):
        return bool(left == right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key], deep - 1) for key in left)
    ours, theirs = _parts(left), _parts(right)
    if ours is None or theirs is None:
        return bits(left) == bits(right)
    pairs = zip(ours, theirs, strict=False)
    return len(ours) == len(theirs) and (not deep or all(_alike(*pair, deep - 1) for pair in pairs))


def _parts(node: Any) -> list[Any] | None:
    """What an object is made of, as it says to who copies or pickles it; None if it is in one piece."""
    if isinstance(node, list | tuple):
        return list(node)
    if type(node) in _PLAIN or isinstance(node, type | FunctionType | BuiltinFunctionType) or is_pil(node):
        return None
    try:
        make, arguments, state, items, pairs = (*node.__reduce_ex__(4), None, None, None)[:5]
    except Exception:  # it is a name, or cannot be taken apart
        return None
    return [make, *arguments, state, *(items or ()), *(pairs or ())]


def _is_near(left: Any, right: Any) -> bool:
    """Whether two floating-point numbers, arrays or tensors of them differ in their last bits alone."""
    if isinstance(left, torch.Tensor):
        if left.dtype != right.dtype or not (left.is_floating_point() or left.is_complex()):
            return False
        eps = torch.finfo(left.dtype).eps
        tensors = (node.detach().as_subclass(torch.Tensor).cpu() for node in (left, right))
        left, right = (node.to(torch.complex128).numpy() for node in tensors)
    else:
        left, right = np.asarray(left), np.asarray(right)
        if left.dtype != right.dtype or left.dtype.kind not in "fc":
            return False
        eps = float(np.finfo(left.dtype).eps)
    largest = np.abs(left[np.isfinite(left)]).max(initial=0)
    allowed = largest * (_LAST_BITS_OF_HALF * eps if eps > _LAST_BIT else _LAST_BITS * _LAST_BIT)
    return left.shape == right.shape and np.allclose(left, right, rtol=0, atol=allowed, equal_nan=True)

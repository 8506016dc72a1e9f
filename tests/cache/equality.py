"""Whether two samples of any kind are equal, bit for bit."""

import collections
import enum
from typing import Any

import numpy as np
import torch
from PIL import Image


def same(left: Any, right: Any, met: dict[int, int] | None = None) -> bool:
    """Whether two samples are equal bit for bit: types, order, attributes, strides, and what is there twice."""
    met = {} if met is None else met
    if id(left) in met:
        return met[id(left)] == id(right)
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple, dict, torch.Tensor, np.ndarray, Image.Image)) or hasattr(left, "__dict__"):
        met[id(left)] = id(right)
    if isinstance(left, torch.Tensor):
        return same_tensors(left, right) and same(vars(left), vars(right), met)
    if isinstance(left, np.ndarray):
        # NumPy 1 gives a pickled dtype of times an empty dict of metadata where there was none.
        if (left.dtype, left.dtype.metadata or None) != (right.dtype, right.dtype.metadata or None):
            return False
        if left.shape != right.shape:
            return False
        # The lists live shortly, and another object may get their id: what has been met is theirs alone.
        return same(left.tolist(), right.tolist(), {}) if left.dtype.hasobject else left.tobytes() == right.tobytes()
    if isinstance(left, Image.Image):
        return (
            (left.mode, left.size, left.tobytes()) == (right.mode, right.size, right.tobytes())
            and same(left.info, right.info, met)
            and (left.palette is None) == (right.palette is None)
            and (left.palette is None or left.getpalette("RGBA") == right.getpalette("RGBA"))
        )
    if isinstance(left, (dict, collections.UserDict)):
        return list(left) == list(right) and all(same(left[key], right[key], met) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair, met) for pair in zip(left, right, strict=True))
    if isinstance(left, (float, complex, np.generic)):
        return np.asarray(left).dtype == np.asarray(right).dtype and np.asarray(left).tobytes() == (
            np.asarray(right).tobytes()
        )
    if isinstance(left, (type, enum.Enum)):
        return left is right
    if hasattr(left, "__dict__"):
        return same(vars(left), vars(right), met)
    return bool(left == right)


def same_tensors(left: torch.Tensor, right: torch.Tensor) -> bool:
    if type(left) is not torch.Tensor:
        left, right = left.as_subclass(torch.Tensor), right.as_subclass(torch.Tensor)
    if (left.dtype, left.layout, left.is_nested) != (right.dtype, right.layout, right.is_nested):
        return False
    if left.is_nested:
        return left.size(0) == right.size(0) and all(map(same_tensors, left.unbind(), right.unbind()))
    if left.layout is not torch.strided:
        return torch.equal(left.to_dense(), right.to_dense())
    if left.is_quantized:
        return bool(torch.equal(left, right))
    dense = left.numel() and is_dense(left) and is_dense(right)
    if left.shape != right.shape or (dense and strides(left) != strides(right)):
        return False
    return bits(left) == bits(right)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor has every byte between its first and last byte exactly once."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return last + 1 == tensor.numel() and min(tensor.stride(), default=1) > 0


def strides(tensor: torch.Tensor) -> list[int]:
    """The strides of dimensions with more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""

"""Leaves of samples of every sort, samples of any nesting, and whether two samples are equal, bit for bit."""

import collections
import enum
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

_NAMES = """bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]  # the last one came with torch 2.7


def leaves_of(number: int, size: int = 16) -> dict[str, Any]:
    """A leaf of every sort that fixed fields may have, others for each number, with all patterns of bits."""
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(0, 256, (4, 6, size), dtype=torch.uint8, generator=generator)
    of_dtypes = {str(dtype): (bits % 2 if dtype == torch.bool else bits.clone()).view(dtype) for dtype in DTYPES}
    return of_dtypes | {
        "strided": bits.clone().permute(2, 0, 1)[:, ::2],
        "expanded": bits[:1, :1].clone().expand(4, 6, size),
        "conjugate": bits.to(torch.float32).view(torch.complex64).conj(),
        "negative": bits.to(torch.float32).view(torch.complex64).conj().imag,
        "Image": tv_tensors.Image(bits.clone()[..., :3].permute(2, 0, 1)),
        "Video": tv_tensors.Video(bits.clone()[..., None]),
        "Mask": tv_tensors.Mask(bits[0] > 99),
        "Parameter": torch.nn.Parameter(bits.to(torch.float32), requires_grad=False),
        "scalar": torch.tensor(number, dtype=torch.int16),
        "nothing": torch.zeros(3, 0),
        "array": bits.numpy().copy().view(np.float32).T,
        "reversed": bits.numpy().copy()[::2, ::-1],
        "long double": np.arange(3, dtype=np.longdouble) + number,
        "foreign": bits.numpy().copy().view(">i2"),
        "date": np.array([number, 5], "M8[s]"),
        "scalar array": np.array(number),
        "float32": np.float32(number),
        "bool_": np.bool_(number % 2),
        "uint64": np.uint64(2**64 - 1 - number),
        "complex64": np.complex64(number - 2j),
        "empty array": np.zeros((0, 3)),
        "int": 2**63 - 1 - number,
        "float": float("nan") if number == 1 else number / 3,
        "complex": complex(number, -0.0),
        "bool": bool(number % 2),
        "None": None,
    }


class Box(torch.Tensor):
    """A tensor of a class of its own, as torchvision's."""


class Pair(NamedTuple):
    image: Any
    label: Any


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any order of its dimensions in memory."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3)) + draw(st.sampled_from([[], [], [400]]))
    dtype = draw(st.sampled_from([torch.uint8, torch.float32, torch.bfloat16, torch.int64, torch.complex64]))
    count = int(np.prod(shape))
    tensor = torch.arange(count % 251, count % 251 + count).view(shape).to(dtype)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    return tensor.as_subclass(Box) if draw(st.booleans()) else tensor


@st.composite
def arrays(draw: st.DrawFn, *more: str) -> npt.NDArray[Any]:
    """An array of any order of its dimensions in memory, of numbers or of these dtypes, too."""
    shape = draw(st.lists(st.integers(0, 5), max_size=3)) + draw(st.sampled_from([[], [], [1500]]))
    dtype = draw(st.sampled_from(["u1", ">i4", "f8", "?", "M8[s]", *more]))
    array = np.arange(int(np.prod(shape))).astype(dtype).reshape(shape)
    return array.transpose(draw(st.permutations(range(len(shape)))))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers of these parts."""
    keys = st.text(max_size=3) | st.integers() | st.tuples(st.integers(), st.text(max_size=1))
    return (
        st.lists(inner, max_size=5)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
    )


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
        facts, others = ((array.shape, array.dtype, array.dtype.metadata or None) for array in (left, right))
        if facts != others:
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
        one, other = np.asarray(left), np.asarray(right)
        return (one.dtype, one.tobytes()) == (other.dtype, other.tobytes())
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
    orders = order(left), order(right)
    if left.shape != right.shape or (None not in orders and orders[0] != orders[1]):
        return False
    return bits(left) == bits(right)


def order(tensor: torch.Tensor) -> list[int] | None:
    """The strides of dimensions with more than one element, if each byte from the first to the last is there once."""
    strides = [(size - 1, stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
    last = sum(steps * stride for steps, stride in strides)
    is_dense = last + 1 == tensor.numel() and min(tensor.stride(), default=1) > 0
    return [stride for _, stride in strides] if is_dense else None


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""

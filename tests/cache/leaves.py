"""Leaves of samples of every sort, and samples of any nesting, for the codecs of rows and of records."""

from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from hypothesis import strategies as st
from torchvision import tv_tensors

_NAMES = """bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"""
DTYPES = [getattr(torch, name) for name in _NAMES.split() if hasattr(torch, name)]  # the last one came with torch 2.7


def leaves_of(number: int, size: int = 16) -> dict[str, Any]:
    """A leaf of every sort that fixed fields may have, others for each number, with all patterns of bits."""
    generator = torch.Generator().manual_seed(number)
    bits = torch.randint(0, 256, (4, 6, size), dtype=torch.uint8, generator=generator)
    of_dtypes = {str(dtype): (bits % 2 if dtype == torch.bool else bits).view(dtype) for dtype in DTYPES}
    return of_dtypes | {
        "strided": bits.permute(2, 0, 1)[:, ::2],
        "expanded": bits[:1, :1].expand(4, 6, size),
        "conjugate": bits.to(torch.float32).view(torch.complex64).conj(),
        "negative": bits.to(torch.float32).view(torch.complex64).conj().imag,
        "Image": tv_tensors.Image(bits[..., :3].permute(2, 0, 1)),
        "Video": tv_tensors.Video(bits[..., None]),
        "Mask": tv_tensors.Mask(bits[0] > 99),
        "Parameter": torch.nn.Parameter(bits.to(torch.float32), requires_grad=False),
        "scalar": torch.tensor(number, dtype=torch.int16),
        "nothing": torch.zeros(3, 0),
        "array": bits.numpy().view(np.float32).T,
        "reversed": bits.numpy()[::2, ::-1],
        "long double": np.arange(3, dtype=np.longdouble) + number,
        "foreign": bits.numpy().view(">i2"),
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

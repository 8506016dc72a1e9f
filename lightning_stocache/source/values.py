"""What bytes stand for (the values of an LMDB, a file), and how a sample is made of them. Nothing is unpickled."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

__all__ = ["Decode", "decoder_of", "image_of", "tensor_of"]

Decode = Callable[[bytes], Any]
"""Makes a sample of the bytes of a value."""


def decoder_of(kind: str | None, dtype: torch.dtype | str | None, shape: Sequence[int] | None) -> Decode:
    """What makes a sample of the bytes of a value.

    Args:
        kind: what the value is, as LMDBSource has it; None: an image, or a tensor where there is a dtype.
        dtype: of a tensor.
        shape: of a tensor; None: one dimension, as long as the value is.

    Raises:
        ValueError: there is no such kind, or a tensor has no dtype.
        ModuleNotFoundError: safetensors is not installed.

    Example:
        >>> decoder_of("json", None, None)(b'{"label": 3}'), decoder_of(None, "int16", [2])(bytes(4))
        ({'label': 3}, tensor([0, 0], dtype=torch.int16))
    """
    if dtype is not None or shape is not None or kind == "tensor":
        if kind not in (None, "tensor") or dtype is None:
            raise ValueError(f"a tensor needs dtype= (and shape=, if it has one), got {kind=}, {dtype=}, {shape=}")
        named = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
        if not isinstance(named, torch.dtype):
            raise ValueError(f"dtype must be one of torch's, such as 'uint8' or torch.float32, got {dtype!r}")
        return partial(tensor_of, dtype=named, shape=None if shape is None else tuple(map(int, shape)))
    if (decode := _DECODERS.get(kind or "image")) is None:
        raise ValueError(f"kind must be one of {', '.join((*_DECODERS, 'tensor'))}, got {kind!r}")
    if kind == "safetensors" and find_spec("safetensors") is None:
        raise ModuleNotFoundError('kind="safetensors" needs that package: pip install "lightning-stocache[lmdb]"')
    return decode


def tensor_of(content: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int] | None) -> torch.Tensor:
    """A tensor with a copy of those bytes; without a shape it has one dimension, as long as they are.

    Raises:
        ValueError: it takes more bytes, or fewer.
    """
    tensor = torch.empty((len(content) // dtype.itemsize,) if shape is None else tuple(shape), dtype=dtype)
    if tensor.nbytes != len(content):
        raise ValueError(f"a tensor of {dtype} and shape {tuple(tensor.shape)} takes {tensor.nbytes} bytes")
    if content:
        np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(content, np.uint8))
    return tensor


def image_of(content: bytes | memoryview, form: str = "rgb") -> Any:
    """The image that a file holds.

    Args:
        content: of the file.
        form: `rgb`, an image of PIL in RGB; `tensor`, uint8 of shape (channels, height, width), by torchvision.
    """
    if form == "tensor":
        from torchvision.io import decode_image

        return decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    from PIL import Image

    return Image.open(io.BytesIO(content)).convert("RGB")


def _safetensors(content: bytes) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    return load(content)


_DECODERS: dict[str, Decode] = {
    "image": image_of,
    "bytes": bytes,
    "text": bytes.decode,
    "json": json.loads,
    "safetensors": _safetensors,
}

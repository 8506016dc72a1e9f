"""A sample as bytes and back without a pickle: an LMDB is passed on, and unpickling runs any code.

Layout: crc32 of everything behind it (`<I`), size of the header (`<I`), the header, the leaves one after the other.

The header is JSON: `[index, sample, leaf sizes]`. None, bools, ints, finite floats, strings and lists stand for
themselves in `sample`. Everything else is an object whose first key is its kind: `tuple`, `dict` (a list of pairs),
`float` (bits of an infinity or a NaN), `image` (mode, size, palette, transparency and pixels of a PIL image), and, with
the number of its leaf, `bytes`, `tensor`, `array`, `scalar` (of NumPy) and `file` (an encoded image).

A damaged blob is an error, never a sample. The index reveals a blob that lies under another sample's key.
"""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stocache.cache.codec import UnsupportedSampleError, memory_of, type_name
from lightning_stocache.cache.records import is_image, written
from lightning_stocache.source.samples import Path

__all__ = ["EncodedFile", "decode_blob", "encode_blob", "image_of", "tensor_of"]

_HEAD = struct.Struct("<II")
_ARRAY_KINDS = "biufcSUmM"
_TV_TENSORS = ("Image", "Mask", "Video")  # those that have no attributes
_CAN_BE_PACKED = (
    "What can be packed: dense tensors of the CPU, arrays, numbers, strings, bytes, None and images of PIL, in dicts "
    "(with strings or ints as keys), lists and tuples"
)


class EncodedFile(NamedTuple):
    """An image as its file.

    Args:
        content: the bytes of the file.
        form: how `image_of` opens it, "rgb" or "tensor".
    """

    content: bytes
    form: str


def encode_blob(sample: Any, index: int) -> bytes:
    """A sample as a blob.

    Raises:
        UnsupportedSampleError: it holds something that cannot be packed; the message says where.

    Example:
        >>> blob = encode_blob({"image": torch.zeros(2, dtype=torch.bfloat16), "label": 3}, 0)
        >>> decode_blob(blob, 0)
        {'image': tensor([0., 0.], dtype=torch.bfloat16), 'label': 3}
    """
    leaves: list[Any] = []
    node = _node(sample, (), leaves)
    header = json.dumps([index, node, list(map(len, leaves))], separators=(",", ":")).encode()
    checksum = zlib.crc32(header, zlib.crc32(_HEAD.pack(0, len(header))[4:]))
    for leaf in leaves:
        checksum = zlib.crc32(leaf, checksum)
    return b"".join([_HEAD.pack(checksum, len(header)), header, *leaves])


def decode_blob(content: bytes | memoryview, index: int) -> Any:
    """The sample of a blob, in memory of its own.

    Raises:
        ValueError: these bytes are no blob, are damaged, or belong to another index.
        Exception: another program has written them, with a checksum that is right.
    """
    view = memoryview(content)
    if len(view) < _HEAD.size or zlib.crc32(view[4:]) != _HEAD.unpack_from(view)[0]:
        raise ValueError("they are no packed sample, or are damaged")
    end = _HEAD.size + _HEAD.unpack_from(view)[1]
    found, node, sizes = json.loads(bytes(view[_HEAD.size : end]))
    if found != index:
        raise ValueError(f"here lies sample {found}")
    leaves = []
    for size in sizes:
        leaves.append(view[end : end + size])
        end += size
    return _decoded(node, leaves)


def _node(value: Any, path: Path, leaves: list[Any]) -> Any:
    """A value as JSON. Its bytes are appended to the leaves; `path` says where it lies in the sample."""
    kind = type(value)
    if value is None or kind in (bool, int, str) or (kind is float and math.isfinite(value)):
        return value
    if kind is float:
        return {"float": struct.pack(">d", value).hex()}
    if kind in (list, tuple):
        items = [_node(item, (*path, at), leaves) for at, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if kind is dict and all(type(key) in (str, int) for key in value):
        return {"dict": [[key, _node(item, (*path, key), leaves)] for key, item in value.items()]}
    if is_image(kind):
        with_palette = value.mode in ("P", "PA")
        palette = [value.palette.mode, value.getpalette(value.palette.mode)] if with_palette else None
        parts = (value.mode, value.size, palette, value.info.get("transparency"), value.tobytes())
        return {"image": _node(parts, path, leaves)}
    node: dict[str, Any]
    if kind is bytes:
        node, content = {"bytes": len(leaves)}, value
    elif kind is EncodedFile:
        node = {"file": len(leaves), "form": value.form}
        content = value.content
    elif (kind is np.ndarray or isinstance(value, np.generic)) and value.dtype.kind in _ARRAY_KINDS:
        name = "array" if kind is np.ndarray else "scalar"
        node = {name: len(leaves), "dtype": value.dtype.str, "shape": value.shape}
        content = value.tobytes()
    elif isinstance(value, torch.Tensor) and _is_plain(value):
        node = {"tensor": len(leaves), "dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        node |= {} if kind is torch.Tensor else {"class": kind.__name__}
        content = memory_of(value.as_subclass(torch.Tensor)).data
    else:
        what = f"a {type_name(kind)}" + (f" of {value.dtype}" if hasattr(value, "dtype") else "")
        raise UnsupportedSampleError(f"sample{written(path)} is {what}, which cannot be packed. {_CAN_BE_PACKED}")
    leaves.append(content)
    return node


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and bytes are all that a tensor consists of."""
    kind = type(tensor)
    is_vision = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in _TV_TENSORS
    is_dense = tensor.layout is torch.strided and tensor.is_cpu and not (tensor.is_quantized or tensor.is_nested)
    return (kind is torch.Tensor or is_vision) and is_dense and not tensor.requires_grad


def _decoded(node: Any, leaves: list[memoryview]) -> Any:
    if type(node) is list:
        return [_decoded(item, leaves) for item in node]
    if type(node) is not dict:
        return node
    kind, value = next(iter(node.items()))
    if kind == "tuple":
        return tuple(_decoded(item, leaves) for item in value)
    if kind == "dict":
        return {key: _decoded(item, leaves) for key, item in value}
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if kind == "image":
        return _image(*_decoded(value, leaves))
    content = leaves[value]
    if kind == "bytes":
        return bytes(content)
    if kind == "file":
        return image_of(content, node["form"])
    if kind == "tensor":
        tensor = tensor_of(content, getattr(torch, node["dtype"]), node["shape"])
        if "class" not in node:
            return tensor
        from torchvision import tv_tensors

        return tensor.as_subclass(getattr(tv_tensors, node["class"]))
    if (dtype := np.dtype(node["dtype"])).kind not in _ARRAY_KINDS:  # of objects, the bytes would be addresses
        raise ValueError(f"an array has dtype {dtype}")
    array = np.ndarray(node["shape"], dtype, bytearray(content))
    return array if kind == "array" else array[()]


def _image(mode: str, size: tuple[int, int], palette: Any, transparency: Any, pixels: bytes) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, pixels)
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    if transparency is not None:
        image.info["transparency"] = transparency
    return image


def tensor_of(content: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int] | None) -> torch.Tensor:
    """A tensor with a copy of some bytes; without a shape it has one dimension.

    Raises:
        ValueError: dtype and shape take another number of bytes.
    """
    size = (len(content) // dtype.itemsize,) if shape is None else tuple(shape)
    tensor = torch.empty(size, dtype=dtype, device="cpu")
    if tensor.nbytes != len(content):
        raise ValueError(f"a tensor of {dtype} and shape {tuple(tensor.shape)} takes {tensor.nbytes} bytes")
    if content:
        np.copyto(tensor.reshape(-1).view(torch.uint8).numpy(), np.frombuffer(content, np.uint8))
    return tensor


def image_of(content: bytes | memoryview, form: str = "rgb") -> Any:
    """The image of a file: by form `rgb` a PIL image in RGB, by `tensor` uint8 of shape (channels, height, width)."""
    if form == "tensor":
        from torchvision.io import decode_image

        return decode_image(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    from PIL import Image

    Image.init()
    formats = [name for name in Image.ID if name != "EPS"]  # PIL runs Ghostscript, a program, on the content of an EPS
    return Image.open(io.BytesIO(content), formats=formats).convert("RGB")

"""A sample as one safetensors blob, and back, without a pickle.

Layout, that of safetensors: eight bytes of length, a header in JSON, data. The header begins with `__metadata__`:

    crc32    eight hex digits: of all bytes of the blob but these and what stands between them and the length
    index    of the sample, so that a blob that lies under another's key is found out
    sample   the sample in JSON, with a node in place of each leaf that lies in the data

None, bools, ints, finite floats, strings and lists stand for themselves in `sample`. The others are objects whose first
key says what they are: `tuple`, `dict` (a list of pairs, in their order), `float` (the bits of an infinity or a NaN),
and, with the number of the part of the data that holds the bytes, `tensor`, `array`, `scalar` (of NumPy), `bytes`,
`image` (of PIL, as its pixels) and `file` (an encoded image, and what is made of it).

Every leaf is one tensor of the blob, under its number: whoever has safetensors reads it by `safetensors.torch.load`.
Types that safetensors does not know lie there as bytes. A blob that is damaged anywhere is an error, never a sample.
"""

from __future__ import annotations

import json
import math
import struct
import sys
import zlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.source.probe import is_pil
from lightning_stocache.source.values import image_of, tensor_of

__all__ = ["BlobError", "EncodedFile", "decode_blob", "encode_blob"]

_BEGIN = b'{"__metadata__":{"crc32":"'
_SUM = slice(8 + len(_BEGIN), 16 + len(_BEGIN))
_MOST_LEVELS = 64  # of containers in each other: one that holds itself has no end
_NAMES = {
    **{"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32"},
    **{"int16": "I16", "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL"},
}
_ARRAY_KINDS = "biufcSUmM"
_TV_TENSORS = ("Image", "Mask", "Video")  # those that carry nothing beside their values


class BlobError(ValueError):
    """Bytes that are no blob of this package, or a damaged one."""


class EncodedFile(NamedTuple):
    """An image as its file.

    Args:
        content: of the file.
        form: what is made of it: `rgb`, an image of PIL in RGB; `tensor`, uint8 of shape (channels, height, width).
    """

    content: bytes
    form: str


def encode_blob(sample: Any, index: int) -> bytes:
    """A sample as a blob.

    Args:
        sample: tensors of the CPU, arrays and scalars of NumPy, images of PIL, None, numbers, strings and bytes, by
            themselves or in dicts, lists and tuples.
        index: of the sample.

    Raises:
        UnsupportedSampleError: it holds something else; the message says where.

    Example:
        >>> blob = encode_blob({"image": torch.zeros(2, dtype=torch.bfloat16), "label": 3}, 0)
        >>> decode_blob(blob, 0)
        {'image': tensor([0., 0.], dtype=torch.bfloat16), 'label': 3}
        >>> encode_blob({"when": [object()]}, 0)
        Traceback (most recent call last):
            ...
        lightning_stocache.cache.codec.UnsupportedSampleError: sample['when'][0] is an object, which cannot be packed
    """
    encoder = _Encoder()
    sample_json = json.dumps(encoder.node(sample, ""), separators=(",", ":"))
    rest = f'","index":"{index}","sample":{json.dumps(sample_json)}}}'
    end = 0
    for number, part in enumerate(encoder.parts):
        begin, end = end, end + len(part.content)
        shape = json.dumps(part.shape, separators=(",", ":"))
        rest += f',"{number}":{{"dtype":"{part.dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}'
    header = rest.encode() + b"}"
    header += b" " * (-(len(_BEGIN) + 8 + len(header)) % 8)
    length = struct.pack("<Q", len(_BEGIN) + 8 + len(header))
    total = zlib.crc32(header, zlib.crc32(length))
    for part in encoder.parts:
        total = zlib.crc32(part.content, total)
    return b"".join((length, _BEGIN, b"%08x" % total, header, *(part.content for part in encoder.parts)))


def decode_blob(content: bytes | memoryview, index: int) -> Any:
    """The sample of a blob; its memory is the sample's own.

    Raises:
        BlobError: these bytes are no blob, not that of this index, or not what was written.
    """
    view = memoryview(content)
    if len(view) < _SUM.stop or view[8 : _SUM.start] != _BEGIN:
        raise BlobError(f"these {len(view)} bytes are no packed sample")
    if bytes(view[_SUM]) != b"%08x" % zlib.crc32(view[_SUM.stop :], zlib.crc32(view[:8])):
        raise BlobError(f"these {len(view)} bytes are damaged: their checksum is another")
    begin = 8 + struct.unpack("<Q", view[:8])[0]
    header = json.loads(bytes(view[8:begin]))
    known = header.pop("__metadata__")
    if known["index"] != str(index):
        raise BlobError(f"here lies sample {known['index']}, not {index}")
    parts = [view[begin + part["data_offsets"][0] : begin + part["data_offsets"][1]] for part in header.values()]
    return _decoded(json.loads(known["sample"]), parts)


class _Part(NamedTuple):
    """A tensor of the blob."""

    content: Any
    dtype: str
    shape: tuple[int, ...]


class _Encoder:
    """Takes a sample apart: nodes of JSON, and the bytes of the leaves."""

    def __init__(self) -> None:
        self.parts: list[_Part] = []

    def node(self, value: Any, path: str, level: int = 0) -> Any:
        """A value as JSON; `path`: where it lies in the sample."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind in (list, tuple, dict):
            if level == _MOST_LEVELS:
                raise UnsupportedSampleError(f"sample{path[:80]}... is nested more than {_MOST_LEVELS} levels deep")
            if kind is dict:
                return {"dict": list(self._pairs(value, path, level))}
            nodes = [self.node(item, f"{path}[{at}]", level + 1) for at, item in enumerate(value)]
            return nodes if kind is list else {"tuple": nodes}
        if kind is bytes:
            return {"bytes": self._put(value)}
        if kind is EncodedFile:
            return {"file": self._put(value.content), "form": value.form}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is np.ndarray or isinstance(value, np.generic):
            return self._array(value, path)
        if is_pil(value):
            return self._image(value)
        raise UnsupportedSampleError(f"sample{path} is {_named(kind)}, which cannot be packed")

    def _pairs(self, value: dict[Any, Any], path: str, level: int) -> Iterator[list[Any]]:
        for key, item in value.items():
            if type(key) not in (str, int):
                raise UnsupportedSampleError(
                    f"sample{path} has the key {key!r}: keys of what is packed are strings or ints"
                )
            yield [key, self.node(item, f"{path}[{key!r}]", level + 1)]

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        vision: Any = sys.modules.get("torchvision.tv_tensors")  # never imported: then nobody made one
        subclass = next((name for name in _TV_TENSORS if vision and type(value) is getattr(vision, name)), None)
        if type(value) is not torch.Tensor and subclass is None:
            raise UnsupportedSampleError(f"sample{path} is {_named(type(value))}: of tensors, plain ones can be packed")
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
            raise UnsupportedSampleError(
                f"sample{path} must be a dense tensor of the CPU, is {value.layout} on {value.device}"
            )
        if value.requires_grad:
            raise UnsupportedSampleError(f"sample{path} requires a gradient: give value.detach()")
        name, shape = str(value.dtype).removeprefix("torch."), tuple(value.shape)
        flat = value.as_subclass(torch.Tensor).resolve_conj().resolve_neg().contiguous().reshape(-1)
        content: Any = flat.view(torch.uint8).numpy().data
        node = {"tensor": self._put(content, name, shape), "dtype": name, "shape": shape}
        return node if subclass is None else node | {"class": subclass}

    def _array(self, value: Any, path: str) -> Any:
        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise UnsupportedSampleError(f"sample{path} is an array of dtype {array.dtype}, which cannot be packed")
        shape, name = array.shape, array.dtype.name if array.dtype.isnative else ""
        content: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else b""
        what = "array" if type(value) is np.ndarray else "scalar"
        return {what: self._put(content, name, shape), "dtype": array.dtype.str, "shape": shape}

    def _image(self, value: Any) -> Any:
        node = {"image": self._put(value.tobytes()), "mode": value.mode, "size": value.size}
        if value.mode in ("P", "PA") and value.palette is not None:
            node["palette"] = [value.palette.mode, value.getpalette(value.palette.mode)]
        if (see_through := value.info.get("transparency")) is not None:
            node["transparency"] = see_through.hex() if isinstance(see_through, bytes) else see_through
        return node

    def _put(self, content: Any, dtype: str = "", shape: tuple[int, ...] = ()) -> int:
        name = _NAMES.get(dtype)
        self.parts.append(_Part(content, name or "U8", shape if name else (len(content),)))
        return len(self.parts) - 1


def _decoded(node: Any, parts: list[memoryview]) -> Any:
    if type(node) is list:
        return [_decoded(item, parts) for item in node]
    if type(node) is not dict:
        return node
    what, held = next(iter(node.items()))
    if what == "tuple":
        return tuple(_decoded(item, parts) for item in held)
    if what == "dict":
        return {key: _decoded(item, parts) for key, item in held}
    if what == "float":
        return struct.unpack(">d", bytes.fromhex(held))[0]
    return _LEAVES[what](node, parts[held])


def _tensor(node: dict[str, Any], content: memoryview) -> torch.Tensor:
    tensor = tensor_of(content, getattr(torch, node["dtype"]), node["shape"])
    if (name := node.get("class")) is not None:
        from torchvision import tv_tensors

        tensor = tensor.as_subclass(getattr(tv_tensors, name))
    return tensor


def _array(node: dict[str, Any], content: memoryview) -> Any:
    array = np.empty(node["shape"], np.dtype(node["dtype"]))
    if content:
        np.copyto(array.reshape(-1).view(np.uint8), np.frombuffer(content, np.uint8))
    return array


def _image(node: dict[str, Any], content: memoryview) -> Any:
    from PIL import Image

    image = Image.frombytes(node["mode"], tuple(node["size"]), bytes(content))
    if "palette" in node:
        mode, colours = node["palette"]
        image.putpalette(colours, mode)
    if "transparency" in node:
        held = node["transparency"]
        image.info["transparency"] = (
            bytes.fromhex(held) if isinstance(held, str) else tuple(held) if isinstance(held, list) else held
        )
    return image


def _file(node: dict[str, Any], content: memoryview) -> Any:
    return image_of(content, node["form"])


_LEAVES: dict[str, Any] = {
    "tensor": _tensor,
    "array": _array,
    "scalar": lambda node, content: _array(node, content)[()],
    "bytes": lambda node, content: bytes(content),
    "image": _image,
    "file": _file,
}


def _named(kind: type) -> str:
    name = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"

"""A sample as one safetensors blob, and back, without a pickle: an LMDB is passed on, and a pickle may run any code.

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
import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from lightning_stocache.cache.codec import UnsupportedSampleError, memory_of, type_name
from lightning_stocache.cache.records import written
from lightning_stocache.source.samples import Path, is_pil
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
_WHAT_CAN = (
    "What can be packed: tensors, arrays, numbers, strings, bytes, None and images of PIL, in dicts, lists and tuples"
)
_to_json = json.JSONEncoder(separators=(",", ":")).encode


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
        >>> encode_blob({"tags": [{1, 2}]}, 0)
        Traceback (most recent call last):
            ...
        lightning_stocache.cache.codec.UnsupportedSampleError: sample['tags'][0] is a set, which cannot be packed. ...
    """
    tree = _Tree()
    sample_text = _to_json(_to_json(tree.node(sample, ())))
    text = f'00000000","index":"{index}","sample":{sample_text}}}{tree.header}}}'.encode()
    text = _BEGIN + text + b" " * (-len(_BEGIN + text) % 8)
    begin = bytearray(struct.pack("<Q", len(text)) + text)
    total = zlib.crc32(memoryview(begin)[_SUM.stop :], zlib.crc32(begin[:8]))
    for content in tree.contents:
        total = zlib.crc32(content, total)
    begin[_SUM] = b"%08x" % total
    return b"".join((begin, *tree.contents))


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
    try:
        begin = 8 + struct.unpack("<Q", view[:8])[0]
        header = json.loads(bytes(view[8:begin]))
        known = header.pop("__metadata__")
        if known["index"] == str(index):
            spans = [part["data_offsets"] for part in header.values()]
            return _decoded(json.loads(known["sample"]), [view[begin + start : begin + end] for start, end in spans])
    except Exception as error:  # a checksum is no signature: what was written may be anything
        raise BlobError(f"these {len(view)} bytes are no sample of this package ({error})") from error
    raise BlobError(f"here lies sample {known['index']}, not {index}")


class _Tree:
    """A sample as JSON, by `node`, which collects the header and the bytes of the leaves that lie in the data."""

    def __init__(self) -> None:
        self.header = ""
        self.contents: list[Any] = []
        self._end = 0

    def node(self, value: Any, path: Path) -> Any:
        """A value as JSON; `path` says where it lies in the sample."""
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"float": struct.pack(">d", value).hex()}
        if kind in (list, tuple, dict):
            if len(path) == _MOST_LEVELS:
                raise UnsupportedSampleError(f"{_place(path)[:80]}... is nested more than {_MOST_LEVELS} levels deep")
            if kind is dict:
                return {"dict": [self._pair(key, item, path) for key, item in value.items()]}
            nodes = [self.node(item, (*path, at)) for at, item in enumerate(value)]
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
        raise UnsupportedSampleError(f"{_place(path)} is a {type_name(kind)}, which cannot be packed. {_WHAT_CAN}")

    def _pair(self, key: Any, item: Any, path: Path) -> list[Any]:
        if type(key) in (str, int):
            return [key, self.node(item, (*path, key))]
        raise UnsupportedSampleError(f"{_place(path)} has the key {key!r}: keys of what is packed are strings or ints")

    def _tensor(self, value: torch.Tensor, path: Path) -> Any:
        kind = type(value)
        is_vision = kind.__module__.startswith("torchvision.tv_tensors") and kind.__name__ in _TV_TENSORS
        if kind is not torch.Tensor and not is_vision:
            raise UnsupportedSampleError(f"{_place(path)} is a {type_name(kind)}: of tensors, plain ones can be packed")
        if value.layout is not torch.strided or value.device.type != "cpu" or value.is_quantized or value.is_nested:
            raise UnsupportedSampleError(
                f"{_place(path)} must be a dense tensor of the CPU, is {value.layout} on {value.device}"
            )
        if value.requires_grad:
            raise UnsupportedSampleError(f"{_place(path)} requires a gradient: give value.detach()")
        name, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
        content = memory_of(value.as_subclass(torch.Tensor)).data
        node = {"tensor": self._put(content, name, shape), "dtype": name, "shape": shape}
        return node | {"class": kind.__name__} if is_vision else node

    def _array(self, value: Any, path: Path) -> Any:
        array = np.asarray(value)
        if array.dtype.kind not in _ARRAY_KINDS:
            raise UnsupportedSampleError(f"{_place(path)} is an array of dtype {array.dtype}, which cannot be packed")
        name, shape = array.dtype.name if array.dtype.isnative else "", list(array.shape)
        kind = "array" if type(value) is np.ndarray else "scalar"
        return {kind: self._put(array.tobytes(), name, shape), "dtype": array.dtype.str, "shape": shape}

    def _image(self, value: Any) -> Any:
        node = {"image": self._put(value.tobytes()), "mode": value.mode, "size": value.size}
        if value.mode in ("P", "PA") and value.palette is not None:
            node["palette"] = [value.palette.mode, value.getpalette(value.palette.mode)]
        if (see_through := value.info.get("transparency")) is not None:
            node["transparency"] = see_through.hex() if isinstance(see_through, bytes) else see_through
        return node

    def _put(self, content: Any, dtype: str = "", shape: list[int] | None = None) -> int:
        """The number of a new part of the data; of a dtype that safetensors does not know it is bytes."""
        number, begin = len(self.contents), self._end
        self._end += len(content)
        self.contents.append(content)
        name = _NAMES.get(dtype)
        size = shape if name else [len(content)]
        self.header += f',"{number}":{{"dtype":"{name or "U8"}","shape":{size},"data_offsets":[{begin},{self._end}]}}'
        return number


def _place(path: Path) -> str:
    return "sample" + written(path)


def _decoded(node: Any, parts: list[memoryview]) -> Any:
    if type(node) is list:
        return [_decoded(item, parts) for item in node]
    if type(node) is not dict:
        return node
    kind, value = next(iter(node.items()))
    if kind == "tuple":
        return tuple(_decoded(item, parts) for item in value)
    if kind == "dict":
        return {key: _decoded(item, parts) for key, item in value}
    if kind == "float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    content = parts[value]
    if kind == "tensor":
        return _tensor(node, content)
    if kind == "bytes":
        return bytes(content)
    if kind == "image":
        return _image(node, content)
    if kind == "file":
        return image_of(content, node["form"])
    if (dtype := np.dtype(node["dtype"])).kind not in _ARRAY_KINDS:  # of objects, the bytes would be addresses
        raise BlobError(f"an array has dtype {dtype}")
    array = np.ndarray(node["shape"], dtype, bytearray(content))
    return array if kind == "array" else array[()]


def _tensor(node: dict[str, Any], content: memoryview) -> torch.Tensor:
    tensor = tensor_of(content, getattr(torch, node["dtype"]), node["shape"])
    if (name := node.get("class")) is not None:
        from torchvision import tv_tensors

        tensor = tensor.as_subclass(getattr(tv_tensors, name))
    return tensor


def _image(node: dict[str, Any], content: memoryview) -> Any:
    from PIL import Image

    image = Image.frombytes(node["mode"], tuple(node["size"]), bytes(content))
    if "palette" in node:
        mode, colours = node["palette"]
        image.putpalette(colours, mode)
    see_through = node.get("transparency")
    if see_through is not None:
        if isinstance(see_through, str):
            see_through = bytes.fromhex(see_through)
        image.info["transparency"] = tuple(see_through) if isinstance(see_through, list) else see_through
    return image

"""Samples of any kind as bytes: a record is the bytes of one sample.

A record consists of:

    bytes of the pickle, number of buffers                                             (<II)
    per buffer: `nbytes << 1 | by_pil`: its size, and 1 if PIL copies it, not `decode` (<Q)
    pickle of protocol 5
    buffers, each at a multiple of 64 bytes of the record

`reducer_override` takes tensors, NumPy arrays and images of PIL apart, so nothing large runs through the pickle (a
tensor of 560 KB: 8 us; torch's own way takes 220 us). Buffers below 4 KiB stay in the pickle. An image of PIL keeps
PIL's four bytes per pixel of RGB, which is a plain copy (30 us for 500x375; three bytes per pixel take 450 us). In
`packed` records it has three bytes per pixel.

Samples come out as they went in: types, dtypes, shapes, the order of dimensions in memory, attributes, palettes, keys,
and, as in pickle, repeated references and cycles. Each buffer comes out in its own writable memory, so a user who keeps
the boxes of an image does not keep the image.

A pickle may run any code, so records are read only from files of this user alone.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pickle import PickleBuffer
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_stocache.cache.codec import (
    Lend,
    SampleMismatchError,
    Span,
    UnsupportedSampleError,
    aligned,
    memory_of,
    named,
    overlaps,
    tensor_over,
    type_name,
)
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.node.errors import text_of

__all__ = ["RecordCodec", "Required", "SampleCodec", "canonical_bytes", "decoded", "is_image", "is_opened", "written"]

_HEAD = struct.Struct("<II")  # bytes of the pickle, number of buffers
_ENTRY = struct.Struct("<Q")
_LONGEST_PICKLE = 2**32 - 1
_IN_PICKLE = 4096  # bytes; to copy so few costs less than a buffer
_SLOT_BYTES = 28  # bytes of a slot in the columns, and of the alignment of a small record
_DEEPEST = 8  # levels of a sample that `least_bytes` looks through
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_IMAGE_ATTRIBUTES = ("info", "palette", "readonly", "im", "pyaccess")  # attributes of PIL; all others are the user's
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)

# A spawned worker calls the script's module `__mp_main__`. The readers of its records must know that name, too.
sys.modules.setdefault("__mp_main__", sys.modules["__main__"])

Required = tuple[tuple[tuple[Any, ...], type[Any]], ...]
"""The type that a sample must have at each path: one key or position per level."""


@dataclass(frozen=True)
class RecordCodec:
    """Turns samples of any kind into records, and back.

    Args:
        nbytes: mean bytes of the records that were seen; budgets are divided by it.
        most_bytes: upper estimate of the mean bytes of all records: with so many bytes per record, all fit.
        required: the values that the random part of a transform needs: their paths and types.
        packed: whether images of PIL take three bytes per pixel of RGB, instead of PIL's four.
        packed_bytes: `nbytes` of packed records.
        finished_bytes: bytes of a sample after its transforms, if that is more than `nbytes`.
        form: what is stored of a sample, if that is not what the source returns.

    Raises:
        UnsupportedSampleError: (`encode`) something in the sample cannot be pickled, or must not be stored.
        SampleMismatchError: (`encode`) the sample lacks a required value.

    Example:
        >>> codec = RecordCodec.infer([{"text": "a cat", "ids": [3, 14], "pixels": torch.zeros(2, 3)}])
        >>> record = b"".join(codec.contents(codec.encode({"text": "", "ids": [], "pixels": torch.ones(1)})))
        >>> codec.decode(memoryview(record))
        {'text': '', 'ids': [], 'pixels': tensor([1.])}
    """

    nbytes: int
    most_bytes: int = 0
    required: Required = ()
    packed: bool = False
    packed_bytes: int = 0
    finished_bytes: int = 0
    form: str = ""
    is_fixed: ClassVar[bool] = False

    @classmethod
    def infer(cls, samples: Sequence[Any], required: Required = ()) -> RecordCodec:
        """Make the codec of a source from some of its samples. An error if one of them cannot be encoded."""
        codec, packed = cls(0, required=required), cls(0, required=required, packed=True)
        sizes = np.array([codec.stored_size(codec.encode(sample)) for sample in samples], dtype=np.float64)
        packed_sizes = [packed.stored_size(packed.encode(sample)) for sample in samples]
        mean, spread = float(sizes.mean()), float(sizes.std(ddof=1)) if len(sizes) > 1 else 0.0
        # Three standard errors, and a twentieth for what so few samples do not show.
        most = 1.05 * (mean + 3 * spread / len(sizes) ** 0.5) if spread else mean
        return cls(round(mean), int(np.ceil(most)), required, packed_bytes=round(sum(packed_sizes) / len(samples)))

    def for_bytes(self, granted: int, samples: int) -> RecordCodec:
        """This codec, or its packed form if so many samples may not fit otherwise. Packing costs 40 us per image."""
        surely_fit = (samples - 1) * self.most_slot_bytes <= granted  # a share of the dataset is rounded
        if surely_fit or not 0 < self.packed_bytes < self.nbytes:
            return self
        return replace(self, packed=True, nbytes=self.packed_bytes)

    # ---- what samples cost ----

    @property
    def slot_bytes(self) -> int:
        """Mean bytes of a sample in a store: its record and its columns."""
        return self.nbytes + _SLOT_BYTES

    @property
    def most_slot_bytes(self) -> int:
        """Upper estimate of the mean bytes of a sample in a store."""
        return max(self.most_bytes, self.nbytes) + _SLOT_BYTES

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return max(self.nbytes, self.finished_bytes)

    def stored_size(self, parts: Sequence[memoryview]) -> int:
        """Bytes of an encoded sample, with its alignment."""
        size = sum(part.nbytes for part in parts)
        return size if len(parts) == 1 else aligned(size)

    def least_bytes(self, sample: Any) -> int:
        """Least bytes of a sample's record, found without encoding it: the bytes of its arrays, images and text."""
        return _HEAD.size + _bytes_inside(sample, _DEEPEST, set())

    @property
    def title(self) -> str:
        """What samples look like, in words that two jobs can compare."""
        places = (f"{written(path) or 'sample'}: {type_name(kind)}" for path, kind in self.required)
        return "; ".join([f"{self.form} records".strip(), *places])

    # ---- from samples to bytes, and back ----

    def encode(self, sample: Any, index: int | None = None) -> list[memoryview]:
        """The parts of a record as bytes, one after the other; of a large tensor, its own memory."""
        title = "a sample" if index is None else f"sample {index}"
        self._check_required(sample, title)
        try:
            pickled, buffers = _pickled(sample, packed=self.packed)
        except UnsupportedSampleError as error:
            raise UnsupportedSampleError(f"{title} cannot be kept as bytes: {error}") from error
        except Exception as error:  # the code of the sample's classes may raise anything
            reason = (text_of(error) or type(error).__name__).splitlines()[0]
            advice = "Samples must hold only objects that pickle can write, such as tensors, arrays and text"
            raise UnsupportedSampleError(f"{title} cannot be kept as bytes: {reason}. {advice}") from error
        if pickled.nbytes > _LONGEST_PICKLE:
            raise UnsupportedSampleError(f"{title} holds more than 4 GiB in text, bytes or small objects")
        head = bytearray(_HEAD.pack(pickled.nbytes, len(buffers)))
        for buffer, by_pil in buffers:
            head += _ENTRY.pack(buffer.nbytes << 1 | by_pil)
        head += pickled
        if buffers:
            head += bytes(aligned(len(head)) - len(head))
        parts, end = [memoryview(head)], len(head)
        for buffer, _ in buffers:
            if gap := aligned(end) - end:
                parts.append(memoryview(bytes(gap)))
            parts.append(buffer)
            end += gap + buffer.nbytes
        return parts

    def contents(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        """The bytes of an encoded sample."""
        return parts

    def decode(self, record: memoryview, lend: Lend | None = None) -> Any:
        """Make the sample of a record, in new memory or in what `lend` gives. The record is only read."""
        pickled, count = _HEAD.unpack_from(record)
        start = _HEAD.size + count * _ENTRY.size
        end = start + pickled
        buffers: list[memoryview] = []
        for (entry,) in _ENTRY.iter_unpack(record[_HEAD.size : start]):
            begin = aligned(end)
            end = begin + (entry >> 1)
            buffer = record[begin:end]
            if not entry & 1:
                memory = np.empty(buffer.nbytes, dtype=np.uint8) if lend is None else lend([buffer.nbytes])[0]
                memory[:] = np.frombuffer(buffer, dtype=np.uint8)
                buffer = memory.data
            buffers.append(buffer)
        return pickle.loads(record[start : start + pickled], buffers=buffers)

    def encode_all(self, samples: Sequence[Any]) -> None:
        """Return None, because each record is encoded by itself."""

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample has all required values."""
        try:
            self._check_required(sample, "")
        except SampleMismatchError:
            return False
        return True

    def _check_required(self, sample: Any, title: str) -> None:
        purpose = "on which the random part of the transform works"
        for path, kind in self.required:
            node = sample
            for depth, step in enumerate(path, start=1):
                try:
                    node = node[step]
                except (LookupError, TypeError):
                    raise SampleMismatchError(f"{title} has no {named(written(path[:depth]))}, {purpose}") from None
            if type(node) is not kind and not (is_image(kind) and is_image(type(node))):
                raise SampleMismatchError(
                    f"{title}: {named(written(path))}, {purpose}, must be a {type_name(kind)}; "
                    f"got a {type_name(type(node))}"
                )


SampleCodec: TypeAlias = SampleSpec | RecordCodec
"""Turns samples into bytes, and back. Nothing outside this room looks into the bytes.

`encode` checks a sample, and returns the leaves of rows as they are, or the bytes of records. `contents` returns bytes.
"""


def decoded(codec: SampleCodec, parts: Sequence[bytes | memoryview]) -> Any:
    """The sample of the parts that a codec has made of it, in memory of its own."""
    if isinstance(codec, RecordCodec):
        return codec.decode(memoryview(b"".join(parts)))
    return codec.split([np.frombuffer(bytearray(part), dtype=np.uint8) for part in parts], 1)[0]


def canonical_bytes(node: Any) -> bytes | None:
    """An object as bytes for comparison, equal for equal contents; None if it cannot be pickled."""
    for fast in (True, False):  # fast is without a memo, which would write a repeated object as a reference
        try:
            pickled, buffers = _pickled(node, fast=fast)
        except Exception:  # a cycle if it was fast; else the object's own code may raise anything
            continue
        return b"".join([pickled, *(buffer for buffer, _ in buffers)])
    return None


def written(path: tuple[Any, ...]) -> str:
    """A path in a sample, as Python code."""
    return "".join(f"[{step!r}]" for step in path)


def _bytes_inside(node: Any, deep: int, seen: set[int]) -> int:
    if id(node) in seen:  # stored once
        return 1
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        if node.layout is not torch.strided or not node.is_cpu:
            return 0
        return 1 if _is_seen(node.untyped_storage().data_ptr(), seen) else node.numel() * node.element_size()
    if isinstance(node, np.ndarray):
        owner = node if node.base is None else node.base
        return 1 if node.dtype.hasobject or _is_seen(-id(owner), seen) else node.nbytes
    if isinstance(node, bytes | bytearray | str):
        return len(node)
    if is_image(type(node)):
        return int(node.width) * int(node.height) * (len(node.getbands()) if node.mode != "1" else 0)
    if deep and isinstance(node, Mapping):
        return sum(_bytes_inside(value, deep - 1, seen) for value in node.values())
    if deep and isinstance(node, list | tuple):
        if node and isinstance(node[0], int | float):  # then probably all items are numbers
            return len(node)
        return sum(_bytes_inside(value, deep - 1, seen) for value in node)
    return 1


def _is_seen(memory: int, seen: set[int]) -> bool:
    """Whether another leaf lies in this memory: bytes that they have in common are stored once."""
    if memory in seen:
        return True
    seen.add(memory)
    return False


# ---- pickling ----


def _pickled(node: Any, *, packed: bool = True, fast: bool = False) -> tuple[memoryview, list[tuple[memoryview, bool]]]:
    """The pickle of an object, and the large buffers beside it, each with whether PIL copies it when decoded."""
    bases: dict[Any, _Base] = {}
    while True:
        file = io.BytesIO()
        encoder = _Encoder(file, packed, bases)
        encoder.fast = fast
        encoder.dump(node)
        if fast or bases or not (groups := overlaps(encoder.dense)):
            return file.getbuffer(), encoder.buffers
        for group in groups:  # once more: these are views of one array of bytes
            bases |= _bases(group)


class _Encoder(pickle.Pickler):
    """Pickles a sample, and collects its large buffers."""

    def __init__(self, file: io.BytesIO, packed: bool, bases: dict[Any, _Base]) -> None:
        buffers: list[tuple[memoryview, bool]] = []
        images: list[PickleBuffer] = []
        self.packed, self.buffers, self.images = packed, buffers, images
        self.bases = bases
        self.dense: list[Any] = []  # tensors and arrays whose bytes are written

        # Not a method: an encoder that refers to itself would keep the sample until the garbage collector runs.
        def is_small(buffer: PickleBuffer) -> bool:
            content = buffer.raw()
            if content.nbytes < _IN_PICKLE:
                return True
            buffers.append((content, any(buffer is image for image in images)))
            return False

        super().__init__(file, 5, buffer_callback=cast(Any, is_small))

    def reducer_override(self, node: Any) -> Any:
        """Take an object apart."""
        kind = type(node)
        if issubclass(kind, torch.Tensor):
            reduced = _reduced_tensor(node)
            if reduced is NotImplemented or reduced[0] is not _tensor or node.is_conj() or node.is_neg():
                return reduced
            return self._as_view(node) or reduced
        if kind is np.ndarray or kind is np.memmap:
            return NotImplemented if node.dtype.hasobject else self._as_view(node) or _reduced_array(node)
        if is_image(kind):
            return self._reduced_image(node)
        if kind is object:
            raise UnsupportedSampleError("an object() is only equal to itself, and would be another one")
        if issubclass(kind, Dataset):
            raise UnsupportedSampleError(f"a {type_name(kind)} is a dataset: the whole of it would be kept")
        if issubclass(kind, _GENERATORS):
            raise UnsupportedSampleError(f"a {type_name(kind)} draws random numbers: its state would be frozen")
        return NotImplemented

    def _as_view(self, leaf: Any) -> Any:
        """A leaf as a view, if it has bytes in common with another one."""
        self.dense.append(leaf)
        base = self.bases.get(_key(leaf)) if self.bases else None
        if base is None:
            return None
        dtype = str(leaf.dtype).removeprefix("torch.") if isinstance(leaf, torch.Tensor) else leaf.dtype
        return _view, (base.content, base.offset, dtype, tuple(leaf.shape), base.strides)

    def _reduced_image(self, image: Any) -> Any:
        kind = type(image)
        if is_opened(kind):  # as PIL pickles it
            state = [self._image_bytes(part) if type(part) is bytes else part for part in image.__getstate__()]
            return _opened_image, (kind, state)
        raw = "RGBX" if image.mode == "RGB" and not self.packed else image.mode
        content = self._image_bytes(image.tobytes("raw", raw) if raw == "RGBX" else image.tobytes())
        palette = None if image.palette is None else (image.palette.mode, bytes(image.getpalette(None) or b""))
        own = {name: value for name, value in vars(image).items() if name[0] != "_" and name not in _IMAGE_ATTRIBUTES}
        return _image, (image.mode, image.size, image.info, palette, raw, content, own)

    def _image_bytes(self, content: bytes) -> PickleBuffer:
        """A buffer that PIL copies when it makes an image, so the decoder need not copy it."""
        self.images.append(PickleBuffer(content))
        return self.images[-1]


# ---- tensors and arrays ----


def _reduced_tensor(tensor: torch.Tensor) -> Any:
    kind = type(tensor)
    if not tensor.is_cpu and not tensor.is_meta:
        raise UnsupportedSampleError(
            f"a tensor lies on {tensor.device}; return it with .cpu() and move batches to the device instead"
        )
    if tensor.requires_grad:
        raise UnsupportedSampleError("a tensor requires grad; return it with .detach()")
    if kind is not torch.Tensor:
        # A subclass with its own dispatch may be a wrapper without memory, and knows how to be pickled.
        dispatch: Any = kind.__torch_dispatch__
        if hasattr(kind, "__tensor_flatten__") or dispatch is not torch.Tensor.__torch_dispatch__:
            return NotImplemented
    elif tensor.is_quantized or tensor.is_nested or tensor.is_meta or tensor.layout is not torch.strided:
        is_sparse = tensor.layout in _SPARSE and not tensor.__dict__
        return (_sparse, cast(Any, tensor).__reduce_ex__(5)[1]) if is_sparse else NotImplemented
    if kind is not torch.Tensor or tensor.__dict__:
        return _subclass, (kind, tensor.as_subclass(torch.Tensor), tensor.__dict__)
    axes = []  # or one permutation
    if not tensor.is_contiguous():
        order = _slowest_first(tensor.stride())
        if tensor.permute(order).is_contiguous():
            tensor, axes = tensor.permute(order), [_inverse(order)]
    content = PickleBuffer(memory_of(tensor).data)
    return _tensor, (str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), content, *axes)


def _reduced_array(array: npt.NDArray[Any]) -> Any:
    axes = []  # or one permutation
    if not array.flags.c_contiguous:
        order = _slowest_first(array.strides)
        if array.transpose(order).flags.c_contiguous:
            array, axes = array.transpose(order), [_inverse(order)]
    whole, dtype = np.ascontiguousarray(array), array.dtype
    if not whole.flags.writeable:  # pickle would make it read-only, over memory of another buffer
        whole = whole.copy()
    by_name = dtype.names is None and dtype.metadata is None and dtype.isbuiltin != 2  # 2: another library's
    content = whole.reshape(-1).view(np.uint8).data if array.nbytes else bytearray()
    return _array, (dtype.str if by_name else dtype, array.shape, PickleBuffer(content), *axes)


class _Base(NamedTuple):
    """The bytes of which a leaf is a view: uint8 `[nbytes]`, and where the leaf begins in them, with its strides."""

    content: npt.NDArray[np.uint8]
    offset: int
    strides: tuple[int, ...]


def _key(leaf: Any) -> Any:
    """What two leaves over the same bytes with the same dtype and shape have in common."""
    return str(leaf.dtype), Span(leaf).address, tuple(leaf.shape), Span(leaf).strides


def _bases(group: list[Span]) -> dict[Any, _Base]:
    """One copy of the bytes of leaves that have bytes in common, for each leaf."""
    begin, end = group[0].begin, max(span.end for span in group)
    if end - begin > 2 * sum(span.leaf.nbytes for span in group):
        raise UnsupportedSampleError("it has views of the same bytes, with large gaps between them")
    if any((span.address - begin) % span.itemsize for span in group):
        raise UnsupportedSampleError("it has views of the same bytes with dtypes that do not fit each other")
    interface = {"version": 3, "typestr": "|u1", "shape": (end - begin,), "data": (begin, False)}
    content: npt.NDArray[np.uint8] = np.array(SimpleNamespace(__array_interface__=interface))
    return {_key(span.leaf): _Base(content, span.address - begin, span.strides) for span in group}


def _view(
    content: npt.NDArray[np.uint8], offset: int, dtype: Any, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor | npt.NDArray[Any]:
    if not isinstance(dtype, str):
        return np.ndarray(shape, dtype, content, offset, strides)
    kind: torch.dtype = getattr(torch, dtype)
    usable = (len(content) - offset) // kind.itemsize * kind.itemsize
    flat = torch.from_numpy(content[offset : offset + usable]).view(kind)
    return flat.as_strided(shape, [stride // kind.itemsize for stride in strides])


def _slowest_first(strides: Sequence[int]) -> list[int]:
    """The dimensions in the order of their memory, slowest first."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def _inverse(order: list[int]) -> tuple[int, ...]:
    """The inverse of a permutation."""
    return tuple(order.index(axis) for axis in range(len(order)))


def _tensor(dtype: str, shape: tuple[int, ...], buffer: Any, axes: tuple[int, ...] | None = None) -> torch.Tensor:
    tensor = tensor_over(buffer, getattr(torch, dtype), shape)
    return tensor if axes is None else tensor.permute(axes)


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """Rebuild a sparse tensor. torch's own way also keeps the tensor until the next `torch.load` has checked it."""
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _subclass(kind: type[torch.Tensor], plain: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    tensor = plain.as_subclass(kind)
    tensor.__dict__ = attributes  # not a copy: attributes that lead back to the tensor are added later
    return tensor


def _array(dtype: Any, shape: tuple[int, ...], buffer: Any, axes: tuple[int, ...] | None = None) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer)
    return array if axes is None else array.transpose(axes)


# ---- images ----


def is_image(kind: type) -> bool:
    """Whether a class belongs to PIL's images. PIL is not imported."""
    module = sys.modules.get("PIL.Image")  # without it, nobody has made an image
    return module is not None and issubclass(kind, module.Image) and kind.__module__.startswith("PIL.")


def is_opened(kind: type) -> bool:
    """Whether a class is of images that were opened and not converted. Their pickles leave out the file."""
    return is_image(kind) and kind.__module__ != "PIL.Image"


def _image(
    mode: str,
    size: tuple[int, int],
    info: dict[Any, Any],
    palette: tuple[str, bytes] | None,
    raw: str,
    content: Any,
    own: dict[str, Any],
) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, content, "raw", raw) if raw != mode else Image.frombytes(mode, size, content)
    image.info = info
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.__dict__.update(own)
    return image


def _opened_image(kind: type[Any], state: list[Any]) -> Any:
    image = object.__new__(kind)
    image.__setstate__(state)
    return image

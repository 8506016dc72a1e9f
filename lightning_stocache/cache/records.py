"""Samples of any kind as bytes: a record is one run of them.

A record is a head, the table of its buffers, a pickle, and the buffers that lie outside of the pickle:

    bytes of the pickle, number of buffers                                             (<II)
    per buffer: `nbytes << 1 | copies`: its size, and whether the decoder copies it    (<Q)
    pickle of protocol 5
    buffers, each at a multiple of 64 bytes of the record

Tensors, NumPy arrays and images of PIL are taken apart by `reducer_override`, so that nothing large runs through the
pickle (a tensor of 560 KB: 8 us, where its own way to be pickled takes 220). What is below 4 KiB stays in the pickle.
An image of PIL is kept as PIL holds it, four bytes per pixel of RGB, which is a plain copy (30 us for 500x375, where
three bytes take 450); `packed` records take three.

What comes out is what went in: types, dtypes, shapes, the order of dimensions in memory, attributes, palettes, keys;
references that a sample has twice, and cycles, as pickle keeps them. Each buffer that comes out is writable and memory
of its own, so a user who keeps the boxes of an image does not keep the image.

A pickle may run any code, so records are read only from files of this user alone.
"""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset

from lightning_stocache.cache.codec import (
    Lend,
    SampleMismatchError,
    UnsupportedSampleError,
    aligned,
    named,
    type_name,
)
from lightning_stocache.cache.rows import SampleSpec, bytes_of, memory_of

__all__ = ["RecordCodec", "Required", "SampleCodec", "canonical_bytes", "is_image", "is_opened", "written"]

_HEAD = struct.Struct("<II")  # bytes of the pickle, number of buffers

_TABLE_ENTRY = 8
_LONGEST_PICKLE = 2**32 - 1
_ONCE = 20  # bytes that the columns of a slot take, and what alignment wastes of a small record

# What a spawned worker calls a class of the script: who reads its records must know it by that name, too.
sys.modules.setdefault("__mp_main__", sys.modules["__main__"])

Required = tuple[tuple[tuple[Any, ...], type[Any]], ...]
"""Where a sample must have a value of which type: one key or position per level."""


@dataclass(frozen=True)
class RecordCodec:
    """Between samples of any kind and records.

    Args:
        nbytes: mean bytes of the records that have been seen; budgets are divided by it.
        most_bytes: upper estimate of the mean bytes of all records: with that many bytes each, all will fit.
        required: what a sample must have at which place, because the tail of a transform works on it.
        packed: whether images of PIL take three bytes for a pixel of RGB, not the four that PIL itself takes.
        packed_bytes: `nbytes` of packed records.
        finished_bytes: bytes of a sample after its transforms, if that is more than `nbytes`.
        form: what is stored of a sample, if that is not what the source returns.

    Raises:
        UnsupportedSampleError: (`encode`) something in the sample cannot be pickled, or must not be stored; the
            message names the field.
        SampleMismatchError: (`encode`) the sample lacks what is required.

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

    @classmethod
    def infer(cls, samples: Sequence[Any], required: Required = ()) -> RecordCodec:
        """The codec of a source, from some of its samples; one that cannot be encoded is an error."""
        codec = cls(0, required=required)
        sizes = np.array([codec.stored_size(codec.encode(sample)) for sample in samples], dtype=np.float64)
        spread = float(sizes.std(ddof=1)) if len(sizes) > 1 else 0.0
        mean = float(sizes.mean())
        # Three standard errors, and a twentieth for what so few samples do not show.
        most = 1.05 * (mean + 3 * spread / len(sizes) ** 0.5) if spread else mean
        codec = replace(codec, nbytes=round(mean), most_bytes=int(np.ceil(most)))
        tight = replace(codec, packed=True)
        packed = sum(tight.stored_size(tight.encode(sample)) for sample in samples)
        return replace(codec, packed_bytes=round(packed / len(samples)))

    def for_bytes(self, granted: int, samples: int) -> RecordCodec:
        """This codec, packed where so many samples do not fit in so many bytes otherwise: that costs 40 us an image."""
        if samples * self.slot_bytes <= granted or not 0 < self.packed_bytes < self.nbytes:
            return self
        return replace(self, packed=True, nbytes=self.packed_bytes)

    @property
    def slot_bytes(self) -> int:
        """Bytes that a sample costs in a store: its record, on average, its state and where it lies."""
        return self.nbytes + _ONCE

    @property
    def most_slot_bytes(self) -> int:
        """Upper estimate of the bytes that a sample costs on average."""
        return max(self.most_bytes, self.nbytes) + _ONCE

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return max(self.nbytes, self.finished_bytes)

    @property
    def title(self) -> str:
        """What samples look like, in words that two jobs can compare."""
        places = (f"{written(path) or 'sample'}: {type_name(kind)}" for path, kind in self.required)
        return "; ".join([f"{self.form} records".strip(), *places])

    def encode(self, sample: Any, index: int | None = None) -> list[memoryview]:
        """The parts of a record, one after the other, as bytes; those of a large tensor are its own memory."""
        for path, kind in self.required:
            _check_place(sample, path, kind, index)
        file, large = io.BytesIO(), list[pickle.PickleBuffer]()
        encoder = Encoder(file, large, self.packed)
        try:
            encoder.dump(sample)
        except Exception as error:  # whatever the code of the sample's classes raises when it is pickled
            where = unpicklable(sample, error)
            raise UnsupportedSampleError(f"{_titled(index)}: {where}") from error
        pickled = file.getbuffer()
        if pickled.nbytes > _LONGEST_PICKLE:
            raise UnsupportedSampleError(f"{_titled(index)} holds more than 4 GiB in text, bytes or small objects")
        return _laid_out(pickled, large, {id(buffer) for buffer in encoder.copied})

    def contents(self, parts: Sequence[memoryview]) -> Sequence[memoryview]:
        """The bytes of an encoded sample."""
        return parts

    def stored_size(self, parts: Sequence[memoryview]) -> int:
        """Bytes that an encoded sample takes, with its alignment."""
        size = sum(part.nbytes for part in parts)
        return size if len(parts) == 1 else aligned(size)

    def least_bytes(self, sample: Any) -> int:
        """Least bytes of a sample's record, without encoding it: those of its arrays, images and text."""
        return _HEAD.size + _bytes_inside(sample, 8, set())

    def is_alike(self, sample: Any) -> bool:
        """Whether a sample has what is required."""
        try:
            for path, kind in self.required:
                _check_place(sample, path, kind, None)
        except SampleMismatchError:
            return False
        return True

    def decode(self, record: memoryview, lend: Lend | None = None) -> Any:
        """The sample of a record, in memory of its own.

        Args:
            record: its bytes; they are only read.
            lend: gives the memory; by default it is new.
        """
        content, buffers = _taken_apart(record, lend)
        return pickle.loads(content, buffers=buffers)


SampleCodec: TypeAlias = SampleSpec | RecordCodec
"""What turns samples into bytes, and bytes into samples again. Nothing outside this room looks into the bytes."""


# ---- layout ----


def _laid_out(pickled: memoryview, large: list[pickle.PickleBuffer], copied: set[int]) -> list[memoryview]:
    """The parts of a record: its head, with all that is small, and the buffers."""
    if not large:
        head = bytearray(_HEAD.size + pickled.nbytes)
        _HEAD.pack_into(head, 0, pickled.nbytes, 0)
        head[_HEAD.size :] = pickled
        return [memoryview(head)]
    start = _HEAD.size + len(large) * _TABLE_ENTRY
    end = start + pickled.nbytes
    buffers = [buffer.raw() for buffer in large]
    head = bytearray(aligned(end))
    head[start:end] = pickled
    parts, end = [memoryview(head)], len(head)
    for number, (buffer, raw) in enumerate(zip(large, buffers, strict=True)):
        struct.pack_into("<Q", head, _HEAD.size + number * _TABLE_ENTRY, raw.nbytes * 2 + (id(buffer) in copied))
        if end % 64:
            parts.append(memoryview(bytes(aligned(end) - end)))
        parts.append(raw)
        end = aligned(end) + raw.nbytes
    _HEAD.pack_into(head, 0, pickled.nbytes, len(large))
    return parts


def _taken_apart(record: memoryview, lend: Lend | None) -> tuple[memoryview, list[memoryview]]:
    """The pickle of a record, and the buffers for it."""
    pickled, count = _HEAD.unpack_from(record)
    start = _HEAD.size + count * _TABLE_ENTRY
    end, buffers = start + pickled, []
    for (entry,) in struct.iter_unpack("<Q", record[_HEAD.size : start]):
        begin = aligned(end)
        end = begin + (entry >> 1)
        buffers.append(record[begin:end] if entry & 1 else _copied(record[begin:end], lend))
    return record[start : start + pickled], buffers


def _copied(content: memoryview, lend: Lend | None) -> memoryview:
    memory = np.empty(content.nbytes, dtype=np.uint8) if lend is None else lend([content.nbytes])[0]
    memory[:] = np.frombuffer(content, dtype=np.uint8)
    return memory.data


def _bytes_inside(node: Any, deep: int, seen: set[int]) -> int:
    if id(node) in seen:  # kept once
        return 1
    seen.add(id(node))
    if isinstance(node, torch.Tensor):
        return node.numel() * node.element_size() if node.layout is torch.strided and node.is_cpu else 0
    if isinstance(node, np.ndarray):
        return 0 if node.dtype.hasobject else node.nbytes
    if isinstance(node, bytes | bytearray | str):
        return len(node)
    if is_image(type(node)):
        return int(node.width) * int(node.height) * (len(node.getbands()) if node.mode != "1" else 0)
    if deep and isinstance(node, Mapping):
        return sum(_bytes_inside(value, deep - 1, seen) for value in node.values())
    if deep and isinstance(node, list | tuple):
        if node and isinstance(node[0], int | float):  # numbers, in all likelihood
            return len(node)
        return sum(_bytes_inside(value, deep - 1, seen) for value in node)
    return 1


# ---- what cannot be kept ----


def _check_place(sample: Any, path: tuple[Any, ...], kind: type[Any], index: int | None) -> None:
    node = sample
    for number, step in enumerate(path):
        try:
            node = node[step]
        except (LookupError, TypeError):
            lacking = named(written(path[: number + 1]))
            raise SampleMismatchError(
                f"{_titled(index)} has no {lacking}, on which the random part of the transform works"
            ) from None
    if type(node) is not kind and not (is_image(kind) and is_image(type(node))):
        raise SampleMismatchError(
            f"{_titled(index)}: {named(written(path))}, on which the random part of the transform works, must be a "
            f"{type_name(kind)}; got a {type_name(type(node))}"
        )


def written(path: tuple[Any, ...]) -> str:
    """A place in a sample, as one would write it in Python."""
    return "".join(f"[{step!r}]" for step in path)


def _titled(index: int | None) -> str:
    return "a sample" if index is None else f"sample {index}"


# ---- pickling ----

_DEEPEST = 8  # levels to which what cannot be pickled is looked for
_IN_PICKLE = 4096  # bytes; a copy of so few costs less than memory of their own
_DTYPES = {str(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_ARRAY_DTYPES = {
    str(dtype): torch.empty(0, dtype=dtype).numpy().dtype
    for dtype in (
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
        *(torch.float16, torch.float32, torch.float64, torch.complex64, torch.complex128),
    )
}
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_OF_IMAGES = ("info", "palette", "readonly", "im", "pyaccess")  # attributes of PIL's own; others are the user's
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)


def canonical_bytes(node: Any) -> bytes | None:
    """An object as bytes, which are equal for equal contents; None if it cannot be pickled.

    For comparisons: they cannot be read back.
    """
    for fast in (True, False):  # without a memo, which writes an object that comes twice as a reference
        file, large = io.BytesIO(), list[pickle.PickleBuffer]()
        encoder = Encoder(file, large, packed=True)
        encoder.fast = fast
        try:
            encoder.dump(node)
        except Exception:  # a cycle, if it was fast; else whatever the object's own code raises
            continue
        return b"".join([file.getvalue(), *(buffer.raw() for buffer in large)])
    return None


class Encoder(pickle.Pickler):
    """Pickles a sample, with large buffers beside.

    Args:
        file: where the pickle goes.
        large: gets the buffers.
        packed: as in the codec.
    """

    def __init__(self, file: io.BytesIO, large: list[pickle.PickleBuffer], packed: bool) -> None:
        def is_small(buffer: pickle.PickleBuffer) -> bool:
            if buffer.raw().nbytes < _IN_PICKLE:
                return True
            large.append(buffer)
            return False

        super().__init__(file, 5, buffer_callback=cast(Any, is_small))
        self.packed = packed
        self.copied: list[pickle.PickleBuffer] = []
        """Buffers that the decoder copies, so that they may be read where they lie."""

    def reducer_override(self, node: Any) -> Any:
        """How an object is taken apart."""
        kind = type(node)
        if issubclass(kind, torch.Tensor):
            return _reduced_tensor(node)
        if kind is np.ndarray or kind is np.memmap:
            return NotImplemented if node.dtype.hasobject else _reduced_array(node)
        if is_image(kind):
            return self._reduced_image(node)
        if kind is object:
            raise UnsupportedSampleError("an object() is only equal to itself, and would be another one")
        if issubclass(kind, Dataset):
            raise UnsupportedSampleError(f"a {type_name(kind)} is a dataset: the whole of it would be kept")
        if issubclass(kind, _GENERATORS):
            raise UnsupportedSampleError(f"a {type_name(kind)} draws random numbers: its state would be frozen")
        return NotImplemented

    def _reduced_image(self, image: Any) -> Any:
        kind = type(image)
        if is_opened(kind):  # as PIL itself pickles it
            state = [pickle.PickleBuffer(part) if type(part) is bytes else part for part in image.__getstate__()]
            self.copied += [part for part in state if type(part) is pickle.PickleBuffer]
            return _opened_image, (kind, state)
        raw = "RGBX" if image.mode == "RGB" and not self.packed else image.mode
        buffer = pickle.PickleBuffer(image.tobytes("raw", raw) if raw == "RGBX" else image.tobytes())
        self.copied.append(buffer)
        palette = None if image.palette is None else (image.palette.mode, bytes(image.getpalette(None) or b""))
        own = {name: value for name, value in vars(image).items() if name[0] != "_" and name not in _OF_IMAGES}
        return _image, (image.mode, image.size, image.info, palette, raw, buffer, own)


# ---- tensors ----


def _reduced_tensor(tensor: torch.Tensor) -> Any:
    kind = type(tensor)
    if not tensor.is_cpu and not tensor.is_meta:
        raise UnsupportedSampleError(
            f"a tensor lies on {tensor.device}; return it with .cpu() and move batches to the device instead"
        )
    if tensor.requires_grad:
        raise UnsupportedSampleError("a tensor requires grad; return it with .detach()")
    if kind is not torch.Tensor:
        # What dispatches by itself may be a wrapper without memory, and knows how to be pickled.
        dispatch: Any = kind.__torch_dispatch__
        if hasattr(kind, "__tensor_flatten__") or dispatch is not torch.Tensor.__torch_dispatch__:
            return NotImplemented
        return _subclass, (kind, tensor.as_subclass(torch.Tensor), tensor.__dict__)
    if tensor.layout not in (torch.strided, *_SPARSE) or tensor.is_quantized or tensor.is_nested or tensor.is_meta:
        return NotImplemented
    if tensor.layout is not torch.strided:
        return NotImplemented if tensor.__dict__ else (_sparse, cast(Any, tensor).__reduce_ex__(5)[1])
    if tensor.__dict__:
        return _subclass, (kind, tensor.view_as(tensor), tensor.__dict__)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    shape, dtype = tuple(tensor.shape), str(tensor.dtype)
    if not tensor.numel():
        return _empty, (dtype, shape)
    if tensor.is_contiguous() or (order := _dense_order(tensor)) is None:
        return _tensor, (dtype, shape, _buffer(memory_of(bytes_of(tensor))))
    dense = tensor.permute(order)
    buffer = _buffer(memory_of(bytes_of(dense)))
    return _permuted, (dtype, tuple(dense.shape), tuple(np.argsort(order).tolist()), buffer)


def _dense_order(tensor: torch.Tensor) -> list[int] | None:
    """The dimensions, the slowest first, if in this order the tensor is contiguous; None if it has gaps or overlaps."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda axis: -strides[axis])
    return order if tensor.permute(order).is_contiguous() else None


def _tensor(dtype: str, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    array_dtype = _ARRAY_DTYPES.get(dtype)
    if array_dtype is None:  # bfloat16 and others that NumPy has not
        return torch.frombuffer(buffer, dtype=_DTYPES[dtype]).view(shape)
    return torch.from_numpy(np.ndarray(shape, array_dtype, buffer))  # half the time of torch's own way


def _permuted(dtype: str, shape: tuple[int, ...], order: tuple[int, ...], buffer: Any) -> torch.Tensor:
    return _tensor(dtype, shape, buffer).permute(order)


def _empty(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=_DTYPES[dtype], device="cpu")


def _sparse(layout: torch.layout, parts: tuple[Any, ...]) -> torch.Tensor:
    """As torch would rebuild it, which also keeps it until the next `torch.load` has checked it."""
    if layout is torch.sparse_coo:
        return torch.sparse_coo_tensor(*parts[:3], is_coalesced=parts[3], check_invariants=False)
    return torch.sparse_compressed_tensor(*parts, layout=layout, check_invariants=False)


def _subclass(kind: type[torch.Tensor], plain: torch.Tensor, attributes: dict[str, Any]) -> torch.Tensor:
    tensor = plain.as_subclass(kind)
    tensor.__dict__ = attributes  # itself: attributes that lead back to the tensor come into it later
    return tensor


# ---- arrays and images ----


def _reduced_array(array: npt.NDArray[Any]) -> Any:
    order = sorted(range(array.ndim), key=lambda axis: -array.strides[axis])
    permuted = not array.flags.c_contiguous and array.transpose(order).flags.c_contiguous
    whole = array.transpose(order) if permuted else np.ascontiguousarray(array)
    if not whole.flags.writeable:  # pickle would have it read-only, and over memory that is not its own
        whole = whole.copy()
    dtype, axes = array.dtype, tuple(np.argsort(order).tolist()) if permuted else None
    by_name = dtype.names is None and dtype.metadata is None and dtype.isbuiltin != 2  # 2: another library's
    buffer = _buffer(whole.reshape(-1).view(np.uint8) if array.nbytes else bytearray())
    return _array, (dtype.str if by_name else dtype, whole.shape if permuted else array.shape, axes, buffer)


def _array(dtype: Any, shape: tuple[int, ...], axes: tuple[int, ...] | None, buffer: Any) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = np.ndarray(shape, dtype, buffer)
    return array if axes is None else array.transpose(axes)


def is_image(kind: type) -> bool:
    """Whether it is a class of images that belongs to PIL, without importing it."""
    module = sys.modules.get("PIL.Image")  # never imported: then nobody made one
    return module is not None and issubclass(kind, module.Image) and kind.__module__.startswith("PIL.")


def is_opened(kind: type) -> bool:
    """Whether it is a class of images that have been opened and not converted: PIL's pickles leave out their file."""
    return is_image(kind) and kind.__module__ != "PIL.Image"


def _image(
    mode: str,
    size: tuple[int, int],
    info: dict[Any, Any],
    palette: tuple[str, bytes] | None,
    raw: str,
    data: Any,
    own: dict[str, Any],
) -> Any:
    from PIL import Image

    image = Image.frombytes(mode, size, data, "raw", raw) if raw != mode else Image.frombytes(mode, size, data)
    image.info = info
    if palette is not None:
        image.putpalette(palette[1], palette[0])
    image.__dict__.update(own)
    return image


def _opened_image(kind: type[Any], state: list[Any]) -> Any:
    image = object.__new__(kind)
    image.__setstate__(state)
    return image


def _buffer(content: Any) -> pickle.PickleBuffer:
    """What a pickle may leave to lie beside it."""
    return pickle.PickleBuffer(content)  # Any: NumPy's stubs know of no buffers before Python 3.12


def unpicklable(sample: Any, error: Exception) -> str:
    """What of a sample cannot be pickled, in words, given what was raised."""
    where, node = "", sample
    for _ in range(_DEEPEST):
        try:
            inner = next(iter(_failing(node)), None)
        except Exception:  # a container that cannot even be looked through
            break
        if inner is None:
            break
        where, node = where + inner[0], inner[1]
    said = str(error).splitlines()[0] if str(error) else type(error).__name__
    return f"{named(where)} is a {type_name(type(node))}, which cannot be kept as bytes ({said})"


def _failing(node: Any) -> Iterable[tuple[str, Any]]:
    """The parts of a container that cannot be pickled by themselves."""
    if isinstance(node, Mapping):
        children: Iterable[tuple[str, Any]] = ((f"[{key!r}]", node[key]) for key in node)
    elif isinstance(node, list | tuple):
        children = ((f"[{number}]", part) for number, part in enumerate(node))
    else:
        attributes = getattr(node, "__dict__", None)
        children = ((f".{name}", part) for name, part in attributes.items()) if isinstance(attributes, dict) else ()
    for step, part in children:
        try:
            Encoder(io.BytesIO(), [], packed=True).dump(part)
        except Exception:  # whatever its code raises
            yield step, part

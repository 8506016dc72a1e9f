"""Samples of any kind as bytes: a record is one run of them.

A record is a head, the table of its buffers, a pickle, and the buffers that lie outside of the pickle:

    number of the slot, bytes of the pickle, bytes of the record, number of buffers    (<IIQI)
    per buffer: its bytes, twice, plus one if who rebuilds from it copies by himself   (<Q)
    pickle of protocol 5
    buffers, each at a multiple of 64 bytes of the record

`pickling` takes a sample apart. Each buffer that comes out is writable and memory of its own, so who keeps the boxes of
an image does not keep the image. `packed` records take three bytes for a pixel of an image of PIL, not the four that it
has there.

A pickle may run any code, so records are read only from files of this user alone (`node.files.open_own`).
"""

from __future__ import annotations

import io
import pickle
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from lightning_stocache.cache.codec import Lend, aligned
from lightning_stocache.cache.field import UnsupportedSampleError, named, type_name
from lightning_stocache.cache.pickling import Encoder, is_image, unpicklable
from lightning_stocache.cache.spec import SampleMismatchError

__all__ = ["HEAD", "RecordCodec", "Required"]

HEAD = struct.Struct("<IIQI")
"""Slot, bytes of the pickle, bytes of the record, number of buffers."""

_TABLE_ENTRY = 8
_LONGEST_PICKLE = 2**32 - 1
_ONCE = 16  # bytes that a slot's state and entry in the directory take, and what alignment wastes of a small record

# What a spawned worker calls a class of the script: who reads its records must know it by that name, too.
sys.modules.setdefault("__mp_main__", sys.modules["__main__"])

Required = tuple[tuple[tuple[Any, ...], type[Any]], ...]
"""Where a sample must hold a value of which type: one key or position per level."""


@dataclass(frozen=True)
class RecordCodec:
    """Between samples of any kind and records.

    Args:
        nbytes: bytes of a record, the mean of those that have been seen; budgets are divided by it.
        most_bytes: what the mean of all may be, for all that is known: with so many bytes each, all will fit.
        required: what a sample must hold at which place, because the tail of a transform works on it.
        packed: whether images of PIL take three bytes for a pixel of RGB, not the four that they have there.
        packed_bytes: what `nbytes` is then.
        finished_bytes: bytes of a sample as it is handed out, where that is more than what is kept.
        form: what of samples is kept, where that is not what the source returns.

    Raises:
        UnsupportedSampleError: (`encode`) something in the sample cannot be pickled, or must not be kept; the message
            names the field.
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
        """Bytes that suffice for a sample on average, for all that is known."""
        return max(self.most_bytes, self.nbytes) + _ONCE

    @property
    def batch_bytes(self) -> int:
        """Bytes that a sample takes in a batch."""
        return max(self.nbytes, self.finished_bytes)

    @property
    def title(self) -> str:
        """What samples look like, in words that two jobs can compare."""
        places = (f"{_written(path) or 'sample'}: {type_name(kind)}" for path, kind in self.required)
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
        """Bytes that its record has at least, without the work of encoding it: those of its arrays, images and text."""
        return HEAD.size + _bytes_inside(sample, 8, set())

    def is_alike(self, sample: Any) -> bool:
        """Whether it holds what is required."""
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


# ---- layout ----


def _laid_out(pickled: memoryview, large: list[pickle.PickleBuffer], copied: set[int]) -> list[memoryview]:
    """The parts of a record: its head, with all that is small, and the buffers."""
    if not large:
        head = bytearray(HEAD.size + pickled.nbytes)
        HEAD.pack_into(head, 0, 0, pickled.nbytes, len(head), 0)
        head[HEAD.size :] = pickled
        return [memoryview(head)]
    start = HEAD.size + len(large) * _TABLE_ENTRY
    end = start + pickled.nbytes
    buffers = [buffer.raw() for buffer in large]
    head = bytearray(aligned(end))
    head[start:end] = pickled
    parts, end = [memoryview(head)], len(head)
    for number, (buffer, raw) in enumerate(zip(large, buffers, strict=True)):
        struct.pack_into("<Q", head, HEAD.size + number * _TABLE_ENTRY, raw.nbytes * 2 + (id(buffer) in copied))
        if end % 64:
            parts.append(memoryview(bytes(aligned(end) - end)))
        parts.append(raw)
        end = aligned(end) + raw.nbytes
    HEAD.pack_into(head, 0, 0, pickled.nbytes, end, len(large))
    return parts


def _taken_apart(record: memoryview, lend: Lend | None) -> tuple[memoryview, list[memoryview]]:
    """The pickle of a record, and the buffers for it."""
    _, pickled, _, count = HEAD.unpack_from(record)
    start = HEAD.size + count * _TABLE_ENTRY
    end, buffers = start + pickled, []
    for (entry,) in struct.iter_unpack("<Q", record[HEAD.size : start]):
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
            lacking = named(_written(path[: number + 1]))
            raise SampleMismatchError(
                f"{_titled(index)} has no {lacking}, on which the random part of the transform works"
            ) from None
    if type(node) is not kind and not (is_image(kind) and is_image(type(node))):
        raise SampleMismatchError(
            f"{_titled(index)}: {named(_written(path))}, on which the random part of the transform works, must be a "
            f"{type_name(kind)}; got a {type_name(type(node))}"
        )


def _written(path: tuple[Any, ...]) -> str:
    """A place in a sample, as one would write it in Python."""
    return "".join(f"[{step!r}]" for step in path)


def _titled(index: int | None) -> str:
    return "a sample" if index is None else f"sample {index}"

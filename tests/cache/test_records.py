"""Samples of any kind come back from bytes as they were, as memory of their own, or are refused by name."""

from __future__ import annotations

import collections
import enum
import io
import itertools
import os
import random
import sys
import tracemalloc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from PIL import Image
from torch.testing._internal.two_tensor import TwoTensor

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec, canonical_bytes
from tests.cache.leaves import Box, Pair, arrays, containers, leaves_of, same, tensors
from tests.sources import CountedSource

CODEC = RecordCodec(0)


def through(sample: Any, codec: RecordCodec = CODEC) -> Any:
    """A sample as it comes back from its record, whose bytes are overwritten afterwards."""
    record = bytearray(b"".join(codec.encode(sample)))
    came = codec.decode(memoryview(record))
    record[:] = bytes(len(record))
    return came


# --- what comes out is what went in


def boxes(count: int) -> torch.Tensor:
    tensor = torch.arange(4.0 * count).view(count, 4).as_subclass(Box)
    tensor.format, tensor.canvas_size = "XYXY", (375, 500)  # type: ignore[attr-defined]
    return tensor


class Colour(enum.Enum):
    RED = "red"


@dataclass
class Target:
    label: int
    mask: npt.NDArray[np.bool_]
    notes: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slim:
    label: int


PLAIN = [
    [None, "", b"", (), set(), frozenset(), 2**100, float("nan"), -0.0, 1j, True, "größer \N{SNOWMAN} \0"],
    [np.int64(3), np.datetime64("2020"), np.str_("a"), np.complex64(1j)],
    ["ü" * 2**19, os.urandom(2**20), bytearray(2**20)],
    {"b": 1, "a": 2, 3: "c", (1, 2): None, None: 0},
    [collections.UserDict({"b": np.arange(3), "a": [2]}), collections.defaultdict(list, {"b": [1]})],
    [collections.deque([1, 2], maxlen=5), Pair(1.0, torch.ones(3)), Slim(4), Colour.RED, Path("/some/where")],
    Target(3, np.ones((70, 70), dtype=np.bool_), ["hard"]),
    [torch.Size([1, 2]), torch.float16, torch.device("cpu"), slice(1, None), range(3), ...],
]


def test_plain_objects_come_back_as_they_were() -> None:
    """Numbers, text, containers and objects keep their types, their order and their attributes."""
    for sample in PLAIN:
        assert same(through({"sample": sample, "again": [sample]}), {"sample": sample, "again": [sample]})
    wrapper = through(TwoTensor(torch.arange(2000.0), torch.ones(2000)))  # has no memory, and is pickled as it says
    assert type(wrapper) is TwoTensor
    assert torch.equal(wrapper.a, torch.arange(2000.0))


def leaves_of_records(count: int) -> dict[str, Any]:
    """Tensors and arrays that rows may not have, or whose order in memory only records keep."""
    values = torch.arange(24.0 * count).view(2, 3, count, 4)
    scales, zeros = torch.tensor([0.5, 0.25]), torch.tensor([0, 1])
    return {
        "channels last": values.to(memory_format=torch.channels_last),
        "one element": values[1:, 2:, 1:2, 3:],
        "subclass": boxes(count),
        "empty subclass": boxes(count)[:0].as_subclass(Box),
        "sparse": torch.eye(count).to_sparse(),
        "sparse rows": torch.eye(count).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.arange(1.0 * count), torch.ones(2)]),
        "quantised": torch.quantize_per_tensor(values[0, 0], 0.5, 3, torch.quint8),
        "quantised by rows": torch.quantize_per_channel(values[:, 0, 0], scales, zeros, 0, torch.qint8),
        "broadcast": np.broadcast_to(np.arange(3), (count, 3)),
        "read-only scalar": np.broadcast_to(np.float32(5), ()),
        "text": np.array(["a", "größer"] * count),
        "empty text": np.zeros(count, "U0"),
        "raw": np.zeros(count, "V8"),
        "dates": np.array(["2020-01-01", "NaT"] * count, "M8[25m]"),
        "fields": np.array([(1, [2, 3])] * count, [("a", ">i4"), ("b", "f8", (2,))]),
        "aligned fields": np.ones(count, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "no fields": np.zeros(count, []),
        "metadata": np.zeros(count, np.dtype("i4", metadata={"unit": "m"})),
        "objects": np.asfortranarray(np.array([[1, "a"], [None, 2.5]] * count, dtype=object)),
        "fields of objects": np.array([(1, "a"), (2, None)] * count, [("a", "i4"), ("b", "O")]),
    }


@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested", "ignore:torch.quantize")
@pytest.mark.filterwarnings("ignore:TypedStorage", "ignore:ComplexHalf")
def test_leaves_of_every_sort_come_back_bit_for_bit() -> None:
    """Small leaves (in the pickle) and large ones (beside it) keep bits, type and attributes, dense ones the order of
    their dimensions in memory. They are writable memory of their own, and nothing else keeps them."""
    small, large = leaves_of(1) | leaves_of_records(3), leaves_of(2, size=1600) | leaves_of_records(1500)
    for kind, leaf in [*small.items(), *large.items()]:
        came = through(leaf)
        assert same(came, leaf), kind
        if isinstance(leaf, np.ndarray):
            assert (type(came), came.flags.writeable, came.flags.aligned) == (np.ndarray, True, True), kind
            in_memory = np.argsort([-stride for stride in leaf.strides], kind="stable")
            if leaf.size > 1 and leaf.transpose(in_memory).flags.c_contiguous:
                assert came.strides == leaf.strides, kind
        elif isinstance(leaf, torch.Tensor):
            if came.layout is torch.strided and not came.is_nested and not came.is_quantized:
                assert came.untyped_storage().nbytes() == came.numel() * came.element_size(), kind
                assert (came.is_conj(), came.is_neg()) == (False, False), kind
            gone = weakref.ref(came)
            del came
            assert gone() is None, kind


def test_arrays_over_files_and_of_other_classes_come_back(tmp_path: Path) -> None:
    """A memmap is an array afterwards; masked arrays, records and foreign dtypes stay what they are."""
    mapped = np.memmap(tmp_path / "file", dtype=np.int32, mode="w+", shape=(2000,))
    mapped[:] = np.arange(2000)
    for array in (mapped, np.memmap(tmp_path / "file", dtype=np.int32, mode="r")):
        came = through(array)
        assert came.flags.writeable
        assert same(came, np.arange(2000, dtype=np.int32))
    masked = np.ma.array(np.arange(3000), mask=np.arange(3000) % 2)  # type: ignore[no-untyped-call]
    records = np.rec.array([(1, 2.0)] * 500, dtype=[("a", "i4"), ("b", "f4")])
    rationals = pytest.importorskip("numpy._core._rational_tests")
    for array in (masked, records, np.array([1, 2], dtype=rationals.rational)):
        came = through(array)
        assert (type(came), came.dtype, came.tolist()) == (type(array), array.dtype, array.tolist())


MODES = ["1", "L", "P", "PA", "LA", "La", "RGB", "RGBX", "RGBA", "RGBa"]
MODES += ["CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"]


def picture(mode: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(np.random.default_rng(0).bytes(len(image.tobytes())) if min(size) else b"")
    if mode in ("P", "PA"):
        image.putpalette(bytes(range(60)))
    image.info = {"dpi": (72, 72), "comment": b"made here"}
    return image


def test_images_of_every_mode_come_back() -> None:
    """With size, palette, transparency, info, class and format, packed or not; and can be drawn into. A plain record
    has four bytes for a pixel of RGB, as PIL has in memory, a packed record three."""
    for mode, size, packed in itertools.product(MODES, [(3, 2), (101, 67), (0, 5)], [False, True]):
        image = picture(mode, size)
        came = through(image, RecordCodec(0, packed=packed))
        assert same(came, image), mode
        if min(size):
            came.putpixel((0, 0), pixel := image.getpixel((2, 1)))
            assert came.getpixel((0, 0)) == pixel, mode
    images = [Image.new("P", (20, 20), 2) for _ in range(2)]
    images[0].putpalette(bytes(range(40)), "RGBA")
    images[1].putpalette(bytes(range(30)), "BGR")
    images[1].info["transparency"] = 2
    for name, image in [("png", images[1]), *((name, picture("RGB", (120, 80))) for name in ("jpeg", "bmp", "tiff"))]:
        file = io.BytesIO()
        image.save(file, name)
        images.append(Image.open(file))
    for image in images:
        came = through({"image": image})["image"]
        assert same(came, image)
        assert came.format == image.format
        assert came.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()
    for packed, nbytes in ((True, 60_000), (False, 80_000)):
        codec = RecordCodec(0, packed=packed)
        assert 0 <= codec.stored_size(codec.encode(picture("RGB", (200, 100)))) - nbytes < 700


def test_what_a_sample_has_twice_it_has_twice_afterwards() -> None:
    """An object is kept once, also in cycles; other tensors over its memory stay views of it."""
    tensor = torch.randn(5000)
    parts = [tensor, np.arange(5000), picture("RGB", (90, 90)), ["a"]]
    came = through([parts, [*parts]])
    assert all(one is two for one, two in zip(*came, strict=True))
    assert CODEC.stored_size(CODEC.encode([tensor] * 9)) < CODEC.stored_size(CODEC.encode([tensor])) + 200
    base, part = through([tensor, tensor[:2000]])
    assert torch.equal(part, tensor[:2000])
    base.zero_()
    assert not part.any()
    owner, views = Target(1, np.zeros(5, dtype=np.bool_)), boxes(3)
    owner.notes.append(owner)
    views.views = [views]  # type: ignore[attr-defined]
    came = through([owner, views])
    assert came[0].notes[0] is came[0]
    assert came[1].views[0] is came[1]
    assert torch.equal(came[1], views)
    assert canonical_bytes(came) == canonical_bytes([owner, views]) != canonical_bytes([owner, boxes(3)])


# --- memory of its own


def test_large_tensors_and_arrays_are_copied_once_into_lent_memory() -> None:
    """The record's parts use the sample's memory; its large tensors and arrays come out in the lent memory."""
    lent: list[npt.NDArray[np.uint8]] = []

    def lend(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        lent.extend(memory := [np.full(size, 99, dtype=np.uint8) for size in sizes])
        return memory

    sample = {"image": torch.arange(6000), "mask": np.arange(5000, dtype=np.int16), "few": torch.arange(4)}
    parts = CODEC.encode(sample)
    sample["image"] += 1
    came = CODEC.decode(memoryview(b"".join(parts)), lend)
    assert same(came, sample)
    assert [memory.nbytes for memory in lent] == [48_000, 10_000]
    assert came["image"].data_ptr() == lent[0].ctypes.data
    assert np.shares_memory(came["mask"], lent[1])
    tracemalloc.start()
    came = CODEC.decode(memoryview(b"".join(parts)))
    assert tracemalloc.get_traced_memory()[0] > 58_000
    came = came["mask"]  # and who keeps a small part does not keep the large one
    assert tracemalloc.get_traced_memory()[0] < 20_000
    tracemalloc.stop()


# --- any sample


LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text()
    | st.binary()
    | st.just(b"x" * 9000)
    | tensors()
    | arrays("U3", "S2", "O")
    | st.builds(picture, st.sampled_from(MODES), st.tuples(st.integers(1, 40), st.integers(1, 40)))
    | st.sampled_from([Colour.RED, np.float32(3), Slim(5), Path("a")])
)


def richer(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Containers that rows do not have, and parts that a sample has twice."""
    return (
        containers(inner)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3).map(collections.UserDict)
        | st.builds(lambda node: [node, node, (node,)], inner)
    )


@settings(max_examples=60)
@given(st.recursive(LEAVES, richer, max_leaves=10))
def test_any_sample_comes_back_and_is_as_large_as_was_said(sample: Any) -> None:
    """Decoding gives the same as was encoded, and no record is smaller than `least_bytes`."""
    parts = CODEC.encode(sample)
    assert same(CODEC.decode(memoryview(b"".join(parts))), sample)
    assert CODEC.least_bytes(sample) <= sum(part.nbytes for part in parts) <= CODEC.stored_size(parts)


def test_sizes_are_known_before_and_on_average() -> None:
    """`least_bytes` is a lower bound of a record's size, and a codec knows the mean size and an upper one."""
    tensor = torch.zeros(10_000)
    loop: list[Any] = ["a" * 100]
    loop += [loop] * 1000
    for sample, least in (
        ({"x": tensor, "y": tensor, "t": "b" * 500}, 40_500),
        ([[tensor] * 1000] * 1000, 40_000),
        (loop, 100),
        (picture("RGB", (100, 50)), 15_000),
        (np.array([None] * 10_000, dtype=object), 0),
    ):
        assert least <= CODEC.least_bytes(sample) <= sum(part.nbytes for part in CODEC.encode(sample))
    codec = RecordCodec.infer([bytes(size) for size in (50, 150, 250)])
    mean = CODEC.stored_size(CODEC.encode(bytes(150)))
    assert codec.nbytes == mean < codec.slot_bytes < mean + 32
    assert mean + 2 * 58 < codec.most_bytes < mean + 6 * 58  # the standard error of the mean
    assert codec.most_slot_bytes > codec.slot_bytes


# --- what cannot be kept


def deep() -> list[Any]:
    node: list[Any] = []
    for _ in range(sys.getrecursionlimit() * 50):
        node = [node]
    return node


def test_what_cannot_be_kept_is_an_error_with_its_sample() -> None:
    """The error names the sample and the reason."""
    for bad, message in [
        (lambda: 0, "pickle"),
        (np.random.default_rng(), "Generator draws random numbers"),
        (random.Random(), "random.Random draws random numbers"),
        (CountedSource(3, (2,)), "CountedSource is a dataset: the whole of it would be kept"),
        (torch.ones(3, requires_grad=True), r"requires grad; return it with .detach"),
        (torch.eye(3).to_sparse().requires_grad_(), "requires grad"),
        (object(), "only equal to itself"),
        (deep(), "recursion"),
    ]:
        for sample in ({"image": torch.zeros(3), "extra": [1, bad]}, (Target(bad, np.zeros(3, np.bool_)),), bad):
            with pytest.raises(UnsupportedSampleError, match=f"^sample 41 cannot be kept as bytes: .*{message}"):
                CODEC.encode(sample, 41)
        assert canonical_bytes(bad) is None


def test_a_required_place_must_hold_its_type() -> None:
    """A sample without a required value, or with a value of another type, is refused."""
    codec = RecordCodec.infer([{"views": [torch.ones(3)]}], required=((("views", 0), torch.Tensor),))
    assert codec.is_alike(good := {"views": [torch.ones(9)], "more": "text"})
    assert same(through(good, codec), good)
    for bad, message in (
        ({"views": []}, r"sample 5 has no field \['views'\]\[0\]"),
        (3, r"sample 5 has no field \['views'\]"),
        ({"views": [boxes(2)]}, r"sample 5: field \['views'\]\[0\].* must be a Tensor; got a .*Box"),
    ):
        assert not codec.is_alike(bad)
        with pytest.raises(SampleMismatchError, match=message):
            codec.encode(bad, 5)

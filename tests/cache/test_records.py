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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from PIL import Image

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec, canonical_bytes
from tests.cache.equality import same
from tests.cache.leaves import Box, Pair, arrays, containers, leaves_of, tensors
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


class Wrapper(torch.Tensor):
    """A tensor that has no memory and dispatches by itself."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        wrapper = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined]
        wrapper.inner = inner
        return wrapper  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, *_: Any) -> Any:
        raise NotImplementedError

    def __reduce_ex__(self, _: Any) -> Any:
        return type(self), (self.inner,)


class InnerWrapper(Wrapper):
    """A subclass that inherits the dispatch."""


class Colour(enum.Enum):
    RED = "red"


class Flags(enum.IntFlag):
    CROWD = 1
    HARD = 2


@dataclass
class Target:
    label: int
    mask: npt.NDArray[np.bool_]
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Slim:
    label: int


class Text(str):
    """A string with attributes."""

    language = "none"


def text() -> Text:
    made = Text("ein Hund")
    made.language = "de"
    return made


PLAIN: dict[str, Any] = {
    "none": None,
    "empty containers": ["", b"", [], (), {}, set(), frozenset(), bytearray()],
    "numbers of NumPy's": [
        np.float32(1.5),
        np.int64(3),
        np.bool_(True),
        np.datetime64("2020"),
        np.str_("a"),
        np.complex64(1j),
    ],
    "numbers": [0, -1, 2**100, 1.5, float("nan"), -0.0, 1j, True],
    "text": "größer \N{SNOWMAN} \0",
    "a text of 1 MB": "ü" * 2**19,
    "bytes of 1 MB": os.urandom(2**20),
    "bytearray of 1 MB": bytearray(2**20),
    "keys in their order": {"b": 1, "a": 2, 3: "c", (1, 2): None, None: 0},
    "ordered dict": collections.OrderedDict(b=1, a=[2]),
    "user dict": collections.UserDict({"b": np.arange(3), "a": [2]}),
    "default dict": collections.defaultdict(list, {"b": [1]}),
    "deque": collections.deque([1, 2], maxlen=5),
    "named tuple": Pair(1.0, torch.ones(3)),
    "data class": Target(3, np.ones((70, 70), dtype=np.bool_), ["hard"]),
    "slots": Slim(4),
    "enums": [Colour.RED, Flags.CROWD | Flags.HARD],
    "text with attributes": text(),
    "path": Path("/some/where"),
    "torch's own": [torch.Size([1, 2]), torch.float16, torch.device("cpu"), slice(1, None), range(3), ...],
}


@pytest.mark.parametrize("sample", PLAIN.values(), ids=PLAIN.keys())
def test_plain_objects_come_back_as_they_were(sample: Any) -> None:
    """Numbers, text, containers and objects keep their types, their order and their attributes."""
    came = through({"sample": sample, "again": [sample]})
    assert same(came, {"sample": sample, "again": [sample]})


@pytest.mark.parametrize("kind", leaves_of(0))
def test_leaves_of_every_sort_come_back_bit_for_bit(kind: str) -> None:
    """All dtypes and bit patterns come back, in the pickle (small leaves) and beside it (large leaves)."""
    for leaf in (leaves_of(1)[kind], leaves_of(2, size=1600)[kind]):
        assert same(through(leaf), leaf)


TENSORS: dict[str, Callable[[int], torch.Tensor]] = {
    "contiguous": lambda n: torch.randn(n, 3, 5),
    "transposed": lambda n: torch.randn(n, 3, 5).permute(2, 0, 1),
    "channels last": lambda n: torch.randn(2, 3, n, 4).to(memory_format=torch.channels_last),
    "with gaps": lambda n: torch.randn(n, 6)[:, ::2],
    "expanded": lambda n: torch.randn(n, 1).expand(n, 7),
    "of one element": lambda n: torch.randn(n, 9)[1:2, 3:4],
    "of no dimension": lambda n: torch.tensor(float(n)),
    "empty": lambda n: torch.empty(0, n, 3, dtype=torch.int16),
    "flipped conjugate": lambda n: torch.randn(n, 2, dtype=torch.complex64).conj(),
    "imaginary part of a conjugate": lambda n: torch.randn(n, 2, dtype=torch.complex64).conj().imag,
    "subclass": boxes,
    "empty subclass": lambda n: boxes(n)[:0].as_subclass(Box),
    "parameter": lambda n: torch.nn.Parameter(torch.randn(n), requires_grad=False),
    "sparse": lambda n: torch.eye(n).to_sparse(),
    "sparse rows": lambda n: torch.eye(n).to_sparse_csr(),
    "nested": lambda n: torch.nested.nested_tensor([torch.randn(n), torch.randn(2)]),
}


@pytest.mark.parametrize("make", TENSORS.values(), ids=TENSORS.keys())
@pytest.mark.filterwarnings("ignore:Sparse", "ignore:The PyTorch API of nested")
def test_tensors_come_back_with_values_strides_and_attributes(
    make: Callable[[int], torch.Tensor], seeded: None
) -> None:
    """Dense tensors keep the order of their dimensions in memory. A view stores only its elements."""
    for count in (3, 2000):
        tensor = make(count)
        came = through(tensor)
        assert same(came, tensor)
        if came.layout is torch.strided and not came.is_nested:
            assert came.untyped_storage().nbytes() == came.numel() * came.element_size()
            assert not came.is_conj()
            assert not came.is_neg()
        kept = weakref.ref(came)
        del came
        assert kept() is None


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:TypedStorage")
def test_quantised_tensors_come_back_with_their_scale() -> None:
    """Per tensor and per channel."""
    for count in (4, 4000):
        values = torch.arange(2.0 * count).view(2, count)
        whole = torch.quantize_per_tensor(values, 0.5, 3, torch.quint8)
        rows = torch.quantize_per_channel(values, torch.tensor([0.5, 0.25]), torch.tensor([0, 1]), 0, torch.qint8)
        for tensor in (whole, rows):
            came = through(tensor)
            assert (came.dtype, came.qscheme()) == (tensor.dtype, tensor.qscheme())
            assert torch.equal(came.dequantize(), tensor.dequantize())


@pytest.mark.parametrize("kind", [Wrapper, InnerWrapper])
def test_a_tensor_that_only_wraps_others_is_pickled_in_its_own_way(kind: type[Wrapper]) -> None:
    """A wrapper without memory is pickled in its own way, also by a class that inherits its dispatch."""
    came = through(kind(torch.arange(2000.0)))
    assert type(came) is kind
    assert torch.equal(came.inner, torch.arange(2000.0))


ARRAYS: dict[str, npt.NDArray[Any]] = {
    "one": np.arange(4000, dtype=np.int16),
    "no dimension": np.array(5.0),
    "no dimension, read-only": np.broadcast_to(np.float32(5), ()),
    "empty": np.empty((0, 3), dtype=np.complex64),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "channels first": np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
    "reversed": np.arange(6)[::-1],
    "with gaps": np.arange(20).reshape(4, 5)[::2, 1:4],
    "broadcast": np.broadcast_to(np.arange(3), (5, 3)),
    "big-endian": np.arange(5, dtype=">f4"),
    "half": np.arange(5, dtype=np.float16),
    "long double": np.arange(5, dtype=np.longdouble),
    "text": np.array(["a", "größer"]),
    "empty text": np.zeros(3, "U0"),
    "bytes": np.array([b"a", b"bcd"]),
    "raw": np.zeros(3, "V8"),
    "dates": np.array(["2020-01-01", "NaT"], "M8[25m]"),
    "spans": np.array([1, 2], "m8[ns]"),
    "fields": np.array([(1, [2, 3])], [("a", ">i4"), ("b", "f8", (2,))]),
    "aligned fields": np.ones(3, np.dtype([("a", "i1"), ("b", "f8")], align=True)),
    "no fields": np.zeros(3, []),
    "with metadata": np.zeros(2, np.dtype("i4", metadata={"unit": "m"})),
    "objects": np.array([1, "a", None, 2.5], dtype=object),
    "fields with objects": np.array([(1, "a"), (2, None)], [("a", "i4"), ("b", "O")]),
    "matrix of objects": np.asfortranarray(np.array([[1, "a"], [None, ()]], dtype=object)),
}


@pytest.mark.parametrize("small", ARRAYS.values(), ids=ARRAYS.keys())
def test_arrays_come_back_with_dtype_shape_and_order(small: npt.NDArray[Any]) -> None:
    """Arrays come back writable. Dense arrays keep the order of their dimensions in memory."""
    large = small
    if small.ndim and small.size:
        large = np.concatenate([small] * 3000, axis=int(np.argmax(small.strides)))
        # Concatenating gives the first two orders of memory only.
        order = np.argsort([-stride for stride in small.strides], kind="stable")
        large = np.ascontiguousarray(large.transpose(order)).transpose(np.argsort(order))
    for array in (small, large):
        came = through(array)
        assert type(came) is np.ndarray
        assert same(came, array)
        assert came.flags.writeable
        assert came.flags.aligned
        if array.size > 1 and (array.transpose(np.argsort([-stride for stride in array.strides]))).flags.c_contiguous:
            assert came.strides == array.strides


def test_an_array_of_another_librarys_dtype_keeps_it() -> None:
    """Its name alone, as of ml_dtypes' bfloat16, would mean raw bytes."""
    rationals = pytest.importorskip("numpy._core._rational_tests")
    array = np.array([1, 2], dtype=rationals.rational)
    came = through(array)
    assert came.dtype == array.dtype
    assert came.tolist() == array.tolist()


def test_arrays_over_files_and_of_other_classes_come_back(tmp_path: Path) -> None:
    """A memmap comes out as the array that it is; masked arrays and records keep their class."""
    mapped = np.memmap(tmp_path / "file", dtype=np.int32, mode="w+", shape=(2000,))
    mapped[:] = np.arange(2000)
    for array in (mapped, np.memmap(tmp_path / "file", dtype=np.int32, mode="r")):
        came = through(array)
        assert type(came) is np.ndarray
        assert came.flags.writeable
        assert same(came, np.arange(2000, dtype=np.int32))
    masked = np.ma.array(np.arange(3000), mask=np.arange(3000) % 2)  # type: ignore[no-untyped-call]
    came = through(masked)
    assert type(came) is type(masked)
    assert came.tolist() == masked.tolist()
    records = np.rec.array([(1, 2.0)] * 500, dtype=[("a", "i4"), ("b", "f4")])
    came = through(records)
    assert type(came) is np.recarray
    assert came.b.tolist() == [2.0] * 500


MODES = ["1", "L", "P", "PA", "LA", "La", "RGB", "RGBX", "RGBA", "RGBa"]
MODES += ["CMYK", "YCbCr", "LAB", "HSV", "I", "F", "I;16", "I;16L", "I;16B", "I;16N"]


def picture(mode: str, size: tuple[int, int]) -> Image.Image:
    image = Image.new(mode, size)
    image.frombytes(np.random.default_rng(0).bytes(len(image.tobytes())) if min(size) else b"")
    if mode in ("P", "PA"):
        image.putpalette(bytes(range(60)))
    image.info = {"dpi": (72, 72), "comment": b"made here"}
    return image


@pytest.mark.parametrize("mode", MODES)
def test_images_of_every_mode_come_back(mode: str) -> None:
    """With size, palette and info, small, large and empty, packed or not; and can be drawn into."""
    for size, packed in itertools.product([(3, 2), (101, 67), (0, 5)], [False, True]):
        image = picture(mode, size)
        came = through(image, RecordCodec(0, packed=packed))
        assert same(came, image)
        if min(size):
            came.putpixel((0, 0), image.getpixel((size[0] - 1, size[1] - 1)))
            assert came.getpixel((0, 0)) == image.getpixel((size[0] - 1, size[1] - 1))


def test_palettes_come_back_with_their_transparency() -> None:
    """A palette of four channels, one that has been put in another order, and one of a file."""
    given = Image.new("P", (20, 20), 2)
    given.putpalette(bytes(range(40)), "RGBA")
    turned = Image.new("P", (20, 20), 2)
    turned.putpalette(bytes(range(30)), "BGR")
    turned.info["transparency"] = 2
    file = io.BytesIO()
    turned.save(file, "png")
    for image in (given, turned, Image.open(file)):
        came = through(image)
        assert same(came, image)
        assert came.convert("RGBA").tobytes() == image.convert("RGBA").tobytes()


@pytest.mark.parametrize("name", ["png", "jpeg", "gif", "bmp", "tiff"])
def test_an_image_that_was_only_opened_keeps_its_class(name: str) -> None:
    """It also keeps the format of its file."""
    file = io.BytesIO()
    picture("L" if name == "gif" else "RGB", (120, 80)).save(file, name)
    image = Image.open(file)
    came = through({"image": image})["image"]
    assert same(came, image)
    assert came.format == image.format


def test_a_packed_record_has_three_bytes_for_a_pixel() -> None:
    """A plain record has four bytes for a pixel of RGB, as PIL has in memory. Other modes are equal in both."""
    image, grey = picture("RGB", (200, 100)), picture("L", (200, 100))
    for packed, rgb in ((True, 60_000), (False, 80_000)):
        codec = RecordCodec(0, packed=packed)
        assert 0 <= codec.stored_size(codec.encode(image)) - rgb < 700
        assert 0 <= codec.stored_size(codec.encode(grey)) - 20_000 < 700


def test_what_a_sample_has_twice_it_has_twice_afterwards() -> None:
    """One object, kept once: a tensor, an array, an image or a list; other tensors over its memory are apart."""
    tensor, array, image, names = torch.randn(5000), np.arange(5000), picture("RGB", (90, 90)), ["a"]
    sample = [tensor, array, image, names]
    came = through({"one": sample, "two": [*sample]})
    for one, two in zip(came["one"], came["two"], strict=True):
        assert one is two
    assert CODEC.stored_size(CODEC.encode([tensor] * 9)) < CODEC.stored_size(CODEC.encode([tensor])) + 200
    base, part = through([tensor, tensor[:2000]])
    base.zero_()
    assert torch.equal(part, tensor[:2000])


def test_cycles_come_back_as_cycles() -> None:
    """A list in itself, an object that knows its owner, and a tensor whose attributes lead back to it."""
    loop: list[Any] = [1]
    loop.append(loop)
    came = through(loop)
    assert came[1] is came
    owner = Target(1, np.zeros(5, dtype=np.bool_))
    owner.notes.append(owner)  # type: ignore[arg-type]
    came = through(owner)
    assert came.notes[0] is came
    for tensor in (torch.arange(3000.0), boxes(3)):
        tensor.views = [tensor]  # type: ignore[attr-defined]
        came = through(tensor)
        assert came.views[0] is came
        assert torch.equal(came, tensor)


# --- memory of its own


def test_who_keeps_a_small_part_does_not_keep_the_large_one() -> None:
    """Each buffer is memory of its own."""
    sample = {"image": torch.zeros(1 << 22, dtype=torch.uint8), "boxes": np.ones((500, 4)), "few": np.ones(3)}
    record = memoryview(b"".join(CODEC.encode(sample)))
    tracemalloc.start()
    try:
        came = CODEC.decode(record)
        whole = tracemalloc.get_traced_memory()[0]
        boxes, few = came["boxes"], came["few"]
        del came
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert whole > 1 << 22
    assert left < 1 << 16
    assert boxes.sum() + few.sum() == 2003


def test_memory_can_be_lent_for_what_is_large() -> None:
    """Large tensors and arrays of a sample lie in the lent memory."""
    lent: list[npt.NDArray[np.uint8]] = []

    def lend(sizes: Sequence[int]) -> list[npt.NDArray[np.uint8]]:
        memory = [np.full(size, 99, dtype=np.uint8) for size in sizes]
        lent.extend(memory)
        return memory

    sample = {"image": torch.arange(6000), "mask": np.arange(5000, dtype=np.int16), "few": torch.arange(4)}
    came = CODEC.decode(memoryview(b"".join(CODEC.encode(sample))), lend)
    assert same(came, sample)
    assert [memory.nbytes for memory in lent] == [48_000, 10_000]
    assert came["image"].data_ptr() == lent[0].ctypes.data
    assert np.shares_memory(came["mask"], lent[1])


def test_a_large_tensor_is_encoded_without_a_copy() -> None:
    """The record's parts use the tensor's memory."""
    tensor = torch.zeros(100_000)
    (part,) = [part for part in CODEC.encode({"x": tensor, "y": 1}) if part.nbytes == 400_000]
    tensor.fill_(1)
    assert torch.frombuffer(bytearray(part), dtype=torch.float32).sum() == 100_000


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


SAMPLES = st.recursive(LEAVES, richer, max_leaves=15)


@given(SAMPLES)
def test_any_sample_comes_back_and_is_as_large_as_was_said(sample: Any) -> None:
    """Decoding gives the same as was encoded, and no record is smaller than `least_bytes`."""
    parts = CODEC.encode(sample)
    assert same(CODEC.decode(memoryview(b"".join(parts))), sample)
    assert CODEC.least_bytes(sample) <= sum(part.nbytes for part in parts) <= CODEC.stored_size(parts)


def test_least_bytes_counts_what_is_kept_once_once() -> None:
    """Repeated words, one tensor under two names, and cyclic samples count once."""
    tensor = torch.zeros(10_000)
    loop: list[Any] = ["a" * 100]
    loop += [loop] * 1000
    samples: list[Any] = [
        {"labels": ["a long category"] * 1000},
        {"x": tensor, "y": tensor},
        [[tensor] * 1000] * 1000,
        loop,
        np.array([None] * 10_000, dtype=object),
        [(), (), 0],
    ]
    assert all(CODEC.least_bytes(sample) <= sum(part.nbytes for part in CODEC.encode(sample)) for sample in samples)
    for sample, nbytes in (({"x": tensor, "t": "b" * 500}, 40_500), (picture("RGB", (100, 50)), 15_000)):
        assert CODEC.least_bytes(sample) >= nbytes


# --- what cannot be kept


def counting() -> Iterable[int]:
    yield 1


def deep() -> list[Any]:
    node: list[Any] = []
    for _ in range(sys.getrecursionlimit() * 50):
        node = [node]
    return node


UNSUPPORTED: dict[str, tuple[Callable[[], Any], str]] = {
    "lambda": (lambda: lambda: 0, "pickle"),
    "generator object": (counting, "generator"),
    "NumPy's generator": (np.random.default_rng, "Generator draws random numbers"),
    "Python's generator": (random.Random, "random.Random draws random numbers"),
    "dataset": (lambda: CountedSource(3, (2,)), "CountedSource is a dataset: the whole of it would be kept"),
    "tensor that requires grad": (lambda: torch.ones(3, requires_grad=True), r"requires grad; return it with .detach"),
    "sparse one": (lambda: torch.eye(3).to_sparse().requires_grad_(), "requires grad"),
    "open file": (lambda: open(os.devnull), "cannot pickle '_io.TextIOWrapper'"),  # noqa: SIM115
    "nesting without end": (deep, "recursion"),
}


@pytest.mark.parametrize(("make", "message"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_what_cannot_be_kept_is_an_error_with_its_sample(make: Callable[[], Any], message: str) -> None:
    """The error names the sample and the reason. A file in memory can be stored."""
    bad = make()
    for sample in ({"image": torch.zeros(3), "extra": [1, bad]}, (Target(bad, np.zeros(3, np.bool_)),), bad):
        with pytest.raises(UnsupportedSampleError, match=f"^sample 41 cannot be kept as bytes: .*{message}"):
            CODEC.encode(sample, 41)
    if isinstance(bad, io.IOBase):
        bad.close()
    assert through({"file": io.BytesIO(b"abc")})["file"].getvalue() == b"abc"


def test_a_required_place_must_hold_its_type() -> None:
    """A sample without a required value, or with a value of another type, is refused."""
    codec = RecordCodec.infer(
        [{"views": [torch.ones(3)], "label": 1}], required=((("views", 0), torch.Tensor), (("label",), int))
    )
    good = {"views": [torch.ones(9)], "label": 7, "more": "text"}
    assert codec.is_alike(good)
    assert same(through(good, codec), good)
    for bad, message in (
        ({"views": [], "label": 1}, r"sample 5 has no field \['views'\]\[0\]"),
        ({"label": 1}, r"sample 5 has no field \['views'\]"),
        ({"views": [boxes(2)], "label": 1}, r"sample 5: field \['views'\]\[0\].* must be a Tensor; got a .*Box"),
        ({"views": [torch.ones(3)], "label": True}, r"field \['label'\].* must be a int; got a bool"),
        (3, r"sample 5 has no field \['views'\]"),
    ):
        assert not codec.is_alike(bad)
        with pytest.raises(SampleMismatchError, match=message):
            codec.encode(bad, 5)
    assert codec.title == "records; ['views'][0]: Tensor; ['label']: int"


# --- sizes, and comparing


def test_a_codec_knows_what_its_samples_cost() -> None:
    """A codec knows the mean size of its records, and an upper estimate of it, with the bytes of a slot."""
    samples = [bytes(size) for size in (100, 200, 300)]
    sizes = [CODEC.stored_size(CODEC.encode(sample)) for sample in samples]
    codec = RecordCodec.infer(samples)
    assert codec.nbytes == round(np.mean(sizes))
    assert codec.nbytes < codec.slot_bytes < codec.nbytes + 32
    spread = float(np.std(sizes, ddof=1)) / 3**0.5
    assert np.mean(sizes) + 2 * spread < codec.most_bytes < np.mean(sizes) + 6 * spread
    assert codec.most_slot_bytes > codec.slot_bytes
    assert RecordCodec.infer(samples[:1]).most_slot_bytes == RecordCodec.infer(samples[:1]).slot_bytes


def test_equal_objects_have_equal_canonical_bytes() -> None:
    """A repeated object and two equal objects have the same bytes. Other contents or types have other bytes."""
    array = np.arange(5000)
    assert canonical_bytes([array, array]) == canonical_bytes([array, array.copy()])
    assert canonical_bytes([array]) != canonical_bytes([array + 1])
    assert canonical_bytes(Slim(1)) != canonical_bytes(Slim(2))
    assert canonical_bytes(boxes(3)) == canonical_bytes(boxes(3)) != canonical_bytes(boxes(3).as_subclass(torch.Tensor))
    assert canonical_bytes(picture("RGB", (9, 9))) == canonical_bytes(picture("RGB", (9, 9)))
    loop: list[Any] = []
    loop.append(loop)
    assert canonical_bytes(loop) is not None
    assert canonical_bytes(lambda: 0) is None


def test_the_test_itself_sees_differences() -> None:
    """`same` sees every kind of difference that the tests of this file rely on."""
    pairs = [
        (torch.ones(2, 3), torch.ones(3, 2).T),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (boxes(2), boxes(2).as_subclass(torch.Tensor)),
        (np.zeros(2), np.zeros(2, dtype=">f8")),
        (1, True),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([array := np.zeros(1), array], [np.zeros(1), np.zeros(1)]),
        (Target(1, np.zeros(1, np.bool_)), Target(2, np.zeros(1, np.bool_))),
        (picture("L", (2, 2)), Image.new("L", (2, 2))),
    ]
    for left, right in pairs:
        assert same(left, left)
        assert not same(left, right)

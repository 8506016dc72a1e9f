"""A sample as one blob: it comes back as it was, and is never wrong when damaged."""

import math
import random
import struct
import zlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from lightning_stocache.cache.codec import UnsupportedSampleError
from lightning_stocache.source.blob import decode_blob, encode_blob
from lightning_stocache.source.samples import bits


def image(mode: str) -> Image.Image:
    pixels = np.random.default_rng(0).integers(0, 256, (7, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).convert(mode)


def with_transparency() -> Image.Image:
    made = image("P")
    made.info["transparency"] = b"\x00\x80"
    return made


INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
LEAVES: list[Any] = [
    *(torch.tensor([0, 1, 1]).to(dtype) for dtype in INTEGERS),
    *(
        torch.tensor([0.5, -1]).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)
    ),
    *(torch.tensor([3, 4], dtype=dtype) for dtype in (torch.uint16, torch.uint32, torch.uint64)),
    torch.zeros(2, dtype=torch.float8_e4m3fn),
    *(torch.zeros(()), torch.zeros(0, 3), torch.arange(6.0).reshape(2, 3).t(), torch.tensor([1 + 2j]).conj()),
    tv_tensors.Image(torch.zeros(3, 2, 2, dtype=torch.uint8)),
    *(np.zeros((2, 0)), np.array(3), np.arange(6).reshape(2, 3).T, np.array([1, 2], ">f4"), np.array(["a", "bcd"])),
    *(np.float32(2), np.float64(-0.0), np.int64(3), np.bool_(True), np.str_("x"), np.datetime64("2020-01-01")),
    *(None, True, 1, -(2**80), 1.5, -0.0, math.inf, struct.unpack(">d", b"\x7f\xf8\0\0\0\0\0\1")[0]),
    *("", 'x\ud800é"\\', b"", b"abc", (), [], {}),
    *map(image, ("RGB", "L", "P", "1", "F", "I;16", "RGBA", "CMYK", "LA")),
    with_transparency(),
]


@pytest.mark.parametrize("leaf", LEAVES, ids=lambda leaf: f"{type(leaf).__name__}-{getattr(leaf, 'dtype', '')}")
def test_every_kind_of_leaf_comes_back(leaf: Any) -> None:
    """Bit for bit, with its type; in containers, too."""
    for sample in (leaf, {"a": [leaf, (leaf, 3)], 7: leaf}):
        assert bits(decode_blob(encode_blob(sample, 5), 5)) == bits(sample)


def test_a_palette_comes_back_with_what_it_lets_through() -> None:
    """An image with a palette is converted as it was before."""
    before = with_transparency()
    after = decode_blob(encode_blob(before, 0), 0)
    assert after.convert("RGBA").tobytes() == before.convert("RGBA").tobytes()


leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=20)
samples = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(samples, st.integers(0, 2**40))
@settings(max_examples=50)
def test_any_structure_comes_back(sample: Any, index: int) -> None:
    """Types, order of keys, the bits of floats."""
    assert bits(decode_blob(encode_blob(sample, index), index)) == bits(sample)


def test_what_is_read_is_the_samples_own() -> None:
    """Writing to it changes neither the blob nor a later read."""
    blob = encode_blob((torch.zeros(2), np.zeros(2)), 0)
    tensor, array = decode_blob(blob, 0)
    tensor += 1
    array += 1
    assert decode_blob(blob, 0)[0].sum() == decode_blob(blob, 0)[1].sum() == 0


class Pair(NamedTuple):
    left: int


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        ({"a": [1, {2}]}, r"sample\['a'\]\[1\] is a set"),
        (Pair(1), "Pair"),
        (torch.nn.Parameter(torch.zeros(1)), "Parameter"),
        (
            (0, torch.zeros(1, requires_grad=True)),
            r"sample\[1\] is a .*Tensor of torch.float32, which cannot be packed",
        ),
        ({"x": torch.eye(2).to_sparse()}, r"sample\['x'\] is a .*What can be packed: dense tensors"),
        (np.array([object()]), "of object"),
        ([{(1, 2): 3}], r"sample\[0\] is a dict.*strings or ints as keys"),
        (tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(2, 2)), "BoundingBoxes"),
        (lambda: 0, "function"),
    ],
)
def test_what_cannot_be_packed_is_named(sample: Any, words: str) -> None:
    """The place in the sample, and what lies there."""
    with pytest.raises(UnsupportedSampleError, match=words):
        encode_blob(sample, 0)


def test_no_damaged_blob_gives_a_sample() -> None:
    """With any bit flipped, cut anywhere, with zeros in place of the rest or more behind it; or of another index."""
    blob = encode_blob({"image": torch.arange(40), "label": 3}, 7)
    damaged = [blob + b" "]
    for bit in random.Random(0).sample(range(8 * len(blob)), 2000):
        flipped = bytearray(blob)
        flipped[bit // 8] ^= 1 << bit % 8
        damaged.append(bytes(flipped))
    for end in range(len(blob)):
        damaged += [blob[:end], blob[:end] + bytes(len(blob) - end)]
    for content in damaged:
        if content != blob:
            with pytest.raises(ValueError, match="no packed sample"):
                decode_blob(content, 7)
    with pytest.raises(ValueError, match="here lies sample 7"):
        decode_blob(blob, 8)


@pytest.mark.parametrize(
    "tree",
    [
        '{"array":0,"dtype":"O","shape":[1]}',
        '{"tensor":0,"dtype":"load","shape":[8]}',
        '{"tensor":0,"dtype":"uint8","shape":[-8]}',
        '{"tensor":3,"dtype":"uint8","shape":[8]}',
        '{"image":["none",[2,4],null,null,{"bytes":0}]}',
        '{"set":0}',
        "{}",
        "[" * 100_000,
    ],
)
def test_a_blob_that_others_have_made_is_no_crash(tree: str) -> None:
    """Its checksum is right, and what it says makes no sample: bytes are never taken for addresses of objects."""
    header = f"[7,{tree},[8]]".encode()
    blob = struct.pack("<I", len(header)) + header + b"\1" * 8
    with pytest.raises((ValueError, TypeError, LookupError, AttributeError, StopIteration, RuntimeError)):
        decode_blob(struct.pack("<I", zlib.crc32(blob)) + blob, 7)

"""A sample comes out of its bytes exactly as it went in, and one that differs from the first is refused in words."""

import collections
import enum
import gc
import pickle
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torchvision import tv_tensors

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.rows import SampleSpec
from tests.cache.leaves import Pair, arrays, containers, leaves_of, same, tensors


class Colour(enum.IntEnum):
    RED = 1


class Scaled(collections.namedtuple("Scaled", "x y")):
    """Computes in its constructor."""

    def __new__(cls, x: Any, y: Any = None) -> Any:
        return super().__new__(cls, x / 255, y)


class Swapped(collections.namedtuple("Swapped", "x y")):
    """Has its items in another order than the arguments of its constructor."""

    def __new__(cls, y: Any, x: Any) -> Any:
        return super().__new__(cls, x, y)


def tagged(number: int) -> Scaled:
    """A tuple with an attribute."""
    sample = Scaled(number, 1)
    sample.path = "a.png"
    return sample


def row_of(spec: SampleSpec, sample: Any) -> list[bytes]:
    """What a cache keeps of a sample, per field."""
    return [bytes(content) for content in spec.contents(spec.encode(sample))]


def assert_round_trip(*samples: Any) -> None:
    """Each of them alone, and all of them as the rows of one gather."""
    spec = SampleSpec.infer(samples[0])
    rows = [row_of(spec, sample) for sample in samples]
    for row, sample in zip(rows, samples, strict=True):
        assert tuple(map(len, row)) == spec.row_bytes
        assert same(spec.decoded(row), sample)
    memory = [np.frombuffer(bytearray().join(field), dtype=np.uint8) for field in zip(*rows, strict=True)]
    for came, sample in zip(spec.split(memory, len(samples)), samples, strict=True):
        assert same(came, sample)


# --- what goes in comes out


numbers = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.complex_numbers()
leaves = numbers | tensors().map(torch.Tensor.contiguous) | arrays().map(np.ascontiguousarray)
nestings = st.recursive(leaves, containers, max_leaves=8)


@settings(max_examples=60)
@given(sample=nestings, other=nestings)
def test_any_nesting_comes_out_as_it_went_in(sample: Any, other: Any) -> None:
    """Any structure around any leaves is kept, by a pickled spec too; another sample has the same, or is refused."""
    assert_round_trip(sample, sample)
    spec = SampleSpec.infer(sample)
    again = pickle.loads(pickle.dumps(spec))
    assert again == spec
    assert same(again.decoded(row_of(spec, sample)), sample)
    try:
        row = row_of(spec, other)
    except SampleMismatchError:
        assert SampleSpec.infer(other) != spec
    else:
        assert SampleSpec.infer(spec.decoded(row)) == spec  # the keys of a dict may have had another order


@pytest.mark.skipif(not hasattr(getattr(np, "dtypes", None), "StringDType"), reason="NumPy before 2 has no StringDType")
def test_arrays_of_strings_of_any_length_are_no_rows() -> None:
    """Their bytes are addresses."""
    with pytest.raises(UnsupportedSampleError):
        SampleSpec.infer(np.array(["a", "bc"], dtype=np.dtypes.StringDType()))


def test_dicts_in_another_order_and_read_only_arrays_are_taken() -> None:
    """The keys of a dict are looked up; an OrderedDict in another order is another value, and refused."""
    spec = SampleSpec.infer({"a": 1, "b": 2.0})
    assert spec.decoded(row_of(spec, {"b": 3.0, "a": 4})) == {"a": 4, "b": 3.0}
    assert (spec.row_bytes, spec.nbytes, spec.slot_bytes) == ((8, 8), 16, 20)
    frozen = np.arange(6)
    frozen.flags.writeable = False  # cached without a warning, and served as an array of one's own
    spec = SampleSpec.infer(frozen)
    came = spec.decoded(row_of(spec, frozen))
    assert same(came, frozen)
    came[:] = 0
    assert frozen[5] == 5
    with pytest.raises(SampleMismatchError, match=r"keys \['a', 'b'\].*got the keys \['b', 'a'\]"):
        SampleSpec.infer(OrderedDict(a=1, b=2)).encode(OrderedDict(b=2, a=1))


@pytest.mark.parametrize(
    "sample",
    [
        Scaled(255.0, torch.tensor([1])),
        {"box": [Swapped(1, 2.0), Swapped(torch.zeros(2), 4)]},
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.zeros(2)]),
    ],
)
def test_a_namedtuple_with_a_constructor_comes_out_as_it_went_in(sample: Any) -> None:
    """The constructor, which computes or orders its arguments, is not called again."""
    assert_round_trip(sample, sample)


# --- what is refused, and how


IMAGE = torch.zeros(3, 4, dtype=torch.uint8)
BOXES = tv_tensors.BoundingBoxes(torch.zeros(1, 4), format="XYXY", canvas_size=(4, 5))  # type: ignore[call-overload]


def test_what_cannot_be_cached_is_refused_in_words() -> None:
    """The error names the field and what it is, and says what to return instead."""
    for leaf, words in [
        (Image.new("RGB", (2, 2)), "PIL.Image.Image, which cannot be cached"),
        ("cat", "a str, which cannot be cached; return tensors"),
        (np.array([None, 1]), "of dtype object, which"),
        (torch.eye(2).to_sparse(), "Tensor of layout torch.sparse_coo.*to_dense"),
        (torch.zeros(2, requires_grad=True), "without grad.*detach"),
        (torch.zeros(2, device="meta"), "on meta"),
        (BOXES, "without grad and attributes"),
        (2**63, "more than 64 bits"),
        (Colour.RED, "Colour, which"),
        (collections.defaultdict(int, a=1), "defaultdict, which.*plain dicts"),
    ]:
        with pytest.raises(UnsupportedSampleError, match=rf"(?s)field \['x'\]\[1\] (is|must be) .*{words}"):
            SampleSpec.infer({"x": (0, leaf)})
        with pytest.raises(SampleMismatchError, match=rf"(?s)sample 5: field \['x'\]\[1\] must be .*; got .*{words}"):
            SampleSpec.infer({"x": (0, torch.zeros(2))}).encode({"x": (0, leaf)}, 5)


def test_a_tuple_with_attributes_is_refused() -> None:
    """Rows would drop the attributes."""
    with pytest.raises(UnsupportedSampleError, match=r"field \['x'\] is a .*Scaled with attributes of its own: path"):
        SampleSpec.infer({"x": tagged(1)})


def test_every_mismatch_says_where_what_was_expected_and_what_came() -> None:
    """The error names the index, the field, the expected and the actual; nothing is cast, broadcast or cut to fit."""
    mismatches: list[tuple[Any, Any, str, str]] = [
        (IMAGE, IMAGE[:1], r"shape \(3, 4\)", r"shape \(1, 4\)"),
        (IMAGE, IMAGE.float(), "dtype torch.uint8", "dtype torch.float32"),
        (IMAGE, tv_tensors.Image(IMAGE), "a? ?Tensor", "Image of dtype"),
        (np.zeros(2, "<f4"), np.zeros(2, ">f4"), "float32", ">f4"),
        (1, 1.0, "int", "float"),
        ((1, 2), [1, 2], "a tuple of 2", "a list"),
        ((1, 2), (1, 2, 3), "a tuple of 2", "one of 3"),
        (Pair(1, 2), (1, 2), "Pair of 2", "a tuple"),
        ({"a": 1}, {"a": 1, "b": 2}, r"the keys \['a'\]", r"the keys \['a', 'b'\]"),
        ({1: 1}, {True: 1}, r"the keys \[1\]", r"the keys \[True\]"),
        ({"a": 1, 2: 1}, {2.0: 1, "a": 1}, r"the keys \['a', 2\]", r"the keys \[2.0, 'a'\]"),
        (OrderedDict({0: 1}), OrderedDict({False: 1}), r"the keys \[0\]", r"the keys \[False\]"),
        (Scaled(0, 1), tagged(0), "a .*Scaled without attributes", "one with path"),
        (1, 2**63, "int", "an int of more than 64 bits: 9223372036854775808"),
    ]
    for first, other, expected, came in mismatches:
        words = rf"sample 17: field \['x'\]\.label must be .*{expected}.*, as in all rows of this cache; got .*{came}"
        with pytest.raises(SampleMismatchError, match=words):
            SampleSpec.infer({"x": Pair(0, first)}).encode({"x": Pair(0, other)}, 17)


def named_tensor() -> torch.Tensor:
    """A tensor with an attribute."""
    tensor = torch.ones(3)
    tensor.name_of_class = "cat"  # type: ignore[attr-defined]
    return tensor


def form_of(kind: str, leaf: Any) -> Any:
    """A sample with a leaf at its top, or beside another one."""
    forms: dict[str, Any] = {"leaf": leaf, "tuple": (leaf, 3), "list": [leaf, 3], "dict": {"x": leaf, "y": 3}}
    return forms[kind]


@pytest.mark.parametrize("kind", ["leaf", "tuple", "list", "dict"])
def test_many_at_once_are_encoded_as_one_by_one(kind: str) -> None:
    """Where one of them differs from the first, in whatever way, each is to be encoded by itself."""
    for leaf in (IMAGE, np.arange(3.0), 7, 2.5, True, 1j, None):
        samples = [form_of(kind, each) for each in (leaf, leaf, leaf)]
        spec = SampleSpec.infer(samples[0])
        together = spec.encode_all(samples)
        assert together is not None
        for parts, sample in zip(together, samples, strict=True):
            assert same(list(parts), spec.encode(sample))
        others: list[Any] = [IMAGE, np.arange(3.0), 7, 2.5, True, 1j, None, "a", np.float32(1), BOXES, Colour.RED]
        for other in others:
            if type(other) is not type(leaf):
                assert spec.encode_all([samples[0], form_of(kind, other)]) is None


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ((1, 2), (1, 2, 3)),
        ((1, 2), [1, 2]),
        ({"a": 1}, {"a": 1, "b": 2}),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, OrderedDict(a=1)),
        ({"a": 1}, {np.str_("a"): 1}),
        ({1: 1}, {True: 1}),
        (1, 2**63),
        (IMAGE, IMAGE[:1]),
        (IMAGE, IMAGE.float()),
        (torch.ones(3), torch.ones(3).requires_grad_()),
        (torch.ones(3), torch.ones(3, device="meta")),
        (torch.ones(3), torch.ones(3).to_sparse()),
        (torch.ones(3), named_tensor()),
        (np.arange(3.0), np.arange(4.0)),
        (np.arange(3.0), np.arange(3.0, dtype=">f8")),
        ((IMAGE, IMAGE.clone()), (IMAGE, IMAGE[:])),
        (Pair(1, 2), Pair(1, 2)),
        ((1, (2,)), (1, (2,))),
    ],
)
def test_what_may_differ_is_not_encoded_at_once(first: Any, other: Any) -> None:
    """Nor samples of several containers, which no fast check knows."""
    assert SampleSpec.infer(first).encode_all([first, other]) is None


def test_the_keys_of_a_dict_may_have_another_order_when_encoded_at_once() -> None:
    assert SampleSpec.infer({"a": 1, "b": 2.0}).encode_all([{"b": 3.0, "a": 4}, {"a": 5, "b": 6.0}]) == [
        [4, 3.0],
        [5, 6.0],
    ]


def test_samples_let_go_of_their_memory_when_the_last_of_them_goes() -> None:
    """The memory of a batch is free at once, without the garbage collector, to be used again."""
    spec = SampleSpec.infer({"image": torch.zeros(4), "rest": (1, np.zeros(3))})
    memory = [np.zeros(size, np.uint8) for size in spec.sizes(3)]
    gone = [weakref.ref(field) for field in memory]
    gc.disable()
    samples = spec.split(memory, 3)
    del memory
    assert gone[0]() is not None
    del samples
    assert [field() for field in gone] == [None] * 3
    gc.enable()


# --- at their places of a batch


def test_many_samples_land_as_single_ones_do() -> None:
    """Leaves of every sort come out bit for bit, at the places of single ones, and nothing between changes."""
    samples = [{"a": leaves_of(number), "b": [number]} for number in range(4)]
    assert_round_trip(*samples)
    spec = SampleSpec.infer(samples[0])
    encoded = [spec.encode(sample) for sample in samples]
    expected = [row_of(spec, sample) for sample in samples]
    for places in ([2, 3, 4, 5], [0, 2, 3, 5], [2, 4, 3, 5]):  # in a row, apart, in disorder
        memory, single = ([np.full(size, 9, dtype=np.uint8) for size in spec.sizes(6)] for _ in range(2))
        contents = spec.put_many(spec.rows(memory, 6), places, encoded)
        assert [[bytes(field) for field in content] for content in contents] == expected
        for place, parts in zip(places, encoded, strict=True):
            spec.put_many(spec.rows(single, 6), [place], [parts])
        for number, (field, other) in enumerate(zip(memory, single, strict=True)):
            assert np.array_equal(field, other)
            rows = field.reshape(6, -1)
            assert [bytes(rows[place]) for place in places] == [content[number] for content in expected]
            assert (np.delete(rows, places, axis=0) == 9).all()

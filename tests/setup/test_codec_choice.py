"""Samples lie as rows where all of them are of one shape, else as records, which are tried with each."""

from __future__ import annotations

import datetime
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup.codec_choice import choose_codec
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.transform_split import Cut

SAMPLES = 12


def indices(samples: list[Any]) -> list[int]:
    return [10 * number for number in range(len(samples))]


def choose(samples: list[Any], layout: Layout = "auto", cut: Cut | None = None) -> Any:
    return choose_codec(indices(samples), samples, layout, cut)


def through(codec: Any, sample: Any) -> Any:
    return codec.decode(memoryview(b"".join(codec.contents(codec.encode(sample)))))


ROWS = [(torch.full((3, 4), float(number)), number) for number in range(SAMPLES)]
RAGGED = [{"audio": torch.zeros(100 + number), "text": "a" * number} for number in range(SAMPLES)]


def test_samples_of_one_shape_are_rows() -> None:
    """Where they hold nothing but numbers; unless records are asked for."""
    for layout in ("auto", "rows"):
        choice = choose(ROWS, layout)  # type: ignore[arg-type]
        assert choice.codec == SampleSpec.infer(ROWS[0])
        assert choice.odd is None
    choice = choose(ROWS, "records")
    assert type(choice.codec) is RecordCodec
    assert choice.odd is None
    image, label = through(choice.codec, ROWS[3])
    assert torch.equal(image, ROWS[3][0])
    assert label == 3


@pytest.mark.parametrize(
    "samples",
    [
        RAGGED,
        [torch.zeros(3 + number % 2) for number in range(SAMPLES)],
        ["text"] * SAMPLES,
        [Image.new("RGB", (9, 9))] * SAMPLES,
        [{"day": datetime.date(2020, 1, 1), "x": np.ones(3)}] * SAMPLES,
        [torch.eye(3).to_sparse()] * SAMPLES,
        [{"a": 1}] * (SAMPLES - 1) + [{"b": 1}],
    ],
    ids=["ragged", "two shapes", "text", "images", "objects", "sparse", "one odd key"],
)
def test_other_samples_are_records(samples: list[Any]) -> None:
    """And none of them is odd; that one among many is of another shape is enough."""
    choice = choose(samples)
    assert type(choice.codec) is RecordCodec
    assert choice.odd is None
    assert choice.codec.nbytes > 0


def test_rows_that_were_asked_for_may_have_a_few_odd_ones() -> None:
    """Up to a quarter pass through, and the first of them is told; more are an error that names it."""
    odd = (torch.zeros(3, 5), 1)
    choice = choose([odd, *ROWS[1:]], "rows")
    assert choice.codec == SampleSpec.infer(ROWS[1])
    assert "sample 0: field [0] must be" in choice.odd
    for count in (1, SAMPLES // 4):
        choice = choose(ROWS[:-count] + [odd] * count, "rows")
        assert choice.codec == SampleSpec.infer(ROWS[0])
        assert f"sample {10 * (SAMPLES - count)}: field [0] must be" in choice.odd
    with pytest.raises(SampleMismatchError, match=rf"sample {10 * (SAMPLES - 4)}: field \[0\] must be"):
        choose(ROWS[:-4] + [odd] * 4, "rows")
    with pytest.raises(UnsupportedSampleError, match="field"):
        choose(RAGGED, "rows")


def test_records_may_have_a_few_that_cannot_be_kept() -> None:
    """Up to a quarter pass through, and are told with their field; more are an error."""
    odd = {"audio": torch.zeros(3), "text": lambda: 0}
    for count in (1, SAMPLES // 4):
        choice = choose([odd] * count + RAGGED[count:])
        assert type(choice.codec) is RecordCodec
        assert "sample 0: field ['text'] is a function, which cannot be kept as bytes" in choice.odd
        assert choice.codec.nbytes == RecordCodec.infer(RAGGED[count:]).nbytes
    with pytest.raises(UnsupportedSampleError, match=r"sample 0: field \['text'\]"):
        choose([odd] * 4 + RAGGED[4:])


class Resized(Image.Image):
    """An image that is pickled without its last row."""

    def __reduce__(self) -> Any:
        return Image.new, (self.mode, (self.width, self.height - 1))


def test_a_sample_that_does_not_come_back_as_it_was_cannot_be_kept() -> None:
    """It is tried with each sample, and the field is named."""
    image = Resized()
    image.__setstate__([{}, "L", (4, 4), None, bytes(16)])
    samples = [{"text": "a", "image": [image]}] * SAMPLES
    with pytest.raises(UnsupportedSampleError, match=r"sample 0: field \['image'\]\[0\] does not come back"):
        choose(samples)
    choice = choose([{"text": "a", "image": [1]}] * (SAMPLES - 1) + samples[:1])
    assert f"sample {10 * (SAMPLES - 1)}: field ['image'][0] does not come back" in choice.odd


def test_the_places_of_a_cut_must_be_in_every_record() -> None:
    """On which the tail of the transform works: of the types that most samples have there."""
    image = Image.new("RGB", (9, 9))
    samples = [{"image": image, "views": [torch.zeros(2 + number), 1]} for number in range(SAMPLES)]
    cut = Cut(1, (((0, ("image",)),), ((0, ("views", 0)), ("again", ("image",)))))
    choice = choose(samples, cut=cut)
    assert choice.codec.required == ((("image",), Image.Image), (("views", 0), torch.Tensor))
    with pytest.raises(SampleMismatchError, match=r"sample 7 has no field \['image'\]"):
        choice.codec.encode({"views": [torch.zeros(2)]}, 7)
    other = {"image": torch.zeros(3), "views": [torch.zeros(1), "a"]}
    for few, index in (([*samples[:-1], other], 10 * (SAMPLES - 1)), ([other, *samples[1:]], 0)):
        choice = choose(few, cut=cut)
        assert f"sample {index}: field ['image']" in choice.odd
    assert "sample 0 has no field ['image']" in choose([{"views": [1]}, *samples[1:]], cut=cut).odd


def test_looking_changes_no_sample() -> None:
    """What was looked at is used afterwards: it is as it was."""
    samples = [{"x": torch.arange(2000 + number), "y": np.arange(2000)} for number in range(3)]
    choose(samples)
    for number, sample in enumerate(samples):
        assert torch.equal(torch.as_tensor(sample["x"]), torch.arange(2000 + number))
        assert np.array_equal(sample["y"], np.arange(2000))

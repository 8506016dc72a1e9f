"""In which form samples are stored: rows or records, decoded or as their files."""

import datetime
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_stocache import CachedDataset
from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup import forms
from lightning_stocache.setup.forms import EncodedForm, choose_codec, keeps_files, look_at_files
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.random_split import split
from lightning_stocache.source.samples import bits
from lightning_stocache.source.transform_split import Cut, TransformCut
from tests.sources import CountedFiles, Made

# ---- rows or records ----

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
        assert choose(ROWS, layout) == SampleSpec.infer(ROWS[0])  # type: ignore[arg-type]
    codec = choose(ROWS, "records")
    assert type(codec) is RecordCodec
    image, label = through(codec, ROWS[3])
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
    codec = choose(samples)
    assert type(codec) is RecordCodec
    assert all(codec.encode(sample) for sample in samples)
    assert codec.nbytes > 0


def test_rows_that_were_asked_for_may_have_a_few_odd_ones() -> None:
    """Up to a quarter pass through; more are an error that names the first of them."""
    odd = (torch.zeros(3, 5), 1)
    for count in (1, SAMPLES // 4):
        assert choose(ROWS[:-count] + [odd] * count, "rows") == SampleSpec.infer(ROWS[0])
    with pytest.raises(SampleMismatchError, match=rf"sample {10 * (SAMPLES - 4)}: field \[0\] must be"):
        choose(ROWS[:-4] + [odd] * 4, "rows")
    with pytest.raises(UnsupportedSampleError, match="field"):
        choose(RAGGED, "rows")


def test_records_may_have_a_few_that_cannot_be_kept() -> None:
    """Up to a quarter pass through; more are an error."""
    odd = {"audio": torch.zeros(3), "text": lambda: 0}
    for count in (1, SAMPLES // 4):
        codec = choose([odd] * count + RAGGED[count:])
        assert type(codec) is RecordCodec
        assert codec.nbytes == RecordCodec.infer(RAGGED[count:]).nbytes
    with pytest.raises(UnsupportedSampleError, match="sample 0 cannot be kept as bytes: "):
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
    assert type(choose([{"text": "a", "image": [1]}] * (SAMPLES - 1) + samples[:1])) is RecordCodec


def test_the_places_of_a_cut_must_be_in_every_record() -> None:
    """On which the tail of the transform works: of the types that most samples have there."""
    image = Image.new("RGB", (9, 9))
    samples = [{"image": image, "views": [torch.zeros(2 + number), 1]} for number in range(SAMPLES)]
    calls = ((0, ("image",)),), ((0, ("views", 0)), ("again", ("image",)))
    cut = TransformCut(((("transform",), 1),), tuple((("transform",), places) for places in calls))
    codec = choose(samples, cut=cut)
    assert codec.required == ((("image",), Image.Image), (("views", 0), torch.Tensor))
    with pytest.raises(SampleMismatchError, match=r"sample 7 has no field \['image'\]"):
        codec.encode({"views": [torch.zeros(2)]}, 7)
    other = {"image": torch.zeros(3), "views": [torch.zeros(1), "a"]}
    for few, index in (([*samples[:-1], other], 10 * (SAMPLES - 1)), ([other, *samples[1:]], 0)):
        with pytest.raises(SampleMismatchError, match=rf"sample {index}: field \['image'\]"):
            choose(few, cut=cut).encode(other, index)
    with pytest.raises(SampleMismatchError, match=r"sample 0 has no field \['image'\]"):
        choose([{"views": [1]}, *samples[1:]], cut=cut).encode({"views": [1]}, 0)


def test_looking_changes_no_sample() -> None:
    """What was looked at is used afterwards: it is as it was."""
    samples = [{"x": torch.arange(2000 + number), "y": np.arange(2000)} for number in range(3)]
    choose(samples)
    for number, sample in enumerate(samples):
        assert torch.equal(torch.as_tensor(sample["x"]), torch.arange(2000 + number))
        assert np.array_equal(sample["y"], np.arange(2000))


# ---- decoded or as files ----

SIZES = st.integers(100, 10**6)
SECONDS = st.floats(1e-6, 1.0)


@given(SIZES, SIZES, SECONDS, SECONDS, st.integers(1, 1000), st.floats(0.01, 2.0))
def test_the_choice_saves_most(whole: int, file: int, read: float, decode: float, length: int, part: float) -> None:
    """The other form would not save more time; where all fit decoded, they are kept so."""
    form, codec = EncodedForm(RecordCodec(file), read, decode), RecordCodec(whole)
    granted = int(part * length * codec.slot_bytes)
    as_files = keeps_files(granted, length, codec, form)
    decoded = min(granted // codec.slot_bytes, length) * (read + decode)
    files = min(granted // form.codec.slot_bytes, length) * read
    assert files >= decoded * (1 - 1e-9) if as_files else decoded >= files * (1 - 1e-9)
    assert part < 1 or not as_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Twelve photographs of many sizes, smooth, so that their files are small."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    for number in range(12):
        pixels = np.linspace(0, 255, (60 + number) * 80 * 3).reshape(60 + number, 80, 3).astype(np.uint8)
        Image.fromarray(pixels).save(tmp_path / "photos" / "cat" / f"{number:02}.jpg")
    return tmp_path / "photos"


def epochs(dataset: CachedDataset, source: Any, count: int = 2) -> Iterator[bool]:
    """Whether each epoch gives the samples of the source under the same seed."""
    for epoch in range(count):
        torch.manual_seed(epoch)
        expected = [bits(source[index]) for index in range(len(source))]
        torch.manual_seed(epoch)
        yield [bits(dataset[index]) for index in range(len(source))] == expected


@pytest.mark.processes
def test_encoded_takes_a_tenth_and_gives_the_same(folder: Path) -> None:
    """Every sample fits in a budget that holds a few decoded ones, and is read from its file once."""
    source = ImageFolder(str(folder), v2.Compose([v2.RandomResizedCrop(16), v2.PILToTensor()]))
    with closing(CachedDataset(source, store="encoded")) as dataset:
        assert all(epochs(dataset, source))
        assert dataset.cache.full
        files = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        assert files < dataset.cache.stored_bytes(np.arange(12)) < files + 12 * 300
        for path in folder.rglob("*.jpg"):
            path.unlink()
        torch.manual_seed(0)
        assert [dataset[index][1] for index in range(12)] == [0] * 12


def lying() -> Any:
    """Its file is not all that a sample is made of."""
    source: Any = Made("sample {}".format, 3)
    source.read = lambda index: b"sample"
    source.decode = lambda content, index: content.decode()
    return source


@pytest.mark.processes
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (["a", "bc", "d"], r"the files of a list are not known.*read\(index\)"),
        (lying(), "sample 0, decoded from its file, is not the sample that the source returns"),
    ],
)
def test_what_is_not_known_by_its_files_is_kept_decoded(
    source: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What was asked for cannot be had: a warning says why, and how; with `strict` it is an error."""
    with closing(CachedDataset(source, store="encoded")) as dataset:
        assert [dataset[index] for index in range(3)] == [source[index] for index in range(3)]
        assert dataset.cache is not None
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert re.search(words, warning)
    with pytest.raises(ValueError, match=f"store=.encoded. cannot be had: {words}"):
        CachedDataset(source, store="encoded", strict=True)


class Clock:
    """What the look measures by, in whichever process: it goes on when a sample is read or decoded, and only then."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


def slow(read: float = 0.0, decode: float = 0.0, log_path: str | Path = "") -> CountedFiles:
    """Samples that take so long to read and to decode, and are ten times as large then."""

    def content(index: int) -> bytes:
        Clock.now += read
        return bytes([index % 256]) * 1000

    def decoded(content: bytes, index: int) -> Any:
        Clock.now += decode
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).repeat(10), index

    return CountedFiles(content, decoded, 200, log_path)


def test_no_index_outside_the_domain_is_read(tmp_path: Path) -> None:
    """What no sampler asks for may not be there."""
    source = slow(log_path=tmp_path / "log")
    domain = Domain(range(3, 60, 3), len(source))
    look_at_files(source, split(source, domain=domain), domain)
    read = set(source.loaded)
    assert len(read) > 4
    assert read <= set(range(3, 60, 3))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("budget", "read", "decode", "bytes_of_one", "filled"),
    [
        ("5MB", 1e-3, 0, 10_000, 200),  # all of them decoded
        ("1MB", 5e-3, 0, 1000, 200),  # all of them as files, where reading is slow
        ("1MB", 0, 2e-3, 10_000, 97),  # half of them decoded, where decoding is slow
    ],
)
def test_auto_takes_the_better_form_for_all(
    monkeypatch: pytest.MonkeyPatch, budget: str, read: float, decode: float, bytes_of_one: int, filled: int
) -> None:
    """By the seconds and bytes of both, and what is granted."""
    monkeypatch.setattr(forms, "time", Clock)
    with closing(CachedDataset(slow(read, decode), budget, store="auto")) as dataset:
        assert all(epochs(dataset, slow()))
        assert filled <= dataset.cache.filled <= 1.05 * filled
        assert bytes_of_one <= dataset.cache.memory_bytes / dataset.cache.filled < 1.35 * bytes_of_one

"""In which form samples are stored: rows or records, decoded or as their files."""

import datetime
import re
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_stocache import CachedDataset
from lightning_stocache.cache.codec import SampleMismatchError, UnsupportedSampleError
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.setup import forms
from lightning_stocache.setup.forms import choose_codec
from lightning_stocache.setup.request import Layout
from lightning_stocache.source.samples import bits
from lightning_stocache.source.transform_split import Cut, CutCall
from tests.sources import CountedFiles, Made, write_photos

SAMPLES = 12
PHOTO = Image.new("RGB", (9, 9))
ROWS = [(torch.full((3, 4), float(number)), number) for number in range(SAMPLES)]
RAGGED = [{"audio": torch.zeros(100 + number), "text": "a" * number} for number in range(SAMPLES)]


def choose(samples: list[Any], layout: Layout = "auto", cut: Cut | None = None) -> Any:
    """The codec of samples whose indices are 0, 10, 20 and so on."""
    return choose_codec([10 * number for number in range(len(samples))], samples, layout, cut)


def test_numbers_of_one_shape_are_rows_and_others_records() -> None:
    """That one among many is of another shape is enough, and none of them is odd then. Records may be asked for."""
    assert choose(ROWS, "auto") == choose(ROWS, "rows") == SampleSpec.infer(ROWS[0])
    assert type(choose(ROWS, "records")) is RecordCodec
    for samples in (
        RAGGED,
        [torch.zeros(3 + number % 2) for number in range(SAMPLES)],
        [{"day": datetime.date(2020, 1, 1), "image": PHOTO, "x": torch.eye(3).to_sparse()}] * SAMPLES,
        [{"a": 1}] * (SAMPLES - 1) + [{"b": 1}],
    ):
        codec = choose(samples)
        assert type(codec) is RecordCodec
        assert all(codec.encode(sample) for sample in samples)
        assert codec.nbytes > 0


def test_a_few_samples_may_be_odd() -> None:
    """Up to a quarter pass through; more are an error that names the first of them."""
    few = SAMPLES // 4
    table: list[tuple[Any, Any, Layout, type[Exception], str]] = [
        (ROWS, (torch.zeros(3, 5), 1), "rows", SampleMismatchError, r": field \[0\] must be"),
        (RAGGED, {"text": lambda: 0}, "auto", UnsupportedSampleError, " cannot be kept as bytes: "),
    ]
    for good, odd, layout, error, words in table:
        assert choose([*good[few:], *[odd] * few], layout) == choose(good[few:], layout)
        with pytest.raises(error, match=rf"sample {10 * (SAMPLES - few - 1)}{words}"):
            choose([*good[few + 1 :], *[odd] * (few + 1)], layout)
    with pytest.raises(UnsupportedSampleError, match="field"):
        choose(RAGGED, "rows")


class Scaled(NamedTuple):
    """A pair of which each look at its parts gives others."""

    x: float
    y: float


class ScaledPair(Scaled):
    def __iter__(self) -> Iterator[float]:
        return (self[number] / 255 for number in range(2))


def test_rows_are_proved_by_a_round_trip(tmp_path: Path) -> None:
    """A sample that would come back otherwise is refused, as a record, too; a memmap comes back as an array."""
    pairs = [ScaledPair(255.0, float(number)) for number in range(SAMPLES)]
    layouts: tuple[Layout, ...] = ("rows", "auto")
    for layout in layouts:
        with pytest.raises(UnsupportedSampleError, match="does not come back from bytes as it was"):
            choose(pairs, layout)
    numbers = np.memmap(tmp_path / "numbers", np.int64, "w+", shape=(SAMPLES, 3))
    assert type(choose(list(numbers))) is SampleSpec


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
    samples = [{"image": PHOTO, "views": [torch.zeros(2 + number), 1]} for number in range(SAMPLES)]
    places = (0, ("image",)), (1, ("views", 0))
    cut = Cut((CutCall(("transform",), 1, places, places),))
    for odd in ({"image": torch.zeros(3), "views": [torch.zeros(1), "a"]}, {"views": [torch.zeros(2)]}):
        with pytest.raises(SampleMismatchError, match=r"sample 70.*field \['image'\]"):
            choose([odd, *samples[1:]], cut=cut).encode(odd, 70)


def assert_epochs_are_those_of(source: Any, dataset: CachedDataset) -> None:
    """Each of two epochs gives the samples of the source under the same seed."""
    for epoch in range(2):
        torch.manual_seed(epoch)
        expected = [bits(source[index]) for index in range(len(source))]
        torch.manual_seed(epoch)
        assert [bits(dataset[index]) for index in range(len(source))] == expected


def test_encoded_takes_the_bytes_of_the_files_and_gives_the_same(tmp_path: Path) -> None:
    """Each file is read once."""
    folder = write_photos(tmp_path / "photos")
    source = ImageFolder(str(folder), v2.Compose([v2.RandomResizedCrop(16), v2.PILToTensor()]))
    with closing(CachedDataset(source, store="encoded")) as dataset:
        assert_epochs_are_those_of(source, dataset)
        assert dataset.cache.full
        files = sum(path.stat().st_size for path in folder.rglob("*.jpg"))
        assert files < dataset.cache.stored_bytes(np.arange(6)) < files + 6 * 300
        for path in folder.rglob("*.jpg"):
            path.unlink()
        torch.manual_seed(0)
        assert [dataset[index][1] for index in range(6)] == [0] * 3 + [1] * 3


def test_what_is_not_known_by_its_files_is_kept_decoded(caplog: pytest.LogCaptureFixture) -> None:
    """What was asked for cannot be had: a warning says why, and how; with `strict` it is an error."""
    lying: Any = Made("sample {}".format, 3)  # its file is not all that a sample is made of
    lying.read = lambda index: b"sample"
    lying.decode = lambda content, index: content.decode()
    for source, words in (
        (["a", "bc", "d"], r"the files of a list are not known.*read\(index\)"),
        (lying, "sample 0, decoded from its file, is not the sample that the source returns"),
    ):
        caplog.clear()
        with closing(CachedDataset(source, store="encoded")) as dataset:
            assert [dataset[index] for index in range(3)] == [source[index] for index in range(3)]
            assert dataset.cache is not None
        [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
        assert re.search(words, warning)
        with pytest.raises(ValueError, match=f"store=.encoded. is not possible: {words}"):
            CachedDataset(source, store="encoded", strict=True)


clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
"""What the look measures by, in whichever process: it goes on when a sample is read or decoded, and only then."""


def slow(read: float = 0.0, decode: float = 0.0) -> CountedFiles:
    """Samples that take so long to read and to decode, and are ten times as large then."""

    def content(index: int) -> bytes:
        clock.now += read
        return bytes([index % 256]) * 1000

    def decoded(content: bytes, index: int) -> Any:
        clock.now += decode
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).repeat(10), index

    return CountedFiles(content, decoded, 100)


def test_auto_takes_the_better_form_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seconds and bytes of both, and what is granted."""
    monkeypatch.setattr(forms, "time", clock)
    for budget, read, decode, bytes_of_one, filled in (
        ("5MB", 1e-3, 0, 10_000, 100),  # all of them decoded
        ("500KB", 5e-3, 0, 1000, 100),  # all of them as files, where reading is slow
        ("500KB", 0, 2e-3, 10_000, 48),  # half of them decoded, where decoding is slow
    ):
        with closing(CachedDataset(slow(read, decode), budget, store="auto")) as dataset:
            assert_epochs_are_those_of(slow(), dataset)
            assert filled <= dataset.cache.filled <= 1.05 * filled
            assert bytes_of_one <= dataset.cache.memory_bytes / dataset.cache.filled < 1.35 * bytes_of_one

"""Whether samples are kept decoded or as their files: the arithmetic, and what a cache makes of it."""

from __future__ import annotations

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
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from lightning_stocache import CachedDataset
from lightning_stocache.cache.placement import Domain
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.setup import form_choice
from lightning_stocache.setup.form_choice import EncodedForm, keeps_files, look_at_files
from lightning_stocache.source.samples import bits

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


@pytest.mark.processes
def test_unknown_files_are_kept_decoded_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """What was asked for cannot be had: a warning says why, and how; with `strict` it is an error."""
    source: Any = ["a", "bc", "d"]
    with closing(CachedDataset(source, store="encoded")) as dataset:
        assert [dataset[index] for index in range(3)] == source
        assert dataset.cache is not None
    [warning] = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert "the files of a list are not known" in warning
    assert "read(index)" in warning
    with pytest.raises(ValueError, match="store='encoded' cannot be had"):
        CachedDataset(source, store="encoded", strict=True)


class Lying(Dataset[Any]):
    """Its file is not all that its samples are made of."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return f"sample {index}"

    def read(self, index: int) -> bytes:
        return b"sample"

    def decode(self, content: bytes, index: int) -> Any:
        return content.decode()


@pytest.mark.processes
def test_a_decoder_that_gives_another_sample_is_not_believed(caplog: pytest.LogCaptureFixture) -> None:
    """The look compares; samples are kept decoded then."""
    with closing(CachedDataset(Lying(), store="encoded")) as dataset:
        assert [dataset[index] for index in (3, 3)] == ["sample 3"] * 2
    assert "sample 0, decoded from its file, is not the sample that the source returns" in caplog.text


class Clock:
    """What the look measures by, in whichever process: it goes on when a sample is read or decoded, and only then."""

    now = 0.0

    @classmethod
    def perf_counter(cls) -> float:
        return cls.now


class Slow(Dataset[Any]):
    """Long to read or to decode, and ten times as large then."""

    def __init__(self, read: float, decode: float) -> None:
        self.seconds = read, decode

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> Any:
        return self.decode(self.read(index), index)

    def read(self, index: int) -> bytes:
        Clock.now += self.seconds[0]
        return bytes([index % 256]) * 1000

    def decode(self, content: bytes, index: int) -> Any:
        Clock.now += self.seconds[1]
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).repeat(10), index


def test_no_index_outside_the_domain_is_read() -> None:
    """What no sampler asks for may not be there."""
    told: list[int] = []
    source = Slow(0, 0)
    look_at_files(source, source, [3, 30], told.append, Domain(range(3, 60, 3), len(source)))
    assert len(told) > 4
    assert all(index in range(3, 60, 3) for index in told)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("budget", "read", "decode", "bytes_of_one", "filled"),
    [
        ("10MB", 1e-3, 0, 10_000, 400),  # all of them decoded
        ("2MB", 5e-3, 0, 1000, 400),  # all of them as files, where reading is slow
        ("2MB", 0, 2e-3, 10_000, 195),  # half of them decoded, where decoding is slow
    ],
)
def test_auto_takes_the_better_form_for_all(
    monkeypatch: pytest.MonkeyPatch, budget: str, read: float, decode: float, bytes_of_one: int, filled: int
) -> None:
    """By the seconds and bytes of both, and what is granted."""
    monkeypatch.setattr(form_choice, "time", Clock)
    with closing(CachedDataset(Slow(read, decode), budget, store="auto")) as dataset:
        assert all(epochs(dataset, Slow(0, 0)))
        assert filled <= dataset.cache.filled <= 1.05 * filled
        assert bytes_of_one <= dataset.cache.memory_bytes / dataset.cache.filled < 1.35 * bytes_of_one

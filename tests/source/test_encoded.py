"""Samples kept as their files: read and decoded apart, they are what the source returns, draws included."""

import io
import operator
import pickle
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch.utils.data import Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.io import read_image
from torchvision.transforms import v2

from lightning_stocache.source.encoded import access_to
from lightning_stocache.source.samples import bits
from tests.sources import CountedFiles, write_photos

LENGTH = 6
CROP = v1.Compose([v1.RandomResizedCrop(8), v1.ToTensor()])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_photos(tmp_path_factory.mktemp("photos"))


def content(index: int) -> bytes:
    return bytes([index]) * 1000


def noisy(content: bytes, index: int) -> Any:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8) + torch.rand(()), index


def cropped(batch: Any) -> Any:
    return {"pixels": [CROP(image.convert("RGB")) for image in batch["image"]], "label": batch["label"]}


def of_folder(folder: Path) -> Any:
    return ImageFolder(str(folder), CROP, partial(operator.add, 10))


def of_timm(folder: Path) -> Any:
    timm = pytest.importorskip("timm.data")
    return timm.ImageDataset(str(folder), transform=timm.create_transform(8, is_training=True))


def of_hugging_face(folder: Path) -> Any:
    datasets = pytest.importorskip("datasets")
    paths = sorted(map(str, folder.rglob("*.jpg")))
    columns = {"image": paths, "label": list(range(LENGTH))}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(columns, features=features)


SOURCES = {
    "of the user's": lambda folder: CountedFiles(content, noisy, LENGTH),
    "a folder": of_folder,
    "a folder of tensors": lambda folder: ImageFolder(str(folder), v2.RandomHorizontalFlip(), loader=read_image),
    "a subset": lambda folder: Subset(Subset(of_folder(folder), [5, 3, 2, 0]), [2, 0, 1]),
    "timm": of_timm,
    "Hugging Face": of_hugging_face,
    "Hugging Face, a transform": lambda folder: of_hugging_face(folder).with_transform(cropped),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_a_source_taken_apart_gives_its_samples(make: Any, folder: Path) -> None:
    """Bit for bit, and from the same draws, also in another process. What is kept is the file, and little more."""
    source = make(folder)
    files = pickle.loads(pickle.dumps(access_to(source)))
    assert len(files) == len(source)
    record = pickle.dumps(files[0])
    contents = [content(0), *(path.read_bytes() for path in folder.rglob("*.jpg"))]
    assert any(content in record and len(record) < len(content) + 500 for content in contents)
    for index in range(len(source)):
        reads = []
        for read in (lambda: source[index], lambda: files(files[index], index)):  # noqa: B023
            torch.manual_seed(index)
            random.seed(index)
            reads.append((bits(read()), torch.get_rng_state().tolist(), random.getstate()))
        assert reads[0] == reads[1]


def test_unknown_files_are_not_guessed_at(folder: Path) -> None:
    """A loader of the user's, a dataset that reads in its own way, lists: there is no access."""

    class Mirrored(ImageFolder):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(len(self) - 1 - index)

    opened = ImageFolder(str(folder), loader=lambda path: Image.open(io.BytesIO(Path(path).read_bytes())))
    for source in (opened, Mirrored(str(folder)), [1, 2], Subset([1, 2], [0])):
        assert access_to(source) is None

"""Samples of any kind through a CachedLoader: the batches and draws of a DataLoader, and every sample loaded once."""

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from lightning_stocache import CachedDataset, CachedLoader
from tests.loading.twins import Transformed, pairwise, run, same, totals
from tests.sources import Made

pytestmark = [pytest.mark.processes, pytest.mark.epoch_one_reads_all]

LENGTH = 26


def text(index: int) -> Any:
    """A string, its tokens and a label, of many lengths."""
    return {"text": f"sample {index} " * (index % 5), "ids": list(range(index % 7 + 1)), "label": index % 3}


class Photos(Dataset[Any]):
    """Images of PIL of many sizes, cropped and flipped at random."""

    def __init__(self) -> None:
        steps = [transforms.RandomResizedCrop(8), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
        self.transform = transforms.Compose(steps)

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Any:
        pixels = np.random.default_rng(index).integers(0, 256, (20 + index, 40 - index, 3), dtype=np.uint8)
        return self.transform(Image.fromarray(pixels)), f"{index}.jpg"


def boxed(index: int) -> Any:
    """A large image with boxes of varying number."""
    image = torch.full((3, 64, 60 + index), index, dtype=torch.uint8)
    return image, {"boxes": torch.full((index % 4, 4), float(index)), "id": index, "name": str(index)}


TEXTS, BOXES = Made(text, LENGTH), Made(boxed, LENGTH)


def padded(samples: list[Any]) -> Any:
    ids = [torch.tensor(sample["ids"]) for sample in samples]
    texts, labels = [sample["text"] for sample in samples], torch.tensor([sample["label"] for sample in samples])
    return {"ids": pad_sequence(ids, batch_first=True), "text": texts, "label": labels}


def as_tuples(samples: list[Any]) -> Any:
    return tuple(zip(*samples, strict=True))


def twice(samples: list[Any]) -> Any:
    """Large tensors of all sorts: the same one twice, one with other strides, an empty one, one in an object."""
    large = torch.stack([torch.full((40, 50), float(len(str(sample)))) for sample in samples])
    return [
        large,
        large,
        large.permute(2, 0, 1),
        torch.empty(0, 3),
        None,
        large[0].numpy().copy(),
        {"deep": (large + 1, "x")},
    ]


WAYS: dict[str, tuple[Any, Any]] = {
    "text, padded": (TEXTS, padded),
    "photographs": (Photos(), None),
    "photographs, tuples": (Photos(), as_tuples),
    "boxes": (BOXES, as_tuples),
    "odd batches": (TEXTS, twice),
}

DESIGNS = pairwise(
    way=list(WAYS),
    num_workers=[0, 2],
    budget=["auto", "40%"],
    persistent=[False, True],
    batch_size=[4, 7],
    shuffle=[True, False],
    transform=[None, repr],
)


@pytest.mark.parametrize("design", DESIGNS, ids=lambda design: " ".join(map(str, design.values())))
def test_batches_and_draws_are_those_of_dataloader(design: dict[str, Any]) -> None:
    """In three epochs, one of them broken off, with all of it in the cache, or a part."""
    source, collate = WAYS[design["way"]]
    transform = design["transform"]
    if transform is not None:
        collate = list
    arguments = {"batch_size": design["batch_size"], "shuffle": design["shuffle"], "collate_fn": collate}
    arguments |= {"num_workers": design["num_workers"]}
    arguments |= {"persistent_workers": design["persistent"] and design["num_workers"] > 0}
    with closing(CachedDataset(source, design["budget"], transform=transform)) as dataset:
        whole = source if transform is None else Transformed(source, transform)
        seed()
        plain = run(DataLoader(whole, **arguments))
        seed()
        loader = CachedLoader(dataset, **arguments)
        cached = run(loader)
        loader.close()
        assert same(cached, plain)
        counts = totals(dataset)
        assert counts.hits > 0
        assert counts.fills == dataset.cache.filled  # type: ignore[union-attr]


def seed() -> None:
    torch.manual_seed(0)
    np.random.seed(0)


def test_a_tensor_that_is_there_twice_is_one() -> None:
    """What a collate function gives twice shares its memory, and strides are what they were."""
    with closing(CachedDataset(TEXTS)) as dataset:
        loader = CachedLoader(dataset, 4, collate_fn=twice, num_workers=1)
        for _ in range(3):
            batch = next(iter(loader))
            batch[0][0, 0, 0] = -5.0
            assert batch[1][0, 0, 0] == -5.0
            assert batch[2].stride() == (1, 2000, 50)
        loader.close()


class Point:
    """A part of samples, whose class gets another name."""

    def __init__(self, x: int) -> None:
        self.x = x


def of_a_point(index: int, kind: type[Point] = Point) -> Any:
    return {"point": kind(index), "text": "." * index}


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_record_that_cannot_be_decoded_is_a_miss(num_workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that was renamed since its samples were stored costs loads, and ends no training."""
    with closing(CachedDataset(Made(of_a_point, LENGTH))) as dataset:
        loader = CachedLoader(
            dataset, 4, collate_fn=lambda samples: [sample["point"].x for sample in samples], num_workers=num_workers
        )
        for epoch in range(2):
            assert [x for batch in loader for x in batch] == list(range(LENGTH))
            counts = totals(dataset)
            assert (counts.hits, counts.served) == (0, (epoch + 1) * LENGTH)
            monkeypatch.delattr(f"{__name__}.Point", raising=False)
        loader.close()

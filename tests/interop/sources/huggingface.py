"""Arrow datasets of Hugging Face, in its formats and with its transforms."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.interop.sources.files import SAMPLES, pictures
from tests.interop.training import Setting

datasets = pytest.importorskip("datasets")

LABELS = [number % 5 for number in range(SAMPLES)]


def _images() -> Any:
    features = datasets.Features({"image": datasets.Array3D((8, 8, 3), "uint8"), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({"image": list(pictures(SAMPLES, 8, 8)), "label": LABELS}, features=features)


def _named_images() -> Any:
    return _images().add_column("name", [f"image {number}" for number in range(SAMPLES)])


def _tokens(length: int | None) -> Any:
    ids = [[number % 7 + 1] * (length or 3 + number % 4) for number in range(SAMPLES)]
    return datasets.Dataset.from_dict({"input_ids": ids, "label": LABELS})


def _padded(samples: list[Any]) -> Any:
    labels = torch.stack([sample["label"] for sample in samples])
    return {"input_ids": pad_sequence([sample["input_ids"] for sample in samples], batch_first=True), "label": labels}


def _mapped_and_split() -> Any:
    summed = _tokens(6).map(lambda row: {"sum": sum(row["input_ids"])}, keep_in_memory=True)
    return summed.train_test_split(4, seed=1)["train"]


def _from_disk(setting: Setting) -> Any:
    path = setting.folder / "arrow"
    if not path.exists():
        _images().save_to_disk(path)
    return datasets.load_from_disk(path)


def _pil_images() -> Any:
    rows = {"image": [Image.fromarray(pixels) for pixels in pictures()], "label": LABELS}
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict(rows, features=features)


def _normalised(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"image": [torch.tensor(image, dtype=torch.float32) / 255 for image in rows["image"]]}


def _noisy(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"image": [torch.tensor(image) + torch.rand(()) for image in rows["image"]]}


def _shaken(rows: dict[str, Any]) -> dict[str, Any]:
    """Two draws for a batch, and one for each image."""
    scale, shift = torch.rand(2)
    return {"image": [(torch.tensor(image) + torch.rand(())) * scale + shift for image in rows["image"]]}


def _random_transform_of_a_column(setting: Setting) -> Any:
    dataset = _images()
    dataset.set_transform(_shaken, columns=["image"], output_all_columns=True)
    return setting.loader(dataset)


def _iterable(setting: Setting) -> Any:
    stream = _images().to_iterable_dataset(num_shards=2).with_format("torch")
    return DataLoader(stream, **setting.options | {"shuffle": False})


WAYS = {
    "image_and_label": lambda setting: setting.loader(_images().with_format("torch")),
    "with_a_string": lambda setting: setting.loader(_named_images().with_format("torch")),
    "fixed_tokens": lambda setting: setting.loader(_tokens(6).with_format("torch")),
    "varying_tokens": lambda setting: setting.loader(_tokens(None).with_format("torch"), collate_fn=_padded),
    "plain_ints": lambda setting: setting.loader(
        datasets.Dataset.from_dict({"number": list(range(SAMPLES)), "label": LABELS})
    ),
    "numpy_format": lambda setting: setting.loader(_images().with_format("numpy")),
    "mapped_and_split": lambda setting: setting.loader(_mapped_and_split().with_format("torch")),
    "from_disk": lambda setting: setting.loader(_from_disk(setting).with_format("torch")),
    "pil_images": lambda setting: setting.loader(
        _pil_images(), collate_fn=lambda samples: [np.asarray(sample["image"]) for sample in samples]
    ),
    "deterministic_transform": lambda setting: setting.loader(_images().with_transform(_normalised)),
    "random_transform": lambda setting: setting.loader(_images().with_transform(_noisy)),
    "random_transform_of_a_column": _random_transform_of_a_column,
    "iterable": _iterable,
}

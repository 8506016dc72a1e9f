"""Arrow datasets of Hugging Face, in its formats and with its transforms."""

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

from tests.interop.setting import SAMPLES, Setting, pictures

datasets = pytest.importorskip("datasets")

LABELS = [number % 5 for number in range(SAMPLES)]
NAMES = [f"image {number}" for number in range(SAMPLES)]


def _table(column: str, rows: list[Any], feature: Any = None) -> Any:
    """A column of any kind, and labels."""
    features = feature and datasets.Features({column: feature, "label": datasets.Value("int64")})
    return datasets.Dataset.from_dict({column: rows, "label": LABELS}, features=features)


def _images() -> Any:
    return _table("image", list(pictures(SAMPLES, 8, 8)), datasets.Array3D((8, 8, 3), "uint8"))


def _tokens(length: int | None) -> Any:
    return _table("input_ids", [[number % 7 + 1] * (length or 3 + number % 4) for number in range(SAMPLES)])


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


def _normalised(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"image": [torch.tensor(image, dtype=torch.float32) / 255 for image in rows["image"]]}


def _noisy(rows: dict[str, Any]) -> dict[str, Any]:
    return rows | {"image": [torch.tensor(image) + torch.rand(()) for image in rows["image"]]}


def _shaken(rows: dict[str, Any]) -> dict[str, Any]:
    """Two draws for a batch, and one for each image."""
    scale, shift = torch.rand(2)
    return {"image": [(torch.tensor(image) + torch.rand(())) * scale + shift for image in rows["image"]]}


def _iterable(setting: Setting) -> Any:
    stream = _images().to_iterable_dataset(num_shards=2).with_format("torch")
    return DataLoader(stream, **setting.options | {"shuffle": False})


HUGGINGFACE = {
    "image_and_label": lambda setting: setting.loader(_images().with_format("torch")),
    "with_a_string": lambda setting: setting.loader(_images().add_column("name", NAMES).with_format("torch")),
    "fixed_tokens": lambda setting: setting.loader(_tokens(6).with_format("torch")),
    "varying_tokens": lambda setting: setting.loader(_tokens(None).with_format("torch"), collate_fn=_padded),
    "plain_ints": lambda setting: setting.loader(_table("number", list(range(SAMPLES)))),
    "numpy_format": lambda setting: setting.loader(_images().with_format("numpy")),
    "mapped_and_split": lambda setting: setting.loader(_mapped_and_split().with_format("torch")),
    "from_disk": lambda setting: setting.loader(_from_disk(setting).with_format("torch")),
    "pil_images": lambda setting: setting.loader(
        _table("image", [Image.fromarray(pixels) for pixels in pictures()], datasets.Image()),
        collate_fn=lambda samples: [np.asarray(sample["image"]) for sample in samples],
    ),
    "deterministic_transform": lambda setting: setting.loader(_images().with_transform(_normalised)),
    "random_transform": lambda setting: setting.loader(_images().with_transform(_noisy)),
    "random_transform_of_a_column": lambda setting: setting.loader(
        _images().with_transform(_shaken, columns=["image"], output_all_columns=True)
    ),
    "iterable": _iterable,
}

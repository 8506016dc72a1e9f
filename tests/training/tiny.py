"""What the tests of the training room train: a model of one layer, a Trainer that is silent, and its CSV read back."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader_tree import cached_in_leaves
from tests.sources import CountedSource

__all__ = [
    "SAMPLES",
    "Data",
    "Epochs",
    "MadeInSetup",
    "Model",
    "Narrow",
    "Numbers",
    "announced",
    "cached_datasets",
    "logged",
    "make_trainer",
    "plain_loader",
    "source",
]

SAMPLES = 24


class Model(LightningModule):
    """One layer on the bytes of an image; `shapes` and `devices` are what it was given."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.layer = torch.nn.Linear(3 * 8 * 8, 10)

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1).float() / 255), labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.loss(batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> torch.Tensor:
        return self.layer(batch[0].flatten(1).float() / 255).argmax(1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    @property
    def weights(self) -> torch.Tensor:
        return self.layer.weight.detach().clone()


class Narrow(Model):
    """A smaller layer, on however many devices, for samples of eight bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 10)

    def configure_model(self) -> None:
        """A mesh wants it; the layer is too small to be cut."""

    def loss(self, batch: Any) -> torch.Tensor:
        return self.layer(batch[0].float() / 255).square().mean()


class Epochs(Callback):
    """Keeps the caches' metrics of each epoch; it stands after the monitor."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "stocache/" in name}
        self.metrics.append(metrics)


class Numbers(Dataset[Any]):
    """Images that are all of one value, their index."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10


class Data(LightningDataModule):
    """A DataModule as users write it: its loaders are made in its hooks, with the options that it is given."""

    def __init__(self, train: Any, val: Any = None, **options: Any) -> None:
        super().__init__()
        self.train, self.val, self.options = train, val, options

    def train_dataloader(self) -> Any:
        return plain_loader(self.train, shuffle=True, **self.options)

    def val_dataloader(self) -> Any:
        return [] if self.val is None else plain_loader(self.val, **self.options)


class MadeInSetup(Data):
    """Its two datasets are made in setup, anew for each call."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(None, **options)
        self.folder = folder

    def setup(self, stage: str) -> None:
        self.train, self.val = source(self.folder), source(self.folder, "val", 8)


def make_trainer(tmp_path: Path, callbacks: Sequence[Callback] = (), *, epochs: int = 1, **options: Any) -> Trainer:
    """A Trainer on one CPU that logs every step to a CSV and says nothing."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": epochs,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": str(tmp_path),
    }
    if "logger" not in options and not options.get("barebones"):
        defaults["logger"] = CSVLogger(tmp_path, name="logs")
    return Trainer(callbacks=list(callbacks), **defaults | options)


def logged(trainer: Trainer, key: str) -> list[float]:
    """The values of a key in the Trainer's CSV file, in the order of its rows."""
    assert trainer.logger is not None
    trainer.logger.save()
    with open(Path(str(trainer.logger.log_dir)) / "metrics.csv") as file:  # type: ignore[attr-defined]
        return [float(row[key]) for row in csv.DictReader(file) if row.get(key)]


def source(tmp_path: Path | str, name: str = "train", samples: int = SAMPLES) -> CountedSource:
    """A counted source; sources of one name in one folder count together."""
    return CountedSource(samples, log_path=Path(tmp_path) / f"{name}.loads")


def plain_loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """A loader as a user would make it."""
    return DataLoader(dataset, **{"batch_size": 4} | options)


def cached_datasets(loaders: Any) -> list[CachedDataset]:
    """The CachedDatasets that are read in a nesting of loaders."""
    return [dataset for dataset in cached_in_leaves(loaders) if isinstance(dataset, CachedDataset)]


def announced(caplog: pytest.LogCaptureFixture) -> int:
    """How many samples the package says that it has read at set-up."""
    said = [re.search(r"(\d+) samples read at set-up", record.getMessage()) for record in caplog.records]
    return sum(int(match.group(1)) for match in said if match)

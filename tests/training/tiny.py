"""A tiny model, DataModules, the doors around them, and a silent Trainer, for all tests of the training room."""

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader_tree import cached_in_leaves
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import CountedSource

__all__ = [
    "DOORS",
    "SAMPLES",
    "SLOT",
    "Data",
    "Epochs",
    "MadeInSetup",
    "Model",
    "Narrow",
    "Numbers",
    "Photos",
    "announced",
    "behind",
    "cached_datasets",
    "logged",
    "make_trainer",
    "plain_loader",
    "said",
    "source",
]

SAMPLES = 24
SLOT = 3 * 8 * 8 + 8 + 1  # bytes: image, label and state
DOORS = ("callback", "cache_datamodule", "ours")


class Model(LightningModule):
    """One layer on the bytes of an image."""

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
    """Keeps the caches' metrics of each epoch, by their names without "stocache/". It stands after the monitor."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "stocache/" in name}
        self.metrics.append({name.removeprefix("stocache/"): value for name, value in metrics.items()})


class Numbers(Dataset[Any]):
    """Images that are all of one value, their index."""

    def __init__(self, length: int = SAMPLES) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10


class Data(LightningDataModule):
    """A DataModule as users write it. Its hooks make loaders of `batch_size` with the given options."""

    def __init__(self, train: Any, val: Any = None, *, batch_size: int = 4, **options: Any) -> None:
        super().__init__()
        self.train, self.val, self.batch_size, self.options = train, val, batch_size, options

    def train_dataloader(self) -> Any:
        shuffle = not {"shuffle", "sampler"} & set(self.options) and not isinstance(self.train, IterableDataset)
        return DataLoader(self.train, self.batch_size, **{"shuffle": shuffle} | self.options)

    def val_dataloader(self) -> Any:
        options = {name: value for name, value in self.options.items() if name not in ("shuffle", "sampler")}
        return [] if self.val is None else DataLoader(self.val, self.batch_size, **options)


class Photos(Data):
    """A DataModule with hyperparameters of its own."""

    def __init__(self, folder: str, batch_size: int = 4) -> None:
        super().__init__(source(folder), source(folder, "val", 8), batch_size=batch_size)
        self.save_hyperparameters()


class MadeInSetup(Data):
    """Makes its two datasets in `setup`, again for each Trainer call."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(None, **options)
        self.folder = folder

    def setup(self, stage: str) -> None:
        self.train, self.val = source(self.folder), source(self.folder, "val", 8)


def behind(door: str, data: Any, **options: Any) -> tuple[list[Callback], Any]:
    """The callbacks and the DataModule of a door with these options; of "none" the DataModule as it is.

    "ours" is a StocacheDataModule around the sets of a `Data`, with its options for loaders.
    """
    if door == "none":
        return [], data
    if door == "callback":
        return [StochasticCache(**options)], data
    if door == "cache_datamodule":
        return [CacheMonitor()], cache_datamodule(data, **options)
    loader = dict(data.options)
    workers = loader.pop("num_workers", 0)
    options |= {"batch_size": data.batch_size, "num_workers": workers, "loader": loader}
    return [CacheMonitor()], StocacheDataModule(data.train, data.val, **options)


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


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """The messages with these words, in their order."""
    return [message for record in caplog.records if words in (message := record.getMessage())]


def announced(caplog: pytest.LogCaptureFixture) -> int:
    """How many samples the package says that it has read at set-up."""
    counts = [re.search(r"(\d+) samples read at set-up", record.getMessage()) for record in caplog.records]
    return sum(int(count.group(1)) for count in counts if count)

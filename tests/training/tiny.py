"""Tiny models that record what they see, DataModules, the doors around them, and a silent Trainer."""

import csv
import pickle
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader_tree import cached_in_leaves
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import CountedSource

SAMPLES = 24
SLOT = 3 * 8 * 8 + 8 + 4  # bytes: image, label and the word of a slot
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

    test_step = validation_step

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


class Watcher(LightningModule):
    """A model that takes any batch, and notes each with its stage, bit for bit."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches: list[tuple[str, bytes]] = []

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        self.batches.append((stage, pickle.dumps(_plain(batch))))
        return self.weight.sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.note("train", batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"val{dataloader_idx}", batch)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"test{dataloader_idx}", batch)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.note(f"predict{dataloader_idx}", batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _plain(batch: Any) -> Any:
    """A batch in a form that pickles the same each time: tensors as their bytes, objects as their contents."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.detach().contiguous().numpy().tobytes()
    if isinstance(batch, dict):
        return {name: _plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch).__name__, [_plain(value) for value in batch]
    if hasattr(batch, "to_dict"):  # torch_geometric's
        return _plain(batch.to_dict())
    return batch


class Remembers(Watcher):
    """Remembers the samples of each epoch of training and validation: of a tensor the first number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[Any]] = []
        self.validated: list[list[Any]] = []

    @property
    def sorted_epochs(self) -> list[list[Any]]:
        return list(map(sorted, self.epochs))

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        samples = self.epochs[-1] if stage == "train" else self.validated[-1]
        samples += batch[:, 0].tolist() if isinstance(batch, torch.Tensor) else batch
        return self.weight.sum()


def source(tmp_path: Path | str, name: str = "train", samples: int = SAMPLES) -> CountedSource:
    """A counted source; sources of one name in one folder count together."""
    return CountedSource(samples, log_path=Path(tmp_path) / f"{name}.loads")


def plain_loader(dataset: Dataset[Any], **options: Any) -> DataLoader[Any]:
    """A loader as a user would make it."""
    return DataLoader(dataset, **{"batch_size": 4} | options)


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


def data_hooks(**loaders: Callable[[], Any]) -> Any:
    """A DataModule that notes in `ran` each hook that runs; its loader hooks, of the named stages, call functions."""
    ran: list[str] = []

    def loader_hook(name: str) -> Callable[[Any], Any]:
        def give(dm: Any) -> Any:
            ran.append(f"{name}_dataloader at step {dm.trainer.global_step}")
            return loaders[name]()

        return give

    hooks: dict[str, Any] = {f"{name}_dataloader": loader_hook(name) for name in loaders}
    hooks["setup"] = lambda dm, stage: ran.append(f"setup {stage}")
    hooks["teardown"] = lambda dm, stage: ran.append(f"teardown {stage}")
    return type("Data", (LightningDataModule,), hooks | {"ran": ran})()


def behind(door: str, data: Any, **options: Any) -> tuple[list[Callback], Any]:
    """The callbacks and the DataModule of a door with these options; of "none" the DataModule as it is. "ours" is a
    StocacheDataModule around the sets of a `Data`, with its options for loaders."""
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


def make_trainer(tmp_path: Path, callbacks: Sequence[Callback] = (), *, epochs: int = 2, **options: Any) -> Trainer:
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
    if "logger" not in options:
        defaults["logger"] = CSVLogger(tmp_path, name="logs")
    return Trainer(callbacks=list(callbacks), **defaults | options)


def through(door: str, tmp_path: Any, loaders: dict[str, Callable[[], Any]], **options: Any) -> Any:
    """A Trainer, a model, a DataModule behind a door, or behind none, and a `Looking`."""
    looking, model = Looking(), Watcher()
    callbacks, dm = behind(door, data_hooks(**loaders), **options.pop("cache", {}))
    return make_trainer(tmp_path, [looking, *callbacks], logger=False, **options), model, dm, looking


def fit(door: str, tmp_path: Any, loaders: dict[str, Callable[[], Any]], **options: Any) -> Any:
    """The model, the DataModule and the `Looking` after a fit with seed 0."""
    trainer, model, dm, looking = through(door, tmp_path, loaders, **options)
    seed_everything(0, verbose=False)
    trainer.fit(model, datamodule=dm)
    return model, dm, looking


class Epochs(Callback):
    """Keeps the caches' metrics of each epoch, by their names without "stocache/". It stands after the monitor."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items() if "stocache/" in name}
        self.metrics.append({name.removeprefix("stocache/"): value for name, value in metrics.items()})


class Looking(Callback):
    """Notes the loaders and the slots per stage while training runs."""

    def __init__(self) -> None:
        self.loaders: dict[str, Any] = {}
        self.slots: dict[str, list[int]] = {}

    def look(self, trainer: Any, *_: Any) -> None:
        for stage in ("train", "val", "test", "predict"):
            loaders = getattr(trainer, "train_dataloader" if stage == "train" else f"{stage}_dataloaders")
            if loaders is not None:
                self.loaders[stage] = loaders
                caches = [dataset.cache for dataset in cached_datasets(loaders)]
                self.slots[stage] = [0 if cache is None else len(cache) for cache in caches]

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = look
    on_train_end = on_validation_end = look


def cached_datasets(loaders: Any) -> list[CachedDataset]:
    """The CachedDatasets that are read in a nesting of loaders."""
    return [dataset for dataset in cached_in_leaves(loaders) if isinstance(dataset, CachedDataset)]


def rows_of(logger: Any) -> list[dict[str, str]]:
    """The rows of a CSVLogger, without empty cells."""
    logger.save()
    with open(Path(logger.log_dir, "metrics.csv")) as file:
        return [{key: text for key, text in row.items() if text} for row in csv.DictReader(file)]


def logged(trainer: Trainer, key: str) -> list[float]:
    """The values of a key in the Trainer's CSV file, in the order of its rows."""
    return [float(row[key]) for row in rows_of(trainer.logger) if key in row]


def said(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """The messages with these words, in their order."""
    return [message for record in caplog.records if words in (message := record.getMessage())]


def announced(caplog: pytest.LogCaptureFixture) -> int:
    """How many samples the package says that it has read at set-up."""
    return sum(map(int, re.findall(r"(\d+) reads at set-up", caplog.text)))


def read_again(caplog: pytest.LogCaptureFixture) -> int:
    """How many stored samples the package says that it has read again while the training went on."""
    return sum(map(int, re.findall(r"(\d+) stored samples were read again", caplog.text)))

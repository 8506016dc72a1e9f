"""Models and callbacks that record a training: batches bit for bit, loaders and hooks, with and without a cache."""

import pickle
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything

from tests.training.tiny import behind, cached_datasets, make_trainer

__all__ = ["Looking", "Remembers", "Watcher", "data_hooks", "fit", "through"]


class Watcher(LightningModule):
    """A model that takes any batch, and notes each with its stage."""

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


class Remembers(LightningModule):
    """Remembers the first number of each sample that it was trained and validated on, epoch by epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.epochs: list[list[float]] = []
        self.validated: list[list[float]] = []

    @property
    def sorted_epochs(self) -> list[list[float]]:
        return list(map(sorted, self.epochs))

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def on_validation_epoch_start(self) -> None:
        self.validated.append([])

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.epochs[-1] += batch[:, 0].tolist()
        return self.weight.sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validated[-1] += batch[:, 0].tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class DataHooks(LightningDataModule):
    """Notes each hook that runs; `data_hooks` gives it loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def setup(self, stage: str) -> None:
        self.ran.append(f"setup {stage}")

    def teardown(self, stage: str) -> None:
        self.ran.append(f"teardown {stage}")


def data_hooks(**loaders: Callable[[], Any]) -> DataHooks:
    """A DataModule whose loader hooks, for the stages that are named, call these functions."""

    def hook(stage: str) -> Callable[[DataHooks], Any]:
        def give(dm: DataHooks) -> Any:
            dm.ran.append(f"{stage}_dataloader at step {dm.trainer.global_step}")
            return loaders[stage]()

        return give

    hooks = {f"{stage}_dataloader": hook(stage) for stage in loaders}
    return type("Data", (DataHooks,), hooks)()


class Looking(Callback):
    """Notes the loaders and the slots per stage while training runs."""

    def __init__(self) -> None:
        self.loaders: dict[str, Any] = {}
        self.slots: dict[str, list[int]] = {}

    def look(self, trainer: Any, *_: Any) -> None:
        stages = {"train": trainer.train_dataloader, "val": trainer.val_dataloaders}
        stages |= {"test": trainer.test_dataloaders, "predict": trainer.predict_dataloaders}
        for stage, loaders in stages.items():
            if loaders is not None:
                self.loaders[stage] = loaders
                caches = [dataset.cache for dataset in cached_datasets(loaders)]
                self.slots[stage] = [0 if cache is None else len(cache) for cache in caches]

    on_train_batch_end = on_validation_batch_end = on_test_batch_end = on_predict_batch_end = look
    on_train_end = on_validation_end = look


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

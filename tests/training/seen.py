"""What a training sees: its batches bit for bit and the order of its hooks, to compare with and without a cache."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule

__all__ = ["DataHooks", "Watcher", "data_hooks"]


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


def _plain(batch: Any) -> Any:
    """A batch without what pickles in another way each time: tensors as their bytes, objects as their contents."""
    if isinstance(batch, torch.Tensor):
        return str(batch.dtype), tuple(batch.shape), batch.detach().contiguous().numpy().tobytes()
    if isinstance(batch, dict):
        return {name: _plain(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch).__name__, [_plain(value) for value in batch]
    if hasattr(batch, "to_dict"):  # torch_geometric's
        return _plain(batch.to_dict())
    return batch

"""A fit that is killed in the middle of a step, and started again from its last checkpoint."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StocacheDataModule, StochasticCache, cache_datamodule
from tests.training.tiny import Model, make_trainer

__all__ = ["EPOCHS", "SAMPLES", "fit"]

SAMPLES, EPOCHS = 48, 3


class Numbers(Dataset[Any]):
    """Images that are all of one value, their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10


class Users(LightningDataModule):
    """A DataModule of the user's, as most are."""

    def __init__(self, workers: int, batch_size: int) -> None:
        super().__init__()
        self.numbers, self.workers, self.batch_size = Numbers(), workers, batch_size

    def train_dataloader(self) -> Any:
        more: dict[str, Any] = {"multiprocessing_context": "fork"} if self.workers else {}
        return DataLoader(self.numbers, self.batch_size, shuffle=True, num_workers=self.workers, **more)


class Witness(Callback):
    """Writes down each batch of a rank before its step; one rank is killed in the middle of a step."""

    def __init__(self, folder: Path, killed: tuple[int, int] | None) -> None:
        self.folder, self.killed = folder, killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        indices = " ".join(map(str, batch[0][:, 0, 0, 0].tolist()))
        with open(self.folder / f"rank{trainer.global_rank}.txt", "a") as lines:
            lines.write(f"{trainer.current_epoch} {batch_idx} {indices}\n")
        if self.killed == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def fit(
    folder: Path, door: str, ranks: int, workers: int, killed: tuple[int, int] | None = None, batch_size: int = 4
) -> None:
    """Fit on from the last checkpoint in the folder, if there is one.

    Args:
        folder: for checkpoints, and what each rank saw.
        door: own, datamodule or callback.
        ranks: of one node.
        workers: of each rank.
        killed: the rank that is killed, and the step in which.
        batch_size: of each rank.
    """
    torch.manual_seed(7)
    users = Users(workers, batch_size)
    data: Any = users
    callbacks: list[Callback] = [Witness(folder, killed)]
    if door == "own":
        data = StocacheDataModule(Numbers(), batch_size=batch_size, num_workers=workers)
    elif door == "datamodule":
        data = cache_datamodule(users)
    else:
        callbacks.append(StochasticCache())
    callbacks.append(ModelCheckpoint(folder, "{step:04d}", every_n_train_steps=2, save_top_k=-1))
    more: dict[str, Any] = {"devices": ranks, "strategy": "ddp_fork"} if ranks > 1 else {}
    trainer = make_trainer(folder, callbacks, epochs=EPOCHS, enable_checkpointing=True, **more)
    saved = sorted(folder.glob("*.ckpt"))
    trainer.fit(Model(), data, ckpt_path=saved[-1] if saved else None)
    (folder / "done").touch()

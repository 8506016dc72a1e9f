"""A training job whose callbacks and metrics have collectives of their own: `crossing_job FOLDER DEVICES NODES`.

It trains once for every pair of a bar, an order of the callbacks and a way of logging, twice with a monitor on the last
rank alone, and once more with one on all. Each rank leaves in `rank<k>.jsonl` one line per fit: the metrics of every
epoch, and the samples that the sources of the job have loaded until then.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import Checkpoint, RichProgressBar, TQDMProgressBar
from torchmetrics import MeanMetric

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from tests.training.tiny import Epochs, Model, make_trainer, plain_loader, source

EPOCHS = 2
FITS = [  # each pair of a bar, an order and a way
    (TQDMProgressBar, "bar first", "sync_dist"),
    (TQDMProgressBar, "ours first", "metric"),
    (RichProgressBar, "bar first", "metric"),
    (RichProgressBar, "ours first", "sync_dist"),
]


class Logging(Model):
    """Logs what is reduced over the ranks when somebody asks for it: at the end of training and validation epochs."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.mean, self.val_mean = MeanMetric(), MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self._log("loss", loss, self.mean)
        return loss

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._log("val_loss", self.loss(batch), self.val_mean)

    def on_train_epoch_end(self) -> None:
        self.log("at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.log("val_at_the_end", 1.0, prog_bar=True, sync_dist=True)

    def _log(self, name: str, loss: torch.Tensor, metric: MeanMetric) -> None:
        if self.way == "metric":
            metric(loss.detach())
            self.log(name, metric, on_step=True, on_epoch=True, prog_bar=True)
        else:
            self.log(name, loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)


class Printing(Callback):
    """What many users have: rank zero looks at the metrics, which reduces them, and the others do not."""

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.is_global_zero:
            dict(trainer.callback_metrics)

    on_validation_epoch_end = on_train_epoch_end


class Slow(Callback):
    """The last rank takes its time after the last step of an epoch, so that its counts come late."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.is_last_batch and trainer.global_rank == trainer.world_size - 1:
            time.sleep(0.1)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.on_train_batch_start(trainer, pl_module, batch, batch_idx)


class Witness(Epochs, Checkpoint):
    """Stands where ModelCheckpoint does, and writes down what it could watch."""


class Alone(CacheMonitor):
    """On one rank only, which a job should not do."""

    patience = 0.5

    @property
    def monitors(self) -> bool:
        return dist.get_rank() == dist.get_world_size() - 1


def fit(folder: Path, callbacks: list[Callback], devices: int, nodes: int, way: str = "metric") -> None:
    witness = Witness()
    trainer = make_trainer(
        folder,
        [*callbacks, Printing(), Slow(), witness],
        epochs=EPOCHS,
        devices=devices,
        num_nodes=nodes,
        strategy="ddp",
        logger=False,
        enable_checkpointing=True,
        enable_progress_bar=any(hasattr(callback, "get_metrics") for callback in callbacks),
        num_sanity_val_steps=1,
    )
    train, val = plain_loader(source(folder), shuffle=True), plain_loader(source(folder, "val", 8))
    trainer.fit(Logging(way), train, val)
    saw = {"epochs": witness.metrics, "loads": [source(folder, name).loads for name in ("train", "val")]}
    with open(folder / f"rank{trainer.global_rank}.jsonl", "a") as file:
        print(json.dumps(saw), file=file)
    dist.barrier()  # the sources count for all fits together


def main(folder: Path, devices: int, nodes: int) -> None:
    torch.set_num_threads(1)
    for bar, order, way in FITS:
        callbacks = [bar(), StochasticCache()]
        fit(folder, callbacks if order == "bar first" else callbacks[::-1], devices, nodes, way)
    for monitor in (Alone, Alone, CacheMonitor):  # who is alone leaves posts that nobody answers
        fit(folder, [StochasticCache(), monitor()], devices, nodes)
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(filename=Path(sys.argv[1]) / f"{os.getpid()}.log", level=logging.INFO)
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))

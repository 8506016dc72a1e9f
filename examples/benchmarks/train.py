"""End to end in Lightning: how long each epoch waits for data and how long it computes, cached and not.

    python examples/benchmarks/train.py                        # about 4 minutes on 2 cores
    python examples/benchmarks/train.py --samples 4000 --batch-size 256 --workers 0 4

The example's small network and torchvision's mobilenet_v3_small train for three epochs on JPEG files (320x320, decoded
and resized to 96x96) through a StocacheDataModule, normalised on the device, with budget=0 and with a budget for all
samples. On a GPU where there is one, else on the CPU. An epoch's wait is the time between two steps: fetching the batch
and moving it to the device; the rest of it is compute. Sanity check, validation and checkpoints are off.

Epoch one takes what it took before. From epoch two on the cached run waits for next to nothing, and the epoch cannot
become shorter than its compute: where the network is slow (mobilenet on a CPU) the wait was a small part, and removing
it gains little. With workers on a GPU the wait may have been hidden behind the step already; then there is no gain at
all, except for the cores that are free for something else.
"""

import logging
import time
import warnings
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from measure import Report, Spread, cell, epoch_seconds, fresh, listed, parser
from sources import jpegs
from torch import nn
from torch.utils.data import DataLoader

from lightning_stocache import StocacheDataModule

MODELS = ("conv", "mobilenet_v3_small")
EPOCHS = 3


class Waiting(pl.Callback):
    """Seconds of each epoch spent between steps and in them."""

    def __init__(self) -> None:
        self.epochs: list[dict[str, float]] = []
        self._moment = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.epochs.append({"wait": 0.0, "compute": 0.0})
        self._moment = time.perf_counter()

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._lap("wait", pl_module)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        self._lap("compute", pl_module)

    def _lap(self, part: str, pl_module: pl.LightningModule) -> None:
        if pl_module.device.type == "cuda":  # a step has ended when its kernels have, not when they are queued
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.epochs[-1][part] += now - self._moment
        self._moment = now


def make_model(name: str) -> pl.LightningModule:
    from model import ConvNet

    model = ConvNet(num_classes=2)
    if name == "mobilenet_v3_small":
        from torchvision.models import mobilenet_v3_small

        model.net = nn.Sequential(mobilenet_v3_small(num_classes=2))
    return model


def train(name: str, cached: bool, workers: int, batch_size: int, samples: int) -> list[dict[str, float]]:
    """Seconds of wait and of compute, epoch by epoch."""
    from photos import normalise

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")  # advice on loggers and workers, once per run
    pl.seed_everything(0, verbose=False)
    datamodule = StocacheDataModule(
        train=jpegs(samples),
        batch_size=batch_size,
        num_workers=workers,
        budget="auto" if cached else 0,
        batch_transform=normalise,
    )
    clock = Waiting()
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[clock],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    trainer.fit(make_model(name), datamodule=datamodule)
    return clock.epochs


def main() -> None:
    options = parser(__doc__, rounds=3)
    options.add_argument("--workers", type=int, nargs="+", default=[0, 2], help="num_workers (0 2)")
    options.add_argument("--batch-size", type=int, default=64, help="samples per step (64)")
    options.add_argument("--samples", type=int, help="JPEG files (1000; quick: 128)")
    chosen = options.parse_args()
    report = Report("train", chosen)
    samples = chosen.samples or (128 if report.quick else 1000)
    epoch_seconds(DataLoader(jpegs(samples), batch_size=64))  # into the page cache, for all runs alike
    arms = {
        (name, workers, cached): partial(fresh, train, name, cached, workers, chosen.batch_size, samples)
        for name in MODELS
        for workers in chosen.workers
        for cached in (False, True)
    }
    found = report.measure(arms)
    rows = []
    for (name, workers, cached), runs in found.items():
        label = f"{name}, {workers} workers, {'cached' if cached else 'not cached'}"
        for epoch in range(EPOCHS):
            parts = [cell((run[epoch] for run in runs), part) for part in ("wait", "compute")]
            times = ""
            if cached:
                plain = (sum(run[epoch].values()) for run in found[name, workers, False])
                times = f"{Spread.ratio(plain, (sum(run[epoch].values()) for run in runs)):.2f}"
            rows.append([label, epoch + 1, *parts, times])
    columns = ("model, workers", "epoch", "wait, s", "compute, s", "times faster than not cached")
    report.table(f"{samples} JPEG files, batches of {chosen.batch_size}", columns, rows)
    report.save(runs=listed(found, "model", "workers", "cached"))


if __name__ == "__main__":
    main()

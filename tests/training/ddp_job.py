"""A training job of two ranks, run as a user's script.

Called with FOLDER DOOR STRATEGY EPOCHS FITS, it leaves in the folder what each rank saw, one line per fit in
`rank<k>.jsonl`, and what each process logged, in `<pid>.log`. When the second epoch begins each rank notes its
processes in `rank<k>.pids`, its own first.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from multiprocessing import active_children
from pathlib import Path

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.training.tiny import Epochs, MadeInSetup, Model, cached_datasets, make_trainer, source


class Witness(Epochs):
    """Writes down what a rank sees; it stands after the monitor."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.inodes = folder, []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx == 0 and trainer.current_epoch == 1:
            pids = [os.getpid(), *(child.pid for child in active_children())]
            part = self.folder / f"rank{trainer.global_rank}.part"
            part.write_text(json.dumps(pids))
            part.rename(self.folder / f"rank{trainer.global_rank}.pids")

    def on_train_epoch_end(self, trainer, pl_module):
        super().on_train_epoch_end(trainer, pl_module)
        datasets = cached_datasets(trainer.train_dataloader)
        self.inodes = [dataset.cache.segment.handle.inode for dataset in datasets]

    def on_fit_end(self, trainer, pl_module):
        saw = {"epochs": self.metrics, "inodes": self.inodes, "weights": float(pl_module.weights.double().sum())}
        with open(self.folder / f"rank{trainer.global_rank}.jsonl", "a") as file:
            print(json.dumps(saw), file=file)
        self.metrics = []


def main(folder: Path, door: str, strategy: str, epochs: int, fits: int) -> None:
    torch.set_num_threads(1)
    monitors: list[Callback] = [CacheMonitor()]
    dm: LightningDataModule
    if door == "callback":
        dm, monitors = MadeInSetup(folder), [StochasticCache()]
    elif door == "cached":
        dm = cache_datamodule(MadeInSetup(folder))
    else:
        some = {"num_workers": 1, "budget": "50%"} if door == "workers" else {}  # all in memory needs no worker
        dm = StocacheDataModule(source(folder), source(folder, "val", 8), batch_size=4, **some)
        dm.setup("fit")  # as a user does who looks at a batch first: every rank alone, before there are ranks
        dm.train_dataloader()
    for _ in range(fits):
        options = {"accelerator": "cpu", "devices": 2, "strategy": strategy, "logger": False}
        make_trainer(folder, [*monitors, Witness(folder)], epochs=epochs, **options).fit(Model(), dm)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ in ("__main__", "__mp_main__"):  # in spawned ranks, too
    logging.basicConfig(filename=Path(sys.argv[1]) / f"{os.getpid()}.log", level=logging.INFO)

if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], *map(int, sys.argv[4:]))

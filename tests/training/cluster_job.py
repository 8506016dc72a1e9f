"""One rank of a training job, as a user's script that a launcher starts: `cluster_job FOLDER DOOR EPOCHS [OPTION...]`.

The launcher's environment says who it is. Options: `mesh=DxT` (ModelParallelStrategy, T ranks to each of D replicas),
`nodes=N`, `devices=N`, `budget=...`, `name=...`, `dir=...`, `stops=E.B` (after batch B of epoch E the scheduler's
SIGUSR1 comes, and five batches later SIGKILL). The door is `datamodule`, `wrapped` or `callback`. Each rank leaves in
`rank<k>.seen` the epoch and the labels of each batch, a line each, in `rank<k>.json` what was logged in each epoch, and
in `<pid>.log` what it said. The label of a sample is its index.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_stocache import CacheMonitor, StocacheDataModule, StochasticCache, cache_datamodule
from tests.sources import CountedSource
from tests.training.tiny import Data, Narrow, make_trainer, plain_loader

SAMPLES, BATCH = 512, 8


class Witness(Callback):
    """Writes down which samples came and what was logged, and may end the job in the middle of an epoch."""

    def __init__(self, folder: Path, stops: str = "") -> None:
        self.folder, self.epochs, self.left = folder, list[dict[str, float]](), -1
        self.stops = [int(number) for number in stops.split(".")] if stops else None

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        with open(self.folder / f"rank{trainer.global_rank}.seen", "a") as file:
            print(json.dumps([trainer.current_epoch, batch[1].tolist()]), file=file)
        if [trainer.current_epoch, batch_idx] == self.stops:
            os.kill(os.getpid(), signal.SIGUSR1)
            self.left = 5
        elif self.left >= 0:
            self.left -= 1
            if self.left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = {name.removeprefix("stocache/"): float(value) for name, value in trainer.callback_metrics.items()}
        self.epochs.append(metrics)

    def on_fit_end(self, trainer, pl_module):
        (self.folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(self.epochs))


def main(folder: Path, door: str, epochs: int, given: dict[str, str]) -> None:
    torch.set_num_threads(1)
    data = CountedSource(SAMPLES, (8,), folder / "train.loads", classes=SAMPLES)
    knobs: dict[str, Any] = {name: given[name] for name in ("budget", "name", "dir") if name in given}
    witness = Witness(folder, given.get("stops", ""))
    callbacks: list[Callback]
    dm: Any
    if door == "callback":
        callbacks, dm = [StochasticCache(**knobs), witness], None
    elif door == "wrapped":
        callbacks, dm = [CacheMonitor(), witness], cache_datamodule(Data(data, batch_size=BATCH), **knobs)
    else:
        callbacks, dm = [CacheMonitor(), witness], StocacheDataModule(data, batch_size=BATCH, **knobs)
    strategy: Any = "ddp"
    if "mesh" in given:
        from lightning.pytorch.strategies import ModelParallelStrategy

        replicas, parallel = map(int, given["mesh"].split("x"))
        strategy = ModelParallelStrategy(data_parallel_size=replicas, tensor_parallel_size=parallel)
    options: dict[str, Any] = {"devices": int(given.get("devices", 1)), "num_nodes": int(given.get("nodes", 1))}
    trainer = make_trainer(folder, callbacks, epochs=epochs, logger=False, strategy=strategy, **options)
    if dm is None:
        trainer.fit(Narrow(), plain_loader(data, batch_size=BATCH, shuffle=True))
    else:
        trainer.fit(Narrow(), datamodule=dm)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    logging.basicConfig(filename=place / f"{os.getpid()}.log", level=logging.INFO)
    main(place, sys.argv[2], int(sys.argv[3]), dict(word.split("=", 1) for word in sys.argv[4:]))

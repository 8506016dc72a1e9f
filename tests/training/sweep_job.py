"""A Hydra app whose trials train for two epochs on a counted source, and tell what each has seen.

    python -m tests.training.sweep_job -m folder=/tmp/sweep lr=0.1,0.01 hydra/launcher=joblib cache.name=photos

Each trial adds one line of JSON to `trials` in the folder.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback, LightningDataModule
from omegaconf import DictConfig

from lightning_stocache import cache_datamodule
from lightning_stocache.training.loaders import running_datasets
from tests import names
from tests.logs import Log
from tests.sources import CountedSource
from tests.training.tiny import Model, make_trainer, plain_loader

SAMPLES = 80

ConfigStore.instance().store(
    name="sweep_job",
    node={
        "defaults": [{"cache": "stocache"}, {"callbacks": "stochastic_cache"}, {"data": None}, "_self_"],
        "folder": "???",
        "lr": 0.1,
        "epochs": 2,
        "together": 1,
        "seconds": 0.0,
        "door": "callback",
        "hydra": {"sweep": {"dir": "${folder}/runs"}, "output_subdir": None},
    },
)


class Slow(CountedSource):
    """A source that takes its time, so that trials overlap."""

    seconds = 0.0

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        return super().__getitem__(index)


class Data(LightningDataModule):
    """A user's DataModule, with a dataset of its own."""

    def __init__(self, folder: str, seconds: float) -> None:
        super().__init__()
        self.source = Slow(SAMPLES, log_path=Path(folder) / "loads")
        self.source.seconds = seconds

    def train_dataloader(self) -> Any:
        return plain_loader(self.source, shuffle=True)


class Seen(Callback):
    """What each epoch was served: hits, and what was loaded."""

    def __init__(self) -> None:
        self.hits: list[int] = []
        self.loads: list[int] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        [dataset] = running_datasets(trainer, "train")
        assert dataset.counters is not None
        totals = dataset.counters.totals()
        self.hits.append(totals.hits - sum(self.hits))
        self.loads.append(totals.misses + totals.bypasses - sum(self.loads))


@hydra.main(version_base="1.3", config_path="pkg://lightning_stocache.configs", config_name="sweep_job")
def main(config: DictConfig) -> float:
    """One trial; what it returns is smallest at lr=0.01."""
    if names.VARIABLE in os.environ:  # here: a launcher sends its processes this function, without importing the module
        names.use(os.environ[names.VARIABLE])
    torch.set_num_threads(1)
    folder, number, log = Path(config.folder), HydraConfig.get().job.num, Log()
    logging.getLogger("lightning_stocache").setLevel(logging.INFO)
    data: Any = Data(config.folder, config.seconds)
    seen, callbacks = Seen(), list[Callback]()
    if config.door == "callback":
        callbacks = [hydra.utils.instantiate(config.callbacks.stochastic_cache)]
    else:
        options = {name: config.cache[name] for name in ("budget", "name")}
        data = cache_datamodule(data, **options)
    meet(folder, config.together)
    trainer = make_trainer(folder / str(number), [*callbacks, seen], epochs=config.epochs, limit_val_batches=0)
    trainer.fit(Model(), data)
    looks = [re.search(r"(\d+) samples read at set-up", line) for line in log.lines]
    told = {
        "trial": number,
        "pid": os.getpid(),
        "hits": seen.hits,
        "loads": seen.loads,
        "looked": sum(int(look[1]) for look in looks if look),
    }
    with open(folder / "trials", "a") as file:
        file.write(json.dumps(told) + "\n")
    return abs(math.log10(config.lr) + 2)


def meet(folder: Path, together: int) -> None:
    """Wait until so many trials have come here."""
    (folder / f"came-{os.getpid()}").touch()
    end = time.monotonic() + 120
    while len(list(folder.glob("came-*"))) < together and time.monotonic() < end:
        time.sleep(0.01)


if __name__ == "__main__":
    main()

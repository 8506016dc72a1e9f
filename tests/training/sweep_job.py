"""A Hydra app whose trials train for two epochs on a counted source, and record the counts of each epoch.

Each trial adds one line of JSON to `trials` in the folder.
"""

import json
import logging
import math
import os
import re
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import Callback
from omegaconf import DictConfig

from lightning_stocache import cache_datamodule
from lightning_stocache.training.loaders import running_datasets
from tests.logs import Log
from tests.training.tiny import Data, Model, make_trainer, source

SAMPLES = 80

ConfigStore.instance().store(
    name="sweep_job",
    node={
        "defaults": [{"cache": "stocache"}, {"callbacks": "stochastic_cache"}, {"data": None}, "_self_"],
        "folder": "???",
        "lr": 0.1,
        "epochs": 2,
        "door": "callback",
        "hydra": {"sweep": {"dir": "${folder}/runs"}, "output_subdir": None},
    },
)


class Seen(Callback):
    """The hits and the loads of each epoch."""

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
    """One trial; the result is smallest at lr=0.01."""
    torch.set_num_threads(1)
    folder, number, log = Path(config.folder), HydraConfig.get().job.num, Log()
    logging.getLogger("lightning_stocache").setLevel(logging.INFO)
    data = Data(source(folder, samples=SAMPLES))
    seen, callbacks = Seen(), list[Callback]()
    if config.door == "callback":
        callbacks = [hydra.utils.instantiate(config.callbacks.stochastic_cache)]
    else:
        cache_datamodule(data, **{name: config.cache[name] for name in ("budget", "name")})
    trainer = make_trainer(folder / str(number), [*callbacks, seen], epochs=config.epochs)
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

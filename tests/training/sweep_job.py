"""A Hydra app whose trials train for two epochs on a counted source, and tell what each has seen.

    python -m tests.training.sweep_job -m folder=/tmp/sweep lr=0.1,0.01 cache.keep_cache=process
    python -m tests.training.sweep_job -m folder=/tmp/sweep lr=0.1,0.01 hydra/launcher=joblib cache.name=photos

Each trial adds one line of JSON to `trials` in the folder.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch import LightningDataModule
from omegaconf import DictConfig

from lightning_stocache import cache_datamodule
from tests.sources import CountedSource
from tests.training.tiny import Model, logged, make_trainer, plain_loader

SAMPLES = 200

ConfigStore.instance().store(
    name="sweep_job",
    node={
        "defaults": [{"cache": "stocache"}, {"callbacks": "stochastic_cache"}, {"data": None}, "_self_"],
        "folder": "???",
        "lr": 0.1,
        "size": 8,
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


@hydra.main(version_base="1.3", config_path="pkg://lightning_stocache.configs", config_name="sweep_job")
def main(config: DictConfig) -> float:
    """One trial."""
    torch.set_num_threads(1)
    folder, number = Path(config.folder), HydraConfig.get().job.num
    data: Any = Data(config.folder, config.seconds)
    callbacks = [hydra.utils.instantiate(config.callbacks.stochastic_cache)]
    if config.door == "cached":
        data = cache_datamodule(data, config.cache.budget, keep_cache=config.cache.keep_cache, name=config.cache.name)
    meet(folder, config.together)
    trainer = make_trainer(folder / str(number), callbacks, epochs=2, limit_val_batches=0)
    trainer.fit(Model(), data)
    told = {
        "trial": number,
        "pid": os.getpid(),
        "hit_rates": logged(trainer, "stocache/hit_rate"),
        "budget": logged(trainer, "stocache/budget_bytes")[-1],
    }
    with open(folder / "trials", "a") as file:
        file.write(json.dumps(told) + "\n")
    return float(config.lr)


def meet(folder: Path, together: int) -> None:
    """Wait until so many trials have come here."""
    (folder / f"came-{os.getpid()}").touch()
    end = time.monotonic() + 60
    while len(list(folder.glob("came-*"))) < together and time.monotonic() < end:
        time.sleep(0.01)


if __name__ == "__main__":
    main()

"""Train a small network on JPEG files: from disk in the first epoch, from memory afterwards.

    python examples/train.py                                         # makes the files first, once
    python examples/train.py cache.budget=25% trainer.max_epochs=6   # a quarter of the dataset in memory
    python examples/train.py -m cache.budget=0,25%,50%,100%          # sweep
    python examples/train.py trainer.devices=2 trainer.strategy=ddp  # two ranks, one cache
    python examples/train.py -m trainer.devices=2 trainer.strategy=ddp_spawn cache.budget=0,100%  # both
    python examples/train.py data.root=/my/images                    # your own train/<class>/, val/<class>/
    python examples/train.py --cfg job                               # every knob

Each epoch logs its hit rate, the fill of the cache and its seconds. Its files lie below outputs/.
"""

from pathlib import Path
from typing import Any

import hydra
import torch
from hydra.core.config_store import ConfigStore
from lightning.pytorch import seed_everything
from lightning.pytorch.loggers import WandbLogger
from omegaconf import DictConfig

# The groups are the package's; the example's own leaves (data=photos, model=conv) lie in configs/ beside this file.
# Hydra takes further search paths from the primary config only, and no YAML can know where this file lies: so the
# primary config is stored from here. It is the package's `train` with two other choices, written out, because an
# `override` here would win over those of an experiment.
ConfigStore.instance().store(
    name="photos",
    node={
        "defaults": [
            {"cache": "stocache"},
            {"data": "photos"},
            {"model": "conv"},
            {"callbacks": None},
            {"logger": "csv"},
            {"trainer": "stocache"},
            "_self_",
            {"experiment": None},
        ],
        "seed": 0,
        "hydra": {"searchpath": [f"file://{Path(__file__).resolve().parent / 'configs'}"]},
    },
)


@hydra.main(version_base="1.3", config_path="pkg://lightning_stocache.configs", config_name="photos")
def main(config: DictConfig) -> None:
    # An epoch of this network takes 0.9 s on one thread and 0.6 on two; where both cores are busy, 1.2 s and 7 to 40.
    # Threads that share the work of one operation wait for the last of them.
    torch.set_num_threads(1)
    seed_everything(config.seed, workers=True, verbose=False)
    datamodule = build(config.data)
    model = build(config.model)
    trainer = build(config.trainer, callbacks=build_each(config, "callbacks"), logger=build_each(config, "logger"))
    try:
        trainer.fit(model, datamodule=datamodule)
    finally:
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()  # or a sweep's next job would go on in its run
        # Lightning leaves a gloo group open, and a rank may then abort at exit.
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def build_each(config: DictConfig, group: str) -> list[Any]:
    """The entries of a group that may hold several (`callbacks=[step_timer,mine]`) or none (`~logger`)."""
    return [build(entry) for entry in (config.get(group) or {}).values() if entry and "_target_" in entry]


def build(config: DictConfig, **more: Any) -> Any:
    return hydra.utils.instantiate(config, **more)


if __name__ == "__main__":
    main()

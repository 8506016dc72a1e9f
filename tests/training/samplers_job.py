"""A training job of two ranks with samplers that Lightning deals out, or that deal by themselves; run as a script.

Called with FOLDER, each rank leaves in `rank<k>.json` what it saw of each sampler, by name: whether its batches were
those of the same training without a cache, its number of samples per epoch, and the metrics of the epochs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch.utils.data import DataLoader, DistributedSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_stocache.training.callbacks import StochasticCache
from tests.training.seen import Looking, Watcher
from tests.training.tiny import Epochs, make_trainer, source

SAMPLES, BATCH, EPOCHS = 120, 4, 3
FOLD = list(range(0, SAMPLES, 4))


def samplers(data: Any) -> dict[str, Any]:
    weights = 1.0 + torch.arange(SAMPLES) % 7
    return {
        "distributed": DistributedSampler(data, 2, dist.get_rank()),
        "weighted": WeightedRandomSampler(weights, SAMPLES),
        "fold": SubsetRandomSampler(FOLD),
        "a fold of each rank": SubsetRandomSampler(FOLD[dist.get_rank() :: 2]),
    }


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    options = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "logger": False}
    make_trainer(folder, epochs=1, **options).fit(Watcher(), DataLoader(source(folder, "first")))  # from here on: ranks
    saw = {}
    for name in samplers([0]):
        each, seen = [], list[Any]()
        options["use_distributed_sampler"] = name != "a fold of each rank"
        for cached in (False, True):
            noted, looking = Epochs(), Looking()
            callbacks = [StochasticCache("50%"), noted, looking] if cached else []
            model, data = Watcher(), source(folder, f"{name}-{cached}", SAMPLES)
            seed_everything(0, verbose=False)
            loader = DataLoader(data, BATCH, sampler=samplers(data)[name])
            make_trainer(folder, callbacks, epochs=EPOCHS, log_every_n_steps=1000, **options).fit(model, loader)
            seen.append(model.batches)
            each.append(noted.metrics)
        slots = looking.slots["train"]
        saw[name] = {"same": seen[0] == seen[1], "steps": len(seen[1]), "epochs": each[1], "slots": slots}
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(saw))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""A training job on two nodes of two ranks, as a user's script: `nodes_job FOLDER CASE EPOCHS`.

Each rank leaves its metrics of every epoch in `rank<k>.json`, or its error in `rank<k>.error`. CASE is a way of
sampling with half of the dataset per node (locality, global), the same through another door (callback, cached), half of
a fold per node (`fold`, through the callback, and then by a DataModule), `whole` (a cache of everything on each node),
`records` (samples of which those at set-up are ten times as large as the others, and memory for a tenth of such per
node), or a piece of bad luck: `full` (no memory on the second node), `dies` (the last rank is killed in `setup`).
"""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, seed_everything
from torch.utils.data import DataLoader, SubsetRandomSampler, default_collate

from lightning_stocache.node.segment import Segment
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import CountedSource
from tests.training.tiny import Epochs, Narrow, make_trainer

SAMPLES, BATCH = 16384, 64
FOLD = range(0, SAMPLES, 4)


class Misjudged(CountedSource):
    """Samples with a text, which is long in every sample that may be looked at before training."""

    def __getitem__(self, index: int) -> Any:
        looked_at = any(index == k * (SAMPLES - 1) // (count - 1) for count in (4, 30) for k in range(count))
        return *super().__getitem__(index), "a" * (4000 if looked_at else 100)


def without_text(samples: list[Any]) -> Any:
    return default_collate([sample[:2] for sample in samples])


def full(*_: Any) -> Segment:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(folder: Path, case: str, epochs: int) -> None:
    torch.set_num_threads(1)
    witness = Epochs()
    seed_everything(0, verbose=False)

    def train() -> CountedSource:
        if case == "dies" and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        if case == "full" and dist.get_rank() == 2:
            Segment.create = full  # type: ignore[method-assign,assignment]
        return (Misjudged if case == "records" else CountedSource)(SAMPLES, (8,), folder / "train.loads")

    options: dict[str, Any] = {}
    if case == "fold":
        options = {"sampler": SubsetRandomSampler(FOLD)}
    if case == "records":
        options = {"collate_fn": without_text}
    dm: LightningDataModule = StocacheDataModule(
        train,
        batch_size=BATCH,
        loader=options,
        budget={"whole": "auto", "records": "6MiB"}.get(case, "50%"),
        sampling="global" if case in ("global", "whole") else "locality",
        strict=case == "full",
    )
    monitor = CacheMonitor()
    if case in ("callback", "cached"):
        dm = LightningDataModule.from_datasets(train(), batch_size=BATCH)
        monitor = StochasticCache("50%") if case == "callback" else monitor
        dm = cache_datamodule(dm, "50%") if case == "cached" else dm
    nodes: dict[str, Any] = {"epochs": epochs, "devices": 2, "num_nodes": 2, "strategy": "ddp", "logger": False}
    if case == "fold":
        loader = DataLoader(train(), BATCH, **options)
        make_trainer(folder, [StochasticCache("50%"), witness], **nodes).fit(Narrow(), loader)
    trainer = make_trainer(folder, [monitor, witness], **nodes)
    try:
        trainer.fit(Narrow(), dm)
    except BaseException as error:
        (folder / f"rank{trainer.global_rank}.error").write_text(f"{type(error).__name__}: {error}")
        raise
    rank = trainer.global_rank
    (folder / f"rank{rank}.json").write_text(json.dumps(witness.metrics))
    dist.destroy_process_group()


if __name__ == "__main__":
    logging.basicConfig(filename=Path(sys.argv[1]) / f"{os.getpid()}.log", level=logging.INFO)
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))

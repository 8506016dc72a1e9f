"""Two ranks train on a stream that each reads a half of: run by `test_streams`.

    python -m tests.training.streams_job WORKERS

Prints, per epoch, how many samples each rank has seen, how many batches, and whether every sample came once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from lightning_stocache import StochasticCache
from tests.training.seen import Remembers
from tests.training.tiny import make_trainer

LENGTH = 101


class Halves(IterableDataset[Any]):
    """Numbers, divided among ranks and their workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(int(os.environ.get("LOCAL_RANK", 0)) * workers + worker, LENGTH, 2 * workers):
            yield torch.full((3,), float(number))


class Seen(Remembers):
    """Tells what it has seen."""

    batches = 0

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.batches += 1
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        told: list[Any] = [None, None]
        dist.all_gather_object(told, (self.epochs[-1], self.batches))
        self.batches = 0
        if self.global_rank == 0:
            whole = sorted(told[0][0] + told[1][0]) == list(map(float, range(LENGTH)))
            print("epoch", len(told[0][0]), len(told[1][0]), told[0][1], told[1][1], whole, flush=True)


def main(workers: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    ranks = {"devices": 2, "strategy": "ddp", "logger": False}
    trainer = make_trainer(Path.cwd(), [StochasticCache(budget="64MiB", streams=True)], epochs=4, **ranks)
    trainer.fit(Seen(), DataLoader(Halves(), batch_size=4, num_workers=workers))
    dist.destroy_process_group()  # without it a gloo rank aborts at exit, in one run of six


if __name__ == "__main__":
    main(int(sys.argv[1]))

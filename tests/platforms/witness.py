"""What a rank that was spawned leaves in a file."""

import json
from pathlib import Path

import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_stocache import CacheMonitor

__all__ = ["Hits"]


class Hits(Callback):
    """The hits of each epoch, in `hits<rank>.json`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.hits = folder, list[int]()

    @classmethod
    def callbacks(cls, folder: Path) -> list[Callback]:
        """With the monitor that logs them."""
        return [CacheMonitor(), cls(folder)]

    def on_train_epoch_end(self, trainer, pl_module):
        self.hits.append(int(trainer.callback_metrics["stocache/hits"]))

    def on_fit_end(self, trainer, pl_module):
        (self.folder / f"hits{trainer.global_rank}.json").write_text(json.dumps(self.hits))
        dist.barrier()

"""A training on the CPU whose memory is all of its own: run by `test_doors` in a cgroup.

    python limited_job.py '{"door": "callback", "budget": "auto", "num_workers": 2, "samples": 7000}'

The last line of stdout has the metrics of the last epoch.
"""

import json
import logging
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from lightning_stocache import CacheMonitor, StocacheDataModule, StochasticCache
from tests.sources import Made


def image(index: int) -> tuple[torch.Tensor, int]:
    """A sample of 147 KiB."""
    return torch.full((3, 224, 224), index % 256, dtype=torch.uint8), index % 10


class Classifier(LightningModule):
    """Two million parameters: 9 MB, and three times that besides once Adam has stepped.

    Every tenth batch is turned into floats as a whole, 38 MB: memory that comes and goes. With 16 to 32 MB this would
    be a test of glibc, whose heap then grows by up to a GB within two epochs, by chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2352, 1000), torch.nn.Linear(1000, 10))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        thumbnails = (images.float() if batch_idx % 10 == 0 else images)[:, :, ::8, ::8].float() / 255
        return torch.nn.functional.cross_entropy(self.net(thumbnails), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)


def main(door: str, budget: int | str, num_workers: int, samples: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take ten times as long
    train, val = Made(image, samples), Made(image, samples // 20)
    loading: dict[str, Any] = {"batch_size": 64, "num_workers": num_workers}
    if door == "datamodule":
        callback: Any = CacheMonitor()
        data: list[Any] = [StocacheDataModule(train, val, budget=budget, **loading)]
    else:
        callback = StochasticCache(budget=budget)
        data = [DataLoader(train, shuffle=True, **loading), DataLoader(val, **loading)]
    silent = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(max_epochs=2, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **silent)
    trainer.fit(Classifier(), *data)
    print({key: float(value) for key, value in trainer.callback_metrics.items() if key.startswith("stocache/")})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

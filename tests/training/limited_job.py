"""A training on the CPU whose memory is all of its own: run by `test_memory_limits` in a cgroup.

    python limited_job.py '{"door": "callback", "budget": "auto", "num_workers": 2, "samples": 7000}'

The last line of stdout is JSON: bytes granted and held, and the hit rates of the epochs.
"""

import json
import logging
import sys
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import StocacheDataModule, StochasticCache
from lightning_stocache.loading.loader_tree import cached_in_leaves

BATCH = 64


class Images(Dataset[Any]):
    """Samples of 147 KiB, made on the spot."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 224, 224), index % 256, dtype=torch.uint8), index % 10


class Classifier(LightningModule):
    """Two million parameters: 9 MB, and three times that besides once Adam has stepped.

    Every tenth batch is turned into floats as a whole, 38 MB: memory that comes and goes. With 16 to 32 MB this would
    be a test of glibc, whose heap then grows by up to a GB within two epochs, by chance.
    """

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(2352, 1000), torch.nn.Linear(1000, 10))

    def _loss(self, batch: Any, batch_idx: int) -> torch.Tensor:
        images, labels = batch
        thumbnails = (images.float() if batch_idx % 10 == 0 else images)[:, :, ::8, ::8].float() / 255
        return torch.nn.functional.cross_entropy(self.net(thumbnails), labels)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self._loss(batch, batch_idx))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-4)


class Note(Callback):
    """Records granted and held bytes, and the hit rate of each epoch."""

    def __init__(self) -> None:
        self.granted = self.held = 0
        self.hit_rates: list[float] = []
        self._served = self._hits = 0

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        datasets = cached_in_leaves(trainer.train_dataloader)
        self.granted = sum(dataset.budget_bytes for dataset in datasets)
        self.held = sum(dataset.cache.memory_bytes for dataset in datasets if dataset.cache is not None)
        totals = [dataset.counters.totals() for dataset in datasets if dataset.counters is not None]
        hits = sum(counts.hits for counts in totals)
        served = sum(counts.hits + counts.misses + counts.bypasses for counts in totals)
        self.hit_rates.append((hits - self._hits) / max(served - self._served, 1))
        self._hits, self._served = hits, served


def main(door: str, budget: int | str, num_workers: int, samples: int) -> None:
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)  # on a busy machine threads that wait for each other take ten times as long
    note, callbacks, model = Note(), list[Callback](), Classifier()
    train, val = Images(samples), Images(samples // 20)
    if door == "datamodule":
        data = {"datamodule": StocacheDataModule(train, val, batch_size=BATCH, num_workers=num_workers, budget=budget)}
    else:
        loading: dict[str, Any] = {"batch_size": BATCH, "num_workers": num_workers}
        loaders = DataLoader(train, shuffle=True, **loading), DataLoader(val, **loading)
        data = dict(zip(("train_dataloaders", "val_dataloaders"), loaders, strict=True))
        callbacks.append(StochasticCache(budget=budget))
    trainer = Trainer(
        max_epochs=2,
        accelerator="cpu",
        callbacks=[*callbacks, note],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, **data)
    print(json.dumps({"granted": note.granted, "held": note.held, "hit_rates": note.hit_rates}))


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))

"""The doors in a Trainer of the package pytorch_lightning, with its modules and loaders."""

from typing import Any

import pytest
import torch

from lightning_stocache import CacheMonitor, FillProgress, StochasticCache, cache_datamodule
from lightning_stocache.training.loaders import rewrap
from tests.training.tiny import SAMPLES, announced, logged, plain_loader, source

pl = pytest.importorskip("pytorch_lightning")


class Other(pl.LightningModule):  # type: ignore[name-defined,misc]
    """A model on the other package's base class, which takes any batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, batch_idx):
        return self.layer.weight.sum()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherData(pl.LightningDataModule):  # type: ignore[name-defined,misc]
    """A DataModule of the other package, whose training loader is a CombinedLoader of that package."""

    def __init__(self, train: Any, val: Any) -> None:
        super().__init__()
        self.train, self.val = train, val

    def train_dataloader(self):
        return pl.utilities.CombinedLoader({"one": plain_loader(self.train)}, "min_size")

    def val_dataloader(self):
        return plain_loader(self.val)


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
def test_both_doors_cache_and_log(tmp_path, caplog, door):
    """Loaders given to fit, and those of a DataModule of that package, are cached; the metrics are logged."""
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    dm = OtherData(train, val)
    callbacks = [StochasticCache(), FillProgress()] if door == "callback" else [CacheMonitor()]
    given = (dm.train_dataloader(), dm.val_dataloader()) if door == "callback" else (cache_datamodule(dm),)
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    logger = pl.loggers.CSVLogger(tmp_path, name="logs")
    trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, **silent)
    trainer.fit(Other(), *given)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert logged(trainer, "stocache/val/misses")[-1] == 0
    assert train.loads <= SAMPLES + announced(caplog)


def test_its_combined_loader_keeps_its_class():
    """The copy of a CombinedLoader has the same class."""
    given = pl.utilities.CombinedLoader({"one": plain_loader(range(4))}, "sequential")
    assert type(rewrap(given, lambda loader: loader)) is type(given)

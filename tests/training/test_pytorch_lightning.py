"""The callbacks in a Trainer of the package pytorch_lightning, with its modules and loaders."""

from typing import Any

import pytest
import torch

from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import cache_datamodule
from lightning_stocache.training.loaders import rewrap
from lightning_stocache.training.monitor import CacheMonitor
from tests.training.tiny import SAMPLES, announced, logged, plain_loader, source

pl = pytest.importorskip("pytorch_lightning")


class Other(pl.LightningModule):  # type: ignore[name-defined,misc]
    """The tests' model on the other package's base class."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3 * 8 * 8, 10)

    def training_step(self, batch, batch_idx):
        images, labels = batch["one"] if isinstance(batch, dict) else batch
        return torch.nn.functional.cross_entropy(self.layer(images.flatten(1).float() / 255), labels)

    def validation_step(self, batch, batch_idx):
        self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OtherData(pl.LightningDataModule):  # type: ignore[name-defined,misc]
    """A DataModule of the other package."""

    def __init__(self, train: Any) -> None:
        super().__init__()
        self.train = train

    def train_dataloader(self):
        return plain_loader(self.train)


def make_trainer(tmp_path, callbacks):
    logger = pl.loggers.CSVLogger(tmp_path, name="logs")
    silent = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return pl.Trainer(
        max_epochs=2, accelerator="cpu", devices=1, logger=logger, callbacks=callbacks, log_every_n_steps=1, **silent
    )


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_the_callback_caches_and_logs(tmp_path, caplog):
    """Loaders given to fit, a CombinedLoader of that package among them, are cached; the metrics are logged."""
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    combined = pl.utilities.CombinedLoader({"one": plain_loader(train)}, "min_size")
    trainer = make_trainer(tmp_path, [StochasticCache(), FillProgress()])
    trainer.fit(Other(), combined, plain_loader(val))
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert logged(trainer, "stocache/val/misses")[-1] == 0
    assert train.loads <= SAMPLES + announced(caplog)


def test_its_combined_loader_keeps_its_class():
    """The copy of a CombinedLoader has the same class."""
    given = pl.utilities.CombinedLoader({"one": plain_loader(range(4))}, "sequential")
    assert type(rewrap(given, lambda loader: loader)) is type(given)


@pytest.mark.epoch_one_reads_all
@pytest.mark.processes
def test_its_datamodule_can_be_cached(tmp_path):
    """cache_datamodule also takes a DataModule of that package."""
    train = source(tmp_path)
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    trainer.fit(Other(), cache_datamodule(OtherData(train)))
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]

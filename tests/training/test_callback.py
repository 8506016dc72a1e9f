"""StochasticCache: nothing but a callback, and every loader of the call is cached."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import default_collate

from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import cache_datamodule
from tests.sources import CountedSource
from tests.training.tiny import SAMPLES, Model, announced, logged, make_trainer, plain_loader, source

pytestmark = [pytest.mark.processes, pytest.mark.epoch_one_reads_all]


@pytest.mark.parametrize(
    ("origin", "reload"),
    [("fit", 1), ("module", 1), ("from_datasets", 0), ("cache_datamodule", 1)],
)
def test_loaders_from_anywhere_are_cached(tmp_path, caplog, origin, reload):
    """Given to fit, from a module's hooks or from a DataModule: each sample is loaded once in three epochs.

    A DataModule that `cache_datamodule` has cached keeps its caches beside the callback.
    """
    train, val = source(tmp_path), source(tmp_path, "val", 8)

    class OwnModel(Model):
        def train_dataloader(self) -> Any:
            return plain_loader(train, shuffle=True)

        def val_dataloader(self) -> Any:
            return plain_loader(val)

    dm = LightningDataModule.from_datasets(train, val)
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=reload)
    if origin == "fit":
        trainer.fit(Model(), plain_loader(train, shuffle=True), plain_loader(val))
    elif origin == "module":
        trainer.fit(OwnModel())
    else:
        trainer.fit(Model(), cache_datamodule(dm) if origin == "cache_datamodule" else dm)
    assert train.loads + val.loads == SAMPLES + 8 + announced(caplog)
    assert logged(trainer, "stocache/hit_rate")[-1] == 1


def test_fast_dev_run_and_barebones(tmp_path, recwarn):
    """One batch of everything, and a Trainer that does not log: both run, and nobody is told that logging is off."""
    barebones = Trainer(barebones=True, callbacks=[StochasticCache(), FillProgress()], accelerator="cpu", max_epochs=1)
    for trainer in (make_trainer(tmp_path, [StochasticCache()], fast_dev_run=True), barebones):
        trainer.fit(Model(), plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "val", 8)))
    assert not [warning for warning in recwarn if "self.log" in str(warning.message)]


class Anew(Model):
    """Makes its dataset for every epoch; `make` is given how many it has made."""

    def __init__(self, make):
        super().__init__()
        self.make, self.count = make, 0

    def train_dataloader(self):
        self.count += 1
        return plain_loader(self.make(self.count - 1))


def test_a_dataset_made_anew_goes_on_in_the_cache_of_the_one_before(tmp_path, caplog):
    """Also where it is longer each time: its samples are hits, and what is new passes through."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: source(tmp_path, samples=SAMPLES + 4 * count)))
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0, 0]
    assert logged(trainer, "stocache/hits") == [0, SAMPLES, SAMPLES]
    assert logged(trainer, "stocache/bypasses") == [0, 4, 8]
    assert logged(trainer, "stocache/coverage") == pytest.approx([1, SAMPLES / (SAMPLES + 4), SAMPLES / (SAMPLES + 8)])
    assert logged(trainer, "stocache/hit_rate_expected") == [0]  # no formula holds for what grows
    assert "came with a new" not in caplog.text


class Other(CountedSource):
    """Other samples in each object."""

    def expected(self, index):
        image, label = super().expected(index)
        return image + int(Path(self.log_path).name), label


def test_datasets_that_are_never_the_same_end_the_caching(tmp_path, caplog):
    """The second that comes before anything was hit passes through, with one warning that says what to do."""
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=5, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Anew(lambda count: Other(SAMPLES, log_path=tmp_path / str(count))))
    assert logged(trainer, "stocache/misses")[:2] == [SAMPLES] * 2
    assert caplog.text.count("not cached any more") == caplog.text.count("RollingCache") == 1


def test_a_loader_made_anew_for_every_epoch_goes_with_it(tmp_path):
    """Also one that its own collate function holds: the call keeps the last one alone."""
    train, made, alive = source(tmp_path), [], []

    class Anew(Model):
        def train_dataloader(self):
            loader = plain_loader(train)
            loader.collate_fn = MethodType(lambda loader, samples: default_collate(samples), loader)
            made.append(weakref.ref(loader))
            gc.collect()
            alive.append(sum(loader() is not None for loader in made))
            return loader

    make_trainer(tmp_path, [StochasticCache()], epochs=5, reload_dataloaders_every_n_epochs=1).fit(Anew())
    assert len(alive) == 5
    assert max(alive) <= 3


def test_a_budget_that_is_used_up_says_so(tmp_path, caplog):
    """Kept caches leave nothing of a budget in bytes for another call's dataset: it passes through, with a warning."""
    callback = StochasticCache(budget=SAMPLES * (3 * 8 * 8 + 8 + 1), keep_cache=True)
    make_trainer(tmp_path, [callback]).fit(Model(), plain_loader(source(tmp_path)))
    trainer = make_trainer(tmp_path, [callback])
    trainer.test(Model(), plain_loader(source(tmp_path, "test", 8)), verbose=False)
    assert logged(trainer, "stocache/test/bypasses") == [8]
    assert sum("the caches that are open use all of budget=" in record.getMessage() for record in caplog.records) == 1
    callback.close()

"""cache_datamodule: the user's own object, with cached loaders and nothing else changed."""

from __future__ import annotations

import pickle

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_stocache.training.datamodule import cache_datamodule
from tests.training.tiny import MadeInSetup, Model, cached_datasets, make_trainer, plain_loader, source

pytestmark = pytest.mark.processes


class Photos(LightningDataModule):
    """A DataModule as people write it: datasets in setup, a loader per stage, hooks that note that they ran."""

    def __init__(self, folder: str, batch_size: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.ran: list[str] = []

    def setup(self, stage: str) -> None:
        self.ran.append(f"setup {stage}")
        if not hasattr(self, "train"):
            self.train, self.val = source(self.hparams.folder), source(self.hparams.folder, "val", 8)

    def train_dataloader(self):
        self.ran.append("train_dataloader")
        return plain_loader(self.train, batch_size=self.hparams.batch_size, shuffle=True)

    def val_dataloader(self):
        self.ran.append("val_dataloader")
        return plain_loader(self.val, batch_size=self.hparams.batch_size)

    def teardown(self, stage: str) -> None:
        self.ran.append(f"teardown {stage}")

    def on_exception(self, exception: BaseException) -> None:
        self.ran.append(f"on_exception {type(exception).__name__}")

    def state_dict(self):
        return {"mine": len(self.ran)}

    def load_state_dict(self, state) -> None:
        self.ran.append("loaded")


def test_the_object_stays_what_it_is(tmp_path):
    """The same object comes back, of the same class, with its hyperparameters; undefined hooks stay undefined."""
    dm = Photos(str(tmp_path))
    cached = cache_datamodule(dm, budget="1MiB")
    assert cached is dm
    assert type(dm) is Photos
    assert dm.hparams.batch_size == 4
    overridden = {
        hook for hook in vars(LightningDataModule.__mro__[1]) if "dataloader" in hook and is_overridden(hook, dm)
    }
    assert overridden == {"train_dataloader", "val_dataloader"}
    assert not is_overridden("on_after_batch_transfer", dm)


def test_the_users_on_exception_runs_and_the_caches_close(tmp_path):
    """An exception in training reaches the user's on_exception, and the caches are closed after it."""

    class Failing(Model):
        def training_step(self, batch, batch_idx):
            raise ArithmeticError("mine")

    dm = cache_datamodule(Photos(str(tmp_path)))
    trainer = make_trainer(tmp_path)
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.fit(Failing(), dm)
    assert dm.ran[-1] == "on_exception ArithmeticError"
    assert [dataset.cache for dataset in cached_datasets(trainer.train_dataloader)] == [None]


def test_checkpoints_hold_what_they_held(tmp_path):
    """The user's state is saved under the class's own name, and loaded again into a cached object."""
    dm = cache_datamodule(Photos(str(tmp_path)))
    saver = ModelCheckpoint(tmp_path / "kept", save_last=True)
    make_trainer(tmp_path, [saver], enable_checkpointing=True).fit(Model(), dm)
    kept = torch.load(saver.last_model_path, weights_only=False)
    assert set(kept["Photos"]) == {"mine"}
    assert kept["datamodule_hyper_parameters"]["batch_size"] == 4
    again = cache_datamodule(Photos(str(tmp_path)))
    make_trainer(tmp_path, epochs=2).fit(Model(), again, ckpt_path=saver.last_model_path)
    assert "loaded" in again.ran


def test_a_new_call_asks_for_its_loaders_again(tmp_path):
    """Loaders that were looked at by hand before, without teardown, do not stand in the Trainer's way."""
    dm = cache_datamodule(Photos(str(tmp_path)))
    dm.setup("fit")
    assert len(list(dm.train_dataloader())) == 6
    assert len(list(dm.val_dataloader())) == 2
    loads = dm.train.loads
    make_trainer(tmp_path).fit(Model(), dm)
    assert dm.train.loads == loads


def test_a_new_call_shares_its_budget_anew(tmp_path):
    """Datasets that setup makes anew have the whole budget, half of it each, though one of before had it all."""
    dm = cache_datamodule(MadeInSetup(tmp_path), 16 * (3 * 8 * 8 + 8 + 1))
    dm.setup("fit")
    dm.train_dataloader()
    slots = []

    class Looking(Callback):
        def on_train_start(self, trainer, pl_module):
            loaders = [trainer.train_dataloader, trainer.val_dataloaders]
            slots.extend(len(dataset.cache) for dataset in cached_datasets(loaders))

    make_trainer(tmp_path, [Looking()]).fit(Model(), dm)
    assert slots == [8, 8]


def test_a_kept_cache_is_replaced_when_setup_makes_a_new_dataset(tmp_path):
    """keep_cache=True keeps no cache that nobody can reach: a second fit with new datasets closes the first one's."""
    made = []

    class Remaking(MadeInSetup):
        def setup(self, stage):
            super().setup(stage)
            made.append((self.train, self.val))

    dm = cache_datamodule(Remaking(tmp_path), keep_cache=True)
    for _ in range(3):
        make_trainer(tmp_path).fit(Model(), dm)
    assert [[one in dm.caches for one in sets] for sets in made] == [[False, False], [False, False], [True, True]]
    dm.caches.close()


def test_a_copy_in_another_process_has_nothing_open(tmp_path):
    """Pickled with open caches, a DataModule arrives with its hooks and options, and opens its own."""
    dm = cache_datamodule(Photos(str(tmp_path)), budget="1MiB")
    dm.setup("fit")
    dm.train_dataloader()
    copy = pickle.loads(pickle.dumps(dm))
    assert copy.caches.options == dm.caches.options
    assert dm.train in dm.caches
    assert copy.train not in copy.caches
    assert cached_datasets(copy.train_dataloader())[0].cache is not cached_datasets(dm.train_dataloader())[0].cache
    for module in (dm, copy):
        module.teardown("fit")

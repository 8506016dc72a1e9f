"""Caches open once and close at every kind of end of a call."""

import gc
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback

from tests.training.tiny import DOORS, SAMPLES, Data, MadeInSetup, Model, behind, logged, make_trainer, source

pytestmark = [pytest.mark.processes, pytest.mark.looks_apart]


def data_for(door: str, folder: Path, **options: Any) -> Data:
    """A DataModule that makes its datasets in `setup`, and for StocacheDataModule the datasets."""
    if door == "ours":
        return Data(source(folder), source(folder, "val", 8), **options)
    return MadeInSetup(folder, **options)


@pytest.mark.parametrize("door", DOORS)
def test_a_call_opens_two_segments_per_dataset(tmp_path, segments, door):
    """A fit with a sanity check and reloads creates slots and counters of train and val once, and closes them."""
    callbacks, dm = behind(door, data_for(door, tmp_path))
    trainer = make_trainer(tmp_path, callbacks, epochs=3, reload_dataloaders_every_n_epochs=1)
    trainer.fit(Model(), dm)
    assert len(segments) == 4
    assert all(segment.closed for segment in segments)
    trainer.validate(Model(), dm, verbose=False)
    assert len(segments) == 6
    assert all(segment.closed for segment in segments)


@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
def test_a_reloaded_loader_takes_its_workers_with_it(tmp_path, door):
    """New loaders in every epoch leave no more worker processes than one epoch has."""

    class Counting(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            workers.append(len(multiprocessing.active_children()))

    workers = list[int]()
    data = Data(source(tmp_path), num_workers=1, persistent_workers=True)
    callbacks, cached = behind(door, data, budget="50%")
    callbacks.append(Counting())
    make_trainer(tmp_path, callbacks, epochs=4, reload_dataloaders_every_n_epochs=1).fit(Model(), cached)
    assert workers == [1, 1, 1, 1]
    gc.collect()
    assert not multiprocessing.active_children()


class Failing(Model):
    """Raises in the middle of an epoch."""

    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        if batch_idx == 3:
            raise self.error("mine")
        return super().training_step(batch, batch_idx)


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("door", "workers", "error"),
    [
        ("callback", 0, ArithmeticError),
        ("callback", 0, KeyboardInterrupt),
        ("cache_datamodule", 0, SystemExit),
        ("ours", 0, ArithmeticError),
        ("ours", 2, KeyboardInterrupt),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_caches_are_closed_after_every_kind_of_end(tmp_path, segments, door, error, workers):
    """An exception, Ctrl-C or SystemExit in a step closes all segments, and the next fit works."""
    callbacks, dm = behind(door, data_for(door, tmp_path, num_workers=workers))
    with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
        (trainer := make_trainer(tmp_path, callbacks)).fit(Failing(error), dm)
    assert len(segments) >= 4
    assert all(segment.closed for segment in segments)
    assert "dataloader" not in vars(trainer.fit_loop._data_source), "the loaders are the user's own again"
    trainer = make_trainer(tmp_path, callbacks, epochs=2)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/misses") == [SAMPLES, 0]
    assert all(segment.closed for segment in segments)


@pytest.mark.epoch_one_reads_all
def test_a_kept_cache_outlives_a_failure(tmp_path, segments):
    """With keep_cache=True the next fit hits the samples that a failed fit has loaded."""
    callbacks, dm = behind("ours", Data(source(tmp_path), shuffle=False), keep_cache=True)
    with pytest.raises(ArithmeticError):
        make_trainer(tmp_path, callbacks).fit(Failing(ArithmeticError), dm)
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(Model(), dm)
    assert logged(trainer, "stocache/hits")[-1] == 16
    dm.close()
    assert all(segment.closed for segment in segments)

"""CacheMonitor logs what the source itself has counted."""

import time
from importlib import import_module
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from torch.utils.data import DataLoader

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import Made
from tests.training.tiny import (
    SAMPLES,
    SLOT,
    Data,
    Model,
    behind,
    logged,
    make_trainer,
    plain_loader,
    rows_of,
    said,
    source,
)

pytestmark = [pytest.mark.processes, pytest.mark.epoch_one_reads_all]

KEYS = {
    *("hit_rate", "fill_fraction", "coverage", "hits", "misses", "bypasses", "fills", "memory_bytes", "budget_bytes"),
    *("bytes_from_cache", "bytes_from_source"),
    *("source_seconds", "fill_seconds", "gather_seconds"),
}
LIVE = "stocache/live/hit_rate"
OF_TRAINING = {"data_wait_seconds", "compute_seconds", "samples_per_second", "hit_rate_expected"}


class Logging(Model):
    """Logs its loss in every stage."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("loss", self.loss(batch))

    test_step = validation_step


@pytest.mark.parametrize(("budget", "slots", "workers"), [("auto", 24, 0), ("50%", 12, 2), (0, 0, 0)])
def test_values_are_the_sources_own(tmp_path, workers, budget, slots):
    """In every epoch hits, misses and bypasses add up to the served samples, and misses and bypasses to the source's
    loads."""
    train = source(tmp_path)
    dm = StocacheDataModule(train, batch_size=4, num_workers=workers, budget=budget)
    dm.setup("fit")
    loads = [train.loads]

    class Counting(CacheMonitor):
        def on_train_epoch_end(self, trainer, pl_module):
            super().on_train_epoch_end(trainer, pl_module)
            loads.append(train.loads)

    trainer = make_trainer(tmp_path, [Counting()], epochs=3)
    trainer.fit(Model(), dm)
    values = {key: logged(trainer, f"stocache/{key}") for key in KEYS}
    assert values["hits"] == [0, slots, slots]
    assert values["misses"] == values["fills"] == [slots, 0, 0]
    assert values["bypasses"] == [SAMPLES - slots] * 3
    assert [loads[epoch + 1] - loads[epoch] for epoch in range(3)] == [SAMPLES, SAMPLES - slots, SAMPLES - slots]
    assert values["coverage"] == [pytest.approx(slots / SAMPLES)] * 3
    assert values["hit_rate"][-1] == pytest.approx(slots / SAMPLES)
    assert values["bytes_from_cache"] == [0, *[slots * (SLOT - 1)] * 2]
    assert values["budget_bytes"][0] <= SAMPLES * SLOT
    assert (values["memory_bytes"][0] > 0) == (slots > 0)


def test_only_one_epoch_row_per_key(tmp_path):
    """Exactly the documented keys are logged, once per epoch. The fills of the sanity check are hits of the first
    validation, and its misses are not logged."""
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, num_sanity_val_steps=1)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), source(tmp_path, "val", 8), batch_size=4))
    own = {key.removeprefix("stocache/") for key in trainer.callback_metrics if key.startswith("stocache/")}
    assert own == KEYS | OF_TRAINING | {f"val/{key}" for key in KEYS}
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert logged(trainer, "stocache/val/hits") == [4, 8]
    assert logged(trainer, "stocache/val/misses") == [4, 0]


def test_wait_and_compute_are_the_epoch(tmp_path):
    """Waiting for a slow source and computing in a slow step are separate; validation is in neither."""

    class Slow(Model):
        def training_step(self, batch, batch_idx):
            time.sleep(0.01)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            time.sleep(0.1)

    def load(index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005)
        return torch.zeros(3, 8, 8, dtype=torch.uint8), 0

    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, log_every_n_steps=100)  # no live values in between
    begin = time.perf_counter()
    trainer.fit(Slow(), StocacheDataModule(Made(load, SAMPLES), source(tmp_path, "val", 8), batch_size=4))
    fitted = time.perf_counter() - begin
    waited, computed = (logged(trainer, f"stocache/{key}") for key in ("data_wait_seconds", "compute_seconds"))
    assert waited[0] >= 0.005 * SAMPLES
    assert all(seconds >= 0.01 * SAMPLES / 4 for seconds in computed)
    assert sum(waited) + sum(computed) <= fitted - 2 * 2 * 0.1  # two epochs, each with two batches of validation
    spent = {key: logged(trainer, f"stocache/{key}_seconds") for key in ("source", "fill", "gather")}
    assert 0.005 * SAMPLES <= spent["source"][0] <= waited[0]
    assert spent["source"][1] == spent["fill"][1] == spent["gather"][0] == 0
    assert 0 < spent["fill"][0] <= waited[0]
    assert 0 < spent["gather"][1] <= fitted
    rates = logged(trainer, "stocache/samples_per_second")
    assert all(SAMPLES / fitted < rate <= SAMPLES / seconds for rate, seconds in zip(rates, computed, strict=True))
    assert logged(trainer, "stocache/hit_rate_expected") == [0, 1]


def test_a_loader_of_another_class_does_not_tell_its_seconds(tmp_path):
    """Its seconds are left out, instead of a waiting time of zero."""

    class Users(DataLoader):
        pass

    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=2)
    trainer.fit(Model(), Users(source(tmp_path), 4))
    assert trainer.callback_metrics["stocache/hit_rate"] == 1
    assert trainer.callback_metrics["stocache/samples_per_second"] > 0
    assert not {"stocache/data_wait_seconds", "stocache/compute_seconds"} & set(trainer.callback_metrics)


def test_a_hit_rate_below_the_expected_one_is_warned_about_once(tmp_path, caplog):
    """A cache that is cleared before every epoch has no hits: one warning of two lines names the likely cause."""

    class Emptying(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.train_dataloader.dataset.cache.clear()

    trainer = make_trainer(tmp_path, [CacheMonitor(), Emptying()], epochs=4)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    [warning] = said(caplog, "were to be expected")
    assert warning.endswith("\nthe source may be created again in every epoch")


def test_live_values_come_at_the_trainers_cadence(tmp_path):
    """Every log_every_n_steps there is a row with the epoch's hit rate so far, under Lightning's step number."""
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, log_every_n_steps=2)
    trainer.fit(Logging(), StocacheDataModule(source(tmp_path), batch_size=4))
    for key in ("loss", LIVE):
        assert [int(row["step"]) for row in rows_of(trainer.logger) if key in row] == [1, 3, 5, 7, 9, 11]
    assert logged(trainer, "stocache/live/fill_fraction") == pytest.approx([2 / 6, 4 / 6, 1, 1, 1, 1])
    assert logged(trainer, LIVE) == [0, 0, 0, 1, 1, 1]
    assert len(logged(trainer, "stocache/hit_rate")) == 2  # the epochs' alone


class Recording(Logger):
    """A user's logger that records rows of metrics with their steps, and hyperparameters."""

    name, version = "recording", 0

    def __init__(self):
        super().__init__()
        self.rows, self.told = [], []

    def log_metrics(self, metrics, step=None):
        self.rows.append({"step": step, **metrics})

    def log_hyperparams(self, params):
        self.told.append(params)


def steps_of(rows: list[dict[str, Any]]) -> dict[str, list[int]]:
    """The steps of each key of the caches."""
    keys = sorted({key for row in rows for key in row if key.startswith("stocache/")})
    return {key: [int(row["step"]) for row in rows if key in row] for key in keys}


def test_no_value_is_logged_twice(tmp_path):
    """With two fits, a resume, validation within epochs and two monitors each logger has each key once per step."""
    recording, csv_logger, tensorboard = Recording(), CSVLogger(tmp_path), TensorBoardLogger(str(tmp_path / "tb"))
    both, val = source(tmp_path), source(tmp_path, "val", 8)
    monitors = [StochasticCache(keep_cache=True), CacheMonitor(), CacheMonitor()]
    options = {"logger": [recording, csv_logger, tensorboard], "val_check_interval": 3, "num_sanity_val_steps": 1}
    trainer = make_trainer(tmp_path, [*monitors, FillProgress()], epochs=2, **options)
    trainer.fit(Model(), plain_loader(both), [plain_loader(val), plain_loader(both)])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Model(), plain_loader(both), plain_loader(val))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = make_trainer(tmp_path, monitors, epochs=4, **options)
    trainer.fit(Model(), plain_loader(both), plain_loader(val), ckpt_path=tmp_path / "last.ckpt")
    monitors[0].close()
    steps = steps_of(recording.rows)
    assert steps["stocache/hit_rate"] == [5, 11, 17, 23]
    assert steps[LIVE] == list(range(24))
    assert len(steps["stocache/val/hit_rate"]) == 8
    assert all(len(set(of_key)) == len(of_key) for of_key in steps.values())
    assert steps_of(rows_of(csv_logger)) == steps
    events = import_module("tensorboard.backend.event_processing.event_accumulator")
    accumulator = events.EventAccumulator(tensorboard.log_dir)
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag.startswith("stocache/")]
    assert {tag: [event.step for event in accumulator.Scalars(tag)] for tag in tags} == steps
    assert len(recording.told) == 3  # once in each fit


def test_predict_has_a_hit_rate(tmp_path):
    """Several loaders are counted together, under `stocache/predict/`. Predictions are the same as without a cache."""
    loaders = [plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "second", 12))]

    def predicted(trainer: Trainer) -> list[int]:
        return [int(label) for of_loader in trainer.predict(Model(), loaders) for batch in of_loader for label in batch]

    expected = predicted(make_trainer(tmp_path))
    callback = StochasticCache(keep_cache=True)
    for hits in (0, SAMPLES + 12):
        trainer = make_trainer(tmp_path, [callback])
        assert predicted(trainer) == expected
        assert logged(trainer, "stocache/predict/hits") == [hits]
        assert logged(trainer, "stocache/predict/coverage") == [1]
        assert trainer.callback_metrics == {}
    assert trainer.predict(Model(), loaders, return_predictions=False) is None
    callback.close()


def test_checkpoints_and_early_stopping_can_watch_the_hit_rate(tmp_path):
    """ModelCheckpoint and EarlyStopping, listed before the monitor, see each epoch's hit rate."""
    saver = ModelCheckpoint(tmp_path / "kept", monitor="stocache/hit_rate", mode="max")
    stopper = EarlyStopping("stocache/hit_rate", mode="max", patience=2)
    trainer = make_trainer(tmp_path, [saver, stopper, CacheMonitor()], epochs=9, enable_checkpointing=True)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    assert saver.best_model_score == 1
    assert "epoch=1" in saver.best_model_path
    assert trainer.current_epoch == 4


def test_validate_and_test_return_what_they_return_without_a_monitor(tmp_path):
    """Outside of fit the loggers get stocache/val/ and stocache/test/ once, and the results of the call have no such
    keys."""
    dm = StocacheDataModule(val=source(tmp_path, "val", 8), test=source(tmp_path, "test", 8), batch_size=4)
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    for call, stage in ((trainer.validate, "val"), (trainer.test, "test")):
        [results] = call(Logging(), dm, verbose=False)
        assert set(results) == {"loss"}
        assert not [key for key in trainer.callback_metrics if "stocache" in key]
        assert logged(trainer, f"stocache/{stage}/misses") == [8]
        assert logged(trainer, "epoch") == [0] * (2 if stage == "val" else 4)


@pytest.mark.parametrize("door", ["callback", "dataset"])
def test_a_cache_that_is_off_says_so_and_gives_no_false_bytes(tmp_path, caplog, door):
    """With budget=0 the end of the run says that the cache is off; unknown bytes are left out."""
    if door == "dataset":
        callbacks, data = [CacheMonitor()], Data(CachedDataset(source(tmp_path), budget=0))
    else:
        callbacks, data = behind(door, Data(source(tmp_path)), budget=0)
    trainer = make_trainer(tmp_path, callbacks, epochs=2)
    trainer.fit(Model(), data)
    assert logged(trainer, "stocache/bypasses") == [SAMPLES, SAMPLES]
    assert logged(trainer, "stocache/bytes_from_source") == []
    lines = [line for line in said(caplog, "stocache: ") if "epoch" not in line]
    assert lines == ["stocache: the cache is off (budget=0)"]

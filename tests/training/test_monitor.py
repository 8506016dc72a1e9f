"""CacheMonitor logs what the source itself has counted; FillProgress shows it in the Trainer's own bar."""

import re
import time
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LambdaCallback, ModelCheckpoint, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger

from lightning_stocache.training.callbacks import FillProgress, StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import Made
from tests.training.tiny import (
    SAMPLES,
    SLOT,
    Data,
    Model,
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


@pytest.mark.parametrize(("budget", "slots", "workers"), [("auto", 24, 0), ("50%", 12, 2), (0, 0, 0)])
def test_values_are_the_sources_own(tmp_path, caplog, workers, budget, slots):
    """In every epoch hits, misses and bypasses add up to the served samples, and misses and bypasses to the source's
    loads. Of a cache that is off the bytes are not known, and the end of the run says so."""
    train = source(tmp_path)
    dm = StocacheDataModule(train, batch_size=4, num_workers=workers, budget=budget)
    dm.setup("fit")
    loads = [train.loads]
    counting = LambdaCallback(on_train_epoch_end=lambda *_: loads.append(train.loads))
    trainer = make_trainer(tmp_path, [CacheMonitor(), counting], epochs=3)
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
    assert (values["memory_bytes"][0] > 0) == (values["bytes_from_source"] != []) == (slots > 0)
    assert len(said(caplog, "stocache: the cache is off (budget=0)")) == (budget == 0)


def test_each_key_is_logged_once_per_epoch_and_can_be_watched(tmp_path):
    """Exactly the documented keys are logged, live values every `log_every_n_steps`; others see them. The fills
    of the sanity check are hits of the first validation, and its misses are not logged."""
    saver = ModelCheckpoint(tmp_path / "kept", monitor="stocache/hit_rate", mode="max")
    stopper = EarlyStopping("stocache/hit_rate", mode="max", patience=2)
    options = {"num_sanity_val_steps": 1, "log_every_n_steps": 2, "enable_checkpointing": True}
    trainer = make_trainer(tmp_path, [saver, stopper, CacheMonitor()], epochs=9, **options)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), source(tmp_path, "val", 8), batch_size=4))
    keys = {key.removeprefix("stocache/") for key in trainer.callback_metrics if key.startswith("stocache/")}
    assert keys == KEYS | OF_TRAINING | {f"val/{key}" for key in KEYS}
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1, 1]
    assert logged(trainer, "stocache/val/hits") == [4, 8, 8, 8]
    assert logged(trainer, "stocache/val/misses") == [4, 0, 0, 0]
    assert [int(row["step"]) for row in rows_of(trainer.logger) if LIVE in row] == list(range(1, 24, 2))
    assert logged(trainer, LIVE) == [0] * 3 + [1] * 9
    assert logged(trainer, "stocache/live/fill_fraction") == pytest.approx([2 / 6, 4 / 6] + [1] * 10)
    assert saver.best_model_score == 1
    assert "epoch=1" in saver.best_model_path
    assert trainer.current_epoch == 4


def test_wait_and_compute_are_the_epoch(tmp_path):
    """Waiting for a slow source and computing in a slow step are separate; validation is in neither."""

    def load(index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.005)
        return torch.zeros(3, 8, 8, dtype=torch.uint8), 0

    slow = LambdaCallback(
        on_train_batch_start=lambda *_: time.sleep(0.01), on_validation_batch_start=lambda *_: time.sleep(0.05)
    )
    trainer = make_trainer(tmp_path, [CacheMonitor(), slow], epochs=2, log_every_n_steps=100, num_sanity_val_steps=0)
    begin = time.perf_counter()
    trainer.fit(Model(), StocacheDataModule(Made(load, SAMPLES), source(tmp_path, "val", 8), batch_size=4))
    fitted = time.perf_counter() - begin
    waited, computed = (logged(trainer, f"stocache/{key}") for key in ("data_wait_seconds", "compute_seconds"))
    assert waited[0] >= 0.005 * SAMPLES
    assert all(seconds >= 0.01 * SAMPLES / 4 for seconds in computed)
    assert sum(waited) + sum(computed) <= fitted - 2 * 2 * 0.05  # two epochs, each with two batches of validation
    spent = {key: logged(trainer, f"stocache/{key}_seconds") for key in ("source", "fill", "gather")}
    assert 0.005 * SAMPLES <= spent["source"][0] <= waited[0]
    assert spent["source"][1] == spent["fill"][1] == spent["gather"][0] == 0
    assert 0 < spent["fill"][0] <= waited[0]
    assert 0 < spent["gather"][1] <= fitted
    rates = logged(trainer, "stocache/samples_per_second")
    assert all(SAMPLES / fitted < rate <= SAMPLES / seconds for rate, seconds in zip(rates, computed, strict=True))
    assert logged(trainer, "stocache/hit_rate_expected") == [0, 1]


def test_a_hit_rate_below_the_expected_one_is_warned_about_once(tmp_path, caplog):
    """A cache that is cleared before every epoch has no hits: one warning of two lines names the likely cause."""
    emptying = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.train_dataloader.dataset.cache.clear())
    trainer = make_trainer(tmp_path, [CacheMonitor(), emptying], epochs=4)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    [warning] = said(caplog, "were to be expected")
    assert warning.endswith("\nthe source may be created again in every epoch")


def test_no_value_is_logged_twice(tmp_path):
    """With two fits, a resume, validation within epochs and two monitors a logger has each key once per step; with
    `hyperparameters=False` it has none."""
    both, val = source(tmp_path), source(tmp_path, "val", 8)
    monitors = [StochasticCache(keep_cache=True), *(CacheMonitor(hyperparameters=False) for _ in range(2))]
    options = {"logger": CSVLogger(tmp_path), "val_check_interval": 3, "num_sanity_val_steps": 1}
    trainer = make_trainer(tmp_path, [*monitors, FillProgress()], epochs=2, **options)
    trainer.fit(Model(), plain_loader(both), [plain_loader(val), plain_loader(both)])
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Model(), plain_loader(both), plain_loader(val))
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    trainer = make_trainer(tmp_path, monitors, epochs=4, **options)
    trainer.fit(Model(), plain_loader(both), plain_loader(val), ckpt_path=tmp_path / "last.ckpt")
    monitors[0].close()
    rows = rows_of(trainer.logger)
    keys = {key for row in rows for key in row if key.startswith("stocache/")}
    steps = {key: [int(row["step"]) for row in rows if key in row] for key in keys}
    assert steps["stocache/hit_rate"] == [5, 11, 17, 23]
    assert steps[LIVE] == list(range(24))
    assert len(steps["stocache/val/hit_rate"]) == 8
    assert all(len(set(of_key)) == len(of_key) for of_key in steps.values())
    assert trainer.logger.experiment.hparams == {}


# ---- in the progress bar ----

FULL = "stocache: the cache is full"
FILLS = [f"fill {percent} %" for percent in (17, 33, 50, 67, 83, 100)]
WHOLE = [*FILLS, *["hit 100 %"] * 6]


def fit_with_bar(tmp_path, callbacks, data, bar=TQDMProgressBar, key="cache", epochs=2):
    """What a bar has shown under a key after each batch."""
    shown = []

    class Watching(bar):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            super().on_train_batch_end(trainer, pl_module, *rest)
            shown.append(self.get_metrics(trainer, pl_module).get(key))

    trainer = make_trainer(tmp_path, [*callbacks, Watching()], epochs=epochs, enable_progress_bar=True)
    trainer.fit(Model(), data)
    return shown


@pytest.mark.parametrize(
    ("progress", "bar", "shown", "lines"),
    [
        ([StochasticCache], RichProgressBar, WHOLE, 1),
        ([StochasticCache, FillProgress], TQDMProgressBar, WHOLE, 1),
        ([partial(FillProgress, every_n_steps=5, verbose=False)], TQDMProgressBar, [FILLS[0]] * 5 + [FILLS[5]], 0),
    ],
)
def test_the_bar_shows_the_fill_and_later_the_hit_rate(tmp_path, caplog, progress, bar, shown, lines):
    """After each batch, or every so many steps, the bar has the node's fill, and from epoch two on the hit rate."""
    callbacks = [make() for make in progress]
    data = Data(source(tmp_path)) if StochasticCache in progress else StocacheDataModule(source(tmp_path), batch_size=4)
    assert fit_with_bar(tmp_path, callbacks, data, bar, epochs=len(shown) // 6) == shown
    assert len(said(caplog, FULL)) == lines


def test_the_bar_of_half_a_cache_of_a_full_one_and_of_one_that_is_off(tmp_path, caplog):
    """The rate is of the epoch so far. When the cache is full, one line says what is cached and what that saves. A fit
    with a full cache shows its hit rate from the start, a fit with the cache off shows nothing."""
    callbacks = [StochasticCache(budget="50%"), FillProgress("photos")]
    shown = fit_with_bar(tmp_path, callbacks, Data(source(tmp_path)), key="photos", epochs=3)
    assert shown[5::6] == ["fill 100 %", "hit 50 %", "hit 50 %"]
    [line] = said(caplog, FULL)
    assert re.search(r"12 of 24 samples, .* \d+\.\d s of waiting for data will not be repeated", line)
    caplog.clear()
    for options, expected in ({"keep_cache": True}, "hit 100 %"), ({"budget": 0}, None):
        dm = StocacheDataModule(source(tmp_path), batch_size=4, **options)
        make_trainer(tmp_path).fit(Model(), dm)
        assert fit_with_bar(tmp_path, [FillProgress()], dm, epochs=1) == [expected] * 6
        dm.close()
    assert said(caplog, FULL) == []

"""CacheMonitor logs what the source itself has counted, and what was granted, and shows it in the bar."""

import re
import time
import warnings
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, create_autospec

import pytest
import torch
import yaml
from hydra.utils import instantiate
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LambdaCallback,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.data import default_collate

from lightning_stocache.training import monitor
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from tests.sources import Made
from tests.training.tiny import (
    SAMPLES,
    SLOT,
    Data,
    Model,
    Photos,
    behind,
    logged,
    make_trainer,
    plain_loader,
    read_again,
    rows_of,
    said,
    source,
)

pytestmark = pytest.mark.processes

KEYS = {
    *("hit_rate", "fill_fraction", "coverage", "hits", "misses", "bypasses", "fills", "memory_bytes", "budget_bytes"),
    *("bytes_from_cache", "bytes_from_source", "source_seconds", "fill_seconds", "gather_seconds"),
}
LIVE = "stocache/live/hit_rate"
OF_TRAINING = {"data_wait_seconds", "compute_seconds", "samples_per_second", "epoch_seconds"}


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("budget", "slots", "workers"), [("auto", 24, 0), ("50%", 12, 2), (0, 0, 0)])
def test_values_are_the_sources_own(tmp_path, caplog, workers, budget, slots):
    """Hits, misses and bypasses add up to the served samples, and misses and bypasses to the source's loads."""
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
    uncached = [SAMPLES, SAMPLES - slots, SAMPLES - slots]
    assert loads[-1] - loads[0] == sum(uncached) + read_again(caplog)
    assert all(loads[epoch + 1] - loads[epoch] >= uncached[epoch] for epoch in range(3))
    assert values["coverage"] == [pytest.approx(slots / SAMPLES)] * 3
    assert values["hit_rate"][-1] == pytest.approx(slots / SAMPLES)
    assert values["bytes_from_cache"] == [0, *[slots * (SLOT - 4)] * 2]
    assert values["budget_bytes"][0] <= SAMPLES * SLOT
    assert (values["memory_bytes"][0] > 0) == (values["bytes_from_source"] != []) == (slots > 0)
    assert len(said(caplog, "stocache: the cache is off (budget=0)")) == (budget == 0)


@pytest.mark.epoch_one_reads_all
def test_each_key_is_logged_once_per_epoch_and_can_be_watched(tmp_path):
    """Exactly the documented keys are logged; fills of the sanity check are hits of the first validation."""
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


@pytest.mark.epoch_one_reads_all
def test_a_trainer_that_logs_no_steps_gets_no_live_values(tmp_path):
    """With `log_every_n_steps=0` only the values of epochs are logged."""
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, log_every_n_steps=0)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    assert logged(trainer, LIVE) == []
    assert logged(trainer, "stocache/hit_rate") == [0, 1]


def test_an_epoch_with_a_limit_counts_the_batches_of_the_limit(tmp_path):
    """Two batches of training and one of validation are counted, however many are in the dataset."""
    limits = {"limit_train_batches": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=3, **limits)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), source(tmp_path, "val", 16), batch_size=4, budget="50%"))
    for stage, samples in (("", 8), ("val/", 4)):
        counts = [logged(trainer, f"stocache/{stage}{name}") for name in ("hits", "misses", "bypasses")]
        assert [sum(epoch) for epoch in zip(*counts, strict=True)] == [samples] * 3


@pytest.mark.epoch_one_reads_all
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


def test_a_hit_rate_below_the_expected_one_is_warned_about_once(tmp_path, caplog):
    """A cache that is cleared before every epoch has no hits: one warning of two lines names the likely cause."""
    emptying = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.train_dataloader.dataset.cache.clear())
    trainer = make_trainer(tmp_path, [CacheMonitor(), emptying], epochs=4)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    [warning] = said(caplog, "were to be expected")
    assert warning.endswith("\nthe source may be created again in every epoch")


def test_empty_slots_are_not_called_a_lack_of_memory(tmp_path, caplog):
    """They have many causes, each with a warning of its own."""

    def empty(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == trainer.num_training_batches:
            trainer.train_dataloader.dataset.cache.clear()

    trainer = make_trainer(tmp_path, [CacheMonitor(), LambdaCallback(on_train_batch_start=empty)], epochs=3)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path), batch_size=4))
    [warning] = said(caplog, "were to be expected")
    assert re.search(r"\nonly \d+\.\d % of the cache is filled \(the warnings above say why\)$", warning)


def test_no_value_is_logged_twice(tmp_path):
    """With two fits, a resume, validation within epochs and two monitors a logger has each key once per step."""
    both, val = source(tmp_path), source(tmp_path, "val", 8)
    monitors = [StochasticCache(keep_cache=True), *(CacheMonitor(hyperparameters=False) for _ in range(2))]
    options = {"logger": CSVLogger(tmp_path), "val_check_interval": 3, "num_sanity_val_steps": 1}
    trainer = make_trainer(tmp_path, monitors, epochs=2, **options)
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


# ---- options and granted memory ----


class Saving(Model):
    """A module with an argument of the DataModule's name, and another value."""

    def __init__(self, batch_size: int = 7, name: str = "mine") -> None:
        super().__init__()
        self.save_hyperparameters()


def hyperparameters_of(logger: CSVLogger) -> dict[str, Any]:
    """The hyperparameters that the logger has written."""
    return yaml.safe_load(Path(logger.log_dir, "hparams.yaml").read_text())


def test_what_was_granted_goes_to_the_logger(tmp_path, door):
    """Beside a module's own hyperparameters, of whatever names, are plain values of training, and below them of val."""
    training = {"dataset": "CountedSource", "samples": SAMPLES, "drawn": SAMPLES, "budget": "50%"}
    training |= {"budget_bytes": SAMPLES // 2 * SLOT, "slots": SAMPLES // 2, "coverage": 0.5, "layout": "rows"}
    training |= {"store": "decoded", "nodes": 1, "ranks": 1, "name": None, "dir": None}
    validation = {"samples": 8, "drawn": 8, "budget_bytes": 4 * SLOT, "slots": 4}
    options: dict[str, Any] = {"budget": "50%" if door == "ours" else {"train": "50%", "val": "50%"}}
    callbacks, dm = behind(door, Photos(str(tmp_path)), **options)
    trainer = make_trainer(tmp_path, callbacks)
    users = {"batch_size": 7} if door == "ours" else {"batch_size": 4, "folder": str(tmp_path)}
    trainer.fit(Saving(users["batch_size"]), dm)
    written = hyperparameters_of(trainer.logger)
    granted = written.pop("stocache")
    assert written == users | {"name": "mine"}
    assert granted.pop("backend") == granted["val"].pop("backend") in ("tmpfile", "memfd")
    assert granted.pop("val") == training | validation
    assert granted == training


def test_tensorboard_has_them(tmp_path, monkeypatch):
    """The HPARAMS tab gets the hyperparameters, with the hit rate as their metric, and no `hp_metric`."""
    summaries = pytest.importorskip("torch.utils.tensorboard.summary")
    monkeypatch.setattr(summaries, "hparams", tab := Mock(wraps=summaries.hparams))
    logger = TensorBoardLogger(str(tmp_path), name="")
    monkeypatch.setattr(logger.experiment, "add_scalar", scalars := Mock())
    make_trainer(tmp_path, [CacheMonitor()], logger=logger).fit(Model(), StocacheDataModule(source(tmp_path)))
    [(params, metrics)] = (call.args for call in tab.call_args_list)
    assert (params["stocache/budget"], params["stocache/slots"]) == ("auto", SAMPLES)
    assert set(metrics) == {"stocache/hit_rate"}
    logged_tags = {call.args[0] for call in scalars.call_args_list}
    assert "stocache/hit_rate" in logged_tags
    assert "hp_metric" not in logged_tags


def test_a_checkpoint_carries_the_plain_options(tmp_path):
    """A checkpoint keeps the plain options of a DataModule; datasets and functions are given again."""
    train, loader = source(tmp_path), {"drop_last": True, "collate_fn": default_collate}
    options = {"budget": {"train": "50%", "val": 0}, "freeze_random": True}
    dm = StocacheDataModule(train, batch_size=4, loader=loader, transform=tuple, **options)
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    trainer.fit(Model(), dm)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = StocacheDataModule.load_from_checkpoint(tmp_path / "last.ckpt", train=train, batch_size=3)
    assert loaded.hparams == dm.hparams | {"batch_size": 3}
    assert loaded.loader == {"drop_last": True}
    assert loaded.caches.options == dm.caches.options
    assert loaded.train is train


class Derived(StocacheDataModule):
    """A user's subclass, which saves its own arguments and names an option of the base class."""

    def __init__(self, folder: str, budget: str = "auto") -> None:
        super().__init__(source(folder), batch_size=4, budget=budget)
        self.save_hyperparameters()


class Refusing(CSVLogger):
    """Refuses the cache's hyperparameters, as MLflow's does in a resumed run with other values."""

    def log_hyperparams(self, params: Any = None) -> None:
        if "stocache" in params:
            raise ValueError("not these")


def test_a_subclass_logs_its_own_arguments_alone(tmp_path, caplog):
    """They come back from a checkpoint. A logger that refuses the cache's hyperparameters stops no training."""
    dm, logger = Derived(str(tmp_path), "50%"), CSVLogger(tmp_path, name="logs")
    trainer = make_trainer(tmp_path, [CacheMonitor()], logger=[Refusing(tmp_path), logger])
    trainer.fit(Saving(), dm)
    written = hyperparameters_of(logger)
    assert written.pop("stocache")["budget"] == "50%"
    assert written == {"folder": str(tmp_path), "budget": "50%", "batch_size": 7, "name": "mine"}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert Derived.load_from_checkpoint(tmp_path / "last.ckpt").hparams == dm.hparams
    assert caplog.text.count("Refusing does not take the cache's hyperparameters: not these") == 1


# ---- W&B and MLflow, without the network ----

LEAVES = Path(__file__).parents[2] / "examples" / "configs" / "logger"


def leaf(name: str, **options: Any) -> Any:
    """The logger of a leaf of the example's configs."""
    return instantiate(OmegaConf.load(LEAVES / f"{name}.yaml")[name], **options)


def trained(tmp_path: Path, logger: Any) -> None:
    """Two epochs of six steps with validation, live values at every second step."""
    dm = StocacheDataModule(source(tmp_path), source(tmp_path, "val", 8), batch_size=4, budget="50%")
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, logger=logger, log_every_n_steps=2)
    trainer.fit(Model(), dm)


@pytest.mark.epoch_one_reads_all
def test_wandb_keeps_what_was_logged(tmp_path, monkeypatch):
    """Its run gets all values with epoch and step, and the granted memory in the config."""
    wandb = pytest.importorskip("wandb")
    run = create_autospec(wandb.Run, instance=True)
    monkeypatch.setattr(wandb, "init", create_autospec(wandb.init, return_value=run))
    trained(tmp_path, leaf("wandb", save_dir=str(tmp_path)))
    rows = [call.args[0] for call in run.log.call_args_list]
    epochs = [row for row in rows if "stocache/hit_rate" in row]
    live = [row for row in rows if LIVE in row]
    steps = [(row["epoch"], row["trainer/global_step"], row["stocache/hits"]) for row in epochs]
    assert steps == [(0, 5, 0), (1, 11, 12)]
    assert [row["trainer/global_step"] for row in live] == [1, 3, 5, 7, 9, 11]
    assert not [row for row in live if row in epochs]
    config = {name: value for call in run.config.update.call_args_list for name, value in call.args[0].items()}
    assert (config["stocache"]["budget"], config["stocache"]["val"]["samples"]) == ("50%", 8)


@pytest.mark.epoch_one_reads_all
@pytest.mark.soak
def test_mlflow_keeps_what_was_logged(tmp_path, monkeypatch, caplog):
    """Its client returns the values with their steps; that it refuses other params later stops no training."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes ten seconds to make
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "")  # which it sets
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    logger = leaf("mlflow")
    trained(tmp_path, logger)
    client, run = logger.experiment, logger.run_id
    params = client.get_run(run).data.params
    assert (params["stocache/budget"], params["stocache/val/samples"]) == ("50%", "8")

    def values(key: str) -> list[tuple[int, float]]:
        return [(value.step, value.value) for value in client.get_metric_history(run, key)]

    assert values("stocache/hits") == [(5, 0), (11, 12)]
    assert [step for step, _ in values("stocache/live/hit_rate")] == [1, 3, 5, 7, 9, 11]
    assert values("stocache/val/hits") == [(5, 4), (11, 4)]  # the sanity check fills
    again = MLFlowLogger(run_id=run, tracking_uri=f"file:{tmp_path / 'runs'}")  # as in another process
    for door in (again, logger):
        trainer = make_trainer(tmp_path, [StochasticCache(budget="25%")], logger=door)
        trainer.fit(Model(), plain_loader(source(tmp_path)))
    assert caplog.text.count("MLFlowLogger does not take the cache's hyperparameters") == 2
    assert client.get_run(run).data.params == params


# ---- in the progress bar ----

FILLS = [{"cache_fill": batches / 6} for batches in range(1, 7)]
WHOLE = [*FILLS, *[{"cache_hit": 1.0}] * 6]


def fit_with_bar(tmp_path, callbacks, data, bar=TQDMProgressBar, key="cache", epochs=2, **options):
    """What a bar has shown under names that begin with a key after each batch."""
    shown = []

    class Watching(bar):
        def on_train_batch_end(self, trainer, pl_module, *rest):
            super().on_train_batch_end(trainer, pl_module, *rest)
            metrics = self.get_metrics(trainer, pl_module)
            shown.append({name: value for name, value in metrics.items() if name.startswith(key)})

    trainer = make_trainer(tmp_path, [*callbacks, Watching()], epochs=epochs, enable_progress_bar=True, **options)
    trainer.fit(Model(), data)
    return shown


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("make", "bar", "every", "shown", "lines"),
    [
        (StochasticCache, RichProgressBar, 1, WHOLE, 2),
        (CacheMonitor, TQDMProgressBar, 1, WHOLE, 2),
        (partial(CacheMonitor, verbose=False), TQDMProgressBar, 5, WHOLE, 0),  # at least ten times an epoch
        (partial(CacheMonitor, progress_bar=False), TQDMProgressBar, 1, [{}] * 12, 2),
    ],
)
def test_the_bar_shows_the_fill_and_later_the_hit_rate(tmp_path, caplog, make, bar, every, shown, lines):
    """The bar has the node's fill, and from the second epoch on the hit rate."""
    data = Data(source(tmp_path)) if make is StochasticCache else StocacheDataModule(source(tmp_path), batch_size=4)
    found = fit_with_bar(tmp_path, [make()], data, bar, epochs=len(shown) // 6, log_every_n_steps=every)
    assert found == shown
    assert len(said(caplog, "100 % filled")) == lines


@pytest.mark.epoch_one_reads_all
def test_a_monitor_of_the_users_decides_beside_a_stochastic_cache(tmp_path, caplog):
    """Nothing is in the bar, and no line is printed, if it says so; it stays in the list, and no other one comes."""
    silent = CacheMonitor(progress_bar=False, live=False, verbose=False)
    for callbacks in ([StochasticCache(), silent], [silent, StochasticCache()]):
        assert fit_with_bar(tmp_path, callbacks, Data(source(tmp_path))) == [{}] * 12
        assert said(caplog, "epoch 0") == said(caplog, "samples are cached") == []


@pytest.mark.parametrize("fails", [False, True])
def test_the_monitor_that_a_cache_brings_is_there_for_a_call(tmp_path, fails):
    """It is in front of the list, has each hook once, and is gone when the call ends, however it ends."""
    seen = []

    class Noting(CacheMonitor):
        def setup(self, trainer, pl_module, stage):
            seen.append("setup")
            super().setup(trainer, pl_module, stage)

        def on_train_start(self, trainer, pl_module):
            seen.append(trainer.callbacks[0] is self)
            super().on_train_start(trainer, pl_module)
            if fails:
                raise ArithmeticError

    class Caching(StochasticCache):
        monitor_class = Noting

    trainer = make_trainer(tmp_path, [Caching()], epochs=1)
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        trainer.fit(Model(), Data(source(tmp_path)))
    assert seen == ["setup", True]
    assert not [each for each in trainer.callbacks if isinstance(each, CacheMonitor)]


def test_a_call_within_a_call_leaves_the_outer_one_as_it_was(tmp_path):
    """A DataModule that caches, in a validation by another Trainer at the end of each epoch."""
    dm = cache_datamodule(Data(source(tmp_path), source(tmp_path, "val", 8)))
    model, inside = Model(), []

    def validate(*_):
        other = make_trainer(tmp_path / "other")
        other.validate(model, datamodule=dm, verbose=False)
        inside.append(list(other.callbacks))

    trainer = make_trainer(tmp_path, [LambdaCallback(on_train_epoch_end=validate)], epochs=3)
    trainer.fit(model, datamodule=dm)
    assert len(logged(trainer, "stocache/hit_rate")) == 3
    assert not [each for each in sum(inside, trainer.callbacks) if isinstance(each, CacheMonitor | StochasticCache)]
    assert dm.caches.state() == []


def test_a_callback_that_fails_to_end_leaves_no_cache_open(tmp_path):
    """Lightning ends those behind it no more."""

    class Failing(Callback):
        def on_exception(self, trainer, pl_module, exception):
            raise KeyError

        def on_train_epoch_end(self, trainer, pl_module):
            raise ArithmeticError

    cache = StochasticCache()
    trainer = make_trainer(tmp_path, [Failing(), cache])
    with pytest.raises(KeyError):
        trainer.fit(Model(), Data(source(tmp_path)))
    assert cache.cache_state() == []
    assert not [each for each in trainer.callbacks if isinstance(each, CacheMonitor)]


@pytest.mark.parametrize("is_hashable", [True, False])
def test_a_logger_that_refuses_values_gets_no_more_of_them(tmp_path, caplog, is_hashable):
    """It knows its keys, and raises for others: one warning, and the training goes on."""

    class Strict(CSVLogger):
        __hash__ = CSVLogger.__hash__ if is_hashable else None  # type: ignore[assignment]
        asked = 0

        def log_metrics(self, metrics, step=None):
            self.asked += any("stocache" in name for name in metrics)
            if self.asked:
                raise ValueError("an unknown key")

    logger = Strict(tmp_path)
    make_trainer(tmp_path, [StochasticCache()], epochs=2, logger=logger).fit(Model(), Data(source(tmp_path)))
    assert logger.asked == 1
    [warning] = said(caplog, "does not take the cache's values")
    assert "an unknown key" in warning


def test_a_monitor_over_loaders_without_a_cache_says_so(tmp_path, caplog):
    """Once for a fit; a StochasticCache that finds nothing to cache has said why."""
    make_trainer(tmp_path, [CacheMonitor()], epochs=2).fit(Model(), Data(source(tmp_path)))
    [line] = said(caplog, "no loader of this fit is cached")
    caplog.clear()
    for callbacks in ([StochasticCache()], [CacheMonitor(), StochasticCache()]):
        make_trainer(tmp_path, callbacks, epochs=1).fit(Model(), Data(source(tmp_path)))
    assert not said(caplog, "no loader of this fit is cached")
    assert said(caplog, "read once in this call, so not cached")
    assert "StochasticCache()" in line
    caplog.clear()
    make_trainer(tmp_path, [StochasticCache()], epochs=1).fit(Model(), Data(source(tmp_path)))
    assert not said(caplog, "no loader of this fit is cached")


@pytest.mark.epoch_one_reads_all
def test_the_bar_of_half_a_cache_of_a_full_one_and_of_one_that_is_off(tmp_path, caplog):
    """The bar has the rate of the epoch so far, from the start if the cache is full, and nothing if it is off."""
    shown = fit_with_bar(tmp_path, [StochasticCache(budget="50%")], Data(source(tmp_path)), epochs=3)
    assert shown[5::6] == [{"cache_fill": 1.0}, {"cache_hit": 0.5}, {"cache_hit": 0.5}]
    assert said(caplog, "12 of 24 samples are cached")
    caplog.clear()
    for options, expected in ({"keep_cache": True}, {"cache_hit": 1.0}), ({"budget": 0}, {}):
        dm = StocacheDataModule(source(tmp_path), batch_size=4, **options)
        make_trainer(tmp_path, epochs=2).fit(Model(), dm)
        caplog.clear()
        assert fit_with_bar(tmp_path, [], dm, epochs=1) == [expected] * 6
        dm.close()


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("form", ["{:.3e}", "{:8.4f}", "{:.1%}"])
def test_a_bar_that_formats_numbers_trains(tmp_path, form):
    """A bar that formats or rounds each of its metrics as a number works with the cache's values in it."""

    class Formats(TQDMProgressBar):
        def get_metrics(self, trainer, pl_module):
            metrics = super().get_metrics(trainer, pl_module)
            return {name: form.format(round(value, 5)) for name, value in metrics.items() if name != "v_num"}

    trainer = make_trainer(tmp_path, [StochasticCache(), Formats()], epochs=2, enable_progress_bar=True)
    trainer.fit(Model(), plain_loader(source(tmp_path)))
    assert trainer.progress_bar_metrics["cache_hit"] == 1


def test_a_cache_that_is_not_verbose_says_nothing(tmp_path, caplog):
    """No line about a cache that opens, about an epoch, or at the end; warnings are still given."""
    cache = StochasticCache(verbose=False)
    make_trainer(tmp_path, [cache], epochs=2).fit(Model(), plain_loader(source(tmp_path)), plain_loader(Made(id, 0)))
    assert said(caplog, "stocache: ") == []
    assert said(caplog, "it is empty")


def test_the_waiting_for_the_first_batch_is_told_from_the_rest(tmp_path, monkeypatch):
    """Of each epoch, for the advice at the end; it is a part of all waiting, and goes to no logger."""
    told = []
    monkeypatch.setattr(monitor, "verdict", lambda epochs, caches: told.extend(epochs) or [])
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3)
    trainer.fit(Model(), plain_loader(source(tmp_path), num_workers=1))
    assert len(told) == 3
    assert all(0 < epoch["start_seconds"] <= epoch["data_wait_seconds"] for epoch in told)
    assert logged(trainer, "stocache/start_seconds") == []

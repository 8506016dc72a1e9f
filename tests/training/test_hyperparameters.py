"""Options, granted memory and decisions reach loggers and checkpoints, in every door."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger

from lightning_stocache import CacheMonitor, StocacheDataModule, StochasticCache
from tests.training.tiny import DOORS, SAMPLES, SLOT, Model, Photos, behind, make_trainer, plain_loader, source

pytestmark = pytest.mark.processes

OF_TRAINING = {"dataset": "CountedSource", "samples": SAMPLES, "drawn": SAMPLES, "budget": "50%"}
OF_TRAINING |= {"budget_bytes": SAMPLES // 2 * SLOT, "slots": SAMPLES // 2, "coverage": 0.5, "layout": "rows"}
OF_TRAINING |= {"store": "decoded", "nodes": 1, "ranks": 1, "name": None, "dir": None}
OF_VALIDATION = OF_TRAINING | {"samples": 8, "drawn": 8, "budget_bytes": 4 * SLOT, "slots": 4}
OF_VALIDATION |= {"sampling": "SequentialSampler"}


class Saving(Model):
    """A module with an argument of the DataModule's name, and another value."""

    def __init__(self, batch_size: int = 7, name: str = "mine", memory: str = "much") -> None:
        super().__init__()
        self.save_hyperparameters()


def told(logger: CSVLogger) -> dict[str, Any]:
    """The hyperparameters that the logger has written; without any it writes no file."""
    path = Path(logger.log_dir) / "hparams.yaml"
    return yaml.safe_load(path.read_text()) or {} if path.exists() else {}


@pytest.mark.parametrize("door", DOORS)
def test_what_was_granted_goes_to_the_logger(tmp_path, door):
    """Beside a module's own hyperparameters there are plain values of training, and of validation below them."""
    budgets: dict[str, Any] = {"stage_budgets": {} if door == "ours" else {"val": "50%"}}
    callbacks, dm = behind(door, Photos(str(tmp_path)), budget="50%", **budgets)
    trainer = make_trainer(tmp_path, callbacks)
    trainer.fit(Model() if door == "ours" else Saving(batch_size=4), dm)
    written = told(trainer.logger)
    sampling = "locality" if door == "ours" else "RandomSampler"
    found = written.pop("stocache")
    assert found.pop("backend") == found["val"].pop("backend") in ("tmpfile", "memfd")
    assert found.pop("val") == OF_VALIDATION
    assert found == OF_TRAINING | {"sampling": sampling}
    users = {"batch_size": 4, "folder": str(tmp_path), "name": "mine", "memory": "much"}
    assert written == ({} if door == "ours" else users)


def test_without_a_cache_nothing_is_logged(tmp_path):
    """Plain loaders have neither hyperparameters nor metrics, and `hyperparameters=False` logs no hyperparameters."""
    for number, callback in enumerate([CacheMonitor(), StochasticCache(hyperparameters=False)]):
        trainer = make_trainer(tmp_path, [callback], logger=CSVLogger(tmp_path, name=str(number)))
        trainer.fit(Model(), plain_loader(source(tmp_path)))
        assert told(trainer.logger) == {}
        assert any("stocache/" in key for key in trainer.callback_metrics) == (number == 1)


def test_tensorboard_has_them(tmp_path):
    """The event file has the hyperparameters as a record for the HPARAMS tab, with the hit rate as their metric."""
    logger = TensorBoardLogger(str(tmp_path), name="")
    trainer = make_trainer(tmp_path, [CacheMonitor()], logger=logger)
    trainer.fit(Model(), StocacheDataModule(source(tmp_path)))
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()
    plugin = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")
    content = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    params = plugin.HParamsPluginData.FromString(content).session_start_info.hparams
    assert params["stocache/budget"].string_value == "auto"
    assert params["stocache/slots"].number_value == SAMPLES
    content = events.summary_metadata["_hparams_/experiment"].plugin_data.content
    metrics = plugin.HParamsPluginData.FromString(content).experiment.metric_infos
    assert [metric.name.tag for metric in metrics] == ["stocache/hit_rate"]
    assert len(events.Scalars("stocache/hit_rate")) == trainer.current_epoch
    assert "hp_metric" not in events.Tags()["scalars"]
    assert logger.hparams["stocache"]["slots"] == SAMPLES


def test_a_logger_may_be_as_its_user_has_made_it(tmp_path, caplog):
    """A logger that cannot be hashed, or takes no hyperparameters, stops no training."""

    class Odd(Logger):
        name, version, __hash__ = "odd", 0, None

        def __eq__(self, other):
            return False

        def log_metrics(self, metrics, step=None):
            pass

        def log_hyperparams(self, params):
            raise NotImplementedError("not here")

    make_trainer(tmp_path, [CacheMonitor()], logger=Odd()).fit(Model(), StocacheDataModule(source(tmp_path)))
    assert "Odd does not take the cache's hyperparameters: not here" in caplog.text


def test_a_checkpoint_carries_the_plain_options(tmp_path):
    """A checkpoint keeps the plain options of a DataModule; datasets are given again."""
    train = source(tmp_path)
    options = {"batch_size": 4, "num_workers": 0, "budget": "50%", "stage_budgets": {"val": 0}, "allow_random": True}
    dm = StocacheDataModule(
        train, loader={"drop_last": True, "collate_fn": torch.stack}, transform=torch.neg, **options
    )
    assert dict(dm.hparams) == options | {"loader": {"drop_last": True}} | {
        name: value for name, value in dm.hparams.items() if name not in (*options, "loader")
    }
    dm = StocacheDataModule(train, loader={"drop_last": True}, **options)
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


def test_options_do_not_clash_with_the_modules(tmp_path):
    """A module's `batch_size`, `name` and `memory` may have other values; a subclass logs its own arguments alone."""
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    trainer.fit(Saving(), StocacheDataModule(source(tmp_path), batch_size=4))
    assert told(trainer.logger)["batch_size"] == 7
    trainer = make_trainer(tmp_path, [CacheMonitor()])
    trainer.fit(Saving(), dm := Derived(str(tmp_path), "50%"))
    written = told(trainer.logger)
    assert written.pop("stocache")["budget"] == "50%"
    assert written == {"folder": str(tmp_path), "budget": "50%", "batch_size": 7, "name": "mine", "memory": "much"}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert Derived.load_from_checkpoint(tmp_path / "last.ckpt").hparams == dm.hparams

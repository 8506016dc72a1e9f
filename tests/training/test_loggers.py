"""What loggers and checkpoints keep of the options, the granted memory and the metrics, in every door."""

import json
import struct
import warnings
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.utils import instantiate
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.data import default_collate

from lightning_stocache import CacheMonitor, StocacheDataModule, StochasticCache
from lightning_stocache.insight.dashboards import axes as axes_of
from tests.training.tiny import SAMPLES, SLOT, Model, Photos, behind, make_trainer, plain_loader, source

pytestmark = pytest.mark.processes

OF_TRAINING = {"dataset": "CountedSource", "samples": SAMPLES, "drawn": SAMPLES, "budget": "50%"}
OF_TRAINING |= {"budget_bytes": SAMPLES // 2 * SLOT, "slots": SAMPLES // 2, "coverage": 0.5, "layout": "rows"}
OF_TRAINING |= {"store": "decoded", "nodes": 1, "ranks": 1, "name": None, "dir": None}
OF_VALIDATION = OF_TRAINING | {"samples": 8, "drawn": 8, "budget_bytes": 4 * SLOT, "slots": 4}
OF_VALIDATION |= {"sampling": "SequentialSampler"}


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
    budgets: dict[str, Any] = {"stage_budgets": {} if door == "ours" else {"val": "50%"}}
    callbacks, dm = behind(door, Photos(str(tmp_path)), budget="50%", **budgets)
    trainer = make_trainer(tmp_path, callbacks)
    users = {"batch_size": 7} if door == "ours" else {"batch_size": 4, "folder": str(tmp_path)}
    trainer.fit(Saving(users["batch_size"]), dm)
    written = hyperparameters_of(trainer.logger)
    granted = written.pop("stocache")
    assert written == users | {"name": "mine"}
    assert granted.pop("backend") == granted["val"].pop("backend") in ("tmpfile", "memfd")
    assert granted.pop("val") == OF_VALIDATION
    assert granted == OF_TRAINING | {"sampling": "locality" if door == "ours" else "RandomSampler"}


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


def test_a_checkpoint_carries_the_plain_options(tmp_path):
    """A checkpoint keeps the plain options of a DataModule; datasets and functions are given again."""
    train, loader = source(tmp_path), {"drop_last": True, "collate_fn": default_collate}
    options = {"budget": "50%", "stage_budgets": {"val": 0}, "allow_random": True}
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


def records(path: Path) -> Iterator[Any]:
    """The records of a W&B run: protocol buffers in LevelDB's log format."""
    protocol, data, at, parts = import_module("wandb.proto.wandb_internal_pb2"), path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        rest = 32768 - at % 32768
        if rest < 7:
            at += rest
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts = data[at + 7 : at + 7 + length] if kind in (1, 2) else parts + data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield protocol.Record.FromString(parts)


@pytest.mark.slow
@pytest.mark.epoch_one_reads_all
def test_wandb_keeps_what_was_logged(tmp_path, monkeypatch):
    """Offline there are all values with epoch and step, the axes of all keys, and the granted memory in the config."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = leaf("wandb", save_dir=str(tmp_path))
    trained(tmp_path, logger)
    config, summary = dict(logger.experiment.config)["stocache"], dict(logger.experiment.summary)
    logger.experiment.finish()
    wandb.teardown()
    assert (config["budget"], config["val"]["samples"]) == ("50%", 8)
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    saved = list(records(path))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in saved
        if record.HasField("history")
    ]
    epochs = [row for row in rows if "stocache/hit_rate" in row]
    steps = [(row["epoch"], row["trainer/global_step"], row["stocache/hits"]) for row in epochs]
    assert steps == [(0, 5, 0), (1, 11, 12)]
    live = [row for row in rows if "stocache/live/hit_rate" in row]
    assert [row["trainer/global_step"] for row in live] == [1, 3, 5, 7, 9, 11]
    assert not [row for row in live if "stocache/hit_rate" in row]
    axes = {
        record.metric.name or record.metric.glob_name: (record.metric.step_metric, record.metric.summary.none)
        for record in saved
        if record.HasField("metric")
    }
    logged = {name for row in rows for name in row if name.startswith("stocache/") and "/live/" not in name}
    assert {name: axes.get(name) for name in logged} == dict.fromkeys(logged, ("epoch", False))
    assert {axes[name] for row in live for name in row if "/live/" in name} == {("trainer/global_step", True)}
    assert set(axes) - {"*", "trainer/global_step"} == {axis["name"] for axis in axes_of()}
    assert summary["stocache/hits"] == 12
    assert summary["stocache/data_wait_seconds"]["max"] >= summary["stocache/data_wait_seconds"]["min"]
    assert not [name for name in summary if "/live/" in name]


@pytest.mark.soak
@pytest.mark.epoch_one_reads_all
def test_mlflow_keeps_what_was_logged(tmp_path, monkeypatch, caplog):
    """Its client returns the values with their steps. A later fit in the same run keeps the params of the first; that
    the logger refuses those of the second stops no training."""
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

"""W&B and MLflow without the network keep the logged values, with the right axes."""

import json
import struct
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from lightning.pytorch.loggers import MLFlowLogger
from omegaconf import open_dict

from lightning_stocache import CacheMonitor, StocacheDataModule, StochasticCache
from lightning_stocache.insight.dashboards import axes as axes_of
from tests.training.tiny import Model, make_trainer, plain_loader, source

pytestmark = [pytest.mark.processes, pytest.mark.slow]

CONFIGS = Path(__file__).parents[2] / "examples" / "configs"


@pytest.fixture
def leaf(tmp_path):
    """The logger of a leaf of the example's configs."""

    def made(name: str, *overrides: str) -> Any:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            config = compose("logger/" + name, [*overrides], return_hydra_config=True)
        with open_dict(config):
            config.hydra.runtime.output_dir = str(tmp_path)
            HydraConfig.instance().set_config(config)
        return instantiate(config.logger[name])

    yield made
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


def trained(tmp_path: Path, logger: Any, epochs: int = 2) -> None:
    """Two epochs of six steps with validation, live values at every second step."""
    dm = StocacheDataModule(source(tmp_path), source(tmp_path, "val", 8), batch_size=4, budget="50%")
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=epochs, logger=logger, log_every_n_steps=2)
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


@pytest.mark.epoch_one_reads_all
def test_wandb_keeps_what_was_logged(tmp_path, monkeypatch, leaf):
    """Offline there are all values with epoch and step, the axes of all keys, and the granted memory in the config."""
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = leaf("wandb")
    trained(tmp_path, logger)
    config, summary = dict(logger.experiment.config)["stocache"], dict(logger.experiment.summary)
    logger.experiment.finish()
    wandb.teardown()
    assert {name: config[name] for name in ("budget", "slots", "dataset", "layout", "coverage")} == {
        **{"budget": "50%", "slots": 12, "dataset": "CountedSource", "layout": "rows", "coverage": 0.5}
    }
    assert config["val"]["samples"] == 8
    [path] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    kept = list(records(path))
    rows = [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in kept
        if record.HasField("history")
    ]
    epochs = [row for row in rows if "stocache/hit_rate" in row]
    assert [(row["epoch"], row["trainer/global_step"], row["stocache/hits"]) for row in epochs] == [
        (0, 5, 0),
        (1, 11, 12),
    ]
    live = [row for row in rows if "stocache/live/hit_rate" in row]
    assert [row["trainer/global_step"] for row in live] == [1, 3, 5, 7, 9, 11]
    assert not [row for row in live if "stocache/hit_rate" in row]
    axes = {
        record.metric.name or record.metric.glob_name: (record.metric.step_metric, record.metric.summary.none)
        for record in kept
        if record.HasField("metric")
    }
    logged = {name for row in rows for name in row if name.startswith("stocache/") and "/live/" not in name}
    assert {name: axes.get(name) for name in logged} == dict.fromkeys(logged, ("epoch", False))
    assert {axes[name] for row in live for name in row if "/live/" in name} == {("trainer/global_step", True)}
    assert set(axes) - {"*", "trainer/global_step"} == {axis["name"] for axis in axes_of()}
    assert summary["stocache/hits"] == 12
    assert summary["stocache/data_wait_seconds"]["max"] >= summary["stocache/data_wait_seconds"]["min"]
    assert not [name for name in summary if "/live/" in name]


@pytest.mark.epoch_one_reads_all
def test_mlflow_keeps_what_was_logged(tmp_path, monkeypatch, caplog, leaf):
    """Its client returns the values with their steps. A later fit in the same run keeps the params of the first."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'runs'}")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a database takes ten seconds to make
    monkeypatch.setenv("_MLFLOW_TELEMETRY_SESSION_ID", "")  # which it sets
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    logger = leaf("mlflow")
    trained(tmp_path, logger)
    client, run = logger.experiment, logger.run_id
    params = client.get_run(run).data.params
    assert {name.removeprefix("stocache/"): value for name, value in params.items()}.items() >= {
        **{"budget": "50%", "slots": "12", "dataset": "CountedSource", "coverage": "0.5", "val/samples": "8"}
    }.items()
    assert kept(client, run, "stocache/hits") == [(5, 0), (11, 12)]
    assert [step for step, _ in kept(client, run, "stocache/live/hit_rate")] == [1, 3, 5, 7, 9, 11]
    assert kept(client, run, "stocache/val/hits") == [(5, 4), (11, 4)]  # the sanity check fills
    again = MLFlowLogger(run_id=run, tracking_uri=f"file:{tmp_path / 'runs'}")  # as in another process
    for door in (again, logger):
        trainer = make_trainer(tmp_path, [StochasticCache(budget="25%")], logger=door)
        trainer.fit(Model(), plain_loader(source(tmp_path)))
    assert caplog.text.count("MLFlowLogger does not take the cache's hyperparameters") == 2
    assert client.get_run(run).data.params == params


def kept(client: Any, run: str, key: str) -> list[tuple[int, float]]:
    return [(value.step, value.value) for value in client.get_metric_history(run, key)]

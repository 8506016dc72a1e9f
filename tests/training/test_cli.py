"""All three doors under LightningCLI: every option is a plain value on the command line."""

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from tests.training.tiny import SAMPLES, Model, Photos, logged

pytestmark = pytest.mark.processes


def cached(datamodule: LightningDataModule, budget: str = "auto", keep_cache: bool = False) -> LightningDataModule:
    """A user's function around cache_datamodule for LightningCLI."""
    return cache_datamodule(datamodule, budget, keep_cache=keep_cache)


TRAINER = [
    *("--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.max_epochs=2", "--trainer.log_every_n_steps=1"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
    *("--trainer.enable_checkpointing=false", "--trainer.logger=lightning.pytorch.loggers.CSVLogger"),
]


def command(tmp_path: Path, *arguments: str) -> list[str]:
    return ["fit", *TRAINER, f"--trainer.logger.save_dir={tmp_path}", *arguments]


def run(data: Any, arguments: list[str]) -> LightningCLI:
    return LightningCLI(Model, data, args=arguments, save_config_callback=None, seed_everything_default=1)


@pytest.fixture(autouse=True)
def _without_pytests_own_arguments(monkeypatch):
    """Hide pytest's own arguments, which LightningCLI would warn of."""
    monkeypatch.setattr("sys.argv", ["train.py"])


SOURCE, CALLBACKS = "tests.sources.CountedSource", "--trainer.callbacks+=lightning_stocache."
MONITOR = f"{CALLBACKS}CacheMonitor"
OURS = [f"--data.train={SOURCE}", f"--data.train.length={SAMPLES}", f"--data.val={SOURCE}", "--data.val.length=8"]
OURS += ["--data.budget=50%", "--data.stage_budgets={val: 0}", "--data.loader={drop_last: true}"]
OURS += [
    "--data.batch_size=4",
    "--data.keep_cache=false",
    f"{CALLBACKS}FillProgress",
    "--trainer.callbacks.every_n_steps=5",
]
NAMED = ["--data.train=tests.training.tiny.Numbers", "--data.batch_size=4", MONITOR]
CALLBACK = ["--data.folder={folder}", f"{CALLBACKS}StochasticCache", "--trainer.callbacks.budget=1MiB"]
CALLBACK += ["--trainer.callbacks.stage_budgets={{val: 0}}", f"{CALLBACKS}FillProgress"]
CACHED = ["--data.datamodule=tests.training.tiny.Photos", "--data.datamodule.folder={folder}", "--data.budget=50%"]


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("data", "arguments", "hits"),
    [
        (StocacheDataModule, NAMED, SAMPLES),
        (StocacheDataModule, [*NAMED, "--data.train.length=8"], 8),
        (Photos, CALLBACK, SAMPLES),
        (cache_datamodule, [*CACHED, MONITOR], SAMPLES // 2),
        (cached, [*CACHED, MONITOR], SAMPLES // 2),
    ],
    ids=["a dataset by its name alone", "with an argument", "callback", "cache_datamodule", "a function around it"],
)
def test_every_door_takes_its_options(tmp_path, data, arguments, hits):
    """The command line takes a dataset by its name, the callback among the Trainer's, and in place of a DataModule
    class cache_datamodule or a user's function around it."""
    cli = run(data, command(tmp_path, *(argument.format(folder=tmp_path) for argument in arguments)))
    assert logged(cli.trainer, "stocache/hits") == [0, hits]


@pytest.mark.epoch_one_reads_all
def test_our_datamodule(tmp_path):
    """`--data.train=...`, `--data.budget=50%` and all other options of StocacheDataModule."""
    cli = run(StocacheDataModule, command(tmp_path, *OURS, MONITOR, "--trainer.callbacks.live=false"))
    assert logged(cli.trainer, "stocache/hits") == [0, SAMPLES // 2]
    assert logged(cli.trainer, "stocache/val/bypasses") == [8, 8]
    assert logged(cli.trainer, "stocache/live/hit_rate") == []


def test_a_bad_budget_is_an_error_of_the_command_line(tmp_path, capsys):
    """A budget that cannot be read is refused by its value."""
    callback = "--trainer.callbacks+=lightning_stocache.StochasticCache"
    with pytest.raises((SystemExit, ValueError)) as error:
        run(Photos, command(tmp_path, f"--data.folder={tmp_path}", callback, "--trainer.callbacks.budget=lots"))
    assert "lots" in f"{error.value}{capsys.readouterr().err}"

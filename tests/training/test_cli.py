"""All three doors under LightningCLI: every knob is a plain value on its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import LightningDataModule
from lightning.pytorch.cli import LightningCLI

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule
from lightning_stocache.training.hooks import cache_datamodule
from tests.training.tiny import SAMPLES, Model, logged, plain_loader, source

pytestmark = pytest.mark.processes


class Photos(LightningDataModule):
    """A user's DataModule with an argument of its own."""

    def __init__(self, folder: str, batch_size: int = 4) -> None:
        super().__init__()
        self.data, self.batch_size = source(folder), batch_size

    def train_dataloader(self) -> Any:
        return plain_loader(self.data, batch_size=self.batch_size)


def cached(datamodule: LightningDataModule, budget: str = "auto", keep_cache: bool = False) -> LightningDataModule:
    """What a user writes to have cache_datamodule under LightningCLI."""
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


def test_our_datamodule(tmp_path):
    """`--data.train=...`, `--data.budget=50%` and all other options of StocacheDataModule."""
    cli = run(
        StocacheDataModule,
        command(
            tmp_path,
            "--data.train=tests.sources.CountedSource",
            f"--data.train.length={SAMPLES}",
            "--data.val=tests.sources.CountedSource",
            "--data.val.length=8",
            "--data.batch_size=4",
            "--data.budget=50%",
            "--data.stage_budgets={val: 0}",
            "--data.loader={drop_last: true}",
            "--data.keep_cache=false",
            "--trainer.callbacks+=lightning_stocache.FillProgress",
            "--trainer.callbacks.every_n_steps=5",
            "--trainer.callbacks+=lightning_stocache.CacheMonitor",
            "--trainer.callbacks.live=false",
        ),
    )
    assert logged(cli.trainer, "stocache/hits") == [0, SAMPLES // 2]
    assert logged(cli.trainer, "stocache/val/bypasses") == [8, 8]
    assert logged(cli.trainer, "stocache/live/hit_rate") == []


@pytest.mark.parametrize(("arguments", "samples"), [([], SAMPLES), (["--data.train.length=8"], 8)])
def test_a_dataset_by_its_name_alone(tmp_path, arguments, samples):
    """`--data.train=my.Photos` and nothing else is that dataset, with its defaults."""
    named = ["--data.train=tests.training.tiny.Numbers", *arguments, "--data.batch_size=4"]
    cli = run(StocacheDataModule, command(tmp_path, *named, "--trainer.callbacks+=lightning_stocache.CacheMonitor"))
    assert logged(cli.trainer, "stocache/hits") == [0, samples]


def test_the_callback(tmp_path):
    """`--trainer.callbacks+=lightning_stocache.StochasticCache` and its options, around a DataModule of the user's."""
    cli = run(
        Photos,
        command(
            tmp_path,
            f"--data.folder={tmp_path}",
            "--trainer.callbacks+=lightning_stocache.StochasticCache",
            "--trainer.callbacks.budget=1MiB",
            "--trainer.callbacks.stage_budgets={val: 0}",
            "--trainer.callbacks+=lightning_stocache.FillProgress",
        ),
    )
    assert any(isinstance(callback, StochasticCache) for callback in cli.trainer.callbacks)
    assert logged(cli.trainer, "stocache/hits") == [0, SAMPLES]


@pytest.fixture(autouse=True)
def _without_pytests_own_arguments(monkeypatch):
    """LightningCLI warns of arguments that it is not given."""
    monkeypatch.setattr("sys.argv", ["train.py"])


@pytest.mark.parametrize("door", [cache_datamodule, cached])
def test_cached_datamodule(tmp_path, door):
    """cache_datamodule, or a function of the user's around it, stands where a DataModule class would."""
    cli = run(
        door,
        command(
            tmp_path,
            "--data.datamodule=tests.training.test_cli.Photos",
            f"--data.datamodule.folder={tmp_path}",
            "--data.budget=50%",
            "--trainer.callbacks+=lightning_stocache.CacheMonitor",
        ),
    )
    assert logged(cli.trainer, "stocache/hits") == [0, SAMPLES // 2]


def test_a_bad_budget_is_an_error_of_the_command_line(tmp_path, capsys):
    """A value that cannot be read ends with the sentence that says which ones can."""
    callback = "--trainer.callbacks+=lightning_stocache.StochasticCache"
    with pytest.raises((SystemExit, ValueError)) as error:
        run(Photos, command(tmp_path, f"--data.folder={tmp_path}", callback, "--trainer.callbacks.budget=lots"))
    assert "lots" in f"{error.value}{capsys.readouterr().err}"

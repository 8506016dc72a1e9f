"""Trains for three epochs on a loader and notes all that a user could see: batches, draws, metrics, warnings, loads."""

import logging
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader

from tests.interop.fingerprint import fingerprint

__all__ = ["EPOCHS", "Run", "Setting", "train"]

EPOCHS = 3


@dataclass
class Run:
    """What a training did.

    Args:
        batches: the fingerprints of all batches, in order.
        states: those of the process-wide generators afterwards.
        metrics: the Trainer's `callback_metrics`, those of the last epoch.
        warnings: what lightning_stocache warned about.
        loads: how many samples had been read from the source at each epoch's end; empty if it cannot be counted.
    """

    batches: list[Any] = field(default_factory=list)
    states: Any = None
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)

    @property
    def loads_of_last_epoch(self) -> int:
        """Samples read from the source in the last epoch; 0 where they cannot be counted."""
        return self.loads[-1] - self.loads[-2] if self.loads else 0


class _Noting(LightningModule):
    """Notes each batch, and trains a number that has nothing to do with it."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.run = run
        self.number = torch.nn.Parameter(torch.ones(()))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.run.batches.append(fingerprint(batch))
        return self.number**2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class _Loads(Callback):
    """Notes at each epoch's end how much of the source has been read."""

    def __init__(self, run: Run, path: Path) -> None:
        self.run, self.path = run, path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.path.exists():
            self.run.loads.append(self.path.stat().st_size)


class _Warnings(logging.Handler):
    """Collects the warnings of the package."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@dataclass
class Setting:
    """What a way of holding data is made of.

    Args:
        folder: where it may write files; one folder for all ways and runs, so it may find them there.
        loads: a file that grows by a byte for every sample that is read from the source.
        workers: of the loader.
    """

    folder: Path
    loads: Path
    workers: int

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of every loader."""
        workers = {"num_workers": self.workers, "persistent_workers": self.workers > 0}
        return {"batch_size": 4, "shuffle": True} | workers

    def loader(self, dataset: Any, kind: Callable[..., Any] = DataLoader, **options: Any) -> Any:
        """The loader of a dataset whose loads are counted."""
        return kind(self.counted(dataset), **self.options | options)

    def counted(self, dataset: Any) -> Any:
        """The same object; every sample that it loads, in any process, is noted.

        The object gets a class of its own that only adds the note. Where Python does not let it, nothing is counted.
        """
        plain, path = type(dataset), self.loads

        def __getitem__(self: Any, index: Any) -> Any:
            log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(log, bytes(len(index) if isinstance(index, list) else 1))
            os.close(log)
            return plain.__getitem__(self, index)

        names = {"__getitem__": __getitem__, "__module__": plain.__module__}
        try:
            dataset.__class__ = type(plain.__name__, (plain,), names)
        except TypeError:
            return dataset
        path.touch()
        return dataset


def train(way: Callable[[Setting], Any], setting: Setting, callbacks: list[Callback]) -> Run:
    """Make the loader under a seed, train on it, and give what was seen."""
    run, log = Run(), _Warnings()
    random.seed(7), np.random.seed(7), torch.manual_seed(7)  # type: ignore[func-returns-value]
    loader = way(setting)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=EPOCHS,
        callbacks=[*callbacks, _Loads(run, setting.loads)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    package = logging.getLogger("lightning_stocache")
    package.addHandler(log)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(_Noting(run), loader)
    finally:
        package.removeHandler(log)
    run.states = fingerprint([torch.get_rng_state(), np.random.get_state(), random.getstate()])
    run.metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    run.warnings = log.lines + [str(one.message) for one in caught if "lightning_stocache" in one.filename]
    return run

"""Trains for three epochs on a loader and notes all that a user could see: batches, draws, metrics, warnings, loads."""

import logging
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from torch.utils.data import DataLoader

from tests.interop.fingerprint import fingerprint
from tests.interop.sources.files import SAMPLES
from tests.logs import Log
from tests.sources import Made
from tests.training.tiny import Watcher, make_trainer

__all__ = ["Run", "Setting", "train"]

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

    batches: list[Any]
    states: Any
    metrics: dict[str, float]
    warnings: list[str]
    loads: list[int]

    @property
    def loads_of_last_epoch(self) -> int:
        """Samples read from the source in the last epoch; 0 where they cannot be counted."""
        return self.loads[-1] - self.loads[-2] if self.loads else 0


class _Noting(Watcher):
    """Notes each batch, whatever it is."""

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        self.batches.append(fingerprint(batch))
        return self.weight.sum()


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

    def made(self, make: Callable[[int], Any], *, length: int = SAMPLES, **options: Any) -> Any:
        """The loader of samples that a function makes of their index."""
        return self.loader(Made(make, length), **options)

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
    seed_everything(7, verbose=False)
    loader, model, loads = way(setting), _Noting(), list[int]()

    def count(*_: Any) -> None:
        if setting.loads.exists():
            loads.append(setting.loads.stat().st_size)

    counting = LambdaCallback(on_train_epoch_end=count)
    trainer = make_trainer(setting.folder, [*callbacks, counting], epochs=EPOCHS, logger=False)
    with Log(logging.WARNING) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of files of the run before, collected at any moment
        trainer.fit(model, loader)
    return Run(
        batches=model.batches,
        states=fingerprint([torch.get_rng_state(), np.random.get_state(), random.getstate()]),
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        warnings=log.lines + [str(each.message) for each in caught if "lightning_stocache" in each.filename],
        loads=loads,
    )

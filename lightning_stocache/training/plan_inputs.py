"""The inputs of a plan from a DataModule and a LightningModule: how training data is loaded, and how long a step takes.

`take_training_data` runs the DataModule's hooks, once, and opens no cache. `measure_steps` trains in a real Trainer: at
first with one batch again and again, then with a plain loader. The time between two requests for a batch includes all
of Lightning's work. `measure_steps` needs its own process, because it replaces the DataModule's hooks and trains the
model.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from itertools import pairwise, repeat
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Subset

from lightning_stocache.insight.measurement import Data, PlanError, Spread, Steps, endless_loader
from lightning_stocache.loading.dataset import CachedDataset, cached_in, cached_source
from lightning_stocache.loading.loader_copy import settings_of
from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.setup.options import CacheOptions
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.sampling import loader_domain

__all__ = ["ARGUMENTS", "as_datamodule", "measure_steps", "take_source", "take_training_data", "world"]

_STEPS = 96  # of each half: with a batch in memory, and with a loader. The first third of each half warms up
# The Trainer's arguments for `measure_steps`, in place of the user's. A progress bar is part of a step.
ARGUMENTS: dict[str, Any] = {
    "max_epochs": 1,
    "limit_train_batches": 2 * _STEPS + 1,  # one more, so the Trainer asks for a batch after the last step
    "limit_val_batches": 0,
    "num_sanity_val_steps": 0,
    "devices": 1,
    "num_nodes": 1,
    "strategy": "auto",
    "callbacks": None,
    "logger": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}
_FEW = 6  # steps that are enough if a half has taken longer than `_PATIENCE`
_PATIENCE = 10.0  # seconds
_ROUNDS = 4  # stretches of steps, whose means differ by the noise of the machine


def as_datamodule(given: Any) -> Any:
    """The given DataModule, or a DataModule around the given training loader; a cache of that loader is closed."""
    if not isinstance(given, DataLoader):
        return given
    cached = cached_in(given.dataset)
    if cached is not None:
        cached.close()
    datamodule: Any = LightningDataModule()
    datamodule.train_dataloader = lambda: given
    return datamodule


def take_training_data(datamodule: Any, *, whole: bool = False) -> Data:
    """Run the hooks of a DataModule up to its training loader, and take the loader's source and settings.

    From then on the DataModule caches nothing. The source contains the samples that the loader's sampler can draw, or
    with `whole` the whole dataset.

    Raises:
        PlanError: the argument is no DataModule, or has not exactly one training DataLoader.
        Exception: an error of a hook.
    """
    if not hasattr(datamodule, "train_dataloader"):
        kind = type(datamodule).__name__
        raise PlanError(f"data must be a LightningDataModule with a training loader, or that DataLoader, got {kind}")
    caches = getattr(datamodule, "caches", None)
    options = CacheOptions()
    if isinstance(caches, CallCaches):
        options = caches.options
        caches.options = replace(options, budget=0, keep_cache=False, name=None)
    datamodule.prepare_data()
    datamodule.setup("fit")
    try:
        loaders = list(loaders_in(datamodule.train_dataloader()))
    finally:
        datamodule.teardown("fit")
    if len(loaders) != 1:
        raise PlanError(f"the training data must be one DataLoader, got {len(loaders)} of them")
    [loader] = loaders
    cached = cached_in(loader.dataset)
    source: Dataset[Any] = loader.dataset if cached is None else cached.source
    transform = None if cached is None else cached_source(cached).transform
    drawn = None if whole else loader_domain(None, "train", loader)
    if drawn is not None:  # a cache has slots for these alone
        source = Subset(source, drawn.indices.tolist())
    names = ["collate_fn", "pin_memory", "timeout", "worker_init_fn"]
    names += ["multiprocessing_context", "prefetch_factor"] if loader.num_workers else []
    settings = {name: getattr(loader, name) for name in names}
    batch_size = settings_of(loader).batch_size
    return Data(source, batch_size, loader.num_workers, transform, settings, options.freeze_random)


def take_source(given: Any) -> Any:
    """Take the dataset of a config: a DataModule's training set, a dataset, or a function that makes one.

    Raises:
        PlanError: the argument is none of these.
    """
    if hasattr(given, "train_dataloader"):
        return take_training_data(given, whole=True).source
    made = given() if callable(given) and not hasattr(given, "__getitem__") else given
    if not hasattr(made, "__getitem__") or not hasattr(made, "__len__"):
        raise PlanError(f"a dataset, or a LightningDataModule, can be packed, got {type(made).__name__}")
    return made


def measure_steps(trainer: Any, model: Any, datamodule: Any, data: Data) -> Steps:
    """Measure the seconds that a training takes per batch, with a batch in memory and with a plain loader.

    The spreads are those of the means of a few stretches of steps. The batch hooks of the DataModule run. The batch in
    memory is loaded in this process.

    Args:
        trainer: a Trainer with `ARGUMENTS`.
        model: the model, which is trained.
        datamodule: the DataModule, whose hooks are replaced.
        data: the training data, from `take_training_data`.

    Raises:
        PlanError: the model ended training too early.
        Exception: an error of the model.
    """
    alone: list[float] = []  # the moments at which a batch was asked for
    uncached: list[float] = []
    dataset = CachedDataset(data.source, 0, transform=data.transform)
    batch = next(iter(DataLoader(dataset, data.batch_size, collate_fn=data.settings.get("collate_fn"))))

    def batches() -> Iterator[Any]:
        yield from _timed(repeat(batch), alone)
        with closing(endless_loader(data, dataset, data.arm("plain"))) as loader:
            yield from _timed(loader, uncached)

    for hook in ("prepare_data", "setup", "teardown"):  # have run already
        setattr(datamodule, hook, lambda *arguments, **named: None)
    datamodule.train_dataloader = batches
    trainer.fit(model, datamodule=datamodule)
    dataset.close()
    if len(uncached) <= _FEW:
        count = len(alone) + len(uncached)
        raise PlanError(f"the model ended training after {count} batches: its step cannot be measured")
    seconds = _across_stretches(uncached)
    return Steps(_across_stretches(alone), seconds, max(uncached[1] - uncached[0] - seconds.median, 0.0))


def _timed(batches: Iterable[Any], asked: list[float]) -> Iterator[Any]:
    """Hand out batches, and note the moments at which they are asked for."""
    asked.append(_now())
    for batch in batches:
        yield batch
        asked.append(_now())
        if len(asked) > _STEPS or (len(asked) > _FEW and asked[-1] - asked[0] > _PATIENCE):
            return


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # launched kernels may not have ended
    return time.perf_counter()


def _across_stretches(asked: list[float]) -> Spread:
    counted = asked[len(asked) // 3 :]
    size = max((len(counted) - 1) // _ROUNDS, 1)
    return Spread.across([(end - begin) / size for begin, end in pairwise(counted[::size])])


def world(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of nodes and of ranks per node in the arguments of a Trainer.

    Example:
        >>> world({"num_nodes": 2, "devices": 4}), world({"devices": "0,1"}), world({"devices": [3]})
        ((2, 4), (1, 2), (1, 1))
    """
    devices = trainer.get("devices", "auto")
    if devices in ("auto", -1, "-1", None):
        ranks = torch.cuda.device_count() if trainer.get("accelerator") in (None, "auto", "gpu", "cuda") else 1
    elif isinstance(devices, str):
        ranks = devices.strip(",").count(",") + 1 if "," in devices else int(devices)
    else:
        ranks = devices if isinstance(devices, int) else len(devices)
    return int(trainer.get("num_nodes") or 1), max(ranks, 1)

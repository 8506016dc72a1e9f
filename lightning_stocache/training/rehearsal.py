"""What a plan needs from a DataModule and a LightningModule: how the training data is loaded, and what a step takes.

`subject` asks the DataModule for its training loader, once, as a Trainer would, and opens no cache. `step` trains a few
batches in a real Trainer, with one batch that is there at once, again and again: what passes between two requests for a
batch is the step with all that Lightning does around it. Both belong to a process of their own: the DataModule's hooks
are replaced, and the model is trained.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, SequentialSampler

from lightning_stocache.insight.costs import Loading, PlanError, Spread, Step
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.sampler import Mode
from lightning_stocache.loading.stand_in import cached_in
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.loaders import in_flight, loaders_in

__all__ = ["ARGUMENTS", "Subject", "step", "subject", "world"]

# Of the Trainer for `step`, in place of the user's own; a third of the batches warm up.
ARGUMENTS: dict[str, Any] = {
    **{"max_epochs": 1, "limit_train_batches": 48, "limit_val_batches": 0, "num_sanity_val_steps": 0},
    **{"devices": 1, "num_nodes": 1, "strategy": "auto", "callbacks": None, "logger": False},
    **{"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}
_ROUNDS = 4  # of steps, whose means differ by the noise of the machine
_PATIENCE = 10.0  # seconds, after which fewer will do
_SETTINGS = ("collate_fn", "pin_memory", "timeout", "worker_init_fn")
_WITH_WORKERS = ("multiprocessing_context", "prefetch_factor")


@dataclass(frozen=True)
class Subject:
    """The training data of a DataModule, without its cache.

    Args:
        source: the user's dataset.
        transform: per sample, after the cache.
        loading: how it is loaded.
        others: datasets that draw on the same budget (validation).
        allow_random: whether a random source is cached as it is.
        mode: how samples are dealt to nodes.
    """

    source: Dataset[Any]
    transform: Callable[[Any], Any] | None
    loading: Loading
    others: tuple[Dataset[Any], ...] = ()
    allow_random: bool = False
    mode: Mode = "locality"

    def batch(self) -> Any:
        """The first batch, loaded in this process."""
        dataset = CachedDataset(self.source, 0, transform=self.transform)
        settings = {name: self.loading.settings[name] for name in ("collate_fn",) if name in self.loading.settings}
        try:
            return next(iter(DataLoader(dataset, self.loading.batch_size, **settings)))
        finally:
            dataset.close()


def subject(datamodule: Any) -> Subject:
    """What the training loader of a DataModule reads, and how.

    Raises:
        PlanError: it is no DataModule, or does not give one DataLoader.
        Exception: what its hooks raise.
    """
    if not hasattr(datamodule, "train_dataloader"):
        raise PlanError(f"data must be a LightningDataModule with a training loader, got {type(datamodule).__name__}")
    caches = getattr(datamodule, "caches", None)
    options = None
    if isinstance(caches, CallCaches):
        options = caches.options
        caches.options = dataclasses.replace(options, budget=0, stage_budgets=None, keep_cache=False, name=None)
    together = options is None or options.pot("train") == options.pot("val")
    datamodule.prepare_data()
    datamodule.setup("fit")
    try:
        loaders = list(loaders_in(datamodule.train_dataloader()))
        validation = _validation(datamodule) if together else []
    finally:
        datamodule.teardown("fit")
    if len(loaders) != 1:
        raise PlanError(f"the training data must be one DataLoader, got {len(loaders)} of them")
    loader = loaders[0]
    source, transform = _inside(loader.dataset)
    return Subject(
        source,
        transform,
        _loading(loader),
        tuple(_inside(one.dataset)[0] for one in validation),
        options is not None and options.allow_random,
        "locality" if options is None else options.sampling,
    )


def step(trainer: Any, model: Any, datamodule: Any, batch: Any) -> Step:
    """What a training step takes.

    Args:
        trainer: a Trainer with `ARGUMENTS`.
        model: the user's LightningModule.
        datamodule: the user's DataModule, for its batch hooks.
        batch: as its loader makes them.

    Raises:
        Exception: what the model raises.
    """
    batches = _AtOnce(batch)
    for hook in ("prepare_data", "setup", "teardown"):
        setattr(datamodule, hook, _nothing)
    datamodule.train_dataloader = lambda: batches
    trainer.fit(model, datamodule=datamodule)
    return batches.step()


def world(trainer: Mapping[str, Any]) -> tuple[int, int]:
    """Nodes, and ranks per node, that the arguments of a Trainer ask for.

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


class _AtOnce:
    """One batch again and again, and when it was asked for."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._asked: list[tuple[float, float]] = []

    def __iter__(self) -> Iterator[Any]:
        begin = time.perf_counter()
        while len(self._asked) < 6 or time.perf_counter() - begin < _PATIENCE:
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # what was only launched is not done
            self._asked.append((time.perf_counter(), time.process_time()))
            yield self._batch

    def step(self) -> Step:
        """The seconds between two requests."""
        asked = self._asked[len(self._asked) // 3 :]
        steps = len(asked) - 1
        if steps < 1:
            raise PlanError(f"the model ended training after {len(self._asked)} batches: its step cannot be measured")
        size = max(steps // _ROUNDS, 1)
        means = ((end - begin) / size for (begin, _), (end, _) in pairwise(asked[::size]))
        return Step(Spread.of(means), (asked[-1][1] - asked[0][1]) / steps)


def _nothing(*arguments: Any, **named: Any) -> None:
    """In place of a hook that has run."""


def _validation(datamodule: Any) -> list[DataLoader[Any]]:
    """Its validation loaders: none where the hook is Lightning's own, of either package."""
    try:
        return list(loaders_in(datamodule.val_dataloader()))
    except Exception as error:
        if type(error).__name__ != "MisconfigurationException":
            raise
        return []


def _inside(dataset: Dataset[Any]) -> tuple[Dataset[Any], Callable[[Any], Any] | None]:
    if (cached := cached_in(dataset)) is not None:
        return cached.source, cached.finish.transform
    return dataset, None


def _loading(loader: DataLoader[Any]) -> Loading:
    names = _SETTINGS + (_WITH_WORKERS if loader.num_workers else ())
    sampler = loader.sampler
    ordered = type(sampler) is SequentialSampler or (isinstance(sampler, DistributedSampler) and not sampler.shuffle)
    return Loading(
        in_flight(loader).batch_size,
        loader.num_workers,
        shuffle=not ordered,
        persistent=loader.persistent_workers or not loader.num_workers,
        settings={name: getattr(loader, name) for name in names},
    )

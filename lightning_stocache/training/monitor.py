"""What the caches of a Trainer call did, as metrics.

The counts of an epoch are the difference between two of its ends: workers run ahead of the step, so an epoch's first
samples are served before `on_train_epoch_start`. What training has been served is put aside when a validation starts,
since one dataset may be in both stages. The sanity check moves the baseline and is not logged. One exchange per epoch
sums the counts over the ranks, on a private group, before anything is divided.
"""

from __future__ import annotations

import time
import warnings
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.insight.layout import LAYOUT
from lightning_stocache.insight.metrics import Tally, rates, summarise
from lightning_stocache.insight.stall import Stall
from lightning_stocache.insight.verdict import verdict
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.expectation import Expectation
from lightning_stocache.training.listening import listen, stop_listening
from lightning_stocache.training.loaders import cached_datasets

__all__ = ["CacheMonitor", "log_every", "running_datasets"]

_LIVE = ("hit_rate", "fill_fraction", "memory_bytes", "data_wait_seconds", "compute_seconds")


class CacheMonitor(Callback):
    """Logs what the caches of the Trainer's loaders did.

    Epoch values go through `log_dict`, so that ModelCheckpoint and EarlyStopping can watch them; live values go to the
    loggers at the Trainer's logging cadence. Keys are `stocache/<metric>` for training, and `stocache/val/<metric>`,
    `stocache/test/<metric>` for the other stages:

    - `hit_rate`: hits over samples served. Served means handed out by the cache layer, consumed or not: workers run
      ahead by `num_workers * prefetch_factor` batches.
    - `fill_fraction`: share of the slots that are ready; `coverage`: share of the indices that have a slot on some
      node.
    - `hits`, `misses`, `bypasses`, `fills`: samples in this epoch, over all ranks.
    - `bytes_from_cache`, `bytes_from_source`: bytes in this epoch.
    - `source_seconds`, `fill_seconds`, `gather_seconds`: what loading consists of: time spent in the source, on storing
      what came from it, and on copying hits out; summed over processes, so with workers much of it is no wait.
    - `memory_bytes`, `budget_bytes`: memory in use and granted, summed over nodes.
    - `data_wait_seconds`, `compute_seconds`: what an epoch's training waited for data and computed, mean over ranks
      (training only, as the next two): the seconds of Lightning's own profilers, `train_dataloader_next` and
      `run_training_batch`. Workers that start with an epoch do so before its first wait.
    - `samples_per_second`: samples served over the seconds of the training's loop, all ranks together.
    - `hit_rate_expected`: what theory predicts for this sampler, these arcs and ranks; a hit rate well below it is
      warned about once, with the likely cause.

    With several nodes also `stocache/node<k>/` with `hit_rate`, `fill_fraction` and `memory_bytes`. Live values are
    `hit_rate`, `data_wait_seconds` and `compute_seconds` of rank zero in the epoch so far, `fill_fraction` and
    `memory_bytes` of its node.

    Example:
        >>> trainer = Trainer(callbacks=[CacheMonitor()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._seen: dict[Counters, Counts] = {}
        self._aside: dict[Counters, Counts] = {}  # served to training since its last epoch's end, but seen by now
        self._started = self._ended = 0.0
        self._stall = Stall()
        self._expected: dict[Counters, Expectation] = {}
        self._complained = False
        self._epochs: list[dict[str, float]] = []
        self._logged_step = -1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Keep Lightning from advising, once per key, to sum what has been summed over the ranks already."""
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\('stocache/")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and give TensorBoard a tab of its own for the caches: custom scalars."""
        self._epochs.clear()
        listen(trainer, self._stall)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            lay_out = getattr(getattr(logger, "experiment", None), "add_custom_scalars", None)
            if lay_out is not None:
                lay_out(LAYOUT)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the caches were worth."""
        stop_listening(trainer, self._stall)
        if self._epochs:
            samples = sum(map(len, running_datasets(trainer, "train")))
            for sentence in verdict(self._epochs, samples):
                rank_zero_info(f"stocache: {sentence}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._started = self._ended = time.perf_counter()
        self._stall.take()
        self._stall.resume(self._started)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log live values, at the Trainer's logging cadence."""
        self._ended = time.perf_counter()
        self._stall.end(self._ended)
        step = trainer.global_step - 1  # as Lightning numbers the values of a step
        if not trainer.loggers or step == self._logged_step or (step + 1) % log_every(trainer):
            return
        self._logged_step = step
        tally = self._tally("train", running_datasets(trainer, "train"), live=True)
        if tally is not None:
            live = rates(tally)
            values = {f"stocache/{name}": live[name] for name in _LIVE}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values. Collective."""
        metrics = self._epoch_end(trainer, pl_module, "train", "stocache")
        if metrics:
            self._epochs.append(metrics)
            self._compare(metrics, running_datasets(trainer, "train"))
            rank_zero_info(
                f"epoch {trainer.current_epoch}: hit rate {100 * metrics['hit_rate']:.1f} %, "
                f"fill {100 * metrics['fill_fraction']:.1f} %, {self._ended - self._started:.1f} s"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put aside what training has been served."""
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        for dataset in running_datasets(trainer, "train"):
            if (counters := dataset.counters) is not None:
                self._aside[counters] = self._aside.get(counters, Counts()) + self._moved(dataset, counters)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What validation took is not of the training's loop."""
        self._stall.resume(time.perf_counter())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation epoch's values. Collective."""
        self._epoch_end(trainer, pl_module, "val", "stocache/val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test epoch's values. Collective."""
        self._epoch_end(trainer, pl_module, "test", "stocache/test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the caches of the call."""
        self._forget(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget the caches of the call; Lightning skips `teardown` after an exception."""
        self._forget(trainer)

    def _forget(self, trainer: Trainer) -> None:
        stop_listening(trainer, self._stall)
        self._seen.clear()
        self._aside.clear()
        self._expected.clear()
        self._logged_step = -1

    def _epoch_end(self, trainer: Trainer, pl_module: LightningModule, stage: str, prefix: str) -> dict[str, float]:
        datasets = running_datasets(trainer, stage)
        tally = self._tally(stage, datasets)
        if tally is None or trainer.sanity_checking:
            return {}
        metrics = summarise(datasets[0].group.exchange(tally)) | {"coverage": _coverage(datasets)}
        if stage == "train" and (expected := self._expectation(trainer, datasets)) is not None:
            metrics["hit_rate_expected"] = expected
        if not trainer.barebones:  # it refuses to log
            values = {f"{prefix}/{name}": value for name, value in metrics.items()}
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)
        return metrics

    def _tally(self, stage: str, datasets: list[CachedDataset], *, live: bool = False) -> Tally | None:
        """What this rank brings: its own counts since the stage's last epoch end; the node's memory from its leader."""
        tally = None
        for dataset in datasets:
            group, counters, cache = dataset.group, dataset.counters, dataset.cache
            if counters is None:
                continue
            counts = self._moved(dataset, counters, peek=live)
            if stage == "train":
                counts += self._aside.get(counters, Counts()) if live else self._aside.pop(counters, Counts())
            own = Tally(group.node, counts)
            if cache is not None and group.is_leader:
                own += Tally(group.node, Counts(), len(cache), cache.filled, cache.memory_bytes, dataset.budget_bytes)
            tally = own if tally is None else tally + own
        if tally is not None and stage == "train":
            waited, computed, looped = self._stall.peek() if live else self._stall.take()
            tally += Tally(wait_seconds=waited, compute_seconds=computed, loop_seconds=looped, ranks=1)
        return tally

    def _expectation(self, trainer: Trainer, datasets: list[CachedDataset]) -> float | None:
        """The predicted hit rate of the epoch that ends; None with several training sets, which have no one sampler."""
        if len(datasets) != 1 or (counters := datasets[0].counters) is None:
            return None
        if counters not in self._expected:
            self._expected[counters] = Expectation(trainer, datasets[0])
        return self._expected[counters].hit_rate()

    def _compare(self, metrics: dict[str, float], datasets: list[CachedDataset]) -> None:
        expected = metrics.get("hit_rate_expected")
        if expected is None or self._complained or datasets[0].counters not in self._expected:
            return
        expectation = self._expected[datasets[0].counters]
        complaint = expectation.complaint(metrics["hit_rate"], expected, metrics["fill_fraction"])
        if complaint is not None:
            self._complained = True
            rank_zero_warn(complaint)

    def _moved(self, dataset: CachedDataset, counters: Counters, *, peek: bool = False) -> Counts:
        """What this rank was served since the last look."""
        now = counters.totals(dataset.group.rank)
        moved = now - self._seen.get(counters, dataset.opened.baseline)
        if not peek:
            self._seen[counters] = now
        return moved


def log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; a barebones Trainer has 0, and no loggers."""
    return int(getattr(trainer, "log_every_n_steps", 0)) or 1


def running_datasets(trainer: Trainer, stage: str) -> list[CachedDataset]:
    """The cached datasets that the loaders of a running stage read."""
    return cached_datasets(getattr(trainer, "train_dataloader" if stage == "train" else f"{stage}_dataloaders"))


def _coverage(datasets: list[CachedDataset]) -> float:
    """Share of the indices of all these datasets that have a slot on some node."""
    covered = sum(len(one) * one.ring.coverage for one in datasets if one.ring is not None)
    return covered / max(sum(map(len, datasets)), 1)

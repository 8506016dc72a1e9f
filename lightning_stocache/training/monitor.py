"""What the caches of a Trainer call did, as metrics.

Each rank tells the others its counts when the last step of an epoch is done, and no hook here waits in a collective:
`tallies` has the protocol and why it cannot hang. The monitor moves itself to the front of the Trainer's callbacks
besides: an epoch whose last step is not known beforehand (a hook ended it) is told of at its end, before any other
callback's hook.

The sanity check moves the baseline and is not logged. Outside of `fit` values go to the loggers alone, so that
`trainer.validate` and `trainer.test` return what they return without a monitor.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_stocache.cache.counters import Counters
from lightning_stocache.insight.layout import LAYOUT, mark_zero
from lightning_stocache.insight.metrics import rates, summarise
from lightning_stocache.insight.stall import Stall
from lightning_stocache.insight.verdict import verdict
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.training.expectation import Expectation
from lightning_stocache.training.loaders import Cached, running_datasets
from lightning_stocache.training.pools import PoolRates
from lightning_stocache.training.profiler import listen, log_every, stop_listening
from lightning_stocache.training.tallies import Tallies, coverage, samples_of

__all__ = ["CacheMonitor"]

_LIVE = ("hit_rate", "fill_fraction", "memory_bytes", "data_wait_seconds", "compute_seconds")


class CacheMonitor(Callback):
    """Logs what the caches of the Trainer's loaders did.

    Epoch values of `fit` go through `log_dict`, so that ModelCheckpoint and EarlyStopping can watch them; live values,
    and those of `trainer.validate` and `trainer.test`, go to the loggers alone. It may stand anywhere in the list of
    callbacks: it moves itself to the front. Keys are `stocache/<metric>` for training, and `stocache/val/<metric>`,
    `stocache/test/<metric>` for the other stages:

    - `hit_rate`: hits over samples served. Served means handed out by the cache layer, consumed or not: workers run
      ahead by `num_workers * prefetch_factor` batches.
    - `fill_fraction`: share of the slots that are ready; of records, which differ in size, of the bytes granted.
    - `coverage`: share of the indices that have a slot, and are expected to find room in it, on some node; of those
      that are drawn, where that is known.
    - `hits`, `misses`, `bypasses`, `fills`: samples in this epoch, over all ranks.
    - `bytes_from_cache`, `bytes_from_source`: bytes in this epoch; the latter is left out without a cache, because
      nobody knows then what a sample takes.
    - `source_seconds`, `fill_seconds`, `gather_seconds`: what loading consists of: time spent in the source, on storing
      what came from it, and on copying hits out; summed over processes, so with workers much of it is no wait.
    - `memory_bytes`, `budget_bytes`: memory in use and granted, summed over nodes.
    - `data_wait_seconds`, `compute_seconds`: what an epoch's training waited for data and computed, mean over ranks
      (training only, as the next two): the seconds of Lightning's own profilers, `train_dataloader_next` and
      `run_training_batch`. Workers that start with an epoch do so before its first wait.
    - `samples_per_second`: samples served over the seconds of the training's loop, all ranks together.
    - `hit_rate_expected`: what theory predicts for this sampler, these arcs and ranks; a hit rate well below it is
      warned about once, with the likely cause. Left out for samplers that no formula is known for.

    Of a `RollingCache` that is trained on, on rank zero's node, under `stocache/rolling/`: `resident` (samples),
    `appended_per_second`, `evicted_per_second`, `oldest_seconds` (age of the oldest sample), `times_seen` (how often a
    sample that came was served, on average), `renewed` (samples of the epoch that were newer than it).

    With several nodes also `stocache/node<k>/` with `hit_rate`, `fill_fraction` and `memory_bytes`. Live values are
    `hit_rate`, `data_wait_seconds` and `compute_seconds` of rank zero in the epoch so far, `fill_fraction` and
    `memory_bytes` of its node.

    Example:
        >>> trainer = Trainer(callbacks=[CacheMonitor()], logger=False, enable_checkpointing=False)
    """

    patience = 60.0
    """Seconds that an epoch's end waits for the slowest rank's tally, at most."""

    def __init__(self) -> None:
        self._tallies = Tallies()
        self._started = self._ended = 0.0
        self._stall = Stall()
        self._pools = PoolRates()
        self._expected: dict[tuple[Counters, ...], Expectation] = {}
        self._complained = self._deaf = False
        self._epochs: list[dict[str, float]] = []
        self._logged_step = -1

    @property
    def monitors(self) -> bool:
        """Whether this callback is the one that logs."""
        return True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand first, and keep Lightning from advising, once per key, to sum what has been summed already."""
        warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\('stocache/")
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [self, *(other for other in callbacks if other is not self)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and give TensorBoard a tab of its own for the caches: custom scalars."""
        self._epochs.clear()
        listen(trainer, self._stall)
        self._pools.start(trainer)
        for logger in trainer.loggers if trainer.is_global_zero else ():
            lay_out = getattr(getattr(logger, "experiment", None), "add_custom_scalars", None)
            if lay_out is not None:
                lay_out(LAYOUT)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what the caches were worth."""
        stop_listening(trainer, self._stall)
        if self._epochs:
            datasets = running_datasets(trainer, "train")
            off = all(isinstance(dataset, CachedDataset) and cached_source(dataset).opened.off for dataset in datasets)
            for sentence in verdict(self._epochs, sum(map(samples_of, datasets)), off=off):
                rank_zero_info(f"stocache: {sentence}")

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._started = self._ended = time.perf_counter()
        self._stall.take()
        self._stall.resume(self._started)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log live values, at the Trainer's logging cadence; after the epoch's last step, post its tally."""
        self._ended = time.perf_counter()
        self._stall.end(self._ended)
        self._log_live(trainer)
        if trainer.is_last_batch:
            self._post(trainer, "train")

    def _log_live(self, trainer: Trainer) -> None:
        step = trainer.global_step - 1  # as Lightning numbers the values of a step
        if not (self.monitors and trainer.loggers) or step == self._logged_step or (step + 1) % log_every(trainer):
            return
        self._logged_step = step
        tally = self._tallies.peek(running_datasets(trainer, "train"), self._stall.peek())
        if tally is not None:
            live = rates(tally)
            values = {f"stocache/{name}": live[name] for name in _LIVE if name in live}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)
                mark_zero(logger, step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values."""
        metrics = self._epoch_end(trainer, pl_module, "train", "stocache")
        if metrics:
            self._epochs.append(metrics)
            rank_zero_info(
                f"epoch {trainer.current_epoch}: hit rate {100 * metrics['hit_rate']:.1f} %, "
                f"fill {100 * metrics['fill_fraction']:.1f} %, {self._ended - self._started:.1f} s"
            )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put aside what training has been served."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._tallies.put_aside(running_datasets(trainer, "train"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """What validation took is not of the training's loop."""
        self._stall.resume(time.perf_counter())

    def on_validation_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """After the last batch, post the validation epoch's tally."""
        if not trainer.sanity_checking and _is_last(trainer.num_val_batches, *batch):
            self._post(trainer, "val")

    def on_test_batch_end(self, trainer: Trainer, pl_module: LightningModule, *batch: Any) -> None:
        """After the last batch, post the test epoch's tally."""
        if _is_last(trainer.num_test_batches, *batch):
            self._post(trainer, "test")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation epoch's values."""
        if trainer.sanity_checking:
            self._tallies.skip(running_datasets(trainer, "val"))
        else:
            self._epoch_end(trainer, pl_module, "val", "stocache/val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test epoch's values."""
        self._epoch_end(trainer, pl_module, "test", "stocache/test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the caches of the call."""
        self._forget(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Forget the caches of the call; Lightning skips `teardown` after an exception."""
        self._forget(trainer)

    def _forget(self, trainer: Trainer) -> None:
        stop_listening(trainer, self._stall)
        self._tallies, self._pools = Tallies(), PoolRates()
        self._expected.clear()
        self._logged_step = -1

    def _post(self, trainer: Trainer, stage: str) -> None:
        if self.monitors:
            seconds = self._stall.take() if stage == "train" else None
            if seconds is not None and math.isnan(seconds.waited) and not self._deaf:
                self._deaf = True
                rank_zero_warn(
                    "this version of Lightning does not say when its loop waits for a batch and when it computes: "
                    "data_wait_seconds and compute_seconds are left out"
                )
            self._tallies.post(stage, running_datasets(trainer, stage), seconds)

    def _epoch_end(self, trainer: Trainer, pl_module: LightningModule, stage: str, prefix: str) -> dict[str, float]:
        self._post(trainer, stage)
        tallies = self._tallies.collect(stage, self.patience)
        if not tallies:
            return {}
        datasets = running_datasets(trainer, stage)
        metrics = summarise(tallies) | {"coverage": coverage(datasets)}
        if stage == "train" and (expectation := self._expectation(trainer, datasets)) is not None:
            self._compare(metrics, expectation)
        if stage == "train":
            metrics |= self._pools.metrics(trainer)
        values = {f"{prefix}/{name}": value for name, value in metrics.items()}
        if trainer.barebones:  # it refuses to log
            return metrics
        if trainer.state.fn == "fit":
            pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)
            for logger in trainer.loggers if stage == "train" else ():
                mark_zero(logger, trainer.global_step - 1)
        else:
            for logger in trainer.loggers:
                logger.log_metrics(values | {"epoch": trainer.current_epoch}, step=trainer.global_step)
        return metrics

    def _compare(self, metrics: dict[str, float], expectation: Expectation) -> None:
        """Add what was to be expected, and say so once if it was much more."""
        if (expected := expectation.hit_rate(metrics, self._tallies.of_training)) is not None:
            metrics["hit_rate_expected"] = expected
        complaint = None if self._complained else expectation.complaint(metrics)
        if complaint is not None:
            self._complained = True
            rank_zero_warn(complaint)

    def _expectation(self, trainer: Trainer, datasets: Sequence[Cached]) -> Expectation | None:
        """What is expected of the training sets; None where one of them is a stream."""
        cached = [dataset for dataset in datasets if isinstance(dataset, CachedDataset)]
        counters = tuple(dataset.counters for dataset in cached if dataset.counters is not None)
        if not datasets or len(counters) < len(datasets):
            return None
        if counters not in self._expected:
            self._expected[counters] = Expectation(trainer, cached)
        return self._expected[counters]


def _is_last(batches: Sequence[int | float], outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> bool:
    """Whether a batch is the last one of the last of these loaders; False where that is not known."""
    return dataloader_idx == len(batches) - 1 and batch_idx + 1 == batches[-1]

"""Logs what the caches of a Trainer call did.

`Tallies` counts and computes; `insight.tallies` describes the protocol between ranks, and why it cannot hang. Each rank
posts its counts of training after the last step of an epoch, because a validation may keep a rank busy before the
epoch's end. If a hook ends an epoch, the last step is unknown. Then counts are posted at the epoch's end, as in the
other stages, before the hook of any other callback runs: the monitor moves to the front of the callbacks.

Samples of the sanity check count in no epoch. Outside of `fit` only the loggers get values, so that `trainer.validate`,
`trainer.test` and `trainer.predict` return the same as without a monitor.

No key is logged twice for a step: live values have their own keys, and only one of several monitors logs. Live values
have Lightning's step numbers, and one row per step: with accumulated gradients several batches are one step. All values
go to the loggers by `log_metrics`, which takes 6 us; `self.log` takes a millisecond per value.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.insight.dashboards import hyperparameters, lay_out, log_hyperparameters
from lightning_stocache.insight.metrics import PREFIXES, Tally
from lightning_stocache.insight.tallies import Tallies, loader_seconds, samples_of
from lightning_stocache.insight.verdict import verdict
from lightning_stocache.loading.dataset import CachedDataset, cached_source
from lightning_stocache.setup.request import check_flag
from lightning_stocache.training.lightning_internals import logged_step, say, warn
from lightning_stocache.training.loaders import running_datasets, running_loaders

__all__ = ["CacheMonitor", "log_epoch", "log_every"]

_DASHBOARDS = ("TensorBoardLogger", "WandbLogger", "MLFlowLogger")


class CacheMonitor(Callback):
    """Logs what the caches of the Trainer's loaders did.

    Epoch values of `fit` are in `trainer.callback_metrics`, so that ModelCheckpoint and EarlyStopping can watch them;
    live values, and those of `trainer.validate`, `trainer.test` and `trainer.predict`, go to the loggers alone. It may
    stand anywhere in the list of callbacks: it moves itself to the front. Keys are `stocache/<metric>` for training and
    `stocache/val/<metric>`, `stocache/test/<metric>`, `stocache/predict/<metric>` for the other stages:

    - `hit_rate`: hits over samples served. A sample is served when the cache layer hands it out, before a batch is
      consumed: workers run ahead by `num_workers * prefetch_factor` batches.
    - `fill_fraction`: share of the slots that are ready; of records, which differ in size, share of the granted bytes.
    - `coverage`: share of the indices that have a slot, and are expected to have room in it, on some node. If it is
      known which indices are drawn, the share of those.
    - `hits`, `misses`, `bypasses`, `fills`: samples in this epoch, over all ranks. Samples that set-up has stored (at
      most 32 samples, and 64 MiB, of each dataset) are no fills of an epoch; epoch one hits them.
    - `bytes_from_cache`, `bytes_from_source`: bytes in this epoch. Without a cache the latter is left out, because the
      size of a sample is unknown then.
    - `source_seconds`, `fill_seconds`, `gather_seconds`: the parts of loading: seconds in the source, seconds of
      storing its samples, and seconds of copying hits out. They are summed over processes, so with workers most of them
      are no waiting time.
    - `memory_bytes`, `budget_bytes`: memory in use and granted, summed over nodes.
    - `data_wait_seconds`, `compute_seconds`: seconds in which an epoch's training waited for data and computed, mean
      over ranks (training only, as the next two): inside of `__next__` of its loaders, and from `on_train_batch_start`
      to `on_train_batch_end`. Workers start before the first wait of an epoch. Both are left out if the class of a
      loader is the user's own.
    - `samples_per_second`: samples served over the seconds of the training loop, all ranks together.
    - `hit_rate_expected`: the expected hit rate of an epoch that draws each index once. If the hit rate is much lower,
      one warning names the likely cause. Left out for other epochs.

    If training reads a `RollingCache`, `stocache/rolling/` has the values of rank zero's node: `resident` (samples),
    `appended_per_second`, `evicted_per_second`, `oldest_seconds` (age of the oldest sample), `times_seen` (mean number
    of times that a sample was served), `renewed` (served samples that were newer than the epoch's order).

    With several nodes `stocache/node<k>/` has `hit_rate`, `fill_fraction` and `memory_bytes` of each node. Live values,
    every `log_every_n_steps` of the Trainer, are `stocache/live/<metric>`: `hit_rate`, `data_wait_seconds` and
    `compute_seconds` of rank zero in the epoch so far, `fill_fraction` and `memory_bytes` of its node.

    When a fit starts, the loggers get the options of the caches, the granted memory and the decisions as
    hyperparameters, so that runs can be grouped by them: `stocache/budget`, `budget_bytes`, `dataset`, `samples`,
    `drawn`, `slots`, `coverage`, `layout`, `store`, `backend`, `nodes`, `ranks`, `name`, `dir`; for validation below
    `stocache/val/`. TensorBoard and W&B are told how to draw the metrics (`insight.dashboards`).

    Args:
        live: log live values.
        per_node: log the values of each node, if there are several.
        hyperparameters: log the granted memory and the decisions as hyperparameters.
        verbose: print a line per epoch, and a verdict on the caches at the end of training.

    Raises:
        ValueError: an option is neither true nor false.

    Example:
        >>> trainer = Trainer(callbacks=[CacheMonitor()], logger=False, enable_checkpointing=False)
    """

    gives_way: ClassVar[bool] = False
    """Whether another monitor beside this one logs in its place."""

    is_guest: ClassVar[bool] = False
    """Whether the application does not know of this callback: its values go to dashboards alone (`log_epoch`)."""

    patience = 60.0
    """The most seconds that an epoch's end waits for the slowest rank's tally."""

    def __init__(
        self, *, live: bool = True, per_node: bool = True, hyperparameters: bool = True, verbose: bool = True
    ) -> None:
        options = {"live": live, "per_node": per_node, "hyperparameters": hyperparameters, "verbose": verbose}
        for name, value in options.items():
            check_flag(name, value)
        self.live, self.per_node, self.hyperparameters, self.verbose = options.values()
        self._monitors = True
        self._tallies = Tallies()
        self._epochs: list[dict[str, float]] = []
        self._looped_at = self._step_began = 0.0  # moments, in seconds
        self._computed = self._looped = self._waited_before = 0.0  # seconds, in the epoch so far
        self._live_every, self._live_step = 0, -1  # steps between two live values; 0: none are logged

    @property
    def monitors(self) -> bool:
        """Whether this callback logs. Of several monitors only one logs: the first that does not give way, no guest."""
        return self._monitors

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        monitors = [callback for callback in callbacks if isinstance(callback, CacheMonitor)]
        self._monitors = self is min(monitors, key=_deference, default=self)
        trainer.callbacks = [self, *(other for other in callbacks if other is not self)]  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, lay out dashboards, and log what was granted."""
        self._epochs.clear()
        self.on_train_epoch_start(trainer, pl_module)  # which Lightning does not call in a resumed epoch
        self._tallies.pools.metrics(trainer.train_dataloader)  # the rates of a rolling cache begin here
        loggers = self._loggers(trainer) if self.monitors and trainer.is_global_zero else []
        self._live_every = log_every(trainer) if self.live and loggers else 0
        loaders = {"train": trainer.train_dataloader, "val": trainer.val_dataloaders}
        nodes = len(datasets[0].group.nodes) if (datasets := running_datasets(trainer, "train")) else 1
        granted = hyperparameters(loaders) if loggers and self.hyperparameters else {}
        for logger in loggers:
            if not self.is_guest:
                lay_out(logger, nodes)
            if granted:
                try:
                    log_hyperparameters(logger, granted)
                except Exception as error:  # MLflow raises one if a resumed run has other values
                    warn(f"{type(logger).__name__} does not take the cache's hyperparameters: {error}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print the verdict on the caches."""
        if self._epochs and self.verbose:
            datasets = running_datasets(trainer, "train")
            cached = [cached_source(dataset) for dataset in datasets if isinstance(dataset, CachedDataset)]
            off = len(cached) == len(datasets) and all(source.opened.request.budget.off for source in cached)
            was_cached = any(epoch["coverage"] for epoch in self._epochs)
            counters = [dataset.counters for dataset in datasets if dataset.counters is not None]
            setup_fills = sum(counted.totals().setup_fills for counted in counters)
            samples = sum(map(samples_of, datasets))
            for sentence in verdict(self._epochs, samples, off=off and not was_cached, setup_fills=setup_fills):
                say(sentence)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._looped_at = time.perf_counter()
        self._computed = self._looped = 0.0
        self._waited_before, _ = loader_seconds(trainer.train_dataloader)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note when a step begins to compute."""
        self._step_began = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log live values, at the Trainer's logging cadence; after the epoch's last step, post its tally."""
        now = time.perf_counter()
        self._computed += now - self._step_began
        self._looped += now - self._looped_at
        self._looped_at = now
        # Steps are numbered as Lightning numbers the values that it logs.
        if self._live_every and (steps := trainer.global_step) % self._live_every == 0 and steps - 1 != self._live_step:
            self._live_step = steps - 1
            if values := self._tallies.live(trainer.train_dataloader, self._loop(trainer)):
                for logger in self._loggers(trainer):
                    logger.log_metrics(values, step=self._live_step)
        if trainer.is_last_batch:
            self._post(trainer, "train")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values."""
        if metrics := self._epoch_end(trainer, "train"):
            self._epochs.append(metrics)
            if self.verbose:
                say(
                    f"epoch {trainer.current_epoch}: hit rate {100 * metrics['hit_rate']:.1f} %, "
                    f"fill {100 * metrics['fill_fraction']:.1f} %, {self._looped:.1f} s"
                )

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the samples of training so far, because validation may read the same dataset."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._tallies.count("train", running_loaders(trainer, "train"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the seconds of the training loop."""
        self._looped_at = time.perf_counter()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of the stage."""
        if trainer.sanity_checking:
            self._tallies.count("sanity check", running_loaders(trainer, "val"))
        else:
            stage: Any = trainer.state.stage
            self._epoch_end(trainer, stage.dataloader_prefix)  # "val" for validation

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the caches of the call."""
        self._tallies, self._live_step = Tallies(), -1

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the call: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def _loop(self, trainer: Trainer) -> Tally:
        """The seconds of this rank's training in the epoch so far."""
        waited = loader_seconds(trainer.train_dataloader)[0] - self._waited_before
        return Tally(wait_seconds=waited, compute_seconds=self._computed, loop_seconds=self._looped, ranks=1)

    def _post(self, trainer: Trainer, stage: str) -> None:
        if self.monitors:
            loop = self._loop(trainer) if stage == "train" else None
            self._tallies.post(stage, running_loaders(trainer, stage), loop)

    def _epoch_end(self, trainer: Trainer, stage: str) -> dict[str, float]:
        """Log and return the metrics of an epoch, by their names without a prefix."""
        self._post(trainer, stage)
        metrics = self._tallies.metrics(stage, running_loaders(trainer, stage), self.patience)
        logged = [name for name in metrics if self.per_node or not name.startswith("node")]
        values = {PREFIXES[stage] + name: metrics[name] for name in logged}
        log_epoch(trainer, values, self._loggers(trainer), is_watched=not self.is_guest)
        return metrics

    def _loggers(self, trainer: Trainer) -> list[Any]:
        """The loggers that get values."""
        return [logger for logger in trainer.loggers if not self.is_guest or _is_dashboard(type(logger))]


def _deference(monitor: CacheMonitor) -> tuple[bool, bool]:
    return monitor.gives_way, monitor.is_guest


def _is_dashboard(kind: type) -> bool:
    """Whether a logger writes for a dashboard, and no file that an application may read."""
    return any(base.__name__ in _DASHBOARDS for base in kind.__mro__)


def log_epoch(
    trainer: Trainer, values: Mapping[str, float], loggers: Iterable[Any], *, is_watched: bool = True
) -> None:
    """Log values at an epoch's end. A barebones Trainer logs nothing.

    Args:
        trainer: the Trainer.
        values: the values by their keys.
        loggers: the loggers that get them.
        is_watched: whether other callbacks of a fit can watch them, in `trainer.callback_metrics`.
    """
    if not values or trainer.barebones:
        return
    if is_watched and trainer.state.fn == "fit":
        device = trainer.strategy.root_device
        watched = {name: torch.tensor(float(value), device=device) for name, value in values.items()}
        trainer.callback_metrics.update(watched)
        trainer.logged_metrics.update(watched)
    for logger in loggers:
        logger.log_metrics({**values, "epoch": trainer.current_epoch}, step=logged_step(trainer))
        logger.save()


def log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; 0: it logs nothing during an epoch."""
    return int(getattr(trainer, "log_every_n_steps", 0))

"""Logs what the caches of a Trainer call did, and shows it in the progress bar.

`Tallies` counts and computes; `insight.tallies` describes the protocol between ranks, and why it cannot hang. Each rank
posts its counts of training after the last step of an epoch, because a validation may keep a rank busy before the
epoch's end. If a hook ends an epoch, the last step is unknown. Then counts are posted at the epoch's end, as in the
other stages, before the hook of any other callback runs: the monitor moves to the front of the callbacks.

**The clock** is read at the begin and the end of each epoch of training and of each validation inside it, once the
device has done what was asked of it (`moment`). A first epoch has begun when Lightning asked for its workers, before
any hook of a callback. Within an epoch nothing waits for the device: live values are the host's.

Samples of the sanity check count in no epoch. Outside of `fit` only the loggers get values, so that `trainer.validate`,
`trainer.test` and `trainer.predict` return the same as without a monitor.

No key is logged twice for a step: live values have their own keys, and only one of several monitors logs. Live values
have the step numbers of Lightning's own, and one row per step: with accumulated gradients several batches are one step.
All values go to the loggers by `log_metrics`, which takes 6 us; `self.log` takes a millisecond per value.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.insight.dashboards import hyperparameters, log_hyperparameters
from lightning_stocache.insight.metrics import PREFIXES, Tally
from lightning_stocache.insight.tallies import Tallies, began_at
from lightning_stocache.insight.verdict import Caches, epoch_line, verdict
from lightning_stocache.loading.loader_tree import cached_in_leaves, is_stream
from lightning_stocache.setup.request import check_flag
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.lightning_internals import (
    logged_step,
    put_first,
    say,
    skip_empty_hooks,
    step_under_way,
    warn,
)
from lightning_stocache.training.loaders import running_loaders
from lightning_stocache.training.progress import Progress, log_every

__all__ = ["CacheMonitor", "log_epoch", "moment"]

_refusing: list[Any] = []  # loggers

_DASHBOARDS = ("TensorBoardLogger", "WandbLogger", "MLFlowLogger")


class CacheMonitor(Callback):
    """Logs what the caches of the Trainer's loaders did. `StochasticCache` brings one, unless there is one already.

    Epoch values of `fit` are in `trainer.callback_metrics`, so that ModelCheckpoint and EarlyStopping can watch them;
    live values, and those of `trainer.validate`, `trainer.test` and `trainer.predict`, go to the loggers alone. It may
    stand anywhere in the list of callbacks: it moves itself to the front. Keys are `stocache/<metric>` for training and
    `stocache/val/<metric>`, `stocache/test/<metric>`, `stocache/predict/<metric>` for the other stages:

    - `hit_rate`: hits over samples served. A sample is served when the trainer starts on its batch. (For a stream that
      is being read, plain DataLoaders over a CachedDataset and classes of your own: when a process has loaded it.)
    - `fill_fraction`: share of the slots that are ready; of records, which differ in size, share of the granted bytes.
    - `coverage`: share of the indices that have a slot, and are expected to have room in it, on some node. If it is
      known which indices are drawn, the share of those.
    - `hits`, `misses`, `bypasses`: samples of this epoch, over all ranks.
    - `fills`: samples stored meanwhile, by any process. Samples that set-up has stored (at most 32 samples, and 64 MiB,
      of each dataset) are no fills of an epoch; the first epoch hits them.
    - `bytes_from_cache`, `bytes_from_source`: bytes read meanwhile, also ahead of the trainer. Without a cache the
      latter is left out, because the size of a sample is unknown then.
    - `source_seconds`, `fill_seconds`, `gather_seconds`: the parts of loading: seconds in the source, seconds of
      storing its samples, and seconds of copying hits out. They are summed over processes, so with workers most of them
      are no waiting time.
    - `memory_bytes`, `budget_bytes`: memory in use and granted, summed over nodes.
    - `epoch_seconds`: seconds of an epoch's training, without the validation inside it, mean over ranks (training only,
      as the next three), until the device has done all of it.
    - `data_wait_seconds`, `compute_seconds`: the seconds of these in which the host waited for its loaders (for a
      batch, and for workers to start), and the rest. A device may be busy while the host waits: `StepTimer` has its
      idle time. Both are left out if the class of a loader is the user's own.
    - `samples_per_second`: samples served per second of the training, all ranks together.

    If training reads a `RollingCache`, `stocache/rolling/` has the values of rank zero's node: `resident` (samples),
    `appended_per_second`, `evicted_per_second`, `oldest_seconds` (age of the oldest sample), `times_seen` (mean number
    of times that a sample was served), `renewed` (served samples that were newer than the epoch's order).

    With several nodes `stocache/node<k>/` has `hit_rate`, `fill_fraction` and `memory_bytes` of each node. Live values,
    every `log_every_n_steps` of the Trainer, are `stocache/live/<metric>`: `hit_rate`, `data_wait_seconds` and
    `compute_seconds` of rank zero in the epoch so far, `fill_fraction` and `memory_bytes` of its node.

    When a fit starts, the loggers get the options of the caches, the granted memory and the decisions as
    hyperparameters, so that runs can be grouped by them: `stocache/budget`, `budget_bytes`, `dataset`, `samples`,
    `drawn`, `slots`, `coverage`, `layout`, `store`, `backend`, `nodes`, `ranks`, `name`, `dir`; for validation below
    `stocache/val/`.

    The Trainer's progress bar (tqdm or Rich) shows two numbers from 0 to 1, as all values in a bar: `cache_fill`, the
    share of this node's slots that are ready, in the first epoch of a fit that begins with slots to fill; else
    `cache_hit`, this rank's hit rate in the epoch so far, and at its end that of all ranks. If an epoch of training
    hits much less than is to be expected, one warning names the likely cause.

    Args:
        live: log live values.
        per_node: log the values of each node, if there are several.
        hyperparameters: log the granted memory and the decisions as hyperparameters.
        progress_bar: show the cache in the Trainer's progress bar.
        verbose: print a line per epoch, and at the end of training what the caches gave.

    Raises:
        ValueError: an option is neither true nor false.

    Example:
        >>> trainer = Trainer(callbacks=[CacheMonitor()], logger=False, enable_checkpointing=False)
    """

    is_guest = False
    """Whether the application does not know of this callback: its values go to dashboards alone (`log_epoch`)."""

    caches: CallCaches | None = None
    """The caches of the call's StochasticCache, which says why a loader is not cached."""

    patience = 60.0
    """The most seconds that an epoch's end waits for the slowest rank's tally."""

    def __init__(
        self,
        *,
        live: bool = True,
        per_node: bool = True,
        hyperparameters: bool = True,
        progress_bar: bool = True,
        verbose: bool = True,
    ) -> None:
        check_flag("live", live)
        check_flag("per_node", per_node)
        check_flag("hyperparameters", hyperparameters)
        check_flag("progress_bar", progress_bar)
        check_flag("verbose", verbose)
        self.live = live
        self.per_node = per_node
        self.hyperparameters = hyperparameters
        self.progress_bar = progress_bar
        self.verbose = verbose
        self._is_first = True  # of several monitors
        self._tallies = Tallies()
        self._progress = Progress()
        self._epochs: list[dict[str, float]] = []
        # Moments, in seconds: of Lightning's hook, the begin of the epoch, of the latest validation, the end of a step
        self._opened_at = self._begun_at = self._paused_at = self._step_ended_at = 0.0
        self._paused = 0.0  # seconds of the validations in this epoch
        self._start_seconds = 0.0  # of waiting for this epoch's first batch
        self._has_steps = False  # whether this epoch has begun a batch
        self._live_every = 0  # steps between two live values; 0: none are logged
        self._live_step = -1  # the latest step with live values
        skip_empty_hooks(self)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Move to the front of the callbacks. Of several monitors the first in the list logs."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        self._is_first = next((other for other in callbacks if isinstance(other, CacheMonitor)), self) is self
        if self._is_first:
            put_first(trainer, self)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and log what was granted."""
        loaders = trainer.train_dataloader
        self._epochs.clear()
        self._tallies.begin("train", loaders)
        self._opened_at = time.perf_counter()
        self._has_steps = False
        self._tallies.pools.metrics(loaders)  # the rates of a rolling cache begin here
        if not self._is_first:
            return
        self._progress.begin(trainer)
        cached = {"train": loaders, "val": trainer.val_dataloaders}
        if self.caches is None and not cached_in_leaves(list(cached.values())):
            say("CacheMonitor: no loader of this fit is cached. Add StochasticCache() to the callbacks")
        loggers = self._loggers(trainer) if trainer.is_global_zero and self._has_news else []
        self._live_every = log_every(trainer) if self.live and loggers else 0
        granted = hyperparameters(cached) if loggers and self.hyperparameters else {}
        for logger in loggers if granted else ():
            try:
                log_hyperparameters(logger, granted)
            except Exception as error:  # MLflow raises one if a resumed run has other values
                warn(f"{type(logger).__name__} does not take the cache's hyperparameters: {error}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Print what the caches gave."""
        if self._epochs and self.verbose and trainer.is_global_zero:
            for sentence in verdict(self._epochs, Caches.behind(trainer.train_dataloader, trainer.val_dataloaders)):
                say(sentence)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an epoch. Lightning does not call this in one that goes on after a resume."""
        self._opened_at = moment(trainer.strategy.root_device)
        self._has_steps = False

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Count the batch. An epoch has begun with its loaders, in the first one before any hook."""
        loaders = trainer.train_dataloader
        self._tallies.start("train", loaders)
        if not self._has_steps:
            self._has_steps = True
            self._paused = 0.0
            self._begun_at = min(self._opened_at, began_at(loaders))
            self._start_seconds = self._tallies.seconds("train", loaders)[0]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log live values, at the Trainer's logging cadence; after the epoch's last step, post its tally."""
        if self.progress_bar and self._is_first:
            self._progress.step(trainer, batch_idx, self._tallies)
        if self._live_every:
            self._log_live(trainer)
        if trainer.is_last_batch:
            self._post(trainer, "train")
        self._step_ended_at = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values."""
        metrics = self._epoch_end(trainer, "train")
        if metrics and self.verbose:
            has_stream = any(map(is_stream, cached_in_leaves(trainer.train_dataloader)))
            say(epoch_line(trainer.current_epoch, metrics, is_stream=has_stream))
        if metrics:
            self._epochs.append(metrics | {"start_seconds": self._start_seconds})
        if self._is_first:
            self._progress.end_epoch(trainer, metrics, shows=self.progress_bar)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin a validation, or the like. It belongs to no training, and may read the same dataset."""
        stage = _stage_of(trainer)
        now = time.perf_counter()
        self._tallies.begin(stage, running_loaders(trainer, stage))
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._tallies.pause("train", running_loaders(trainer, "train"))
            # Since the last step Lightning has asked for the loaders, and started their workers.
            self._paused_at = moment(trainer.strategy.root_device) - (now - self._step_ended_at)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Count the batch."""
        stage = _stage_of(trainer)
        self._tallies.start(stage, running_loaders(trainer, stage), dataloader_idx)

    on_test_batch_start = on_predict_batch_start = on_validation_batch_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the seconds of the training."""
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._tallies.resume("train")
            self._paused += moment(trainer.strategy.root_device) - self._paused_at

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the values of the stage."""
        if trainer.sanity_checking:
            self._tallies.count("sanity check", running_loaders(trainer, "val"))
        else:
            self._epoch_end(trainer, _stage_of(trainer))

    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the caches of the call."""
        self._tallies.end()
        self._tallies = Tallies()
        self._live_step = -1
        self._progress = Progress()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the call: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def _loop(self, trainer: Trainer, now: float) -> Tally:
        """The seconds of this rank's training in the epoch so far."""
        waited, _ = self._tallies.seconds("train", trainer.train_dataloader)
        return Tally(wait_seconds=waited, loop_seconds=now - self._begun_at - self._paused, ranks=1)

    def _log_live(self, trainer: Trainer) -> None:
        """Log live values once in a step in which Lightning logs its own."""
        step = step_under_way(trainer)
        if step is None or (step + 1) % self._live_every or step == self._live_step:
            return
        self._live_step = step
        values = self._tallies.live(trainer.train_dataloader, self._loop(trainer, time.perf_counter()))
        if values:
            _send(self._loggers(trainer), values, step)

    def _post(self, trainer: Trainer, stage: str) -> None:
        if self._is_first and not self._tallies.is_posted(stage):
            loop = self._loop(trainer, moment(trainer.strategy.root_device)) if stage == "train" else None
            self._tallies.post(stage, running_loaders(trainer, stage), loop)

    def _epoch_end(self, trainer: Trainer, stage: str) -> dict[str, float]:
        """Log and return the metrics of an epoch, by their names without a prefix."""
        self._post(trainer, stage)
        metrics = self._tallies.metrics(stage, running_loaders(trainer, stage), self.patience)
        if not self._has_news:
            return {}
        logged = [name for name in metrics if self.per_node or not name.startswith("node")]
        values = {PREFIXES[stage] + name: metrics[name] for name in logged}
        log_epoch(trainer, values, self._loggers(trainer), is_watched=not self.is_guest)
        return metrics

    @property
    def _has_news(self) -> bool:
        return not self.is_guest or (self.caches is not None and self.caches.has_slots)

    def _loggers(self, trainer: Trainer) -> list[Any]:
        """The loggers that get values."""
        return [logger for logger in trainer.loggers if not self.is_guest or _is_dashboard(type(logger))]


def moment(device: torch.device) -> float:
    """Seconds on the clock, once a device has done what was asked of it."""
    synchronize = getattr(getattr(torch, device.type, None), "synchronize", None)
    if device.type != "cpu" and synchronize is not None:
        synchronize()
    return time.perf_counter()


def _stage_of(trainer: Any) -> str:
    """The stage that runs beside training or by itself: "val", also in the sanity check, "test" or "predict"."""
    return "val" if trainer.sanity_checking else str(trainer.state.stage.dataloader_prefix)


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
    loggers = list(loggers)
    _send(loggers, {**values, "epoch": trainer.current_epoch}, logged_step(trainer))
    for logger in loggers:
        logger.save()


def _send(loggers: Iterable[Any], values: Mapping[str, float], step: int) -> None:
    """Send values to loggers. One that refuses them, because it knows its keys, gets one warning and no more values."""
    for logger in loggers:
        if any(logger is each for each in _refusing):
            continue
        try:
            logger.log_metrics(values, step=step)
        except Exception as error:  # of the user's class
            _refusing.append(logger)
            warn(f"{type(logger).__name__} does not take the cache's values: {type(error).__name__}: {error}")

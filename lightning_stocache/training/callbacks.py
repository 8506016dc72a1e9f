"""The second door, and what shows that it works.

`CacheMonitor` logs the metrics, `FillProgress` shows the first epoch's fill in the Trainer's own progress bar, and
`StochasticCache` caches the loaders of any Trainer call, of a DataModule, of a module's hooks or given to `fit`,
without a line of theirs being changed. All three find what they look at by walking the Trainer's loaders.

The counts of an epoch are the difference between two of its ends: workers run ahead of the step, so an epoch's first
samples are served before `on_train_epoch_start`. One exchange per epoch sums them over the ranks, on a private group.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info

from lightning_stocache.cache.counters import Counts
from lightning_stocache.insight.metrics import Tally, rates, summarise
from lightning_stocache.loading.allocation import BackendChoice
from lightning_stocache.loading.dataset import CachedDataset, OnError
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.training.caches import CallCaches, LoaderTap
from lightning_stocache.training.loaders import cached_datasets
from lightning_stocache.training.options import CacheOptions

__all__ = ["CacheMonitor", "FillProgress", "StochasticCache"]


class CacheMonitor(Callback):
    """Logs what the caches of the Trainer's loaders did.

    Epoch values go through `log_dict`, so that ModelCheckpoint and EarlyStopping can watch them; live values of this
    node go to the loggers at the Trainer's logging cadence. Keys are `stocache/<metric>` for training, and
    `stocache/val/<metric>`, `stocache/test/<metric>` for the other stages:

    - `hit_rate`: hits over samples served. Served means handed out by the cache layer, consumed or not: workers run
      ahead by `num_workers * prefetch_factor` batches.
    - `fill_fraction`: share of the slots that are ready; `coverage`: share of the indices that have a slot on some
      node.
    - `hits`, `misses`, `bypasses`, `fills`: samples in this epoch, over all ranks.
    - `bytes_from_cache`, `bytes_from_source`: bytes in this epoch; `source_seconds`: spent in the source, summed over
      processes.
    - `memory_bytes`, `budget_bytes`: memory in use and granted, summed over nodes.

    With several nodes also `stocache/node<k>/` with `hit_rate`, `fill_fraction` and `memory_bytes`.

    Example:
        >>> trainer = Trainer(callbacks=[CacheMonitor()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._seen: dict[int, Counts] = {}
        self._started = self._ended = 0.0
        self._logged_step = -1

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the epoch's clock."""
        self._started = self._ended = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Log live values of this node, at the Trainer's logging cadence."""
        self._ended = time.perf_counter()
        step = trainer.global_step
        if not trainer.loggers or step == self._logged_step or step % _log_every(trainer):
            return
        self._logged_step = step
        tally = self._tally(_datasets(trainer, "train"), live=True)
        if tally is not None:
            live = rates(tally)
            values = {f"stocache/{name}": live[name] for name in ("hit_rate", "fill_fraction", "memory_bytes")}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=step)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values. Collective."""
        metrics = self._epoch_end(trainer, pl_module, "train", "stocache")
        if metrics:
            rank_zero_info(
                f"epoch {trainer.current_epoch}: hit rate {100 * metrics['hit_rate']:.1f} %, "
                f"fill {100 * metrics['fill_fraction']:.1f} %, {self._ended - self._started:.1f} s"
            )

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the validation epoch's values. Collective."""
        self._epoch_end(trainer, pl_module, "val", "stocache/val")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the test epoch's values. Collective."""
        self._epoch_end(trainer, pl_module, "test", "stocache/test")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the caches of the call."""
        self._seen.clear()

    def _epoch_end(self, trainer: Trainer, pl_module: LightningModule, stage: str, prefix: str) -> dict[str, float]:
        datasets = _datasets(trainer, stage)
        tally = self._tally(datasets)
        if tally is None or trainer.sanity_checking:
            return {}
        metrics = summarise(datasets[0].group.exchange(tally)) | {"coverage": _coverage(datasets)}
        pl_module.log_dict({f"{prefix}/{name}": value for name, value in metrics.items()}, on_step=False, on_epoch=True)
        return metrics

    def _tally(self, datasets: list[CachedDataset], *, live: bool = False) -> Tally | None:
        """What this rank brings: its own counts since the last epoch's end; live, those of the whole node."""
        tally = None
        for dataset in datasets:
            group, counters, cache = dataset.group, dataset.counters, dataset.cache
            if counters is None:
                continue
            now = counters.totals(group.rank)
            own = Tally(group.node, now - self._seen.get(id(counters), dataset.baseline))
            if not live:
                self._seen[id(counters)] = now
            if cache is not None and (group.is_leader or live):
                own += Tally(group.node, Counts(), len(cache), cache.filled, cache.memory_bytes, dataset.budget_bytes)
            tally = own if tally is None else tally + own
        return tally


class FillProgress(Callback):
    """Shows the fill of the cache in the Trainer's progress bar (tqdm or Rich) as `cache`, until it is full.

    When it is, one line says what is cached and how many seconds of loading will not be repeated.
    """

    def __init__(self) -> None:
        self._full = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin with the fill that the call begins with: a cache that was kept is full already."""
        self._full = _filled(_datasets(trainer, "train"))[0] >= 1

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the fill of this node, at the Trainer's logging cadence, but at least twenty times an epoch."""
        if not self._full and batch_idx % min(_log_every(trainer), int(trainer.num_training_batches) // 20 + 1) == 0:
            fill, _, slots = _filled(_datasets(trainer, "train"))
            if slots:
                pl_module.log("cache", fill, prog_bar=True, logger=False, rank_zero_only=True, batch_size=1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so when the cache is full."""
        datasets = _datasets(trainer, "train")
        fill, filled, slots = _filled(datasets)
        if self._full or not slots or fill < 1:
            return
        self._full = True
        counters = [dataset.counters for dataset in datasets if dataset.counters is not None]
        seconds = sum(one.totals().source_ns for one in counters) / 1e9
        memory = sum(dataset.cache.memory_bytes for dataset in datasets if dataset.cache is not None)
        nodes = len(datasets[0].group.nodes)
        where = "this node" if nodes == 1 else f"each of {nodes} nodes"
        rank_zero_info(
            f"the cache is full: {filled:,} of {sum(map(len, datasets)):,} samples, {format_bytes(memory)} on {where}; "
            f"{seconds:.1f} s of loading will not be repeated"
        )


class StochasticCache(CacheMonitor):
    """Caches every loader of a Trainer call, and logs what it gives as CacheMonitor does.

    Nothing else changes: it stands before the Trainer's loaders, wherever they come from, and gives the same loaders
    with cached datasets. A dataset should be made once: one that is made anew whenever a loader hook runs starts with
    an empty cache each time.

    Args:
        budget: memory per node, shared by the datasets of a Trainer call by their size; see `CachedDataset`.
        stage_budgets: a budget of its own for some stages, for instance {"val": "1GiB"} or {"test": 0}.
        allow_random: cache a random dataset as it is, with its first draw frozen.
        backend: where the memory lies, see `CachedDataset`.
        on_error: "raise" or "disable" when the memory cannot be had.
        keep_cache: keep the caches between Trainer calls of this process, until `close`.

    Raises:
        ValueError: an option that cannot be read.
        TypeError: (in the Trainer) a loader that cannot be made anew around a cached dataset; it says what to do.

    Example:
        >>> trainer = Trainer(callbacks=[StochasticCache(budget="1MiB")], logger=False, enable_checkpointing=False)
    """

    def __init__(
        self,
        budget: int | float | str = "auto",
        *,
        stage_budgets: Mapping[str, int | float | str] | None = None,
        allow_random: bool = False,
        backend: BackendChoice = "auto",
        on_error: OnError = "raise",
        keep_cache: bool = False,
    ) -> None:
        super().__init__()
        self.caches = CallCaches(CacheOptions(budget, stage_budgets, allow_random, backend, on_error, keep_cache))
        self._monitors = True

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Stand before the loaders of the call."""
        self._monitors = not any(type(other) is CacheMonitor for other in trainer.callbacks)  # type: ignore[attr-defined]
        sources = _data_sources(trainer, stage)
        tap = LoaderTap(self.caches, {name: source.dataloader for name, source in sources.items()})
        for name, source in sources.items():
            source.dataloader = partial(tap, name)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the caches of the call, unless they are kept."""
        super().teardown(trainer, pl_module, stage)
        self._release(trainer)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Close the caches of the call, unless they are kept; Lightning skips `teardown` after an exception."""
        self._release(trainer)

    def close(self) -> None:
        """Close all caches, kept ones too."""
        self.caches.close()

    def _epoch_end(self, trainer: Trainer, pl_module: LightningModule, stage: str, prefix: str) -> dict[str, float]:
        return super()._epoch_end(trainer, pl_module, stage, prefix) if self._monitors else {}

    def _release(self, trainer: Trainer) -> None:
        for loop in _loops(trainer).values():
            vars(loop._data_source).pop("dataloader", None)
        self.caches.end_call()


def _log_every(trainer: Trainer) -> int:
    """The Trainer's logging cadence in steps; a barebones Trainer has 0, and no loggers."""
    return int(getattr(trainer, "log_every_n_steps", 0)) or 1


def _loops(trainer: Trainer) -> dict[str, Any]:
    """The loop that reads each stage's loaders; what Lightning calls a data source lies on it."""
    return {
        "train": trainer.fit_loop,
        "val": trainer.fit_loop.epoch_loop.val_loop,
        "validate": trainer.validate_loop,
        "test": trainer.test_loop,
        "predict": trainer.predict_loop,
    }


def _data_sources(trainer: Trainer, stage: str) -> dict[str, Any]:
    """Lightning's data sources for a call.

    They are private, but the same from Lightning 2.1 to 2.6, and there is no other place through which loaders from a
    DataModule, a module and from `fit`'s arguments all come.
    """
    loops = _loops(trainer)
    if stage == "fit":
        names = {"train": "train", "val": "val"} if trainer.enable_validation else {"train": "train"}
    else:
        names = {"val": "validate"} if stage == "validate" else {stage: stage}
    return {name: loops[loop]._data_source for name, loop in names.items()}


def _datasets(trainer: Trainer, stage: str) -> list[CachedDataset]:
    """The cached datasets that the loaders of a running stage read."""
    return cached_datasets(getattr(trainer, "train_dataloader" if stage == "train" else f"{stage}_dataloaders"))


def _coverage(datasets: list[CachedDataset]) -> float:
    """Share of the indices of all these datasets that have a slot on some node."""
    covered = sum(len(one) * one.ring.coverage for one in datasets if one.ring is not None)
    return covered / sum(map(len, datasets))


def _filled(datasets: list[CachedDataset]) -> tuple[float, int, int]:
    """Fill fraction, ready slots and slots of these datasets on this node."""
    caches = [dataset.cache for dataset in datasets if dataset.cache is not None]
    filled, slots = sum(cache.filled for cache in caches), sum(map(len, caches))
    return filled / max(slots, 1), filled, slots

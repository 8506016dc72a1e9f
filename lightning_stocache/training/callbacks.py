"""The first door, and the cache in the progress bar.

`StochasticCache` caches the loaders of any Trainer call (of a DataModule, of a module's hooks or given to `fit`), and
monitors them. `FillProgress` shows fill and hit rate in the Trainer's own progress bar, with any door; StochasticCache
does so by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.cache.counters import Counters, Counts
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.insight.tallies import loader_seconds, samples_of
from lightning_stocache.node.budget import format_bytes
from lightning_stocache.setup.request import Form, check_count, check_flag
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.lightning_internals import data_sources, say, warn
from lightning_stocache.training.loaders import running_datasets
from lightning_stocache.training.monitor import CacheMonitor, log_every
from lightning_stocache.training.options import CacheOptions, with_options
from lightning_stocache.training.resume import ResumePoint

__all__ = ["FillProgress", "StochasticCache"]


class FillProgress(Callback):
    """Shows the cache in the Trainer's progress bar (tqdm or Rich): `cache_fill` in the first epoch, then `cache_hit`.

    Both are numbers from 0 to 1, as all values in a bar. The fill is the share of this node's slots that are ready. The
    hit rate is of this node in the epoch so far; if all slots are ready when training starts, the first epoch shows it,
    too. When the cache is full, one line says what is cached and how many seconds of waiting for data will not be
    repeated.

    `StochasticCache` needs no FillProgress beside it: it shows the same.

    Args:
        name: the beginning of the names in the bar.
        every_n_steps: steps between two updates. With None the Trainer's logging cadence, but at least ten updates per
            epoch.
        verbose: print the line when the cache is full.

    Raises:
        ValueError: the name is empty, the number of steps less than one, or `verbose` neither true nor false.
    """

    def __init__(self, name: str = "cache", *, every_n_steps: int | None = None, verbose: bool = True) -> None:
        if not isinstance(name, str) or not name:
            raise ValueError(f"name must be a string that is not empty, got {name!r}")
        if every_n_steps is not None:
            check_count("every_n_steps", every_n_steps, 1)
        check_flag("verbose", verbose)
        self.name, self.every_n_steps, self.verbose = name, every_n_steps, verbose
        self._full = False
        self._cadence = 1
        self._waited_before = self._waited = 0.0  # seconds: before this fit, and in its whole epochs
        self._first_epoch, self._counts_before = True, dict[Counters, Counts]()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note whether the cache is full already: a kept cache may be."""
        self._full = _are_full(_training_caches(trainer))
        self._first_epoch, self._counts_before = True, _training_counts(trainer)
        self._waited_before, _ = loader_seconds(trainer.train_dataloader)
        self._waited = 0.0
        tenth = int(min(trainer.num_training_batches, 10**6)) // 10 + 1  # inf if the loader has no length
        # Every training batch counts as a step here, also where gradients are accumulated.
        self._cadence = self.every_n_steps or min(log_every(trainer) or tenth, tenth)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Show the fill or the hit rate of this node. A stream is known to be full in a later epoch's first batch."""
        if batch_idx % self._cadence == 0:
            self._show(trainer)
        if batch_idx == 0 and not self._first_epoch:  # workers may fill a cache during the very first batch
            self._say_when_full(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Show the value at the epoch's end, and say when the cache is full."""
        self._show(trainer)
        self._first_epoch, self._counts_before = False, _training_counts(trainer)
        waited, _ = loader_seconds(trainer.train_dataloader)  # NaN if it is not known
        self._waited = waited - self._waited_before
        self._say_when_full(trainer)

    def _show(self, trainer: Trainer) -> None:
        caches = _training_caches(trainer)
        slots = sum(map(len, caches))
        if not slots or trainer.barebones:  # it has no bar
            return
        bar: dict[str, float] = trainer.progress_bar_metrics  # `log` takes 300 us
        if self._first_epoch and not self._full:
            fill = sum(cache.fill_fraction * len(cache) for cache in caches) / slots
            bar[f"{self.name}_fill"] = fill
        else:
            before, now = self._counts_before, _training_counts(trainer)  # a dataset that has grown has new counters
            counts = sum((now[of] - before.get(of, Counts()) for of in now), Counts())
            bar.pop(f"{self.name}_fill", None)
            bar[f"{self.name}_hit"] = counts.hits / max(counts.served, 1)

    def _say_when_full(self, trainer: Trainer) -> None:
        datasets, caches = running_datasets(trainer, "train"), _training_caches(trainer)
        if self._full or not _are_full(caches):
            return
        self._full = True
        if not self.verbose:
            return
        filled = sum(cache.filled for cache in caches)
        counts = sum(_training_counts(trainer).values(), Counts())
        share = min(filled / max(counts.misses + counts.bypasses, 1), 1.0)  # of what was loaded until now
        saved = share * self._waited
        after = f"; {saved:.1f} s of waiting for data will not be repeated" if saved > 0 else ""
        if any(isinstance(cache, RollingStore) for cache in caches):
            after = "; from now on new samples replace the oldest"
        memory, samples = sum(cache.memory_bytes for cache in caches), sum(map(samples_of, datasets))
        nodes = len(datasets[0].group.nodes)
        where = "this node" if nodes == 1 else f"each of {nodes} nodes"
        say(f"the cache is full: {filled:,} of {samples:,} samples, {format_bytes(memory)} on {where}{after}")


@with_options
class StochasticCache(CacheMonitor):
    """Caches every loader of a Trainer call, logs its metrics as CacheMonitor does, and shows it in the progress bar.

    Nothing else changes: the Trainer gets the same loaders with cached datasets; hooks run when Lightning runs them.
    A loader that cannot be cached is used as it is, with one warning. Make each dataset once: a new dataset in each run
    of a loader hook is compared each time, and starts with an empty cache if its samples differ or are random.

    Datasets of loaders that are given to `fit` share the budget by their size. If loaders come from hooks, Lightning's
    sanity check asks for the val set first, which takes at most half. Without a sanity check the val set gets what the
    training set leaves. `stage_budgets` changes that.

    Args:
        options: those of `CacheOptions`, each an argument.
        live: log live values. This and the next two are options of `CacheMonitor`. A CacheMonitor in the list of
            callbacks logs in place of this callback, by its own options.
        hyperparameters: log the granted memory and the decisions as hyperparameters.
        verbose: print a line per epoch, one when the cache is full, and a verdict on the caches at the end of training.

    Raises:
        ValueError: an option cannot be read.
        TypeError: (in the Trainer, `strict=True`) a loader cannot be cached; the message says what to do.
        ValueError: (in the Trainer, `strict=True`) a dataset is empty, or is random and cannot be split.

    Example:
        >>> trainer = Trainer(callbacks=[StochasticCache(budget="1MiB")], logger=False, enable_checkpointing=False)
    """

    gives_way: ClassVar[bool] = True  # to a CacheMonitor
    resume_point: ClassVar[type[ResumePoint]] = ResumePoint

    def __init__(
        self,
        budget: int | float | str = "auto",
        *,
        stage_budgets: Mapping[str, int | float | str | None] | None = None,
        allow_random: bool = False,
        keep_cache: bool = False,
        name: str | None = None,
        fingerprint: str = "",
        strict: bool = False,
        store: Form = "decoded",
        prefill: bool = False,
        dir: str | None = None,
        streams: bool = False,
        live: bool = True,
        hyperparameters: bool = True,
        verbose: bool = True,
    ) -> None:
        options = CacheOptions.among(locals())
        super().__init__(live=live, hyperparameters=hyperparameters, verbose=verbose)
        self.caches = CallCaches(options)
        self._call: CallLoaders | None = None
        self._progress: FillProgress | None = None  # not a callback of the Trainer: each costs 30 us a step
        self._sources: list[Any] = []  # Lightning's data sources, whose loaders are replaced

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's data sources, so that the loaders of the call are cached."""
        self.resume_point.of(trainer)  # before a checkpoint is loaded
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        caches = [callback for callback in callbacks if isinstance(callback, StochasticCache)]
        used = min(caches, key=lambda cache: cache.is_guest, default=self)
        if used is not self:
            self._monitors = False
            if not self.is_guest:
                warn("there is a StochasticCache before this one in the list of callbacks: this one does nothing")
            return
        super().setup(trainer, pl_module, stage)  # after the check above: this call moves the callback to the front
        has_progress = any(isinstance(other, FillProgress) for other in callbacks)
        self._progress = None if has_progress else FillProgress(verbose=self.verbose)
        sources = {  # without those of a DataModule that caches its own loaders
            name: source
            for name, source in data_sources(trainer, stage).items()
            if not isinstance(getattr(source.instance, "caches", None), CallCaches)
        }
        getters = {name: source.dataloader for name, source in sources.items()}
        at_hand = {name: source.instance for name, source in sources.items() if not source.is_module()}
        self._call = CallLoaders(self.caches, getters, trainer, at_hand)
        self._sources = list(sources.values())
        for name, source in sources.items():
            source.dataloader = partial(self._call, name)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and log what was granted."""
        super().on_train_start(trainer, pl_module)
        if self._progress is not None:
            self._progress.on_train_start(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log live values, and show the cache in the progress bar."""
        super().on_train_batch_end(trainer, pl_module)
        if self._progress is not None:
            self._progress.on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's values, and say when the cache is full."""
        super().on_train_epoch_end(trainer, pl_module)
        if self._progress is not None:
            self._progress.on_train_epoch_end(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the caches of the call, unless they are kept."""
        super().teardown(trainer, pl_module, stage)
        for source in self._sources:
            vars(source).pop("dataloader", None)
        if self._call is not None:
            self._call.end()
        self._sources, self._call = [], None
        self.caches.end_call()

    @property
    def caches_loaders(self) -> bool:
        """Whether this callback caches loaders of the call: no other one does, nor a DataModule."""
        return bool(self._sources)

    def cache_state(self) -> list[dict[str, Any]]:
        """The open caches on this node, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, also kept ones."""
        self.caches.close()


def _training_caches(trainer: Trainer) -> list[Any]:
    """The caches of the training loaders on this node."""
    return [dataset.cache for dataset in running_datasets(trainer, "train") if dataset.cache is not None]


def _training_counts(trainer: Trainer) -> dict[Counters, Counts]:
    """The counts of each training set on this node, by its counters."""
    counters = [dataset.counters for dataset in running_datasets(trainer, "train") if dataset.counters is not None]
    return {of: of.totals() for of in counters}


def _are_full(caches: list[Any]) -> bool:
    """Whether no further sample of the usual size has room."""
    return any(map(len, caches)) and all(cache.filled >= cache.capacity for cache in caches)

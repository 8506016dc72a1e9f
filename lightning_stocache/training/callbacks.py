"""`StochasticCache` caches the loaders of any Trainer call.

They may be those of a DataModule, of a module's hooks, or given to `fit`. It brings the callbacks that monitor them and
keep their position.

Lightning runs the hook of each callback in the list as it was when the hook began. So a monitor that is added in
`setup` is set up by hand, and a list with another monitor in it replaces the Trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.setup.options import STAGES, Budgets, CacheOptions, known_options
from lightning_stocache.setup.request import Form, check_flag
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.lightning_internals import data_sources, put_first, skip_empty_hooks, warn
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.resume import ResumePoint

__all__ = ["StochasticCache", "SwitchedCache"]


class _Call(NamedTuple):
    """The changes of a StochasticCache for one call of a Trainer: loaders, their sources in Lightning, a monitor."""

    loaders: CallLoaders
    sources: list[Any]
    monitor: CacheMonitor | None


class StochasticCache(Callback):
    """Caches every loader of a Trainer call, logs what the cache did, and shows it in the progress bar.

    Logging is done by a `CacheMonitor`: the first in the Trainer's list, with options of its own, or one that this
    callback brings for the call.

    Nothing else changes: the Trainer gets the same loaders with cached datasets; hooks run when Lightning runs them.
    A loader that cannot be cached is used as it is, with one warning. Make each dataset once: a new dataset in each run
    of a loader hook is compared each time, and starts with an empty cache if its samples differ or are random.

    The arguments are the options of `CacheOptions`, and

    Args:
        verbose: print a line per cache and per epoch, and at the end of training what the caches gave.

    Raises:
        ValueError: an option cannot be read.
        TypeError: (in the Trainer, `strict=True`) a loader cannot be cached; the message says what to do.
        ValueError: (in the Trainer, `strict=True`) a dataset is empty, or is random and cannot be split.

    Example:
        >>> trainer = Trainer(callbacks=[StochasticCache(budget="1MiB")], logger=False, enable_checkpointing=False)
    """

    is_guest: ClassVar[bool] = False
    """Whether another StochasticCache in the list takes its place."""

    is_brought = False
    """Whether a DataModule brings it to the callbacks of each call; it leaves them when the call ends."""

    monitor_class: ClassVar[type[CacheMonitor]] = CacheMonitor
    resume_point: ClassVar[type[ResumePoint]] = ResumePoint

    def __init__(
        self,
        budget: Budgets = "auto",
        *,
        freeze_random: bool = False,
        keep_cache: bool = False,
        name: str | None = None,
        fingerprint: str = "",
        strict: bool = False,
        store: Form = "decoded",
        prefill: bool = False,
        dir: str | None = None,
        streams: bool = False,
        verbose: bool = True,
    ) -> None:
        check_flag("verbose", verbose)
        options = CacheOptions(
            budget,
            freeze_random=freeze_random,
            keep_cache=keep_cache,
            name=name,
            fingerprint=fingerprint,
            strict=strict,
            store=store,
            prefill=prefill,
            dir=dir,
            streams=streams,
        )
        self.caches = CallCaches(options)
        self.caches.verbose = verbose
        self.verbose = verbose
        self._calls: dict[int, _Call] = {}  # by the Trainer's id: a fit may validate by another Trainer
        skip_empty_hooks(self)

    __init__.__doc__ = CacheOptions.__doc__  # for `help`, and the `--help` of LightningCLI

    @classmethod
    def from_options(cls, cache: Mapping[str, Any] | None = None, **arguments: Any) -> Self:
        """Create one from the `cache` node of a Hydra config. A key that is no option is a ValueError."""
        return cls(**known_options(cache), **arguments)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's data sources, so that the loaders of the call are cached, and see to a monitor."""
        point = self.resume_point.for_trainer(trainer)  # before a checkpoint is loaded
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        caches = [callback for callback in callbacks if isinstance(callback, StochasticCache)]
        used = min(caches, key=lambda cache: cache.is_guest, default=self)
        if used is not self:
            if not self.is_guest:
                where = "of the DataModule" if used.is_brought else "before this one in the list"
                warn(f"there is a StochasticCache {where}: this one does nothing")
            return
        point.leaves_ends = self.is_guest
        sources = data_sources(trainer, stage)
        getters = {name: source.dataloader for name, source in sources.items()}
        at_hand = {name: source.instance for name, source in sources.items() if not source.is_module()}
        for name, source in sources.items():
            if hasattr(source.instance, "loaders_at_hand"):  # a StocacheDataModule
                at_hand |= source.instance.loaders_at_hand(name)
        loaders = CallLoaders(self.caches, getters, trainer, at_hand)
        monitor = None
        if not any(isinstance(callback, CacheMonitor) for callback in callbacks):
            monitor = self.monitor_class(hyperparameters=not self.is_guest, verbose=self.verbose)
            monitor.is_guest = self.is_guest
        self._calls[id(trainer)] = _Call(loaders, list(sources.values()), monitor)
        for name, source in sources.items():
            source.dataloader = partial(loaders, name)
        put_first(trainer, self)  # a callback that raises in `on_exception` ends those behind it
        if monitor is not None:
            monitor.setup(trainer, pl_module, stage)  # it joins the callbacks, as the first
        self._tell_monitors(trainer, self.caches)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the caches of the call, unless they are kept, and take the monitor out."""
        call = self._calls.pop(id(trainer), None)
        leaving: list[Callback | None] = [self] if self.is_brought else []
        if call is not None:
            for source in call.sources:
                vars(source).pop("dataloader", None)
            call.loaders.end()
            self._tell_monitors(trainer, None)
            leaving.append(call.monitor)
        if not self._calls:
            self.caches.end_call()
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        trainer.callbacks = [  # type: ignore[attr-defined]
            callback for callback in callbacks if all(callback is not other for other in leaving)
        ]

    def bring(self, trainer: Any) -> None:
        """Join the callbacks of a Trainer for one call, in front. A DataModule that is to be cached calls it."""
        put_first(trainer, self)
        self.is_brought = True

    def _tell_monitors(self, trainer: Any, caches: CallCaches | None) -> None:
        for callback in trainer.callbacks:
            if isinstance(callback, CacheMonitor):
                callback.caches = caches

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the call: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_calls": {}}

    def invalidate(self, indices: Sequence[int] | None = None, *, stage: str = "train") -> None:
        """Say that samples of a stage's datasets have changed; see `CachedDataset.invalidate`.

        Args:
            indices: which samples; by default all.
            stage: `train`, `val`, `test` or `predict`.
        """
        if stage not in STAGES:
            raise ValueError(f"stage must be one of {', '.join(STAGES)}, got {stage!r}")
        for dataset in self.caches.datasets_of(stage):
            dataset.invalidate(indices)

    def cache_state(self) -> list[dict[str, Any]]:
        """The open caches on this node, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, also kept ones."""
        self.caches.close()


class SwitchedCache(StochasticCache):
    """The StochasticCache that `STOCACHE=...` adds to every Trainer of an application (`lightning_stocache.switch`).

    The application does not know of it. So it does nothing where the application has a cache of its own, and it leaves
    alone what the application reads or ships: its values go to TensorBoard, W&B and MLflow, not into
    `trainer.callback_metrics` or other loggers; no hyperparameters are logged; a checkpoint that is saved between two
    epochs has no state of it.
    """

    is_guest: ClassVar[bool] = True

"""The first door: `StochasticCache` caches the loaders of any Trainer call.

They may be those of a DataModule, of a module's hooks, or given to `fit`. It brings the callbacks that monitor them and
keep their position.

Lightning runs the hook of each callback in the list as it was when the hook began. So a monitor that is added in
`setup` is set up by hand, and a list with another monitor in it replaces the Trainer's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

from lightning.pytorch import Callback, LightningModule, Trainer

from lightning_stocache.setup.request import Form
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.lightning_internals import data_sources, warn
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.options import CacheOptions, with_options
from lightning_stocache.training.resume import ResumePoint

__all__ = ["StochasticCache"]


@dataclass(eq=False)
class _Call:
    """What a StochasticCache has changed for one call of a Trainer.

    Args:
        monitor: the monitor that it has brought.
        loaders: the loaders of the call.
        sources: Lightning's data sources, whose loaders are replaced.
        is_brought: whether a DataModule has brought the StochasticCache itself.
    """

    monitor: CacheMonitor | None = None
    loaders: CallLoaders | None = None
    sources: list[Any] = field(default_factory=list)
    is_brought: bool = False


@with_options
class StochasticCache(Callback):
    """Caches every loader of a Trainer call, logs what the cache did, and shows it in the progress bar.

    Logging is done by a `CacheMonitor`: the first in the Trainer's list, with options of its own, or one that this
    callback brings for the call.

    Nothing else changes: the Trainer gets the same loaders with cached datasets; hooks run when Lightning runs them.
    A loader that cannot be cached is used as it is, with one warning. Make each dataset once: a new dataset in each run
    of a loader hook is compared each time, and starts with an empty cache if its samples differ or are random.

    Datasets of loaders that are given to `fit` share the budget by their size. If loaders come from hooks, Lightning's
    sanity check asks for the val set first, which takes at most half. Without a sanity check the val set gets what the
    training set leaves. `stage_budgets` changes that.

    Args:
        options: those of `CacheOptions`, each an argument.
        live: log live values. This and the next two are options of the monitor that this callback brings.
        hyperparameters: log the granted memory and the decisions as hyperparameters.
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

    monitor_class: ClassVar[type[CacheMonitor]] = CacheMonitor
    resume_point: ClassVar[type[ResumePoint]] = ResumePoint

    def __init__(
        self,
        budget: int | float | str = "auto",
        *,
        stage_budgets: Mapping[str, int | float | str | None] | None = None,
        freeze_random: bool = False,
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
        self.caches = CallCaches(CacheOptions.among(locals()))
        self.live, self.hyperparameters, self.verbose = live, hyperparameters, verbose
        self.caches.verbose = verbose
        self._new_monitor()  # checks the options
        self._calls: dict[int, _Call] = {}  # by the Trainer's id: a fit may validate by another Trainer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace Lightning's data sources, so that the loaders of the call are cached, and see to a monitor."""
        self.resume_point.of(trainer)  # before a checkpoint is loaded
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        caches = [callback for callback in callbacks if isinstance(callback, StochasticCache)]
        used = min(caches, key=lambda cache: cache.is_guest, default=self)
        if used is not self:
            if not self.is_guest:
                where = "of the DataModule" if used.is_brought_to(trainer) else "before this one in the list"
                warn(f"there is a StochasticCache {where}: this one does nothing")
            return
        sources = data_sources(trainer, stage)
        getters = {name: source.dataloader for name, source in sources.items()}
        at_hand = {name: source.instance for name, source in sources.items() if not source.is_module()}
        for name, source in sources.items():
            if hasattr(source.instance, "loaders_at_hand"):  # a StocacheDataModule
                at_hand |= source.instance.loaders_at_hand(name)
        call = self._call_of(trainer)
        call.loaders, call.sources = CallLoaders(self.caches, getters, trainer, at_hand), list(sources.values())
        for name, source in sources.items():
            source.dataloader = partial(call.loaders, name)
        self._move_to_front(trainer)  # a callback that raises in `on_exception` ends those behind it
        if not any(isinstance(callback, CacheMonitor) for callback in callbacks):
            call.monitor = self._new_monitor()
            trainer.callbacks = [call.monitor, *trainer.callbacks]  # type: ignore[attr-defined]
            call.monitor.setup(trainer, pl_module, stage)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Close the caches of the call, unless they are kept, and take the monitor out."""
        call = self._calls.pop(id(trainer), _Call())
        for source in call.sources:
            vars(source).pop("dataloader", None)
        if call.loaders is not None:
            call.loaders.end()
        if not self._calls:
            self.caches.end_call()
        brought = [call.monitor, self if call.is_brought else None]
        trainer.callbacks = [  # type: ignore[attr-defined]
            each
            for each in trainer.callbacks  # type: ignore[attr-defined]
            if not any(each is one for one in brought)
        ]

    def _new_monitor(self) -> CacheMonitor:
        monitor = self.monitor_class(live=self.live, hyperparameters=self.hyperparameters, verbose=self.verbose)
        monitor.caches = self.caches
        return monitor

    def bring(self, trainer: Any) -> None:
        """Join the callbacks of a Trainer for one call, in front. A DataModule that is to be cached calls it."""
        self._move_to_front(trainer)
        self._call_of(trainer).is_brought = True

    def is_brought_to(self, trainer: Any) -> bool:
        """Whether a DataModule has brought this callback to a Trainer."""
        return self._calls.get(id(trainer), _Call()).is_brought

    def _move_to_front(self, trainer: Any) -> None:
        trainer.callbacks = [self, *(each for each in trainer.callbacks if each is not self)]

    def _call_of(self, trainer: Any) -> _Call:
        return self._calls.setdefault(id(trainer), _Call())

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the call: Lightning skips `teardown` after an exception."""
        self.teardown(trainer, pl_module, "")

    def caches_loaders(self, trainer: Any) -> bool:
        """Whether this callback caches loaders of a Trainer's call: no other one does."""
        return bool(self._calls.get(id(trainer), _Call()).sources)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_calls": {}}

    def cache_state(self) -> list[dict[str, Any]]:
        """The open caches on this node, one entry for each dataset, as plain values; see `CallCaches.state`."""
        return self.caches.state()

    def close(self) -> None:
        """Close all caches, also kept ones."""
        self.caches.close()

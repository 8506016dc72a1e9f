"""How often a Trainer call reads a dataset. One that is read once is not cached: a cache would only cost time.

A call that validates, tests or predicts reads its datasets once. A fit reads the training set once if it has one epoch,
the validation set if it validates once, and the sanity check does not read all of it. A dataset that may be read again
is cached: another loader reads it, too, its sampler may draw a sample twice, a shorter loader of several begins again,
or the end of the fit is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.sampling.locality_sampler import LocalitySampler
from lightning_stocache.training.loaders import source_of
from lightning_stocache.training.resume import ResumePoint
from lightning_stocache.training.sampling import replicas

__all__ = ["Reads"]


_USUAL_CHECK = 2  # batches of Lightning's sanity check: to read so few again costs less than a cache


class _Start(NamedTuple):
    """Where a fit begins, and how many epochs follow at most. A checkpoint that Lightning loads later leaves fewer."""

    epoch: int
    step: int
    epochs: float


class Reads:
    """How often a Trainer call reads its datasets.

    Args:
        trainer: the Trainer of the call, or None outside of one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._start: _Start | None = None

    def is_single(self, stage: str, leaf: Any, others: Sequence[tuple[str, Any]], *, goes_round: bool) -> bool:
        """Whether the call reads each sample of a loader at most once; False if that is unknown.

        Args:
            stage: the loader's stage.
            leaf: the loader.
            others: the call's other loaders that exist so far, with their stages.
            goes_round: whether the shorter of several loaders of the stage begin again.
        """
        if self._trainer is None or not isinstance(leaf, DataLoader) or _repeats(leaf):
            return False
        source = source_of(leaf)
        if any(isinstance(other, DataLoader) and source_of(other) is source for _, other in others):
            return False
        if goes_round and any(name == stage for name, _ in others):
            return False
        if self._trainer.state.fn != "fit":
            return True
        if stage == "train":
            return self._trains_once(leaf) and not ResumePoint.for_trainer(self._trainer).resumes
        return self._validates_once() and not self._is_checked_whole(leaf)

    def passes(self, stage: str) -> float:
        """How often the call reads the datasets of a stage at most."""
        is_known = self._trainer is not None and self._trainer.state.fn == "fit" and stage == "train"
        return self._begin().epochs if is_known else math.inf

    def _begin(self) -> _Start:
        """The start of the fit, as it is when loaders are first asked for: what is decided then holds for the call."""
        if self._start is None:
            trainer = self._trainer
            most = trainer.fit_loop.max_epochs
            epochs = math.inf if most is None or most < 0 else most - trainer.current_epoch
            self._start = _Start(trainer.current_epoch, trainer.global_step, epochs)
        return self._start

    def _trains_once(self, loader: DataLoader[Any]) -> bool:
        """Whether the fit ends with its first epoch, or before."""
        trainer = self._trainer
        start = self._begin()
        if start.epochs <= 1:
            return True
        limit = trainer.limit_train_batches
        is_whole = isinstance(limit, float) and limit == 1.0 and not trainer.overfit_batches
        if trainer.max_steps < 0 or not is_whole or not trainer.lightning_module.automatic_optimization:
            return False
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        schedules = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        if batch_size is None or schedules or isinstance(loader.dataset, IterableDataset):
            return False
        batches = (trainer.max_steps - start.step) * trainer.accumulate_grad_batches
        sampler = index_sampler(loader)
        ranks = 1 if isinstance(sampler, DistributedSampler) else replicas(trainer)[0]
        return bool(batches * batch_size * ranks <= len(sampler))

    def _is_checked_whole(self, loader: DataLoader[Any]) -> bool:
        """Whether the sanity check reads all that the fit's validation reads."""
        steps = self._trainer.num_sanity_val_steps
        limit = self._trainer.limit_val_batches
        if steps <= _USUAL_CHECK or isinstance(loader.dataset, IterableDataset):
            return False
        batches = len(loader)
        return bool(steps >= (min(batches, limit) if isinstance(limit, int) else int(batches * limit)))

    def _validates_once(self) -> bool:
        """Whether the fit validates once at most, apart from the few batches of a sanity check."""
        trainer = self._trainer
        every = trainer.check_val_every_n_epoch
        interval = getattr(trainer, "val_check_interval", None)  # Lightning does not set it if it is a time
        is_by_epoch = every is not None and isinstance(interval, float) and interval == 1.0
        if not is_by_epoch or trainer.num_sanity_val_steps == math.inf:
            return False
        start = self._begin()
        end = start.epoch + start.epochs
        return end < math.inf and end // every - start.epoch // every <= 1


def _repeats(loader: DataLoader[Any]) -> bool:
    """Whether an epoch of a loader may draw a sample twice."""
    if type(loader).__iter__ not in (DataLoader.__iter__, CachedLoader.__iter__):  # it may go round
        return True
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = index_sampler(loader)
    if type(sampler) is RandomSampler:
        return bool(sampler.replacement) or len(sampler) > len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SubsetRandomSampler:
        return len(set(map(int, sampler.indices))) < len(sampler.indices)
    if type(sampler) is LocalitySampler:
        return sampler.draws is not None
    return type(sampler) not in (SequentialSampler, DistributedSampler)

"""How often a Trainer call reads a set: what it reads once is left alone, because a cache would only cost.

A call that validates, tests or predicts reads its sets once; a fit of one epoch its training set, and its validation
set if it validates once. Where a set may be read again (by another loader, a sampler that repeats, a combination that
goes round, a fit whose end is unknown), it is cached.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_stocache.loading.loader_sampler import index_sampler
from lightning_stocache.training.loaders import source_of
from lightning_stocache.training.resume import ResumePoint
from lightning_stocache.training.sampling import replicas

__all__ = ["Reads"]


class Reads:
    """Tells of the sets of one Trainer call whether they are read once.

    Args:
        trainer: the Trainer of the call, or None outside of one.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._start: tuple[int, int] | None = None

    def are_single(self, stage: str, leaf: Any, others: Sequence[tuple[str, Any]]) -> bool:
        """Whether the call reads each sample of a loader at most once; False where it is unknown.

        Args:
            stage: the loader's stage.
            leaf: the loader.
            others: the other loaders that are known, with their stages.
        """
        if self._trainer is None or not isinstance(leaf, DataLoader) or _repeats(leaf):
            return False
        source = source_of(leaf)
        if any(isinstance(other, DataLoader) and source_of(other) is source for _, other in others):
            return False
        if self._trainer.state.fn != "fit":
            return True
        if stage == "train":
            is_alone = all(name != "train" for name, _ in others)  # of several the shorter ones begin again, by default
            return is_alone and self._trains_once(leaf) and not ResumePoint.of(self._trainer).resumes
        return self._validates_once()

    def passes(self, stage: str) -> float:
        """How often the call reads the sets of a stage at most."""
        is_known = self._trainer is not None and self._trainer.state.fn == "fit" and stage == "train"
        return self._epochs() if is_known else math.inf

    def _epochs(self) -> float:
        """Epochs of the fit. A checkpoint that is still to be loaded leaves fewer."""
        most = self._trainer.fit_loop.max_epochs
        return math.inf if most is None or most < 0 else most - self._begin()[0]

    def _begin(self) -> tuple[int, int]:
        """The epoch and the step at which the fit began, as they are when its loaders are first asked for."""
        if self._start is None:
            self._start = self._trainer.current_epoch, self._trainer.global_step
        return self._start

    def _trains_once(self, loader: DataLoader[Any]) -> bool:
        """Whether the fit ends with its first epoch, or before."""
        trainer = self._trainer
        if self._epochs() <= 1:
            return True
        if trainer.max_steps < 0 or not trainer.lightning_module.automatic_optimization:
            return False
        batch_size = getattr(loader.batch_sampler, "batch_size", None)
        schedules = any(isinstance(callback, GradientAccumulationScheduler) for callback in trainer.callbacks)
        if batch_size is None or schedules or isinstance(loader.dataset, IterableDataset):
            return False
        batches = (trainer.max_steps - self._begin()[1]) * trainer.accumulate_grad_batches
        return bool(batches * batch_size * replicas(trainer)[0] <= len(loader.dataset))  # type: ignore[arg-type]

    def _validates_once(self) -> bool:
        """Whether the fit validates once at most, apart from the few batches of a sanity check."""
        trainer, epochs, first = self._trainer, self._epochs(), self._begin()[0]
        every = trainer.check_val_every_n_epoch
        interval = getattr(trainer, "val_check_interval", None)  # a time is elsewhere
        if every is None or interval != 1.0 or trainer.num_sanity_val_steps == math.inf:
            return False
        return epochs < math.inf and (first + epochs) // every - first // every <= 1


def _repeats(loader: DataLoader[Any]) -> bool:
    """Whether an epoch of a loader may draw a sample twice."""
    if isinstance(loader.dataset, IterableDataset):
        return False
    sampler = index_sampler(loader)
    if type(sampler) is RandomSampler:
        return bool(sampler.replacement) or len(sampler) > len(loader.dataset)  # type: ignore[arg-type]
    if type(sampler) is SubsetRandomSampler:
        return len(set(map(int, sampler.indices))) < len(sampler.indices)
    return type(sampler) not in (SequentialSampler, DistributedSampler)

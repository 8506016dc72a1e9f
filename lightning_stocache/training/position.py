"""Where in an epoch training stands, so that it can go on there.

Lightning stores how many batches of an epoch have run, and after a resume it runs the others; which samples those are
is for the loader to know. The position is kept in the DataModule's state, because Lightning restores that before
anything asks for a loader (the loops come later: a scheduler that asks for `estimated_stepping_batches` would see
none, Lightning #20550). The order of an epoch follows from seed and epoch alone, so the position is two numbers.

A position counts samples of the global order. If the world or the batch size has changed, it is converted to whole
global batches of the new size; Lightning's own count of batches cannot be, which is why there is a warning.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

__all__ = ["Position"]


@dataclass(frozen=True)
class Position:
    """A place in the training.

    Args:
        epoch: number of the epoch, from 0.
        batch: batches of it that have been run, on each rank.
        world: ranks that share the data.
        batch_size: samples per batch and rank.
        length: samples in the dataset.
        seed: of the order.

    Example:
        >>> Position(epoch=3, batch=10, world=4, batch_size=32, length=10_000, seed=0).resumed(world=2, batch_size=32)
        (20, 'the world has changed from 4 to 2')
    """

    epoch: int
    batch: int
    world: int
    batch_size: int
    length: int
    seed: int

    @classmethod
    def of(cls, trainer: Any, *, world: int, batch_size: int, length: int, seed: int) -> Position:
        """Where a trainer stands now, in a training epoch or at its end."""
        fit, epoch_loop = trainer.fit_loop, trainer.fit_loop.epoch_loop
        epochs = fit.epoch_progress.current
        at_end = bool(epoch_loop.batch_progress.is_last_batch)
        epoch = epochs.processed + int(at_end and epochs.started > epochs.processed)
        return cls(epoch, 0 if at_end else epoch_loop.batch_progress.current.ready, world, batch_size, length, seed)

    def resumed(self, *, world: int, batch_size: int) -> tuple[int, str | None]:
        """How many batches to leave out now, and what has changed since, in words."""
        changes = [
            f"the {name} has changed from {old} to {new}"
            for name, old, new in (("world", self.world, world), ("batch size", self.batch_size, batch_size))
            if old != new
        ]
        samples = self.batch * self.batch_size * self.world
        return samples // (batch_size * world), " and ".join(changes) or None

    def state(self) -> dict[str, int]:
        """As plain numbers, for a checkpoint."""
        return asdict(self)

"""Where in an epoch training stands, so that it can go on there.

Lightning stores how many batches of an epoch have run, and after a resume it runs the others; which samples those are
is for the loader to know. The position is kept in the DataModule's state, because Lightning restores that before
anything asks for a loader (the loops come later: a scheduler that asks for `estimated_stepping_batches` would see
none, Lightning #20550). The order of an epoch follows from seed and epoch alone, so the position is two numbers.

A position counts samples of the global order. If the world or the batch size has changed, it is converted to whole
global batches of the new size; Lightning's own count of batches cannot be, which is why there is a warning: it may end
this epoch early or late. With another dataset or seed the order is another one, and the count of batches stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from lightning_stocache.sampling.locality_sampler import LocalitySampler

__all__ = ["Position", "resume"]


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
        >>> then = Position(epoch=3, batch=10, world=4, batch_size=32, length=10_000, seed=0)
        >>> then.resumed(Position(epoch=0, batch=0, world=2, batch_size=32, length=10_000, seed=0))
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
        """Where a trainer stands now, in a training epoch or between two.

        A batch counts from when it has been processed: that is where Lightning goes on, whether the checkpoint was
        saved after a batch, at the end of an epoch, or on an exception in the middle of a batch.
        """
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
        epoch, batch = epochs.processed, 0
        if epochs.started > epochs.processed:
            done = batches.current.processed
            if batches.is_last_batch and done == batches.current.ready:
                epoch += 1
            else:
                batch = done
        return cls(epoch, batch, world, batch_size, length, seed)

    @classmethod
    def read(cls, state: Mapping[str, Any]) -> Position | None:
        """The position in a checkpoint; None, with a warning, if it holds none (of another version or DataModule)."""
        numbers: dict[str, Any] = {field.name: state.get(field.name) for field in fields(cls)}
        whole = all(isinstance(number, int) and number >= 0 for number in numbers.values())
        if whole and numbers["world"] and numbers["batch_size"]:
            return cls(**numbers)
        if state:
            rank_zero_warn(
                "the checkpoint does not say where in an epoch it was saved: if that was in the middle of one, its "
                f"first samples come again, and its last ones do not. Its state has {', '.join(map(str, state))}"
            )
        return None

    def resumed(self, now: Position) -> tuple[int, str | None]:
        """How many batches to leave out now, and what has changed since, in words."""
        names = {"world": "world", "batch_size": "batch size", "length": "length of the dataset", "seed": "seed"}
        changes = [
            f"the {words} has changed from {getattr(self, name)} to {getattr(now, name)}"
            for name, words in names.items()
            if getattr(self, name) != getattr(now, name)
        ]
        samples = self.batch * self.batch_size * self.world
        return samples // (now.batch_size * now.world), " and ".join(changes) or None

    def state(self) -> dict[str, int]:
        """As plain numbers, for a checkpoint."""
        return asdict(self)


def resume(sampler: LocalitySampler, epoch: int, then: Position | None, now: Position | None) -> None:
    """Set a sampler to where training goes on.

    `set_epoch` is called here too: Lightning calls it only after the workers have begun (Lightning #21938).

    Args:
        sampler: of the training loader.
        epoch: the one that the loader is for, if nothing is resumed.
        then: where it stood when the checkpoint was saved; None if nothing is resumed.
        now: where it stands in this job; None if nothing is resumed.
    """
    if then is not None and now is not None and epoch <= then.epoch:
        epoch = then.epoch
        sampler.skip, change = then.resumed(now)
        if change and then.batch:
            rank_zero_warn(
                f"resuming in the middle of epoch {epoch}, but {change}: the loader goes on after {sampler.skip} "
                "batches of now, while Lightning counts on from the number of then, and may end this epoch early or "
                "late. From the next epoch on all is as usual"
            )
    sampler.set_epoch(epoch)

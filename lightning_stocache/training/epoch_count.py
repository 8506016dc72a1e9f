"""Lightning's count of epochs and batches: what it says of training, and where it is put right.

A Trainer counts epochs and batches as ready, started, processed and completed, and writes the counts into each
checkpoint. What it makes of them differs, and is put right where the truth is known:

- Saved after an epoch's last batch (`on_train_batch_end`). Lightning calls the epoch over, but takes itself to be in
  the middle of the next one, which nobody counts: later checkpoints are one behind, and a second resume runs their
  batches again.
- Saved at the end of a fit that `max_steps`, a Timer or an early stop has ended in the middle of an epoch. Lightning
  counts the epoch as over; what follows is a new epoch, or with `max_steps` the rest of it under another number.

None of these names is private. Seen in Lightning 2.5.0 and 2.6.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

__all__ = ["batches_begun", "begin_epoch", "put_batches", "reopen_epoch", "stands"]

_COUNTS = ("ready", "started", "processed", "completed")


def batches_begun(trainer: Any) -> int:
    """Batches that have begun in all epochs; those of the fit before a resume count."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def stands(trainer: Any, handed: int) -> tuple[int, int | None]:
    """The epoch that a trainer is in, and its batches that have been processed; None between two epochs.

    At any moment of a fit (a signal's handler may save a checkpoint), or after it. `handed` counts the batches that the
    loaders have handed out.
    """
    epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress
    epoch, done = int(epochs.processed), int(batches.current.processed)
    if epochs.started <= epochs.processed:
        # Where a hook has ended the epoch (it gave -1), its last batch is not complete: that was no cut. Lightning 2.6
        # calls that batch the last one, 2.5.0 does not.
        complete = len({getattr(batches.current, name) for name in _COUNTS}) == 1 and epochs.ready == epoch
        cut = 0 < done < trainer.num_training_batches and not batches.is_last_batch and complete
        return (epoch - 1, done) if cut else (epoch, None)
    if batches.is_last_batch and handed <= done == batches.current.ready:  # else the last one is about to be run
        return epoch + 1, None
    return epoch, done


def put_batches(trainer: Any, batches: int) -> None:
    """Put the count of batches, at the start of a fit in the middle of an epoch, to how many of it have been run."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    _add(progress.current, batches - progress.current.processed)
    progress.is_last_batch = False
    _put_total(trainer)


def begin_epoch(trainer: Any, epoch: int) -> None:
    """Have an epoch begin with its first batch, and be counted, at the start of a fit that goes on between two epochs.

    The trainer's loops have been restored.
    """
    fit, batches = trainer.fit_loop, trainer.fit_loop.epoch_loop.batch_progress
    epochs, total = fit.epoch_progress.current, fit.epoch_progress.total
    _put_total(trainer)
    if epochs.ready == epochs.started == epoch + 1 == epochs.processed + 1 and batches.is_last_batch:
        put_batches(trainer, 0)  # saved in the moment before Lightning did that: they are those of the epoch before
    if epochs.ready == epochs.started == epoch == epochs.processed + 1 and not _validates(trainer, epoch):
        for count in epochs, total:
            count.processed += 1  # saved in the moment before Lightning did that
    if epochs.ready == epochs.started == epochs.processed == epoch:
        for count in epochs, total:
            count.ready = count.started = count.completed = count.processed
        fit.reset_restart_stage()
        if not fit.epoch_loop.restarted_on_train_batch_end:
            batches.reset_on_run()
        elif 0 < (more := trainer.num_training_batches - batches.current.processed) < math.inf:
            # Lightning begins anew where all batches of an epoch were run, but counts those that it has now.
            _add(batches.current, more)


def _put_total(trainer: Any) -> None:
    """Take a batch that was under way out of the total, too: Lightning does for the epoch's count alone."""
    if not trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:
        trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()


def _validates(trainer: Any, epochs: int) -> bool:
    """Whether Lightning takes a validation to follow the last batch of as many epochs, where it goes on after it."""
    every, interval = trainer.check_val_every_n_epoch, trainer.val_check_batch
    if not trainer.enable_validation or epochs % (every or 1) != 0 or interval is None:
        return False  # None: it is a time, which has just begun
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if interval == math.inf:  # nobody knows how many batches there are
        return bool(progress.is_last_batch)
    ready = progress.total.ready if every is None else progress.current.ready
    return bool(ready % interval == 0)


def reopen_epoch(checkpoint: MutableMapping[str, Any], epoch: int, batches: int) -> bool:
    """Have Lightning go on in the middle of an epoch that a checkpoint counts as over, though it was cut short.

    Called before the loops are restored; the count is changed in memory. False, and nothing is changed, where the
    checkpoint does not say that this epoch has ended after so many batches.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs, count = loops.get("epoch_progress"), loops.get("epoch_loop.batch_progress")
    if not epochs or not count or epochs["current"]["processed"] != epoch + 1:
        return False
    if count["is_last_batch"] or count["current"]["processed"] != batches:
        return False
    for progress in epochs["current"], epochs["total"]:
        processed = progress["processed"] - 1
        progress |= {"ready": processed + 1, "started": processed + 1, "processed": processed, "completed": processed}
    return True


def _add(count: Any, more: int) -> None:
    for name in _COUNTS:
        setattr(count, name, getattr(count, name) + more)

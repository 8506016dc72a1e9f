"""Resumes a fit in the middle of an epoch.

Lightning stores how many batches of an epoch have run, and a resumed fit runs the others. The loader knows the samples
of these batches. A `StochasticCache` adds a `ResumePoint` to the Trainer's callbacks. Its state in the checkpoint is
the position of the training loaders (`loading.position`), without the batches that were handed out and not processed.
Lightning resumes there, whether a checkpoint was saved after a batch, at an epoch's end, or on an exception in the
middle of a batch. Lightning restores callbacks before anything asks for a loader, and loops after that (#20550).

Samplers get their epoch when the loaders are made. Lightning sets it only after the workers have started, which would
draw the order of the first epoch again (Lightning #21938).

A position counts samples. With another batch size or number of ranks the loaders continue after the same samples, and
Lightning's count of batches is set accordingly.

Two counts of Lightning are corrected here, too (seen in 2.5.0 and 2.6):

- A checkpoint of an epoch's last batch (`on_train_batch_end`). Lightning regards the epoch as over, but resumes in the
  middle of the next epoch, and does not count it. So later checkpoints are one epoch behind, and a second resume runs
  their batches again.
- The end of a fit that `max_steps`, a Timer or an early stop has cut in the middle of an epoch. Lightning counts the
  epoch as over. After a resume it runs a new epoch, or with `max_steps` the rest of the cut epoch under another number.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, MutableMapping
from typing import Any, TypeGuard

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_stocache.growing.rolling_cache import RollingCache
from lightning_stocache.loading.loader_sampler import batches_of, drawn_from, index_sampler, set_epoch
from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.training.lightning_internals import leaves_samplers_alone, say, skip_empty_hooks, warn
from lightning_stocache.training.loaders import TrainerLoader
from lightning_stocache.training.sampling import epochs_done, replicas

__all__ = ["ResumePoint", "reopen_epoch"]

_NAMES = {"replicas": "number of ranks", "batch_size": "batch size", "length": "length of the dataset"}
_COUNTS = ("ready", "started", "processed", "completed")


class ResumePoint(Callback):
    """The position of a fit's training loaders, among the Trainer's callbacks."""

    def __init__(self) -> None:
        self._trainer: Any = None
        self._saved: Mapping[str, Any] | None = None  # the state in the checkpoint
        self._resumed: list[TrainerLoader] = []  # loaders that resume in the middle of their epoch
        self._begun_at: int | None = None  # number of batches that had begun at the start of the epoch
        self.leaves_ends = False
        """Whether checkpoints between two epochs get no state. They resume as without a cache."""
        skip_empty_hooks(self)

    @classmethod
    def for_trainer(cls, trainer: Any) -> ResumePoint:
        """The ResumePoint of a Trainer; the first call adds it to the callbacks."""
        point = next((callback for callback in trainer.callbacks if isinstance(callback, ResumePoint)), None)
        if point is None:
            point = cls()
            trainer.callbacks = [*trainer.callbacks, point]
        point._trainer = trainer
        return point

    @property
    def state_key(self) -> str:
        """The key of the state in a checkpoint."""
        return "lightning_stocache"

    @property
    def resumes(self) -> bool:
        """Whether the fit begins at a position that a checkpoint holds."""
        return self._saved is not None

    @property
    def dealt(self) -> bool:
        """Whether the fit resumes from a checkpoint in which all orders follow from seed and epoch."""
        states = [] if self._saved is None else [state for state in self._saved["loaders"] if isinstance(state, dict)]
        return bool(states) and all({"seed", "epoch"} <= state.keys() for state in states)

    def set_positions(self, loaders: Any) -> None:
        """Set the position of the training loaders, in any nesting, to the position of the training."""
        leaves = list(loaders_in(loaders))
        epoch = epochs_done(self._trainer)
        saved = self._saved
        states: list[Any] = [None] * len(leaves)
        has_states = False
        if saved is not None and epoch <= saved["epoch"]:
            epoch = saved["epoch"]
            has_states = len(saved["loaders"]) == len(leaves)
            if has_states:
                states = saved["loaders"]
            else:
                _warn_of_unknown(saved)
        self._resumed = []
        put_back = False
        for leaf, state in zip(leaves, states, strict=True):
            if epoch:
                set_epoch(leaf, epoch)
            if state is None and has_states and _is_resumable(leaf) and _comes_in_any_order(leaf):
                warn(
                    "resuming within an epoch, but with in_order=False nobody knows which batches came: it begins anew"
                )
            if state is not None and isinstance(leaf, TrainerLoader) and not self._is_of_rank_zero(leaf):
                try:
                    self._load(leaf, state, put_back)
                    put_back = True
                except (TypeError, ValueError, KeyError):  # of another version
                    _warn_of_unknown(state)

    def _is_of_rank_zero(self, loader: TrainerLoader) -> bool:
        """Whether each of several ranks draws for itself, so that the saved state is valid for rank zero alone."""
        dealt = isinstance(index_sampler(loader), DistributedSampler) or not leaves_samplers_alone(self._trainer)
        return not dealt and replicas(self._trainer, always=True)[0] > 1

    def _load(self, loader: TrainerLoader, state: dict[str, Any], put_back: bool) -> None:
        """Load a position into a loader. `put_back`: an earlier loader has restored the process-wide generators."""
        within = bool(state["batches"])
        if not within:  # Lightning sets the epoch of samplers that it knows; other samplers keep theirs
            state = {name: value for name, value in state.items() if name != "epoch"}
        alone = replicas(self._trainer, always=True)[0] == 1
        loader.position.load(state, process_wide=alone and (within or not put_back))
        if not within:
            return
        self._resumed.append(loader)
        now = loader.position.units(loader)
        changes = [
            f"the {words} has changed from {state.get(name)} to {now.get(name)}"
            for name, words in _NAMES.items()
            if state.get(name) != now.get(name)
        ]
        known = ("generators" in state) is bool(drawn_from(batches_of(loader)))
        if not known and not self._trainer.overfit_batches:  # Lightning replaces the sampler later
            changes.append("the sampler is of another kind")
        if changes:
            same = known and now["length"] == state.get("length")
            order = "after the same samples" if same else "in another order: some samples come twice, some do not"
            epoch = state.get("epoch", epochs_done(self._trainer))
            changed = " and ".join(changes)
            warn(f"resuming in the middle of epoch {epoch}, but {changed}: the loader goes on {order}")

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the last call, however it ended, before Lightning restores a checkpoint."""
        self._saved = None
        self._resumed = []
        self._begun_at = None

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Let Lightning continue an epoch that was cut short, which it counts as over."""
        state = checkpoint.get("callbacks", {}).get(self.state_key)
        if trainer.state.fn != "fit" or not state or not _is_position(state):
            return
        if 0 <= trainer.max_steps <= checkpoint.get("global_step", 0):  # nothing follows
            return
        epoch = state["epoch"]
        loaders = state["loaders"]
        are_known = bool(loaders) and all(isinstance(loader, dict) for loader in loaders)
        if are_known and reopen_epoch(checkpoint, epoch, max(loader.get("batches", 0) for loader in loaders)):
            say(f"epoch {epoch}, which was cut short, goes on with the batches that were left")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set Lightning's count of batches by the position of the loaders, because the batch size may have changed."""
        self._begun_at = None
        if self._saved is None:
            return
        if not self._resumed:
            _begin_epoch(trainer, self._saved["epoch"])
            return
        message = "You're resuming from a checkpoint that ended before the epoch ended and your dataloader is not resum"
        warnings.filterwarnings("ignore", message=message)
        _put_batches(trainer, max(loader.position.batches for loader in self._resumed))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that an epoch begins, while Lightning still counts the batches of the last epoch."""
        self._begun_at = _batches_begun(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the epoch of the loaders, because nobody asks them for a batch after the last."""
        for leaf in loaders_in(trainer.train_dataloader):
            if _is_resumable(leaf):
                leaf.position.end()

    def state_dict(self) -> dict[str, Any]:
        """The position of the training loaders, as plain values."""
        trainer = self._trainer
        if trainer is None or trainer.train_dataloader is None:
            return {}
        leaves = [leaf if _is_resumable(leaf) else None for leaf in loaders_in(trainer.train_dataloader)]
        known = [leaf.position for leaf in leaves if leaf is not None]
        if not known:
            return {}
        handed = max(position.batches for position in known)
        epoch, done = _position_of(trainer, handed)
        if self._begun_at == _batches_begun(trainer) and all(position.ended for position in known):
            epoch = epochs_done(trainer)  # it has begun, and no batch of it was read
            done = None
        if done is None and self.leaves_ends:
            return {}
        ahead = 0 if done is None else handed - done
        states = [None if leaf is None else _position(leaf, ahead, ended=done is None) for leaf in leaves]
        return {"epoch": epoch, "loaders": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep a saved position, so that the loaders of this fit skip the trained samples."""
        if _is_position(state_dict):
            self._saved = state_dict
        else:
            _warn_of_unknown(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trainer": None, "_resumed": []}


def _warn_of_unknown(state: Any) -> None:
    warn(
        "the checkpoint does not say where in an epoch it was saved: if in the middle, the first samples of the epoch "
        f"come again instead of the last. Its state has the keys {', '.join(map(str, state))}"
    )


def _is_position(state: Mapping[str, Any]) -> bool:
    return isinstance(state.get("epoch"), int) and isinstance(state.get("loaders"), list)


def _is_resumable(leaf: DataLoader[Any]) -> TypeGuard[TrainerLoader]:
    return isinstance(leaf, TrainerLoader) and not isinstance(leaf.dataset, IterableDataset | RollingCache)


def _position(leaf: TrainerLoader, ahead: int, *, ended: bool) -> dict[str, Any] | None:
    """The position of a loader, of whose batches some were fetched ahead; None if batches come in any order."""
    if not ended and _comes_in_any_order(leaf):
        return None
    return leaf.position.as_dict(leaf, max(leaf.position.batches - ahead, 0), ended=ended)


def _comes_in_any_order(leaf: DataLoader[Any]) -> bool:
    return leaf.num_workers > 0 and not getattr(leaf, "in_order", True)


def _batches_begun(trainer: Any) -> int:
    """Number of batches that have begun in all epochs, also before a resume."""
    return int(trainer.fit_loop.epoch_loop.batch_progress.total.ready)


def _position_of(trainer: Any, handed: int) -> tuple[int, int | None]:
    """The epoch of a Trainer, at any moment of a fit or after it, and its processed batches; None between two epochs.

    `handed` is the number of batches that the loaders have handed out.
    """
    epochs = trainer.fit_loop.epoch_progress.current
    batches = trainer.fit_loop.epoch_loop.batch_progress
    epoch = int(epochs.processed)
    done = int(batches.current.processed)
    if epochs.started <= epochs.processed:
        # If a hook has ended the epoch (it returned -1), the last batch is not complete. That epoch is over.
        is_complete = len({getattr(batches.current, name) for name in _COUNTS}) == 1 and epochs.ready == epoch
        is_within = 0 < done < trainer.num_training_batches and not batches.is_last_batch
        return (epoch - 1, done) if is_complete and is_within else (epoch, None)
    if batches.is_last_batch and handed <= done == batches.current.ready:  # else the last batch is about to run
        return epoch + 1, None
    return epoch, done


def _put_batches(trainer: Any, batches: int) -> None:
    """Set the number of batches of the epoch that have run, at the start of a fit."""
    progress = trainer.fit_loop.epoch_loop.batch_progress
    _add(progress.current, batches - progress.current.processed)
    progress.is_last_batch = False
    _put_total(trainer)


def _begin_epoch(trainer: Any, epoch: int) -> None:
    """Begin and count an epoch with its first batch, if a restored fit resumes between two epochs."""
    fit = trainer.fit_loop
    batches = fit.epoch_loop.batch_progress
    epochs = fit.epoch_progress.current
    total = fit.epoch_progress.total
    _put_total(trainer)
    has_begun = epochs.ready == epochs.started == epochs.processed + 1
    saved_before_reset = has_begun and epochs.ready == epoch + 1 and batches.is_last_batch
    saved_before_count = has_begun and epochs.ready == epoch and not _validates(trainer, epoch)
    if saved_before_reset:  # of the last epoch's batches
        _put_batches(trainer, 0)
    if saved_before_count:  # of the epoch
        epochs.processed += 1
        total.processed += 1
    saved_between_epochs = epochs.ready == epochs.started == epochs.processed == epoch
    if not saved_between_epochs:
        return
    for count in epochs, total:
        count.ready = count.started = count.completed = count.processed
    fit.reset_restart_stage()
    if not fit.epoch_loop.restarted_on_train_batch_end:
        batches.reset_on_run()
        return
    more = trainer.num_training_batches - batches.current.processed
    if 0 < more < math.inf:
        # Lightning starts an epoch if all batches of the last one have run, by the present number of batches.
        _add(batches.current, more)


def _put_total(trainer: Any) -> None:
    """Remove an unfinished batch from the total, too. Lightning removes it from the epoch's count alone."""
    if not trainer.fit_loop.epoch_loop.restarted_on_train_batch_end:
        trainer.fit_loop.epoch_loop.batch_progress.total.reset_on_restart()


def _validates(trainer: Any, epochs: int) -> bool:
    """Whether a validation follows the last batch of that epoch, as Lightning decides it."""
    every = trainer.check_val_every_n_epoch
    interval = trainer.val_check_batch
    if not trainer.enable_validation or epochs % (every or 1) != 0 or interval is None:
        return False  # None: validation is due by time, and the time has just begun
    progress = trainer.fit_loop.epoch_loop.batch_progress
    if interval == math.inf:  # the number of batches is unknown
        return bool(progress.is_last_batch)
    ready = progress.total.ready if every is None else progress.current.ready
    return bool(ready % interval == 0)


def reopen_epoch(checkpoint: MutableMapping[str, Any], epoch: int, batches: int) -> bool:
    """Change the count in a checkpoint, so that Lightning continues an epoch that was cut short.

    Returns:
        False, without a change, unless the checkpoint says that this epoch ended after so many batches.
    """
    loops = checkpoint.get("loops", {}).get("fit_loop", {})
    epochs = loops.get("epoch_progress")
    count = loops.get("epoch_loop.batch_progress")
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

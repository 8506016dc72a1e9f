"""After any number of breaks Lightning counts epochs and batches as in a fit without a break."""

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler

from lightning_stocache.training.resume import reopen_epoch
from tests.training.tiny import SAMPLES, Data, Model, Numbers, behind, make_trainer

pytestmark = pytest.mark.processes

EPOCHS, BATCHES = 3, SAMPLES // 4
WHOLE = {"max_steps": EPOCHS * BATCHES}
VALIDATES = {"limit_val_batches": 2}
LIGHTNING = tuple(map(int, lightning.__version__.split(".")[:2]))


class BreakError(Exception):
    """Ends a fit as a kill does: nothing is saved."""


class Witness(Callback):
    """Records each batch and Lightning's counts at its start. May break or stop the fit after some batches."""

    def __init__(self, breaks_at: int | None = None, stops_after: int | None = None) -> None:
        self.breaks_at, self.stops_after = breaks_at, stops_after
        self.begun: list[int] = []
        self.ended: list[int] = []
        self.seen: dict[tuple[int, int], Any] = {}

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(trainer.current_epoch)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if len(self.seen) == self.breaks_at:
            raise BreakError
        epochs, batches = trainer.fit_loop.epoch_progress.current, trainer.fit_loop.epoch_loop.batch_progress.current
        counts = epochs.ready, epochs.started, epochs.processed, batches.ready, batches.processed, trainer.global_step
        assert (trainer.current_epoch, batch_idx) not in self.seen
        self.seen[trainer.current_epoch, batch_idx] = batch[0][:, 0, 0, 0].tolist(), counts

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = len(self.seen) == self.stops_after


def fit(
    folder: Path,
    door: str,
    witness: Witness,
    *callbacks: Callback,
    ckpt: Path | None = None,
    batch_size: int = 4,
    **options: Any,
) -> Trainer:
    """A fit in a process that has other random states than the first."""
    torch.manual_seed(11 if ckpt is None else 99)
    more, data = behind(door, Data(Numbers(), Numbers(), batch_size=batch_size))
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "logger": False} | options
    options["enable_checkpointing"] = bool(callbacks)
    trainer = make_trainer(folder, [*more, witness, *callbacks], epochs=EPOCHS, **options)
    trainer.fit(Model(), data, ckpt_path=ckpt)
    return trainer


@pytest.mark.parametrize(("door", "options"), [("ours", VALIDATES), ("cache_datamodule", WHOLE), ("callback", {})])
def test_an_epoch_that_begins_with_a_resume_is_counted(tmp_path, door, options):
    """A fit breaks after an epoch's last batch, and again in the next epoch: batches, beginnings of epochs and counts
    are those of a fit without a break."""
    whole = Witness()
    fit(tmp_path / "whole", door, whole, **options)
    assert len(whole.seen) == EPOCHS * BATCHES
    ckpt, seen = None, {}
    # The last checkpoints are those of steps 6, 8, 12 and 12.
    for breaks_at, begun in ((7, [0, 1]), (3, [1]), (5, [2]), (1, [2]), (None, [2])):
        witness = Witness(breaks_at)
        save = ModelCheckpoint(tmp_path, "{step:02d}", every_n_train_steps=2, save_top_k=-1)
        try:
            fit(tmp_path, door, witness, save, ckpt=ckpt, **options)
        except BreakError:
            ckpt = max(tmp_path.glob("*.ckpt"), key=lambda path: path.name)
        assert all(whole.seen[at] == then for at, then in witness.seen.items()), breaks_at
        assert witness.begun == begun
        seen |= witness.seen
    assert seen == whole.seen


@pytest.mark.parametrize(
    ("door", "saved", "stops", "options"),
    [
        ("ours", "at the epoch's end", {}, WHOLE),
        ("ours", "after the fit", {"max_steps": 9}, WHOLE),
        ("cache_datamodule", "after the fit", {}, {}),
        ("callback", "at the epoch's end", {}, {}),
    ],
)
def test_an_epoch_that_was_cut_short_goes_on(tmp_path, door, saved, stops, options):
    """A fit that `max_steps` or a Timer ended in the middle of an epoch resumes with the other batches of that epoch.
    Later epochs are those of a fit without such an end."""
    whole, first, second = Witness(), Witness(stops_after=None if stops else 9), Witness()
    fit(tmp_path / "whole", door, whole)
    save = ModelCheckpoint(tmp_path, "end-{step}", every_n_epochs=1, save_top_k=-1)
    trainer = fit(tmp_path, door, first, save, **stops)
    assert len(first.seen) == 9
    ckpt = tmp_path / "end-step=9.ckpt"
    if saved == "after the fit":
        trainer.save_checkpoint(ckpt := tmp_path / "after.ckpt")
    trainer = fit(tmp_path, door, second, ckpt=ckpt, **options)
    assert first.seen | second.seen == whole.seen
    assert len(second.seen) == EPOCHS * BATCHES - 9
    assert trainer.current_epoch == EPOCHS


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ({"val_check_interval": 2 * BATCHES, "check_val_every_n_epoch": None}, [1, 2]),
        pytest.param(
            {"val_check_interval": "00:00:00:00"},
            [2],  # a time begins anew, and nobody knows that a validation was the last of its epoch
            marks=pytest.mark.skipif(LIGHTNING < (2, 6), reason="validation is not due by time"),
        ),
    ],
)
def test_an_epoch_that_a_validation_ends_is_over(tmp_path, options, ended):
    """A checkpoint of a validation after an epoch's last batch resumes with the next epoch. The hooks at the end of the
    last epoch run."""
    options |= VALIDATES
    save = ModelCheckpoint(tmp_path, "{step}", save_on_train_epoch_end=False, save_top_k=-1)
    whole, second = Witness(), Witness()
    fit(tmp_path, "ours", whole, save, **options)
    fit(tmp_path, "ours", second, ckpt=tmp_path / f"step={2 * BATCHES}.ckpt", **options)
    assert second.seen == {at: then for at, then in whole.seen.items() if at[0] == 2}
    assert (second.begun, second.ended) == ([2], ended)


def test_an_epoch_of_more_batches_is_whole(tmp_path):
    """After a checkpoint of an epoch's last batch, an epoch of smaller batches has each sample once."""
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=BATCHES, save_top_k=-1)
    second = Witness()
    fit(tmp_path, "ours", Witness(), save)
    fit(tmp_path, "ours", second, ckpt=tmp_path / f"step={BATCHES}.ckpt", batch_size=2)
    for epoch in range(1, EPOCHS):
        numbers = sorted(number for at, (batch, _) in second.seen.items() if at[0] == epoch for number in batch)
        assert numbers == list(range(len(Numbers())))


def test_a_fit_that_is_complete_counts_as_before(tmp_path):
    """No epoch continues if `max_steps` is reached."""
    witness = Witness()
    trainer = fit(tmp_path, "ours", Witness(), max_steps=9)
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    again = fit(tmp_path, "ours", witness, ckpt=tmp_path / "after.ckpt", max_steps=9)
    assert (again.current_epoch, again.global_step, witness.seen) == (trainer.current_epoch, 9, {})


def test_an_epoch_that_a_hook_ended_is_over(tmp_path):
    """An epoch whose rest the model skips (`on_train_batch_start` returns -1) is over after a resume."""

    class Skips(Witness):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            pl_module.on_train_batch_start = lambda batch, batch_idx: -1 if batch_idx == 3 else None

    save = ModelCheckpoint(tmp_path, "{epoch}", every_n_epochs=1, save_top_k=-1)
    whole, second = Skips(), Skips()
    fit(tmp_path, "ours", whole, save)
    fit(tmp_path, "ours", second, ckpt=tmp_path / "epoch=0.ckpt")
    assert {at: batch for at, (batch, _) in second.seen.items()} == {
        at: batch for at, (batch, _) in whole.seen.items() if at[0] > 0
    }


class SavesAtBeginnings(PassThroughProfiler):
    """Saves a checkpoint when an epoch begins, while Lightning still counts the batches of the last epoch."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.trainer = folder, None

    def start(self, action_name: str) -> None:
        if action_name == "run_training_epoch":
            self.trainer.save_checkpoint(self.folder / f"begins-{self.trainer.current_epoch}.ckpt")


class Introduces(Callback):
    """Makes the Trainer known to its profiler."""

    def on_fit_start(self, trainer, pl_module):
        trainer.profiler.trainer = trainer


@pytest.mark.parametrize(("door", "epoch"), [("ours", 0), ("callback", 1), ("ours", 2)])
def test_an_epoch_that_is_about_to_begin_is_whole(tmp_path, door, epoch):
    """A checkpoint between an epoch's beginning and its first batch (by a signal's handler) resumes with all batches of
    that epoch."""
    whole, second = Witness(), Witness()
    fit(tmp_path, door, whole, Introduces(), profiler=SavesAtBeginnings(tmp_path))
    fit(tmp_path, door, second, ckpt=tmp_path / f"begins-{epoch}.ckpt")
    assert second.seen == {at: then for at, then in whole.seen.items() if at[0] >= epoch}


COUNTS = {"ready": 2, "started": 2, "processed": 2, "completed": 1}
BATCH_COUNTS = {"ready": 3, "started": 3, "processed": 3, "completed": 3}


@pytest.mark.parametrize(
    ("epoch", "batches", "last", "reopened"),
    [(1, 3, False, True), (1, 3, True, False), (1, 2, False, False), (2, 3, False, False)],
)
def test_only_the_epoch_that_was_cut_is_reopened(epoch, batches, last, reopened):
    """The count in a checkpoint changes only if it says that this epoch ended after so many batches."""
    progress = {"current": dict(COUNTS), "total": dict(COUNTS)}
    count = {"current": dict(BATCH_COUNTS), "total": dict(BATCH_COUNTS), "is_last_batch": last}
    checkpoint = {"loops": {"fit_loop": {"epoch_progress": progress, "epoch_loop.batch_progress": count}}}
    assert reopen_epoch(checkpoint, epoch, batches) is reopened
    expected = {"ready": 2, "started": 2, "processed": 1, "completed": 1} if reopened else COUNTS
    assert progress == {"current": expected, "total": expected}


@pytest.mark.parametrize("checkpoint", [{}, {"loops": {}}, {"loops": {"fit_loop": {}}}])
def test_a_checkpoint_without_counts_is_left_alone(checkpoint):
    """A checkpoint that counts nothing stays as it is."""
    before = {name: dict(value) for name, value in checkpoint.items()}
    assert not reopen_epoch(checkpoint, 1, 3)
    assert checkpoint == before

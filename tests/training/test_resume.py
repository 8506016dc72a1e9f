"""A training that resumes from a checkpoint has exactly the batches and the counts of a training without a break."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, Sampler, Subset

from tests.sources import Made
from tests.training.tiny import SAMPLES, Data, Model, Watcher, behind, data_hooks, make_trainer, said

EPOCHS, BATCHES = 3, SAMPLES // 4
LIGHTNING = tuple(map(int, lightning.__version__.split(".")[:2]))
NUMBERS = Made(lambda index: (torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10), SAMPLES)
Batches = dict[tuple[int, int], Any]  # by epoch and number of the batch


class BreakError(Exception):
    """Ends a fit as a kill does: nothing is saved, except by an OnExceptionCheckpoint."""


class Seen(Callback):
    """Records each batch and Lightning's counts at its start. May break or stop the fit after some batches."""

    def __init__(self, breaks_at: int | None = None, stops_after: int | None = None) -> None:
        self.breaks_at, self.stops_after = breaks_at, stops_after
        self.begun, self.ended = list[int](), list[int]()
        self.seen: Batches = {}

    @property
    def batches(self) -> Batches:
        """The indices of each batch."""
        return {at: indices for at, (indices, _) in self.seen.items()}

    def since(self, step: int, each: int = BATCHES) -> Batches:
        """The batches from a step on; an epoch has `each` batches."""
        return {at: indices for at, indices in self.batches.items() if each * at[0] + at[1] >= step}

    def epoch(self, number: int) -> list[int]:
        """The indices of an epoch, in their order."""
        return list(itertools.chain(*(indices for at, indices in self.batches.items() if at[0] == number)))

    def indices(self, batch: Any) -> Any:
        """The indices of a batch, of each loader if there are several, and None for an exhausted loader."""
        if batch is None or isinstance(batch[0], torch.Tensor):
            return None if batch is None else batch[0][:, 0, 0, 0].tolist()
        return list(map(self.indices, batch))

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
        self.seen[trainer.current_epoch, batch_idx] = self.indices(batch), counts

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        trainer.should_stop = len(self.seen) == self.stops_after


class Scheduled(Model):
    """Its scheduler asks for the number of steps, and so for loaders before the loops are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        return [optimizer], [torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)]


class Seeded(Sampler[int]):
    """A user's own order, from a generator that continues from epoch to epoch."""

    def __init__(self) -> None:
        self.draws = np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(SAMPLES).tolist())

    def __len__(self) -> int:
        return SAMPLES


class Users(Data):
    """A DataModule with a state of its own, and a sampler by its name."""

    def __init__(self, sampler: str = "random", **options: Any) -> None:
        self.state = "new"
        if sampler in ("distributed", "seeded"):
            options["sampler"] = Seeded() if sampler == "seeded" else DistributedSampler(NUMBERS, 1, 0, seed=3)
        super().__init__(NUMBERS, NUMBERS, **options)

    def state_dict(self) -> dict[str, Any]:
        return {"state": "saved"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def fit(folder, door, seen, *callbacks, ckpt=None, data=None, model=Model, **options) -> lightning.Trainer:
    """Fit, in a process that has other random states than the first if there is a checkpoint."""
    torch.manual_seed(11 if ckpt is None else 99)
    more, data = behind(door, Users() if data is None else data)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "logger": False} | options
    options["enable_checkpointing"] = bool(callbacks)
    trainer = make_trainer(folder, [*more, seen, *callbacks], epochs=EPOCHS, **options)
    trainer.fit(model(), datamodule=data, ckpt_path=ckpt)
    return trainer


def save(folder: Path, name: str = "{step:02d}", **when: Any) -> ModelCheckpoint:
    return ModelCheckpoint(folder, name, save_top_k=-1, **when)


def at_step(folder: Path, step: int) -> Path:
    """The checkpoint after a step."""
    return folder / f"step={step:02d}.ckpt"


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Callable[[str], tuple[Path, Seen]]:
    """For each door the folder with checkpoints of every second step of a fit, and all its batches."""

    @cache
    def fitted(door: str) -> tuple[Path, Seen]:
        folder, whole = tmp_path_factory.mktemp(door), Seen()
        fit(folder, door, whole, save(folder, every_n_train_steps=2))
        assert len(whole.seen) == EPOCHS * BATCHES
        return folder, whole

    return fitted


@pytest.mark.processes  # where set-up has not stored all of them
@pytest.mark.skipif("in_order" not in inspect.signature(DataLoader.__init__).parameters, reason="needs torch 2.6")
def test_batches_in_any_order_have_no_position_within_an_epoch(tmp_path, caplog):
    """A resume from there says so, and ends no training; one between epochs is as any other."""
    data = [Users(num_workers=2, in_order=False) for _ in range(2)]
    whole = Seen()
    fit(tmp_path, "callback", whole, save(tmp_path, every_n_train_steps=BATCHES // 2), data=data[0])
    assert len(whole.batches) == EPOCHS * BATCHES
    for step, warnings_ in ((BATCHES, 0), (BATCHES // 2, 1)):
        resumed = Seen()
        fit(tmp_path, "callback", resumed, ckpt=at_step(tmp_path, step), data=data[1])
        assert sorted(resumed.epoch(1)) == list(range(SAMPLES))
        assert len(said(caplog, "with in_order=False")) == warnings_


@pytest.mark.parametrize(
    ("name", "sampler", "workers"),
    [
        ("cache_datamodule", "random", 0),
        ("cache_datamodule", "distributed", 2),
        ("callback", "random", 1),
        ("callback", "seeded", 0),
        ("ours", "locality", 0),
        ("ours", "locality", 1),
    ],
)
def test_what_remains_is_what_would_have_come(tmp_path, name, sampler, workers):
    """After a checkpoint at any moment, in every door, the batches are those of a run without a break."""

    def run(seen: Seen, *callbacks: Callback, ckpt: Any = None) -> Seen:
        fit(tmp_path, name, seen, *callbacks, ckpt=ckpt, model=Scheduled, data=Users(sampler, num_workers=workers))
        return seen

    whole = run(Seen(), save(tmp_path, every_n_train_steps=8), save(tmp_path, "end-{step:02d}", every_n_epochs=1))
    assert len(whole.batches) == 18
    assert sorted(whole.epoch(1)) == list(range(SAMPLES))
    assert whole.batches[0, 0] != whole.batches[1, 0]
    for step in (8, 11):  # in the middle of a batch, and of the last one of an epoch
        with pytest.raises(BreakError):
            run(Seen(step), OnExceptionCheckpoint(tmp_path, f"broken-{step:02d}"))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 7
    for checkpoint in checkpoints[workers > 0 :: 2]:  # every door has each of them, with workers or without
        steps = torch.load(checkpoint, weights_only=True)["global_step"]
        assert run(Seen(), ckpt=checkpoint).batches == whole.since(steps), checkpoint.name


@pytest.mark.parametrize(("mode", "seeded"), [("min_size", False), ("max_size_cycle", False), ("max_size", True)])
def test_several_loaders_go_on_together(tmp_path, mode, seeded):
    """Each loader resumes at its position and in its own order, also if it has started again in the epoch."""

    def loaders() -> Any:
        short = Subset(NUMBERS, range(10))
        order = {"sampler": DistributedSampler(short, 1, 0, seed=3)} if seeded else {"shuffle": True}
        return CombinedLoader([DataLoader(NUMBERS, 4, shuffle=True), DataLoader(short, 4, **order)], mode)

    def run(*callbacks: Callback, ckpt: Any = None) -> Seen:
        seen = Seen()
        fit(tmp_path, "callback", seen, *callbacks, ckpt=ckpt, data=data_hooks(train=loaders), model=Watcher)
        return seen

    whole = run(save(tmp_path, every_n_train_steps=1))
    each = 3 if mode == "min_size" else 6
    assert len(whole.batches) == 3 * each
    for step in (each + 1, 2 * each - 1):  # the second loader has three batches
        assert run(ckpt=at_step(tmp_path, step)).batches == whole.since(step, each), step


@pytest.mark.parametrize(
    ("name", "batch_size", "step"), [("ours", 3, 8), ("cache_datamodule", 8, 8), ("callback", 2, BATCHES)]
)
def test_another_batch_size_goes_on_after_the_same_samples(tmp_path, caplog, saved, name, batch_size, step):
    """With another batch size every sample of the epoch comes once, and later epochs are whole."""
    folder, whole = saved(name)
    data = Users(batch_size=batch_size)
    trainer = fit(tmp_path, name, seen := Seen(), ckpt=at_step(folder, step), data=data, max_epochs=2)
    warned = f"batch size has changed from 4 to {batch_size}: the loader goes on after the same samples" in caplog.text
    assert warned == (step > BATCHES)
    assert seen.epoch(1) == whole.epoch(1)[4 * (step - BATCHES) :]
    trainer.fit_loop.max_epochs = EPOCHS
    trainer.fit(Model(), trainer.datamodule)
    assert sorted(seen.epoch(2)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    "state",
    [{"sampler": [1, 2]}, {"epoch": 1, "loaders": [{}, {}]}, {"epoch": 1, "loaders": [{"version": 9, "batches": 2}]}],
)
def test_a_foreign_state_is_no_error(tmp_path, caplog, saved, state):
    """A checkpoint with a foreign state is used, with a warning."""
    checkpoint = torch.load(at_step(saved("ours")[0], 8), weights_only=False)
    checkpoint["callbacks"]["lightning_stocache"] = state
    torch.save(checkpoint, tmp_path / "foreign.ckpt")
    fit(tmp_path, "ours", seen := Seen(), ckpt=tmp_path / "foreign.ckpt", max_steps=9)
    assert seen.batches
    assert "does not say where in an epoch" in caplog.text


@pytest.mark.parametrize(
    ("begun", "other", "same"),
    [
        ("callback", "none", False),
        ("none", "cache_datamodule", False),
        ("callback", "cache_datamodule", True),
        ("ours", "callback", True),
        ("callback", "ours", False),
    ],
)
def test_doors_understand_each_other(tmp_path, caplog, saved, begun, other, same):
    """A fit resumes with another door, without a cache, or with one for the first time, with the user's own state. If
    the order of a cached fit does not follow from its checkpoint, a warning says so."""
    folder, whole = saved(begun)
    seen, users = Seen(), Users()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        fit(tmp_path, other, seen, ckpt=at_step(folder, 8), data=users)
    assert len(seen.batches) == 10
    assert (seen.batches == whole.since(8)) is same
    assert users.state == ("new" if "ours" in (begun, other) else "saved")
    assert ("the sampler is of another kind: the loader goes on in another order" in caplog.text) == (other == "ours")


WHOLE = {"max_steps": EPOCHS * BATCHES}
VALIDATES = {"limit_val_batches": 2}


@pytest.mark.parametrize(("door", "options"), [("ours", VALIDATES), ("callback", WHOLE)])
def test_an_epoch_that_begins_with_a_resume_is_counted(tmp_path, saved, door, options):
    """After breaks in two epochs, batches and counts are those of a fit without a break."""
    whole, seen, ckpt = saved(door)[1].seen, Batches(), None
    # The last checkpoints are those of steps 6, 8, 12 and 12.
    for breaks_at, begun in ((7, [0, 1]), (3, [1]), (5, [2]), (1, [2]), (None, [2])):
        part = Seen(breaks_at)
        try:
            fit(tmp_path, door, part, save(tmp_path, every_n_train_steps=2), ckpt=ckpt, **options)
        except BreakError:
            ckpt = max(tmp_path.glob("*.ckpt"))
        assert all(whole[at] == then for at, then in part.seen.items()), breaks_at
        assert part.begun == begun
        seen |= part.seen
    assert seen == whole


@pytest.mark.parametrize(
    ("door", "at_the_end", "stops", "options"),
    [("ours", True, {}, WHOLE), ("cache_datamodule", False, {"max_steps": 9}, WHOLE), ("callback", False, {}, {})],
)
def test_an_epoch_that_was_cut_short_goes_on(tmp_path, saved, door, at_the_end, stops, options):
    """A fit that `max_steps` or a Timer ended resumes with the other batches of that epoch, then with whole epochs. If
    `max_steps` is still the same, nothing runs and the counts stay."""
    first, second, none = Seen(stops_after=None if stops else 9), Seen(), Seen()
    trainer = fit(tmp_path, door, first, save(tmp_path, "end-{step:02d}", every_n_epochs=1), **stops)
    assert len(first.seen) == 9
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    ckpt = tmp_path / ("end-step=09.ckpt" if at_the_end else "after.ckpt")
    again = fit(tmp_path, door, none, ckpt=tmp_path / "after.ckpt", max_steps=9)
    assert (again.current_epoch, again.global_step, none.seen) == (trainer.current_epoch, 9, {})
    trainer = fit(tmp_path, door, second, ckpt=ckpt, **options)
    assert first.seen | second.seen == saved(door)[1].seen
    assert len(second.seen) == EPOCHS * BATCHES - 9
    assert trainer.current_epoch == EPOCHS


BY_TIME = pytest.mark.skipif(LIGHTNING < (2, 6), reason="validation is not due by time")


@pytest.mark.parametrize(
    ("options", "ended"),
    [
        ({"val_check_interval": 2 * BATCHES, "check_val_every_n_epoch": None}, [1, 2]),
        # A time begins anew, and nobody knows that a validation was the last of its epoch.
        pytest.param({"val_check_interval": "00:00:00:00"}, [2], marks=BY_TIME),
    ],
)
def test_an_epoch_that_a_validation_ends_is_over(tmp_path, saved, options, ended):
    """A checkpoint of a validation after an epoch's last batch resumes with the next epoch."""
    saves = save(tmp_path, save_on_train_epoch_end=False)
    fit(tmp_path, "ours", Seen(), saves, max_epochs=2, **options | VALIDATES)
    fit(tmp_path, "ours", second := Seen(), ckpt=at_step(tmp_path, 2 * BATCHES), **options | VALIDATES)
    assert second.seen == {at: then for at, then in saved("ours")[1].seen.items() if at[0] == 2}
    assert (second.begun, second.ended) == ([2], ended)


def test_an_epoch_that_a_hook_ended_is_over(tmp_path):
    """An epoch whose rest the model skips (`on_train_batch_start` returns -1) is over after a resume."""

    class Skips(Model):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    fit(tmp_path, "ours", whole := Seen(), save(tmp_path, "end-{step:02d}", every_n_epochs=1), model=Skips)
    fit(tmp_path, "ours", second := Seen(), ckpt=tmp_path / "end-step=03.ckpt", model=Skips)
    assert second.batches == whole.since(BATCHES)


def test_an_epoch_that_is_about_to_begin_is_whole(tmp_path):
    """A checkpoint between an epoch's beginning and its first batch resumes with all batches of that epoch."""

    def begins(trainer: Any, action: str) -> None:
        if action == "run_training_epoch":  # Lightning still counts the batches of the last epoch
            trainer.save_checkpoint(tmp_path / f"begins-{trainer.current_epoch}.ckpt")

    saves = LambdaCallback(on_fit_start=lambda trainer, _: setattr(trainer.profiler, "start", partial(begins, trainer)))
    fit(tmp_path, "ours", whole := Seen(), saves)
    for number in (0, 2):
        fit(tmp_path, "ours", second := Seen(), ckpt=tmp_path / f"begins-{number}.ckpt")
        assert second.seen == {at: then for at, then in whole.seen.items() if at[0] >= number}


class Stops(Callback):
    """Raises an error at the first call of a named hook."""

    def __init__(self, hook: str, error: type[BaseException]) -> None:
        self.error: type[BaseException] | None = error
        setattr(self, hook, self.stop)

    def stop(self, *args: Any) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("door", "hook", "error"),
    [
        ("callback", "on_train_batch_start", ArithmeticError),
        ("cache_datamodule", "on_train_batch_end", KeyboardInterrupt),
        ("ours", "on_train_start", SystemExit),
        ("callback", "on_train_epoch_start", KeyboardInterrupt),
        ("ours", "on_before_optimizer_step", ArithmeticError),
    ],
)
def test_a_resumed_fit_that_ends_in_an_error_leaves_nothing_to_the_next_fit(tmp_path, saved, door, hook, error):
    """The next fit of the same Trainer without a checkpoint has the batches that it has without a cache."""
    folder, _ = saved(door)
    options = {"num_sanity_val_steps": 0, "limit_val_batches": 0, "logger": False}
    batches = []
    for way in door, "none":
        more, data = behind(way, Users("distributed"))
        trainer = make_trainer(tmp_path, [*more, Stops(hook, error), seen := Seen()], epochs=EPOCHS, **options)
        with pytest.raises(SystemExit if error is KeyboardInterrupt else error):
            trainer.fit(Model(), datamodule=data, ckpt_path=at_step(folder, 2))
        seen.seen.clear()
        trainer.fit(Model(), datamodule=data)
        batches.append(seen.batches)
    assert batches[0] == batches[1]

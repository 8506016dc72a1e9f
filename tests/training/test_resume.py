"""A training that resumes from a checkpoint sees exactly the batches of a training without a break."""

import itertools
import os
import random
import re
import signal
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from lightning_stocache import StochasticCache
from tests.processes import Child
from tests.training.tiny import SAMPLES, Data, Model, Numbers, behind, make_trainer

pytestmark = pytest.mark.processes

BATCH = 4  # of 24 samples: six batches per epoch


class Scheduled(Model):
    """Its scheduler asks for the number of steps, and so for loaders before the loops are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)},
        }


class Seen(Callback):
    """Records the indices of each batch, by epoch and number of the batch. May raise in the middle of a batch."""

    def __init__(self, fails_at: tuple[int, int] | None = None) -> None:
        self.fails_at = fails_at
        self.batches: dict[tuple[int, int], list[int]] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        at = trainer.current_epoch, batch_idx
        if at == self.fails_at:
            raise KeyError("bad luck")
        self.batches[at] = batch[0][:, 0, 0, 0].tolist()


class Seeded(Sampler[int]):
    """A user's own order, from a generator that continues from epoch to epoch."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.draws = dataset, np.random.default_rng(5)

    def __iter__(self) -> Iterator[int]:
        return iter(self.draws.permutation(len(self.dataset)).tolist())

    def __len__(self) -> int:
        return len(self.dataset)


class Users(Data):
    """A DataModule with a state of its own, and a sampler by its name."""

    def __init__(self, workers: int, batch_size: int, sampler: str, samples: int) -> None:
        numbers, self.state = Numbers(samples), "new"
        options: dict[str, Any] = {
            "distributed": {"sampler": DistributedSampler(numbers, 1, 0, seed=3)},
            "seeded": {"sampler": Seeded(numbers)},
        }.get(sampler, {})
        options |= {"multiprocessing_context": "fork"} if workers else {}
        super().__init__(numbers, batch_size=batch_size, num_workers=workers, **options)

    def state_dict(self) -> dict[str, Any]:
        return {"state": "saved"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


def door(
    name: str, workers: int = 0, batch_size: int = BATCH, sampler: str = "random", samples: int = SAMPLES
) -> tuple[Any, list[Callback]]:
    """The data and the callbacks of a door."""
    torch.manual_seed(11)
    callbacks, data = behind(name, Users(workers, batch_size, sampler, samples))
    return data, callbacks


def fit(folder: Path, dm: Any, model: Model, *callbacks: Callback, ckpt: Any = None, **options: Any) -> dict[Any, Any]:
    seen = next((callback for callback in callbacks if isinstance(callback, Seen)), Seen())
    options |= {"enable_checkpointing": any(isinstance(callback, Checkpoint) for callback in callbacks)}
    trainer = make_trainer(folder, [*callbacks, *([] if seen in callbacks else [seen])], epochs=3, **options)
    trainer.fit(model, datamodule=dm, ckpt_path=ckpt)
    return seen.batches


def epoch(seen: dict[tuple[int, int], list[int]], number: int) -> list[int]:
    """The indices of an epoch, in their order."""
    return [index for (of, _), batch in seen.items() if of == number for index in batch]


CASES = [
    ("cache_datamodule", "random", 0, Scheduled),
    ("cache_datamodule", "distributed", 2, Model),
    ("callback", "random", 2, Scheduled),
    ("callback", "seeded", 0, Model),
    ("ours", "locality", 0, Scheduled),
    ("ours", "locality", 2, Model),
]


@pytest.mark.parametrize(("name", "sampler", "workers", "model"), CASES)
def test_what_remains_is_what_would_have_come(tmp_path, name, sampler, workers, model):
    """All batches after a resume are those of a run without a break: with a checkpoint after any batch, at an epoch's
    end or on an exception, in every door, with and without workers, with each sampler and scheduler."""

    def run(*callbacks: Callback, ckpt: Any = None) -> dict[Any, Any]:
        data, more = door(name, workers, sampler=sampler)
        if ckpt is not None:
            torch.manual_seed(99)  # another process has other states
        return fit(tmp_path, data, model(), *more, *callbacks, ckpt=ckpt)

    every = ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_train_steps=4, save_top_k=-1)
    ends = ModelCheckpoint(tmp_path, "end-{epoch}-{step}", every_n_epochs=1, save_top_k=-1)
    whole = run(every, ends)
    assert len(whole) == 18
    assert sorted(epoch(whole, 1)) == list(range(SAMPLES))
    assert whole[0, 0] != whole[1, 0]
    for at in ((1, 2), (1, 5)):  # in the middle of a batch, and of the last one
        rescue = OnExceptionCheckpoint(tmp_path, f"broken-{at}")
        with pytest.raises(KeyError):
            run(rescue, Seen(fails_at=at))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 9
    for checkpoint in checkpoints[:: 2 if workers else 1]:
        seen = run(ckpt=checkpoint)
        steps = torch.load(checkpoint, weights_only=True)["global_step"]
        assert seen == {at: batch for at, batch in whole.items() if 6 * at[0] + at[1] >= steps}, checkpoint.name


class Several(LightningDataModule):
    """Two loaders of unequal lengths, which are read together."""

    def __init__(self, mode: str, seeded: bool = False) -> None:
        super().__init__()
        self.mode, self.sets = mode, [Numbers(), torch.utils.data.Subset(Numbers(), range(10))]
        self.seeded = seeded

    def train_dataloader(self) -> Any:
        long, short = (DataLoader(dataset, BATCH, shuffle=True) for dataset in self.sets)
        if self.seeded:
            short = DataLoader(self.sets[1], BATCH, sampler=DistributedSampler(self.sets[1], 1, 0, seed=3))
        return CombinedLoader([long, short], self.mode)


class Both(Model):
    """Trains on the first of two batches."""

    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)


class SeenOfBoth(Seen):
    """Records the indices of both batches of each step, and None for an exhausted loader."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        at = trainer.current_epoch, batch_idx
        self.batches[at] = [None if part is None else part[0][:, 0, 0, 0].tolist() for part in batch]


@pytest.mark.parametrize(
    ("mode", "seeded"), [("min_size", False), ("max_size", False), ("max_size_cycle", False), ("max_size", True)]
)
def test_several_loaders_go_on_together(tmp_path, mode, seeded):
    """Each loader resumes at its position, also a loader that has started again in the epoch. If only the second has a
    sampler with seed and epoch, the first keeps its own order."""

    def run(*callbacks: Callback, ckpt: Any = None) -> dict[Any, Any]:
        torch.manual_seed(11 if ckpt is None else 99)
        return fit(tmp_path, Several(mode, seeded), Both(), StochasticCache(), SeenOfBoth(), *callbacks, ckpt=ckpt)

    whole = run(ModelCheckpoint(tmp_path, "{step:02d}", every_n_train_steps=1, save_top_k=-1))
    steps = 3 if mode == "min_size" else 6
    assert len(whole) == 3 * steps
    for saved in range(1, 3 * steps, 2 if steps == 3 else 3):
        seen = run(ckpt=tmp_path / f"step={saved:02d}.ckpt")
        assert seen == {at: batch for at, batch in whole.items() if steps * at[0] + at[1] >= saved}, saved


def saved_after_eight(tmp_path: Path, name: str) -> tuple[Path, dict[Any, Any]]:
    """A checkpoint after the second batch of the second epoch, and all batches of the fit."""
    data, more = door(name)
    save = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1)
    return tmp_path / "step=8.ckpt", fit(tmp_path, data, Model(), *more, save)


@pytest.mark.parametrize(("name", "batch_size"), [("ours", 3), ("ours", 8), ("cache_datamodule", 2), ("callback", 5)])
def test_another_batch_size_goes_on_after_the_same_samples(tmp_path, caplog, name, batch_size):
    """With another batch size there is a warning, every sample of the epoch comes once, and the next epoch is whole."""
    checkpoint, whole = saved_after_eight(tmp_path, name)
    data, more = door(name, batch_size=batch_size)
    seen = fit(tmp_path, data, Model(), *more, ckpt=checkpoint)
    assert re.search(f"batch size has changed from 4 to {batch_size}: .* after the same samples", caplog.text)
    assert epoch(seen, 1) == epoch(whole, 1)[8:]
    assert sorted(epoch(seen, 2)) == list(range(SAMPLES))


@pytest.mark.parametrize(
    "state",
    [{"sampler": [1, 2]}, {"epoch": 1, "loaders": "2"}, {"epoch": 1, "loaders": [{"version": 9, "batches": 2}]}],
)
def test_a_foreign_state_is_no_error(tmp_path, caplog, state):
    """A checkpoint with a foreign state is used, with a warning."""
    path, _ = saved_after_eight(tmp_path, "ours")
    checkpoint = torch.load(path, weights_only=False)
    checkpoint["callbacks"]["lightning_stocache"] = state
    torch.save(checkpoint, path)
    assert fit(tmp_path, door("ours")[0], Model(), ckpt=path)
    assert "does not say where in an epoch" in caplog.text


@pytest.mark.parametrize("name", ["cache_datamodule", "callback"])
def test_a_checkpoint_is_good_without_the_cache(tmp_path, name):
    """A checkpoint of a cached fit resumes without a cache, and the other way round. The user's own state is
    restored."""
    cached, _ = saved_after_eight(tmp_path, name)
    users, _ = door("none")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`")
        assert len(fit(tmp_path, users, Model(), ckpt=cached)) == 10
    assert users.state == "saved"
    save = ModelCheckpoint(tmp_path, "plain-{step}", every_n_train_steps=8, save_top_k=-1)
    fit(tmp_path, door("none")[0], Model(), save)
    data, more = door(name)
    assert len(fit(tmp_path, data, Model(), *more, ckpt=tmp_path / "plain-step=8.ckpt")) == 10


@pytest.mark.parametrize(("begun", "other"), [("callback", "cache_datamodule"), ("ours", "callback")])
def test_doors_understand_each_other(tmp_path, begun, other):
    """A fit resumes with another door. The callback, which draws otherwise on one rank, keeps the order of seed and
    epoch of StocacheDataModule."""
    checkpoint, whole = saved_after_eight(tmp_path, begun)
    data, more = door(other)
    seen = fit(tmp_path, data, Model(), *more, ckpt=checkpoint)
    assert seen == {at: batch for at, batch in whole.items() if 6 * at[0] + at[1] >= 8}


def test_an_order_of_another_kind_is_said(tmp_path, caplog):
    """If the present order does not follow from the checkpoint, a warning says so."""
    checkpoint, _ = saved_after_eight(tmp_path, "callback")
    assert fit(tmp_path, door("ours")[0], Model(), ckpt=checkpoint)
    assert re.search("the sampler is of another kind: .* in another order", caplog.text)


def test_the_next_fit_begins_anew(tmp_path):
    """A second fit of the same Trainer without a checkpoint starts its epoch at the beginning."""
    checkpoint, _ = saved_after_eight(tmp_path, "callback")
    data, more = door("callback")
    seen = Seen()
    trainer = make_trainer(tmp_path, [*more, seen], epochs=2)
    trainer.fit(Model(), data, ckpt_path=checkpoint)
    assert len(seen.batches) == 4
    trainer.fit_loop.max_epochs = 3
    trainer.fit(Model(), data)
    assert sorted(epoch(seen.batches, 2)) == list(range(SAMPLES))


MANY, EPOCHS = 48, 3  # samples and epochs of fits that are killed


class Witness(Callback):
    """Writes down each batch of a rank before its step; one rank is killed in the middle of a step."""

    def __init__(self, folder: Path, killed: tuple[int, int] | None) -> None:
        self.folder, self.killed = folder, killed

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        indices = " ".join(map(str, batch[0][:, 0, 0, 0].tolist()))
        with open(self.folder / f"rank{trainer.global_rank}.txt", "a") as lines:
            lines.write(f"{trainer.current_epoch} {batch_idx} {indices}\n")
        if self.killed == (trainer.global_rank, trainer.global_step):
            os.kill(os.getpid(), signal.SIGKILL)


def fit_on(folder: Path, name: str, ranks: int, workers: int, killed: tuple[int, int] | None) -> None:
    """Fit, from the last checkpoint in the folder if there is one. A rank may be killed in a step."""
    data, callbacks = door(name, workers, samples=MANY)
    callbacks += [Witness(folder, killed), ModelCheckpoint(folder, "{step:04d}", every_n_train_steps=2, save_top_k=-1)]
    more: dict[str, Any] = {"devices": ranks, "strategy": "ddp_fork"} if ranks > 1 else {}
    trainer = make_trainer(folder, callbacks, epochs=EPOCHS, enable_checkpointing=True, **more)
    saved = sorted(folder.glob("*.ckpt"))
    trainer.fit(Model(), data, ckpt_path=saved[-1] if saved else None)
    (folder / "done").touch()


def seen_by(folder: Path, ranks: int) -> list[dict[tuple[int, int], list[int]]]:
    """The batches of each rank. A step that ran again after a kill had the same batch."""
    seen: list[dict[tuple[int, int], list[int]]] = []
    for rank in range(ranks):
        batches: dict[tuple[int, int], list[int]] = {}
        for line in (folder / f"rank{rank}.txt").read_text().splitlines():
            number, batch, *indices = map(int, line.split())
            assert batches.setdefault((number, batch), indices) == indices, f"rank {rank}, {line}"
        seen.append(batches)
    return seen


SOAK = [pytest.mark.soak, pytest.mark.timeout(1200)]
EVERY_DOOR = itertools.product(("ours", "cache_datamodule", "callback"), (1, 2), (0, 2))


@pytest.mark.parametrize(
    ("name", "ranks", "workers", "count"),
    [("callback", 2, 0, 1), *(pytest.param(*case, 4, marks=SOAK) for case in EVERY_DOOR)],
)
def test_killed_runs_go_on_where_they_were(tmp_path, name, ranks, workers, count):
    """A fit that is killed in random steps, and resumes from its last checkpoint, runs on each rank the batches of a
    fit that was never killed, in every door."""
    draw, steps = random.Random(f"{name}{ranks}{workers}"), EPOCHS * MANY // (4 * ranks)
    kills = [(draw.randrange(ranks), step) for step in sorted(draw.sample(range(3, steps - 2), count))]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder, ends in ((whole, [None]), (broken, [*kills, None])):
        folder.mkdir()
        for killed in ends:
            job = Child(fit_on, folder, name, ranks, workers, killed, method="forkserver")
            job.process.join(200)
            assert not job.process.is_alive()
            assert (folder / "done").exists() is (killed is None), f"killed at {killed}"
    for one, other in zip(seen_by(whole, ranks), seen_by(broken, ranks), strict=True):
        assert one == other
        assert len(one) == steps


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("callback", 2, 1),
        pytest.param("ours", 1, 2, marks=pytest.mark.soak),
        pytest.param("ours", 2, 1, marks=pytest.mark.soak),
        pytest.param("cache_datamodule", 2, 1, marks=pytest.mark.soak),
    ],
)
def test_another_number_of_ranks_goes_on_after_the_same_samples(tmp_path, name, before, after):
    """A fit that is killed in its first epoch, and resumes on another number of ranks, runs each sample of the epoch
    once, and later epochs are whole."""
    seen: list[dict[tuple[int, int], list[int]]] = []
    for ranks, killed in ((before, (0, 4)), (after, None)):
        job = Child(fit_on, tmp_path, name, ranks, 0, killed, method="forkserver")
        job.process.join(200)
        assert (tmp_path / "done").exists() is (killed is None)
        for batches in seen_by(tmp_path, ranks):
            seen.append({at: batch for at, batch in batches.items() if killed is None or at < killed})
        for file in tmp_path.glob("rank*.txt"):
            file.unlink()
    for number in range(EPOCHS):
        indices = [index for batches in seen for index in epoch(batches, number)]
        assert sorted(indices) == list(range(MANY)), number

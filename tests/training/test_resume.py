"""Training that goes on from a checkpoint sees exactly the batches that it would have seen without the break."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_stocache import StocacheDataModule, StochasticCache, cache_datamodule
from lightning_stocache.training.position import Position
from tests.training.tiny import Model, make_trainer

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 24, 4  # six batches per epoch


class Numbers(torch.utils.data.Dataset[Any]):
    """Images that are all of one value, their index."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 8, 8), index, dtype=torch.uint8), index % 10


class Scheduled(Model):
    """Its scheduler wants to know the number of steps, so that loaders are asked for before the loops are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        steps = int(self.trainer.estimated_stepping_batches)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)},
        }


class Seen(Callback):
    """The indices of each batch, by epoch and Lightning's number of the batch; raises in the middle of one, if told."""

    def __init__(self, fails_at: tuple[int, int] | None = None) -> None:
        self.fails_at = fails_at
        self.batches: dict[tuple[int, int], list[int]] = {}

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        at = trainer.current_epoch, batch_idx
        if at == self.fails_at:
            raise KeyError("bad luck")
        self.batches[at] = batch[0][:, 0, 0, 0].tolist()


def ours(workers: int = 0, batch_size: int = BATCH) -> StocacheDataModule:
    options = {"multiprocessing_context": "fork"} if workers else {}
    return StocacheDataModule(Numbers(), batch_size=batch_size, num_workers=workers, loader=options)


def fit(folder: Path, dm: Any, model: Model, *callbacks: Callback, ckpt: Any = None, **options: Any) -> dict[Any, Any]:
    seen = next((callback for callback in callbacks if isinstance(callback, Seen)), Seen())
    options |= {"enable_checkpointing": any(isinstance(callback, ModelCheckpoint) for callback in callbacks)}
    trainer = make_trainer(folder, [*callbacks, *([] if seen in callbacks else [seen])], epochs=3, **options)
    trainer.fit(model, datamodule=dm, ckpt_path=ckpt)
    return seen.batches


def epoch(seen: dict[tuple[int, int], list[int]], number: int) -> list[int]:
    """The indices of an epoch, in their order."""
    return [index for (of, _), batch in seen.items() if of == number for index in batch]


@pytest.mark.parametrize("model", [Model, Scheduled])
@pytest.mark.parametrize("workers", [0, 2])
def test_what_remains_is_what_would_have_come(tmp_path, workers, model):
    """From a checkpoint after any batch, at an epoch's end or on an exception, with and without workers, whatever the
    scheduler asks for: the remaining batches are those of the run without a break."""
    every = ModelCheckpoint(tmp_path, "{epoch}-{step}", every_n_train_steps=4, save_top_k=-1)
    ends = ModelCheckpoint(tmp_path, "end-{epoch}-{step}", every_n_epochs=1, save_top_k=-1)
    whole = fit(tmp_path, ours(workers), model(), every, ends)
    assert len(whole) == 18
    assert sorted(epoch(whole, 1)) == list(range(SAMPLES))
    assert whole[0, 0] != whole[1, 0]
    for at in ((1, 2), (1, 5)):  # in the middle of a batch, and of the last one
        rescue = ModelCheckpoint(tmp_path, f"broken-{at}", save_on_exception=True, every_n_epochs=10)
        with pytest.raises(KeyError):
            fit(tmp_path, ours(), model(), rescue, Seen(fails_at=at))
    checkpoints = sorted(tmp_path.glob("*.ckpt"))
    assert len(checkpoints) == 9
    for checkpoint in checkpoints:
        seen = fit(tmp_path, ours(workers), model(), ckpt=checkpoint)
        steps = torch.load(checkpoint, weights_only=False)["global_step"]
        assert seen == {at: batch for at, batch in whole.items() if 6 * at[0] + at[1] >= steps}, checkpoint.name


@pytest.fixture
def after_eight(tmp_path) -> Path:
    """A checkpoint after the second batch of the second epoch."""
    fit(tmp_path, ours(), Model(), ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=8, save_top_k=-1))
    return tmp_path / "step=8.ckpt"


@pytest.mark.parametrize(("batch_size", "skipped"), [(2, 4), (8, 1)])
def test_another_batch_size_goes_on_after_the_same_samples(tmp_path, after_eight, batch_size, skipped):
    """With another batch size there is a warning, nothing of the epoch comes twice, and the next epoch is whole."""
    with pytest.warns(UserWarning, match=f"batch size has changed from 4 to {batch_size}: .* after {skipped} batches"):
        seen = fit(tmp_path, ours(batch_size=batch_size), Model(), ckpt=after_eight)
    order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(1)).tolist()
    rest = epoch(seen, 1)
    assert rest
    assert rest == order[8 : 8 + len(rest)]
    assert sorted(epoch(seen, 2)) == list(range(SAMPLES))


def test_position_in_another_world():
    """In a world of another size as many samples of the global order are left out, and both sizes are named."""
    then = Position(epoch=1, batch=6, world=2, batch_size=4, length=100, seed=0)
    now = Position(epoch=0, batch=0, world=4, batch_size=4, length=100, seed=7)
    assert then.resumed(now) == (3, "the world has changed from 2 to 4 and the seed has changed from 0 to 7")
    assert then.resumed(then) == (6, None)


@pytest.mark.parametrize("state", [{"sampler": [1, 2]}, {"epoch": 1, "batch": "2"}])
def test_a_foreign_state_is_no_error(tmp_path, after_eight, state):
    """A checkpoint whose state is of another kind is trained from, with a warning; an empty one has nothing to say."""
    checkpoint = torch.load(after_eight, weights_only=False)
    checkpoint["StocacheDataModule"] = state
    torch.save(checkpoint, after_eight)
    with pytest.warns(UserWarning, match="does not say where in an epoch"):
        assert fit(tmp_path, ours(), Model(), ckpt=after_eight)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours().load_state_dict({})


class Users(LightningDataModule):
    """A DataModule with a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.state = Numbers(), "new"

    def train_dataloader(self) -> Any:
        return DataLoader(self.numbers, batch_size=BATCH)

    def state_dict(self) -> dict[str, Any]:
        return {"state": "saved"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict["state"]


@pytest.mark.parametrize("door", ["datamodule", "callback"])
def test_other_doors_leave_it_to_lightning(tmp_path, door):
    """A user's DataModule keeps its own state, and resumes with the batches that Lightning gives it uncached."""

    def run(cached: bool, ckpt: Path | None = None, *callbacks: Callback) -> tuple[Any, str]:
        dm = Users()
        given: Any = cache_datamodule(dm) if cached and door == "datamodule" else dm
        more = [StochasticCache()] if cached and door == "callback" else []
        return fit(tmp_path, given, Model(), *callbacks, *more, ckpt=ckpt), dm.state

    for cached in (False, True):
        save = ModelCheckpoint(tmp_path, f"{cached}-{{step}}", every_n_train_steps=8, save_top_k=-1)
        run(cached, None, save)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the hit rate of this epoch")  # less is filled before the second one
        results = [run(cached, tmp_path / f"{cached}-step=8.ckpt") for cached in (False, True)]
    assert results[0] == results[1]
    assert results[0][1] == "saved"

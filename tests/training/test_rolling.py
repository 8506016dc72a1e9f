"""A rolling cache in a Trainer: by the DataModule, the callback and Hydra, its epochs and its metrics."""

import logging
import time
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import (
    CachedLoader,
    CacheMonitor,
    FillProgress,
    RollingCache,
    RollingWriter,
    StocacheDataModule,
    StochasticCache,
)
from tests.sources import Allowance
from tests.training.tiny import DOORS, Data, Remembers, behind, logged, make_trainer

pytestmark = pytest.mark.processes


class Slow(Dataset[Any]):
    """Samples that come when they are allowed to."""

    def __init__(self, allowed: Allowance | None = None) -> None:
        self.allowed = allowed

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.allowed is not None:
            self.allowed(index)
        return torch.full((4,), float(index))


class Growing(pl.Callback):
    """After each epoch some more samples come."""

    def __init__(self, pool: RollingCache, allowed: Allowance, more: int) -> None:
        self.pool, self.allowed, self.more = pool, allowed, more

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        before = self.pool.stats().resident
        self.allowed.more(self.more)
        while before < 60 and self.pool.stats().resident == before:
            time.sleep(0.002)


def test_the_datamodule_trains_on_what_is_resident(tmp_path):
    """Epochs grow, because new loaders are made before each. The metrics count samples that came, left and were
    seen."""
    model, allowed = Remembers(), Allowance(tmp_path / "allowed", 8)
    pool = RollingCache(Slow(allowed), "100%", fillers=1, minimum=8)
    dm = StocacheDataModule(train=pool, batch_size=4)
    callbacks = [CacheMonitor(), Growing(pool, allowed, 8)]
    trainer = make_trainer(tmp_path, callbacks, epochs=6)
    trainer.fit(model, dm)
    lengths = [len(epoch) for epoch in model.epochs]
    assert 8 <= lengths[0] < lengths[-1] <= 60
    assert all(len(set(epoch)) == len(epoch) for epoch in model.epochs)
    assert not pool.is_open
    names = ("resident", "appended_per_second", "evicted_per_second", "oldest_seconds", "times_seen")
    values = {name: logged(trainer, f"stocache/rolling/{name}") for name in names}
    assert {name: len(epochs) for name, epochs in values.items()} == dict.fromkeys(names, 6)
    assert values["resident"][-1] >= lengths[-1]
    assert values["appended_per_second"][1] > 0
    assert values["evicted_per_second"][-1] == 0
    assert 0 < values["oldest_seconds"][-1] < 600
    assert values["times_seen"][-1] >= 1
    assert logged(trainer, "stocache/hit_rate")[-1] == 1


@pytest.mark.parametrize("make", [CachedLoader, DataLoader])
def test_the_callback_follows_a_pool_that_grows(tmp_path, make, caplog):
    """A loader that is given to `fit` grows with the resident samples, too. One line names the Trainer's changed
    setting, which is restored at the end."""
    model, allowed = Remembers(), Allowance(tmp_path / "allowed", 8)
    pool = RollingCache(Slow(allowed), "100%", fillers=1, minimum=8)
    loader = make(pool, batch_size=4, sampler=pool.sampler())
    callbacks = [StochasticCache("1MiB"), Growing(pool, allowed, 8)]
    with caplog.at_level(logging.INFO):
        trainer = make_trainer(tmp_path, callbacks, epochs=3)
        trainer.fit(model, loader)
    assert trainer.reload_dataloaders_every_n_epochs == 0
    lengths = [len(epoch) for epoch in model.epochs]
    assert lengths == sorted(set(lengths))
    assert caplog.text.count("reload_dataloaders_every_n_epochs=1") == 1
    assert "samples are in the rolling cache; training read each loaded sample" in caplog.text
    pool.close()


def test_a_full_pool_says_what_follows(tmp_path, caplog):
    """One line tells how large a pool is when it opens. When it is full, the line has no seconds that will not be
    repeated: new samples replace the oldest."""

    class Filling(pl.Callback):
        def on_train_batch_start(self, trainer, pl_module, *rest):
            while pool.stats().resident < 30:
                allowed.more(1)
                time.sleep(0.002)

    allowed = Allowance(tmp_path / "allowed", 8)
    pool = RollingCache(Slow(allowed), "50%", fillers=1, minimum=8)
    with caplog.at_level(logging.INFO):
        trainer = make_trainer(tmp_path, [FillProgress(), Filling()])
        trainer.fit(Remembers(), StocacheDataModule(train=pool, batch_size=4))
    assert caplog.text.count("Slow: a pool of at most 30 samples, in at most ") == 1
    assert "the cache is full: 30 of 30 samples" in caplog.text
    assert "on this node; from now on new samples replace the oldest" in caplog.text
    pool.close()


class Words(Dataset[Any]):
    """A number and a text, whose length differs: records."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[int, str]:
        return index, "x" * 400


class Texts(Remembers):
    """Remembers the numbers of such samples."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0][:, None], batch_idx)


class Appends(pl.Callback):
    """Samples come after each epoch. As soon as the Trainer has counted an epoch's batches, large ones replace many."""

    def __init__(self, pool: RollingCache, more: int = 20) -> None:
        self.pool, self.more = pool, more
        self.counted: list[int] = []
        self.resident: list[tuple[int, int]] = []  # at the count, and after the large samples
        self.shown: list[int] = []

    def append(self, samples: int, size: int = 400) -> None:
        with RollingWriter.attach(self.pool.handle) as writer:
            for number in range(samples):
                writer.append((number, "x" * size))

    def on_train_epoch_start(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        before = self.pool.stats().resident
        self.append(1, 8_000)
        self.counted.append(trainer.num_training_batches)
        self.resident.append((before, self.pool.stats().resident))

    def on_train_epoch_end(self, trainer: Any, pl_module: pl.LightningModule) -> None:
        self.shown.append(trainer.progress_bar_callback.train_progress_bar.total)
        self.append(self.more)


@pytest.mark.parametrize(
    ("door", "options", "share", "steps", "validations"),
    [
        *((door, {}, 1.0, 1, 1) for door in DOORS),
        ("callback", {"limit_train_batches": 0.5}, 0.5, 1, 1),
        ("cache_datamodule", {"limit_train_batches": 3}, 3, 1, 1),
        ("ours", {"val_check_interval": 0.5}, 1.0, 1, 2),
        ("callback", {"accumulate_grad_batches": 3}, 1.0, 3, 1),
    ],
)
def test_an_epoch_has_the_batches_that_the_trainer_has_counted(tmp_path, door, options, share, steps, validations):
    """Each epoch has as many batches as samples were resident when the Trainer counted them, and the bar shows that
    number. Samples that leave before the first batch take no batch, no validation and no step away."""
    pool, model = RollingCache(Words(), "60KiB", fillers=0, minimum=8, layout="records"), Texts()
    appends = Appends(pool)
    appends.append(40)
    data = Data(pool, [torch.zeros(1)], **({} if door == "ours" else {"sampler": pool.sampler()}))
    callbacks, dm = behind(door, data)
    callbacks += [appends, TQDMProgressBar()]
    trainer = make_trainer(tmp_path, callbacks, epochs=4, enable_progress_bar=True, **options)
    trainer.fit(model, dm)
    resident = [at_count for at_count, _ in appends.resident]
    assert any(later < at_count for at_count, later in appends.resident)
    batches = [-(-samples // 4) for samples in resident]
    assert len(set(batches)) > 1
    counted = [int(number * share) if isinstance(share, float) else share for number in batches]
    assert appends.counted == appends.shown == counted
    assert [-(-len(epoch) // 4) for epoch in model.epochs] == counted
    assert trainer.global_step == sum(-(-number // steps) for number in counted)
    assert len(model.validated) == 1 + 4 * validations  # with the sanity check
    pool.close()


class OfRanks(Appends):
    """Samples come from rank zero alone. Each rank writes the batches of its epochs: counted, run, of rank zero."""

    def __init__(self, pool: RollingCache, path: Any) -> None:
        super().__init__(pool)
        self.path = path

    def append(self, samples: int, size: int = 400) -> None:
        if self.pool.group.rank == 0:
            super().append(samples, size)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        counted = trainer.num_training_batches
        batches = [counted, -(-len(pl_module.epochs[-1]) // 4), trainer.strategy.broadcast(counted)]
        with open(self.path / f"rank{trainer.global_rank}", "a") as file:
            print(*batches, file=file)
        self.append(self.more)


def test_ranks_have_the_batches_that_their_trainers_have_counted(tmp_path):
    """All ranks run the same number of batches, epoch after epoch."""
    pool = RollingCache(Words(), "60KiB", fillers=1, minimum=20, layout="records")
    dm = StocacheDataModule(train=pool, batch_size=4)
    trainer = make_trainer(tmp_path, [OfRanks(pool, tmp_path)], epochs=3, strategy="ddp_fork", devices=2)
    trainer.fit(Texts(), dm)
    epochs = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    assert epochs[0] == epochs[1]
    assert [len(set(epoch.split())) for epoch in epochs[0]] == [1, 1, 1]


def test_epochs_of_a_fixed_length(tmp_path):
    """With `epoch_samples` all epochs have one length."""
    model, allowed = Remembers(), Allowance(tmp_path / "allowed", 8)
    pool = RollingCache(Slow(allowed), "100%", fillers=1, minimum=4, epoch_samples=20)
    dm = StocacheDataModule(train=pool, batch_size=4)
    make_trainer(tmp_path, [Growing(pool, allowed, 20)], epochs=4).fit(model, dm)
    assert [len(epoch) for epoch in model.epochs] == [20] * 4
    assert len(set(model.epochs[0])) < len(set(model.epochs[-1])) <= 20


def test_the_datamodules_transform_comes_after_the_pool(tmp_path):
    """The DataModule's transform runs in its workers, on served samples."""
    model, pool = Remembers(), RollingCache(Slow(), "100%", fillers=1, minimum=8)
    dm = StocacheDataModule(train=pool, batch_size=4, num_workers=1, transform=torch.neg)
    make_trainer(tmp_path, epochs=2).fit(model, dm)
    assert all(value <= 0 for epoch in model.epochs for value in epoch)


@pytest.mark.parametrize(("door", "make"), [("callback", CachedLoader), ("cache_datamodule", DataLoader)])
def test_a_pool_is_left_as_it_is(tmp_path, make, door, caplog):
    """A loader of a rolling cache is cached already, with its own sampler: no warning comes."""

    class Given(Data):
        def train_dataloader(self) -> Any:
            return loader

    model, pool = Remembers(), RollingCache(Slow(), "100%", fillers=1, minimum=8)
    loader = make(pool, batch_size=4, sampler=pool.sampler())
    callbacks, data = behind(door, Given(None), budget="1MiB")
    make_trainer(tmp_path, callbacks, epochs=2).fit(model, data)
    assert all(len(epoch) >= 8 for epoch in model.epochs)
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert pool.is_open
    pool.close()


def test_a_kept_pool_goes_on(tmp_path):
    """With `keep_cache=True` a second call trains on the samples that have come since."""
    model, pool = Remembers(), RollingCache(Slow(), "100%", fillers=1, minimum=8)
    dm = StocacheDataModule(train=pool, batch_size=4, keep_cache=True)
    make_trainer(tmp_path / "first").fit(model, dm)
    came = pool.stats().appended
    make_trainer(tmp_path / "second").fit(model, dm)
    assert pool.stats().appended >= came > 0
    dm.close()
    assert not pool.is_open


def test_ranks_of_a_trainer_share_the_pool(tmp_path):
    """Under DDP all ranks run the same number of batches, and only one of them fills."""
    pool = RollingCache(Slow(), "100%", fillers=1, minimum=16)
    dm = StocacheDataModule(train=pool, batch_size=4)
    ranks = {"strategy": "ddp_fork", "devices": 2, "reload_dataloaders_every_n_epochs": 1}
    trainer = make_trainer(tmp_path, [CacheMonitor()], epochs=2, **ranks)
    trainer.fit(Remembers(), dm)
    assert trainer.callback_metrics["stocache/hit_rate"] == 1
    assert trainer.callback_metrics["stocache/hits"] >= 16

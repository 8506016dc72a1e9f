"""Rolling caches and streams in a Trainer: by every door, their epochs, their metrics, and what is said of them."""

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, TQDMProgressBar

from lightning_stocache import (
    CachedLoader,
    CachedStream,
    CacheMonitor,
    FillProgress,
    RollingCache,
    RollingWriter,
    StocacheDataModule,
)
from tests.sources import Allowance, CountedStream, Made
from tests.training.tiny import DOORS, Data, Remembers, behind, logged, make_trainer, said

pytestmark = pytest.mark.processes


def load(allowed: Allowance | None, index: int) -> torch.Tensor:
    if allowed is not None:
        allowed(index)
    return torch.full((4,), float(index))


def pool_of(allowed: Allowance | None = None, budget: str = "100%", **options: Any) -> RollingCache:
    """A pool of sixty samples, which come when they are allowed to."""
    return RollingCache(Made(partial(load, allowed), 60), budget, fillers=1, **{"minimum": 8} | options)


class Growing(Callback):
    """After each epoch eight more samples come."""

    def __init__(self, pool: RollingCache, allowed: Allowance) -> None:
        self.pool, self.allowed = pool, allowed

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        before = self.pool.stats().resident
        self.allowed.more(8)
        while self.pool.stats().resident == before:
            time.sleep(0.002)


@pytest.mark.parametrize("door", DOORS)
def test_epochs_grow_with_the_resident_samples(tmp_path, caplog, door):
    """New loaders are made before each epoch: one line names the Trainer's setting, which is restored at the end. The
    metrics count samples that came, left and were seen. A StocacheDataModule closes its pool; a pool in a loader of the
    user's, in a hook or given to `fit`, is left as it is and not cached again."""
    model, allowed = Remembers(), Allowance(tmp_path / "allowed", 8)
    pool = pool_of(allowed)
    callbacks, data = behind(door, Data(pool, **({} if door == "ours" else {"sampler": pool.sampler()})))
    if door == "callback":
        data = CachedLoader(pool, batch_size=4, sampler=pool.sampler())
    trainer = make_trainer(tmp_path, [*callbacks, Growing(pool, allowed)], epochs=4)
    trainer.fit(model, data)
    assert pool.is_open == (door != "ours")
    pool.close()
    lengths = [len(epoch) for epoch in model.epochs]
    assert lengths == sorted(set(lengths))
    assert 8 <= lengths[0] < lengths[-1] <= 60
    assert all(len(set(epoch)) == len(epoch) for epoch in model.epochs)
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert caplog.text.count("reload_dataloaders_every_n_epochs=1") == 1
    assert "samples are in the rolling cache; training read each loaded sample" in caplog.text
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    names = ("resident", "appended_per_second", "evicted_per_second", "oldest_seconds", "times_seen")
    values = {name: logged(trainer, f"stocache/rolling/{name}") for name in names}
    assert {name: len(epochs) for name, epochs in values.items()} == dict.fromkeys(names, 4)
    assert values["resident"][-1] >= lengths[-1]
    assert values["appended_per_second"][1] > 0
    assert values["evicted_per_second"][-1] == 0
    assert 0 < values["oldest_seconds"][-1] < 600
    assert values["times_seen"][-1] >= 1
    assert logged(trainer, "stocache/hit_rate")[-1] == 1


def test_a_full_pool_says_what_follows(tmp_path, caplog):
    """One line tells how large a pool is when it opens. When it is full, the line has no seconds that will not be
    repeated: new samples replace the oldest."""

    def fill(*_: Any) -> None:
        while pool.stats().resident < 30:
            allowed.more(1)
            time.sleep(0.002)

    allowed = Allowance(tmp_path / "allowed", 8)
    pool = pool_of(allowed, "50%")
    trainer = make_trainer(tmp_path, [FillProgress(), LambdaCallback(on_train_batch_start=fill)], logger=False)
    trainer.fit(Remembers(), StocacheDataModule(train=pool, batch_size=4))
    assert caplog.text.count("Made: a pool of at most 30 samples, in at most ") == 1
    assert "the cache is full: 30 of 30 samples" in caplog.text
    assert "on this node; from now on new samples replace the oldest" in caplog.text


def word(index: int) -> tuple[int, str]:
    return index, "x" * 400


class Texts(Remembers):
    """Remembers the numbers of samples of a number and a text."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch[0][:, None], batch_idx)


class Appends(Callback):
    """Samples come after each epoch. As soon as the Trainer has counted an epoch's batches, large ones replace many."""

    def __init__(self, pool: RollingCache, path: Path) -> None:
        self.pool, self.path = pool, path
        self.counted: list[int] = []
        self.resident: list[tuple[int, int]] = []  # at the count, and after the large samples
        self.shown: list[int] = []

    def append(self, samples: int, size: int = 400) -> None:
        """Append samples, in rank zero."""
        if self.pool.group is not None and self.pool.group.rank:
            return
        with RollingWriter.attach(self.pool.handle) as writer:
            for number in range(samples):
                writer.append((number, "x" * size))

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        before = self.pool.stats().resident
        self.append(1, 8_000)
        self.counted.append(trainer.num_training_batches)
        self.resident.append((before, self.pool.stats().resident))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.progress_bar_callback is not None:
            self.shown.append(trainer.progress_bar_callback.train_progress_bar.total)
        run, counted = -(-len(pl_module.epochs[-1]) // 4), self.counted[-1]
        with open(self.path / f"rank{trainer.global_rank}", "a") as file:
            print(counted, run, trainer.strategy.broadcast(counted), file=file)
        self.append(20)


@pytest.mark.parametrize(
    ("door", "options", "share", "steps", "validations"),
    [
        ("callback", {"limit_train_batches": 0.5}, 0.5, 1, 1),
        ("callback", {"accumulate_grad_batches": 3}, 1, 3, 1),
        ("cache_datamodule", {}, 1, 1, 1),
        ("ours", {"val_check_interval": 0.5}, 1, 1, 2),
    ],
)
def test_an_epoch_has_the_batches_that_the_trainer_has_counted(tmp_path, door, options, share, steps, validations):
    """Each epoch has as many batches as samples were resident when the Trainer counted them, and the bar shows that
    number. Samples that leave before the first batch take no batch, no validation and no step away."""
    pool, model = RollingCache(Made(word, 1000), "60KiB", fillers=0, minimum=8, layout="records"), Texts()
    appends = Appends(pool, tmp_path)
    appends.append(80)
    data = Data(pool, [torch.zeros(1)], **({} if door == "ours" else {"sampler": pool.sampler()}))
    callbacks, dm = behind(door, data)
    callbacks += [appends, TQDMProgressBar()]
    trainer = make_trainer(tmp_path, callbacks, epochs=3, enable_progress_bar=True, **options)
    trainer.fit(model, dm)
    resident = [at_count for at_count, _ in appends.resident]
    assert any(later < at_count for at_count, later in appends.resident)
    batches = [-(-samples // 4) for samples in resident]
    assert len(set(batches)) > 1
    counted = [int(number * share) for number in batches]
    assert appends.counted == appends.shown == counted
    assert [-(-len(epoch) // 4) for epoch in model.epochs] == counted
    assert trainer.global_step == sum(-(-number // steps) for number in counted)
    assert len(model.validated) == 1 + 3 * validations  # with the sanity check
    pool.close()


def test_ranks_share_the_pool_and_have_the_batches_that_their_trainers_have_counted(tmp_path):
    """All ranks run the same number of batches, epoch after epoch, all from the pool."""
    pool = RollingCache(Made(word, 1000), "60KiB", fillers=1, minimum=20, layout="records")
    callbacks, ranks = [CacheMonitor(), Appends(pool, tmp_path)], {"strategy": "ddp_fork", "devices": 2}
    trainer = make_trainer(tmp_path, callbacks, epochs=3, logger=False, **ranks)
    trainer.fit(Texts(), StocacheDataModule(train=pool, batch_size=4))
    assert trainer.callback_metrics["stocache/hit_rate"] == 1
    assert trainer.callback_metrics["stocache/hits"] >= 16
    epochs = [(tmp_path / f"rank{rank}").read_text().splitlines() for rank in (0, 1)]
    assert epochs[0] == epochs[1]
    assert [len(set(epoch.split())) for epoch in epochs[0]] == [1, 1, 1]


def test_a_kept_pool_goes_on(tmp_path, caplog):
    """With `keep_cache=True` a second call trains on the samples that have come since. The DataModule's transform runs
    in its workers, on served samples. With `epoch_samples` all epochs have one length, and the Trainer's own setting
    stays."""
    model, pool = Remembers(), pool_of(epoch_samples=20)
    dm = StocacheDataModule(train=pool, batch_size=4, keep_cache=True, num_workers=1, transform=torch.neg)
    make_trainer(tmp_path, logger=False).fit(model, dm)
    came = pool.stats().appended
    make_trainer(tmp_path, logger=False).fit(model, dm)
    assert pool.stats().appended >= came > 0
    assert [len(epoch) for epoch in model.epochs] == [20, 20]
    assert all(value <= 0 for epoch in model.epochs for value in epoch)
    assert "reload_dataloaders_every_n_epochs" not in caplog.text
    dm.close()
    assert not pool.is_open


# ---- streams ----

LENGTH = 40
ALL = [float(number) for number in range(LENGTH)]
as_tensor = partial(load, None)
KEEPS: dict[str, Any] = {"budget": "64MiB", "streams": True}


@pytest.mark.parametrize("door", ["callback", "cache_datamodule", "ours"])
def test_streams_are_kept(tmp_path, door, caplog):
    """Every sample comes once an epoch. Later epochs come from memory, in another order, before the transform of
    StocacheDataModule. A CachedStream in the user's own loader (cache_datamodule) is left as it is and monitored. One
    line says that a stream is stored, and one, in the first epoch that comes from memory, that the cache is full."""
    train, val = (CountedStream(length, as_tensor) for length in (LENGTH, 12))
    model = Remembers()
    kept = CachedStream(train, "64MiB") if door == "cache_datamodule" else train
    more = {"transform": lambda sample: sample + 100} if door == "ours" else {}
    data = Data(kept, val, num_workers=2 if door == "callback" else 0)
    callbacks, data = behind(door, data, **KEEPS | more)
    trainer = make_trainer(tmp_path, [*callbacks, FillProgress()], epochs=3)
    trainer.fit(model, data)
    shift = 100 if more else 0
    assert model.sorted_epochs == [[number + shift for number in ALL]] * 3
    assert len(set(map(tuple, model.epochs))) == 3
    assert list(map(sorted, model.validated[1:])) == [[float(number + shift) for number in range(12)]] * 3
    assert train.reads <= LENGTH + 32
    assert caplog.text.count("CountedStream: a stream, stored as it passes, in at most") == 2
    lines = said(caplog, "stocache: ")
    [full] = [number for number, line in enumerate(lines) if "the cache is full: 40 of 40 samples" in line]
    assert "epoch 0" in lines[full - 1]
    assert "epoch 1" in lines[full + 1]
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1]
    assert logged(trainer, "stocache/coverage")[-1] == 1
    assert logged(trainer, "stocache/fill_fraction") == [1] * 3
    if isinstance(kept, CachedStream):
        kept.close()


@pytest.mark.parametrize(
    ("budget", "batches", "words"), [("64MiB", 3, "broken off"), ("50%", 10, "nobody knows the size")]
)
def test_a_stream_of_unknown_contents_passes_by(tmp_path, caplog, budget, batches, words):
    """With limit_train_batches, or a budget in percent, it is what it is without a cache, with one warning."""
    model, data = Remembers(), Data(CountedStream(LENGTH, as_tensor))
    callbacks, data = behind("callback", data, **KEEPS | {"budget": budget})
    limit = batches if batches < 10 else 1.0
    make_trainer(tmp_path, callbacks, epochs=5, limit_train_batches=limit, logger=False).fit(model, data)
    assert model.sorted_epochs == [ALL[: 4 * batches]] * 5
    assert caplog.text.count(words) == 1

"""Rolling caches and streams in a Trainer: by every door, their epochs, their metrics, and what is said of them."""

import logging
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import LambdaCallback, TQDMProgressBar
from torch.utils.data import IterableDataset
from torch.utils.data.datapipes.iter import IterableWrapper

from lightning_stocache import (
    CachedLoader,
    CachedStream,
    CacheMonitor,
    RollingCache,
    RollingWriter,
    StocacheDataModule,
)
from tests.sources import CountedStream, Made
from tests.training.tiny import Data, Remembers, behind, logged, make_trainer, said


def numbered(number: int, size: int = 4) -> torch.Tensor:
    return torch.full((size,), float(number))


def pool_of(length: int, budget: str = "100%", **options: Any) -> RollingCache:
    """A pool without fillers, unless they are asked for."""
    return RollingCache(Made(numbered, length), budget, **{"fillers": 0, "minimum": 8} | options)


def append(pool: RollingCache, samples: int, size: int = 4) -> None:
    """Let samples of further numbers come."""
    first = pool.stats().appended
    with RollingWriter.attach(pool.handle) as writer:
        for number in range(samples):
            writer.append(numbered(first + number, size))


def test_epochs_grow_with_the_resident_samples(tmp_path, caplog, door):
    """Loaders are made before each epoch, metrics count what came and left, and a user's pool stays open."""
    model, pool = Remembers(), pool_of(60)
    append(pool, 8)
    callbacks, data = behind(door, Data(pool, **({} if door == "ours" else {"sampler": pool.sampler()})))
    if door == "callback":
        data = CachedLoader(pool, batch_size=4, sampler=pool.sampler())
    growing = LambdaCallback(on_train_epoch_end=lambda *_: append(pool, 8))
    trainer = make_trainer(tmp_path, [*callbacks, growing], epochs=4)
    trainer.fit(model, data)
    assert pool.is_open == (door != "ours")
    pool.close()
    lengths = [len(epoch) for epoch in model.epochs]
    assert 8 <= lengths[0] <= 60 - 3 * 8
    assert lengths == [lengths[0] + 8 * epoch for epoch in range(4)]
    assert all(len(set(epoch)) == len(epoch) for epoch in model.epochs)
    assert trainer.reload_dataloaders_every_n_epochs == 0
    assert caplog.text.count("reload_dataloaders_every_n_epochs=1") == 1
    assert caplog.text.count("Made: a pool of at most 60 samples, in at most ") == 1
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


class Replaces(Callback):
    """When the Trainer has counted an epoch's batches, a large sample replaces many; after each epoch more come. Every
    rank has the batches that its Trainer and rank zero's have counted, and its bar shows that number."""

    def __init__(self, pool: RollingCache) -> None:
        self.pool = pool
        self.resident: list[tuple[int, int]] = []  # at the count, and after the large sample

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        before = self.pool.stats().resident
        if trainer.is_global_zero:
            append(self.pool, 1, 2000)
        self.resident.append((before, self.pool.stats().resident))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        batches = -(-len(pl_module.epochs[-1]) // 4)
        assert batches == trainer.num_training_batches == trainer.strategy.broadcast(batches)
        if trainer.progress_bar_callback is not None:
            assert trainer.progress_bar_callback.train_progress_bar.total == batches
        if trainer.is_global_zero:
            append(self.pool, 20, 100)


@pytest.mark.parametrize(
    ("door", "options", "share", "steps", "validations"),
    [
        ("callback", {"limit_train_batches": 0.5}, 0.5, 1, 1),
        ("cache_datamodule", {"accumulate_grad_batches": 3}, 1, 3, 1),
        ("ours", {"val_check_interval": 0.5}, 1, 1, 2),
    ],
)
def test_an_epoch_has_the_batches_that_the_trainer_has_counted(tmp_path, door, options, share, steps, validations):
    """Samples that leave after the Trainer's count take no batch, no validation and no step away."""
    model, pool = Remembers(), pool_of(1000, "60KiB", layout="records")
    append(pool, 80, 100)
    sampler = {} if door == "ours" else {"sampler": pool.sampler()}
    callbacks, dm = behind(door, Data(pool, [torch.zeros(1)], collate_fn=list, **sampler))
    replaces = Replaces(pool)
    callbacks += [replaces, TQDMProgressBar()]
    trainer = make_trainer(tmp_path, callbacks, epochs=3, enable_progress_bar=True, **options)
    trainer.fit(model, dm)
    assert any(later < at_count for at_count, later in replaces.resident)
    batches = [-(-samples // 4) for samples, _ in replaces.resident]
    assert len(set(batches)) > 1
    counted = [int(number * share) for number in batches]
    assert [-(-len(epoch) // 4) for epoch in model.epochs] == counted
    assert trainer.global_step == sum(-(-number // steps) for number in counted)
    assert len(model.validated) == 1 + 3 * validations  # with the sanity check
    pool.close()


@pytest.mark.processes
def test_ranks_share_the_pool_and_have_the_batches_that_their_trainers_have_counted(tmp_path):
    """All ranks run the same number of batches, epoch after epoch, all from the pool."""
    pool = pool_of(1000, "60KiB", fillers=1, minimum=20, layout="records")
    callbacks, ranks = [CacheMonitor(), Replaces(pool)], {"strategy": "ddp_fork", "devices": 2}
    trainer = make_trainer(tmp_path, callbacks, epochs=3, logger=False, **ranks)
    trainer.fit(Remembers(), StocacheDataModule(train=pool, batch_size=4, loader={"collate_fn": list}))
    assert trainer.callback_metrics["stocache/hit_rate"] == 1
    assert trainer.callback_metrics["stocache/hits"] >= 16


@pytest.mark.processes
def test_a_kept_pool_goes_on(tmp_path, caplog):
    """A second call has the samples that came since; with `epoch_samples` all epochs have one length."""
    model, pool = Remembers(), pool_of(60, fillers=1, epoch_samples=20)
    dm = StocacheDataModule(train=pool, batch_size=4, keep_cache=True, num_workers=1, transform=torch.neg)
    make_trainer(tmp_path, logger=False, epochs=1).fit(model, dm)
    came = pool.stats().appended
    make_trainer(tmp_path, logger=False, epochs=1).fit(model, dm)
    assert pool.stats().appended >= came > 0
    assert [len(epoch) for epoch in model.epochs] == [20, 20]
    assert all(value <= 0 for epoch in model.epochs for value in epoch)
    assert "reload_dataloaders_every_n_epochs" not in caplog.text
    dm.close()
    assert not pool.is_open


LENGTH = 40
ALL = [float(number) for number in range(LENGTH)]


@pytest.mark.processes
def test_streams_are_kept(tmp_path, door, caplog):
    """Later epochs come from memory, in another order, before the transform; and the lines say so."""
    train, val = (CountedStream(length, numbered) for length in (LENGTH, 12))
    model = Remembers()
    kept = CachedStream(train, "64MiB") if door == "cache_datamodule" else train
    options = {"transform": lambda sample: sample + 100} if door == "ours" else {}
    shift = 100 if door == "ours" else 0
    data = Data(kept, val, num_workers=2 if door == "callback" else 0)
    callbacks, data = behind(door, data, budget="64MiB", streams=True, **options)
    trainer = make_trainer(tmp_path, callbacks, epochs=3)
    trainer.fit(model, data)
    assert model.sorted_epochs == [[number + shift for number in ALL]] * 3
    assert len(set(map(tuple, model.epochs))) == 3
    assert list(map(sorted, model.validated[1:])) == [[number + shift for number in ALL[:12]]] * 3
    assert train.reads <= LENGTH + 32
    assert caplog.text.count("CountedStream: a stream, stored as it passes, in at most") == 2
    [first, *_, last] = said(caplog, "% from the cache")
    assert "filled" not in first
    assert "epoch 2: 100 % from the cache" in last
    assert said(caplog, "all 40 samples are cached")
    assert logged(trainer, "stocache/hit_rate") == [0, 1, 1]
    assert logged(trainer, "stocache/coverage")[-1] == 1
    assert logged(trainer, "stocache/fill_fraction") == [1] * 3
    if isinstance(kept, CachedStream):
        kept.close()


class OwnIterator(IterableDataset[Any]):
    """A stream that is its own iterator; each `__iter__` begins anew, or where the last one ended, or in its middle."""

    def __init__(self, begins: str) -> None:
        self.begins, self.order, self.position = begins, list(range(LENGTH)), 0

    def __iter__(self) -> "OwnIterator":
        if self.begins == "anew":
            self.position = 0
        if self.begins == "in the middle":
            self.position = self.position and LENGTH // 2
        if self.begins == "shuffled":
            self.position, self.order = 0, torch.randperm(LENGTH).tolist()
        return self

    def __next__(self) -> torch.Tensor:
        if self.position == LENGTH:
            raise StopIteration
        self.position += 1
        return numbered(self.order[self.position - 1])


class OneGenerator(IterableDataset[Any]):
    """A stream whose iterator was made with it, and is empty after one epoch."""

    def __init__(self) -> None:
        self.samples = map(numbered, range(LENGTH))

    def __iter__(self) -> Any:
        return self.samples


def pipe() -> Any:
    return IterableWrapper(range(LENGTH)).sharding_filter().map(numbered)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("make", "num_workers", "is_cached"),
    [
        (partial(OwnIterator, "anew"), 0, True),
        (partial(OwnIterator, "where it ended"), 0, False),
        (partial(OwnIterator, "in the middle"), 0, False),
        (partial(OwnIterator, "shuffled"), 0, False),
        (OneGenerator, 0, False),
        (pipe, 0, True),
        (pipe, 2, True),
        (lambda: pipe().shuffle(), 0, False),
        (lambda: pipe().shuffle(), 2, False),
    ],
)
def test_a_stream_that_is_its_own_iterator_is_cached_if_it_begins_anew(
    tmp_path: Any, make: Any, is_cached: bool, num_workers: int, door: str, caplog: Any
) -> None:
    """Epoch one has the plain batches; later ones come from memory, or are the plain ones with one warning."""
    plain, model = Remembers(), Remembers()
    for each, callbacks_of in ((plain, None), (model, door)):
        torch.manual_seed(3)
        loaders = Data(make(), num_workers=num_workers, persistent_workers=num_workers > 0, shuffle=None)
        callbacks, data = ([], loaders) if callbacks_of is None else behind(door, loaders, budget="16MiB", streams=True)
        trainer = make_trainer(tmp_path, callbacks, epochs=3, logger=False)
        trainer.fit(each, data)
    assert model.epochs[0] == plain.epochs[0]
    if is_cached:
        assert model.sorted_epochs == plain.sorted_epochs
        assert "passes through" not in caplog.text
        assert "a stream, stored as it passes" in caplog.text
    else:
        assert model.epochs == plain.epochs
        assert num_workers or caplog.text.count("passes through uncached") == 1  # else a worker warns

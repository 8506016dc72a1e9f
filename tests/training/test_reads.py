"""What a Trainer call reads once is left alone: no cache, no read by set-up; what is read again is cached."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from lightning_stocache import CachedDataset, StocacheDataModule, StochasticCache
from lightning_stocache.setup.options import CacheOptions
from lightning_stocache.training.caches import CallCaches
from tests.sources import CountedStream, Made
from tests.training.tiny import Looking, Watcher, behind, data_hooks, make_trainer, plain_loader, said

LENGTH, BATCH = 12, 4
ONCE = "read once in this call, so not cached"


def numbers(log: Any = "") -> Made:
    """A set that notes its loads in a file, if it is given one."""
    return Made(torch.tensor, LENGTH, log_path=log)


def loader(data: Any, **options: Any) -> Any:
    return plain_loader(data, batch_size=BATCH, **options)


def looking_at(tmp_path: Any, door: str, call: str, cache: dict[str, Any], hooks: Any, **options: Any) -> Looking:
    callbacks, dm = behind(door, hooks, **cache)
    looking = Looking()
    trainer = make_trainer(tmp_path, [*callbacks, looking, *options.pop("callbacks", [])], logger=False, **options)
    getattr(trainer, call)(Watcher(), datamodule=dm)
    return looking


def is_cached(looking: Looking, stage: str) -> bool:
    return any(looking.slots.get(stage, []))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_fit_of_one_epoch_of_our_datamodule_loads_once(tmp_path: Any, caplog: Any, num_workers: int) -> None:
    """Its LocalitySampler draws each sample once, so nothing is cached, with the same batches."""

    def run(**options: Any) -> Any:
        data, model, looking = numbers(tmp_path / "loads"), Watcher(), Looking()
        dm = StocacheDataModule(data, numbers(), batch_size=BATCH, num_workers=num_workers, **options)
        torch.manual_seed(5)
        make_trainer(tmp_path, [looking], epochs=1, logger=False).fit(model, datamodule=dm)
        return data, model.batches, looking

    data, batches, looking = run()
    assert not is_cached(looking, "train")
    assert not is_cached(looking, "val")
    assert data.loads == LENGTH
    assert len(said(caplog, f"train and val: {ONCE}")) == 1
    assert batches == run(budget=0)[1]


@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
@pytest.mark.parametrize(("call", "stage"), [("validate", "val"), ("test", "test"), ("predict", "predict")])
def test_a_call_that_reads_once_loads_once(tmp_path: Any, caplog: Any, door: str, call: str, stage: str) -> None:
    """Each sample is loaded as often as without a cache, and one line says why nothing is cached."""
    data = numbers(tmp_path / "loads")
    looking = looking_at(tmp_path, door, call, {}, data_hooks(**{stage: lambda: loader(data)}))
    assert not is_cached(looking, stage)
    assert data.loads == LENGTH
    assert len(said(caplog, f"{stage}: {ONCE}")) == 1


@pytest.mark.parametrize(
    ("options", "train", "val"),
    [
        ({"epochs": 1}, False, False),
        ({"epochs": 2}, True, True),
        ({"epochs": 3, "check_val_every_n_epoch": 2}, True, False),
        ({"epochs": 4, "check_val_every_n_epoch": 2}, True, True),
        ({"epochs": 1, "val_check_interval": 0.5}, False, True),
        ({"epochs": 1, "val_check_interval": 1}, False, True),  # after each batch
        ({"epochs": -1, "max_steps": 3, "limit_train_batches": 1}, True, True),
        ({"epochs": -1, "max_steps": 3, "overfit_batches": 1}, True, True),
        ({"epochs": 1, "val_check_interval": 3, "check_val_every_n_epoch": None}, False, True),
        ({"epochs": 1, "num_sanity_val_steps": -1}, False, True),
        ({"epochs": 1, "num_sanity_val_steps": 100}, False, True),
        ({"epochs": 1, "num_sanity_val_steps": 3}, False, True),
        ({"epochs": 1, "num_sanity_val_steps": 2}, False, False),
        ({"epochs": 1, "num_sanity_val_steps": 2, "limit_val_batches": 2}, False, False),
        ({"epochs": -1, "max_steps": 2}, False, True),
        ({"epochs": 5, "max_steps": 3}, False, True),
        ({"epochs": -1, "max_steps": 4}, True, True),
        ({"epochs": 5, "max_steps": 2, "accumulate_grad_batches": 2}, True, True),
        ({"epochs": 5, "max_steps": 2, "callbacks": [GradientAccumulationScheduler({0: 1})]}, True, True),
        ({"epochs": -1, "max_time": "00:00:00:01"}, True, True),
        ({"fast_dev_run": True}, False, False),
    ],
)
def test_a_fit_caches_what_it_may_read_again(tmp_path: Any, options: Any, train: bool, val: bool) -> None:
    """As far as the Trainer's limits tell: where they do not, it caches."""
    hooks = data_hooks(train=lambda: loader(sets[0], shuffle=True), val=lambda: loader(sets[1]))
    sets = numbers(tmp_path / "loads"), numbers()
    looking = looking_at(tmp_path, "callback", "fit", {}, hooks, **options)
    assert (is_cached(looking, "train"), is_cached(looking, "val")) == (train, val)
    if not train:
        assert 0 < sets[0].loads <= LENGTH


@pytest.mark.parametrize("call", ["fit", "test"])
@pytest.mark.parametrize(
    ("sampler", "is_again"),
    [
        (lambda data: RandomSampler(data), False),
        (lambda data: SubsetRandomSampler(range(6)), False),
        (lambda data: SubsetRandomSampler([0, 1, 0]), True),
        (lambda data: RandomSampler(data, replacement=True), True),
        (lambda data: RandomSampler(data, num_samples=2 * LENGTH), True),
        (lambda data: WeightedRandomSampler([1.0] * LENGTH, LENGTH), True),
        (lambda data: [0, 1, 2], True),  # who knows
    ],
)
def test_a_sampler_that_may_repeat_is_cached(
    tmp_path: Any, call: str, sampler: Callable[..., Any], is_again: bool
) -> None:
    """Within one epoch, too."""
    data, stage = numbers(), "train" if call == "fit" else call
    hooks = data_hooks(**{stage: lambda: loader(data, sampler=sampler(data))})
    looking = looking_at(tmp_path, "callback", call, {}, hooks, epochs=1)
    assert is_cached(looking, stage) is is_again


class GoesRound(DataLoader[Any]):
    """Its epoch reads all samples twice."""

    def __iter__(self) -> Any:
        return itertools.chain(super().__iter__(), super().__iter__())


def test_a_loader_that_may_go_round_is_cached(tmp_path: Any) -> None:
    """By an `__iter__` of its own, in a combination that begins the shorter again, or in short epochs of many steps."""
    rounds = data_hooks(test=lambda: GoesRound(numbers(), BATCH))
    assert is_cached(looking_at(tmp_path, "callback", "test", {}, rounds), "test")
    both = data_hooks(test=lambda: CombinedLoader([loader(numbers()), loader(numbers())], "max_size_cycle"))
    assert is_cached(looking_at(tmp_path, "callback", "test", {}, both), "test")
    few = data_hooks(train=lambda: loader(numbers(), sampler=SubsetRandomSampler(range(BATCH))))
    assert is_cached(looking_at(tmp_path, "callback", "fit", {}, few, epochs=-1, max_steps=3), "train")


def test_what_is_decided_when_a_call_begins_holds(tmp_path: Any) -> None:
    """A fit that goes on for more epochs than it had at first has the order of a plain one, with new loaders, too."""

    def run(door: str) -> list[Any]:
        def longer(trainer: Any, _: Any) -> None:
            trainer.fit_loop.max_epochs = 3

        data, model = numbers(), Watcher()
        callbacks, dm = behind(door, data_hooks(train=lambda: loader(data, shuffle=True)))
        callbacks += [LambdaCallback(on_train_epoch_end=longer)]
        torch.manual_seed(5)
        reloads = {"epochs": 1, "reload_dataloaders_every_n_epochs": 1, "logger": False}
        make_trainer(tmp_path, callbacks, **reloads).fit(model, datamodule=dm)
        return model.batches

    assert run("callback") == run("none")


@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
def test_a_fit_of_one_epoch_goes_on_after_its_last_batch(tmp_path: Any, door: str) -> None:
    """Resumed in the middle, it trains on what was left, as a cached fit does."""

    def run(ckpt: Any, *more: Any) -> list[Any]:
        model = Watcher()
        callbacks, dm = behind(door, data_hooks(train=lambda: loader(data, shuffle=True)))
        torch.manual_seed(5)
        trainer = make_trainer(tmp_path, [*callbacks, *more], epochs=1, logger=False, enable_checkpointing=True)
        trainer.fit(model, datamodule=dm, ckpt_path=ckpt)
        return model.batches

    data = numbers()
    whole = run(None, ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1, save_top_k=-1, filename="{step}"))
    assert run(tmp_path / "saved" / "step=2.ckpt") == whole[2:]


def test_a_stream_that_is_never_cached_is_said_to_be_so(tmp_path: Any, caplog: Any) -> None:
    """In a call that reads once, too; and strict=True is an error."""
    hooks = data_hooks(test=lambda: DataLoader(CountedStream(4), 2))
    looking_at(tmp_path, "callback", "test", {}, hooks)
    assert len(said(caplog, "test loader: CountedStream passes through uncached: it is iterable-style")) == 1
    assert not said(caplog, ONCE)
    with pytest.raises(TypeError, match="test loader cannot be cached"):
        looking_at(tmp_path, "callback", "test", {"strict": True}, hooks)


def test_a_set_of_several_loaders_is_cached(tmp_path: Any) -> None:
    """Of two stages, or of one; and of several training loaders, of which the shorter begins again."""
    data, other = numbers(), numbers()
    given = Looking()
    trainer = make_trainer(tmp_path, [StochasticCache(), given], epochs=1, logger=False)
    trainer.fit(Watcher(), loader(data), loader(data))
    assert is_cached(given, "train")
    assert is_cached(given, "val")
    both = data_hooks(test=lambda: [loader(data), loader(data)])
    assert is_cached(looking_at(tmp_path, "callback", "test", {}, both), "test")
    several = data_hooks(train=lambda: [loader(data), loader(other)])
    assert is_cached(looking_at(tmp_path, "callback", "fit", {}, several, epochs=1), "train")


@pytest.mark.parametrize("call", ["fit", "test"])
@pytest.mark.parametrize("option", ["keep_cache", "name", "dir"])
def test_a_cache_that_stays_is_opened(tmp_path: Any, name: str, call: str, option: str) -> None:
    """What another call or job will read is cached in the first."""
    data, stage = numbers(), "train" if call == "fit" else call
    options = {"keep_cache": True, "name": name, "dir": str(tmp_path)}
    hooks = data_hooks(**{stage: lambda: loader(data)})
    looking = looking_at(tmp_path, "callback", call, {option: options[option]}, hooks, epochs=1)
    assert is_cached(looking, stage)


def test_a_cache_of_the_users_own_always_caches(tmp_path: Any, caplog: Any) -> None:
    """A CachedDataset in the loader of a test is filled."""
    dataset = CachedDataset(numbers())
    make_trainer(tmp_path, [StochasticCache()], logger=False).test(Watcher(), loader(dataset), verbose=False)
    assert dataset.cache is not None
    assert dataset.cache.filled == LENGTH
    assert not said(caplog, ONCE)
    dataset.close()


def test_a_stage_is_named_in_one_line(caplog: Any) -> None:
    """Whichever loaders ask again, together or alone."""
    caches = CallCaches(CacheOptions())
    for stages in (["train", "val"], ["train"], ["val"], ["val", "test"]):
        caches.say_single(stages)
    said_lines = [line.rpartition("stocache: ")[2] for line in said(caplog, ONCE)]
    assert [line.partition(":")[0] for line in said_lines] == ["train and val", "test"]

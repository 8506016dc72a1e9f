"""Common samplers, and several loaders: batches are unchanged, hit rates as expected, and what is drawn gets slots."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)

from lightning_stocache import StochasticCache
from lightning_stocache.training.sampling import loader_domain
from tests.processes import run_ranks
from tests.training.tiny import (
    DOORS,
    SLOT,
    Data,
    Epochs,
    Looking,
    Watcher,
    announced,
    behind,
    logged,
    make_trainer,
    said,
    source,
)

SAMPLES, EPOCHS = 60, 3


def loader_of(data: Any, order: Any = None, **options: Any) -> DataLoader[Any]:
    """A loader with a sampler or, with None, in random order."""
    return DataLoader(data, 8, shuffle=order is None or None, sampler=order, **options)


def fold(data: Any, indices: Any, **options: Any) -> DataLoader[Any]:
    return loader_of(data, SubsetRandomSampler(indices), **options)


def train(tmp_path: Any, callbacks: list[Any], *loaders: Any, epochs: int = EPOCHS, **options: Any) -> tuple[Any, Any]:
    """The model and the Trainer after training that began with a seed."""
    model = Watcher()
    trainer = make_trainer(tmp_path, callbacks, epochs=epochs, log_every_n_steps=1000, **options)
    torch.manual_seed(0)
    trainer.fit(model, *loaders)
    return model, trainer


def combined(data: Any, mode: str) -> CombinedLoader:
    """Two loaders of unequal lengths, which are read together."""
    return CombinedLoader([loader_of(data), loader_of(Subset(data, range(20)))], mode)


def in_batches(data: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 12, True))


CASES: dict[str, tuple[Any, dict[str, Any], int]] = {  # and the samples of an epoch
    "subset": (lambda data: fold(data, range(0, 60, 2)), {}, 30),
    "batch_sampler": (in_batches, {}, 60),
    "overfit some": (loader_of, {"overfit_batches": 3}, 24),
    "replacement": (lambda data: loader_of(data, RandomSampler(data, replacement=True)), {}, 60),
    "two loaders": (lambda data: combined(data, "max_size"), {}, 80),
    "two loaders, one of them again and again": (lambda data: combined(data, "max_size_cycle"), {}, 116),
}


@pytest.mark.parametrize("name", CASES)
def test_hit_rates_are_as_expected_and_batches_as_without_a_cache(tmp_path, name, caplog):
    """Batches are those without a cache, all samples are counted, and hit rates are as expected."""
    make, options, drawn = CASES[name]
    data = source(tmp_path, samples=SAMPLES)
    plain, _ = train(tmp_path, [], make(data), logger=False, **options)
    cached, trainer = train(tmp_path, [StochasticCache("50%")], make(data), **options)
    assert cached.batches == plain.batches
    hits, misses, bypasses = (logged(trainer, f"stocache/{key}") for key in ("hits", "misses", "bypasses"))
    assert list(map(sum, zip(hits, misses, bypasses, strict=True))) == [drawn] * EPOCHS
    rates = logged(trainer, "stocache/hit_rate")
    assert rates == pytest.approx([count / drawn for count in hits])
    assert said(caplog, "were to be expected") == []


def draw_together(rank: int, folder: str) -> None:
    """With each sampler, the batches of this rank are those without a cache; half of the drawn samples have slots."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    data, every_fourth = source(folder, samples=120), list(range(0, 120, 4))
    samplers: dict[str, tuple[Any, int]] = {  # and the samples that both ranks draw
        "in order": (lambda: None, 120),
        "distributed": (lambda: DistributedSampler(data, 2, rank), 120),
        "fold": (lambda: SubsetRandomSampler(every_fourth), 30),
        "a fold of each rank": (lambda: SubsetRandomSampler(every_fourth[rank::2]), 30),
    }
    for name, (make, drawn) in samplers.items():
        options = {"strategy": "ddp", "devices": 2, "use_distributed_sampler": name != "a fold of each rank"}
        models, noted, looking = (Watcher(), Watcher()), Epochs(), Looking()
        for model, callbacks in zip(models, ([], [StochasticCache("50%"), noted, looking]), strict=True):
            seed_everything(0, verbose=False)
            loader = DataLoader(data, 4, sampler=make())
            make_trainer(folder, callbacks, epochs=2, logger=False, **options).fit(model, loader)
        assert models[0].batches == models[1].batches, name
        assert looking.slots["train"] == [drawn // 2], name
        for epoch in noted.metrics:
            assert sum(epoch[key] for key in ("hits", "misses", "bypasses")) == drawn, name


@pytest.mark.processes
@pytest.mark.slow
def test_two_ranks_draw_together(tmp_path):
    """With DDP the batches are those of an uncached job, and the samples of all ranks can have slots."""
    run_ranks(draw_together, 2, str(tmp_path))


def hit_rates(tmp_path: Any, callbacks: list[Any], *given: Any, **options: Any) -> tuple[list[float], list[int]]:
    """The hit rates of two epochs, and the slots of training."""
    looking = Looking()
    _, trainer = train(tmp_path, [*callbacks, looking], *given, epochs=2, **options)
    assert logged(trainer, "stocache/coverage")[-1] <= 1
    return logged(trainer, "stocache/hit_rate"), looking.slots["train"]


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("door", DOORS)
def test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples(tmp_path, door):
    """In every door epoch two hits every sample, and coverage counts the drawn samples alone."""
    data, tenth = source(tmp_path, samples=SAMPLES), range(5, SAMPLES, 10)
    callbacks, given = behind(door, Data(data, sampler=SubsetRandomSampler(tenth)), budget=6 * SLOT)
    assert hit_rates(tmp_path, callbacks, given) == ([0, 1], [6])
    assert set(data.loaded) == set(tenth), "at set-up, too, nothing else is read"


def test_two_samplers_of_one_dataset_that_are_known_together(tmp_path):
    """Loaders of one dataset share one cache, with slots for the samples of all their samplers."""
    data = source(tmp_path, samples=SAMPLES)
    two = fold(data, range(12)), fold(data, range(6, 24))
    rates, slots = hit_rates(tmp_path, [StochasticCache(24 * SLOT)], *two)
    assert (rates[-1], slots) == (1, [24])
    assert hit_rates(tmp_path, [StochasticCache("100%")], list(two))[1] == [24]


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_cache_that_outlives_the_call_has_room_for_all(tmp_path, on_disk, caplog):
    """The next fold draws other samples of the same dataset. They have slots, and earlier samples are hits."""
    data = source(tmp_path, samples=SAMPLES)
    callback = StochasticCache("100%", **{"name": "folds", "dir": str(tmp_path)} if on_disk else {"keep_cache": True})
    hit_rates(tmp_path / "0", [callback], fold(data, range(40)))
    loads = data.loads
    stored = set(data.loaded[: announced(caplog)])  # by set-up
    new = set(range(40, 60)) - stored
    assert hit_rates(tmp_path / "1", [callback], fold(data, range(20, 60))) == ([1 - len(new) / 40, 1], [SAMPLES])
    assert set(data.loaded[loads:]) >= new
    callback.close()


@pytest.mark.processes
def test_a_sampler_that_changes_goes_on_as_without_a_cache(tmp_path, caplog):
    """Indices that change each epoch pass through, with one warning; the batches are those of an uncached training."""

    def change(trainer: Any, _: Any) -> None:
        first = 12 * trainer.current_epoch
        trainer.train_dataloader.sampler.indices[:] = range(first, first + 12)

    seen = []
    for callbacks in ([], [StochasticCache()]):
        callbacks.append(LambdaCallback(on_train_epoch_start=change))
        loader = fold(source(tmp_path, samples=SAMPLES), list(range(12)), num_workers=1)
        model, trainer = train(tmp_path, callbacks, loader)
        seen.append(model.batches)
    assert seen[0] == seen[1]
    assert float(trainer.callback_metrics["stocache/bypasses"]) > 0
    [warning] = said(caplog, "draws other samples")
    assert "keep_cache=True" in warning


DATA: Any = range(100)
ORDERED = SequentialSampler(DATA)


@pytest.mark.parametrize(
    ("stage", "order", "options", "count"),
    [
        ("val", ORDERED, {"limit_val_batches": 3}, 12),
        ("val", ORDERED, {"limit_val_batches": 0.5}, 48),  # of 25 batches, 12
        ("val", BatchSampler(ORDERED, 5, False), {"limit_val_batches": 3}, 15),
        ("val", RandomSampler(DATA), {"limit_val_batches": 3}, None),
        ("val", DistributedSampler(DATA, 2, 0, shuffle=False), {"limit_val_batches": 3}, 12),
        ("predict", ORDERED, {"limit_val_batches": 3, "limit_predict_batches": 1}, 4),
        ("train", ORDERED, {"limit_train_batches": 3}, None),
        ("val", ORDERED, {"limit_val_batches": 3, "distributed_sampler_kwargs": {"num_replicas": 2, "rank": 0}}, 24),
        ("train", SubsetRandomSampler([90]), {"overfit_batches": 5, "limit_train_batches": 5}, 20),
        ("train", [[1, 2], [3]], {"overfit_batches": 1, "limit_train_batches": 1}, None),
        ("train", SubsetRandomSampler([90]), {"reload_dataloaders_every_n_epochs": 2}, None),
    ],
)
def test_what_a_loader_will_draw_follows_from_sampler_and_limits(stage, order, options, count):
    """With samples in order the Trainer's limit decides, else the sampler's indices."""
    trainer = {"overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0, "state": SimpleNamespace(fn="fit")}
    trainer |= {f"limit_{name}_batches": 1.0 for name in ("train", "val", "predict")}
    trainer |= {"distributed_sampler_kwargs": None} | options
    given = {"batch_sampler": order} if isinstance(order, BatchSampler | list) else {"batch_size": 4, "sampler": order}
    domain = loader_domain(SimpleNamespace(**trainer), stage, DataLoader(DATA, **given))  # type: ignore[arg-type]
    assert (None if domain is None else len(domain)) == count

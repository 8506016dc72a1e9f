"""Only samples that can be drawn get slots: a budget for a tenth of the samples is enough for the drawn tenth."""

from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import seed_everything
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
)

from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.sampling import loader_domain
from tests.training.seen import Looking, Watcher, data_hooks
from tests.training.tiny import DOORS, SLOT, Data, announced, behind, logged, make_trainer, said, source

pytestmark = pytest.mark.processes

SAMPLES, BATCH = 120, 4
TENTH = list(range(5, SAMPLES, 10))
BUDGET = len(TENTH) * SLOT


def subset_loader(data: Any, indices: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, BATCH, sampler=SubsetRandomSampler(indices), **options)


def hit_rates(tmp_path: Any, callbacks: list[Any], *given: Any, **options: Any) -> tuple[list[float], Looking]:
    """The hit rates of two epochs, and the slots that were seen."""
    looking = Looking()
    trainer = make_trainer(tmp_path, [*callbacks, looking], epochs=2, log_every_n_steps=1000, **options)
    trainer.fit(Watcher(), *given)
    assert logged(trainer, "stocache/coverage")[-1] <= 1
    return logged(trainer, "stocache/hit_rate"), looking


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("door", DOORS)
def test_a_tenth_of_the_budget_is_enough_for_a_tenth_of_the_samples(tmp_path, door):
    """In every door epoch two hits every sample, and coverage counts the drawn samples alone."""
    data = source(tmp_path, samples=SAMPLES)
    callbacks, given = behind(door, Data(data, sampler=SubsetRandomSampler(TENTH)), budget=BUDGET)
    rates, looking = hit_rates(tmp_path, callbacks, given)
    assert rates == [0, 1]
    assert looking.slots["train"] == [len(TENTH)]
    assert set(data.loaded) == set(TENTH), "at set-up, too, nothing else is read"


def test_two_samplers_of_one_dataset_that_are_known_together(tmp_path):
    """Loaders of one dataset that are given to `fit` share one cache, with slots for the samples of all their samplers,
    in one stage or in two."""
    data = source(tmp_path, samples=SAMPLES)
    loaders = subset_loader(data, range(12)), subset_loader(data, range(6, 24))
    rates, looking = hit_rates(tmp_path, [StochasticCache(2 * BUDGET)], *loaders)
    assert looking.slots == {"train": [24], "val": [24]}
    assert rates[-1] == 1
    two = [subset_loader(data, range(12)), subset_loader(data, range(12, 24))]
    for loaders, slots in ((two, 24), ([*two, DataLoader(data, BATCH, shuffle=True)], SAMPLES)):
        _, looking = hit_rates(tmp_path, [StochasticCache("100%")], loaders)
        assert looking.slots["train"] == [slots]


@pytest.mark.parametrize("options", [{"keep_cache": True}, {"name": "on disk"}])
def test_a_cache_that_outlives_the_call_has_room_for_all(tmp_path, options, caplog):
    """The next fold draws other samples of the same dataset. They have slots, and earlier samples are hits."""
    data = source(tmp_path, samples=SAMPLES)
    if "name" in options:
        pytest.importorskip("xxhash")
        options = {"name": "folds", "dir": str(tmp_path)}
    callback = StochasticCache("100%", **options)
    hit_rates(tmp_path / "0", [callback], subset_loader(data, range(40)))
    loads = data.loads
    stored = set(data.loaded[: announced(caplog)])  # by set-up
    rates, looking = hit_rates(tmp_path / "1", [callback], subset_loader(data, range(20, 60)))
    assert looking.slots["train"] == [SAMPLES]
    new = set(range(40, 60)) - stored
    assert rates == [1 - len(new) / 40, 1]
    assert set(data.loaded[loads:]) >= new
    callback.close()


def test_a_sampler_that_changes_goes_on_as_without_a_cache(tmp_path, caplog):
    """Indices that change each epoch pass through, with one warning; the batches are those of an uncached training."""

    class Changing(Looking):
        def on_train_epoch_start(self, trainer, pl_module):
            first = 12 * trainer.current_epoch
            trainer.train_dataloader.sampler.indices[:] = range(first, first + 12)

    seen = []
    for callbacks in ([], [StochasticCache()]):
        model = Watcher()
        trainer = make_trainer(tmp_path, [*callbacks, Changing()], epochs=3, logger=False)
        seed_everything(0, verbose=False)
        trainer.fit(model, subset_loader(source(tmp_path, samples=SAMPLES), list(range(12)), num_workers=2))
        seen.append(model.batches)
    assert seen[0] == seen[1]
    assert float(trainer.callback_metrics["stocache/bypasses"]) > 0
    [warning] = said(caplog, "draws other samples")
    assert "keep_cache=True" in warning


@pytest.mark.epoch_one_reads_all
def test_loaders_that_are_made_anew_leave_the_slots_to_all(tmp_path, recwarn):
    """An active learner draws more samples after each reload: all samples have slots from the start."""
    data, grown = source(tmp_path, samples=SAMPLES), iter(range(12, SAMPLES, 12))
    dm = cache_datamodule(data_hooks(train=lambda: subset_loader(data, range(next(grown)))), budget="100%")
    rates, looking = hit_rates(tmp_path, [CacheMonitor()], dm, reload_dataloaders_every_n_epochs=1)
    assert looking.slots["train"] == [SAMPLES]
    assert rates == [0, 0.5]
    assert not [warning for warning in recwarn if "were to be expected" in str(warning.message)]


def trainer_with(**options: Any) -> Any:
    defaults = {"overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0, "state": SimpleNamespace(fn="fit")}
    limits = {f"limit_{stage}_batches": 1.0 for stage in ("train", "val", "test", "predict")}
    return SimpleNamespace(**defaults | limits | {"distributed_sampler_kwargs": None} | options)


DATA: Dataset[Any] = range(100)  # type: ignore[assignment]
TWO_RANKS = {"num_replicas": 2, "rank": 0}


@pytest.mark.parametrize(
    ("stage", "order", "options", "count"),
    [
        ("val", SequentialSampler(DATA), {}, None),
        ("val", SequentialSampler(DATA), {"limit_val_batches": 3}, 12),
        ("val", SequentialSampler(DATA), {"limit_val_batches": 0.5}, 48),  # of 25 batches, 12
        ("val", BatchSampler(SequentialSampler(DATA), 5, False), {"limit_val_batches": 3}, 15),
        ("val", [[1, 2], [3]], {"limit_val_batches": 1}, 3),
        ("train", [[1, 2], [3]], {"overfit_batches": 1, "limit_train_batches": 1}, None),
        ("val", RandomSampler(DATA), {"limit_val_batches": 3}, None),
        ("val", DistributedSampler(DATA, 2, 0, shuffle=False), {"limit_val_batches": 3}, 12),
        ("test", SequentialSampler(DATA), {"limit_val_batches": 3}, None),
        ("predict", SequentialSampler(DATA), {"limit_predict_batches": 1}, 4),
        ("train", SequentialSampler(DATA), {"limit_train_batches": 3}, None),
        ("val", SequentialSampler(DATA), {"limit_val_batches": 1000}, None),
        ("val", SequentialSampler(DATA), {"limit_val_batches": 3, "distributed_sampler_kwargs": TWO_RANKS}, 24),
        ("train", RandomSampler(DATA), {"overfit_batches": 5, "limit_train_batches": 5}, 20),
        ("train", SubsetRandomSampler([90]), {"overfit_batches": 5, "limit_train_batches": 5}, 20),
        ("train", None, {"overfit_batches": 0.25, "limit_train_batches": 0.25}, 24),
        ("train", SubsetRandomSampler([90]), {}, 1),
        ("train", SubsetRandomSampler([90]), {"reload_dataloaders_every_n_epochs": 2}, None),
    ],
)
def test_what_a_loader_will_draw_follows_from_sampler_and_limits(stage, order, options, count):
    """With samples in order the Trainer's limit decides, else the sampler's indices."""
    given = {"batch_sampler": order} if isinstance(order, BatchSampler | list) else {"batch_size": 4, "sampler": order}
    domain = loader_domain(trainer_with(**options), stage, DataLoader(DATA, **given))
    assert (None if domain is None else len(domain)) == count

"""Common samplers, and several loaders: batches are unchanged, hit rates as expected, and what is drawn gets slots."""

import random
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import cache_datamodule
from lightning_stocache.training.monitor import CacheMonitor
from lightning_stocache.training.sampling import loader_domain
from tests.jobs import exit_codes
from tests.sources import CountedSource
from tests.training.job import printed, read_ranks, start_nodes
from tests.training.tiny import (
    DOORS,
    SLOT,
    Data,
    Looking,
    Watcher,
    announced,
    behind,
    data_hooks,
    logged,
    make_trainer,
    said,
    source,
)

pytestmark = pytest.mark.processes

SAMPLES, BATCH, EPOCHS = 120, 8, 3
TENTH = range(5, SAMPLES, 10)


class Buckets(Sampler[list[int]]):
    """Batches of samples of similar length, in random order."""

    def __init__(self, data: Any) -> None:
        order = sorted(range(len(data)), key=lambda index: (index % 10 * 7, index))
        self.batches = [order[first : first + BATCH] for first in range(0, len(order), BATCH)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[list[int]]:
        yield from random.sample(self.batches, len(self.batches))


class Mine(DistributedSampler[int]):
    """A user's own deal: each sample twice in a row."""

    def __iter__(self) -> Iterator[int]:
        return (index for index in super().__iter__() for _ in range(2))

    def __len__(self) -> int:
        return 2 * super().__len__()


def loader_of(data: Any, order: Any, **options: Any) -> DataLoader[Any]:
    """A loader with a sampler, a batch sampler or, with None, in random order."""
    if isinstance(order, BatchSampler | Buckets):
        return DataLoader(data, batch_sampler=order)
    return DataLoader(data, BATCH, shuffle=order is None or None, sampler=order, **options)


def fold(data: Any, indices: Any, **options: Any) -> DataLoader[Any]:
    return loader_of(data, SubsetRandomSampler(indices), **options)


ONCE: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "shuffle": (lambda data: None, {}),
    "subset": (lambda data: SubsetRandomSampler(range(0, SAMPLES, 2)), {}),
    "batch_sampler": (lambda data: BatchSampler(RandomSampler(data), 12, drop_last=True), {}),
    "distributed": (lambda data: DistributedSampler(data, 1, 0), {}),
    "overfit all": (lambda data: None, {"overfit_batches": 1.0}),
}
OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "replacement": (lambda data: RandomSampler(data, replacement=True), {}),
    "weighted": (lambda data: WeightedRandomSampler(torch.arange(SAMPLES) ** 2.0, SAMPLES), {}),
    "oversampled": (lambda data: SubsetRandomSampler([*range(SAMPLES), *range(0, SAMPLES, 4)] * 2), {}),
    "overfit some": (lambda data: None, {"overfit_batches": 3}),
    "buckets": (Buckets, {}),
    "a user's deal": (lambda data: Mine(data, 1, 0), {}),
}


class Counting(Watcher):
    """Counts the samples of each epoch, in a batch or a dict of batches; of a loader that has ended there is None."""

    def __init__(self) -> None:
        super().__init__()
        self.served: Counter[int] = Counter()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        for part in batch.values() if isinstance(batch, dict) else [batch]:
            self.served[self.current_epoch] += 0 if part is None else len(part[1])
        return super().training_step(batch, batch_idx)


class Loads(Callback):
    """Records the loads of the sources at the start of training and at each epoch's end."""

    def __init__(self, *sources: CountedSource) -> None:
        self.sources, self.noted = sources, list[int]()

    def note(self, *_: Any) -> None:
        self.noted.append(sum(counted.loads for counted in self.sources))

    on_train_start = on_train_epoch_end = note


def train(tmp_path: Any, callbacks: list[Any], *loaders: Any, epochs: int = EPOCHS, **options: Any) -> tuple[Any, Any]:
    """The model and the Trainer after training that began with a seed."""
    model = Counting()
    trainer = make_trainer(tmp_path, callbacks, epochs=epochs, log_every_n_steps=1000, **options)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    trainer.fit(model, *loaders)
    return model, trainer


def check_counts(trainer: Any, loads: Loads, model: Counting) -> None:
    """Hits, misses and bypasses add up to the served samples, and the source's loads agree with the hit rate."""
    values = {key: logged(trainer, f"stocache/{key}") for key in ("hits", "misses", "bypasses", "hit_rate")}
    parts = list(zip(values["hits"], values["misses"], values["bypasses"], strict=True))
    assert list(map(sum, parts)) == [model.served[epoch] for epoch in range(EPOCHS)]
    assert values["hit_rate"] == pytest.approx([hits / sum(part) for part in parts for hits in part[:1]])
    of_epochs = [now - before for before, now in zip(loads.noted, loads.noted[1:], strict=False)]
    more = [now - misses - bypasses for now, (_, misses, bypasses) in zip(of_epochs, parts, strict=True)]
    assert set(more) <= {0, 1, 2}, "samples are read again, now and then, to see whether they are random"


def check_expected(trainer: Any, expected: bool = True) -> None:
    """Each hit rate is the expected one, or no rate is expected."""
    rates = logged(trainer, "stocache/hit_rate_expected")
    assert len(rates) == EPOCHS * expected
    assert not expected or logged(trainer, "stocache/hit_rate") == pytest.approx(rates, abs=1e-6)


@pytest.mark.parametrize("name", ONCE | OTHERS)
def test_hit_rates_are_as_expected_and_batches_as_without_a_cache(tmp_path, name, recwarn):
    """Every batch is the same as without a cache, and the counts agree with the source. If each index is drawn once,
    the hit rate is as expected; else no rate is expected."""
    make, options = (ONCE | OTHERS)[name]
    data = source(tmp_path, samples=SAMPLES)
    plain, _ = train(tmp_path / "plain", [], loader_of(data, make(data)), **options)
    loads = Loads(data)
    cached, trainer = train(tmp_path, [StochasticCache(60 * SLOT), loads], loader_of(data, make(data)), **options)
    assert cached.batches == plain.batches
    check_counts(trainer, loads, cached)
    check_expected(trainer, name in ONCE)
    assert not [warning for warning in recwarn if "were to be expected" in str(warning.message)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_are_counted_together(tmp_path, mode):
    """This holds in all modes of a CombinedLoader. Hits are as expected if no set ends early or starts again."""
    sets = {name: source(tmp_path, name, samples) for name, samples in (("long", SAMPLES), ("short", 40))}

    def loaders() -> Any:
        return CombinedLoader({name: loader_of(data, None) for name, data in sets.items()}, mode)

    plain, _ = train(tmp_path / "plain", [], loaders())
    loads = Loads(*sets.values())
    cached, trainer = train(tmp_path, [StochasticCache(budget="50%"), loads], loaders())
    assert cached.batches == plain.batches
    check_counts(trainer, loads, cached)
    check_expected(trainer, mode == "max_size")


@pytest.mark.parametrize("held_out", [range(5), range(60, 70)])
def test_validation_on_the_same_dataset_is_told_from_training(tmp_path, held_out):
    """Training has the expected hit rate on its fold, whether or not validation has filled some of it before."""
    data = source(tmp_path, samples=SAMPLES)
    loaders = fold(data, range(10, SAMPLES)), fold(data, held_out)
    _, trainer = train(tmp_path, [StochasticCache(budget=SLOT * SAMPLES // 2)], *loaders, num_sanity_val_steps=2)
    check_expected(trainer)


class Late(Counting):
    """Validates on the newest samples, ten of which come while the first epoch trains."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def val_dataloader(self) -> Any:
        self.data.length = SAMPLES + 10
        return fold(self.data, range(SAMPLES + 2, SAMPLES + 10))


def test_validation_draws_samples_that_came_since_training_began(tmp_path):
    """The cache of the training fold has no slot for them, so validation has a cache of its own."""
    data = source(tmp_path, samples=SAMPLES)
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=EPOCHS, num_sanity_val_steps=0)
    trainer.fit(Late(data), fold(data, range(40)))
    assert logged(trainer, "stocache/hits")[1:] == [40, 40]
    assert logged(trainer, "stocache/val/hits")[1:] == [8, 8]


def test_a_part_of_cached_datasets_is_drawn_through_subset_and_concat(tmp_path):
    """The counts of a user's CachedDatasets behind `Subset` and `ConcatDataset` agree with the sources."""
    sources = [source(tmp_path, name, SAMPLES) for name in ("one", "other")]
    sets = [CachedDataset(counted, budget="50%") for counted in sources]
    joined = ConcatDataset([Subset(sets[0], range(0, SAMPLES, 3)), sets[1]])
    loads = Loads(*sources)
    model, trainer = train(tmp_path, [CacheMonitor(), loads], loader_of(joined, None))
    check_counts(trainer, loads, model)
    check_expected(trainer, False)
    for dataset in sets:
        dataset.close()


@pytest.mark.slow
def test_two_ranks_draw_together(tmp_path):
    """With DDP the batches are those of an uncached job, and the samples of all ranks can have slots."""
    assert exit_codes(start_nodes(tmp_path, "samplers"), tmp_path / "said", 200) == [0], printed(tmp_path)
    ranks = [saw for [saw] in read_ranks(tmp_path, 2)]
    for name, saw in ranks[0].items():
        assert saw["same"], name
        assert ranks[1][name]["same"], name
        folded = "fold" in name
        assert saw["slots"] == ranks[1][name]["slots"] == [15 if folded else 60], "half of what is drawn"
        for epoch in saw["epochs"]:
            served = sum(epoch[key] for key in ("hits", "misses", "bypasses"))
            assert served == 2 * 4 * saw["steps"] / EPOCHS - (2 if folded else 0)  # 30 of a fold: 15 for each rank
            assert ("hit_rate_expected" in epoch) == (name == "distributed")
            if name == "distributed":
                assert epoch["hit_rate"] == pytest.approx(epoch["hit_rate_expected"], abs=0.01)


# ---- only samples that can be drawn get slots ----


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
    data = source(tmp_path, samples=SAMPLES)
    callbacks, given = behind(door, Data(data, sampler=SubsetRandomSampler(TENTH)), budget=len(TENTH) * SLOT)
    assert hit_rates(tmp_path, callbacks, given) == ([0, 1], [len(TENTH)])
    assert set(data.loaded) == set(TENTH), "at set-up, too, nothing else is read"


def test_two_samplers_of_one_dataset_that_are_known_together(tmp_path):
    """Loaders of one dataset that are given to `fit` share one cache, with slots for the samples of all their samplers,
    in one stage or in two."""
    data = source(tmp_path, samples=SAMPLES)
    rates, slots = hit_rates(tmp_path, [StochasticCache(24 * SLOT)], fold(data, range(12)), fold(data, range(6, 24)))
    assert (rates[-1], slots) == (1, [24])
    two = [fold(data, range(12)), fold(data, range(12, 24))]
    for loaders, count in ((two, 24), ([*two, loader_of(data, None)], SAMPLES)):
        assert hit_rates(tmp_path, [StochasticCache("100%")], loaders)[1] == [count]


@pytest.mark.parametrize("options", [{"keep_cache": True}, {"name": "on disk"}])
def test_a_cache_that_outlives_the_call_has_room_for_all(tmp_path, options, caplog):
    """The next fold draws other samples of the same dataset. They have slots, and earlier samples are hits."""
    data = source(tmp_path, samples=SAMPLES)
    if "name" in options:
        pytest.importorskip("xxhash")
        options = {"name": "folds", "dir": str(tmp_path)}
    callback = StochasticCache("100%", **options)
    hit_rates(tmp_path / "0", [callback], fold(data, range(40)))
    loads = data.loads
    stored = set(data.loaded[: announced(caplog)])  # by set-up
    new = set(range(40, 60)) - stored
    assert hit_rates(tmp_path / "1", [callback], fold(data, range(20, 60))) == ([1 - len(new) / 40, 1], [SAMPLES])
    assert set(data.loaded[loads:]) >= new
    callback.close()


def test_a_sampler_that_changes_goes_on_as_without_a_cache(tmp_path, caplog):
    """Indices that change each epoch pass through, with one warning; the batches are those of an uncached training."""

    class Changing(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            first = 12 * trainer.current_epoch
            trainer.train_dataloader.sampler.indices[:] = range(first, first + 12)

    seen = []
    for callbacks in ([], [StochasticCache()]):
        data = source(tmp_path, samples=SAMPLES)
        model, trainer = train(tmp_path, [*callbacks, Changing()], fold(data, list(range(12)), num_workers=2))
        seen.append(model.batches)
    assert seen[0] == seen[1]
    assert float(trainer.callback_metrics["stocache/bypasses"]) > 0
    [warning] = said(caplog, "draws other samples")
    assert "keep_cache=True" in warning


@pytest.mark.epoch_one_reads_all
def test_loaders_that_are_made_anew_leave_the_slots_to_all(tmp_path, recwarn):
    """An active learner draws more samples after each reload: all samples have slots from the start."""
    data, grown = source(tmp_path, samples=SAMPLES), iter(range(12, SAMPLES, 12))
    dm = cache_datamodule(data_hooks(train=lambda: fold(data, range(next(grown)))), budget="100%")
    rates = hit_rates(tmp_path, [CacheMonitor()], dm, reload_dataloaders_every_n_epochs=1)
    assert rates == ([0, 0.5], [SAMPLES])
    assert not [warning for warning in recwarn if "were to be expected" in str(warning.message)]


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
    trainer = {"overfit_batches": 0.0, "reload_dataloaders_every_n_epochs": 0, "state": SimpleNamespace(fn="fit")}
    trainer |= {f"limit_{name}_batches": 1.0 for name in ("train", "val", "test", "predict")}
    trainer |= {"distributed_sampler_kwargs": None} | options
    given = {"batch_sampler": order} if isinstance(order, BatchSampler | list) else {"batch_size": 4, "sampler": order}
    domain = loader_domain(SimpleNamespace(**trainer), stage, DataLoader(DATA, **given))  # type: ignore[arg-type]
    assert (None if domain is None else len(domain)) == count

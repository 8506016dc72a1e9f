"""Common samplers, and several loaders: the batches are unchanged, and hit rates are as expected."""

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
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
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.monitor import CacheMonitor
from tests.jobs import exit_codes
from tests.sources import CountedSource
from tests.training.job import read_ranks, start_nodes
from tests.training.seen import Watcher
from tests.training.tiny import SLOT, logged, make_trainer, source

pytestmark = pytest.mark.processes

SAMPLES, BATCH, EPOCHS = 120, 8, 3
CLASSES = 10  # of the source's samples, which are `index % CLASSES`
LABELS = torch.arange(SAMPLES) % CLASSES


class Buckets(Sampler[list[int]]):
    """Batches of samples of similar length, in random order."""

    def __init__(self, lengths: Sequence[int], batch_size: int) -> None:
        order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
        self.batches = [order[first : first + batch_size] for first in range(0, len(order), batch_size)]

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


def with_sampler(make: Callable[[Any], Any]) -> Callable[[Any], DataLoader[Any]]:
    return lambda data: DataLoader(data, BATCH, sampler=make(data))


def with_batches(make: Callable[[Any], Any]) -> Callable[[Any], DataLoader[Any]]:
    return lambda data: DataLoader(data, batch_sampler=make(data))


def shuffled(data: Any, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, BATCH, shuffle=True, **options)


ONCE: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "shuffle": (shuffled, {}),
    "subset": (with_sampler(lambda data: SubsetRandomSampler(range(0, SAMPLES, 2))), {}),
    "batch_sampler": (with_batches(lambda data: BatchSampler(RandomSampler(data), 12, drop_last=True)), {}),
    "distributed": (with_sampler(lambda data: DistributedSampler(data, 1, 0)), {}),
    "overfit all": (shuffled, {"overfit_batches": 1.0}),
}
OTHERS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "replacement": (with_sampler(lambda data: RandomSampler(data, replacement=True)), {}),
    "weighted": (with_sampler(lambda data: WeightedRandomSampler(torch.arange(SAMPLES) ** 2.0, SAMPLES)), {}),
    "oversampled": (with_sampler(lambda data: SubsetRandomSampler([*range(SAMPLES), *range(0, SAMPLES, 4)] * 2)), {}),
    "overfit some": (shuffled, {"overfit_batches": 3}),
    "buckets": (with_batches(lambda data: Buckets((LABELS * 7).tolist(), BATCH)), {}),
    "a user's deal": (with_sampler(lambda data: Mine(data, 1, 0)), {}),
}
LOADERS = ONCE | OTHERS


class Loads(Callback):
    """Records the loads of the sources at the start of training and at each epoch's end."""

    def __init__(self, *sources: CountedSource) -> None:
        self.sources, self.noted = sources, list[int]()

    def note(self, *_: Any) -> None:
        self.noted.append(sum(counted.loads for counted in self.sources))

    on_train_start = on_train_epoch_end = note

    @property
    def of_epochs(self) -> list[int]:
        return [now - before for before, now in zip(self.noted, self.noted[1:], strict=False)]


def seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)


def train(tmp_path: Any, make: Callable[[], Any], callbacks: list[Callback], **options: Any) -> tuple[Watcher, Any]:
    """The model and the Trainer after training that began with a seed."""
    model = Watcher()
    trainer = make_trainer(tmp_path, callbacks, epochs=EPOCHS, log_every_n_steps=1000, **options)
    seed()
    trainer.fit(model, make())
    return model, trainer


def check_counts(trainer: Any, loads: Loads, served: list[int]) -> None:
    """Hits, misses and bypasses add up to the served samples, and the source's loads agree with the hit rate."""
    values = {key: logged(trainer, f"stocache/{key}") for key in ("hits", "misses", "bypasses", "hit_rate")}
    parts = list(zip(values["hits"], values["misses"], values["bypasses"], strict=True))
    assert list(map(sum, parts)) == served
    assert values["hit_rate"] == pytest.approx([hits / sum(part) for part in parts for hits in part[:1]])
    more = [now - misses - bypasses for now, (_, misses, bypasses) in zip(loads.of_epochs, parts, strict=True)]
    assert set(more) <= {0, 1, 2}, "samples are read again, now and then, to see whether they are random"


def check_expected(trainer: Any) -> None:
    """Each hit rate is the expected one."""
    measured, expected = logged(trainer, "stocache/hit_rate"), logged(trainer, "stocache/hit_rate_expected")
    assert len(expected) == EPOCHS
    assert measured == pytest.approx(expected, abs=1e-6)


def samples_per_epoch(model: Watcher) -> list[int]:
    """The number of samples in the batches of each epoch."""
    sizes = [count(pickle.loads(batch)) for stage, batch in model.batches if stage == "train"]
    steps = len(sizes) // EPOCHS
    return [sum(sizes[epoch * steps : (epoch + 1) * steps]) for epoch in range(EPOCHS)]


def count(node: Any) -> int:
    """The number of samples in a batch as a Watcher records it, or in a dict or list of batches."""
    if isinstance(node, dict):
        return sum(map(count, node.values()))
    if node is None:
        return 0  # of a loader that has ended
    kind, parts = node if len(node) == 2 else (None, None)
    if kind in ("list", "tuple") and parts and len(parts) == 2 and parts[1][0] == "torch.int64":
        return int(parts[1][1][0])  # images and labels
    return sum(map(count, parts or ()))


@pytest.mark.parametrize("name", LOADERS)
def test_hit_rates_are_as_expected_and_batches_as_without_a_cache(tmp_path, name, recwarn):
    """Every batch is the same as without a cache, and the counts agree with the source. If each index is drawn once,
    the hit rate is as expected; else no rate is expected."""
    make, options = LOADERS[name]
    plain, _ = train(tmp_path / "plain", lambda: make(source(tmp_path, "plain", SAMPLES)), [], **options)
    data = source(tmp_path, samples=SAMPLES)
    loads = Loads(data)
    cached, trainer = train(tmp_path, lambda: make(data), [StochasticCache(budget=60 * SLOT), loads], **options)
    assert cached.batches == plain.batches
    check_counts(trainer, loads, samples_per_epoch(cached))
    if name in ONCE:
        check_expected(trainer)
    else:
        assert logged(trainer, "stocache/hit_rate_expected") == []
    assert not [warning for warning in recwarn if "were to be expected" in str(warning.message)]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
def test_several_loaders_are_counted_together(tmp_path, mode):
    """This holds in all modes of a CombinedLoader. Hits are as expected if no set ends early or starts again."""

    def loaders(long: Dataset[Any], short: Dataset[Any]) -> Any:
        return CombinedLoader({"long": shuffled(long), "short": shuffled(short)}, mode)

    def sources(name: str) -> tuple[CountedSource, CountedSource]:
        return source(tmp_path, f"{name}-long", SAMPLES), source(tmp_path, f"{name}-short", 40)

    plain, _ = train(tmp_path / "plain", lambda: loaders(*sources("plain")), [])
    data = sources("cached")
    loads = Loads(*data)
    cached, trainer = train(tmp_path, lambda: loaders(*data), [StochasticCache(budget="50%"), loads])
    assert cached.batches == plain.batches
    check_counts(trainer, loads, samples_per_epoch(cached))
    if mode == "max_size":
        check_expected(trainer)
    else:
        assert logged(trainer, "stocache/hit_rate_expected") == []


@pytest.mark.parametrize("held_out", [range(5), range(60, 70)])
def test_validation_on_the_same_dataset_is_told_from_training(tmp_path, held_out):
    """Training has the expected hit rate on its fold, whether or not validation has filled some of it before."""
    data = source(tmp_path, samples=SAMPLES)
    folds = SubsetRandomSampler(range(10, SAMPLES)), SubsetRandomSampler(held_out)
    options = {"num_sanity_val_steps": 2, "log_every_n_steps": 1000}
    trainer = make_trainer(tmp_path, [StochasticCache(budget=SLOT * SAMPLES // 2)], epochs=EPOCHS, **options)
    trainer.fit(Watcher(), *(DataLoader(data, BATCH, sampler=fold) for fold in folds))
    check_expected(trainer)


class Late(Watcher):
    """Validates on the newest samples, ten of which come while the first epoch trains."""

    def __init__(self, data: Any) -> None:
        super().__init__()
        self.data = data

    def val_dataloader(self) -> Any:
        self.data.length = SAMPLES + 10
        return DataLoader(self.data, BATCH, sampler=SubsetRandomSampler(range(SAMPLES + 2, SAMPLES + 10)))


def test_validation_draws_samples_that_came_since_training_began(tmp_path):
    """The cache of the training fold has no slot for them, so validation has a cache of its own."""
    data = source(tmp_path, samples=SAMPLES)
    trainer = make_trainer(tmp_path, [StochasticCache()], epochs=3, num_sanity_val_steps=0)
    trainer.fit(Late(data), DataLoader(data, BATCH, sampler=SubsetRandomSampler(range(40))))
    assert logged(trainer, "stocache/hits")[1:] == [40, 40]
    assert logged(trainer, "stocache/val/hits")[1:] == [8, 8]


def test_a_part_of_cached_datasets_is_drawn_through_subset_and_concat(tmp_path):
    """The counts of a user's CachedDatasets behind `Subset` and `ConcatDataset` agree with the sources."""
    sources = [source(tmp_path, name, SAMPLES) for name in ("one", "other")]
    sets = [CachedDataset(counted, budget="50%") for counted in sources]
    joined = ConcatDataset([Subset(sets[0], range(0, SAMPLES, 3)), sets[1]])
    loads = Loads(*sources)
    model, trainer = train(tmp_path, lambda: shuffled(joined), [CacheMonitor(), loads])
    check_counts(trainer, loads, samples_per_epoch(model))
    assert logged(trainer, "stocache/hit_rate_expected") == []
    for dataset in sets:
        dataset.close()


@pytest.mark.slow
def test_two_ranks_draw_together(tmp_path):
    """With DDP the batches are those of an uncached job, and the samples of all ranks can have slots."""
    jobs = start_nodes(tmp_path, "samplers")
    assert exit_codes(jobs, tmp_path / "said", 200) == [0], (tmp_path / "said").read_text()
    ranks = [saw for [saw] in read_ranks(tmp_path, 2)]
    for name, saw in ranks[0].items():
        assert saw["same"], name
        assert ranks[1][name]["same"], name
        fold = "fold" in name
        assert saw["slots"] == ranks[1][name]["slots"] == [15 if fold else 60], "half of what is drawn"
        for epoch in saw["epochs"]:
            served = sum(epoch[key] for key in ("hits", "misses", "bypasses"))
            assert served == 2 * 4 * saw["steps"] / EPOCHS - (2 if fold else 0)  # 30 of a fold: 15 for each rank
            assert ("hit_rate_expected" in epoch) == (name == "distributed")
            if name == "distributed":
                assert epoch["hit_rate"] == pytest.approx(epoch["hit_rate_expected"], abs=0.01)

"""A loader that cannot be cached stays the user's own object, and all other loaders are cached."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, TensorDataset
from tqdm.auto import tqdm

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from tests.sources import CountedStream, Made
from tests.training.tiny import (
    SAMPLES,
    Looking,
    Watcher,
    announced,
    data_hooks,
    fit,
    logged,
    make_trainer,
    plain_loader,
    said,
    source,
    through,
)

pytestmark = pytest.mark.processes

tqdm.get_lock()  # lr_find has a bar, whose semaphore lives as long as the process

PASSES = "passes through uncached"


class Endless(Dataset[Any]):
    """A dataset without a length."""

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index))


class Iterating(DataLoader[Any]):
    """Starts to read in its constructor, as timm's MultiEpochsDataLoader did."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.iterator = super().__iter__()

    def __iter__(self):
        return iter([next(self.iterator) for _ in range(2)])


class Making(DataLoader[Any]):
    """Creates its own dataset."""

    def __init__(self) -> None:
        super().__init__(TensorDataset(torch.arange(6.0)), batch_size=2)


class Batches:
    """An iterable that is no DataLoader and has one inside, as timm's PrefetchLoader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader = loader

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)

    @property
    def dataset(self):
        return self.loader.dataset


def stream() -> CountedStream:
    return CountedStream(6, lambda number: torch.full((2,), float(number)))


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(12.0).reshape(6, 2))


ODD = {
    "empty": (lambda: DataLoader([], batch_size=2), "list passes through uncached: it is empty"),
    "iterable": (
        lambda: DataLoader(stream(), batch_size=2),
        "CountedStream passes through uncached: it is iterable-style. streams=True keeps it",
    ),
    "no length": (lambda: DataLoader(Endless(), batch_size=2, sampler=[1, 2]), "Endless .*no length.*__len__"),
    "begun": (lambda: Iterating(numbers(), batch_size=2), "TensorDataset .*Iterating reads it already"),
    "wrapper": (
        lambda: Batches(DataLoader(numbers(), 2)),
        "Batches .*no .*DataLoader. Wrap its TensorDataset with Cac",
    ),
    "generator": (lambda: (torch.ones(2) for _ in range(2)), "generator .*no .*DataLoader. Use a DataLoader"),
}


@pytest.mark.parametrize(("door", "odd"), [*(("callback", odd) for odd in ODD), ("cache_datamodule", "iterable")])
def test_an_odd_val_loader_passes_as_it_is(tmp_path, caplog, door, odd):
    """Training is cached beside a val loader that cannot be cached. The batches are the same as without a cache, the
    val loader is the user's own object, and one warning in three epochs names stage, dataset and reason. With
    strict=True the reason is an error, unless the stage is off."""
    make, words = ODD[odd]
    train, made = source(tmp_path), []

    def val() -> Any:
        made.append(make())
        return made[-1]

    loaders = {"train": lambda: plain_loader(train, shuffle=True), "val": val}
    options = {"epochs": 3, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    plain, *_ = fit("none", tmp_path, loaders, **options)
    loads = train.loads
    model, _, looking = fit(door, tmp_path, loaders, **options)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [SAMPLES]
    assert train.loads - loads <= SAMPLES + announced(caplog)
    if odd != "empty":  # which has no batch at which one could look
        assert looking.loaders["val"] is made[-1]
    [warning] = said(caplog, PASSES)
    assert re.fullmatch(f"val loader: {words}.*", warning), warning
    title, reason = warning.removeprefix("val loader: ").split(f" {PASSES}: ")
    with pytest.raises((TypeError, ValueError), match=re.escape(f"val loader cannot be cached, {title}: {reason}")):
        fit(door, tmp_path, loaders, cache={"strict": True})
    fit(door, tmp_path, loaders, cache={"strict": True, "stage_budgets": {"val": 0}})


def test_one_odd_loader_of_several_passes_alone(tmp_path, caplog):
    """Of several loaders one that cannot be cached is the user's own object, and the others are cached."""
    odd, val = DataLoader(stream(), 2), source(tmp_path, "val", 8)
    loaders = {
        "train": lambda: CombinedLoader([odd, plain_loader(source(tmp_path))], "min_size"),
        "val": lambda: {"a": odd, "b": plain_loader(val)},
    }
    plain, *_ = fit("none", tmp_path, loaders, epochs=2)
    model, _, looking = fit("callback", tmp_path, loaders, epochs=2)
    assert model.batches == plain.batches
    assert looking.slots == {"train": [SAMPLES], "val": [8]}
    assert looking.loaders["val"]["a"] is looking.loaders["train"][0] is odd
    assert [warning.split(":")[0] for warning in said(caplog, PASSES)] == ["val loader", "train loader"]


def test_a_loader_that_makes_its_own_dataset_is_cached(tmp_path):
    """On one device, where Lightning does not make it anew. The batches are those without a cache."""
    plain, *_ = fit("none", tmp_path, {"train": Making}, epochs=2)
    model, _, looking = fit("callback", tmp_path, {"train": Making}, epochs=2)
    assert model.batches == plain.batches
    assert looking.slots["train"] == [6]


def test_batches_in_memory_pass_in_silence(tmp_path, caplog):
    """Tensors that are given as loaders need no cache and no warning."""
    trainer, model, *_ = through("callback", tmp_path, {})
    trainer.predict(model, [torch.ones(2, 3), torch.zeros(2, 3)])
    assert len(model.batches) == 4
    assert said(caplog, PASSES) == []


@pytest.mark.parametrize(("door", "wrap"), [("callback", Batches), ("cache_datamodule", lambda loader: loader)])
def test_a_cached_dataset_of_the_users_is_left_alone(tmp_path, caplog, door, wrap):
    """A loader that reads a CachedDataset is not cached again, also inside of a wrapper. A reload keeps its cache, and
    there is no warning."""
    train = source(tmp_path)
    dataset = CachedDataset(train, defer=True)
    options = {"epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    model, *_ = fit(door, tmp_path, {"train": lambda: wrap(plain_loader(dataset))}, **options)
    assert len(model.batches) == 12
    assert train.loads <= SAMPLES + announced(caplog)
    assert dataset.cache.filled == SAMPLES
    assert said(caplog, PASSES) == []
    dataset.close()


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("other", ["callback", "cache_datamodule", "ours"])
def test_two_doors_cache_once(tmp_path, caplog, other):
    """A second StochasticCache, or one beside a DataModule that caches, opens nothing and changes nothing."""
    train, looking, extra = source(tmp_path), Looking(), StochasticCache()
    callbacks: list[Any] = [looking, extra]
    dm: Any = data_hooks(train=lambda: plain_loader(train), val=lambda: DataLoader(stream(), 2))
    if other == "callback":
        callbacks.insert(1, StochasticCache())
    elif other == "cache_datamodule":
        dm = cache_datamodule(dm)
    else:
        dm = StocacheDataModule(train, stream(), batch_size=4)
    trainer = make_trainer(tmp_path, callbacks, epochs=2)
    trainer.fit(Watcher(), datamodule=dm)
    assert train not in extra.caches
    assert looking.slots["train"] == [SAMPLES]
    assert train.loads <= SAMPLES + announced(caplog)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert len(said(caplog, PASSES)) == 1
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


def test_sets_of_ours_that_cannot_be_cached_pass(tmp_path, caplog):
    """An empty and an iterable-style set of a StocacheDataModule pass through, transformed; train is cached."""
    train = source(tmp_path)
    dm = StocacheDataModule(
        train, [Made(float, 0), stream()], batch_size=2, transform=lambda sample: sample, eval_transform=torch.neg
    )
    looking, model = Looking(), Watcher()
    make_trainer(tmp_path, [looking], logger=False, num_sanity_val_steps=0).fit(model, datamodule=dm)
    negative = Watcher()
    for batch in DataLoader(stream(), 2):
        negative.note("val1", -batch)
    assert [entry for entry in model.batches if entry[0] == "val1"] == negative.batches
    assert looking.slots["train"] == [SAMPLES]
    assert len(said(caplog, PASSES)) == 2
    with pytest.raises(ValueError, match="val loader cannot be cached, Made: it is empty"):
        StocacheDataModule(train, [Made(float, 0), stream()], strict=True).setup("fit")

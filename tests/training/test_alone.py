"""A loader that cannot be cached stays the user's own object, and all other loaders are cached."""

import re
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from tqdm.auto import tqdm

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.training.callbacks import StochasticCache
from lightning_stocache.training.datamodule import StocacheDataModule, cache_datamodule
from tests.sources import Made
from tests.training.tiny import (
    SAMPLES,
    SLOT,
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


class Stream(IterableDataset[Any]):
    """An iterable-style dataset."""

    def __iter__(self):
        return iter([torch.full((2,), float(number)) for number in range(6)])


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


def numbers() -> TensorDataset:
    return TensorDataset(torch.arange(12.0).reshape(6, 2))


ODD = {
    "empty": (lambda: DataLoader([], batch_size=2), "list passes through uncached: it is empty"),
    "iterable": (
        lambda: DataLoader(Stream(), batch_size=2),
        "Stream passes through uncached: it is iterable-style. streams=True keeps it",
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
    odd, val = DataLoader(Stream(), 2), source(tmp_path, "val", 8)
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


OPTIONS: dict[str, dict[str, Any]] = {
    "sanity": {},
    "reload": {"reload_dataloaders_every_n_epochs": 1},
    "late reload": {"reload_dataloaders_every_n_epochs": 2, "num_sanity_val_steps": 0},
    "overfit": {"overfit_batches": 2},
    "val within epochs": {"val_check_interval": 2, "limit_val_batches": 1},
    "no train": {"limit_train_batches": 0},
}


@pytest.mark.parametrize(
    ("door", "name"), [*(("callback", name) for name in OPTIONS if name != "sanity"), ("cache_datamodule", "sanity")]
)
def test_hooks_run_when_and_as_often_as_without(tmp_path, door, name):
    """In fit, validate, test and predict each hook runs at the same steps as without the cache, with the same
    batches."""
    data = {stage: source(tmp_path, stage, 8) for stage in ("train", "val", "test", "predict")}
    loaders = {stage: lambda stage=stage: plain_loader(data[stage], shuffle=stage == "train") for stage in data}

    def run(door: str) -> Any:
        trainer, model, dm, _ = through(door, tmp_path, loaders, epochs=4, **OPTIONS[name])
        seed_everything(0, verbose=False)
        trainer.fit(model, datamodule=dm)
        trainer.validate(model, datamodule=dm, verbose=False)
        trainer.test(model, datamodule=dm, verbose=False)
        trainer.predict(model, datamodule=dm)
        return dm.ran, model.batches

    assert run(door) == run("none")


def test_what_a_hook_raises_is_raised(tmp_path):
    """fit raises the user's error, and the Trainer has its own data sources again."""

    def fail() -> Any:
        raise ArithmeticError("mine")

    trainer, model, dm, _ = through("callback", tmp_path, {"train": fail})
    with pytest.raises(ArithmeticError, match="mine"):
        trainer.fit(model, datamodule=dm)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


@pytest.mark.parametrize(
    ("door", "budget", "sanity", "slots"),
    [
        ("callback", 48, 2, [24, 8]),
        ("cache_datamodule", 16, 2, [8, 8]),
        ("callback", 8, 2, [4, 4]),
        ("cache_datamodule", 26, 0, [24, 2]),
    ],
    ids=["enough", "half", "less", "train first"],
)
def test_hooks_divide_the_budget_as_they_come(tmp_path, door, budget, sanity, slots):
    """Val takes at most half before train, train the rest; without a sanity check train goes first."""
    loaders = {"train": lambda: plain_loader(train), "val": lambda: plain_loader(val)}
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    _, _, looking = fit(door, tmp_path, loaders, num_sanity_val_steps=sanity, cache={"budget": budget * SLOT})
    assert [*looking.slots["train"], *looking.slots["val"]] == slots


@pytest.mark.parametrize("door", ["callback", "cache_datamodule"])
def test_where_nothing_is_left_for_val_a_warning_says_how_to_keep_it(tmp_path, caplog, door):
    """If train has taken the budget, a later val set passes through, counted, with one warning for all reloads."""
    train, val = source(tmp_path), source(tmp_path, "val", 8)
    loaders = {"train": lambda: plain_loader(train), "val": lambda: plain_loader(val)}
    options = {"num_sanity_val_steps": 0, "epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    budget = {"budget": SAMPLES * SLOT}
    _, _, looking = fit(door, tmp_path, loaders, cache=budget, **options)
    assert looking.slots == {"train": [SAMPLES], "val": [0]}
    [warning] = said(caplog, PASSES)
    assert re.search(r"val loader: CountedSource .*stage_budgets={'val': ...}", warning)
    _, _, looking = fit(door, tmp_path, loaders, cache=budget | {"stage_budgets": {"val": 8 * SLOT}}, **options)
    assert looking.slots == {"train": [SAMPLES], "val": [8]}


@pytest.mark.parametrize("sanity", [0, 2])
def test_loaders_given_to_fit_share_by_size(tmp_path, sanity):
    """Loaders that are given to fit are known from the start: train and val share the budget by size."""
    trainer, model, _, looking = through(
        "callback", tmp_path, {}, num_sanity_val_steps=sanity, cache={"budget": 16 * SLOT}
    )
    trainer.fit(model, plain_loader(source(tmp_path)), plain_loader(source(tmp_path, "val", 8)))
    assert looking.slots == {"train": [12], "val": [4]}


def test_a_persistent_loader_that_comes_again_is_the_same(tmp_path):
    """A loader that its hook returns again keeps its workers over reloads, and draws no second base seed."""
    loader = plain_loader(source(tmp_path), shuffle=True, num_workers=1, persistent_workers=True)
    options = {"epochs": 3, "reload_dataloaders_every_n_epochs": 1}
    seen = []

    class Noting(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            seen.append(trainer.train_dataloader)

    def run(*callbacks: Callback) -> Any:
        seen.clear()
        model = Watcher()
        seed_everything(0, verbose=False)
        make_trainer(tmp_path, callbacks, logger=False, **options).fit(
            model, datamodule=data_hooks(train=lambda: loader)
        )
        return model.batches

    plain = run()
    assert run(StochasticCache(), Noting()) == plain
    assert len(set(map(id, seen))) == 1
    assert seen[0] is not loader


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("other", ["callback", "cache_datamodule", "ours"])
def test_two_doors_cache_once(tmp_path, caplog, other):
    """A second StochasticCache, or one beside a DataModule that caches, opens nothing and changes nothing."""
    train, looking, extra = source(tmp_path), Looking(), StochasticCache()
    callbacks: list[Any] = [looking, extra]
    dm: Any = data_hooks(train=lambda: plain_loader(train), val=lambda: DataLoader(Stream(), 2))
    if other == "callback":
        callbacks.insert(1, StochasticCache())
    elif other == "cache_datamodule":
        dm = cache_datamodule(dm)
    else:
        dm = StocacheDataModule(train, Stream(), batch_size=4)
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
        train, [Made(float, 0), Stream()], batch_size=2, transform=lambda sample: sample, eval_transform=torch.neg
    )
    looking, model = Looking(), Watcher()
    make_trainer(tmp_path, [looking], logger=False, num_sanity_val_steps=0).fit(model, datamodule=dm)
    negative = Watcher()
    for batch in DataLoader(Stream(), 2):
        negative.note("val1", -batch)
    assert [entry for entry in model.batches if entry[0] == "val1"] == negative.batches
    assert looking.slots["train"] == [SAMPLES]
    assert len(said(caplog, PASSES)) == 2
    with pytest.raises(ValueError, match="val loader cannot be cached, Made: it is empty"):
        StocacheDataModule(train, [Made(float, 0), Stream()], strict=True).setup("fit")

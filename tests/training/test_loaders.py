"""The loaders of a call: each is made anew around a cached dataset, or stays the user's own object."""

import collections
import contextlib
import importlib
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.utilities.data import _replace_dunder_methods as replaced
from lightning.fabric.utilities.data import _update_dataloader
from lightning.pytorch import Callback
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.trainer import call
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from lightning_stocache import CachedDataset, CachedLoader, StocacheDataModule, StochasticCache, cache_loader
from lightning_stocache.loading.loader_tree import loaders_in
from lightning_stocache.setup.options import CacheOptions
from lightning_stocache.training import lightning_internals
from lightning_stocache.training.caches import CallCaches
from lightning_stocache.training.call_loaders import CallLoaders
from lightning_stocache.training.loaders import rewrap, with_dataset
from lightning_stocache.training.sampling import replicas
from tests.jobs import Log
from tests.processes import run_ranks
from tests.sources import CountedStream, Made
from tests.training.tiny import (
    SAMPLES,
    Data,
    Looking,
    Model,
    Watcher,
    announced,
    behind,
    cached_datasets,
    fit,
    logged,
    make_trainer,
    plain_loader,
    read_again,
    said,
    source,
)

NUMBERS: Any = [torch.tensor(i) for i in range(12)]
TENS: Any = [torch.tensor(10 * i) for i in range(12)]
Pair = collections.namedtuple("Pair", "one other")


def read(loader: DataLoader[Any]) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def tens(loader: DataLoader[Any]) -> Any:
    return with_dataset(loader, TENS)


def test_nesting_and_types_are_kept():
    """The result has the nesting and the types of the argument, with every loader replaced."""
    pair = Pair(DataLoader(NUMBERS, 4), [DataLoader(NUMBERS, 6)])
    combined = CombinedLoader({"one": DataLoader(NUMBERS, 4), "other": DataLoader(NUMBERS, 6)}, "max_size")
    given = collections.OrderedDict(pair=pair, combined=(combined,))
    renewed = rewrap(given, tens)
    assert (type(renewed), type(renewed["pair"]), type(renewed["combined"])) == (collections.OrderedDict, Pair, tuple)
    assert [len(loader) for loader in loaders_in(renewed)] == [3, 2, 3, 2]
    assert all(loader.dataset is TENS for loader in loaders_in(renewed))
    assert all(loader.dataset is NUMBERS for loader in loaders_in(given))
    assert len(list(renewed["combined"][0])) == 3  # "max_size": the shortest, the default, would be two


class Drawing(DataLoader[Any]):
    """A user's own, whose constructor draws, with an argument that is a method."""

    def __init__(self) -> None:
        self.scale = int(torch.randint(2, 9, ()))
        super().__init__(TENS, batch_size=5, collate_fn=self.collate)

    def collate(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack(samples) * self.scale


def test_a_copy_has_what_the_loader_has():
    """It reads the same batches, with all that a user has added or changed, and without running a constructor. The
    loader keeps its own, and a method of the loader becomes a method of the copy."""
    unbatched = DataLoader(NUMBERS, batch_size=None, sampler=[2, 7], collate_fn=lambda sample: sample[None])
    assert read(tens(unbatched)) == [[20], [70]]
    assert read(tens(DataLoader(NUMBERS, batch_sampler=[[0, 1], [5]]))) == [[0, 10], [50]]
    old: Any = DataLoader(NUMBERS, 4, drop_last=True)
    old.name, old.batch_sampler.batch_size, old.worker_init_fn = "mine", 5, print
    new = tens(old)
    assert (new.name, new.worker_init_fn, new.drop_last, len(new)) == ("mine", print, True, 2)
    assert read(new)[0] == [0, 10, 20, 30, 40]
    new.name = "new"
    assert (old.name, old.dataset) == ("mine", NUMBERS)
    old = Drawing()
    expected, state = read(old), torch.get_rng_state()
    new = with_dataset(old, NUMBERS)
    assert torch.equal(torch.get_rng_state(), state)
    assert [[10 * number for number in batch] for batch in read(new)] == expected
    new.scale = 1
    assert read(new)[0] == [0, 1, 2, 3, 4]
    assert read(old) == expected


class Tagged(DataLoader[Any]):
    """A loader with an argument of its own, as a user would write it."""

    def __init__(self, dataset: Any, tag: str, **options: Any) -> None:
        super().__init__(dataset, **options)
        self.tag = tag


@pytest.mark.parametrize("in_hook", [True, False])
@pytest.mark.parametrize("kind", [DataLoader, Tagged])
def test_lightning_makes_the_copy_anew_around_the_same_dataset(kind, in_hook):
    """A copy that Lightning re-creates, as for DDP, reads the cached dataset, with the user's arguments."""
    by_position = (TENS, 5, None, None, None, 0, torch.stack, False, True)
    with replaced(DataLoader, "dataset") if in_hook else contextlib.nullcontext():
        loader = DataLoader(*by_position) if kind is DataLoader else Tagged(TENS, "blue", batch_size=5, drop_last=True)
        dataset = CachedDataset(TENS, defer=True)
        new = with_dataset(loader, dataset)
    again = _update_dataloader(new, SequentialSampler(range(11)))
    assert again.dataset is dataset
    assert read(again) == [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]
    assert type(again) is type(new)


@pytest.mark.parametrize("in_hook", [True, False])
def test_lightning_makes_what_cache_loader_returns_anew_around_the_cache(in_hook):
    """So a loader hook may return such a loader, whose arguments were given by position."""
    with replaced(DataLoader, "dataset") if in_hook else contextlib.nullcontext():
        new = cache_loader(DataLoader(TENS, 5, None, None, None, 0, torch.stack, False, True), "1MiB")
    again = _update_dataloader(new, SequentialSampler(range(11)))
    assert again.dataset is new.dataset
    assert read(again) == [[0, 10, 20, 30, 40], [50, 60, 70, 80, 90]]
    assert type(again) is CachedLoader


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


class Batches:
    """An iterable that is no DataLoader and has one inside, as timm's PrefetchLoader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __iter__(self):
        return iter(self.loader)

    def __len__(self):
        return len(self.loader)


def stream() -> CountedStream:
    return CountedStream(6, lambda number: torch.full((2,), float(number)))


ROWS = TensorDataset(torch.arange(12.0).reshape(6, 2))
ODD = {
    f"list {PASSES}: it is empty": lambda: DataLoader([], 2),
    f"CountedStream {PASSES}: it is iterable-style. streams=True keeps it": lambda: DataLoader(stream(), 2),
    "Endless .*no length.*__len__": lambda: DataLoader(Endless(), 2, sampler=[1, 2]),
    "TensorDataset .*Iterating reads it already": lambda: Iterating(ROWS, 2),
    "Batches .*no .*DataLoader. Wrap its TensorDataset with Cac": lambda: Batches(DataLoader(ROWS, 2)),
    "generator .*no .*DataLoader. Use a DataLoader": lambda: (torch.ones(2) for _ in range(2)),
}


def test_odd_loaders_pass_as_they_are(tmp_path, caplog):
    """Loaders that cannot be cached are the user's own objects, each with one warning in two epochs, and those beside
    them are cached. With strict=True the reason is an error, unless the stage is off."""
    odd, train, val = DataLoader(stream(), 2), source(tmp_path), source(tmp_path, "val", 8)
    made: list[Any] = []

    def val_loaders() -> Any:
        made[:] = [make() for make in ODD.values()]
        return {"odd": list(made), "plain": plain_loader(val), "in memory": [torch.ones(2, 3)]}

    loaders = {"train": lambda: CombinedLoader([odd, plain_loader(train)], "min_size"), "val": val_loaders}
    options = {"epochs": 2, "reload_dataloaders_every_n_epochs": 1, "num_sanity_val_steps": 1}
    plain, *_ = fit("none", tmp_path, loaders, **options)
    loads = train.loads
    model, _, looking = fit("callback", tmp_path, loaders, **options)
    assert model.batches == plain.batches
    assert looking.slots == {"train": [SAMPLES], "val": [8]}
    assert train.loads - loads <= SAMPLES + announced(caplog)
    assert all(loader is users for loader, users in zip(looking.loaders["val"]["odd"], made, strict=True))
    assert looking.loaders["train"][0] is odd
    warnings = said(caplog, PASSES)
    assert len(warnings) == len(ODD) + 1
    for warning, words in zip(warnings, ODD, strict=False):
        assert re.fullmatch(f"val loader: {words}.*", warning)
    assert warnings[-1].startswith(f"train loader: CountedStream {PASSES}: ")
    with pytest.raises(ValueError, match="val loader cannot be cached, list: it is empty"):
        fit("cache_datamodule", tmp_path, loaders, cache={"strict": True})
    loaders["train"] = lambda: plain_loader(train)
    fit("cache_datamodule", tmp_path, loaders, cache={"strict": True, "budget": {"val": 0}})


def test_sets_of_ours_that_cannot_be_cached_pass(tmp_path, caplog):
    """An iterable-style and an empty set of a StocacheDataModule pass through, transformed; train is cached."""
    sets = source(tmp_path), [stream(), Made(float, 0)]
    dm = StocacheDataModule(*sets, batch_size=2, transform=lambda sample: sample, eval_transform=torch.neg)
    looking, model, negative = Looking(), Watcher(), Watcher()
    make_trainer(tmp_path, [looking], logger=False, num_sanity_val_steps=0).fit(model, datamodule=dm)
    for batch in [*DataLoader(stream(), 2)] * 2:
        negative.note("val0", -batch)
    assert [entry for entry in model.batches if entry[0] == "val0"] == negative.batches
    assert looking.slots["train"] == [SAMPLES]
    assert len(said(caplog, PASSES)) == 2
    with pytest.raises(TypeError, match="val loader cannot be cached, CountedStream: it is iterable-style"):
        StocacheDataModule(*sets, strict=True).setup("fit")


def agree(rank: int) -> None:
    """A loader that is empty, missing or of another length on one rank passes on all; rank 0 alone warns."""
    log, caches = Log(), CallCaches(CacheOptions())
    lengths = {"train": [12, 5 + rank, 2 - 2 * rank], "val": [12] * (1 + rank)}
    given = {
        stage: lambda of_stage=of_stage: [DataLoader(Made(torch.tensor, length)) for length in of_stage]
        for stage, of_stage in lengths.items()
    }
    call_loaders = CallLoaders(caches, given)
    cached = [[bool(cached_datasets(loader)) for loader in loaders_in(call_loaders(stage))] for stage in given]
    caches.close()
    assert cached == [[True, False, False], [False] * (1 + rank)]
    words = [] if rank else [r"train .*\[5, 6\]", "train .*it is empty", "val "]
    warnings = [line for line in log.lines if PASSES in line]
    assert len(warnings) == len(words)
    assert all(map(re.match, words, warnings))


@pytest.mark.processes
def test_ranks_agree_on_each_loader():
    """What two ranks find out about their loaders."""
    run_ranks(agree, 2)


@pytest.mark.parametrize(("door", "wrap"), [("callback", Batches), ("cache_datamodule", lambda loader: loader)])
def test_a_cached_dataset_of_the_users_is_left_alone(tmp_path, caplog, door, wrap):
    """A loader that reads a CachedDataset is not cached again, also inside of a wrapper, and there is no warning."""
    train = source(tmp_path)
    dataset = CachedDataset(train, defer=True)
    options = {"epochs": 2, "reload_dataloaders_every_n_epochs": 1}
    model, *_ = fit(door, tmp_path, {"train": lambda: wrap(plain_loader(dataset))}, **options)
    assert len(model.batches) == 12
    assert train.loads <= SAMPLES + announced(caplog) + read_again(caplog)
    assert dataset.cache.filled == SAMPLES
    assert said(caplog, PASSES) == []
    dataset.close()


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("other", ["callback", "ours"])
def test_two_doors_cache_once(tmp_path, caplog, other):
    """A second StochasticCache, or one beside a DataModule that caches, opens nothing and changes nothing."""
    train, looking, extra = source(tmp_path), Looking(), StochasticCache()
    callbacks, dm = behind(other, Data(train, stream()))
    first = callbacks if other == "callback" else []
    trainer = make_trainer(tmp_path, [looking, *first, extra], epochs=2)
    trainer.fit(Watcher(), datamodule=dm)
    assert train not in extra.caches
    assert looking.slots["train"] == [SAMPLES]
    assert train.loads <= SAMPLES + announced(caplog) + read_again(caplog)
    assert logged(trainer, "stocache/hits") == [0, SAMPLES]
    assert len(said(caplog, PASSES)) == 1
    assert "dataloader" not in vars(trainer.fit_loop._data_source)


def test_without_private_names_of_lightning_a_feature_is_off(caplog):
    """Without them a default is assumed, nothing is cached, or nothing timed, each with one warning."""
    importlib.reload(lightning_internals)  # each warning comes once in a process
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(val_loop=SimpleNamespace()))
    loops = {f"{name}_loop": loop for name in ("fit", "validate", "test", "predict")}
    known: dict[str, Any] = {"distributed_sampler_kwargs": {"num_replicas": 2, "rank": 1}, "enable_validation": True}
    trainer: Any = SimpleNamespace(_accelerator_connector=SimpleNamespace(), strategy=None, **known, **loops)
    assert replicas(trainer) == replicas(trainer) == (2, 1)
    assert caplog.text.count("use_distributed_sampler=False") == 1
    assert lightning_internals.data_sources(trainer, "fit") == lightning_internals.data_sources(trainer, "fit") == {}
    assert caplog.text.count("hides where its loaders come from: nothing is cached") == 1
    assert lightning_internals.step_calls(trainer) == []
    assert caplog.text.count("StepTimer times nothing") == 1


class Notes(StochasticCache):
    """A user's own, with a hook of a batch."""

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        self.noted = True


def test_no_hook_of_a_batch_is_called_that_does_nothing(tmp_path):
    """Lightning takes time to call one. A subclass may define it, and calls that of `super()`."""
    profiler, cache = SimpleProfiler(), Notes()
    trainer = make_trainer(tmp_path, [cache], epochs=1, profiler=profiler, logger=False)
    trainer.fit(Model(), plain_loader(source(tmp_path)))
    ours = "[Callback]Notes.", "[Callback]CacheMonitor.", "[Callback]lightning_stocache."
    called = {name.partition("]")[2] for name in profiler.recorded_durations if name.startswith(ours)}
    in_batches = {name for name in called if "batch" in name or "before" in name or "after" in name}
    assert in_batches == {
        "Notes.on_train_batch_end",
        "CacheMonitor.on_train_batch_start",
        "CacheMonitor.on_train_batch_end",
    }
    assert cache.noted


def test_empty_hooks_stay_where_lightning_may_call_what_is_none(monkeypatch):
    """In a version of Lightning that calls hooks in another way."""
    importlib.reload(lightning_internals)
    monkeypatch.delattr(call, "_call_callback_hooks")
    callback = Callback()
    lightning_internals.skip_empty_hooks(callback)
    assert callable(callback.on_train_batch_end)

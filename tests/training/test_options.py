"""The options of the doors: described in `help`, refused if wrong, in effect, and on a command line."""

import contextlib
import pydoc
from collections.abc import Callable, Iterator
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from lightning_stocache import (
    CachedDataset,
    CachedStream,
    CacheMonitor,
    CacheOptions,
    StocacheDataModule,
    StochasticCache,
    cache_datamodule,
)
from lightning_stocache.setup.request import LoaderSettings
from tests.training.tiny import SAMPLES, Data, Model, Photos, cached_datasets, logged, make_trainer, read_again, source


def ours(**options: Any) -> StocacheDataModule:
    return StocacheDataModule([1], **options)


@pytest.mark.parametrize("door", [StochasticCache, ours, lambda **options: cache_datamodule(Data([1]), **options)])
def test_caches_have_the_options_of_their_door(door):
    """What a door was told reaches the request for a cache, in every door."""
    options = {"freeze_random": True, "fingerprint": "v1", "strict": True, "store": "encoded"}
    options |= {"prefill": True, "dir": "d"}
    request = door(**options).caches.options.request(source(""), LoaderSettings(1, 0), "", None)
    assert {name: getattr(request, name) for name in options} == options
    assert not door().caches.options.request(source(""), LoaderSettings(1, 0), "", None).freeze_random


@pytest.mark.parametrize("takes_options", [StochasticCache, StocacheDataModule, cache_datamodule])
def test_constructors_repeat_the_options(takes_options):
    """Type checkers and LightningCLI read signatures: each option is there with its default, and no `**kwargs`."""
    parameters = signature(takes_options).parameters
    for name, option in signature(CacheOptions).parameters.items():
        assert (parameters[name].default, parameters[name].annotation) == (option.default, option.annotation), name
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())


@pytest.mark.parametrize("takes_some", [CachedDataset, CachedStream])
def test_datasets_have_some_of_the_options(takes_some):
    """With the same defaults. Their budget is no mapping, because they have no stages."""
    parameters = signature(takes_some).parameters
    shared = {name: option for name, option in signature(CacheOptions).parameters.items() if name in parameters}
    assert {"budget", "freeze_random", "strict"} <= shared.keys()
    for name, option in shared.items():
        assert parameters[name].default == option.default, name
        assert name == "budget" or parameters[name].annotation == option.annotation, name


def set_up(train: Any) -> None:
    StocacheDataModule(train).setup("fit")


REFUSED: list[tuple[Callable[..., Any], dict[str, Any], str]] = [
    (StochasticCache, {"keep_cache": "process"}, "keep_cache must be true or false, got 'process'"),
    (StochasticCache, {"budget": {"valid": 0}}, "budget may name the stages train, val, test, predict; got valid"),
    (StochasticCache, {"streams": "yes"}, "streams must be true or false"),
    (StochasticCache, {"budget": "lots"}, "'lots'"),
    (CacheMonitor, {"progress_bar": "no"}, "progress_bar must be true or false, got 'no'"),
    *((CacheMonitor, {flag: "yes"}, f"{flag} must be true or false") for flag in signature(CacheMonitor).parameters),
    *((ours, {"batch_size": size}, "batch_size must be a whole number of at least 1, got") for size in (None, 0, "4")),
    (ours, {"num_workers": "2"}, "num_workers must be a whole number of at least 0, got '2'"),
    (ours, {"loader": [1]}, r"loader must be a mapping from arguments of DataLoader to values, got \[1\]"),
    (ours, {"loader": {"shufle": True}}, "loader has no argument 'shufle'. Did you mean 'shuffle'?"),
    (ours, {"transform": 3}, "transform must be None or a function, got 3"),
    (ours, {"batch_transform": "same"}, "batch_transform must be None or a function, got 'same'"),
    (ours, {"prepare": 3}, "prepare must be None or a function, got 3"),
    (lambda: ours().setup("foo"), {}, "stage must be one of fit, validate, test, predict, got 'foo'"),
    (StochasticCache, {"budget": 50}, 'budget=50 means 50 bytes; write "50%" or "50B"'),
    (StochasticCache, {"budget": {"val": "8G"}}, "could mean GB or GiB"),
    (ours, {"eval_transform": "nope"}, "eval_transform must be 'same', None or a function, got 'nope'"),
    (ours, {"eval_batch_transform": "nope"}, "eval_batch_transform must be 'same', None or a function, got 'nope'"),
    (StocacheDataModule, {"batch_size": 4}, "give train, val, test or predict"),
    (set_up, {"train": "train/"}, "train must be a dataset .* got 'train/'"),
    (set_up, {"train": [source("")] * 2}, "train must be one dataset, got 2: join them with torch's ConcatDataset"),
    (lambda: ours().train_dataloader(), {}, r"train loader needs open caches: call setup\('fit'\) first"),
    (cache_datamodule, {"datamodule": []}, "must be a LightningDataModule, got list"),
    (cache_datamodule, {"datamodule": ours()}, "must not be cached yet, got a StocacheDataModule"),
    (cache_datamodule, {"datamodule": cache_datamodule(Data(source("")))}, "must not be cached yet"),
]


@pytest.mark.parametrize(("door", "options", "words"), REFUSED)
def test_what_is_no_option_is_refused_at_once(door, options, words):
    """Each error names the argument, the rule and the value, or the step to do first, before any training."""
    with pytest.raises((ValueError, TypeError, RuntimeError), match=words):
        door(**options)


@contextlib.contextmanager
def ready(*sets: Any, **options: Any) -> Iterator[StocacheDataModule]:
    """A StocacheDataModule that is set up for `fit`."""
    dm = StocacheDataModule(*sets, **options)
    dm.setup("fit")
    yield dm
    dm.teardown("fit")


def noting(shapes: list[tuple[int, ...]]) -> torch.nn.Module:
    """A batch transform that notes the shapes of its batches."""
    module = torch.nn.Identity()
    module.register_forward_hook(lambda module, args, output: shapes.append(tuple(args[0][0].shape)))
    return module


def test_factories_are_called_once_and_batch_transforms_on_whole_batches(tmp_path):
    """Functions make sets once for all calls, after `prepare`; validation has `eval_batch_transform`."""
    order: list[str] = []
    training, evaluation = list[tuple[int, ...]](), list[tuple[int, ...]]()

    def make(name: str) -> object:
        order.append(name)
        return source(tmp_path, name, 8)

    sets = {"train": partial(make, "train"), "val": [partial(make, "val")]}
    transforms = {"batch_transform": noting(training), "eval_batch_transform": noting(evaluation)}
    dm = StocacheDataModule(**sets, batch_size=4, prepare=lambda: order.append("prepare"), **transforms)
    assert order == []
    trainer = make_trainer(tmp_path, epochs=1, num_sanity_val_steps=1, logger=False)
    trainer.fit(Model(), dm)
    assert training == [(4, 3, 8, 8)] * 2
    assert evaluation == [(4, 3, 8, 8)] * 3
    trainer.validate(Model(), dm, verbose=False)
    assert order == ["prepare", "train", "val", "prepare"]


@pytest.mark.parametrize(("option", "factor"), [({}, 2), ({"eval_transform": None}, 1)])
def test_transforms_run_after_the_cache(tmp_path, option, factor):
    """Val has `eval_transform`, by default the same; one object as train and val has one cache."""
    both = source(tmp_path)
    image, doubled = both.expected(3)[0], {"transform": lambda sample: (sample[0] * 2, sample[1])}
    with ready(both, both, budget={"val": 0}, **doubled | option) as dm:
        [train], [val] = cached_datasets(dm.train_dataloader()), cached_datasets(dm.val_dataloader())
        assert train.cache is val.cache is not None
        for _ in range(2):
            assert torch.equal(train[3][0], image * 2)
            assert torch.equal(val[3][0], image * factor)
    assert train.cache is None


def test_loader_options_reach_the_loaders(tmp_path):
    """`loader` overrides arguments of all loaders; order, `drop_last` and samplers are of the training loader alone."""
    data = source(tmp_path, "train", 10)
    for shuffle in (True, False):
        with ready(data, data, batch_size=4, loader={"drop_last": True, "shuffle": shuffle}) as dm:
            assert (sorted(dm.train_dataloader().sampler) != list(dm.train_dataloader().sampler)) == shuffle
            assert [len(dm.train_dataloader()), len(dm.val_dataloader()[0])] == [2, 3]
    sampler = WeightedRandomSampler([1.0] * 10, 7)
    with ready(data, data, batch_size=4, loader={"sampler": sampler}) as dm:
        assert dm.train_dataloader().sampler is sampler
        assert isinstance(dm.val_dataloader()[0].sampler, SequentialSampler)
    batches = BatchSampler(SequentialSampler(range(10)), 3, False)
    with ready(data, data, batch_size=4, loader={"batch_sampler": batches}) as dm:
        assert [len(labels) for _, labels in dm.train_dataloader()] == [3, 3, 3, 1]
        assert [len(labels) for _, labels in dm.val_dataloader()[0]] == [4, 4, 2]


@pytest.mark.epoch_one_reads_all
def test_setup_twice_opens_once(tmp_path, caplog):
    """A second `setup`, before or by the Trainer, keeps the cache; a stage without a set is undefined."""
    train = source(tmp_path)
    dm = StocacheDataModule(train, batch_size=4)
    dm.setup("fit")
    reads, [dataset] = train.loads, cached_datasets(dm.train_dataloader())
    dm.setup("fit")
    trainer = make_trainer(tmp_path, logger=False)
    trainer.fit(Model(), dm)
    assert train.loads == reads + SAMPLES + read_again(caplog)
    assert dataset.cache is trainer.val_dataloaders is None
    with pytest.raises(MisconfigurationException, match="test_dataloader"):
        trainer.test(Model(), dm)


@pytest.mark.parametrize(
    ("data", "words", "key"),
    [
        (StocacheDataModule, [], "data"),
        (cache_datamodule, ["--data.datamodule=tests.training.tiny.Photos", "--data.datamodule.folder=f"], "data"),
        (Photos, ["--data.folder=f", "--trainer.callbacks+=lightning_stocache.StochasticCache"], "trainer"),
    ],
    ids=["ours", "cache_datamodule", "callback"],
)
def test_a_printed_config_has_every_default(monkeypatch, capsys, data, words, key):
    """So that a config file can be written from it."""
    monkeypatch.setattr("sys.argv", ["train.py"])
    with pytest.raises(SystemExit):
        LightningCLI(Model, data, args=["fit", *words, "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)[key]
    if key == "trainer":
        [callback] = printed["callbacks"]
        printed = callback["init_args"]
    assert printed == printed | CacheOptions().plain()


@pytest.mark.parametrize("takes_options", [StochasticCache, StocacheDataModule])
def test_every_option_is_described_where_it_is_asked_for(takes_options):
    """In `help`, and by jsonargparse for the `--help` of LightningCLI."""
    parser = ArgumentParser()
    parser.add_class_arguments(takes_options, "x")
    described = " ".join(parser.format_help().split())
    for first_words in ("memory per node:", "cache a random source as it is", "caches with a name", "a version of the"):
        assert first_words in described
        assert first_words in pydoc.render_doc(takes_options)


SOURCE, CALLBACKS = "tests.sources.CountedSource", "--trainer.callbacks+=lightning_stocache."
MONITOR = f"{CALLBACKS}CacheMonitor"
OURS = [f"--data.train={SOURCE}", f"--data.train.length={SAMPLES}", f"--data.val={SOURCE}", "--data.val.length=8"]
OURS += ["--data.budget={{train: 50%, val: 0}}", "--data.loader={{drop_last: true}}"]
OURS += ["--data.batch_size=4", "--data.keep_cache=false", MONITOR, "--trainer.callbacks.live=false"]
CALLBACK = ["--data.folder={folder}", f"{CALLBACKS}StochasticCache"]
CALLBACK += ["--trainer.callbacks.budget={{train: 1MiB, val: 0}}", f"{CALLBACKS}CacheMonitor"]
CACHED = ["--data.datamodule=tests.training.tiny.Photos", "--data.datamodule.folder={folder}"]
CACHED += ["--data.budget={{train: 50%, val: 0}}", MONITOR, "--trainer.callbacks.live=false"]


@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(
    ("data", "words", "hits"),
    [(StocacheDataModule, OURS, SAMPLES // 2), (Photos, CALLBACK, SAMPLES), (cache_datamodule, CACHED, SAMPLES // 2)],
    ids=["ours", "callback", "cache_datamodule"],
)
def test_every_door_takes_its_options_from_a_command_line(tmp_path, monkeypatch, data, words, hits):
    """LightningCLI takes datasets by their class, callbacks, and cache_datamodule in place of a DataModule class."""
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 2, "log_every_n_steps": 1}
    options |= dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), "false")
    options |= {"logger": "lightning.pytorch.loggers.CSVLogger", "logger.save_dir": tmp_path}
    args = ["fit", *(f"--trainer.{name}={value}" for name, value in options.items())]
    args += [word.format(folder=tmp_path) for word in words]
    monkeypatch.setattr("sys.argv", ["train.py"])  # without pytest's arguments, which LightningCLI would warn of
    cli = LightningCLI(Model, data, args=args, save_config_callback=None, seed_everything_default=1)
    assert logged(cli.trainer, "stocache/hits") == [0, hits]
    assert logged(cli.trainer, "stocache/val/bypasses") == [8, 8]
    assert (logged(cli.trainer, "stocache/live/hit_rate") == []) == (words is not CALLBACK)

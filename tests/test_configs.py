"""The Hydra configs: complete, true to the constructors, and usable both as an app and from another app."""

import inspect
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra import compose, initialize_config_dir, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf, open_dict

import lightning_stocache
from lightning_stocache.setup.options import CacheOptions
from tests.jobs import write_files
from tests.training.tiny import Watcher, make_trainer

ROOT = Path(__file__).parents[1]
RANDOM = "_target_:lightning.pytorch.demos.boring_classes.RandomDataset,size:32,length:8"
BORING = "{_target_:lightning.pytorch.demos.boring_classes.BoringDataModule}"
ConfigStore.instance().store(  # `model` is the app's own group
    group="model", name="boring", node={"_target_": "lightning.pytorch.demos.boring_classes.BoringModel"}
)


@pytest.fixture(autouse=True)
def hydra_and_example(monkeypatch, tmp_path):
    """Hydra's global state is put back, the example's modules can be imported, its files are few and in tmp_path."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    yield
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None
    for name in ("train", "photos", "model"):
        sys.modules.pop(name, None)


def composed(primary: str, *overrides: str, output: Path | None = None) -> DictConfig:
    """The config as hydra.main hands it to the app, whose groups are the example's."""
    app = f"hydra.searchpath=[file://{ROOT / 'examples' / 'configs'}]"
    with initialize_config_module("lightning_stocache.configs", version_base="1.3"):
        config = compose(primary, [app, *overrides], return_hydra_config=True)
    with open_dict(config):
        config.hydra.runtime.output_dir = str(output)
        HydraConfig.instance().set_config(config)
        del config["hydra"]
    return config


def targets(node: Any) -> Iterator[dict[str, Any]]:
    """Every mapping with a _target_, at any depth."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield node
        for child in node.values():
            yield from targets(child)


def test_keys_are_the_constructors():
    """Every argument has a key, and there is no other; the example names only the arguments that matter."""
    options = set(CacheOptions().plain())
    for path in [*(ROOT / "configs").rglob("*.yaml"), *(ROOT / "examples" / "configs").rglob("*.yaml")]:
        for node in targets(OmegaConf.to_container(OmegaConf.load(path))):
            keys = {key for key in node if not (key.startswith("_") and key.endswith("_"))}
            target = node["_target_"].removesuffix(".from_options")
            module, _, name = target.rpartition(".")
            parameters = inspect.signature(get_object(target)).parameters
            if "examples" not in path.relative_to(ROOT).parts:
                assert module == "lightning_stocache"
                assert name in lightning_stocache.__all__
                takes_options = target != node["_target_"]
                assert keys == (set(parameters) - options | {"cache"} if takes_options else set(parameters)), path
            elif module.startswith("lightning.pytorch"):
                assert keys <= set(parameters), path
            elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
                inherited = set(inspect.signature(lightning_stocache.StocacheDataModule).parameters)
                assert keys - {"defaults"} <= {*parameters, *inherited}, path
            else:
                at_the_call = {name for name, each in parameters.items() if each.default is each.empty}
                assert keys | (at_the_call if node.get("_partial_") else set()) == set(parameters), path


@pytest.fixture(scope="module")
def plain() -> DictConfig:
    """The primary config without an override. A config takes 0.1 s."""
    return composed("train", "model=boring")


@pytest.mark.parametrize("with_cache_group", [True, False])
def test_defaults_are_the_constructors(plain, with_cache_group):
    """Without an override every key has the constructor's default, whether the app has the cache group or not."""
    parts = {"cache": plain.cache} if with_cache_group else {}
    for path in [*(ROOT / "configs/data").glob("*.yaml"), *(ROOT / "configs/callbacks").glob("*.yaml")]:
        group = path.parent.name
        values = OmegaConf.to_container(OmegaConf.create({**parts, group: OmegaConf.load(path)}), resolve=True)[group]
        for node in targets(values):
            assert CacheOptions(**node.pop("cache", {})) == CacheOptions()
            parameters = inspect.signature(get_object(node["_target_"].removesuffix(".from_options"))).parameters
            for key in node.keys() - {"_target_", "_convert_"}:
                parameter = parameters[key]
                if parameter.default is not parameter.empty:
                    assert without_nulls(node[key]) == parameter.default, (path.name, key)


def without_nulls(value: Any) -> Any:
    """A value without the keys that are there to be overridden: they are null."""
    return None if isinstance(value, dict) and not any(each is not None for each in value.values()) else value


def test_knobs_are_overridden_as_they_are_typed(plain):
    """Plain values reach the callback and the DataModule, a stage's budget and an argument of DataLoader too."""
    cache = OmegaConf.to_container(plain.cache)
    assert set(cache) == set(CacheOptions().plain())
    assert all(value is None or isinstance(value, str | bool) for value in cache.values())
    overrides = (
        "model=boring",
        f"data.train={{{RANDOM}}}",
        "data.loader.pin_memory=true",
        "callbacks=stochastic_cache",
    )
    for text, budgets in (
        ("60% of free", {"": "60% of free"}),
        ("8_000_000", {"": "8 MB"}),
        ("{train:8e6,val:1GiB}", {"train": "8 MB", "val": "1 GiB", "": "auto"}),
    ):
        config = composed("train", *overrides, f"cache.budget={text}")
        dm, callback = instantiate(config.data), instantiate(config.callbacks.stochastic_cache)
        for options in (dm.caches.options, callback.caches.options):
            assert {name: str(budget) for name, budget in options.budgets.items()} == budgets
    assert dm.loader == {"pin_memory": True}


@pytest.mark.parametrize(
    ("node", "overrides"),
    [
        ("data", (f"data.train={{{RANDOM}}}",)),
        ("data", ("data=stocache_wrapped", f"data.datamodule={BORING}")),
        ("data", ("data=stocache_dataset", f"data.source={{{RANDOM}}}")),
        ("callbacks.stochastic_cache", ("callbacks=stochastic_cache",)),
    ],
    ids=["stocache", "wrapped", "dataset", "callback"],
)
@pytest.mark.parametrize("sign", ["+", "++"])
def test_an_unknown_key_is_refused(node, overrides, sign):
    """A typo that is added to the group `cache` would else change nothing, without a word."""
    known = composed("train", "model=boring", *overrides, "cache.budget=1MiB")
    instantiate(OmegaConf.select(known, node))
    config = composed("train", "model=boring", *overrides, f"{sign}cache.budgt=auto")
    with pytest.raises(
        hydra.errors.InstantiationException, match=r"cache.budgt is no option. Did you mean cache.budget\?"
    ):
        instantiate(OmegaConf.select(config, node))


def test_an_app_with_callbacks_of_its_own_needs_one_group(tmp_path):
    """README's recipe for lightning-hydra-template: the search path once, then the group beside its own callbacks."""
    files = {
        "callbacks/default.yaml": "summary:\n  _target_: lightning.pytorch.callbacks.ModelSummary\n",
        "train.yaml": (
            "defaults: [_self_, {callbacks: default}]\nhydra: {searchpath: [pkg://lightning_stocache.configs]}\n"
        ),
    }
    write_files(tmp_path, files)
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("train", ["callbacks=[default,stochastic_cache]", "+cache.budget=50%"])
    made = {name: instantiate(entry) for name, entry in config.callbacks.items()}
    assert list(made) == ["summary", "stochastic_cache"]
    assert str(made["stochastic_cache"].caches.options.budgets[""]) == "50%"


def test_the_model_is_asked_for_and_experiments_compose(plain):
    """The primary config says that the model is the app's own; each experiment changes the config."""
    with pytest.raises(hydra.errors.ConfigCompositionException, match="model"):
        composed("train")
    for path in (ROOT / "examples" / "configs" / "experiment").glob("*.yaml"):
        assert composed("train", "model=boring", f"experiment={path.stem}") != plain


def test_shipped_groups_instantiate(tmp_path):
    """Loggers, callbacks and Trainer write into the run's own folder; a dataset is made around a source of YAML."""
    groups = ("logger=[csv,tensorboard]", "callbacks=[stochastic_cache,step_timer]")
    config = composed("train", "model=boring", *groups, output=tmp_path)
    loggers, made = (list(map(instantiate, group.values())) for group in (config.logger, config.callbacks))
    trainer = instantiate(config.trainer, callbacks=made, logger=loggers)
    assert trainer.default_root_dir == str(tmp_path)
    assert all(Path(each.log_dir).is_relative_to(tmp_path) for each in loggers)
    assert [callback for callback in trainer.callbacks if callback in made] == made
    dataset = instantiate(composed("train", "model=boring", "data=stocache_dataset", f"data.source={{{RANDOM}}}").data)
    assert len(dataset) == 8
    assert torch.equal(dataset[3], dataset[3])


@pytest.mark.processes
@pytest.mark.parametrize(
    "overrides",
    [
        (f"data.train={{{RANDOM},_partial_:true}}", "data.batch_size=4"),
        ("data=rolling", f"data.train.source={{{RANDOM}}}", "data.train.budget=100%", "data.train.minimum=4"),
        ("data=stocache_wrapped", f"data.datamodule={BORING}"),
    ],
    ids=["stocache", "rolling", "wrapped"],
)
def test_shipped_data_trains(tmp_path, overrides):
    """With `_partial_` sources, with the source of a rolling cache, and with the user's own DataModule."""
    datamodule = instantiate(composed("train", "model=boring", *overrides).data)
    trainer = make_trainer(tmp_path, logger=False, max_steps=1, num_sanity_val_steps=0, limit_val_batches=0)
    trainer.fit(Watcher(), datamodule=datamodule)
    assert trainer.global_step == 1


def test_the_example_instantiates(tmp_path):
    """Its parts are made as YAML says, and wait to be called; entries of a group may be missing, or no object."""
    import model
    import train

    files = ("data.prepare.train_files=2", "data.prepare.val_files=2")
    config = composed("photos", *files, output=tmp_path)
    assert config == composed("train", "data=photos", "model=conv", *files, output=tmp_path)
    assert isinstance(train.build(config.data), lightning_stocache.StocacheDataModule)
    network = train.build(config.model)
    assert isinstance(network, model.ConvNet)
    assert network(torch.zeros(1, 3, 96, 96)).shape == (1, 2)
    prepare, source = instantiate(config.data.prepare), instantiate(config.data.train)
    assert isinstance(prepare, partial)
    prepare()
    assert len(source()) == 2
    entries = {"a": {"_target_": "builtins.dict", "x": 1}, "b": None, "c": {"x": 2}}
    assert train.build_each(OmegaConf.create({"callbacks": entries}), "callbacks") == [{"x": 1}]
    for none in ({"callbacks": None}, {}):
        assert train.build_each(OmegaConf.create(none), "callbacks") == []

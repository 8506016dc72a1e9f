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
from tqdm import tqdm

import lightning_stocache
from lightning_stocache.training.options import CacheOptions
from tests.training.tiny import Watcher, make_trainer

tqdm.get_lock()  # made once per process, and not what a test leaves behind

ROOT = Path(__file__).parents[1]
SHIPPED = sorted((ROOT / "configs").rglob("*.yaml"))
RANDOM = "_target_:lightning.pytorch.demos.boring_classes.RandomDataset,size:32,length:8"
BORING = "{_target_:lightning.pytorch.demos.boring_classes.BoringDataModule}"
OWN = sorted((ROOT / "examples" / "configs").rglob("*.yaml"))
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


def leaves(paths: list[Path]) -> list[Any]:
    found = [(path, node) for path in paths for node in targets(OmegaConf.to_container(OmegaConf.load(path)))]
    return [pytest.param(path, node, id=f"{path.parent.name}/{path.stem}-{node['_target_']}") for path, node in found]


def arguments(node: dict[str, Any]) -> set[str]:
    return {key for key in node if not (key.startswith("_") and key.endswith("_"))}


@pytest.mark.parametrize(("path", "node"), leaves(SHIPPED))
def test_shipped_keys_are_the_constructors(path, node):
    """YAML that the wheel carries names this package alone, by its public names. Keys and constructor arguments are
    the same sets, so that every knob can be overridden and none is invented."""
    module, _, name = node["_target_"].rpartition(".")
    known = set(inspect.signature(get_object(node["_target_"])).parameters)
    assert module == "lightning_stocache"
    assert name in lightning_stocache.__all__
    assert arguments(node) == known


@pytest.mark.parametrize(("path", "node"), leaves(OWN))
def test_example_keys_are_the_functions(path, node):
    """The example's YAML names exactly the arguments of its modules, and of Lightning's classes those that matter
    here; its DataModule inherits the shipped leaf."""
    parameters = inspect.signature(get_object(node["_target_"])).parameters
    if node["_target_"].startswith("lightning.pytorch"):
        assert arguments(node) <= set(parameters)
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        inherited = set(inspect.signature(lightning_stocache.StocacheDataModule).parameters)
        assert arguments(node) - {"defaults"} <= {*parameters, *inherited}
    else:
        at_the_call = {name for name, each in parameters.items() if each.default is each.empty}
        assert arguments(node) | (at_the_call if node.get("_partial_") else set()) == set(parameters)


@pytest.mark.parametrize("with_cache_group", [True, False])
def test_defaults_are_the_constructors(with_cache_group):
    """Without an override every key has the constructor's default, whether the app has the cache group or not."""
    parts = {"cache": composed("train", "model=boring").cache} if with_cache_group else {}
    for path in [*(ROOT / "configs/data").glob("*.yaml"), *(ROOT / "configs/callbacks").glob("*.yaml")]:
        group = path.parent.name
        values = OmegaConf.to_container(OmegaConf.create({**parts, group: OmegaConf.load(path)}), resolve=True)[group]
        for node in targets(values):
            for key, parameter in inspect.signature(get_object(node["_target_"])).parameters.items():
                if parameter.default is not parameter.empty:
                    assert given(node[key]) == parameter.default, (path.name, key)


def given(value: Any) -> Any:
    """A value without the keys that are there to be overridden: they are null."""
    return None if isinstance(value, dict) and not any(each is not None for each in value.values()) else value


def test_nested_knobs_are_overridden_without_a_plus():
    """A stage's budget, an argument of DataLoader: Hydra takes `key=value` only where the key is there."""
    source = "data.train={_target_:lightning.pytorch.demos.boring_classes.RandomDataset,size:32,length:8}"
    config = composed("train", "model=boring", source, "cache.stage_budgets.val=1GiB", "data.loader.pin_memory=true")
    dm = instantiate(config.data)
    assert dm.loader == {"pin_memory": True}
    assert sorted(dm.caches.options.budgets) == ["", "val"]
    assert str(dm.caches.options.budgets["val"]) == "1 GiB"
    assert type(instantiate({**config.data, "_target_": "builtins.dict"})["stage_budgets"]) is dict


def test_cache_group_holds_what_the_doors_share():
    """The options of the caches, as plain values; there are few."""
    cache = OmegaConf.to_container(composed("train", "model=boring").cache)
    assert set(cache) == set(CacheOptions().plain())
    assert len(cache) <= 16
    assert all(given(value) is None or isinstance(value, str | bool) for value in cache.values())


@pytest.mark.parametrize(
    ("text", "value"),
    [("0", 0), ("25%", "25%"), ("8GiB", "8GiB"), ("60% of free", "60% of free"), ("8_000_000", 8_000_000)],
)
def test_cache_overrides_reach_every_door(text, value):
    """cache.budget on the command line arrives in the DataModule and in the callback as the value that was typed."""
    config = composed("train", "model=boring", "callbacks=stochastic_cache", f"cache.budget={text}")
    assert config.data.budget == value
    assert config.callbacks.stochastic_cache.budget == value


@pytest.mark.parametrize(("overrides", "budget"), [((), "auto"), (("+cache.budget=50%",), "50%")])
def test_an_app_with_callbacks_of_its_own_needs_one_group(tmp_path, overrides, budget):
    """README's recipe for lightning-hydra-template: the search path once, then the group beside its own callbacks."""
    (tmp_path / "callbacks").mkdir()
    (tmp_path / "callbacks" / "default.yaml").write_text(
        "summary:\n  _target_: lightning.pytorch.callbacks.ModelSummary\n"
    )
    (tmp_path / "train.yaml").write_text(
        "defaults: [_self_, {callbacks: default}]\nhydra: {searchpath: [pkg://lightning_stocache.configs]}\n"
    )
    with initialize_config_dir(str(tmp_path), version_base="1.3"):
        config = compose("train", ["callbacks=[default,stochastic_cache]", *overrides])
    made = {name: instantiate(entry) for name, entry in config.callbacks.items()}
    assert list(made) == ["summary", "stochastic_cache", "fill_progress"]
    assert str(made["stochastic_cache"].caches.options.budgets[""]) == budget


def test_the_model_is_asked_for():
    """The primary config says that the model is the app's own."""
    with pytest.raises(hydra.errors.ConfigCompositionException, match="model"):
        composed("train")


@pytest.mark.parametrize(
    "experiment", [path.stem for path in (ROOT / "examples" / "configs" / "experiment").glob("*.yaml")]
)
def test_experiments_compose(experiment):
    """Each experiment changes the config."""
    assert composed("train", "model=boring", f"experiment={experiment}") != composed("train", "model=boring")


@pytest.mark.parametrize(
    ("logger", "callbacks"),
    [("csv", "stocache"), ("tensorboard", "stochastic_cache"), ("[csv,tensorboard]", "[stocache,step_timer]")],
)
def test_shipped_groups_instantiate(tmp_path, logger, callbacks):
    """Loggers, callbacks and Trainer are made from the shipped YAML, and write into the run's own folder."""
    config = composed("train", "model=boring", f"logger={logger}", f"callbacks={callbacks}", output=tmp_path)
    loggers = [instantiate(entry) for entry in config.logger.values()]
    made = [instantiate(entry) for entry in config.callbacks.values()]
    trainer = instantiate(config.trainer, callbacks=made, logger=loggers)
    assert trainer.default_root_dir == str(tmp_path)
    assert all(Path(each.log_dir).is_relative_to(tmp_path) for each in loggers)
    assert [callback for callback in trainer.callbacks if callback in made] == made


@pytest.mark.processes
@pytest.mark.parametrize(
    "overrides",
    [
        (f"data.train={{{RANDOM},_partial_:true}}",),
        ("data=rolling", f"data.train.source={{{RANDOM}}}", "data.train.budget=100%", "data.train.minimum=4"),
    ],
    ids=["stocache", "rolling"],
)
def test_shipped_data_trains(tmp_path, overrides):
    """data=stocache with `_partial_` sources, and data=rolling with the source of its rolling cache."""
    datamodule = instantiate(composed("train", "model=boring", *overrides, "data.batch_size=4").data)
    trainer = make_trainer(tmp_path, logger=False, max_steps=1)
    trainer.fit(Watcher(), datamodule=datamodule)
    assert trainer.global_step == 1


@pytest.mark.processes
def test_shipped_dataset_instantiates():
    """data=stocache_dataset makes a CachedDataset around a source that YAML describes."""
    overrides = ("model=boring", "data=stocache_dataset", f"data.source={{{RANDOM}}}")
    dataset = instantiate(composed("train", *overrides).data)
    assert len(dataset) == 8
    assert torch.equal(dataset[3], dataset[3])


def test_shipped_wrapper_instantiates():
    """data=stocache_wrapped gives back the user's own DataModule."""
    config = composed("train", "model=boring", "data=stocache_wrapped", f"data.datamodule={BORING}")
    assert type(instantiate(config.data)).__name__ == "BoringDataModule"


def test_the_example_primary_is_the_packages():
    """The example's primary config is the package's `train` with data=photos and model=conv."""
    import train  # noqa: F401  stores its primary config

    ours = composed("photos")
    assert ours == composed("train", "data=photos", "model=conv")


def test_the_example_instantiates(tmp_path):
    """DataModule and model of the example are made as YAML says; the sources wait until they are called."""
    import model
    import train

    config = composed("photos", "data.prepare.train_files=8", "data.prepare.val_files=4", output=tmp_path)
    datamodule = train.build(config.data)
    assert isinstance(datamodule, lightning_stocache.StocacheDataModule)
    network = train.build(config.model)
    assert isinstance(network, model.ConvNet)
    assert network(torch.zeros(1, 3, 96, 96)).shape == (1, 2)
    prepare, source = instantiate(config.data.prepare), instantiate(config.data.train)
    assert isinstance(prepare, partial)
    prepare()
    assert len(source()) == 8


def test_groups_of_several_entries_may_be_missing(tmp_path):
    """An app without callbacks, or with an entry that is no object, builds the rest."""
    import train

    assert train.build_each(OmegaConf.create({"callbacks": None}), "callbacks") == []
    assert train.build_each(OmegaConf.create({}), "callbacks") == []
    entries = {"a": {"_target_": "builtins.dict", "x": 1}, "b": None, "c": {"x": 2}}
    assert train.build_each(OmegaConf.create({"callbacks": entries}), "callbacks") == [{"x": 1}]

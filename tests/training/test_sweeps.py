"""Sweeps: trials of one process, by Hydra and by Optuna, and Lightning's Tuner."""

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from lightning.pytorch import seed_everything
from lightning.pytorch.tuner import Tuner
from omegaconf import DictConfig

from lightning_stocache.node.named import clean
from tests.training.tiny import DOORS, SAMPLES, Data, Epochs, Model, behind, make_trainer, source

pytestmark = pytest.mark.processes

# --- Hydra

ConfigStore.instance().store(
    name="sweep_job",
    node={
        "defaults": [{"cache": "stocache"}, {"callbacks": "stochastic_cache"}, {"data": None}, "_self_"],
        "folder": "???",
        "lr": 0.1,
        "door": "callback",
        "hydra": {"sweep": {"dir": "${folder}/runs"}, "output_subdir": None},
    },
)
trials: list[list[tuple[float, float]]] = []
"""The hits and the loads of each epoch of each trial."""


@hydra.main(version_base="1.3", config_path="pkg://lightning_stocache.configs", config_name="sweep_job")
def main(config: DictConfig) -> float:
    """A user's app: one trial, whose result is smallest at lr=0.01."""
    epochs, data, callbacks = Epochs(), Data(source(config.folder)), []
    if config.door == "callback":
        callbacks = [hydra.utils.instantiate(config.callbacks.stochastic_cache)]
    else:
        callbacks, data = behind("cache_datamodule", data, budget=config.cache.budget, name=config.cache.name)
    trainer = make_trainer(Path(config.folder, str(len(trials))), [*callbacks, epochs], epochs=2)
    trainer.fit(Model(), data)
    trials.append([(epoch["hits"], epoch["misses"] + epoch["bypasses"]) for epoch in epochs.metrics])
    return abs(math.log10(config.lr) + 2)


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cache that is removed after the test."""
    trials.clear()
    name = f"sweep-test-{os.getpid()}"
    yield name
    clean(f"{name}-train0")


@pytest.mark.skipif(
    sys.version_info >= (3, 14) and hydra.__version__ < "1.4", reason="Hydra 1.3 starts no app on Python 3.14"
)
@pytest.mark.named
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize(("sweeper", "door"), [("basic", "callback"), ("optuna", "cache_datamodule")])
def test_trials_of_one_process_start_warm(tmp_path, monkeypatch, sweeper, door, name):
    """With a name, trials two and three of this process have only hits, under the basic launcher and under Optuna's
    sweeper."""
    words = ["lr=0.1,0.01,0.001"]
    if sweeper == "optuna":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
        words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "lr=choice(0.1,0.01)"]
    words += [f"folder={tmp_path}", f"door={door}", f"cache.name={name}"]
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none"]
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", *quiet, *words])
    main()
    assert trials == [[(4, SAMPLES - 4), (SAMPLES, 0)], [(SAMPLES, 0)] * 2, [(SAMPLES, 0)] * 2]  # set-up stores four


# --- Lightning's Tuner


class Tunable(Model):
    """With a learning rate that can be found."""

    lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(folder: Path, door: str, sets: Any) -> tuple[Any, Any]:
    """What was found and trained behind a door, or behind none, and the caches to close."""
    options = {} if door == "none" else {"keep_cache": True}
    callbacks, dm = behind(door, Data(*sets, batch_size=2), **options)
    closing = callbacks[0].caches if door == "callback" else getattr(dm, "caches", None)
    seed_everything(0, verbose=False)
    trainer = make_trainer(folder, callbacks, logger=False)
    tuner, model = Tuner(trainer), Tunable()
    assert tuner.scale_batch_size(model, dm, max_trials=3, steps_per_trial=2) == dm.batch_size == 8
    found = tuner.lr_find(model, dm, num_training=10)
    trainer.fit(model, dm)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    return (found.results, model.weights.tolist()), closing


@pytest.mark.parametrize("door", DOORS)
def test_lightnings_tuner_builds_no_cache_twice(tmp_path, segments, door):
    """With `keep_cache` the search for a batch size, with new loaders each time, the search for a learning rate and the
    training share one cache per dataset. With a user's loaders all results are those without a cache."""
    sets = source(tmp_path, samples=96), source(tmp_path, "val", 8)
    seen, closing = tuned(tmp_path, door, sets)
    assert len(segments) == 4
    assert sets[0].loads <= 96 + 64 + 8  # each once, beside the look at set-up, and what is read again while it fills
    closing.close()
    assert all(segment.closed for segment in segments)
    assert door == "ours" or seen == tuned(tmp_path, "none", sets)[0]

"""Sweeps: trials of one process and of several, by Hydra and by Optuna, and Lightning's Tuner."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.tuner import Tuner

from lightning_stocache.node.named import clean
from tests.training.sweep_job import SAMPLES, main
from tests.training.tiny import DOORS, Data, Model, behind, make_trainer, source

# --- Hydra

hydra_starts = pytest.mark.skipif(
    sys.version_info >= (3, 14) and hydra.__version__ < "1.4", reason="Hydra 1.3 starts no app on Python 3.14"
)


def sweep(monkeypatch: pytest.MonkeyPatch, folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """The records of a sweep's trials in this process, in their order."""
    quiet = ("hydra/job_logging=none", "hydra/hydra_logging=none")
    monkeypatch.setattr(sys, "argv", ["sweep_job", "-m", f"folder={folder}", *quiet, *overrides])
    main()
    return told(folder)


def told(folder: Path) -> list[dict[str, Any]]:
    trials = [json.loads(line) for line in (folder / "trials").read_text().splitlines()]
    return sorted(trials, key=lambda trial: int(trial["trial"]))


@pytest.fixture
def name() -> Iterator[str]:
    """The name of a cache that is removed after the test."""
    name = f"sweep-test-{os.getpid()}"
    yield name
    clean(f"{name}-train0")


@hydra_starts
@pytest.mark.processes
@pytest.mark.named
@pytest.mark.parametrize("door", ["callback", "cached"])
def test_trials_of_one_process_start_warm(tmp_path, monkeypatch, door, name):
    """Under the basic launcher, with a name, trials two and three have only hits."""
    trials = sweep(monkeypatch, tmp_path, f"door={door}", "lr=0.1,0.01,0.001", f"cache.name={name}")
    assert [trial["pid"] for trial in trials] == [os.getpid()] * 3
    stored = trials[0]["looked"] // 2  # what set-up has read, twice each, is stored
    assert [trial["hits"] for trial in trials] == [[stored, SAMPLES], [SAMPLES] * 2, [SAMPLES] * 2]
    assert [trial["loads"] for trial in trials] == [[SAMPLES - stored, 0], [0, 0], [0, 0]]


@hydra_starts
@pytest.mark.processes
@pytest.mark.named
def test_optunas_sweeper(tmp_path, monkeypatch, name):
    """Its trials run one after the other in this process, and share the cache of a name."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    more = ("hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1", "lr=choice(0.1,0.01)")
    trials = sweep(monkeypatch, tmp_path, *more, f"cache.name={name}", "epochs=1")
    assert [trial["hits"] for trial in trials] == [[trials[0]["looked"] // 2], [SAMPLES], [SAMPLES]]


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


@pytest.mark.processes
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

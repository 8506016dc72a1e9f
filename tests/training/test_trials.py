"""Many trainings in one process: trials leave nothing behind, sweeps and the Tuner build no cache twice."""

import contextlib
import ctypes
import gc
import multiprocessing
import os
import re
import sys
import threading
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from hydra.core.config_store import ConfigStore
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.tuner import Tuner
from omegaconf import DictConfig

from lightning_stocache import CachedDataset, CachedLoader, RollingCache, StocacheDataModule
from lightning_stocache.node.named import clean
from tests.processes import descendants, memory_files
from tests.sources import Made
from tests.training.tiny import DOORS, SAMPLES, Data, Epochs, Model, Watcher, behind, make_trainer, source

MIB = 2**20


def resources() -> dict[str, int]:
    """What this process holds now."""
    gc.collect()
    multiprocessing.active_children()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's, which keeps some for later
        trim(0)
    anonymous = re.search(r"^Pss_Anon: +(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "memory_files": len(memory_files({os.getpid()})),
        "threads": threading.active_count(),
        "children": len(descendants()),
        "anonymous": 0 if anonymous is None else int(anonymous[1]) * 1024,
    }


def image(index: int) -> torch.Tensor:
    """192 KiB, so that an image that stays in memory is noticed."""
    return torch.full((3, 256, 256), index, dtype=torch.uint8)


class Trial(Watcher):
    """Takes any batch, and keeps none."""

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        return self.weight.sum()


def fit(folder: Path, door: str, error: type[Exception] | None, **options: Any) -> None:
    """A trial, which may end with an error in the middle of an epoch."""

    def end(trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if error is not None and trainer.current_epoch == 1 and batch_idx == 2:
            raise error

    make = (lambda index: (image(index), "word " * index)) if door == "records" else image
    data: Any = Data(Made(make, 24), Made(make, 8), num_workers=2 * (door == "workers"))
    if door == "rolling":
        pool = RollingCache(Made(image, 24), budget="10MiB", fillers=1, minimum=8)
        callbacks, data = [], StocacheDataModule(train=pool, batch_size=4)
    else:
        callbacks, data = behind(door if door in DOORS else "callback", data, **options)
    callbacks = [*callbacks, LambdaCallback(on_train_batch_end=end)]
    make_trainer(folder, callbacks, epochs=2, num_sanity_val_steps=0).fit(Trial(), data)


def loop() -> None:
    """Read a CachedDataset without closing it."""
    dataset = CachedDataset(Made(image, 24))
    for _ in range(2):
        for _ in CachedLoader(dataset, batch_size=4, shuffle=True):
            pass


FEW = [*DOORS, "plain"]
LONG = [pytest.mark.soak, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    ("doors", "count", "warm", "ends", "mappings"),
    [(FEW, 8, 0, 4, 4), pytest.param([*DOORS, "records", "workers", "rolling", "plain"], 60, 10, 14, 8, marks=LONG)],
    ids=["a few", "many"],
)
def test_trials_leave_nothing_behind(tmp_path, doors, count, warm, ends, mappings):
    """After the first trials, some of which end with an error, nothing that a process holds grows."""
    held = []
    for number, door in enumerate(islice(cycle(doors), count)):
        error = ArithmeticError if number % 3 else None
        with contextlib.suppress(ArithmeticError):
            loop() if door == "plain" else fit(tmp_path / str(number), door, error, keep_cache=number % 2 == 1)
        held.append(resources())
        print(number, held[-1])
    first, last = held[warm : warm + ends], held[-ends:]
    grown = {name: min(now[name] for now in last) - min(now[name] for now in first) for name in held[0]}
    print(grown)
    assert grown.pop("anonymous") < 8 * MIB
    assert grown.pop("mappings") <= mappings  # of malloc
    assert grown == {"descriptors": 0, "memory_files": 0, "threads": 0, "children": 0}


SWEEP = {
    "defaults": [{"cache": "stocache"}, {"callbacks": "stochastic_cache"}, "_self_"],
    "folder": "???",
    "lr": 0.1,
    "hydra": {"sweep": {"dir": "${folder}/runs"}, "output_subdir": None},
}
ConfigStore.instance().store(name="sweep_job", node=SWEEP)
OPTUNA = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=1"]
trials: list[list[float]] = []  # the misses of each epoch


@hydra.main(version_base="1.3", config_path="pkg://lightning_stocache.configs", config_name="sweep_job")
def trial(config: DictConfig) -> float:
    """A user's app: one trial of a sweep."""
    callback, epochs = hydra.utils.instantiate(config.callbacks.stochastic_cache), Epochs()
    make_trainer(Path(config.folder), [callback, epochs], epochs=2).fit(Model(), Data(source(config.folder)))
    trials.append([epoch["misses"] for epoch in epochs.metrics])
    return float(config.lr)


@pytest.mark.soak
@pytest.mark.named
@pytest.mark.epoch_one_reads_all
@pytest.mark.parametrize("words", [["hydra/sweeper=basic"], OPTUNA], ids=["basic", "optuna"])
def test_a_sweep_loads_each_sample_once(tmp_path, monkeypatch, words):
    """With a name the trials of Hydra's sweepers share one cache: those after the first load nothing."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    trials.clear()
    options = ["lr=choice(0.1,0.01,0.001)", f"folder={tmp_path}", "cache.name=sweep"]
    monkeypatch.setattr(sys, "argv", ["sweep", "-m", *words, *options])
    trial()
    clean("sweep-train0")
    assert trials == [[SAMPLES - 4, 0], [0, 0], [0, 0]]  # set-up stores the four that it compares


class Tunable(Model):
    """With a learning rate that can be found."""

    lr = 0.1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def tuned(folder: Path, door: str, sets: Any) -> tuple[Any, Any]:
    """What was found and trained behind a door, or behind none, and the caches to close."""
    callbacks, dm = behind(door, Data(*sets, batch_size=2), keep_cache=True)
    closing = callbacks[0].caches if door == "callback" else getattr(dm, "caches", None)
    seed_everything(0, verbose=False)
    trainer = make_trainer(folder, callbacks, logger=False)
    tuner, model = Tuner(trainer), Tunable()
    size = tuner.scale_batch_size(model, dm, max_trials=3, steps_per_trial=2)
    assert size == dm.batch_size > 2
    found = tuner.lr_find(model, dm, num_training=10)
    trainer.fit(model, dm)
    assert "dataloader" not in vars(trainer.fit_loop._data_source)
    return (size, found.results, model.weights.tolist()), closing


@pytest.mark.parametrize("door", ["callback", pytest.param("cache_datamodule", marks=pytest.mark.soak), "ours"])
def test_lightnings_tuner_builds_no_cache_twice(tmp_path, segments, door):
    """With `keep_cache` both searches and the training share one cache per dataset; results are those without."""
    sets = source(tmp_path, samples=96), source(tmp_path, "val", 8)
    seen, closing = tuned(tmp_path, door, sets)
    assert len(segments) == 4
    assert sets[0].loads <= 96 + 64 + 8  # each once, beside the look at set-up, and what is read again while it fills
    closing.close()
    assert all(segment.closed for segment in segments)
    plain, _ = tuned(tmp_path, "none", sets)
    assert seen[0] == plain[0]
    assert door == "ours" or seen == plain

"""Each way of holding data in the table, trained with and without the callback."""

import importlib
import logging
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.callbacks import LambdaCallback

from lightning_stocache import StochasticCache
from tests.interop.setting import Setting, fingerprint
from tests.interop.table import MODULES, TABLE
from tests.jobs import Log
from tests.training.tiny import Watcher, cached_datasets, make_trainer

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROWS = [(library, way) for library, ways in TABLE.items() for way in ways]
FIRST_ROWS = [(library, next(iter(ways))) for library, ways in TABLE.items()]
WITHOUT_FORKS = ("polars", "query_for_each_user")  # polars hangs in a fork, once it has threads
ONCE_A_PROCESS = ("storage", "lmdb_opened_on_first_use")  # LMDB opens a file once in a process: in a worker


class Noting(Watcher):
    """Notes each batch, whatever it is."""

    def note(self, stage: str, batch: Any) -> torch.Tensor:
        self.batches.append(fingerprint(batch))
        return self.weight.sum()


def train(way: Callable[[Setting], Any], setting: Setting, callbacks: list[Callback]) -> Any:
    """Make the loader under a seed, and train on it for three epochs: all that a user could see of that."""
    seed_everything(7, verbose=False)
    loader, model, loads = way(setting), Noting(), list[int]()

    def count(trainer: Any, _: Any) -> None:
        caches = [dataset.counters for dataset in cached_datasets(trainer.train_dataloader)]
        read_again = sum(counters.looks[0] for counters in caches if counters is not None)
        loads.append(setting.loads.stat().st_size - read_again if setting.loads.exists() else 0)

    counting = LambdaCallback(on_train_epoch_end=count)
    trainer = make_trainer(setting.folder, [*callbacks, counting], epochs=3, logger=False)
    with Log(logging.WARNING) as log, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", ResourceWarning)  # of files of the run before, collected at any moment
        trainer.fit(model, loader)
    lines = [line for line in log.lines if not line.startswith("set-up waits")]  # on a busy machine
    said = lines + [str(each.message) for each in caught if "lightning_stocache" in each.filename]
    states = fingerprint([torch.get_rng_state(), np.random.get_state(), random.getstate()])
    names = [type(thing).__name__ for thing in (loader, getattr(loader, "dataset", None))]
    seen = {"batches": model.batches, "states": states, "metrics": trainer.callback_metrics}
    return SimpleNamespace(**seen, warnings=said, loads=loads, names=names)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the data of all ways."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def row(request: pytest.FixtureRequest) -> tuple[Callable[[Setting], Any], bool, bool]:
    """A way, whether it is cached, and whether idle workers load ahead; of the session, because it imports."""
    library, way = request.param
    ways = getattr(importlib.import_module(MODULES[library]), library.upper())
    return ways[way], TABLE[library][way], request.param in FIRST_ROWS[1::2]


def rows(chosen: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrise by rows of the table."""
    return pytest.mark.parametrize("row", chosen, ids=["-".join(row) for row in chosen], indirect=True)


def check(row: Any, files: Path, tmp_path: Path, workers: int) -> None:
    way, is_cached, fills_ahead = row
    plain = train(way, Setting(files, tmp_path / "plain", workers), [])
    cached = train(way, Setting(files, tmp_path / "cached", workers), [StochasticCache(prefill=fills_ahead)])
    pairs = zip(cached.batches, plain.batches, strict=True)
    assert [number for number, (batch, expected) in enumerate(pairs) if batch != expected] == []
    assert cached.states == plain.states
    if is_cached:
        assert cached.warnings == []
        assert cached.metrics["stocache/hit_rate"] == 1
        assert cached.loads[2] == cached.loads[1]  # samples read until the end of these epochs
    else:
        [warning] = cached.warnings
        assert any(name in warning for name in cached.names), warning
        assert cached.metrics.get("stocache/hit_rate", 0) == 0


def test_all_ways_that_the_readme_counts_are_there():
    """None is lost."""
    assert (
        f"The batches of {len(ROWS)} combinations of dataset and loader"
        in (Path(__file__).parents[2] / "README.md").read_text()
    )


@rows([row for row in ROWS if row != ONCE_A_PROCESS])
def test_training_is_the_same_and_ends_as_the_table_says(row, files, tmp_path):
    """Batches and draws are those without a cache; it is cached, or passes with one warning that names the dataset."""
    check(row, files, tmp_path, workers=0)


@pytest.mark.epoch_one_reads_all  # so that workers load samples
@rows(
    [
        *(row for row in FIRST_ROWS if row != WITHOUT_FORKS),
        ONCE_A_PROCESS,
        ("storage", "plain_file_opened_on_first_use"),
    ]
)
def test_training_with_workers_is_the_same(row, files, tmp_path):
    """With the first way of each library, of which every other one has workers that load ahead."""
    check(row, files, tmp_path, workers=2)

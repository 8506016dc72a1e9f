"""Each way of holding data in the table, trained with and without the callback."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache import StochasticCache
from tests.interop.table import TABLE, Outcome
from tests.interop.training import Run, Setting, train

pytestmark = [pytest.mark.slow, pytest.mark.processes]

ROWS = [(library, way) for library, ways in TABLE.items() for way in ways]
FIRST_ROWS = [(library, next(iter(ways))) for library, ways in TABLE.items()]
ONCE_A_PROCESS = ("storage", "lmdb_opened_on_first_use")  # LMDB opens a file once in a process: in a worker
IN_WORKERS = [*FIRST_ROWS[::2], ONCE_A_PROCESS, ("storage", "plain_file_opened_on_first_use")]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for the data of all ways."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def row(request: pytest.FixtureRequest) -> tuple[Callable[[Setting], Any], Outcome]:
    """A way of the table and its outcome. Of the session, since what libraries leave when imported is no test's."""
    library, way = request.param
    module = importlib.import_module(f"tests.interop.sources.{library}")
    return module.WAYS[way], TABLE[library][way]


def rows(chosen: list[tuple[str, str]]) -> pytest.MarkDecorator:
    """Parametrise by rows of the table."""
    return pytest.mark.parametrize("row", chosen, ids=["-".join(row) for row in chosen], indirect=True)


def differing(cached: Run, plain: Run) -> list[int]:
    """The numbers of the batches in which two runs differ."""
    pairs = zip(cached.batches, plain.batches, strict=True)
    return [number for number, (batch, expected) in enumerate(pairs) if batch != expected]


def check(
    row: tuple[Callable[[Setting], Any], Outcome], files: Path, tmp_path: Path, workers: int, **options: Any
) -> None:
    way, outcome = row
    names: list[str] = []

    def noted(setting: Setting) -> Any:
        loader = way(setting)
        names[:] = [type(loader).__name__, type(getattr(loader, "dataset", None)).__name__]
        return loader

    plain = train(noted, Setting(files, tmp_path / "plain", workers), [])
    cached = train(noted, Setting(files, tmp_path / "cached", workers), [StochasticCache(**options)])
    hit_rate = cached.metrics.get("stocache/hit_rate", 0.0)
    assert differing(cached, plain) == []
    assert cached.states == plain.states
    if outcome is Outcome.CACHED:
        assert cached.warnings == []
        assert hit_rate == 1.0
        assert cached.loads_of_last_epoch == 0
    else:
        [warning] = cached.warnings
        assert any(name in warning for name in names), warning
        assert hit_rate == 0.0


def test_all_ways_that_the_readme_counts_are_there():
    """None is lost."""
    assert f"compares them for {len(ROWS)} ways" in (Path(__file__).parents[2] / "README.md").read_text()


@rows([row for row in ROWS if row != ONCE_A_PROCESS])
def test_training_is_the_same_and_ends_as_the_table_says(row, files, tmp_path):
    """Batches and draws are those without a cache; it is cached, or passes with one warning that names the dataset."""
    check(row, files, tmp_path, workers=0)


@pytest.mark.epoch_one_reads_all  # so that workers load samples
@rows(IN_WORKERS)
def test_training_with_workers_is_the_same(row, files, tmp_path):
    """What workers read is the same and ends the same: the first way of a library, and files that each worker opens."""
    check(row, files, tmp_path, workers=2)


@pytest.mark.epoch_one_reads_all  # so that workers load samples
@rows(FIRST_ROWS[1::2])
def test_training_that_fills_ahead_is_the_same(row, files, tmp_path):
    """Idle workers that load ahead change no batch and no draw: the first way of every other library."""
    check(row, files, tmp_path, workers=2, prefill=True)

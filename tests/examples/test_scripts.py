"""The scripts of examples/, in a fork that has imported torch: they cache, explain themselves, write what they say."""

import importlib
import json
import logging
import multiprocessing
import os
import re
import runpy
import sys
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.source.looks import MOST
from tests.processes import call

pytestmark = [pytest.mark.processes, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
BENCHMARKS = ("promises", "epochs", "peers", "records", "streams", "rolling", "train", "lifetime", "gpu", "nearly_full")
TWO_RANKS = ("--devices", "2", "--strategy", "ddp")  # no fork: a test before may have asked CUDA something
PNG = b"\x89PNG\r\n"


def run_example(script: str, folder: Path, *arguments: str) -> str:
    """What a script prints, as a user starts it on a machine without a GPU; its files are in a folder."""
    environment = {"PYTHONPATH": str(EXAMPLES.parent), "XDG_CACHE_HOME": str(folder / "cache")}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    importlib.import_module("lightning.pytorch")  # once, for all scripts that follow
    code = call(run, EXAMPLES / script, arguments, folder, environment)
    assert code == 0, (folder / "stderr").read_text()
    return (folder / "stdout").read_text()


def run(path: Path, arguments: tuple[str, ...], folder: Path, environment: dict[str, str]) -> int:
    os.environ.update(environment)
    os.chdir(folder)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
        setattr(sys, name, os.fdopen(number, "w", closefd=False))
    logging.getLogger().handlers.clear()  # pytest's
    for neighbour in path.parent.glob("*.py"):
        sys.modules.pop(neighbour.stem, None)
    forkserver.ensure_running.__self__.__init__()  # the one of the test process is no server of this one
    # Benchmarks run each case in a fork of a server that has imported torch and done nothing else: this process is one.
    real: Any = multiprocessing.get_context
    multiprocessing.get_context = lambda method=None: real("fork" if method == "forkserver" else method)
    sys.argv, sys.path = [str(path), *arguments], [str(path.parent), *sys.path]
    try:
        runpy.run_path(str(path), run_name="__main__")
        return 0
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush(), sys.stderr.flush()


def benchmark(name: str, folder: Path, *arguments: str) -> Any:
    """What a quick round of a benchmark prints, and the values that it writes."""
    said = run_example(f"benchmarks/{name}.py", folder, "--quick", *arguments, "--output", "results")
    return said, json.loads((folder / "results" / f"{name}.json").read_text())


@pytest.mark.parametrize(
    ("example", "arguments", "samples", "read_again"),
    [
        ("text", (), 160, 80),
        ("imagenet", (), 96, 60),
        pytest.param("text", TWO_RANKS, 160, 80, marks=pytest.mark.soak),
        pytest.param("imagenet", (*TWO_RANKS, "--only", "recipe", "tensors"), 96, 60, marks=pytest.mark.soak),
    ],
    ids=["text", "imagenet", "text on two ranks", "imagenet on two ranks"],
)
def test_each_sample_is_loaded_once(tmp_path, example, arguments, samples, read_again):
    """In epoch one, by all ranks together; then a look reads a few. The recipe without a cache loads all twice."""
    always = ("--samples", str(samples), "--epochs", "2", "--batch-size", "8")
    said = run_example(f"{example}.py", tmp_path, *always, *arguments)
    loads = [int(number) for number in re.findall(r"the source loaded (\d+) samples", said)]
    if example == "imagenet" and not arguments:
        assert (loads.pop(0), loads.pop(0)) == (96, 96)
        assert re.search(r"^recipe, uncached +\d+ +1\.0$\n^recipe +\d.*$\n^tensors +\d", said, re.MULTILINE)
    assert len(loads) == (2 if example == "text" else 4)
    assert all(samples <= first <= samples + read_again for first in loads[::2])
    assert all(second <= MOST for second in loads[1::2])


def test_the_rolling_example_trains_at_once_and_draws(tmp_path):
    """Epochs begin with the first few volumes; more come, and old ones leave."""
    arguments = ("--latency", "0.02", "--budget", "20MB", "--fillers", "2", "--minimum", "8", "--seconds", "1")
    text = run_example("rolling.py", tmp_path, *arguments)
    [trained] = re.findall(r"RollingCache: (\d+) samples", text)
    [(came, resident)] = re.findall(r"(\d+) volumes came, (\d+) are resident", text)
    assert int(trained) > 8
    assert 20_000 > int(came) >= int(resident) >= 8  # it has ended long before all of them came
    if "matplotlib" not in text:
        assert (tmp_path / "rolling.png").read_bytes().startswith(PNG)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_explains_itself(tmp_path, name):
    """--help says how to start it, how to read it, and when there is no gain."""
    text = run_example(f"benchmarks/{name}.py", tmp_path, "--help")
    assert f"python examples/benchmarks/{name}.py" in text
    assert "no gain" in text
    assert "--output" in text


def test_a_quick_run_writes_table_values_and_figure(tmp_path):
    """The sweep over shares prints its table, keeps every value with the machine, and draws a picture."""
    pytest.importorskip("matplotlib", reason="the picture needs it")
    arguments = ["--rounds", "1", "--samples", "8", "--shares", "0.5", "--workers", "0", "--latency", "0"]
    text, written = benchmark("epochs", tmp_path, *arguments)
    assert "two / law" in text
    assert written["machine"]["cores"] >= 1
    assert [(found["share"], len(found["rounds"])) for found in written["runs"]] == [(0.0, 1), (0.5, 1)]
    assert (tmp_path / "results" / "epochs.png").read_bytes().startswith(PNG)


@pytest.mark.soak
@pytest.mark.parametrize(("name", "part"), [("peers", "speed"), ("records", "imagenet"), ("records", "small")])
def test_peers_are_compared(tmp_path, name, part):
    """Tables are Markdown, with a row for each way to hold the samples."""
    sizes = ("--peers", "list", "memmap") if name == "peers" else ("--photographs", "24", "--small", "64")
    text, written = benchmark(name, tmp_path, "--rounds", "1", "--only", part, *sizes)
    assert "\n| " in text
    rows = " ".join(row[0] for row in written["tables"][0]["rows"])
    assert "CachedLoader" in rows
    assert "list" in rows


@pytest.mark.soak
def test_nothing_is_loaded_twice(tmp_path):
    """Three epochs load N samples, what set-up reads twice, and at most eight second reads per process."""
    _, written = benchmark("promises", tmp_path, "--only", "loads")
    kinds = {(found["ranks"], found["loader"], found["workers"]) for found in written["loads"]}
    loaders = ("CachedDataset", "CachedLoader")
    assert kinds == {(ranks, loader, workers) for ranks in (1, 2) for loader in loaders for workers in (0, 2)}
    for found in written["loads"]:
        assert found["announced"] == found["before_epoch_one"]
        second_reads = found["loads"] - found["n"] - found["announced"] // 2
        assert 0 <= second_reads <= 8 * found["ranks"] * max(found["workers"], 1)


@pytest.mark.soak
def test_the_benchmark_of_a_device_runs_small_without_one(tmp_path):
    """It says so, feeds the CPU from each cache, and trains on each recipe with each cache."""
    text, written = benchmark("gpu", tmp_path, "--rounds", "1", "--workers", "1")
    assert "There is no CUDA device" in text
    assert {found["loader"] for found in written["feed"]} >= {"limits", "CachedLoader", "list"}
    assert len(written["train"]) == 10
    assert all(0 < found["rounds"][0]["device"] <= 1 for found in written["train"])


@pytest.mark.soak
def test_the_benchmark_of_the_rolling_cache_finds_nothing_torn(tmp_path):
    """Every sample that was read while others were written was whole."""
    _, written = benchmark("rolling", tmp_path, "--rounds", "1")
    assert [run["writers"] for run in written["runs"]] == [2, 0]
    for found in (found for run in written["runs"] for found in run["rounds"]):
        assert found["checked_torn"] == 0
        assert found["checked_samples"] > 0


def test_a_spread_is_median_lowest_and_highest():
    """It shows the median and both ends, and ratios are taken run by run."""
    spread = runpy.run_path(str(EXAMPLES / "benchmarks" / "measure.py"))["Spread"]
    assert f"{spread.of([3, 1, 2]):.0f}" == "2 [1..3]"
    assert f"{spread.of([2]):.0f}" == "2"
    assert spread.ratio([2, 6], [1, 2]).values == (2, 3)
    assert spread.of([1, 2, 4]).bars == (1, 2)

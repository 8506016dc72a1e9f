"""The benchmarks under examples/benchmarks: they start, explain themselves, and write what they say. No timing.

One of them runs here, in small; all of them by `-m soak`.
"""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from tests.scripts import run_example

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "examples" / "benchmarks"
SCRIPTS = ("promises", "epochs", "peers", "records", "streams", "rolling", "train", "lifetime")
PNG = b"\x89PNG\r\n"


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_explains_itself(tmp_path, script):
    """--help says how to start it, how to read it, and when there is no gain."""
    text = run_example(f"benchmarks/{script}.py", tmp_path, "--help")
    assert f"python examples/benchmarks/{script}.py" in text
    assert "no gain" in text
    assert "--output" in text


@pytest.mark.slow
def test_a_quick_run_writes_table_values_and_figure(tmp_path):
    """The sweep over shares prints its table, keeps every value with the machine, and draws a picture."""
    pytest.importorskip("matplotlib", reason="the picture needs it")
    arguments = ["--quick", "--rounds", "1", "--samples", "8", "--shares", "0.5", "--workers", "0", "--latency", "0"]
    text = run_example("benchmarks/epochs.py", tmp_path, *arguments, "--output", "results")
    written = json.loads((tmp_path / "results" / "epochs.json").read_text())
    assert "two / law" in text
    assert written["machine"]["cores"] >= 1
    assert [(told["share"], len(told["rounds"])) for told in written["runs"]] == [(0.0, 1), (0.5, 1)]
    assert (tmp_path / "results" / "epochs.png").read_bytes().startswith(PNG)


@pytest.mark.soak
def test_peers_are_compared_at_their_best_number_of_workers(tmp_path):
    """The table for the README is Markdown: each peer once, with the number of workers at which it was fastest."""
    arguments = ["--quick", "--rounds", "1", "--only", "speed", "--peers", "list", "memmap"]
    text = run_example("benchmarks/peers.py", tmp_path, *arguments, "--output", "results")
    tables = json.loads((tmp_path / "results" / "peers.json").read_text())["tables"]
    assert "| CachedLoader " in text
    best, warm = tables[0]["rows"], tables[1]["rows"]
    assert [row[0] for row in best] == ["CachedLoader", "CachedDataset", "list", "memmap"]
    for peer, number, rate, *_ in best:
        rates = {row[1]: float(row[2]) for row in warm if row[0] == f"3x32x32, batch 256: {peer}"}
        assert rates[number] == max(rates.values()) == float(rate)


@pytest.mark.soak
def test_nothing_is_loaded_twice(tmp_path):
    """The source's own count over three epochs is N, the second reads of set-up (half of what the package announced),
    and at most eight second reads per process (which see whether it is random), on one process and on two ranks."""
    run_example("benchmarks/promises.py", tmp_path, "--quick", "--only", "loads", "--output", "results")
    found = json.loads((tmp_path / "results" / "promises.json").read_text())["loads"]
    assert {(told["ranks"], told["loader"], told["workers"]) for told in found} == {
        (ranks, loader, workers)
        for ranks in (1, 2)
        for loader in ("CachedDataset", "CachedLoader")
        for workers in (0, 2)
    }
    for told in found:
        assert told["announced"] == told["before_epoch_one"]
        second_reads = told["loads"] - told["n"] - told["announced"] // 2
        assert 0 <= second_reads <= 8 * told["ranks"] * max(told["workers"], 1)


def tables(tmp_path: Path, part: str, *arguments: str) -> dict[str, list[str]]:
    """The rows of the table of a quick run of records.py, by their first cells."""
    always = ("--quick", "--rounds", "1", "--output", "results")
    run_example("benchmarks/records.py", tmp_path, *always, "--only", part, *arguments)
    written = json.loads((tmp_path / "results" / "records.json").read_text())
    assert len(written[part]["runs"]) == len(written["tables"][0]["rows"])
    return {", ".join(row[:2]) if part != "imagenet" else row[0]: row for row in written["tables"][0]["rows"]}


@pytest.mark.soak
def test_photographs_are_compared_with_a_list(tmp_path):
    """Both recipes have a row for each way, and the list is once the list."""
    rows = tables(tmp_path, "imagenet", "--photographs", "24")
    for recipe in ("PIL, v1", "tensors, v2"):
        assert {f"{recipe}: {way}" for way in ("DataLoader", "CachedLoader", "list")} <= rows.keys()
        assert float(rows[f"{recipe}: list"][3]) == 1
        assert float(rows[f"{recipe}: DataLoader"][4]) == 1


@pytest.mark.soak
def test_small_samples_are_compared_with_and_without_workers(tmp_path):
    """Reviews and molecules have a row for each way, with no workers and with two."""
    rows = tables(tmp_path, "small", "--small", "64")
    ways = {"CachedLoader", "list, deepcopy", "list, by hand"}
    ways |= {"MONAI"} if importlib.util.find_spec("monai") else set()
    assert {f"{name}: {way}, {workers}" for name in ("text", "molecules") for way in ways for workers in (0, 2)} <= set(
        rows
    )


@pytest.fixture
def spread(monkeypatch):
    """The Spread of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    from measure import Spread

    yield Spread
    for name in set(sys.modules) - before:
        if str(BENCHMARKS) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def test_a_spread_is_median_lowest_and_highest(spread):
    """It shows the median and both ends, and ratios are taken run by run."""
    assert f"{spread.of([3, 1, 2]):.0f}" == "2 [1..3]"
    assert f"{spread.of([2]):.0f}" == "2"
    assert spread.ratio([2, 6], [1, 2]).values == (2, 3)
    assert spread.of([1, 2, 4]).bars == (1, 2)

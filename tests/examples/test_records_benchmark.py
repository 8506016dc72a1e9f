"""The benchmark of records starts, explains itself, and writes what it says. No timing."""

import importlib.util
import json
from pathlib import Path

import pytest

from tests.scripts import run_script

pytestmark = pytest.mark.processes

BENCHMARKS = Path(__file__).parents[2] / "examples" / "benchmarks"


def tables(tmp_path: Path, part: str, *arguments: str) -> dict[str, list[str]]:
    """The rows of the table of a quick run, by their first cells."""
    told = ("--quick", "--rounds", "1", "--only", part, *arguments, "--output", "results")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_script(BENCHMARKS / "records.py", *told, folder=tmp_path, environment=environment, timeout=550)
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "results" / "records.json").read_text())
    assert written["machine"]["cores"] >= 1
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

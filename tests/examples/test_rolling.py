"""The example and the benchmark of the rolling cache."""

import json
import re

import pytest

from tests.scripts import run_example

pytestmark = [pytest.mark.processes, pytest.mark.slow]


def test_the_example_trains_at_once_and_draws(tmp_path):
    """Epochs begin with the first few volumes; more come, and old ones leave."""
    arguments = ("--latency", "0.02", "--budget", "20MB", "--fillers", "2", "--minimum", "8", "--seconds", "1")
    text = run_example("rolling.py", tmp_path, *arguments)
    [trained] = re.findall(r"RollingCache: (\d+) samples", text)
    [(came, resident)] = re.findall(r"(\d+) volumes came, (\d+) are resident", text)
    assert int(trained) > 8
    assert 20_000 > int(came) >= int(resident) >= 8  # it has ended long before all of them came
    if "matplotlib" not in text:
        assert (tmp_path / "rolling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.soak
def test_the_benchmark_finds_nothing_torn(tmp_path):
    """Every sample that was read while others were written was whole."""
    run_example("benchmarks/rolling.py", tmp_path, "--quick", "--rounds", "1", "--output", "results")
    runs = json.loads((tmp_path / "results" / "rolling.json").read_text())["runs"]
    assert [run["writers"] for run in runs] == [2, 0]
    for found in (found for run in runs for found in run["rounds"]):
        assert found["checked_torn"] == 0
        assert found["checked_samples"] > 0

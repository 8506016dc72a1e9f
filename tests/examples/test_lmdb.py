"""The example and the benchmark of LMDBs: they run, load each sample once, and write what they say. No timing."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.scripts import run_example

pytestmark = [
    pytest.mark.processes,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("sklearn") is None, reason="the photographs need scikit-learn"),
]
pytest.importorskip("lmdb")


def test_photographs_are_packed_and_loaded_once(tmp_path: Path) -> None:
    """A second run packs nothing. Up to 32 samples are read and stored at set-up, before epoch one."""
    for packed in (96, 0):
        said = run_example("lmdb_photos.py", tmp_path, "--samples", "96", "--epochs", "2", "--batch-size", "8")
        assert f"packed {packed} of 96 files" in said
        first, second = (int(loaded) for loaded in re.findall(r"the source loaded (\d+) samples", said))
        assert 96 - 32 <= first <= 96
        assert second == 0


@pytest.mark.soak
def test_the_benchmark_compares_what_is_installed(tmp_path: Path) -> None:
    """A row for each way, with no workers and with two, and what packing gives."""
    run_example("benchmarks/lmdb_read.py", tmp_path, "--quick", "--rounds", "1", "--output", "results")
    written = json.loads((tmp_path / "results" / "lmdb_read.json").read_text())
    rows = {tuple(row[:2]) for row in written["tables"][0]["rows"]}
    assert {(way, workers) for way in ("cached", "LMDBSource", "Efficient-PyTorch") for workers in "02"} <= rows
    assert [row[0] for row in written["tables"][1]["rows"]] == ["tensors", "photographs"]

"""examples/train.py in a sweep on several devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_sweep_whose_ranks_would_sweep_is_refused(tmp_path):
    """With -m and ddp on two devices nothing is trained: the error says why, and what to use instead."""
    command = [sys.executable, str(ROOT / "examples" / "train.py"), "-m", "cache.budget=0,100%"]
    overrides = ["trainer.accelerator=cpu", "trainer.devices=2", "trainer.strategy=ddp"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.run(
        [*command, *overrides], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280
    )
    assert run.returncode != 0
    assert "a sweep (-m) on 2 devices needs a strategy" in run.stderr
    assert "trainer.strategy=ddp_spawn" in run.stderr
    assert not list(tmp_path.rglob("*.jpg"))

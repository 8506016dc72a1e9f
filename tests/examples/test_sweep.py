"""examples/train.py in a sweep on several devices."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
import pytest

from tests.scripts import run_script

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(
        sys.version_info >= (3, 14) and hydra.__version__ < "1.4", reason="Hydra 1.3 starts no app on Python 3.14"
    ),
]

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_sweep_whose_ranks_would_sweep_is_refused(tmp_path):
    """With -m and ddp on two devices nothing is trained: the error says why, and what to use instead."""
    overrides = ("trainer.accelerator=cpu", "trainer.devices=2", "trainer.strategy=ddp")
    environment = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    train = ROOT / "examples" / "train.py"
    run = run_script(train, "-m", "cache.budget=0,100%", *overrides, folder=tmp_path, environment=environment)
    assert run.returncode != 0
    assert "a sweep (-m) on 2 devices needs a strategy" in run.stderr
    assert "trainer.strategy=ddp_spawn" in run.stderr
    assert not list(tmp_path.rglob("*.jpg"))

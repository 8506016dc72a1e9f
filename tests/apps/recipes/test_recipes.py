"""The recipes of docs/guides/frameworks.md for libraries that only the nightly tests install."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.apps.environments import python_with

FOLDER = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
ACCELERATE = ("accelerate==1.15.0", "transformers==5.24.0")


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("requirements", "command"),
    [
        (ACCELERATE, ["accelerate_loop.py"]),
        (ACCELERATE, [*TORCHRUN, "accelerate_loop.py"]),
        (ACCELERATE, ["hugging_face.py"]),
        (("ray[train]==2.60.0",), ["ray_train.py"]),
        (("ultralytics==8.4.190",), ["ultralytics_detection.py"]),
    ],
    ids=["accelerate", "accelerate_on_two_ranks", "hugging_face", "ray", "ultralytics"],
)
def test_the_recipe_gives_equal_batches_and_loads_each_sample_once(requirements, command, tmp_path):
    """The script of a framework compares a training by its recipe with one without us, in an environment of its own."""
    *options, script = command
    done = subprocess.run(
        [str(python_with(*requirements)), *options, str(FOLDER / script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(FOLDER.parents[2])},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equal" in done.stdout

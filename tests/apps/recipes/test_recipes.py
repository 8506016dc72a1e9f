"""The recipes of docs/guides/frameworks.md for libraries that only the nightly tests install."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize(
    ("library", "command"),
    [
        ("accelerate", ["accelerate_loop.py"]),
        ("accelerate", [*TORCHRUN, "accelerate_loop.py"]),
        ("accelerate", ["hugging_face.py"]),
        ("ray", ["ray_train.py"]),
        ("ultralytics", ["ultralytics_detection.py"]),
    ],
    ids=["accelerate", "accelerate_on_two_ranks", "hugging_face", "ray", "ultralytics"],
)
def test_the_recipe_gives_equal_batches_and_loads_each_sample_once(library, command, tmp_path):
    """The script of a framework compares a training by its recipe with one without us."""
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    *options, script = command
    path = os.pathsep.join([str(FOLDER.parents[2]), *sys.path])
    done = subprocess.run(
        [sys.executable, *options, str(FOLDER / script)],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "equal" in done.stdout

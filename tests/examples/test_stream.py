"""The example of a stream: files are read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_script

pytestmark = [pytest.mark.processes, pytest.mark.slow]

ROOT = Path(__file__).parents[2]


def reads(tmp_path: Path, *arguments: str) -> list[int]:
    """What the example says was read from the files in each epoch."""
    environment = {"PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    script = ROOT / "examples" / "stream.py"
    done = run_script(script, "--samples", "256", *arguments, folder=tmp_path, environment=environment)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in re.findall(r"(\d+) read from the files", done.stdout)]


@pytest.mark.parametrize("door", [(), ("--lightning",)])
def test_files_are_read_once(tmp_path: Path, door: tuple[str, ...]) -> None:
    """Epoch one reads all of them, epoch two a few samples, to see that nothing is random."""
    assert reads(tmp_path, *door) == [256, 16, 0, 0]

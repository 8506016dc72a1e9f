"""The example of a stream: files are read once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scripts import run_example

pytestmark = [pytest.mark.processes, pytest.mark.slow]


@pytest.mark.parametrize("door", [(), ("--lightning",)])
def test_files_are_read_once(tmp_path: Path, door: tuple[str, ...]) -> None:
    """Epoch one reads all of them, epoch two a few samples, to see that nothing is random; as set-up does before."""
    said = run_example("stream.py", tmp_path, "--samples", "256", *door)
    assert re.findall(r"(\d+) read from the files", said) == ["272" if door else "256", "16", "0", "0"]

"""The odds end with their test: nothing of a crowd is left where one of it fails."""

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ChildError, is_alive, wait_until


def fail_last(number: int, folder: Path) -> None:
    """Wait for ever, but for the last process, which fails when all have begun."""
    (folder / str(os.getpid())).touch()
    if number < 31:
        time.sleep(1000)
    wait_until(lambda: len(list(folder.iterdir())) == 32)
    raise ValueError("the last one")


@pytest.mark.processes
def test_the_first_error_of_a_crowd_ends_it(tmp_path: Path, crowd: Any) -> None:
    """It is raised with its traceback, while others are still at work, which are killed."""
    with pytest.raises(ChildError, match=r"(?s)in fail_last.*ValueError: the last one"):
        crowd(fail_last, tmp_path)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 32
    wait_until(lambda: not any(map(is_alive, pids)))

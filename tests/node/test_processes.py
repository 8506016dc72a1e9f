"""A child process ends with its parent."""

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from lightning_stocache.node.processes import end_with_parent
from tests.processes import context, hanging, is_alive, wait_until


def outlive(folder: Path) -> None:
    (folder / "new").write_text(str(os.getpid()))
    (folder / "new").rename(folder / "pid")
    wait_until((folder / "killed").exists)  # as if it imported for so long
    end_with_parent()
    (folder / "outlived").touch()


def start(folder: Path) -> None:
    context("spawn").Process(target=outlive, args=(folder,)).start()


@pytest.mark.processes
def test_a_parent_that_is_killed_while_its_child_imports_is_missed(tmp_path: Path) -> None:
    """The child has another parent by then, which lives on: the child ends when it would begin its work."""
    with hanging(start, tmp_path):
        wait_until((tmp_path / "pid").exists)
    child = int((tmp_path / "pid").read_text())
    (tmp_path / "killed").touch()
    try:
        wait_until(lambda: not is_alive(child))
    finally:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    assert not (tmp_path / "outlived").exists()

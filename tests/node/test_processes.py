"""A child process ends with its parent, and threads that run code of the user's are told from others."""

import multiprocessing
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.processes import THREAD_PREFIX, end_with_parent, other_threads
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


@pytest.mark.processes
def test_threads_of_libraries_run_no_code_of_the_users() -> None:
    """Those that feed a queue, pin memory, or look at progress bars; an executor's do."""
    messages: Any = multiprocessing.Queue()
    messages.put(1)
    ends = threading.Event()
    names = [f"{THREAD_PREFIX}prefetch", "a thread"]
    threads = [threading.Thread(target=ends.wait, name=name) for name in names]
    for thread in threads:
        thread.start()
    with ThreadPoolExecutor(1, "executor") as executor:
        executor.submit(int).result()
        assert sorted(thread.name for thread in other_threads()) == ["a thread", "executor_0"]
    ends.set()
    for thread in threads:
        thread.join()
    assert messages.get() == 1
    messages.close()
    messages.join_thread()

"""Locks of processes: who has them, and a word to who waits for long."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from lightning_stocache.node import locks, waiting
from tests.processes import Child

pytestmark = pytest.mark.processes


def hold(path: str, whole: bool) -> None:
    """Have a file locked, or its third byte, until it is told to end."""
    file = os.open(path, os.O_RDWR)
    if whole:
        fcntl.flock(file, fcntl.LOCK_EX)
    else:
        locks.take(file, 3)
    Path(f"{path}.held").touch()
    while Path(f"{path}.held").exists():
        time.sleep(0.005)
    os.close(file)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.touch()
    descriptor = os.open(path, os.O_RDWR)
    yield path, descriptor
    os.close(descriptor)


def held(path: Path, *, whole: bool) -> tuple[Child, Path]:
    child, flag = Child(hold, str(path), whole), Path(f"{path}.held")
    while not flag.exists():
        time.sleep(0.005)
    return child, flag


def test_who_has_a_byte(file):
    """The process that has it; nobody for a free one, nor for one's own."""
    path, descriptor = file
    child, flag = held(path, whole=False)
    assert locks.holder(descriptor, 3) == child.process.pid
    assert locks.holder(descriptor, 4) is None
    assert locks.take(descriptor, 4)
    assert locks.holder(descriptor, 4) is None
    flag.unlink()
    child.result()
    assert locks.holder(descriptor, 3) is None


def test_who_waits_for_a_file_is_told_for_whom(file, monkeypatch, caplog):
    """Again and again, with the process; then the lock is there."""
    monkeypatch.setattr(waiting, "TOLD_SECONDS", 0.05)
    path, descriptor = file
    child, flag = held(path, whole=True)
    threading.Timer(0.4, flag.unlink).start()
    locks.share(descriptor, "the cache")
    pid = child.process.pid
    child.result()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) > 1
    assert messages[0] == f"the cache is waited for: process {pid} has it locked"

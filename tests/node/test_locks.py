"""Locks of processes: who has them, and a word to who waits for long."""

from __future__ import annotations

import fcntl
import os
import random
import threading
import time
from pathlib import Path

import pytest

from lightning_stocache.node import waiting
from lightning_stocache.node.header import Geometry, Manifest
from lightning_stocache.node.named import clean, open_named
from lightning_stocache.node.segment import Segment
from tests.names import path_of
from tests.processes import Child

pytestmark = pytest.mark.processes


def hold(target: Segment | str, flag: str) -> None:
    """Have a file locked, or the third byte of a segment, until the flag goes."""
    file = os.open(target, os.O_RDWR) if isinstance(target, str) else -1
    if isinstance(target, str):
        fcntl.flock(file, fcntl.LOCK_EX)
    else:
        target.lock(3)
    Path(flag).touch()
    while Path(flag).exists():
        time.sleep(0.005)


def held(target: Segment | str, flag: Path) -> Child:
    child = Child(hold, target, str(flag))
    while not flag.exists():
        time.sleep(0.005)
    return child


def test_who_has_a_byte(tmp_path: Path) -> None:
    """The process that has it; nobody for a free one, nor for one's own."""
    segment = Segment.create(1)
    child = held(segment, tmp_path / "flag")
    assert segment.holder(3) == child.process.pid
    assert segment.holder(4) is None
    assert segment.lock(4)
    assert segment.holder(4) is None
    (tmp_path / "flag").unlink()
    child.result()
    assert segment.holder(3) is None
    segment.close()


@pytest.mark.named
def test_who_waits_for_a_file_is_told_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Again and again, with the process; then the lock is there."""
    monkeypatch.setattr(waiting, "TOLD_SECONDS", 0.05)
    name, flag = f"test-{os.getpid()}-{random.getrandbits(32)}", tmp_path / "flag"
    open_named(name, 1, Manifest(Geometry(1, 1)))[0].close()
    child = held(str(path_of(name)), flag)
    threading.Timer(0.4, flag.unlink).start()
    open_named(name, 1, Manifest(Geometry(1, 1)))[0].close()
    pid = child.process.pid
    child.result()
    clean(name)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) > 1
    assert messages[0] == f"{path_of(name)} is waited for: process {pid} has it locked"

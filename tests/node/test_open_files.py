"""What other jobs were granted, and have not taken yet, is not granted again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node import free as free_module
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve, grant
from lightning_stocache.node.open_files import Promise, Promises, other_promises
from lightning_stocache.node.segment import Segment
from tests.processes import hanging

MIB = 2**20


def machine(root: Path, **processes: tuple[int, str]) -> Path:
    """A /proc in which processes have descriptors of this one open, in a cgroup each."""
    for name, (descriptor, cgroup) in {"self": (-1, "ours"), **processes}.items():
        folder = root / "proc" / name.removeprefix("p")
        (folder / "fd").mkdir(parents=True)
        (folder / "cgroup").write_text(cgroup)
        if descriptor >= 0:
            (folder / "fd" / "3").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
    return root


@pytest.fixture
def sparse(tmp_path: Path) -> Any:
    """A segment of 64 MiB in /dev/shm, of which 16 MiB are taken."""
    segment = Segment.create(64 * MIB, reserved=16 * MIB)
    yield segment
    segment.close()


def descriptor_of(segment: Segment) -> int:
    return int(segment.handle.data.rpartition("/")[2])


def test_what_others_may_still_take_is_counted_once(tmp_path, monkeypatch, sparse):
    """A segment that two processes have open is one job's; its cgroup's limit counts it only for the same cgroup."""
    links = {f"/proc/{os.getpid()}/fd/{descriptor_of(sparse)}": "/dev/shm/#12 (deleted)"}
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: links.get(readlink(path), readlink(path)))
    file = descriptor_of(sparse)
    other = machine(tmp_path, p71=(file, "theirs"), p72=(file, "theirs"))
    found = other_promises(other)
    assert 47 * MIB < found.machine.nbytes <= 48 * MIB
    assert (found.machine.jobs, found.machine.pids) == (1, (71, 72))
    assert (found.files, found.cgroup) == (found.machine, Promise())
    (tmp_path / "proc/72/cgroup").write_text("ours")
    assert other_promises(tmp_path).cgroup == found.machine


def test_what_this_process_has_open_is_its_own_business(sparse):
    """Its own caches are no promise to others."""
    assert os.getpid() not in other_promises().machine.pids


def test_without_a_proc_nothing_is_known(tmp_path):
    """As on macOS."""
    assert other_promises(tmp_path) == Promises()


@pytest.mark.processes
def test_a_living_job_is_found():
    """Its segment holds one page, and is as long as what it was granted."""
    with hanging(Segment.create, 512 * MIB) as child:
        found, pid = other_promises(), child.process.pid
    for promise in (found.files, found.machine, found.cgroup):
        assert pid in promise.pids
        assert promise.jobs >= 1
        assert promise.nbytes >= 511 * MIB


def test_a_filesystem_is_not_promised_twice_and_memory_is_shared():
    """Of a filesystem what is promised is gone; of memory a newcomer gets an even share at least, and is told why."""
    promise = Promise(900 * MIB, jobs=2, pids=(7, 8))
    others = Promises(files=promise, machine=promise)
    free = FreeMemory(1000 * MIB, 10_000 * MIB, None, "/dev/shm", promised=others)
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == (1000 - 900 - 20) * MIB
    assert given.limited_by == "/dev/shm (1000 MiB free, of which caches of process 7, 8 may take 900 MiB)"
    free = FreeMemory(None, 1064 * MIB, 10_000 * MIB, promised=others)
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == 1000 * MIB // 3
    assert given.limited_by is not None
    assert "(1 GiB free, of which caches of process 7, 8 may take 900 MiB, 64 MiB kept" in given.limited_by
    less = FreeMemory(None, 2064 * MIB, None, promised=others)
    assert grant(Budget.parse("auto"), 2**40, less, Reserve()).bytes == 1100 * MIB


def test_what_is_measured_tells_of_others(monkeypatch):
    """Whoever asks what is free is told what others may still take."""
    others = Promises(Promise(5, 1, (7,)))
    monkeypatch.setattr(free_module, "other_promises", lambda root: others)
    assert FreeMemory.measure("/dev/shm").promised == others

"""What other jobs were granted, and have not taken yet, is not granted again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.budget import Budget
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve, grant
from lightning_stocache.node.open_files import promised_to_others
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
    """A segment that two processes have open counts once, and for the cgroup's limit if one of them is in it."""
    links = {f"/proc/{os.getpid()}/fd/{descriptor_of(sparse)}": "/dev/shm/#12 (deleted)"}
    readlink = os.readlink
    monkeypatch.setattr(os, "readlink", lambda path: links.get(readlink(path), readlink(path)))
    file = descriptor_of(sparse)
    other = machine(tmp_path, p71=(file, "theirs"), p72=(file, "theirs"))
    promised, in_cgroup = promised_to_others(other)
    assert 47 * MIB < promised <= 48 * MIB
    assert in_cgroup == 0
    (tmp_path / "proc/72/cgroup").write_text("ours")
    assert promised_to_others(tmp_path) == (promised, promised)
    free = FreeMemory.measure(None, tmp_path)
    assert (free.promised, free.promised_in_cgroup) == (promised, promised)


def test_without_a_proc_nothing_is_known(tmp_path):
    """As on macOS."""
    assert promised_to_others(tmp_path) == (0, 0)


@pytest.mark.processes
def test_a_living_job_is_found(sparse):
    """Its segment holds one page, and is as long as what it was granted; those of this process are not counted."""
    before = promised_to_others()
    with hanging(Segment.create, 512 * MIB):
        for promised, others in zip(promised_to_others(), before, strict=True):
            assert 511 * MIB <= promised - others < 513 * MIB


def test_a_filesystem_is_not_promised_twice_and_memory_is_shared():
    """Of a filesystem what is promised is gone; of memory a newcomer gets half at least, and is told why."""
    free = FreeMemory(1000 * MIB, 10_000 * MIB, None, "/dev/shm", promised=900 * MIB)
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == (1000 - 900 - 20) * MIB
    assert given.limited_by == "/dev/shm (1000 MiB free, of which caches of other jobs may take 900 MiB)"
    free = FreeMemory(None, 1064 * MIB, 10_000 * MIB, promised=900 * MIB)
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == 500 * MIB
    assert given.limited_by is not None
    assert "(1 GiB free, of which caches of other jobs may take 900 MiB, 64 MiB kept" in given.limited_by
    less = FreeMemory(None, 2064 * MIB, None, promised=900 * MIB)
    assert grant(Budget.parse("auto"), 2**40, less, Reserve()).bytes == 1100 * MIB

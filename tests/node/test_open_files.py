"""What other jobs were granted, and have not taken yet, is not granted again."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.budget import Budget
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Reserve, grant
from lightning_stocache.node.open_files import Promised, promised_to_others
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


def seen_as(monkeypatch: pytest.MonkeyPatch, segment: Segment, name: str) -> int:
    """The descriptor of a segment, which the kernel is made to call by a name."""
    file, readlink = descriptor_of(segment), os.readlink
    links = {f"/proc/{os.getpid()}/fd/{file}": name}
    monkeypatch.setattr(os, "readlink", lambda path: links.get(readlink(path), readlink(path)))
    return file


def test_what_others_may_still_take_is_counted_once(tmp_path, monkeypatch, sparse):
    """A segment that two processes have open counts once, and for the cgroup's limit if one of them is in it."""
    file = seen_as(monkeypatch, sparse, "/dev/shm/#12 (deleted)")
    other = machine(tmp_path, p71=(file, "theirs"), p72=(file, "theirs"))
    promised, in_cgroup, in_directory = promised_to_others("/dev/shm", other)
    assert 47 * MIB < promised <= 48 * MIB
    assert (in_cgroup, in_directory) == (0, promised)
    (tmp_path / "proc/72/cgroup").write_text("ours")
    assert promised_to_others(None, tmp_path) == (promised, promised, 0)
    free = FreeMemory.measure("/dev/shm", tmp_path)
    assert free.promised == (promised, promised, promised)


def test_what_lies_elsewhere_takes_no_room_of_a_filesystem(tmp_path, monkeypatch):
    """A memfd of another job takes memory, and nothing of /dev/shm, where a cache with a name keeps its room."""
    segment = Segment.create(64 * MIB, "memfd")
    file = seen_as(monkeypatch, segment, "/memfd:lightning_stocache (deleted)")
    free = FreeMemory.measure("/dev/shm", machine(tmp_path, p71=(file, "theirs")))
    segment.close()
    assert free.promised.memory > 63 * MIB
    assert free.promised.in_directory == 0
    given = grant(Budget.parse("auto"), 2**40, replace(free, filesystem=64 * MIB, available=2**40), Reserve())
    assert given.bytes == 48 * MIB


def test_without_a_proc_nothing_is_known(tmp_path):
    """Without /proc, as on macOS, no promises are known."""
    assert promised_to_others("/dev/shm", tmp_path) == (0, 0, 0)


@pytest.mark.processes
def test_a_living_job_is_found(sparse):
    """Its segment holds one page, and is as long as what it was granted; those of this process are not counted."""
    before = promised_to_others("/dev/shm")
    with hanging(Segment.create, 65536 * MIB):  # so large that the caches of tests at the same time do not matter
        for promised, others in zip(promised_to_others("/dev/shm"), before, strict=True):
            assert 65000 * MIB <= promised - others < 66000 * MIB


def test_a_filesystem_is_not_promised_twice_and_memory_is_shared():
    """Promised bytes of a filesystem are gone. Of memory a new job gets at least half, and the words say why."""
    free = FreeMemory(1000 * MIB, 10_000 * MIB, None, "/dev/shm", promised=Promised(950 * MIB, in_directory=900 * MIB))
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == (1000 - 900 - 20) * MIB
    assert given.limited_by == "/dev/shm (1000 MiB free, of which caches of other jobs may take 900 MiB)"
    free = FreeMemory(None, 1064 * MIB, 10_000 * MIB, promised=Promised(900 * MIB))
    given = grant(Budget.parse("auto"), 2**40, free, Reserve())
    assert given.bytes == 500 * MIB
    assert given.limited_by is not None
    assert "(1 GiB free, of which caches of other jobs may take 900 MiB, 64 MiB kept" in given.limited_by
    less = FreeMemory(None, 2064 * MIB, None, promised=Promised(900 * MIB))
    assert grant(Budget.parse("auto"), 2**40, less, Reserve()).bytes == 1100 * MIB

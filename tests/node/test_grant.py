"""A grant stays below what is free, now and when workers, batches, the training and other jobs have come."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.budget import Budget
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Grant, Reserve, grant, loader_reserve
from lightning_stocache.node.open_files import Promised, promised_to_others
from lightning_stocache.node.segment import Segment
from tests.processes import hanging

MIB, GIB = 2**20, 2**30
AUTO = Budget.parse("auto")


def test_grant():
    """With enough memory a budget gets what it asks for, and no more than the dataset, which is no shortage. Below a
    cgroup's limit two percent are kept back; where the training needs all that is left there is no cache. A share of
    free memory is one of what is left after reserve and margin, so nothing limits it."""
    ample = FreeMemory(32 * GIB, 32 * GIB, None, "/dev/shm")
    tight = FreeMemory(12 * GIB, 20 * GIB, 220 * MIB, "/dev/shm", own=480 * MIB)
    half, unknown = Budget.parse("50% of free"), FreeMemory(None, None, None)
    assert grant(Budget.parse("8GiB"), 20 * GIB, ample, Reserve(GIB)) == Grant(8 * GIB, 8 * GIB, None)
    assert grant(Budget.parse("8GiB"), GIB, ample, Reserve()) == Grant(GIB, 8 * GIB, None)
    assert grant(AUTO, 400 * GIB, FreeMemory(None, 500 * GIB, 100 * GIB), Reserve()).bytes == 98 * GIB
    assert grant(AUTO, GIB, tight, Reserve(private=64 * MIB)).bytes == 0
    assert grant(AUTO, GIB, unknown, Reserve()) == Grant(0, GIB, "memory that cannot be measured here")
    free = FreeMemory(None, 100 * GIB, None)
    assert grant(half, 400 * GIB, free, Reserve(8 * GIB)) == Grant(45 * GIB, 45 * GIB, None)


def test_grant_in_a_small_dev_shm():
    """In Docker's 64 MiB /dev/shm batches and 16 MiB are kept back, not what lies elsewhere, and the limit is named."""
    free = FreeMemory(64 * MIB, 32 * GIB, None, "/dev/shm")
    reserve = Reserve(files=8 * MIB, private=2 * GIB, readers=9)
    assert grant(AUTO, GIB, free, reserve) == Grant(40 * MIB, GIB, "/dev/shm (64 MiB free)")


def test_all_that_is_to_come_is_kept_back():
    """Batches, processes, and as much again as the trainers hold already; the words say how much that is."""
    free = FreeMemory(None, 500 * GIB, 10 * GIB, own=512 * MIB)
    given_ = grant(AUTO, 400 * GIB, free, Reserve(files=GIB, private=2 * GIB), ranks=2)
    assert given_.bytes == 6 * GIB
    assert given_.limited_by == "the cgroup's memory limit (10 GiB free, 4 GiB kept for the training)"


@given(
    budget=st.one_of(
        st.integers(0, 2**45), st.sampled_from(["auto", "60%", "60% of free", "100% of free", "8GiB", "0"])
    ).map(Budget.parse),
    dataset=st.integers(0, 2**45),
    limits=st.tuples(*[st.none() | st.integers(0, 2**45)] * 3),
    own=st.integers(0, 2**34),
    reserve=st.builds(Reserve, st.integers(0, 2**40), st.integers(0, 2**40), st.integers(0, 1000)),
)
def test_grant_is_within_every_bound(budget, dataset, limits, own, reserve):
    """A grant is never negative or above wish, dataset and safely free memory, and it says when memory was short."""
    free = FreeMemory(*limits, own=own)
    given_ = grant(budget, dataset, free, reserve)
    assert 0 <= given_.bytes <= min(given_.wanted, dataset)
    filesystem, *memory = limits
    if given_.bytes and filesystem is not None:
        assert given_.bytes <= filesystem - reserve.files - 16 * MIB
    for limit in memory:
        if given_.bytes and limit is not None:
            tables = given_.bytes * reserve.readers // 512
            assert given_.bytes + tables <= limit - reserve.bytes - max(64 * MIB, own)
    assert (given_.limited_by is not None) == (given_.bytes < min(given_.wanted, dataset))


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "ranks", "batches"),
    [(0, None, 4, 20), (4, None, 1, 13), (4, 5, 2, 50), (4, 2, 0, 0)],
)
def test_batches_of_a_loader(num_workers, prefetch_factor, ranks, batches):
    """Files hold the batches that workers make ahead and five more, per rank. Every process reads the cache. A forked
    worker shares most pages with the trainer; any other worker takes as much memory as the trainer."""
    for method, own, worker in (("fork", GIB, 32 * MIB), ("spawn", GIB, GIB), ("forkserver", 0, 32 * MIB)):
        reserve = loader_reserve(1000, num_workers, prefetch_factor, ranks, start_method=method, own=own)
        assert reserve.files == batches * 1000
        assert reserve.private == ranks * num_workers * (worker + 1000)
        assert reserve.readers == ranks * (num_workers + 1)
    assert Reserve(1, 2, 3) + Reserve(10, 20, 30) == Reserve(11, 22, 33)


# --- what other jobs were granted, and have not taken yet, is not granted again


def machine(root: Path, **processes: tuple[int, str]) -> Path:
    """A /proc in which processes have descriptors of this one open, in a cgroup each."""
    for name, (descriptor, cgroup) in {"self": (-1, "ours"), **processes}.items():
        folder = root / "proc" / name.removeprefix("p")
        (folder / "fd").mkdir(parents=True)
        (folder / "cgroup").write_text(cgroup)
        if descriptor >= 0:
            (folder / "fd" / "3").symlink_to(f"/proc/{os.getpid()}/fd/{descriptor}")
    return root


def seen_as(monkeypatch: pytest.MonkeyPatch, segment: Segment, name: str) -> int:
    """The descriptor of a segment, which the kernel is made to call by a name."""
    file, readlink = int(segment.handle.data.rpartition("/")[2]), os.readlink
    links = {f"/proc/{os.getpid()}/fd/{file}": name}
    monkeypatch.setattr(os, "readlink", lambda path: links.get(readlink(path), readlink(path)))
    return file


def test_what_others_may_still_take_is_counted_once(tmp_path, monkeypatch):
    """A segment that two processes have open counts once, and for the cgroup's limit if one of them is in it. Without
    /proc, as on macOS, no promises are known."""
    assert promised_to_others("/dev/shm", tmp_path) == (0, 0, 0)
    segment = Segment.create(64 * MIB, reserved=16 * MIB)
    file = seen_as(monkeypatch, segment, "/dev/shm/#12 (deleted)")
    other = machine(tmp_path, p71=(file, "theirs"), p72=(file, "theirs"))
    promised, in_cgroup, in_directory = promised_to_others("/dev/shm", other)
    assert 47 * MIB < promised <= 48 * MIB
    assert (in_cgroup, in_directory) == (0, promised)
    (tmp_path / "proc/72/cgroup").write_text("ours")
    assert promised_to_others(None, tmp_path) == (promised, promised, 0)
    assert FreeMemory.measure("/dev/shm", tmp_path).promised == (promised, promised, promised)
    segment.close()


def test_what_lies_elsewhere_takes_no_room_of_a_filesystem(tmp_path, monkeypatch):
    """A memfd of another job takes memory, and nothing of /dev/shm, where a cache with a name keeps its room."""
    segment = Segment.create(64 * MIB, "memfd")
    file = seen_as(monkeypatch, segment, "/memfd:lightning_stocache (deleted)")
    free = FreeMemory.measure("/dev/shm", machine(tmp_path, p71=(file, "theirs")))
    segment.close()
    assert free.promised.memory > 63 * MIB
    assert free.promised.in_directory == 0
    given = grant(AUTO, 2**40, replace(free, filesystem=64 * MIB, available=2**40), Reserve())
    assert given.bytes == 48 * MIB


@pytest.mark.processes
def test_a_living_job_is_found(tmp_path):
    """Its segment holds one page, and is as long as what it was granted; those of this process are not counted."""
    segment = Segment.create(64 * MIB)
    (tmp_path / "proc").mkdir()
    with hanging(Segment.create, 64 * MIB) as job:
        for process in (os.getpid(), job.process.pid, "self"):  # other tests open caches at the same time
            (tmp_path / f"proc/{process}").symlink_to(f"/proc/{process}")
        promised = promised_to_others("/dev/shm", tmp_path)
    segment.close()
    assert promised.memory == promised.in_cgroup == promised.in_directory
    assert 63 * MIB < promised.memory <= 64 * MIB


def test_a_filesystem_is_not_promised_twice_and_memory_is_shared():
    """Promised bytes of a filesystem are gone. Of memory a new job gets at least half, and the words say why."""
    free = FreeMemory(1000 * MIB, 10_000 * MIB, None, "/dev/shm", promised=Promised(950 * MIB, in_directory=900 * MIB))
    given = grant(AUTO, 2**40, free, Reserve())
    assert given.bytes == (1000 - 900 - 20) * MIB
    assert given.limited_by == "/dev/shm (1000 MiB free, of which caches of other jobs may take 900 MiB)"
    free = FreeMemory(None, 1064 * MIB, 10_000 * MIB, promised=Promised(900 * MIB))
    given = grant(AUTO, 2**40, free, Reserve())
    assert given.bytes == 500 * MIB
    assert given.limited_by is not None
    assert "(1 GiB free, of which caches of other jobs may take 900 MiB, 64 MiB kept" in given.limited_by
    less = FreeMemory(None, 2064 * MIB, None, promised=Promised(900 * MIB))
    assert grant(AUTO, 2**40, less, Reserve()).bytes == 1100 * MIB

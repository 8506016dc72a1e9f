"""Budgets are read or refused in words; what is granted stays below what is free, now and when workers, batches, the
training and other jobs have come."""

import itertools
import math
import os
import re
import shutil
import signal
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.budget import Budget, format_bytes
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.grant import Grant, Reserve, grant, loader_reserve
from lightning_stocache.node.open_files import Promised, open_files, promised_to_others
from lightning_stocache.node.segment import Segment
from tests.processes import descendants, hanging, idle_worker

KIB, MIB, GIB = 2**10, 2**20, 2**30
AUTO = Budget.parse("auto")
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


def bytes_of(value):
    return Budget.parse(value).wanted(10**18, 10**18)


@given(
    number=st.decimals(0, 10**6, places=3),
    unit=st.sampled_from(sorted(UNITS)),
    recase=st.sampled_from([str, str.lower, str.upper, str.swapcase]),
    gap=st.sampled_from(["", " ", "  "]),
)
def test_amount_with_unit(number, unit, recase, gap):
    """A number and a unit are that many bytes, rounded down, in any spelling; numbers of any type are bytes."""
    assert bytes_of(f" {number}{gap}{recase(unit)} ") == math.floor(Fraction(number) * UNITS[unit])
    n = int(number) + 101
    assert bytes_of(n) == bytes_of(str(n)) == bytes_of(np.int64(n)) == bytes_of(float(n)) == bytes_of(f"{n}.0") == n
    assert bytes_of("8e9") == bytes_of("8e+9") == bytes_of(8e9) == 8 * 10**9


@given(
    percent=st.decimals(0, 100, places=3),
    dataset=st.integers(0, 2**50),
    free=st.integers(0, 2**50),
    spelling=st.sampled_from(["{}%", "{} %", " {}% "]),
)
def test_percent(percent, dataset, free, spelling):
    """A percentage is a share of the dataset, or with "of free" a share of what may be used, rounded down."""
    share = Fraction(percent) / 100
    assert Budget.parse(spelling.format(percent)).wanted(dataset, free) == math.floor(share * dataset)
    assert Budget.parse(spelling.format(percent) + " of  Free").wanted(dataset, free) == math.floor(share * free)


def test_auto_and_off():
    """Auto is the whole dataset, however much is free, and every way to write zero is off."""
    assert Budget.parse("auto").wanted(123, 5) == Budget.parse(" AUTO ").wanted(123, 5) == 123
    assert Budget.parse("auto") == Budget.parse("100%")
    assert [Budget.parse(value).wanted(-100, -100) for value in ("60%", "60% of free", "auto")] == [0] * 3
    for zero in (0, -0.0, "0", "0.0", "0%", "0 % of free", "0GiB"):
        assert Budget.parse(zero) == Budget.parse(0)
        assert Budget.parse(zero).off
        assert bytes_of(zero) == 0


def test_texts_are_readable():
    """A budget's text has the largest unit that divides it, and bytes the unit that keeps them below 1024."""
    sizes = {0: "0 B", 1536: "1.5 KiB", MIB - 1: "1 MiB", 2**51: "2048 TiB", -1536: "-1.5 KiB"}
    assert {size: format_bytes(size) for size in sizes} == sizes
    for value, text in [
        ("8gib", "8 GiB"),
        (8e9, "8 GB"),
        (4097, "4097 B"),
        ("1.5TiB", "1536 GiB"),
        ("33.333333333 % OF FREE", "33.333333333% of free"),
        (2**70 + 1, "1180591620717411303425 B"),
        ("100%", "auto"),
        ("0%", "0"),
    ]:
        assert str(Budget.parse(value)) == text
        assert Budget.parse(text) == Budget.parse(value)


def test_refused():
    """The error for a value that is no budget names the rule, the value and every accepted form."""
    for value, rule in [
        (-1, "must not be negative"),
        ("-8GiB", "must not be negative"),
        (float("nan"), "cannot convert NaN"),
        (float("inf"), "cannot convert Infinity"),
        (0.5, 'could mean a share or bytes .*write "50%" for the share'),
        ("1.0", "could mean a share or bytes"),
        ("2.5", "whole number of bytes"),
        ("8G", 'could mean GB or GiB: write "8GiB" .*"8GB"'),
        ("8 gi", 'could mean GB or GiB: write "8 giB"'),
        ("100.001%", "more than 100 percent"),
        ("150% of free", "more than 100 percent"),
        *((text, "cannot be read") for text in ("", "nan", "GiB", "8 apples", "8GiB 2", "60% of", "1e999999999")),
        *((value, "must be a number or a string") for value in (None, True, np.True_, [1], b"8GiB")),
    ]:
        with pytest.raises(TypeError if "a string" in rule else ValueError, match=rule) as caught:
            Budget.parse(value)
        forms = ('"8GiB"', '"500MB"', '"60%"', '"60% of free"', '"auto"', "bytes", "0 (off)", repr(value))
        assert all(form in str(caught.value) for form in forms)


def test_a_number_that_looks_like_a_percentage_is_refused():
    """A whole number from 1 to 100, of any type; with a unit it is meant."""
    for value in (1, 50, 100, 50.0, "50", " 50 ", np.int64(50)):
        count = int(value)
        words = f'budget={value!r} means {count} bytes; write "{count}%" or "{count}B"'
        with pytest.raises(ValueError, match=re.escape(words)):
            Budget.parse(value)
    assert [bytes_of(value) for value in ("50B", "50 b", 101, "101", 0)] == [50, 50, 101, 101, 0]


# --- what is free: what filesystem, machine and cgroups all allow


class Machine:
    """A fake /proc and /sys below a folder, with cgroups of one version."""

    def __init__(self, root: Path, version: int = 2) -> None:
        self.root, self.version = root, version
        self.cgroups = "/sys/fs/cgroup" if version == 2 else "/sys/fs/cgroup/memory"

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def limit(self, path: str, limit: int | str, usage: int | None, inactive: int = 0, active: int = 9) -> None:
        folder, prefix = f"{self.cgroups}{path}", "" if self.version == 2 else "total_"
        names = ("max", "current") if self.version == 2 else ("limit_in_bytes", "usage_in_bytes")
        self.write(f"{folder}/memory.{names[0]}", f"{limit}\n")
        if usage is not None:
            self.write(f"{folder}/memory.{names[1]}", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\n{prefix}inactive_file {inactive}\n{prefix}active_file {active}\n")

    def enter(self, path: str) -> None:
        lines = f"0::{path}" if self.version == 2 else f"9:cpu:/elsewhere\n4:hugetlb,memory:{path}\n0::/"
        self.write("/proc/self/cgroup", f"{lines}\n")

    @property
    def cgroup(self) -> int | None:
        return FreeMemory.measure(None, self.root).cgroup


@pytest.fixture(params=[1, 2])
def machine(tmp_path: Path, request: pytest.FixtureRequest) -> Machine:
    return Machine(tmp_path, request.param)


def test_memory_of_the_machine(machine, monkeypatch):
    """MemAvailable is free; on macOS half of the memory; where nothing is known, nothing is safe."""
    monkeypatch.setattr(os, "sysconf", {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert FreeMemory.measure(None, machine.root).available == 204800
    monkeypatch.delattr(os, "sysconf")
    free = FreeMemory.measure(str(machine.root / "missing"), machine.root)
    assert free == FreeMemory(None, None, None, directory=free.directory)
    assert (free.bytes, free.memory) == (0, None)
    assert "cannot be measured" in free.limited_by
    machine.write("/proc/meminfo", "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     2048 kB\n")
    machine.write("/proc/self/status", "VmRSS:\t  900 kB\nRssAnon:\t  300 kB\nRssFile:\t  600 kB\n")
    assert FreeMemory.measure(None, machine.root) == FreeMemory(None, 2 * MIB, None, own=300 * KIB)


def test_rubbish_is_unknown(machine):
    """Files with unexpected contents, or folders in their place, are unknown and no crash."""
    machine.write("/proc/self/cgroup", "\n0\n0:\n0::\nx:memory\n4:memory:\n")
    machine.limit("", "many", 1)
    (machine.root / machine.cgroups.lstrip("/") / "memory.stat").unlink()
    (machine.root / machine.cgroups.lstrip("/") / "memory.stat").mkdir()
    (machine.root / "proc/meminfo").mkdir()
    assert machine.cgroup is None


def test_the_tightest_of_the_chain_counts(machine):
    """Headroom is limit - usage + what can be reclaimed, and the minimum over the cgroup and its parents, now. In a
    container, where the named path is not below the mount, the mount itself is this process's cgroup. A data file that
    is read again and again is dropped before anybody is killed; 256 MiB of libraries are left."""
    machine.enter("/job/step/task")
    machine.limit("/job/step/task", 1000, 100, 50)
    machine.limit("/job/step", 2**63 - 4096 if machine.version == 1 else "max", 400)
    machine.limit("/job", 1200, 900, 25)
    machine.limit("/other", 1, 1)
    assert machine.cgroup == 325
    machine.limit("/job", 1200, 9000, 25)  # a limit below the usage
    assert machine.cgroup == 0
    machine.limit("/job", 2**63 - 4096 if machine.version == 1 else "max", 900, 25)
    assert machine.cgroup == 950
    machine.write("/sys/fs/cgroup/job/memory.high", "1000\n")  # above it the kernel throttles
    assert machine.cgroup == (950 if machine.version == 1 else 125)
    machine.limit("", 1000, 100)
    machine.limit("/../other", 1, 1)
    for own in ("/kubepods/pod1/abc", "/../other", "/"):
        machine.enter(own)
        assert machine.cgroup == 900
    for active, room in ((200 * MIB, 110 * MIB), (300 * MIB, 154 * MIB)):
        machine.limit("", 1000 * MIB, 900 * MIB, 10 * MIB, active)
        assert machine.cgroup == room


def test_the_smallest_limit_is_free_and_named(tmp_path, monkeypatch):
    """The filesystem of the cache's folder is a limit, unless it was mounted without a size."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {"/dev/shm": usage(64, 4, 60), "/big": usage(0, 0, 0)}[path])
    free = FreeMemory.now("/dev/shm", tmp_path)
    assert (free.filesystem, free.directory, FreeMemory.now("/big", tmp_path).filesystem) == (60, "/dev/shm", None)
    for free, size, name in [
        (FreeMemory(64 * MIB, GIB, 2 * GIB, "/dev/shm"), 64 * MIB, "/dev/shm"),
        (FreeMemory(64 * MIB, 32 * MIB, None, "/dev/shm"), 32 * MIB, "MemAvailable"),
        (FreeMemory(None, 3 * GIB, 2 * GIB), 2 * GIB, "the cgroup's memory limit"),
        (FreeMemory(0, 3 * GIB, 2 * GIB), 0, "the filesystem"),
    ]:
        assert (free.bytes, free.limited_by) == (size, name)


# --- what is granted


def test_grant():
    """A budget gets what it asks for, no more than the dataset, and no more than what is left of the tightest limit
    when batches, processes and the training have theirs: then the words name the limit and say how much was kept."""
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
    free = FreeMemory(64 * MIB, 32 * GIB, None, "/dev/shm")
    reserve = Reserve(files=8 * MIB, private=2 * GIB, readers=9)
    assert grant(AUTO, GIB, free, reserve) == Grant(40 * MIB, GIB, "/dev/shm (64 MiB free)")
    free = FreeMemory(None, 500 * GIB, 10 * GIB, own=512 * MIB)
    words = "the cgroup's memory limit (10 GiB free, 4 GiB kept for the training)"
    assert grant(AUTO, 400 * GIB, free, Reserve(GIB, 2 * GIB), ranks=2) == Grant(6 * GIB, 400 * GIB, words)


@given(
    budget=st.one_of(
        st.integers(0, 2**45).map("{}B".format),
        st.sampled_from(["auto", "60%", "60% of free", "100% of free", "8GiB", "0"]),
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


def test_batches_of_a_loader():
    """Files hold the batches made ahead and five more per rank, page-locked memory as many; a forked worker shares the
    trainer's pages."""
    loaders = [(0, None, 4, 20), (4, None, 1, 13), (4, 5, 2, 50), (4, 2, 0, 0)]
    methods = [("fork", GIB, 32 * MIB), ("spawn", GIB, GIB), ("forkserver", 0, 32 * MIB)]
    for (num_workers, prefetch, ranks, batches), (method, own, worker) in itertools.product(loaders, methods):
        reserve = loader_reserve(1000, num_workers, prefetch, ranks, start_method=method, own=own)
        assert reserve.files == batches * 1000
        assert reserve.private == ranks * num_workers * (worker + 1000)
        assert reserve.readers == ranks * (num_workers + 1)
        pinned = loader_reserve(1000, num_workers, prefetch, ranks, start_method=method, own=own, pins=True)
        assert pinned == reserve + Reserve(private=batches * 1000)
    assert Reserve(1, 2, 3) + Reserve(10, 20, 30) == Reserve(11, 22, 33)


# --- what other jobs were granted, and have not taken yet, is not granted again


def open_with_worker(backend):
    segment = Segment.create(64 * MIB, backend, reserved=16 * MIB)
    idle_worker()
    return segment


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["tmpfile", "memfd"])
def test_what_living_jobs_may_still_take_is_counted_once(backend, tmp_path):
    """A segment promises its length, once for all its users, also to the cgroup of any of them, but not to this
    process. A memfd takes no room of /dev/shm, and without /proc no promises are known."""
    assert promised_to_others("/dev/shm", tmp_path) == (0, 0, 0)
    own = Segment.create(64 * MIB)
    with hanging(open_with_worker, backend) as job:
        [worker] = descendants() - {job.process.pid}
        try:
            for pid in (os.getpid(), job.process.pid, worker):  # other tests open caches at the same time
                process = tmp_path / f"proc/{pid}"
                process.mkdir(parents=True)
                (process / "fd").symlink_to(f"/proc/{pid}/fd")
                (process / "cgroup").write_text("theirs")
            (tmp_path / "proc/self").mkdir()
            (tmp_path / "proc/self/cgroup").write_text("ours")
            apart = promised_to_others("/dev/shm", tmp_path)
            (tmp_path / f"proc/{worker}/cgroup").write_text("ours")
            free = FreeMemory.measure("/dev/shm", tmp_path)
        finally:
            os.kill(worker, signal.SIGKILL)
    own.close()
    assert 47 * MIB < apart.memory <= 48 * MIB
    in_directory = apart.memory if backend == "tmpfile" else 0
    assert apart == (apart.memory, 0, in_directory)
    assert free.promised == (apart.memory, apart.memory, in_directory)


@pytest.mark.processes
def test_what_another_job_may_still_take_is_promised_while_it_lives(other_job):
    """Its segment is listed with its process, and the rest of its length is promised, until the job has ended."""
    job = other_job()
    pid = job.process.pid
    assert pid in users()
    assert promised_to_others("/dev/shm").memory >= 62 * MIB
    job.kill()
    assert pid not in users()


def users():
    return {process.pid for file in open_files()[0] for process in file.processes}


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

"""Free is what filesystem, machine and cgroups all allow; what cannot be read is unknown."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_stocache.node.free import FreeMemory, MemoryGauge

KIB, MIB, GIB = 2**10, 2**20, 2**30
V1_UNLIMITED = 9223372036854771712


class Machine:
    """A fake /proc and /sys below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def v1(self, folder: str, limit: int, usage: int, inactive: int = 0) -> None:
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"cache 1\ninactive_file 7\ntotal_inactive_file {inactive}\n")

    def v2(self, folder: str, limit: int | str, usage: int, inactive: int = 0, high: int | str = "max") -> None:
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{usage}\n")
        self.write(f"{folder}/memory.stat", f"anon 1\ninactive_file {inactive}\nactive_file 9\n")

    def mounted(self, *mounts: str) -> None:
        lines = [f"{n} 1 0:{n} {mount}" for n, mount in enumerate(mounts, 30)]
        self.write("/proc/self/mountinfo", "\n".join(["22 1 8:1 / / rw - ext4 /dev/sda rw", *lines]) + "\n")

    def in_cgroup(self, *lines: str) -> None:
        self.write("/proc/self/cgroup", "\n".join(lines) + "\n")

    @property
    def cgroup(self) -> int | None:
        return FreeMemory.measure(None, self.root).cgroup


MOUNT_V2 = "/ /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw"
MOUNT_V1 = "/ /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_meminfo(machine):
    """MemAvailable is read in KiB, and MemFree is not mistaken for it."""
    machine.write("/proc/meminfo", "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:     2048 kB\n")
    assert FreeMemory.measure(None, machine.root) == FreeMemory(None, 2 * MIB, None)


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ({"SC_AVPHYS_PAGES": 10, "SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}, 40960),
        ({"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 4096}, 204800),  # macOS: half of what the machine has
        ({"SC_AVPHYS_PAGES": -1, "SC_PAGE_SIZE": 4096}, None),
        ({}, None),
    ],
)
def test_sysconf_where_there_is_no_meminfo(machine, monkeypatch, known, expected):
    """Without /proc/meminfo the system's configuration is asked, and what it does not know is unknown."""

    def sysconf(name: str) -> int:
        if name not in known:
            raise ValueError("unrecognized configuration name")
        return known[name]

    monkeypatch.setattr(os, "sysconf", sysconf)
    assert FreeMemory.measure(None, machine.root).available == expected


def test_nothing_to_read(machine, monkeypatch):
    """A system without /proc, /sys and sysconf is unknown, and nothing is safe there."""
    monkeypatch.delattr(os, "sysconf")
    free = FreeMemory.measure(str(machine.root / "missing"), machine.root)
    assert (free.filesystem, free.available, free.cgroup) == (None, None, None)
    assert (free.bytes, free.memory, free.own) == (0, None, 0)
    assert "cannot be measured" in free.limited_by


def test_rubbish_is_unknown(machine):
    """Files with unexpected contents, or folders in their place, are unknown and no crash."""
    machine.in_cgroup("", "0", "0:", "0::", "x:memory", "4:memory:")
    machine.write("/proc/self/mountinfo", "\n1 2\n - \n1 2 3 4 5 - \n1 2 3 / /sys/fs/cgroup rw - cgroup2\n")
    machine.write("/sys/fs/cgroup/memory.max", "many\n")
    machine.write("/sys/fs/cgroup/memory.current", "\xff\n")
    (machine.root / "sys/fs/cgroup/memory.stat").mkdir()
    (machine.root / "proc/meminfo").mkdir()
    assert machine.cgroup is None


def test_filesystem(machine, monkeypatch):
    """The backend's folder says what is free in it; one mounted without a size limits nothing."""
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: {"/dev/shm": usage(64, 4, 60), "/big": usage(0, 0, 0)}[path])
    assert FreeMemory.measure("/dev/shm", machine.root).filesystem == 60
    assert FreeMemory.measure("/dev/shm", machine.root).directory == "/dev/shm"
    assert FreeMemory.measure("/big", machine.root).filesystem is None
    assert FreeMemory.measure(None, machine.root).filesystem is None


def test_v2_takes_the_tightest_of_the_chain(machine):
    """In v2 the headroom is limit - usage + inactive_file, and the minimum over the cgroup and its parents."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/job/step/task")
    machine.v2("/sys/fs/cgroup/job/step/task", 1000, 100, 50)
    machine.v2("/sys/fs/cgroup/job/step", "max", 400)
    machine.v2("/sys/fs/cgroup/job", 1200, 900, 25)
    machine.v2("/sys/fs/cgroup/other", 1, 1)
    assert machine.cgroup == 325
    machine.v2("/sys/fs/cgroup/job", "max", 900, 25)
    assert machine.cgroup == 950


def test_v1_takes_the_tightest_of_the_chain(machine):
    """In v1 the same, with total_inactive_file, from the line and the mount of the memory controller alone."""
    machine.mounted("/ /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu", MOUNT_V1)
    machine.in_cgroup("9:cpu:/elsewhere", "4:hugetlb,memory:/slurm/job_7", "0::/")
    machine.v1("/sys/fs/cgroup/cpu/slurm/job_7", 1, 1)
    machine.v1("/sys/fs/cgroup/memory", V1_UNLIMITED, 5000)
    machine.v1("/sys/fs/cgroup/memory/slurm", 1000, 800, 150)
    machine.v1("/sys/fs/cgroup/memory/slurm/job_7", 900, 100, 0)
    assert machine.cgroup == 350


@pytest.mark.parametrize("unlimited", [V1_UNLIMITED, 9223372036854710272, 2**63 - 1])
def test_v1_unlimited(machine, unlimited):
    """V1's huge number, whatever the page size, is no limit."""
    machine.mounted(MOUNT_V1)
    machine.in_cgroup("4:memory:/a")
    machine.v1("/sys/fs/cgroup/memory/a", unlimited, 100)
    assert machine.cgroup is None


@pytest.mark.parametrize(
    ("limit", "high", "usage", "inactive", "left"),
    [(1000, 300, 100, 0, 200), ("max", 700, 100, 0, 600), (100, "max", 500, 30, 0), (100, "max", 20, 5000, 100)],
)
def test_what_a_cgroup_leaves(machine, limit, high, usage, inactive, left):
    """In v2 memory.high limits as memory.max does. A limit below the usage leaves nothing, and reclaimable pages never
    make more than the limit."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/a")
    machine.v2("/sys/fs/cgroup/a", limit, usage, inactive, high)
    assert machine.cgroup == left


def test_both_versions(machine):
    """On a hybrid system both hierarchies are asked."""
    machine.mounted(MOUNT_V1, "/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw")
    machine.in_cgroup("4:memory:/a", "0::/b")
    machine.v1("/sys/fs/cgroup/memory/a", 1000, 100)
    assert machine.cgroup == 900
    machine.v2("/sys/fs/cgroup/unified/b", 500, 100)
    assert machine.cgroup == 400


def test_container_on_v1(machine):
    """A container's mount begins inside the hierarchy, at the start of the path that /proc/self/cgroup names."""
    machine.mounted("/docker/abc /sys/fs/cgroup/memory ro master:9 - cgroup cgroup rw,memory")
    machine.in_cgroup("4:memory:/docker/abc/inner")
    machine.v1("/sys/fs/cgroup/memory", 1000, 100)
    machine.v1("/sys/fs/cgroup/memory/inner", 500, 100)
    assert machine.cgroup == 400


@pytest.mark.parametrize("own", ["/kubepods/pod1/abc", "/../other", "/"])
@pytest.mark.parametrize("mount_root", ["/", "/../..", "/docker/abc"])
@pytest.mark.parametrize("version", [1, 2])
def test_path_that_the_mount_does_not_show(machine, own, mount_root, version):
    """In a cgroup namespace, where the named path is not below the mount, the mount's root speaks for it."""
    if version == 1:
        machine.mounted(f"{mount_root} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory")
        machine.in_cgroup(f"4:memory:{own}")
        machine.v1("/sys/fs/cgroup/memory", 1000, 100)
        machine.v1("/sys/fs/cgroup/other", 1, 1)
    else:
        machine.mounted(f"{mount_root} /sys/fs/cgroup ro - cgroup2 cgroup rw")
        machine.in_cgroup(f"0::{own}")
        machine.v2("/sys/fs/cgroup", 1000, 100)
        machine.v2("/sys/fs/other", 1, 1)
    assert machine.cgroup == 900


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("named", [True, False])
def test_usual_place_without_mountinfo(machine, version, named):
    """Without mountinfo the usual places are tried, with or without a path of one's own."""
    if version == 1:
        machine.v1("/sys/fs/cgroup/memory", 1000, 100)
        machine.v1("/sys/fs/cgroup/memory/a", 500, 100)
    else:
        machine.v2("/sys/fs/cgroup", 1000, 100)
        machine.v2("/sys/fs/cgroup/a", 500, 100)
    if named:
        machine.in_cgroup("4:memory:/a", "0::/a")
    assert machine.cgroup == (400 if named else 900)


def test_mount_that_shows_the_path_is_chosen(machine):
    """Of several mounts of one hierarchy the one that shows the cgroup counts; spaces in its place are read."""
    machine.mounted(
        "/docker/x /mnt/of\\040x rw - cgroup2 none rw",
        "/ /mnt/without rw - cgroup2 none rw",
        "/ /host\\040cgroup rw - cgroup2 none rw",
    )
    machine.in_cgroup("0::/job")
    machine.v2("/mnt/of x", 10, 0)
    machine.v2("/mnt/without", 10, 0)
    machine.v2("/host cgroup/job", 1000, 100)
    assert machine.cgroup == 900


def test_partly_missing_files(machine):
    """Without usage a limit says nothing; without statistics nothing counts as reclaimable."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/a/b")
    machine.write("/sys/fs/cgroup/a/b/memory.max", "10\n")
    machine.write("/sys/fs/cgroup/a/memory.max", "1000\n")
    machine.write("/sys/fs/cgroup/a/memory.current", "400\n")
    assert machine.cgroup == 600


@pytest.mark.parametrize("version", [1, 2])
def test_page_cache_in_use_counts_beyond_what_programs_need(machine, version):
    """A data file that is read again and again is dropped before anybody is killed; 256 MiB of libraries are left."""
    machine.mounted(MOUNT_V1 if version == 1 else MOUNT_V2)
    machine.in_cgroup("4:memory:/a" if version == 1 else "0::/a")
    prefix = "total_" if version == 1 else ""
    folder = "/sys/fs/cgroup/memory/a" if version == 1 else "/sys/fs/cgroup/a"
    (machine.v1 if version == 1 else machine.v2)(folder, 1000 * MIB, 900 * MIB)
    for active, room in ((200 * MIB, 110 * MIB), (300 * MIB, 154 * MIB)):
        machine.write(f"{folder}/memory.stat", f"{prefix}inactive_file {10 * MIB}\n{prefix}active_file {active}\n")
        assert machine.cgroup == room


def test_a_gauge_finds_its_files_once(machine):
    """Each reading gives the numbers of now, a limit that was changed included, of the cgroups that it found."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/a")
    machine.v2("/sys/fs/cgroup/a", 1000, 100)
    machine.v2("/sys/fs/cgroup/b", 10, 0)
    machine.write("/proc/meminfo", "MemAvailable:     2048 kB\n")
    gauge = MemoryGauge(machine.root)
    assert gauge.read().memory == (900, "the cgroup's memory limit")
    machine.in_cgroup("0::/b")
    machine.v2("/sys/fs/cgroup/a", 2000, 500)
    assert gauge.read().memory == (1500, "the cgroup's memory limit")
    machine.v2("/sys/fs/cgroup/a", "max", 500)
    assert gauge.read().memory == (2 * MIB, "MemAvailable")


def test_what_this_process_holds(machine):
    """The pages that are its own, without those of files and of shared memory."""
    machine.write("/proc/self/status", "VmRSS:\t  900 kB\nRssAnon:\t  300 kB\nRssFile:\t  600 kB\n")
    assert FreeMemory.measure(None, machine.root).own == 300 * KIB


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_this_machine():
    """On this machine something is free, and no more than the machine has."""
    free = FreeMemory.measure("/dev/shm")
    assert 0 < free.bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("free", "size", "words"),
    [
        (FreeMemory(64 * MIB, GIB, 2 * GIB, "/dev/shm"), 64 * MIB, "/dev/shm"),
        (FreeMemory(64 * MIB, 32 * MIB, None, "/dev/shm"), 32 * MIB, "MemAvailable"),
        (FreeMemory(None, 3 * GIB, 2 * GIB), 2 * GIB, "the cgroup's memory limit"),
        (FreeMemory(0, 3 * GIB, 2 * GIB), 0, "the filesystem"),
    ],
)
def test_tightest_limit(free, size, words):
    """What is free is the smallest limit that is known, and it is named."""
    assert free.bytes == size
    assert free.limited_by == words

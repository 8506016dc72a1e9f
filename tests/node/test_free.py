"""Free is what filesystem, machine and cgroups all allow; what cannot be read is unknown."""

import os
import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from lightning_stocache.node.free import FreeMemory

KIB, MIB, GIB = 2**10, 2**20, 2**30


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
    """MemAvailable is read in KiB, not MemFree; `own` is the process's anonymous memory. On macOS half of the memory
    counts as free. Without its size the free memory is unknown, and nothing is safe."""
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

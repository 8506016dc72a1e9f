"""Budgets are read or refused in words; free is what filesystem, machine and cgroups all allow; a grant stays below."""

from __future__ import annotations

import math
import os
import pickle
import shutil
import subprocess
import sys
from collections import namedtuple
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.node.budget import Budget, FreeMemory, Grant, format_bytes, grant, loader_reserve

KIB, MIB, GIB = 2**10, 2**20, 2**30
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
BIG = 10**18
V1_UNLIMITED = 9223372036854771712


def bytes_of(value: int | float | str | Budget) -> int:
    return Budget.parse(value).wanted(BIG, BIG)


# --- reading a budget


@given(
    number=st.decimals(0, 10**6, places=3),
    unit=st.sampled_from(sorted(UNITS)),
    recase=st.sampled_from([str, str.lower, str.upper, str.swapcase]),
    gap=st.sampled_from(["", " ", "  "]),
)
def test_amount_with_unit(number, unit, recase, gap):
    """A number and a unit are that many bytes, rounded down, in any case and with or without a space."""
    assert bytes_of(f" {number}{gap}{recase(unit)} ") == math.floor(Fraction(number) * UNITS[unit])


@given(st.integers(0, 2**60))
def test_whole_bytes(n):
    """A whole number is bytes, as an int, as its digits and as NumPy's integer."""
    assert bytes_of(n) == bytes_of(str(n)) == bytes_of(np.int64(n)) == n


@given(st.integers(2, 2**53))
def test_integral_float(n):
    """An integral float above 1 is bytes, as Hydra reads 8e9, and as text too."""
    assert bytes_of(float(n)) == bytes_of(f"{n}.0") == n
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


def test_auto():
    """Auto is the whole dataset, however much is free."""
    assert Budget.parse("auto").wanted(123, 5) == Budget.parse(" AUTO ").wanted(123, 5) == 123
    assert Budget.parse("auto") == Budget.parse("100%")


@pytest.mark.parametrize("value", [0, 0.0, -0.0, "0", "0.0", "0%", "0 % of free", "0GiB", " 0 "])
def test_off(value):
    """Every way to write zero is off, and all of them are equal."""
    budget = Budget.parse(value)
    assert budget.off
    assert budget == Budget.parse(0)
    assert budget.wanted(BIG, BIG) == 0


@pytest.mark.parametrize("value", [1, "1", "auto", "1%", "0.1% of free", "1B"])
def test_not_off(value):
    """Whatever asks for something is not off."""
    assert not Budget.parse(value).off


@pytest.mark.parametrize("value", ["60%", "60% of free", "auto"])
def test_wanted_is_never_negative(value):
    """Less than nothing free, or an impossible dataset, wants nothing."""
    assert Budget.parse(value).wanted(-100, -100) == 0


@given(
    st.one_of(
        st.integers(0, 2**70),
        st.floats(2, 1e308).map(math.floor).map(float),
        st.builds("{}{}".format, st.decimals(0, 10**6, places=3), st.sampled_from([*UNITS, "MiB", "GiB"])),
        st.builds("{:f}%{}".format, st.decimals(0, 100, places=9), st.sampled_from(["", " of free"])),
        st.just("auto"),
    )
)
def test_str_reads_back(value):
    """A budget's text is read back as an equal budget."""
    budget = Budget.parse(value)
    assert Budget.parse(str(budget)) == budget


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("8gib", "8 GiB"),
        ("500 mb", "500 MB"),
        (8e9, "8 GB"),
        (4097, "4097 B"),
        ("1.5TiB", "1536 GiB"),
        ("60.0%", "60%"),
        ("33.3 % OF FREE", "33.3% of free"),
        ("100%", "auto"),
        ("0%", "0"),
    ],
)
def test_str_is_readable(value, text):
    """A budget's text uses the largest unit that divides it."""
    assert str(Budget.parse(value)) == text


def test_parse_of_a_budget():
    """A budget that was read already is itself, and survives a pickle."""
    budget = Budget.parse("60% of free")
    assert Budget.parse(budget) is budget
    assert pickle.loads(pickle.dumps(budget)) == budget


REFUSED = [
    (-1, "must not be negative"),
    (-0.5, "must not be negative"),
    (-8e9, "must not be negative"),
    ("-1", "must not be negative"),
    ("-8GiB", "must not be negative"),
    ("-5%", "must not be negative"),
    (float("nan"), "must be finite"),
    (float("inf"), "must be finite"),
    (float("-inf"), "must be finite"),
    (0.5, "could mean a share or bytes"),
    (1.0, "could mean a share or bytes"),
    ("0.5", "could mean a share or bytes"),
    ("1.0", "could mean a share or bytes"),
    (2.5, "whole number of bytes"),
    ("2.5", "whole number of bytes"),
    ("150%", "more than 100 percent"),
    ("100.001%", "more than 100 percent"),
    ("150% of free", "more than 100 percent"),
]
UNREADABLE = [
    "",
    " ",
    "lots",
    "nan",
    "inf",
    "None",
    "GiB",
    "%",
    "8 apples",
    "8G",
    "8ib",
    "8GiB 2",
    "1_000",
    "8,5GB",
    "0x10",
]
UNREADABLE += ["60% free", "60% of", "of free", "auto 5", "1.2.3GB", "+5", "1e999999999", "8\u212aB", "\u0668GB"]


@pytest.mark.parametrize(("value", "rule"), [*REFUSED, *((text, "cannot be read") for text in UNREADABLE)])
def test_refused(value, rule):
    """What is no budget is refused by an error with the rule, the value and every accepted form."""
    with pytest.raises(ValueError, match=rule) as caught:
        Budget.parse(value)
    message = str(caught.value)
    assert repr(value) in message
    assert all(
        form in message for form in ('"8GiB"', '"500MB"', '"60%"', '"60% of free"', '"auto"', "bytes", "0 (off)")
    )


@pytest.mark.parametrize("value", [None, True, False, np.True_, [1], {}, b"8GiB", 1j, object()])
def test_wrong_type(value):
    """What is no number and no string is refused as a type, with value and forms too."""
    with pytest.raises(TypeError, match="must be a number or a string") as caught:
        Budget.parse(value)
    assert repr(value) in str(caught.value)
    assert '"60% of free"' in str(caught.value)


def test_share_is_suggested():
    """A float that looks like a share is answered with the percentage to write."""
    with pytest.raises(ValueError, match='write "50%" for the share'):
        Budget.parse(0.5)


@given(st.text(max_size=12) | st.from_regex(r"[-+]?[0-9.]{0,5} ?([kmgt]?i?b|%|% of free|e[0-9]{0,4})?", fullmatch=True))
def test_any_text_is_read_or_refused(text):
    """Any text is a budget or a ValueError, nothing else."""
    try:
        budget = Budget.parse(text)
    except ValueError:
        return
    assert budget.wanted(1000, 1000) >= 0


def test_budget_checks_itself():
    """A budget cannot be built with an amount that means nothing."""
    with pytest.raises(ValueError, match="negative"):
        Budget(Fraction(-1))
    with pytest.raises(ValueError, match="whole"):
        Budget(Fraction(1, 2))
    with pytest.raises(ValueError, match="100 percent"):
        Budget(Fraction(101), "% of free")


# --- what is free


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
    assert free.bytes == 0
    assert "cannot be measured" in free.limited_by
    assert grant(Budget.parse("auto"), GIB, free, 0).bytes == 0


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


def test_v2_throttling_counts(machine):
    """In v2 memory.high limits as memory.max does."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/job")
    machine.v2("/sys/fs/cgroup/job", 1000, 100, high=300)
    assert machine.cgroup == 200
    machine.v2("/sys/fs/cgroup/job", "max", 100, high=700)
    assert machine.cgroup == 600


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


def test_headroom_stays_within_its_bounds(machine):
    """A limit set below the usage leaves nothing, and reclaimable pages never make more than the limit."""
    machine.mounted(MOUNT_V2)
    machine.in_cgroup("0::/a")
    machine.v2("/sys/fs/cgroup/a", 100, 500, 30)
    assert machine.cgroup == 0
    machine.v2("/sys/fs/cgroup/a", 100, 20, 5000)
    assert machine.cgroup == 100


@pytest.mark.skipif(not os.path.isdir("/dev/shm"), reason="needs /dev/shm")
def test_this_machine():
    """On this machine something is free, and no more than the machine has."""
    free = FreeMemory.measure("/dev/shm")
    assert 0 < free.bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    ("free", "size", "words"),
    [
        (FreeMemory(64 * MIB, GIB, 2 * GIB, "/dev/shm"), 64 * MIB, "/dev/shm (64 MiB free)"),
        (FreeMemory(64 * MIB, 32 * MIB, None, "/dev/shm"), 32 * MIB, "MemAvailable (32 MiB free)"),
        (FreeMemory(None, 3 * GIB, 2 * GIB), 2 * GIB, "the cgroup's memory limit (2 GiB free)"),
        (FreeMemory(0, 3 * GIB, 2 * GIB), 0, "the filesystem (0 B free)"),
    ],
)
def test_tightest_limit(free, size, words):
    """What is free is the smallest limit that is known, and it is named."""
    assert free.bytes == size
    assert free.limited_by == words


# --- the grant


def test_grant_of_what_is_asked():
    """With enough memory a budget gets what it asks for and nothing limits it."""
    free = FreeMemory(32 * GIB, 32 * GIB, None, "/dev/shm")
    assert grant(Budget.parse("8GiB"), 20 * GIB, free, GIB) == Grant(8 * GIB, 8 * GIB, None)


def test_grant_never_exceeds_the_dataset():
    """A budget larger than the dataset gets the dataset, which is no shortage."""
    free = FreeMemory(32 * GIB, 32 * GIB, None, "/dev/shm")
    assert grant(Budget.parse("8GiB"), GIB, free, 0) == Grant(GIB, 8 * GIB, None)
    assert grant(Budget.parse("8GiB"), GIB, FreeMemory(4 * GIB, None, None), 0) == Grant(GIB, 8 * GIB, None)


def test_grant_in_a_small_dev_shm():
    """In Docker's 64 MiB /dev/shm the reserve and 16 MiB are kept back, and the shortage is named."""
    free = FreeMemory(64 * MIB, 32 * GIB, None, "/dev/shm")
    assert grant(Budget.parse("auto"), GIB, free, 8 * MIB) == Grant(40 * MIB, GIB, "/dev/shm (64 MiB free)")


def test_grant_below_a_cgroup():
    """Below a cgroup's limit two percent are kept back."""
    free = FreeMemory(None, 500 * GIB, 100 * GIB)
    given_bytes = grant(Budget.parse("auto"), 400 * GIB, free, 0).bytes
    assert given_bytes == 98 * GIB


def test_grant_of_a_share_of_free():
    """A share of free memory is a share of what is left after reserve and margin, so nothing limits it."""
    free = FreeMemory(None, 100 * GIB, None)
    assert grant(Budget.parse("50% of free"), 400 * GIB, free, 8 * GIB) == Grant(45 * GIB, 45 * GIB, None)


@given(
    budget=st.one_of(
        st.integers(0, 2**45), st.sampled_from(["auto", "60%", "60% of free", "100% of free", "8GiB", "0"])
    ).map(Budget.parse),
    dataset=st.integers(0, 2**45),
    limits=st.tuples(*[st.none() | st.integers(0, 2**45)] * 3),
    reserve=st.integers(0, 2**40),
)
def test_grant_is_within_every_bound(budget, dataset, limits, reserve):
    """A grant is never negative or above wish, dataset and safely free memory, and it says when memory was short."""
    free = FreeMemory(*limits)
    given_ = grant(budget, dataset, free, reserve)
    assert 0 <= given_.bytes <= min(given_.wanted, dataset)
    assert all(given_.bytes == 0 or given_.bytes <= limit - reserve - 16 * MIB for limit in limits if limit is not None)
    assert (given_.limited_by is not None) == (given_.bytes < min(given_.wanted, dataset))


@pytest.mark.parametrize(
    ("num_workers", "prefetch_factor", "ranks", "batches"),
    [(0, None, 1, 3), (0, None, 4, 12), (4, None, 1, 11), (4, 2, 1, 11), (4, 5, 2, 46), (4, 2, 0, 0)],
)
def test_loader_reserve(num_workers, prefetch_factor, ranks, batches):
    """The reserve counts what workers make ahead and three batches more, for each rank."""
    assert loader_reserve(1000, num_workers, prefetch_factor, ranks) == batches * 1000


# --- words


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1 KiB"),
        (1536, "1.5 KiB"),
        (MIB - 1, "1 MiB"),
        (64 * MIB, "64 MiB"),
        (1_825_361_100, "1.7 GiB"),
        (3 * 2**40, "3 TiB"),
        (2**51, "2048 TiB"),
        (-1536, "-1.5 KiB"),
    ],
)
def test_format_bytes(n, text):
    """Bytes are written with the unit that keeps the number below 1024, and one decimal where it says something."""
    assert format_bytes(n) == text


def test_imports_only_the_standard_library():
    """Reading a budget costs no import of torch or NumPy."""
    code = "import sys, lightning_stocache.node.budget; print({'torch', 'numpy', 'lightning'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"

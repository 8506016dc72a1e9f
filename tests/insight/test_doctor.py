"""The doctor: its findings about a machine, and the processes that hold memory."""

import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_stocache.cache.contents import Contents, contents_of
from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.insight import doctor
from lightning_stocache.insight.doctor import Finding, as_text, examine, shared_memory
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.free import FreeMemory
from lightning_stocache.node.open_files import Promised, open_files
from lightning_stocache.node.segment import Segment
from tests.jobs import refused, said, write_files
from tests.sources import CountedSource

pytestmark = pytest.mark.named

MIB, GIB = 2**20, 2**30


def words_of(findings: list[Finding], topic: str) -> str:
    return " ".join(f"{one.words} {one.fix}" for one in findings if one.topic == topic)


def test_dev_shm_gets_a_fix_if_it_is_small_or_full():
    """64 MiB are Docker's default, with the option and the Kubernetes volume that enlarge it; enough needs no fix."""
    for size, free, words in (
        (64 * MIB, 60 * MIB, ["Docker's default", "--shm-size=16g", "emptyDir: {medium: Memory, sizeLimit: 16Gi}"]),
        (GIB, GIB, ["little beside 32 GiB of RAM", "remount,size=16G"]),
        (32 * GIB // 10, GIB, []),  # a tenth of the memory is enough
        (16 * GIB, GIB, ["nearly full", "clean removes unused named caches"]),
        (16 * GIB, 15 * GIB, []),
        (0, 0, []),
    ):
        found = shared_memory(size, free, 32 * GIB)
        assert all(word in found.words + found.fix for word in words)
        assert bool(found.fix) == bool(words)


def test_the_cgroup_is_read_where_it_lies(tmp_path, monkeypatch):
    """Limits are those of this process's cgroup and its parents; a process that may not be looked into is counted."""
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        "proc/7/fd/0": "",
        "sys/fs/cgroup/jobs/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    }
    write_files(tmp_path, files)
    findings = examine(tmp_path)
    assert "limit 2 GiB, of which 1 GiB" in words_of(findings, "cgroup")
    assert "--memory" in words_of(findings, "cgroup")
    assert "16 GiB available" in words_of(findings, "RAM")
    listdir = os.listdir

    def guarded(path):
        if Path(path).name == "fd":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", guarded)
    assert open_files(tmp_path) == ([], 1)


def test_what_cannot_be_seen_is_sentences(monkeypatch, tmp_path, capsys):
    """Without /proc, /sys or /dev/shm all other findings are there. On Windows it is one sentence, with code 2."""
    for folder in ("sys", "proc"):
        (tmp_path / folder).mkdir()
        findings = examine(tmp_path)
        assert "cannot be seen" in words_of(findings, "held")
        assert "torch" in words_of(findings, "versions")
    isdir = os.path.isdir
    with monkeypatch.context() as patch:
        patch.setattr(doctor.os.path, "isdir", lambda path: path != "/dev/shm" and isdir(path))
        patch.setattr(doctor, "memory_directory", lambda: str(tmp_path))
        assert str(tmp_path) in words_of(examine(), "/dev/shm")
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    assert refused(capsys, "doctor").count("\n") == 1


def test_the_verdict_comes_first_then_what_is_to_be_mended(monkeypatch, capsys):
    """Each fix stands below what it mends, then comes everything else; lines fit a terminal, options are not cut."""
    with closing(Segment.create(8 * MIB)):
        text = said(capsys, "doctor")
    text += as_text([Finding("Room for a cache", "much."), shared_memory(64 * MIB, 60 * MIB, 32 * GIB)])
    assert max(map(len, text.splitlines())) <= 80
    assert "--shm-size=16g" in text
    findings = [Finding("Room for a cache", "1 GiB."), Finding("a", "good."), Finding("b", "bad.", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda directories: findings)
    assert said(capsys, "doctor") == (
        "Room for a cache: 1 GiB.\n\n1 to mend\n  b: bad.\n      fix: mend it\n\ndetails\n  a: good.\n"
    )


@pytest.mark.parametrize("backend", ["tmpfile", "memfd", "file"])
def test_segments_are_found_with_their_holders(backend):
    """Of any kind, with what they hold; lock files, and files that root has given to another user, are not."""
    segment = Segment.create(8 * MIB, backend)
    segment.reserve(0, MIB)

    def mine():
        return [found for found in open_files(look=contents_of)[0] if found.key[1] == segment.handle.inode]

    [found] = mine()
    assert found.contents == Contents(None, "does not say what it holds")
    assert MIB <= found.allocated_bytes < 2 * MIB
    assert os.getpid() in [process.pid for process in found.processes]
    assert "python" in found.processes[0].command
    if os.getuid() == 0 and backend != "file":  # whose handle is a path
        os.fchown(int(segment.handle.path.rpartition("/")[2]), 12345, 12345)
        assert mine() == []
    segment.close()
    assert not [file for file in open_files()[0] if file.key == found.key]


def test_the_node_of_each_cache_is_told():
    """The finding of a living cache has its dataset, its node, and the number of filled slots."""
    spec, whose = SampleSpec.infer(torch.zeros(3)), {"dataset": "Photos (100 samples)", "node": 1, "nodes": 2}
    with (
        closing(Store.create(spec, Arc(size=100, slots=40, start=60, step=7), whose=whose)) as cache,
        closing(Store.create(spec, Arc(9, 9))),
        closing(Counters.create()),
    ):
        for index in range(10):
            cache.fill(index, torch.ones(3))
        findings = examine()
        assert 0 < cache.filled < 10
        expected = f"{cache.filled} of 40 slots filled (node 1 of 2)"
    words = words_of(findings, "held")
    assert f"of Photos (100 samples), {expected}: {os.getpid()}" in words
    assert "of a dataset without a name, 0 of 9 slots filled: " in words
    # Other jobs on this machine may have open caches, too.
    [of_counters] = [found.words for found in findings if "of counters or batches of a cache: " in found.words]
    assert re.search(rf"\b{os.getpid()}\b", of_counters)


@pytest.mark.processes
def test_the_verdict_is_what_a_cache_gets(small_shm):
    """With Docker's 64 MiB of /dev/shm a cache takes a memfd, and the doctor says so; one with a name does not."""
    words, slots, named_slots = small_shm(verdict_and_caches)
    assert "It lies in a memfd, because /dev/shm has less room" in words
    found = re.fullmatch(r"(\S+ \S+) \(limit: (?!/dev/shm).* may take (\S+ \S+) \(limit: /dev/shm\)\.", words)
    granted, named = found.groups()
    assert slots * MIB == 140 * MIB < bytes_of(granted)
    assert 0 <= bytes_of(named) - named_slots * MIB <= MIB


def test_promises_to_other_jobs_are_named_as_the_limit(monkeypatch):
    """What their caches may still take is the reason, where it is: of the memory, or of /dev/shm."""
    for promised, words in (
        (Promised(3 * GIB, 3 * GIB, 0), "limit: free RAM, of which caches of other jobs may take 3 GiB)"),
        (Promised(0, 0, 5 * GIB), "limit: /dev/shm, of which caches of other jobs may take 5 GiB)"),
        (Promised(), "limit: free RAM)"),
    ):
        free = FreeMemory(9 * GIB, 8 * GIB, None, "/dev/shm", promised=promised)
        with monkeypatch.context() as patch:
            patch.setattr(FreeMemory, "measure", lambda directory, *_, free=free: free)
            patch.setattr(doctor, "largest_grant", lambda *_, **__: (GIB, None))
            assert words in doctor.examine()[0].words


@pytest.mark.parametrize(
    ("directory", "words", "fix"),
    [
        ("{0}/none", "does not exist", "mkdir -p "),
        ("{0}/file", "is no directory", "give a directory"),
        ("", "is no directory", "give a directory"),
        ("/proc", "cannot hold a cache: its filesystem", "give a directory"),
    ],
)
def test_a_directory_that_holds_no_cache_has_a_fix_that_helps(tmp_path, directory, words, fix):
    """A file cannot be made a directory, nor a filesystem of the kernel another one."""
    (tmp_path / "file").write_text("")
    [found] = [each for each in examine(directories=[directory.format(tmp_path)]) if each.topic.startswith("disk")]
    assert words in found.words
    assert found.fix.startswith(fix)


def verdict_and_caches():
    """What the doctor says, and the slots that two caches of 140 MiB get, without a name and with one."""
    source, spec = CountedSource(140, (MIB,)), SampleSpec.infer(torch.zeros(MIB, dtype=torch.uint8))
    with (
        closing(CachedDataset(source, spec=spec)) as cache,
        closing(CachedDataset(source, spec=spec, name="doctor")) as named,
    ):
        slots = len(cache.cache), len(named.cache)
    return examine()[0].words, *slots


def bytes_of(text):
    number, unit = text.split()
    return float(number) * {"MiB": MIB, "GiB": GIB}[unit]

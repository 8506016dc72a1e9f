"""The doctor: its findings about a machine, and the processes that hold memory."""

import os
import re
from contextlib import closing
from pathlib import Path

import pytest
import torch

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.layout import Contents, contents_of
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.insight import doctor
from lightning_stocache.insight.doctor import Finding, as_text, examine, shared_memory
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.node.open_files import open_files
from lightning_stocache.node.segment import Segment
from tests.commands import refused, said, write_files
from tests.processes import without_room
from tests.sources import CountedSource

pytestmark = pytest.mark.named

MIB, GIB = 2**20, 2**30


def words_of(findings: list[Finding], topic: str) -> str:
    return " ".join(f"{one.words} {one.fix}" for one in findings if one.topic == topic)


@pytest.mark.parametrize(
    ("size", "free", "words"),
    [
        (64 * MIB, 60 * MIB, ["Docker's default", "--shm-size=16g", "emptyDir: {medium: Memory, sizeLimit: 16Gi}"]),
        (GIB, GIB, ["little beside 32 GiB of RAM", "remount,size=16G"]),
        (16 * GIB, GIB, ["nearly full", "clean removes unused named caches"]),
        (16 * GIB, 15 * GIB, []),
        (0, 0, []),
    ],
)
def test_dev_shm_gets_a_fix_if_it_is_small_or_full(size, free, words):
    """64 MiB are Docker's default, with the option and the Kubernetes volume that enlarge it; enough needs no fix."""
    found = shared_memory(size, free, 32 * GIB)
    assert all(word in found.words + found.fix for word in words)
    assert bool(found.fix) == bool(words)


def test_the_cgroup_is_read_where_it_lies(tmp_path):
    """Limit and headroom are those of this process's cgroup and its parents; a tight one has a fix."""
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable: 16777216 kB\n",
        "sys/fs/cgroup/jobs/memory.max": f"{2 * GIB}\n",
        "sys/fs/cgroup/jobs/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/jobs/mine/memory.max": "max\n",
    }
    write_files(tmp_path, files)
    findings = examine(tmp_path)
    assert "limit 2 GiB, of which 1 GiB" in words_of(findings, "cgroup")
    assert "--memory" in words_of(findings, "cgroup")
    assert "16 GiB available" in words_of(findings, "RAM")


def test_a_machine_without_proc_is_sentences(tmp_path):
    """Without /proc and /sys (macOS) all other findings are there, and nothing raises."""
    findings = examine(tmp_path)
    assert "cannot be seen" in words_of(findings, "held")
    assert "torch" in words_of(findings, "versions")
    (tmp_path / "proc").mkdir()  # of a container that hides its processes
    assert "cannot be seen" in words_of(examine(tmp_path), "held")


def test_a_machine_without_dev_shm_is_a_sentence(monkeypatch, tmp_path):
    """Where there is no /dev/shm, the folder that takes its place is named."""
    isdir = os.path.isdir
    monkeypatch.setattr(doctor.os.path, "isdir", lambda path: path != "/dev/shm" and isdir(path))
    monkeypatch.setattr(doctor, "memory_directory", lambda: str(tmp_path))
    assert str(tmp_path) in words_of(examine(), "/dev/shm")


def test_lines_fit_a_terminal(capsys):
    """Long commands of processes and long fixes are wrapped; options are not cut in two."""
    with closing(Segment.create(8 * MIB)):
        text = said(capsys, "doctor")
    text += as_text([Finding("a cache", "may."), shared_memory(64 * MIB, 60 * MIB, 32 * GIB)])
    assert max(map(len, text.splitlines())) <= 80
    assert "--shm-size=16g" in text


def test_windows_is_a_sentence_and_code_2(monkeypatch, capsys):
    """Where nothing can be shared the doctor says so, with exit code 2 and no traceback."""
    monkeypatch.setattr(doctor.sys, "platform", "win32")
    assert refused(capsys, "doctor").count("\n") == 1


@pytest.mark.parametrize("backend", ["tmpfile", "memfd", "file"])
def test_segments_are_found_with_their_holders(backend):
    """A segment of any kind is found in the process that has it open, with what it holds; lock files are not."""
    segment = Segment.create(8 * MIB, backend)
    segment.reserve(0, MIB)
    mine = [one for one in open_files(look=contents_of)[0] if os.getpid() in [process.pid for process in one.processes]]
    [found] = [one for one in mine if one.key[1] == segment.handle.inode]
    assert found.contents == Contents(None, "does not say what it holds")
    assert MIB <= found.allocated_bytes < 2 * MIB
    assert "python" in found.processes[0].command
    segment.close()
    assert not [one for one in open_files()[0] if one.key == found.key]


def test_the_node_of_each_cache_is_told():
    """The finding of a living cache has its dataset, its node, and the number of filled slots."""
    spec = SampleSpec.infer(torch.zeros(3))
    arc = Arc(size=100, slots=40, start=60, step=7)
    cache = Store.create(spec, arc, whose={"dataset": "Photos (100 samples)", "node": 1, "nodes": 2})
    alone = Store.create(spec, Arc(9, 9))
    counters = Counters.create()
    for index in range(10):
        cache.fill(index, torch.ones(3))
    words = words_of(examine(), "held")
    assert 0 < cache.filled < 10
    expected = f"{cache.filled} of 40 slots filled (node 1 of 2)"
    assert f"of Photos (100 samples), {expected}: {os.getpid()}" in words
    assert "of a dataset without a name, 0 of 9 slots filled: " in words
    assert f"of counters or batches of a cache: {os.getpid()}" in words
    for opened in (cache, alone, counters):
        opened.close()


def test_processes_of_others_are_counted(tmp_path, monkeypatch):
    """A process whose descriptors may not be listed is counted, not passed over in silence."""
    (tmp_path / "proc/7/fd").mkdir(parents=True)
    listdir = os.listdir

    def guarded(path):
        if Path(path).name == "fd":
            raise PermissionError(13, "Permission denied")
        return listdir(path)

    monkeypatch.setattr(os, "listdir", guarded)
    assert open_files(tmp_path) == ([], 1)


def test_the_verdict_comes_first_then_what_is_to_be_mended(monkeypatch, capsys):
    """The command prints the verdict, then what has a fix with its fix below it, then everything else."""
    findings = [Finding("a cache", "may take 1 GiB."), Finding("a", "good."), Finding("b", "bad.", "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda directories: findings)
    assert said(capsys, "doctor") == (
        "a cache may take 1 GiB.\n\n1 to mend\n  b: bad.\n      fix: mend it\n\ndetails\n  a: good.\n"
    )


@pytest.mark.processes
def test_the_verdict_is_what_a_cache_gets():
    """With Docker's 64 MiB of /dev/shm a cache takes a memfd, and the doctor says so; one with a name does not."""
    words, slots, named_slots, sample = without_room(verdict_and_caches)
    assert "It lies in a memfd, because /dev/shm has less room" in words
    granted, named = re.fullmatch(r"may take (.*?) here, limited by (?!/dev/shm).* may take (.*)\.", words).groups()
    assert slots * sample == 140 * MIB < bytes_of(granted)
    assert 0 <= bytes_of(named) - named_slots * sample <= MIB


def verdict_and_caches():
    """What the doctor says, and the slots that two caches of 140 MiB get, without a name and with one."""
    source = CountedSource(140, (MIB,))
    spec = SampleSpec.infer(torch.zeros(MIB, dtype=torch.uint8))
    cache, named = CachedDataset(source, spec=spec), CachedDataset(source, spec=spec, name="doctor")
    slots = len(cache.cache), len(named.cache)
    cache.close()
    named.close()
    return examine()[0].words, *slots, MIB


def bytes_of(text):
    number, unit = text.split()
    return float(number) * {"MiB": MIB, "GiB": GIB}[unit]


def test_files_of_other_users_are_left_out():
    """Root sees every process, and the doctor tells of the user's own files."""
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    segment = Segment.create(4096)
    data = int(segment.handle.data.rpartition("/")[2])
    os.fchown(data, 12345, 12345)
    assert not [file for file in open_files()[0] if file.key[1] == segment.handle.inode]
    segment.close()

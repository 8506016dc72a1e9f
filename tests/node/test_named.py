"""A named segment outlives its job: whoever can see it can use it, and nobody loses it while it is used.

Only what is certainly this user's own is opened, and a header is read as it was written.
"""

import json
import os
import random
import signal
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache.contents import contents_of
from lightning_stocache.node import locks, named
from lightning_stocache.node.files import (
    FORMAT,
    HEADER_BYTES,
    MANIFEST_OFFSET,
    Geometry,
    Manifest,
    ManifestError,
    make_file,
    open_own,
    prefix,
    read_manifest,
    write_header,
)
from lightning_stocache.node.named import check_name, clean, join_named, named_segments, open_named
from lightning_stocache.node.segment import Segment
from tests.odds import stop
from tests.processes import Child, descendants, hanging, idle_worker, path_of, wait_until

pytestmark = pytest.mark.named

SIZE = 4096
GOOD = Manifest(
    Geometry(size=1000, slots=400, start=600, step=7),
    dataset="Photos (1,000 samples, train)",
    node=1,
    nodes=2,
    budget="8 GiB",
    fingerprint={"dataset": "photos.Photos", "length": 1000, "fingerprint": "é"},
)


def opened(name: str, dataset: str = "") -> Segment:
    return open_named(name, SIZE, Manifest(Geometry(10, 10), dataset))[0]


# --- make, join, remove


def test_a_name_leads_to_the_same_memory_after_its_maker_has_gone(name: str) -> None:
    """The next job finds the bytes and the manifest of the first."""
    assert join_named(name) is None  # nobody has made it
    segment = opened(name, "the first")
    segment.store(0, memoryview(b"a"))
    segment.close()
    first, manifest = open_named(name, 10 * SIZE, Manifest(Geometry(10, 10), "another"))
    assert (bytes(first.memory(0, 1)), first.size, manifest.dataset) == (b"a", SIZE, "the first")
    second, manifest = join_named(name) or pytest.fail("it is there")
    assert (second.token, manifest.dataset) == (first.token, "the first")
    first.close()
    assert bytes(second.memory(0, 1)) == b"a"
    second.close()


def test_clean_leaves_what_is_in_use(name: str) -> None:
    """An unused segment is removed. The list tells which segments are in use, or damaged."""
    segment = opened(name, "a")
    assert clean(name) == []
    [found] = [one for one in named_segments(contents_of) if one.name == name]
    assert (found.in_use, found.contents.manifest.dataset, found.allocated_bytes) == (True, "a", HEADER_BYTES)
    states = [2, 0, 2, *[0] * 7]
    segment.store(0, memoryview(struct.pack("10I", *states) + b"\2"))  # states, and a sample
    assert [one.contents.filled for one in named_segments(contents_of) if one.name == name] == [2]
    segment.close()
    with path_of(name).open("r+b") as file:  # what is damaged is listed and removed, too
        file.seek(64)
        file.write(b"\xff" * 100)
    [found] = [one for one in named_segments(contents_of) if one.name == name]
    assert (found.in_use, found.contents.manifest) == (False, None)
    assert found.contents.damage.startswith("is damaged")
    assert [one.name for one in clean(name)] == [name]
    assert not path_of(name).exists()
    assert clean(name) == []


def test_a_list_keeps_no_job_from_repairing(name: str, tmp_path: Path) -> None:
    """A job that opens a cache while others list it, or wait to open it, repairs it all the same, and alone."""
    open_named(name, SIZE, GOOD, str(tmp_path))[0].close()
    repaired: list[Segment] = []
    joined = list[Any]()

    def mend(segment: Segment, _: Manifest) -> None:
        assert [found.in_use for found in named_segments(directory=str(tmp_path))] == [True]
        assert clean(name, str(tmp_path)) == []
        joined.append(threads.submit(join_named, name, str(tmp_path), mend))
        time.sleep(0.05)  # the other job waits
        repaired.append(segment)

    with ThreadPoolExecutor() as threads:
        segment, _ = join_named(name, str(tmp_path), mend) or pytest.fail("it is there")
        second, _ = joined.pop().result() or pytest.fail("it is there")
    segment.close(), second.close()
    assert repaired == [segment]


# --- bad luck


@pytest.mark.processes
def test_nobody_waits_for_ever_for_who_is_stopped_while_opening(name: str, stopped: Any, tmp_path: Path) -> None:
    """Whether the file is whole is unknown meanwhile: it is not opened, and not removed."""
    where = str(tmp_path)
    open_named(name, SIZE, GOOD, where)[0].close()
    holder = stopped(lambda: join_named(name, where, lambda segment, manifest: stop()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(named, "_PATIENCE", 0.05)
        with pytest.raises(ManifestError, match=r"another process has been opening it.*clean"):
            join_named(name, where)
    assert clean(name, where) == []
    holder.kill()
    mended: list[Segment] = []
    segment, _ = join_named(name, where, lambda segment, _: mended.append(segment)) or pytest.fail("it is there")
    segment.close()
    assert mended == [segment]


@pytest.mark.parametrize("content", [b"", bytes(HEADER_BYTES), b"x"])
def test_what_a_killed_maker_has_left_is_removed(name: str, content: bytes, tmp_path: Path) -> None:
    """A file without any content, unless its maker may still be at work; with any, it is left alone."""
    path = tmp_path / f"{prefix()}abc_123"
    path.touch(0o600)
    path.write_bytes(content)
    assert clean(directory=str(tmp_path)) == []
    assert path.exists()
    os.utime(path, (0, 0))
    with path.open("r+b") as used:
        locks.share_use(used.fileno())
        clean(directory=str(tmp_path))
        assert path.exists()
    assert clean(directory=str(tmp_path)) == []
    assert path.exists() == bool(content.strip(b"\0"))


@pytest.mark.processes
def test_a_forked_worker_keeps_what_its_dead_rank_used(name: str) -> None:
    """The rank is killed and its worker reads on: the segment is in use until the worker has gone, too."""
    with hanging(open_with_worker, name) as rank:
        [worker] = descendants() - {rank.process.pid}
    try:
        assert clean(name) == []
    finally:
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: bool(clean(name)))


@pytest.mark.processes
def test_a_job_that_is_stopped_keeps_its_segment(name: str, stopped: Any) -> None:
    """The segment of a stopped job is in use. Once that job is killed, `clean` removes it."""
    job = stopped(lambda: (opened(name), stop()))
    assert clean(name) == []
    job.kill()
    assert [gone.name for gone in clean(name)] == [name]


@pytest.mark.processes
def test_many_jobs_that_open_a_name_at_once_have_one_segment(name: str, crowd: Any) -> None:
    """One of them makes it, and all others join it, also while another job comes and goes."""
    assert len(set(crowd(inode_of, name))) == 1


def inode_of(number: int, name: str) -> int:
    segment = opened(name, f"of job {number}")
    inode = segment.handle.inode
    segment.close()
    return inode


def open_with_worker(name: str) -> Segment:
    segment = opened(name)
    idle_worker()
    return segment


@pytest.mark.processes
def test_a_janitor_never_takes_a_live_file(name: str, tmp_path: Path) -> None:
    """Users come and go, some by SIGKILL, while a janitor cleans: for every user the name leads to its segment."""
    over, removed = tmp_path / "over", tmp_path / "removed"
    removed.touch()
    janitor = Child(sweep, name, over, removed)
    users = [Child(come_and_go, name, over, seed) for seed in range(3)]
    victims, moments = 0, random.Random(1)
    try:
        while victims < 10 or removed.stat().st_size < 10:
            victim = Child(come_and_go, name, over, victims)
            time.sleep(moments.uniform(0.0, 0.05))
            victim.kill()
            victims += 1
    finally:
        over.touch()
    assert min(user.result() for user in users) > 0
    janitor.result()


def come_and_go(name: str, over: Path, seed: int) -> int:
    random.seed(seed)
    rounds = 0
    while not (over.exists() and rounds):
        segment = opened(name)
        for _ in range(random.randrange(4)):
            assert path_of(name).stat().st_ino == segment.handle.inode, "the name of a live segment was taken"
        segment.close()
        rounds += 1
        time.sleep(random.random() / 200)
    return rounds


def sweep(name: str, over: Path, removed: Path) -> None:
    """Remove what nobody uses; `removed` gets a byte for each."""
    with open(removed, "ab", buffering=0) as file:
        while not over.exists():
            file.write(b"x" * len(clean(name)))


# --- what is not trusted


def make_link(path: Path) -> None:
    path.symlink_to(path.parent / "elsewhere")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))


def make_open_to_all(path: Path) -> None:
    path.touch()
    path.chmod(0o666)


def make_foreign(path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path.touch(0o666)
    os.chown(path, 12345, 12345)


def make_notes(path: Path) -> None:
    path.touch(0o600)
    path.write_text("not a segment" * 1000)


@pytest.mark.timeout(20)
def test_what_is_strange_is_refused_without_waiting(tmp_path: Path) -> None:
    """No link is followed, and no pipe waited for."""
    path = tmp_path / "file\x1b[2J"
    before = set(os.listdir("/proc/self/fd"))
    for make in (make_link, os.mkfifo, os.mkdir, make_socket, make_open_to_all, make_foreign):
        make(path)
        with pytest.raises(PermissionError, match=r"is not trusted.*: give another name, or remove it") as caught:
            open_own(str(path))
        assert str(caught.value).isprintable()
        path.rmdir() if path.is_dir() else path.unlink()
    assert os.listdir(tmp_path) == []
    assert set(os.listdir("/proc/self/fd")) == before
    with pytest.raises(FileNotFoundError):
        open_own(str(path))
    path.touch(0o600)
    opened = open_own(str(path))
    assert os.fstat(opened).st_ino == path.stat().st_ino
    os.close(opened)


def test_what_is_no_segment_of_this_user_is_left_alone(name: str) -> None:
    """Under the name of a cache it is neither opened, listed nor removed. A name is one part of a path, no more."""
    for make in (make_link, os.mkfifo, make_notes, make_foreign):
        make(path_of(name))
        with pytest.raises((PermissionError, ValueError), match=r"not trusted|is no cache"):
            opened(name)
        assert name not in [found.name for found in named_segments()]
        assert clean(name) == []
        path_of(name).unlink()
    for bad in ("", "../up", "a/b", ".hidden", "a b", "x" * 101, "a.locks", 7):
        for function in (check_name, join_named, opened, clean):
            with pytest.raises(ValueError, match="name must be"):
                function(bad)  # type: ignore[operator]


def test_what_an_earlier_version_has_left_is_removed(name: str) -> None:
    """Its lock file goes with its segment."""
    lock_file = path_of(name + ".locks")
    lock_file.touch(0o600)
    opened(name).close()
    assert name + ".locks" not in [found.name for found in named_segments()]
    assert [gone.name for gone in clean(name)] == [name]
    assert not lock_file.exists()


# --- its header


def header(text: bytes, *, version: int = FORMAT) -> bytes:
    """A header as `write_header` makes it, with any text in it."""
    begin = b"STOCACHE" + bytes(16) + version.to_bytes(4, "little")
    size = len(text).to_bytes(4, "little")
    return (begin.ljust(MANIFEST_OFFSET, b"\0") + size + text).ljust(HEADER_BYTES, b"\0")[:HEADER_BYTES]


def test_what_cannot_be_read_is_told_apart() -> None:
    """Values come back as written, and each fault of a manifest has its words."""
    file, _ = make_file("memfd")
    write_header(file, SIZE, GOOD)
    assert read_manifest(os.pread(file, HEADER_BYTES, 0), SIZE) == GOOD
    with pytest.raises(ManifestError, match="must fit in 4028 bytes, got"):
        write_header(file, SIZE, replace(GOOD, dataset="x" * HEADER_BYTES))
    os.close(file)
    geometries = (
        {},
        {"geometry": {"slots": 3}},
        {"geometry": {"size": 10**6, "slots": 10**6}},
        {"geometry": {"size": 3, "slots": 3.0}},
    )
    good, missing, many, broken = (json.dumps(asdict(GOOD) | geometry).encode() for geometry in geometries)
    for content, words in [
        (header(b"\xff\xfe"), "is damaged"),
        (header(b"{" * 5000), "is damaged"),
        (header(missing), "is damaged"),
        (header(many), "is damaged: 1000000 slots"),
        (header(broken), "is damaged"),
        (header(good)[:100], "is damaged"),
        (header(good, version=FORMAT + 1), f"format {FORMAT + 1}, this one has {FORMAT}"),
        (header(b""), "does not say what it holds"),
    ]:
        with pytest.raises(ManifestError, match=words):
            read_manifest(content, SIZE)

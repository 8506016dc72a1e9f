"""A segment is one file in memory: shared by the processes of a node, promised before it is touched, never left."""

import dataclasses
import errno
import gc
import mmap
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.segment import Segment, SegmentHandle, fence_of
from tests.proc import descendants
from tests.processes import call, context, hanging, idle_worker, wait_until, without_room

BACKENDS: tuple[Backend, ...] = ("tmpfile", "memfd", "file")
MIB = 2**20


@pytest.fixture(params=["tmpfile", "file"])  # a memfd is a tmpfile that is made in another way
def segment(request: pytest.FixtureRequest) -> Iterator[Segment]:
    segment = Segment.create(64 * 1024, request.param)
    yield segment
    segment.close()


def stored(segment: Segment, value: int) -> Segment:
    segment.reserve(0, segment.size)
    segment.tensor(0, segment.size).fill_(value)
    return segment


def answer(segment: Segment) -> int:
    """Add one to byte 0, and close. Returns its value before."""
    byte = segment.tensor(0, 1)
    before = int(byte[0])
    byte += 1
    del byte
    segment.close()
    return before


# --- the same memory in every process


def test_a_new_segment_reads_as_zeroes_and_holds_its_header_only(segment: Segment) -> None:
    """A segment has its whole length at once, but no memory before it is reserved."""
    assert segment.allocated_bytes == HEADER_BYTES
    segment.reserve(0, 2 * mmap.PAGESIZE)
    assert segment.allocated_bytes == HEADER_BYTES + 2 * mmap.PAGESIZE
    assert not segment.tensor(0, 2 * mmap.PAGESIZE).any()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "backend"),
    [("fork", "tmpfile"), ("forkserver", "memfd"), ("forkserver", "file"), ("spawn", "tmpfile")],
)
def test_a_child_shares_the_segment(method: str, backend: Backend) -> None:
    """What a child stores is seen here, and the other way round, however the child was started."""
    segment = stored(Segment.create(4096, backend), 7)
    assert call(answer, segment, method=method) == 7
    assert int(segment.tensor(0, 1)[0]) == 8
    segment.close()


@pytest.mark.processes
def test_an_unrelated_process_attaches_by_the_handle() -> None:
    """A process that this one did not start opens all kinds of segment by nothing but their handles."""
    segments = [stored(Segment.create(4096, backend), 40 + number) for number, backend in enumerate(BACKENDS)]
    program = (
        "import pickle, sys; from lightning_stocache.node.segment import Segment\n"
        "for handle in pickle.load(sys.stdin.buffer):\n"
        "    segment = Segment.attach(handle); segment.tensor(0, 1).add_(10); segment.close()\n"
    )
    handles = pickle.dumps([segment.handle for segment in segments])
    subprocess.run([sys.executable, "-c", program], input=handles, check=True, timeout=200)
    assert [int(segment.tensor(0, 1)[0]) for segment in segments] == [50, 51, 52]
    for segment in segments:
        segment.close()


def test_attaching_twice_in_one_process_gives_one_segment(segment: Segment) -> None:
    """Two lock descriptors would drop each other's locks. Each attach takes one more close. A pickle is an address."""
    assert Segment.attach(segment.handle) is segment
    segment.close()
    assert not segment.closed
    assert pickle.loads(pickle.dumps(segment)) is segment
    assert len(pickle.dumps(segment)) < 1000


# --- what is not that segment


def cannot_attach(*handles: SegmentHandle) -> None:
    for handle in handles:
        with pytest.raises(ValueError, match="is not that segment"):
            Segment.attach(handle)


@pytest.mark.processes
def test_a_handle_that_leads_elsewhere_is_refused(segment: Segment) -> None:
    """Another inode (a recycled pid) or another token behind a handle is an error, not foreign memory."""
    another_inode = dataclasses.replace(segment.handle, inode=1)
    another_token = dataclasses.replace(segment.handle, token=b"x" * 16)
    call(cannot_attach, another_inode, another_token, method="forkserver")


def test_a_file_of_somebody_else_is_refused(tmp_path: Path) -> None:
    """A file without our magic number is an error, and its descriptors are closed."""
    (tmp_path / "data").touch(0o600)
    (tmp_path / "data").write_bytes(bytes(8192))
    before = set(os.listdir("/proc/self/fd"))
    inode = os.stat(tmp_path / "data").st_ino
    with pytest.raises(ValueError, match="not a segment of lightning_stocache"):
        Segment.attach(SegmentHandle(str(tmp_path / "data"), str(tmp_path / "data"), inode, b"y" * 16, 4096))
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.processes
def test_a_handle_of_a_process_that_is_gone_is_an_error() -> None:
    """After the creator has ended, there is no file to open."""
    handle = call(lambda: Segment.create(4096).handle)
    with pytest.raises(OSError, match=r"No such file"):
        Segment.attach(handle)


@pytest.mark.parametrize(
    ("backend", "step"),
    [("file", "too large to map"), ("file", "pwrite"), ("memfd", "too large to map"), ("tmpfile", "posix_fallocate")],
)
def test_a_create_that_fails_leaves_nothing(
    backend: Backend, step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever step fails, neither a descriptor nor a name is left."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    if backend == "file":
        monkeypatch.setattr("lightning_stocache.node.files.memory_directory", lambda: str(tmp_path))
    if step != "too large to map":
        monkeypatch.setattr(os, step, refuse)
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"Cannot allocate|No space|too large"):
        Segment.create(2**62 if step == "too large to map" else 4096, backend)
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


# --- closing


def test_views_that_live_on_keep_their_memory(segment: Segment) -> None:
    """Closing under a live view is harmless: the view reads what it read before, and the memory goes with it."""
    stored(segment, 9)
    tensor, view = segment.tensor(0, 4096), segment.memory(4096, 4096)
    segment.close()
    assert segment.closed
    assert int(tensor.sum()) == 9 * 4096
    assert bytes(view) == bytes([9]) * 4096


def test_a_closed_segment_says_so(segment: Segment) -> None:
    """After close every use is an error in words, never an access to a descriptor that now means something else."""
    segment.close()
    segment.close()
    uses: list[Callable[[], Any]] = [
        lambda: segment.tensor(0, 1),
        lambda: segment.memory(0, 1),
        lambda: segment.reserve(0, 1),
        lambda: segment.lock(0),
        lambda: segment.handle,
        lambda: pickle.dumps(segment),
        segment.discard,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    segment.unlock(0)  # nothing to do: the locks went with the descriptor
    assert segment.allocated_bytes == 0


@pytest.mark.processes
def test_closing_in_a_child_leaves_the_parent_s_segment_open(segment: Segment) -> None:
    """A forked child gives up its own mapping only; a named file keeps its name as long as its creator has it."""
    stored(segment, 5)
    call(segment.close)
    assert int(segment.tensor(0, 1)[0]) == 5
    assert segment.path is None or os.path.exists(segment.path)


def test_a_name_goes_with_its_creator() -> None:
    """A named file that nobody has unlinked goes when its creator closes it, or drops it."""
    closed, dropped = Segment.create(4096, "file"), Segment.create(4096, "file")
    names = [f"{segment.path}{end}" for segment in (closed, dropped) for end in ("", ".locks")]
    assert all(map(os.path.exists, names))
    closed.close()
    del dropped
    gc.collect()
    assert not any(map(os.path.exists, names))


def test_a_file_whose_name_is_gone_is_a_file_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS, where what a cache was granted is logged after its name has been removed."""
    segment = Segment.create(4096, "file")
    segment.unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: os.stat("/no/such/file"))
        assert segment.backend == "file"
    segment.close()


@pytest.mark.processes
def test_unlink_takes_the_name_and_leaves_the_memory() -> None:
    """Unlinked early, a named file is as anonymous as the others: still shared, and never left behind."""
    segment = stored(Segment.create(4096, "file"), 6)
    path = segment.path
    assert path is not None
    segment.unlink()
    segment.unlink()
    assert not os.path.exists(path)
    assert not os.path.exists(path + ".locks")
    assert call(answer, segment, method="forkserver") == 6
    with context("forkserver").Pool(1) as pool:  # by the handle, which leads through /proc now
        assert pool.apply(answer, (segment,)) == 7
    segment.close()


# --- death


def create_with_workers(backend: Backend) -> Segment:
    """Do as a rank does: make a segment, start workers, remove the name."""
    segment = stored(Segment.create(16 * MIB, backend), 1)
    for _ in range(2):
        idle_worker()
    segment.unlink()
    return segment


def kill_one_after_the_other(backend: Backend) -> None:
    def used() -> int:
        """MiB of the private /dev/shm in use."""
        stats = os.statvfs("/dev/shm")
        return (stats.f_blocks - stats.f_bfree) * stats.f_frsize // MIB

    with hanging(create_with_workers, backend) as creator:
        workers = descendants() - {creator.process.pid}
        assert used() == 16
    assert used() == 16
    os.kill(workers.pop(), signal.SIGKILL)
    assert used() == 16
    os.kill(workers.pop(), signal.SIGKILL)
    wait_until(lambda: not used())


@pytest.mark.processes
@pytest.mark.parametrize("backend", ["tmpfile", "file"])
def test_nothing_is_left_when_everybody_is_killed(backend: Backend) -> None:
    """SIGKILL of the creator and of one worker keeps the memory of those that live; the last one's frees it."""
    without_room(kill_one_after_the_other, backend)


# --- memory is promised before it is touched


def take_too_much() -> int:
    segment = Segment.create(256 * MIB)
    free = os.statvfs("/dev/shm").f_bfree
    with pytest.raises(OSError, match="No space left on device"):
        segment.reserve(0, 128 * MIB)
    taken = free - os.statvfs("/dev/shm").f_bfree
    with pytest.raises(OSError, match="No space left on device"):
        segment.store(0, memoryview(bytes(128 * MIB)))
    return taken


@pytest.mark.processes
def test_too_little_memory_is_an_error() -> None:
    """In a /dev/shm of 64 MiB reserving more raises ENOSPC and takes nothing; so does storing through the file."""
    assert without_room(take_too_much) == 0


def test_what_is_stored_through_the_file_is_seen_in_the_mapping(segment: Segment) -> None:
    """Exactly the bytes of the range change, in the mapping that exists already; reserving again changes nothing."""
    stored(segment, 8)
    segment.store(4095, memoryview(b"abc"))
    segment.store(10, memoryview(b""))
    segment.reserve(0, 4096)
    assert bytes(segment.memory(4094, 5)) == b"\x08abc\x08"
    assert segment.tensor(0, 4095).eq(8).all()


def test_discard_zeroes_from_an_offset_and_gives_pages_back(segment: Segment) -> None:
    """What lies before the offset stays, all else reads as zeroes, and the whole pages among it are free."""
    stored(segment, 8)
    segment.discard(5000)
    assert segment.tensor(0, 5000).eq(8).all()
    assert segment.allocated_bytes == HEADER_BYTES + 2 * mmap.PAGESIZE
    assert not segment.tensor(5000, segment.size - 5000).any()
    stored(segment, 8).discard(segment.size - 1)  # within the last page
    assert segment.tensor(0, segment.size - 1).eq(8).all()
    assert not segment.tensor(segment.size - 1, 1).any()


# --- locks


@pytest.mark.processes
def test_a_lock_is_kept_until_its_process_ends(segment: Segment) -> None:
    """Sending the segment to a Pool's task does not drop it; a process that is killed does."""
    segment.lock(3)
    with context("forkserver").Pool(1) as pool:
        assert pool.starmap(Segment.lock, [(segment, 3)] * 2) == [False] * 2
    with hanging(segment.lock, 4):
        assert not segment.lock(4)
    assert segment.lock(4)


# --- the order of stores


@pytest.mark.parametrize(("machine", "sections"), [("aarch64", 2), ("riscv64", 2), ("x86_64", 0), ("AMD64", 0)])
def test_where_processors_reorder_two_sections_of_a_lock_lie_between(machine: str, sections: int) -> None:
    """Nothing can pass both the release of the first and the acquire of the second, in either direction. Where
    processors keep the order, no lock is touched."""
    did: list[str] = []

    class Lock:
        def __enter__(self) -> None:
            did.append("acquire")

        def __exit__(self, *_: object) -> None:
            did.append("release")

    fence_of(machine, Lock())()
    assert did == ["acquire", "release"] * sections

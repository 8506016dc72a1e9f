"""A segment is one file in memory: shared by the processes of a node, promised before it is touched, never left."""

import dataclasses
import errno
import fcntl
import gc
import mmap
import os
import pickle
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from lightning_stocache.node import locks
from lightning_stocache.node.files import HEADER_BYTES, Backend
from lightning_stocache.node.segment import Segment, SegmentHandle, fence_of
from tests.odds import CROWD
from tests.processes import Child, call, call_many, context, descendants, hanging, idle_worker, wait_until

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


def answer(segment: Segment | SegmentHandle) -> int:
    """Add one to byte 0, and close. Returns its value before."""
    segment = segment if isinstance(segment, Segment) else Segment.attach(segment)
    byte = segment.tensor(0, 1)
    before = int(byte[0])
    byte += 1
    del byte
    segment.close()
    return before


# --- the same memory in every process


@pytest.mark.processes
@pytest.mark.parametrize("backend", BACKENDS)
def test_other_processes_attach_by_the_handle(backend: Backend) -> None:
    """What is stored there is seen here, and the other way round; closing in a child closes nothing here."""
    segment = stored(Segment.create(4096, backend), 6)
    assert call(answer, segment.handle, method="forkserver") == 6
    name = str(segment.path)
    assert os.path.exists(name) == (backend == "file")
    segment.unlink(), segment.unlink()
    assert not os.path.exists(name)
    assert call(answer, segment, method="forkserver") == 7
    assert int(segment.memory(0, 1)[0]) == 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "readlink", lambda path: os.stat("/no/such/file"))  # where there is no /proc
        assert segment.backend == "file"
    segment.close()


# --- what is not that segment


def cannot_attach(*handles: SegmentHandle) -> None:
    for handle in handles:
        with pytest.raises(ValueError, match="is not that segment"):
            Segment.attach(handle)


@pytest.mark.processes
def test_a_handle_that_leads_elsewhere_is_refused(segment: Segment, tmp_path: Path) -> None:
    """Another inode (a recycled pid), token, file or an ended process is an error, and leaves no descriptor."""
    another_inode = dataclasses.replace(segment.handle, inode=1)
    another_token = dataclasses.replace(segment.handle, token=b"x" * 16)
    call(cannot_attach, another_inode, another_token, method="forkserver")
    (tmp_path / "data").touch(0o600)
    (tmp_path / "data").write_bytes(bytes(8192))
    before = set(os.listdir("/proc/self/fd"))
    inode = os.stat(tmp_path / "data").st_ino
    with pytest.raises(ValueError, match="not a segment of lightning_stocache"):
        Segment.attach(SegmentHandle(str(tmp_path / "data"), inode, b"y" * 16, 4096))
    assert set(os.listdir("/proc/self/fd")) == before
    gone = call(lambda: Segment.create(4096).handle)
    with pytest.raises(OSError, match=r"No such file"):
        Segment.attach(gone)


@pytest.mark.parametrize(
    ("backend", "step"), [("file", "pwrite"), ("memfd", "too large to map"), ("tmpfile", "posix_fallocate")]
)
def test_a_create_that_fails_leaves_nothing(
    backend: Backend, step: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Whichever step fails, neither a descriptor nor a name is left."""
    if backend == "file":
        monkeypatch.setattr("lightning_stocache.node.files.memory_directory", lambda: str(tmp_path))
    if step != "too large to map":
        monkeypatch.setattr(os, step, lambda *_: os.stat("/no/such/file"))
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"No such file|Cannot allocate|too large"):
        Segment.create(2**62 if step == "too large to map" else 4096, backend)
    assert set(os.listdir("/proc/self/fd")) == before
    assert os.listdir(tmp_path) == []


def test_who_attaches_in_one_process_has_locks_of_its_own(segment: Segment) -> None:
    """Threads that attach at once have a segment each: its locks exclude the others, and end with it alone."""
    with ThreadPoolExecutor(8) as pool:
        attached = list(pool.map(Segment.attach, [segment.handle] * 8))
    assert segment.lock(0)
    assert [each.lock(byte) for byte, each in enumerate(attached)] == [False] + [True] * 7
    assert all(each.is_locked(0) for each in attached)
    assert not segment.is_locked(0)
    for each in attached:
        each.close()
    assert [segment.is_locked(byte) for byte in range(8)] == [False] * 8
    again = Segment.attach(segment.handle)
    assert not again.lock(0)
    again.close()


@pytest.mark.processes
def test_a_segment_takes_two_descriptors(segment: Segment) -> None:
    """One for its locks and one that its mapping keeps; here, in a forked child, and in one that was started."""
    assert descriptors_of(segment) == call(descriptors_of, segment) == 2
    assert call(descriptors_of, segment, method="forkserver") == 2


def descriptors_of(segment: Segment) -> int:
    inode, count = segment.handle.inode, 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the list
            count += os.stat(f"/proc/self/fd/{number}").st_ino == inode
    return count


# --- closing


def test_a_closed_segment_says_so(segment: Segment) -> None:
    """Copies are closed apart, and views keep the memory. After `close` every use is an error in words, never an access
    to a descriptor that now means something else."""
    copy = pickle.loads(pickle.dumps(segment))
    copy.close()
    assert not segment.closed
    assert len(pickle.dumps(segment)) < 1000
    stored(segment, 9)
    tensor, view = segment.tensor(0, 4096), segment.memory(4096, 4096)
    segment.close(), segment.close()
    uses: list[Callable[[], Any]] = [
        lambda: segment.tensor(0, 1),
        lambda: segment.reserve(0, 1),
        lambda: segment.lock(0),
        lambda: segment.is_locked(0),
        lambda: segment.in_turn(lambda: None),
        lambda: segment.handle,
        lambda: pickle.dumps(segment),
        segment.discard,
    ]
    for use in uses:
        with pytest.raises(ValueError, match="closed"):
            use()
    segment.unlock(0)  # nothing to do: the locks went with the descriptor
    assert segment.allocated_bytes == 0
    assert int(tensor.sum()) == 9 * 4096
    assert bytes(view) == bytes([9]) * 4096


def test_a_name_goes_with_its_creator() -> None:
    """A named file that nobody has unlinked goes when its creator closes it, or drops it."""
    closed, dropped = Segment.create(4096, "file"), Segment.create(4096, "file")
    names = [str(segment.path) for segment in (closed, dropped)]
    assert all(map(os.path.exists, names))
    closed.close()
    del dropped
    gc.collect()
    assert not any(map(os.path.exists, names))


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
        return shutil.disk_usage("/dev/shm").used // MIB

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
def test_nothing_is_left_when_everybody_is_killed(backend: Backend, small_shm: Any) -> None:
    """SIGKILL of the creator and of one worker keeps the memory of those that live; the last one's frees it."""
    small_shm(kill_one_after_the_other, backend)


# --- ranges and locks


def test_ranges_are_stored_through_the_file_and_discarded(segment: Segment) -> None:
    """Exactly the bytes of the range change; what is discarded reads as zeroes, and its whole pages are free."""
    stored(segment, 8)
    segment.store(4095, memoryview(b"abc"))
    segment.reserve(0, 4096)
    assert bytes(segment.memory(4094, 5)) == b"\x08abc\x08"
    segment.discard(5000)
    assert segment.tensor(4098, 902).eq(8).all()
    assert segment.allocated_bytes == HEADER_BYTES + 2 * mmap.PAGESIZE
    assert not segment.tensor(5000, segment.size - 5000).any()
    stored(segment, 8).discard(segment.size - 1)  # within the last page
    assert segment.tensor(0, segment.size - 1).eq(8).all()
    assert not segment.tensor(segment.size - 1, 1).any()


def test_a_system_call_that_moves_fewer_bytes_is_repeated(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux moves at most 2 GiB at once: a longer range is read and written whole, in one part and in several."""
    pread, pwrite, most = os.pread, os.pwrite, 7
    monkeypatch.setattr(os, "pread", lambda file, length, offset: pread(file, min(length, most), offset))
    monkeypatch.setattr(os, "pwrite", lambda file, part, offset: pwrite(file, part[:most], offset))
    monkeypatch.setattr(os, "pwritev", lambda file, parts, offset: pwrite(file, b"".join(parts)[:most], offset))
    content = bytes(range(100))
    for begin, ends in ((3, [100]), (200, [5, 5, 7, 30, 100])):
        bounds = zip([0, *ends], ends, strict=False)
        segment.store(begin, *(memoryview(content)[first:last] for first, last in bounds))
        assert segment.fetch(begin, 100) == content


@pytest.mark.skipif(not hasattr(mmap, "MADV_REMOVE"), reason="the system frees no pages inside a file")
def test_a_file_keeps_its_length_while_it_is_discarded(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that reads meanwhile would die of SIGBUS behind the end of a shorter file."""
    monkeypatch.setattr(os, "ftruncate", lambda *_: pytest.fail("the file was shorter for a moment"))
    stored(segment, 8).discard()
    assert segment.allocated_bytes <= mmap.PAGESIZE  # of the header; a look at the payload takes pages again
    assert not segment.tensor(0, segment.size).any()


@pytest.mark.processes
def test_a_lock_is_kept_until_its_process_ends(segment: Segment) -> None:
    """Sending the segment to a Pool's task does not drop it; a process that is killed does."""
    segment.lock(3)
    with context("forkserver").Pool(1) as pool:
        assert pool.starmap(Segment.lock, [(segment, 3)] * 2) == [False] * 2
    with hanging(segment.lock, 4):
        assert not segment.lock(4)
    assert segment.lock(4)


def lock_and_unlock(segment: Segment, byte: int) -> bool:
    got = segment.lock(byte)
    segment.unlock(byte)
    return got


@pytest.mark.processes
def test_a_child_leaves_its_parents_locks(segment: Segment) -> None:
    """It has none of them, cannot release them, and does not keep them when the parent has ended."""
    segment.lock(5)
    for method in ("fork", "forkserver"):
        for _ in range(2):
            assert not call(lock_and_unlock, segment, 5, method=method)

    def lock_with_worker() -> Segment:
        attached = Segment.attach(segment.handle)
        attached.lock(6)
        idle_worker()
        return attached

    with hanging(lock_with_worker) as parent:
        [worker] = descendants() - {parent.process.pid}
        assert not segment.lock(6)
    try:
        wait_until(lambda: segment.lock(6))  # the worker opens the file anew once it runs
        assert locks.is_used(segment.descriptor)
    finally:
        os.kill(worker, signal.SIGKILL)
    wait_until(lambda: not locks.is_used(segment.descriptor))


@pytest.mark.processes
def test_without_a_descriptor_a_child_locks_nothing(segment: Segment) -> None:
    """It would share the locks of its parent. It reads what is there."""
    stored(segment, 7)
    segment.lock(5)

    def use() -> tuple[bool, Any, int]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(locks, "open_anew", lambda *_: os.open("/no/such/file", os.O_RDONLY))
            return call(lambda: (segment.lock(5), segment.in_turn(lambda: 1), int(segment.memory(0, 1)[0])))

    assert use() == (False, None, 7)
    assert segment.lock(5)


@pytest.mark.processes
def test_turns_exclude_processes_and_threads(segment: Segment) -> None:
    """Each of many processes and threads adds to one number in its turns: no addition is lost."""
    stored(segment, 0)
    number = segment.memory(0, 8).cast("q")

    def add() -> bool:
        before = number[0]
        os.sched_yield()
        number[0] = before + 1
        return True

    def add_often() -> None:
        for _ in range(50):
            while not segment.in_turn(add):  # on a busy machine it may not be had in time
                pass

    def work() -> None:
        threads = [threading.Thread(target=add_often) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    call_many(work, [()] * 4)
    assert number[0] == 400
    number.release()


def test_the_turn_ends_where_ctrl_c_strikes_in_a_hook(segment: Segment, monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit hook is a function of Python's that runs before the system call."""
    plain, struck = fcntl.flock, list[int]()

    def flock(file: int, kind: int) -> None:
        if kind == fcntl.LOCK_UN and not struck:
            struck.append(file)
            raise KeyboardInterrupt
        plain(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(KeyboardInterrupt):
        segment.in_turn(int)
    with closing(Segment.attach(segment.handle)) as other:
        assert struck
        assert other.in_turn(bool, 1) is True


def hold(segment: Segment, shared: bool = False) -> str:
    with segment.holding(3, shared=shared):
        return "held"


def test_who_asks_for_the_turn_in_its_turn_does_not_get_it(segment: Segment) -> None:
    """As a signal's handler does, which runs in the thread that it interrupts."""
    assert segment.in_turn(lambda: (segment.in_turn(lambda: 1), 2)) == (None, 2)
    assert segment.in_turn(lambda: 3) == 3


def test_who_closes_while_a_thread_writes_gives_its_file_to_nobody(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread has read the number of the descriptor. What the user opens then has another number."""
    pwrite, opened = os.pwrite, list[Any]()

    def late(descriptor: int, content: Any, offset: int) -> int:
        if not opened:
            segment.close()
            opened.extend((tmp_path / str(number)).open("wb") for number in range(8))
        return pwrite(descriptor, content, offset)

    monkeypatch.setattr(os, "pwrite", late)
    segment.store(0, memoryview(b"sample"))
    for file in opened:
        file.close()
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b""] * 8
    with pytest.raises(ValueError, match="closed"):
        segment.store(0, memoryview(b"sample"))


@pytest.mark.processes
def test_no_file_has_the_number_of_a_standard_stream(tmp_path: Path) -> None:
    """Not where these are closed, as a daemon's are: C code writes messages to these numbers."""

    def numbers() -> list[str]:
        os.closerange(0, 3)
        with closing(Segment.create(64)):
            return [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]

    assert call(numbers) == [os.devnull] * 3


@pytest.mark.parametrize("backend", ["tmpfile", "file"])
def test_a_file_is_opened_anew_whatever_the_umask(backend: Backend) -> None:
    umask = os.umask(0o777)
    try:
        with closing(Segment.create(64, backend)) as segment:
            assert os.fstat(segment.descriptor).st_mode & 0o777 == 0o600
    finally:
        os.umask(umask)


def test_without_a_descriptor_nothing_is_learned_about_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system can do is asked again."""

    def refuse(*_: Any) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    locks.are_exclusive.cache_clear()
    with monkeypatch.context() as full:
        full.setattr(locks, "open_anew", refuse)
        with pytest.raises(OSError, match="Too many open files"):
            locks.are_exclusive()
    assert locks.are_exclusive()


@pytest.mark.processes
def test_what_one_thread_holds_others_wait_for(segment: Segment) -> None:
    """Locks do not tell threads apart; `holding` does, also in a child that was forked meanwhile."""
    seen, children = list[str](), list[Child]()
    threads = [
        threading.Thread(target=lambda: seen.append(hold(segment))),
        threading.Thread(target=lambda: children.append(Child(hold, segment))),
    ]
    with segment.holding(3):
        for thread in threads:
            thread.start()
        threads[1].join()
        threads[0].join(0.05)
        seen.append("released")
    threads[0].join()
    assert children[0].result() == "held"
    assert seen == ["released", "held"]


def test_what_is_held_as_shared_excludes_who_holds_it_alone(segment: Segment) -> None:
    """Others that share it hold it meanwhile."""
    other = Segment.attach(segment.handle)
    with segment.holding(3, shared=True):
        assert hold(other, shared=True) == "held"
        assert not other.lock(3)
    assert hold(other) == "held"
    other.close()


def test_nobody_waits_for_a_lock_that_no_process_gets(segment: Segment) -> None:
    """Where a system has no locks between processes, what would be waited for is an error."""
    segment.has_locks = False
    assert not segment.lock(3)
    with pytest.raises(OSError, match="no locks between processes"):
        hold(segment)


def lock_and_wait(number: int, segment: Segment) -> list[int]:
    """Try to lock eight bytes, and keep what was got until all of a crowd have tried."""
    got = [byte for byte in range(8) if segment.lock(byte)]
    tried = segment.tensor(0, CROWD)
    tried[number] = 1
    wait_until(lambda: bool(tried.all()))
    return got


@pytest.mark.processes
def test_one_of_many_processes_gets_a_lock(segment: Segment, crowd: Any) -> None:
    """Each lock goes to one of 32 processes that try at once, whose parent has attached the segment."""
    segment.reserve(0, segment.size)
    assert sorted(sum(crowd(lock_and_wait, segment), list[int]())) == list(range(8))


@pytest.mark.parametrize(("machine", "sections"), [("aarch64", 2), ("x86_64", 0), ("AMD64", 0)])
def test_where_processors_reorder_two_sections_of_a_lock_lie_between(machine: str, sections: int) -> None:
    """Nothing can pass both, in either direction; where processors keep the order, no lock is touched. Each call has a
    lock of its own: a forked process might inherit another thread's locked."""
    locks: list[MagicMock] = []

    def new_lock() -> MagicMock:
        locks.append(MagicMock())
        return locks[-1]

    fence = fence_of(machine, new_lock)
    fence(), fence()
    assert len(locks) == (2 if sections else 0)
    for lock in locks:
        assert [name for name, *_ in lock.mock_calls] == ["__enter__", "__exit__"] * sections

"""What a disk loses before it is safe is not served: it is read with its checksum until an `fdatasync` has succeeded.

A page that is lost has what the disk had before. The tests write that back behind the store's back, in all processes.
"""

import errno
import faulthandler
import logging
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache import disk_sync
from lightning_stocache.cache.disk_sync import ROUNDS, DiskSync
from lightning_stocache.cache.seats import Seats
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import HEADER_BYTES
from lightning_stocache.node.segment import Segment
from tests.cache.stores import ALL, ARC, LAYOUTS, Disk, codec_of, filled, gathered, lose_pages, served
from tests.jobs import Log, warnings
from tests.odds import stop
from tests.processes import Child, call, wait_until


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> Disk:
    """A directory in which one job after the other opens the same store."""
    return Disk(tmp_path, request.param)


class Syncs:
    """The syncs of this process and its forks, which begin when a test says so alone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.before: Callable[[], Any] | None = None  # what the next one does first
        patch.setattr(Segment, "sync", self._counted(Segment.sync))
        patch.setattr(DiskSync, "note", lambda sync: None)

    def fail(self, error: int = errno.ENOSPC) -> None:
        """The next one reports an error, as the kernel does: once."""

        def report() -> None:
            raise OSError(error, os.strerror(error))

        self.before = report

    def _counted(self, plain: Any) -> Any:
        def sync(segment: Segment) -> None:
            self.count += 1
            step, self.before = self.before, None
            if step is not None:
                step()
            plain(segment)

        return sync


@pytest.fixture
def syncs(monkeypatch: Any) -> Iterator[Syncs]:
    return Syncs(monkeypatch)


def lose(store: Any, *indices: int) -> None:
    """Have the disk lose the larger part of some samples: there are zeroes, for all processes."""
    with open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file, mapped(file) as content:
        for index in indices:
            part = max(store.layout.fetch(store.arc.slot(index)), key=len)
            place = content.find(part)
            assert place >= HEADER_BYTES
            os.pwrite(file.fileno(), bytes(len(part)), place)


def mapped(file: Any) -> mmap.mmap:
    return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)


def test_only_words_of_safe_rounds_are_safe(disk: Disk) -> None:
    """Others are empty, claimed (the first claim is smaller than the word of a safe sample), or of later rounds."""
    with closing(disk.open()) as store:
        filled(store, ALL)
        assert store.make_safe()
        sync = DiskSync(store.segment, store.layout.rounds_offset)
        safe, claim = sync.safe_word, 1 << 2 | 1
        assert claim < safe
        assert sync.unsafe(np.array([safe, safe], dtype=np.uint32)) == []
        words = [safe, 0, claim, safe + 4, safe]
        assert sync.unsafe(np.array(words, dtype=np.uint32)) == [1, 2, 3]
        for number, word in enumerate(words):
            assert sync.unsafe(np.array([word], dtype=np.uint32)) == [0] * (0 < number < 4)


def reads_of(store: Any, indices: list[int]) -> int:
    """How often serving samples reads the file, beside the mapping."""
    places, reads = store.lookup(np.array(indices)), []
    with pytest.MonkeyPatch.context() as patch:
        plain = Segment.fetch
        patch.setattr(Segment, "fetch", lambda *args: (reads.append(args), plain(*args))[1])
        assert gathered(store, places) == indices
    return len(reads)


def test_what_is_lost_before_it_is_safe_is_not_served(disk: Disk, syncs: Syncs) -> None:
    """Its sample is a miss, by itself, among others and in a gather; the others are served. The next job stores it."""
    with closing(disk.open()) as store:
        filled(store)
        lose(store, 3, 40)
        places = store.lookup(np.array(ALL))
        seen = store.changes
        if disk.layout == "rows":
            memory = [np.empty(size, dtype=np.uint8) for size in store.codec.sizes(len(places))]
            store.gather(places, memory)
            assert store.changes != seen, "who gathers looks up again"
        assert store.get(40) is None
        assert served(store) == [index for index in ALL if index not in (3, 40)]
        assert not store.full
        assert reads_of(store, [5]) == 1
    assert disk.served() == [index for index in ALL if index not in (3, 40)]
    disk.fill()
    assert disk.served() == ALL


def test_a_safe_sample_costs_no_checksum(disk: Disk, syncs: Syncs) -> None:
    """What was stored before a sync began is safe after it; what was stored meanwhile, after the next one."""
    with closing(disk.open()) as store:
        filled(store, ALL[:20])
        assert reads_of(store, ALL[:20]) == 20
        syncs.before = lambda: filled(store, ALL[20:30])
        assert store.make_safe()
        assert reads_of(store, ALL[:20]) == 0
        assert reads_of(store, ALL[:30]) == 10
        assert store.make_safe()
        assert reads_of(store, ALL[:30]) == 0


def test_the_numbers_of_rounds_may_be_lost_too(disk: Disk, syncs: Syncs) -> None:
    """They are as they were, when all was safe: what was stored since is read with its checksum all the same."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        filled(store, ALL[:10])
        assert store.make_safe()
        behind_words = HEADER_BYTES + store.layout.offset_in("state", len(ALL))
        length = HEADER_BYTES + store.layout.scratch_bytes - behind_words
        numbers = os.pread(file.fileno(), length, behind_words)
        filled(store, ALL[10:])
        assert served(store) == ALL
        os.pwrite(file.fileno(), numbers, behind_words)
        lose(store, 40)
        assert served(store) == ALL[:40] + ALL[41:]


def test_a_sample_whose_word_was_lost_is_not_safe(disk: Disk, syncs: Syncs) -> None:
    """It is verified, as those of earlier jobs are, and may be lost afterwards."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        filled(store, ALL[:10])
        assert store.make_safe()
        begin, end = (HEADER_BYTES + store.layout.offset_in("state", slot) for slot in (0, len(ALL)))
        words = os.pread(file.fileno(), end - begin, begin)
        filled(store, ALL[10:])
        os.pwrite(file.fileno(), words, begin)
        assert served(store) == ALL
        lose(store, 40)
        assert served(store) == ALL[:40] + ALL[41:]


def served_at(handle: Any) -> list[int]:
    with closing(Store.attach(handle)) as store:
        return served(store)


@pytest.mark.processes
def test_a_process_that_finds_lost_numbers_takes_nothing_as_safe(disk: Disk, syncs: Syncs) -> None:
    """They are zeroes where the disk had no block for them yet."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        filled(store)
        behind_words = HEADER_BYTES + store.layout.offset_in("state", len(ALL))
        os.pwrite(file.fileno(), bytes(HEADER_BYTES + store.layout.scratch_bytes - behind_words), behind_words)
        lose(store, 40)
        assert call(served_at, store.handle, method="spawn") == ALL[:40] + ALL[41:]


def test_what_earlier_jobs_stored_is_safe_after_any_sync(disk: Disk, syncs: Syncs) -> None:
    """Their pages may not be written when the next job verifies them."""
    disk.fill(ALL[:20])
    with closing(disk.open()) as store:
        assert served(store) == ALL[:20]
        assert reads_of(store, ALL[:20]) == 20
        assert store.make_safe()
        assert reads_of(store, ALL[:20]) == 0
    with closing(disk.open()) as store:
        assert store.make_safe()
        assert served(store) == ALL[:20]
        assert reads_of(store, ALL[:20]) == 0


@pytest.mark.processes
@pytest.mark.parametrize("end", ["killed", "without a turn", "full disk"])
def test_what_a_writer_leaves_without_its_word_is_not_safe(
    disk: Disk, syncs: Syncs, monkeypatch: Any, end: str
) -> None:
    """It has a checksum, as what an earlier job has stored, but no sync that has begun since."""

    def publish(*_: Any) -> list[int]:
        if end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "full disk":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return []

    with closing(disk.open()) as store:
        filled(store, ALL[:10])
        assert store.make_safe()
        with monkeypatch.context() as patch:
            patch.setattr(Seats, "publish", publish)
            writer = Child(filled, store, ALL[10:11])
            wait_until(lambda: not writer.process.is_alive())
            writer.kill()
        assert served(store) == ALL[:11]
        assert reads_of(store, ALL[:11]) == 1
        lose(store, 10)
        assert served(store) == ALL[:10]


def test_after_an_error_nothing_becomes_safe_or_is_stored(disk: Disk, syncs: Syncs, caplog: Any) -> None:
    """One warning; what was safe is served as before, the rest with its checksum. The next job stores again."""
    with closing(disk.open()) as store, closing(Store.attach(store.handle)) as other:
        filled(store, ALL[:10])
        assert store.make_safe()
        filled(store, ALL[10:20])
        syncs.fail()
        assert not store.make_safe()
        for each in (store, other):
            assert filled(each, ALL) == []
            assert reads_of(each, ALL[:20]) == 10
            assert not each.make_safe()
        assert syncs.count == 2, "the kernel tells an error once"
        [warning] = warnings(caplog)
        assert "has lost samples" in warning
        assert "thin volume" in warning
    assert disk.served() == ALL[:20]
    disk.fill()
    assert disk.served() == ALL


def synced_at(handle: Any) -> bool:
    with closing(Store.attach(handle)) as store:
        return store.make_safe()


@pytest.mark.processes
def test_an_error_whose_number_was_lost_is_known_to_later_processes(disk: Disk, syncs: Syncs) -> None:
    """The kernel tells them of no error, and the numbers are as they were before it."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        filled(store, ALL[:10])
        assert store.make_safe()
        begin = HEADER_BYTES + store.layout.rounds_offset
        numbers = os.pread(file.fileno(), ROUNDS.size, begin)
        filled(store, ALL[10:])
        syncs.fail()
        assert not store.make_safe()
        os.pwrite(file.fileno(), numbers, begin)
        assert not call(synced_at, store.handle, method="spawn")


def fill_and_wait(handle: Any, indices: list[int], step: Callable[[], None]) -> list[int]:
    with closing(Store.attach(handle)) as store:
        stored = filled(store, indices)
        step()
        return stored


def nothing() -> None:
    pass


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_other_processes_store_becomes_safe(disk: Disk, syncs: Syncs, method: str) -> None:
    """A worker's samples, too, whether it lives or not."""
    with closing(disk.open()) as store:
        assert call(fill_and_wait, store.handle, ALL, nothing, method=method) == ALL
        assert store.make_safe()
        assert reads_of(store, ALL) == 0


def sync_and_die(store: Any, syncs: Syncs) -> None:
    syncs.before = lambda: os.kill(os.getpid(), signal.SIGKILL)
    store.make_safe()


def refuses(handle: Any) -> tuple[bool, int]:
    with closing(Store.attach(handle)) as store:
        return store.make_safe(), reads_of(store, ALL)


@pytest.mark.processes
def test_a_process_that_dies_in_its_sync_hides_no_error(disk: Disk, syncs: Syncs) -> None:
    """The kernel may have told it alone of an error: who opened the file before is told, too, and goes on."""
    with closing(disk.open()) as store:
        filled(store)
        child = Child(sync_and_die, store, syncs)
        wait_until(lambda: not child.process.is_alive())
        child.kill()
        assert call(refuses, store.handle) == (False, len(ALL)), "it opened the file afterwards"
        assert syncs.count == 0
        assert store.make_safe()
        assert reads_of(store, ALL) == 0
        filled(store)
        assert call(refuses, store.handle) == (True, 0)


@pytest.fixture
def drops(monkeypatch: Any) -> list[Segment]:
    """The segments whose page cache this process has dropped."""
    dropped: list[Segment] = []
    plain = Segment.drop_page_cache
    monkeypatch.setattr(Segment, "drop_page_cache", lambda segment: (dropped.append(segment), plain(segment)))
    return dropped


@pytest.mark.parametrize("has_failed", [True, False])
def test_lost_pages_are_read_from_the_disk_by_the_next_job(
    disk: Disk, syncs: Syncs, drops: list[Segment], has_failed: bool
) -> None:
    """They may be whole in the page cache. Without an error it stays."""
    with closing(disk.open()) as store:
        filled(store)
        if has_failed:
            syncs.fail()
        assert store.make_safe() is not has_failed
    assert disk.served() == ALL
    assert len(drops) == has_failed
    assert disk.served() == ALL
    assert len(drops) == has_failed


@pytest.mark.processes
def test_a_stopped_sync_is_not_waited_for(disk: Disk, syncs: Syncs, stopped: Any, monkeypatch: Any) -> None:
    """Nor does it keep others from storing, nor the file from being opened."""
    monkeypatch.setattr("lightning_stocache.cache.store.PATIENCE", 0.0)
    with closing(disk.open()) as store:
        filled(store, ALL[:10])

        def sync() -> bool:
            syncs.before = stop
            return bool(store.make_safe())

        process = stopped(sync)
        assert not store.make_safe()
        assert filled(store, ALL[10:]) == ALL[10:]
        with closing(disk.open()) as other:
            assert served(other) == ALL
        process.go_on()
        assert process.result()
        assert reads_of(store, ALL) == len(ALL) - 10
        assert store.make_safe()


@pytest.mark.processes
def test_a_fork_during_a_sync_has_no_lock(disk: Disk, syncs: Syncs) -> None:
    """It stores, and makes safe what is stored once the sync of its parent is over."""
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(300)

    with closing(disk.open()) as store:
        filled(store, ALL[:10])
        syncs.before = wait
        thread = threading.Thread(target=store.make_safe)
        thread.start()
        assert begun.wait(300)
        child = Child(fill_and_sync, store)
        wait_until(lambda: store.filled == len(ALL))
        may_end.set()
        assert child.result()
        thread.join()
        assert reads_of(store, ALL) == 0


def fill_and_sync(store: Any) -> bool:
    filled(store, ALL[10:])
    return bool(store.make_safe())


def test_a_store_that_is_closed_during_a_sync_can_be_opened_alone(disk: Disk, syncs: Syncs) -> None:
    """Its locks are free at once, though a system call still has the file open, and nothing is written any more."""
    begun, may_end = threading.Event(), threading.Event()

    def wait() -> None:
        begun.set()
        assert may_end.wait(300)

    store = disk.open()
    filled(store)
    syncs.before = wait

    def sync() -> None:
        with pytest.raises(ValueError, match="closed"):
            store.make_safe()

    thread = threading.Thread(target=sync)
    thread.start()
    assert begun.wait(300)
    file = os.dup(store.segment.descriptor)  # as a system call has it
    store.close()
    with closing(disk.open()) as later:
        assert later.get(3) is None, "nothing is verified: it was opened alone"
        may_end.set()
        thread.join()
        assert served(later) == ALL
        assert reads_of(later, ALL) == len(ALL)
    os.close(file)


def test_a_sync_begins_by_itself(disk: Disk) -> None:
    """In a thread, when a sample is stored or read that is not safe; and at the end of an epoch."""
    with closing(disk.open()) as store:
        filled(store, ALL[:10])
        wait_until(lambda: reads_of(store, ALL[:1]) == 0)
        filled(store, ALL[10:])
        assert reads_of(store, ALL[-1:]) == 1, "the next one is due in a minute"
        store.end_epoch()
        wait_until(lambda: reads_of(store, ALL) == 0)
    with closing(disk.open()) as store:
        assert served(store) == ALL
        wait_until(lambda: reads_of(store, ALL) == 0)
    assert wait_for_threads()


@pytest.mark.parametrize("ends", [True, False])
def test_a_job_that_ends_in_its_sync_leaves_a_warm_page_cache(
    disk: Disk, syncs: Syncs, drops: list[Segment], monkeypatch: Any, ends: bool
) -> None:
    """It waits for the sync, once. One that does not end in time counts as a death: the next job drops the pages."""
    begun, joined, may_end = threading.Event(), threading.Event(), threading.Event()
    plain = DiskSync.join
    monkeypatch.setattr(DiskSync, "join", lambda sync: (joined.set(), plain(sync)))
    monkeypatch.setattr(disk_sync, "LAST_SECONDS", 300.0 if ends else 0.0)
    store = disk.open()

    def wait() -> None:
        begun.set()
        wait_until(lambda: joined.is_set() or store.closed)
        assert ends or may_end.wait(300)

    filled(store)
    syncs.before = wait
    store.end_epoch()
    assert begun.wait(300)
    store.close()
    assert disk.served() == ALL
    assert len(drops) == (not ends)
    monkeypatch.setattr(disk_sync, "LAST_SECONDS", 300.0)
    store.close()
    may_end.set()
    assert wait_for_threads()


END_IN_SYNC = """
import sys, threading
from pathlib import Path
from lightning_stocache.node.segment import Segment
from tests.cache.stores import Disk, filled

begun, plain = threading.Event(), Segment.sync

def sync(segment):
    begun.set()
    threading.main_thread().join()  # until the interpreter has begun to end
    plain(segment)

Segment.sync = sync
store = Disk(Path(sys.argv[1]), sys.argv[2]).open()
filled(store)
begun.wait()
"""


@pytest.mark.processes
def test_a_process_that_ends_without_closing_waits_for_its_sync(tmp_path: Path, drops: list[Segment]) -> None:
    """The next job keeps the page cache."""
    disk = Disk(tmp_path, "rows")
    command = [sys.executable, "-c", END_IN_SYNC, disk.directory, disk.layout]
    subprocess.run(command, check=True, timeout=300, cwd=Path(__file__).parents[2])
    assert disk.served() == ALL
    assert not drops


def wait_for_threads() -> bool:
    wait_until(lambda: not any("sync" in thread.name for thread in threading.enumerate()))
    return True


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_was_invalidated_is_on_the_disk(layout: str, tmp_path: Path, syncs: Syncs) -> None:
    """A lost page would have the words of before; a disk that loses pages refuses it."""
    store = Store.create(codec_of(layout), ARC, granted=2**20, directory=str(tmp_path))
    with closing(store):
        filled(store)
        assert store.invalidate(np.array([3]))
        assert syncs.count == 1
        assert served(store) == [index for index in ALL if index != 3]
        syncs.fail()
        with pytest.raises(OSError, match="lost"):
            store.invalidate(np.array([4]))
        with pytest.raises(OSError, match="lost"):
            store.invalidate(np.array([5]))
        assert 5 in served(store), "nothing has changed"


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_slow_sync_of_another_process_is_no_loss(
    layout: str, tmp_path: Path, syncs: Syncs, stopped: Any, monkeypatch: Any
) -> None:
    """The error says so: the samples are forgotten, but perhaps not on the disk. The next call may succeed."""
    monkeypatch.setattr("lightning_stocache.cache.store.PATIENCE", 0.0)
    with closing(Store.create(codec_of(layout), ARC, granted=2**20, directory=str(tmp_path))) as store:
        filled(store)

        def sync() -> bool:
            syncs.before = stop
            return bool(store.make_safe())

        process = stopped(sync)
        with pytest.raises(OSError, match="a sync of it has not ended within 0 s"):
            store.invalidate(np.array([3]))
        assert served(store) == [index for index in ALL if index != 3]
        process.go_on()
        assert process.result()
        assert store.invalidate(np.array([3]))


def serve_from_thin(disk: Any, layout: str) -> Any:
    """What is served from a filesystem that has promised more than it has, after its pages were dropped."""
    faulthandler.disable()
    image, directory = disk.directory / "image", disk.directory / "thin"
    directory.mkdir()
    with image.open("wb") as file:
        file.truncate(2**28)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, directory]):
        subprocess.run(command, capture_output=True, check=True)
    store, log = Disk(directory, layout).open(), Log(logging.WARNING)
    stored = filled(store, ALL[:10])
    assert store.make_safe()
    disk.take_all()
    stored += filled(store, ALL[10:])
    is_safe = store.make_safe()
    store.segment.drop_page_cache()
    found = served(store)
    found_by_child = call(served, store)
    store.close()
    subprocess.run(["umount", "-l", directory], check=True)
    return stored, is_safe, found, found_by_child, log.lines


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_thin_volume_serves_no_lost_sample(layout: str, full_disk: Any) -> None:
    """It takes all samples, and cannot keep them: the sync says so, and checksums say which are lost."""
    stored, is_safe, found, found_by_child, lines = full_disk(serve_from_thin, layout, mib=64)
    assert stored == ALL
    assert not is_safe
    assert found == found_by_child
    assert ALL[:10] <= found < ALL
    assert len([line for line in lines if "has lost samples" in line]) == 1


@pytest.mark.parametrize("rounds", [30, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_whatever_is_lost_no_wrong_sample_is_served(disk: Disk, syncs: Syncs, rounds: int) -> None:
    """Any pages that were written since the last sync may be lost, those of words and numbers, too, at any moment."""
    store = disk.open()
    served_in_all = lost_in_all = 0
    for seed in range(rounds):
        generator = random.Random(seed)
        before = disk.path.read_bytes()  # what the disk has
        has_lost = False
        for _ in range(generator.randrange(1, 6)):
            filled(store, generator.sample(ALL, generator.randrange(1, 12)))
            if generator.random() < 0.5:
                lose_pages(disk.path, before, generator)
                has_lost = True
                lost_in_all += 1
            served_in_all += len(served(store))
        if has_lost:
            syncs.fail()
        assert not (store.make_safe() and has_lost)
        served_in_all += len(served(store))
        if generator.random() < 0.5 or has_lost:
            store.close()
            store = disk.open()
            served_in_all += len(served(store))
        if generator.random() < 0.2:
            store.close()
            disk.path.unlink()
            store = disk.open()
    store.close()
    assert served_in_all
    assert lost_in_all

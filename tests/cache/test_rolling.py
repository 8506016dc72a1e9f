"""A rolling store, in memory and on a disk: the oldest samples leave first, and no reader sees half of a sample.

On a disk the next job finds the samples, and serves none that is torn, damaged or another's.
"""

import errno
import faulthandler
import logging
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.rolling_slots import RollingSlots
from lightning_stocache.cache.shortage import Shortage
from lightning_stocache.cache.store import StoreHandle
from lightning_stocache.growing.rolling_writer import RollingWriter
from lightning_stocache.node.segment import Segment
from tests.cache.stores import (
    HEADER_BYTES,
    LAYOUTS,
    NO_SLOT,
    RollingDisk,
    append,
    append_for_ever,
    attach_rolling,
    break_one_block,
    codec_of,
    gathered,
    number_of,
    power_cut,
    refuse_stores,
    resident,
    rolling_store,
    sample,
)
from tests.jobs import Log, warnings
from tests.processes import Child, ChildError, call, ends_alive, wait_until


@pytest.fixture
def store() -> Iterator[RollingStore]:
    """A store of eight rows."""
    store = RollingStore.empty(codec_of("rows"), 8)
    yield store
    store.close()


def test_the_oldest_leave_first(store: RollingStore) -> None:
    """After any number of appends the last samples are resident, as many as there are slots."""
    for number in range(50):
        append(store, range(number, number + 1))
        assert resident(store) == list(range(max(number - 7, 0), number + 1))
    assert (store.appended, store.evicted, store.filled) == (50, 42, 8)
    assert store.lookup(np.array([-1, 0, 7, 8])).tolist() == [NO_SLOT, 0, 7, NO_SLOT]


def test_what_does_not_fit_is_refused(store: RollingStore) -> None:
    """A sample of another kind or without room replaces none, and reading before or after the store's life fails."""
    with pytest.raises(RuntimeError, match="no sample has been appended yet"):
        store.read(np.array([0]))
    append(store, range(1, 2))
    with pytest.raises(SampleMismatchError, match="sample 3"):
        store.append((torch.zeros(3), 0), index=3)
    assert resident(store) == [1]
    records = RollingStore.empty(codec_of("records"), granted=400_000)
    append(records, range(1, 2))
    with pytest.raises(ValueError, match="larger than the whole rolling cache"):
        records.append({"number": 2, "words": torch.zeros(10**6)})
    assert resident(records) == [1]
    count = records.count
    assert all(records.append({"number": number}) for number in range(3 * count))
    assert records.filled == count
    left = [read["number"] for read in records.read(records.readable_slots())]
    assert sorted(left) == list(range(2 * count, 3 * count))
    samples = iter(records.read(records.readable_slots()))
    records.close()
    with pytest.raises(IndexError):
        next(samples)


def test_what_changes_during_an_epoch_gives_another_sample(
    store: RollingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers do not wait for a writer: for a slot that is being written they get another resident sample, and count
    it. A sample that left is replaced by the newer one of its slot, also where a writer overtakes the copy."""
    append(store, range(8))
    store.begin_epoch()
    assert gathered(store, np.array([0, 1, 7])) == [0, 1, 7]
    assert store.renewed == 0
    append(store, range(8, 9))
    assert gathered(store, np.array([0, 1])) == [8, 1]
    assert store.renewed == 1
    gather = store.layout.gather

    def overtaken(slots: Any, into: Any, pool: Any) -> None:
        gather(slots, into, pool)
        append(store, range(9, 10))

    with monkeypatch.context() as patch:
        patch.setattr(store.layout, "gather", overtaken)
        assert gathered(store, np.array([0, 1])) == [8, 9]
    taken = store.take()
    assert taken == 2
    read = gathered(store, np.full(20, taken))
    assert 2 not in read
    assert len(set(read)) > 2  # not always the same one
    assert store.substituted == 20
    assert store.filled == 8  # its sample is about to come
    store.finish(taken)


def test_a_reader_waits_for_the_only_sample_while_it_is_replaced() -> None:
    """A store whose few slots are all being written is not empty."""
    store = RollingStore.empty(codec_of("rows"), 1)
    append(store, range(7, 8))
    taken = store.take()
    writer = threading.Timer(0.2, store.finish, [taken])
    writer.start()
    assert gathered(store, np.array([0])) == [7]
    writer.join()  # a sample can be read before its writer has given the slot up
    store.close()


def test_threads_keep_to_their_own_slots() -> None:
    """A slot that a thread is writing is not taken by another one, whose turn comes round: it tries again."""
    with closing(RollingStore.empty(codec_of("rows"), 2)) as store:
        taken = store.take()
        assert taken is not None
        append(store, range(1))
        assert store.take() is None
        store.finish(taken)
        append(store, range(1, 3))
        assert resident(store) == [1, 2]


# ---- other processes ----


def read_written(store: RollingStore, slot: int) -> None:
    signal.alarm(30)  # ends this process
    assert slot not in gathered(store, np.full(20, slot))


@pytest.mark.processes
def test_a_process_that_is_forked_while_a_thread_draws_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy's generators have locks, which a forked process would inherit locked."""
    generators: list[np.random.Generator] = []
    plain = np.random.default_rng

    def recorded() -> np.random.Generator:
        generators.append(plain())
        return generators[-1]

    monkeypatch.setattr(np.random, "default_rng", recorded)
    with closing(RollingStore.empty(codec_of("rows"), 8)) as store, ThreadPoolExecutor(1) as thread:
        append(store, range(11))
        taken = store.take()
        gathered(store, np.array([taken]))
        assert generators
        locks = [generator.bit_generator.lock for generator in generators]
        for lock in locks:
            thread.submit(lock.acquire).result()
        try:
            assert ends_alive(read_written, store, taken)
        finally:
            for lock in locks:
                thread.submit(lock.release).result()
        store.finish(taken)


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (RollingStore, "take"),
        (RollingSlots, "lock"),
        (RollingSlots, "begin"),
        (RollingStore, "_write_sample"),
        (RollingSlots, "publish"),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_who_is_interrupted_while_it_appends_keeps_no_slot(
    layout: str, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C comes at the end of any step: other threads and processes can append to all slots."""
    store = rolling_store(codec_of(layout), 8)
    append(store, range(3))
    plain = getattr(owner, name)

    def interrupted(*args: Any) -> None:
        plain(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            append(store, [3])
    with ThreadPoolExecutor(1) as other:
        other.submit(append, store, range(10, 30)).result()
    with closing(attach_rolling(store.handle)) as again:
        append(again, range(30, 50))
    assert resident(store)[-1] == 49
    store.close()


def take_and_die(handle: StoreHandle) -> None:
    attach_rolling(handle).take()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_the_slot_of_a_killed_writer_is_taken_in_its_turn(store: RollingStore) -> None:
    """Readers pass over the slot of a killed writer, until its turn comes again."""
    append(store, range(3))
    with pytest.raises(ChildError, match="SIGKILL"):
        call(take_and_die, store.handle)
    assert resident(store) == [0, 1, 2]
    append(store, range(3, 10))
    assert store.readable_slots().tolist() == [0, 1, 2, 4, 5, 6, 7]
    append(store, range(10, 12))
    assert resident(store) == list(range(4, 12))


@pytest.mark.processes
def test_a_refused_slot_shrinks_no_store(store: RollingStore, monkeypatch: Any, caplog: Any) -> None:
    """Where the slot of a killed writer gets no memory in its turn, all other samples stay."""
    append(store, range(3))
    with pytest.raises(ChildError, match="SIGKILL"):
        call(take_and_die, store.handle)
    append(store, range(3, 10))
    before = resident(store)
    refuse_stores(monkeypatch)
    assert not store.append(sample("rows", 10))
    assert store.refuses
    assert resident(store) == before == list(range(3, 10))
    assert store.limit == 8
    assert caplog.text.count("takes no new samples for now") == 1


def grow_without_memory(layout: str) -> tuple[Any, ...]:
    store = RollingStore.empty(codec_of(layout), 1000, granted=10_000_000)
    append(store, range(300))
    return store.capacity, store.filled, resident(store)


@pytest.mark.processes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_where_memory_ends_the_store_rolls_within_what_it_has(layout: str, small_shm: Any) -> None:
    """A full /dev/shm is no error: the store stops growing, and the oldest samples leave from then on."""
    capacity, filled, left = small_shm(grow_without_memory, layout, mib=1)
    assert 20 < filled < (160 if layout == "rows" else 200)
    assert layout == "records" or filled == capacity
    assert left == list(range(300 - filled, 300))


# ---- on a disk ----


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> RollingDisk:
    return RollingDisk(tmp_path, request.param)


def test_the_next_job_goes_on_where_the_last_one_was(disk: RollingDisk) -> None:
    """Each job finds what was resident. The oldest samples leave first, whichever job has written them."""
    came, before = 0, 0
    for more in (5, 0, 30, 7, 100, 1):
        with closing(disk.open()) as store:
            assert (store.filled, store.found, store.appended, store.evicted) == (before, before, 0, 0)
            append(store, range(came, came + more))
            came += more
            found = resident(store)
            assert found == list(range(came - len(found), came))
            assert (store.appended, store.renewed) == (more, min(more, len(found)))
            before = store.filled
    assert before < came


def test_a_damaged_generation_loses_no_later_sample(disk: RollingDisk) -> None:
    """A flipped bit gives an empty slot the largest ticket. Samples that come afterwards are there for the next job."""
    with closing(disk.open()):
        pass
    content = bytearray(disk.path.read_bytes())
    content[HEADER_BYTES + 7] ^= 1 << 4  # bit 60 of the first generation
    disk.path.write_bytes(content)
    with closing(disk.open()) as store:
        append(store, range(3))
    with closing(disk.open()) as store:
        assert resident(store) == [0, 1, 2]


def test_a_sample_that_was_damaged_is_dropped(disk: RollingDisk) -> None:
    """A flipped bit in any sample costs that sample. Another one is served in its place."""
    with closing(disk.open()) as store:
        append(store, range(1, disk.samples))
        numbers = resident(store)
    content = disk.path.read_bytes()
    for number in numbers:
        damaged = bytearray(content)
        words = sample(disk.layout, number)["words" if disk.layout == "records" else 0]
        damaged[content.rindex(bytes(words.numpy())) + len(words) // 2] ^= 1
        disk.path.write_bytes(damaged)
        with closing(disk.open()) as store:
            indices, slots = store.slots_by_index(disk.samples)
            slot = slots[indices == number]
            slot = slot if len(slot) else slots[:1]  # the newest sample was dropped already
            assert number not in [number_of(read) for read in store.read(slot.repeat(9))]
            assert store.filled == len(numbers) - 1


def test_no_half_of_a_generation_looks_like_a_sample(disk: RollingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader may see any bytes of a number that is being written to a disk. Only in a slot that cannot be read does
    more than one byte change."""
    put, seen = Segment.put, 0

    def checked(segment: Segment, offset: int, content: bytes) -> None:
        nonlocal seen
        if first <= offset < first + 8 * store.count:
            before = segment.fetch(offset, len(content))
            changed = [number for number, byte in enumerate(content) if byte != before[number]]
            seen += 1
            assert len(changed) == 1 or (offset - first) // 8 not in store.readable_slots()
        put(segment, offset, content)

    with closing(disk.open()) as store:
        first = store.layout.offset_in("state", 0)
        append(store, range(100, 100 + 2 * store.count))
        monkeypatch.setattr(Segment, "put", checked)
        append(store, range(10 * disk.samples))  # tickets of two bytes
        store.finish(store.take(10), is_whole=False)
    assert seen > 10 * disk.samples


def test_what_the_disk_refuses_is_not_stored(disk: RollingDisk, monkeypatch: Any, caplog: Any) -> None:
    """Refused samples are one warning. What is resident stays. When others have made room, samples are stored."""
    now = [time.monotonic()]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with closing(disk.open()) as store:
        append(store, range(100))
        before = resident(store)
        with monkeypatch.context() as patch:
            refuse_stores(patch, errno.EROFS)
            for number in range(100, 103):
                assert not store.append(sample(disk.layout, number), number)
                assert store.refuses
                now[0] += number % 2 * 60
            store.begin_epoch()
        assert not store.append(sample(disk.layout, 103), 103), "it waits for a while"
        assert resident(store) == before
        assert store.capacity == len(before)
        now[0] += 60
        append(store, range(100, 110))
        assert resident(store)[-10:] == list(range(100, 110))
    [warning] = warnings(caplog)
    assert "takes no new samples for now: the disk refuses more samples (Read-only file system)" in warning


def test_the_first_sample_must_have_room(disk: RollingDisk, monkeypatch: Any) -> None:
    """Without a single sample there is nothing to train on."""
    with closing(disk.open()) as store:
        refuse_stores(monkeypatch)
        with pytest.raises(OSError, match="No space left"):
            store.append(sample(disk.layout, 1), 1)


def append_until_full(disk: Any, layout: str, samples: int, copies_on_write: bool) -> Any:
    """What is resident on a disk that becomes full; for the next job; and what came when others have made room."""
    faulthandler.disable()  # a SIGBUS is reported by its number alone
    pool, log = RollingDisk(disk.directory, layout, samples), Log(logging.WARNING)
    with closing(pool.open()) as store:
        append(store, range(100))
        before = len(resident(store))
        disk.take_all()
        came = [*range(100), *(n for n in range(100, 300) if store.append(sample(layout, n), n))]
        left = resident(store)
        assert left == came[-len(left) :]
        assert len(left) >= before // 2
        assert copies_on_write or samples < 100 or store.capacity <= before
    try:
        with closing(pool.open()) as store:
            assert resident(store) == left
    except OSError:
        assert copies_on_write  # it cannot note what it has found
    disk.make_room()
    with closing(pool.open()) as store:
        assert resident(store) == left
        append(store, range(300, 320))
        assert resident(store)[-20:] == list(range(300, 320))
    return came[-1], log.lines


@pytest.mark.processes
@pytest.mark.parametrize(("filesystem", "mib"), [("tmpfs", 96), ("ext4", 96), ("btrfs", 256)])
@pytest.mark.parametrize("samples", [1000, 24])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_full_disk_ends_no_training(layout: str, samples: int, filesystem: str, mib: int, full_disk: Any) -> None:
    """A store that grows stops growing, with one warning, and rolls on. A disk that copies on write (btrfs) has no room
    for any write then: one warning, too, and what was resident stays. The next job goes on where it has room."""
    copies_on_write = filesystem == "btrfs"
    last, lines = full_disk(append_until_full, layout, samples, copies_on_write, filesystem=filesystem, mib=mib)
    assert len(lines) == (copies_on_write or samples == 1000)
    assert (last < 299) == copies_on_write


def test_a_store_that_has_stopped_growing_leaves_larger_samples_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """One warning; others are stored, and writers do not wait. What is larger than the budget is an error."""
    with closing(RollingDisk(tmp_path, "records", 100).open()) as store:
        append(store, range(30))
        monkeypatch.setattr(Shortage, "comes_with", lambda shortage, nbytes: "no room")
        append(store, range(30, 33))
        larger = {"number": 33, "words": torch.full((store.granted_bytes // 16,), ~33)}
        before = resident(store)
        caplog.clear()
        RollingWriter(store).append(larger, 33)
        assert store.append(larger, 33) is None
        assert resident(store) == before
        [warning] = warnings(caplog)
        assert "Larger samples than that are left out" in warning
        append(store, range(34, 36))
        with pytest.raises(ValueError, match="larger than the whole rolling cache"):
            store.append({"number": 36, "words": torch.zeros(store.granted_bytes)})


def test_a_block_that_cannot_be_read_is_no_error(disk: RollingDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of that block is dropped, and another one is served in its place."""
    with closing(disk.open()) as store:
        append(store, range(8))
    with closing(disk.open()) as store:
        break_one_block(monkeypatch)
        reads = [number_of(read) for read in store.read(store.readable_slots())]
        assert len(reads) == 8
        assert len(set(reads)) == 7
        assert (store.filled, store.substituted) == (7, 1)


@pytest.mark.processes
@pytest.mark.parametrize("cuts", [8, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_power_cut_and_no_kill_gives_a_torn_or_wrong_sample(disk: RollingDisk, cuts: int) -> None:
    """Two writers are killed at work, and any page of what they wrote last may be lost. The next job serves whole
    samples under their own indices, and goes on."""
    moments, first, served, lost = random.Random(11), 0, 0, 0

    def wait_for(store: Any, samples: int) -> None:
        wait_until(lambda: store.appended >= samples)

    for _ in range(cuts):
        with closing(disk.open()) as store:
            served += len(resident(store))
            writers = [Child(append_for_ever, store.handle, first + 40_000 * number) for number in (0, 1)]
            first += 80_000
            synced = moments.randrange(1, 3 * disk.samples)
            wait_for(store, synced)
            old = disk.path.read_bytes()
            wait_for(store, synced + moments.randrange(1, 3 * disk.samples))
            time.sleep(moments.uniform(0, 0.01))
            for writer in writers:
                writer.kill()
            resident_then = store.filled
        disk.path.write_bytes(power_cut(old, disk.path.read_bytes(), moments))
        with closing(disk.open()) as store:
            found = resident(store)
            lost += resident_then - len(found)
            append(store, range(first, first + 3))
            first += 3
            assert set(resident(store)) >= set(range(first - 3, first))
    assert served
    assert lost

"""What a disk loses before it is safe is not served by a rolling store, though its slots are overwritten.

A page that is lost has what the disk had before. The tests write that back behind the store's back, in all processes.
"""

import errno
import os
import random
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.node.files import HEADER_BYTES
from lightning_stocache.node.segment import Segment
from tests.cache.stores import (
    LAYOUTS,
    RollingDisk,
    append,
    attach_rolling,
    gathered,
    lose_pages,
    number_of,
    resident,
    sample,
)
from tests.cache.test_disk_sync import Syncs, lose, wait_for_threads
from tests.jobs import warnings
from tests.processes import call, wait_until


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> RollingDisk:
    """A directory in which one job after the other opens the same store."""
    return RollingDisk(tmp_path, request.param)


@pytest.fixture
def syncs(monkeypatch: Any) -> Iterator[Syncs]:
    return Syncs(monkeypatch)


def slot_of(store: Any, number: int) -> int:
    [[index], [slot]] = (found[-1:].tolist() for found in store.slots_by_index(number + 1))
    assert index == number
    return int(slot)


def read_again(store: Any) -> list[int]:
    """The numbers of the samples that every slot gives, by itself and among others; each is compared."""
    slots = store.readable_slots()
    alone = [number_of(read) for slot in slots for read in store.read(np.array([slot]))]
    return sorted(alone + gathered(store, store.readable_slots()))


def compared(store: Any) -> int:
    """How many samples are compared with their checksums when all are read."""
    sums: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        plain = Segment.fetch
        patch.setattr(Segment, "fetch", lambda *args: (sums.append(args), plain(*args))[1])
        gathered(store, store.readable_slots())
    return len(sums)


def test_what_is_lost_before_it_is_safe_is_not_served(disk: RollingDisk, syncs: Syncs) -> None:
    """Another sample is served in its place. The others stay, for the next job, too."""
    with closing(disk.open()) as store:
        append(store, range(10))
        slots = [slot_of(store, number) for number in (3, 7)]
        lose(store, slots[0])
        assert gathered(store, np.array([slots[0]])) != [3]
        assert store.filled == 9
        lose(store, slots[1])
        assert gathered(store, np.repeat(slots[1], 5)) != [7] * 5
        assert resident(store) == [0, 1, 2, 4, 5, 6, 8, 9]
        append(store, range(10, 12))
    with closing(disk.open()) as store:
        assert {8, 9, 10, 11} <= set(resident(store))


def test_samples_are_safe_after_a_sync_that_began_later(disk: RollingDisk, syncs: Syncs) -> None:
    """What is stored while one is under way is safe after the next one."""
    with closing(disk.open()) as store:
        append(store, range(6))
        assert compared(store) == 6
        syncs.before = lambda: append(store, range(6, 10))
        assert store.make_safe()
        assert compared(store) == 4
        assert store.make_safe()
        assert compared(store) == 0
        before = store.filled
        append(store, range(10, 200))
        assert compared(store) == store.filled >= before


def test_an_overwritten_sample_does_not_come_back(disk: RollingDisk, syncs: Syncs) -> None:
    """Lost columns say that a slot has the sample of before, which was safe. Its bytes are those of a newer one."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        append(store, range(100))
        assert store.make_safe()
        old = resident(store)
        columns = os.pread(file.fileno(), store.layout.begin, HEADER_BYTES)
        append(store, range(100, 104))
        new = resident(store)
        left = [number for number in old if number not in new]
        places = [slot_of(store, number) for number in range(100, 104)]
        os.pwrite(file.fileno(), columns, HEADER_BYTES)
        assert set(read_again(store)) == set(old) & set(new)
        assert left
        assert not set(places) & set(store.readable_slots().tolist())


def test_a_slot_that_is_being_written_does_not_come_back(disk: RollingDisk, syncs: Syncs) -> None:
    """Nor does the sample whose bytes a writer has begun to overwrite, though its generation is lost."""
    with closing(disk.open()) as store, open(f"/proc/self/fd/{store.segment.descriptor}", "r+b") as file:
        append(store, range(100))
        assert store.make_safe()
        columns = os.pread(file.fileno(), store.layout.begin, HEADER_BYTES)
        slot = store.take(disk.codec.nbytes)
        os.pwrite(file.fileno(), columns, HEADER_BYTES)
        assert slot not in store.readable_slots()
        assert compared(store) == 0
        store.finish(slot, is_whole=False)


def test_what_earlier_jobs_stored_is_safe_after_any_sync(disk: RollingDisk, syncs: Syncs) -> None:
    """It is verified when it is read first. Once a sample is written, a verified one belongs to the round of then."""
    with closing(disk.open()) as store:
        append(store, range(10))
    with closing(disk.open()) as store:
        assert store.make_safe()
        assert resident(store) == list(range(10))
        assert compared(store) == 0
    with closing(disk.open()) as store:
        append(store, range(10, 11))
        assert store.make_safe()
        assert resident(store) == list(range(11))
        assert compared(store) == 10
        lose(store, slot_of(store, 4))
        assert 4 not in read_again(store)
        assert store.make_safe()
        assert compared(store) == 0


def test_after_an_error_nothing_is_stored(disk: RollingDisk, syncs: Syncs, caplog: Any) -> None:
    """One warning. What was safe is served as before, the rest with its checksum. The next job stores again."""
    with closing(disk.open()) as store, closing(attach_rolling(store.handle)) as other:
        append(store, range(5))
        assert store.make_safe()
        append(store, range(5, 10))
        syncs.fail()
        assert not store.make_safe()
        for each in (store, other):
            assert not each.append(sample(disk.layout, 10), 10)
            assert each.refuses
            assert compared(each) == 5
            assert not each.make_safe()
        [warning] = warnings(caplog)
        assert "has lost samples" in warning
    with closing(disk.open()) as store:
        assert resident(store) == list(range(10))
        append(store, range(10, 12))


@pytest.mark.parametrize("has_failed", [True, False])
def test_lost_pages_are_read_from_the_disk_by_the_next_job(
    disk: RollingDisk, syncs: Syncs, monkeypatch: Any, has_failed: bool
) -> None:
    """They may be whole in the page cache. Without an error it stays."""
    dropped: list[Segment] = []
    with closing(disk.open()) as store:
        append(store, range(5))
        if has_failed:
            syncs.fail()
        assert store.make_safe() is not has_failed
    monkeypatch.setattr(Segment, "drop_page_cache", lambda segment: dropped.append(segment))
    for _ in range(2):
        with closing(disk.open()) as store:
            assert resident(store) == list(range(5))
    assert len(dropped) == has_failed


def append_in(handle: Any, first: int, last: int) -> None:
    with closing(RollingStore.attach(handle)) as store:
        append(store, range(first, last))


@pytest.mark.processes
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_other_processes_append_becomes_safe(disk: RollingDisk, syncs: Syncs, method: str) -> None:
    """Whether they live or not; and a sample that they replace is not safe any more."""
    with closing(disk.open()) as store:
        append(store, range(100))
        assert store.make_safe()
        assert compared(store) == 0
        call(append_in, store.handle, 100, 103, method=method)
        assert compared(store) == 3
        assert store.make_safe()
        assert compared(store) == 0


def test_a_sync_begins_by_itself(disk: RollingDisk) -> None:
    """In a thread, when a sample is appended, or read that is not safe; and at the end of an epoch."""
    with closing(disk.open()) as store:
        append(store, range(1))
        wait_until(lambda: compared(store) == 0)
        append(store, range(1, 3))
        assert compared(store) == 2, "the next one is due in a minute"
        store.end_epoch()
        wait_until(lambda: compared(store) == 0)
    with closing(disk.open()) as store:
        assert resident(store) == [0, 1, 2]
        wait_until(lambda: compared(store) == 0)
    assert wait_for_threads()


def test_a_disk_without_room_for_a_mark_ends_no_training(
    disk: RollingDisk, syncs: Syncs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost sample is not read again and again, though the disk refuses to note that it is lost."""

    def refuse(*_: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with closing(disk.open()) as store:
        append(store, range(3))
        lose(store, *(slot_of(store, number) for number in range(3)))
        monkeypatch.setattr(Segment, "put", refuse)
        monkeypatch.setattr("lightning_stocache.cache.rolling_reader.poll", lambda pause: [0, 1])
        with pytest.raises(RuntimeError, match="the rolling cache is empty"):
            read_again(store)


@pytest.mark.parametrize("rounds", [30, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_whatever_is_lost_no_wrong_sample_is_served(disk: RollingDisk, syncs: Syncs, rounds: int) -> None:
    """Any pages that were written since the last sync may be lost, those of columns, too, at any moment."""
    store, number = disk.open(), 0
    served_in_all = lost_in_all = 0
    for seed in range(rounds):
        generator = random.Random(seed)
        before = disk.path.read_bytes()  # what the disk has
        has_lost = False
        for _ in range(generator.randrange(1, 6)):
            more = generator.randrange(1, 2 * disk.samples)
            append(store, range(number, number + more))
            number += more
            if generator.random() < 0.5:
                lose_pages(disk.path, before, generator)
                has_lost = True
                lost_in_all += 1
            append(store, range(number, number + 3))
            number += 3
            served_in_all += len(read_again(store))
        if has_lost:
            syncs.fail()
        assert not (store.make_safe() and has_lost)
        served_in_all += len(read_again(store))
        if generator.random() < 0.5 or has_lost:
            store.close()
            store = disk.open()
            append(store, range(number, number + 1))
            number += 1
            served_in_all += len(read_again(store))
    store.close()
    assert served_in_all
    assert lost_in_all

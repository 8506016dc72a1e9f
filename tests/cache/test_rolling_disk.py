"""A rolling store on a disk: the next job finds the samples, and serves none that is torn, damaged or another's."""

import os
import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lightning_stocache.node.segment import Segment
from tests.cache.disks import power_cut
from tests.cache.stores import HEADER_BYTES, LAYOUTS, NO_PLACE, attach_rolling, path_of, resident, rolling_disk_store
from tests.cache.test_torn_reads import codec_of, whole
from tests.cache.test_torn_reads import sample as sample_of
from tests.processes import Child, ChildError, call, killed_at_line, wait_until

SAMPLES = 24
LATER = 10**6  # more than any number of a sample before


class Disk:
    """A directory in which one job after the other opens the same rolling store."""

    def __init__(self, directory: Path, layout: str) -> None:
        self.directory, self.layout, self.codec = directory, layout, codec_of(layout)
        self.path = path_of(directory)

    def open(self) -> Any:
        return closing(rolling_disk_store(self.codec, SAMPLES, self.directory))

    def append(self, store: Any, numbers: Any) -> None:
        for number in numbers:
            assert store.append(sample_of(self.layout, number), number)

    def numbers(self, store: Any) -> list[int]:
        """The numbers of all samples that can be read: each is whole, and has the index of its number."""
        slots = np.array([slot for slot in resident(store).tolist() if store.is_sound(slot)], dtype=np.int64)
        found = [whole(self.layout, read) for read in store.read(slots)]
        assert store.substituted == 0
        by_index = store.slots_by_index(max(found, default=0) + 1)
        assert [int(by_index[number]) for number in found] == slots.tolist()
        assert np.count_nonzero(by_index != NO_PLACE) == len(found)
        return sorted(found)


@pytest.fixture(params=LAYOUTS)
def disk(request: Any, tmp_path: Path) -> Disk:
    return Disk(tmp_path, request.param)


def test_the_next_job_goes_on_where_the_last_one_was(disk: Disk) -> None:
    """Each job finds what was resident. The oldest samples leave first, whichever job has written them."""
    came, before = 0, 0
    for more in (5, 0, 30, 7, 100, 1):
        with disk.open() as store:
            assert (store.filled, store.found, store.appended, store.evicted) == (before, before, 0, 0)
            disk.append(store, range(came, came + more))
            came += more
            found = disk.numbers(store)
            assert found == list(range(came - len(found), came))
            assert (store.appended, store.renewed) == (more, min(more, len(found)))
            before = store.filled
    assert before < came


def test_a_damaged_generation_loses_no_later_sample(disk: Disk) -> None:
    """A flipped bit gives an empty slot the largest ticket. Samples that come afterwards are there for the next job."""
    with disk.open():
        pass
    content = bytearray(disk.path.read_bytes())
    content[HEADER_BYTES + 7] ^= 1 << 4  # bit 60 of the first generation
    disk.path.write_bytes(content)
    with disk.open() as store:
        disk.append(store, range(3))
    with disk.open() as store:
        assert disk.numbers(store) == [0, 1, 2]


def test_a_sample_that_was_damaged_is_dropped(disk: Disk) -> None:
    """A flipped bit in any sample costs that sample. Another one is served in its place."""
    with disk.open() as store:
        disk.append(store, range(1, SAMPLES))
        numbers = disk.numbers(store)
    content = disk.path.read_bytes()
    for number in numbers:
        damaged = bytearray(content)
        words = sample_of(disk.layout, number)["words" if disk.layout == "records" else 0]
        damaged[content.rindex(bytes(words.numpy())) + len(words) // 2] ^= 1
        disk.path.write_bytes(damaged)
        with disk.open() as store:
            slot = int(store.slots_by_index(SAMPLES)[number])
            slot = resident(store)[0] if slot == NO_PLACE else slot  # the newest sample was dropped already
            reads = [whole(disk.layout, read) for read in store.read(np.full(9, slot))]
            assert number not in reads
            assert store.filled == len(numbers) - 1


def test_a_block_that_cannot_be_read_is_no_error(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of that block is dropped, and another one is served in its place."""
    with disk.open() as store:
        disk.append(store, range(8))
    with disk.open() as store:
        real, failed = Segment.fetch, []

        def broken(segment: Segment, offset: int, length: int) -> bytes:
            if not failed:
                failed.append(offset)
                raise OSError(5, os.strerror(5))
            return real(segment, offset, length)

        monkeypatch.setattr(Segment, "fetch", broken)
        reads = [whole(disk.layout, read) for read in store.read(resident(store))]
        assert len(reads) == 8
        assert len(set(reads)) == 7
        assert (store.filled, store.substituted) == (7, 1)


def append_for_ever(handle: Any, layout: str, first: int) -> None:
    store = attach_rolling(handle)
    while True:
        while not store.append(sample_of(layout, first), first):
            pass
        first += 1


def wait_for(store: Any, samples: int) -> None:
    """Wait until so many samples have come in this job."""
    wait_until(lambda: store.appended >= samples)


@pytest.mark.processes
@pytest.mark.parametrize("cuts", [8, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_power_cut_and_no_kill_gives_a_torn_or_wrong_sample(disk: Disk, cuts: int) -> None:
    """Two writers are killed at work, and any page of what they wrote last may be lost. The next job serves whole
    samples under their own indices, and goes on."""
    moments, first, served, lost = random.Random(11), 0, 0, 0
    for _ in range(cuts):
        with disk.open() as store:
            served += len(disk.numbers(store))
            writers = [Child(append_for_ever, store.handle, disk.layout, first + 40_000 * number) for number in (0, 1)]
            first += 80_000
            synced = moments.randrange(1, 3 * SAMPLES)
            wait_for(store, synced)
            old = disk.path.read_bytes()
            wait_for(store, synced + moments.randrange(1, 3 * SAMPLES))
            time.sleep(moments.uniform(0, 0.01))
            for writer in writers:
                writer.kill()
            resident_then = store.filled
        disk.path.write_bytes(power_cut(old, disk.path.read_bytes(), moments))
        with disk.open() as store:
            found = disk.numbers(store)
            lost += resident_then - len(found)
            disk.append(store, range(first, first + 3))
            first += 3
            assert set(disk.numbers(store)) >= set(range(first - 3, first))
    assert served
    assert lost


def append_killed(disk: Disk, number: int, line: int) -> None:
    with disk.open() as store, killed_at_line(line, "cache"):
        assert store.append(sample_of(disk.layout, number), number)


@pytest.mark.processes
def test_a_writer_that_is_killed_at_any_line_does_no_harm(disk: Disk) -> None:
    """Wherever a writer dies, the next job finds all other samples, and the next writer goes on."""
    with disk.open() as store:
        disk.append(store, range(2 * SAMPLES))
        before = disk.numbers(store)
    number, line, died = 2 * SAMPLES, 0, "of SIGKILL"
    while died.endswith("of SIGKILL"):
        line += 1
        try:
            call(append_killed, disk, number, line)
            died = ""
        except ChildError as error:
            died = str(error)
        with disk.open() as store:
            found = disk.numbers(store)
            assert set(found) <= {*before, number}
            assert found == list(range(found[0], found[-1] + 1))
        before, number = found, found[-1] + 1
    assert died == ""
    assert line > 20
    with disk.open() as store:
        disk.append(store, range(LATER, LATER + SAMPLES))
        assert disk.numbers(store)[-SAMPLES // 2 :] == list(range(LATER + SAMPLES - SAMPLES // 2, LATER + SAMPLES))

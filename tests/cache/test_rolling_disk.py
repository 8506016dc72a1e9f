"""A rolling store on a disk: the next job finds the samples, and serves none that is torn, damaged or another's."""

import random
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.cache.stores import (
    HEADER_BYTES,
    LAYOUTS,
    NO_PLACE,
    append_for_ever,
    break_one_block,
    codec_of,
    number_of,
    path_of,
    power_cut,
    resident,
    rolling_disk_store,
    sample,
)
from tests.processes import Child, wait_until

SAMPLES = 24


class Disk:
    """A directory in which one job after the other opens the same rolling store."""

    def __init__(self, directory: Path, layout: str) -> None:
        self.directory, self.layout, self.codec = directory, layout, codec_of(layout)
        self.path = path_of(directory)

    def open(self) -> Any:
        return closing(rolling_disk_store(self.codec, SAMPLES, self.directory))

    def append(self, store: Any, numbers: range) -> None:
        assert all(store.append(sample(self.layout, number), number) for number in numbers)


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
            found = resident(store)
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
        assert resident(store) == [0, 1, 2]


def test_a_sample_that_was_damaged_is_dropped(disk: Disk) -> None:
    """A flipped bit in any sample costs that sample. Another one is served in its place."""
    with disk.open() as store:
        disk.append(store, range(1, SAMPLES))
        numbers = resident(store)
    content = disk.path.read_bytes()
    for number in numbers:
        damaged = bytearray(content)
        words = sample(disk.layout, number)["words" if disk.layout == "records" else 0]
        damaged[content.rindex(bytes(words.numpy())) + len(words) // 2] ^= 1
        disk.path.write_bytes(damaged)
        with disk.open() as store:
            slot = int(store.slots_by_index(SAMPLES)[number])
            slot = store.readable_slots()[0] if slot == NO_PLACE else slot  # the newest sample was dropped already
            assert number not in [number_of(read) for read in store.read(np.full(9, slot))]
            assert store.filled == len(numbers) - 1


def test_a_block_that_cannot_be_read_is_no_error(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample of that block is dropped, and another one is served in its place."""
    with disk.open() as store:
        disk.append(store, range(8))
    with disk.open() as store:
        break_one_block(monkeypatch)
        reads = [number_of(read) for read in store.read(store.readable_slots())]
        assert len(reads) == 8
        assert len(set(reads)) == 7
        assert (store.filled, store.substituted) == (7, 1)


@pytest.mark.processes
@pytest.mark.parametrize("cuts", [8, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_no_power_cut_and_no_kill_gives_a_torn_or_wrong_sample(disk: Disk, cuts: int) -> None:
    """Two writers are killed at work, and any page of what they wrote last may be lost. The next job serves whole
    samples under their own indices, and goes on."""
    moments, first, served, lost = random.Random(11), 0, 0, 0

    def wait_for(store: Any, samples: int) -> None:
        wait_until(lambda: store.appended >= samples)

    for _ in range(cuts):
        with disk.open() as store:
            served += len(resident(store))
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
            found = resident(store)
            lost += resident_then - len(found)
            disk.append(store, range(first, first + 3))
            first += 3
            assert set(resident(store)) >= set(range(first - 3, first))
    assert served
    assert lost

"""A rolling store: the oldest samples leave first, and no reader sees half of a sample."""

import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import StoreHandle
from tests.cache.stores import attach_rolling, codec_of, gathered, number_of, resident, sample
from tests.processes import ChildError, call, without_room


def append(store: RollingStore, layout: str, numbers: range) -> None:
    assert all(store.append(sample(layout, number)) for number in numbers)


@pytest.fixture
def store() -> Iterator[RollingStore]:
    """A store of eight rows."""
    store = RollingStore.empty(codec_of("rows"), 8)
    yield store
    store.close()


@pytest.fixture
def records() -> Iterator[RollingStore]:
    """A store of about sixty records."""
    store = RollingStore.empty(codec_of("records"), granted=400_000)
    yield store
    store.close()


def test_the_oldest_leave_first(store: RollingStore) -> None:
    """After any number of appends the last samples are resident, as many as there are slots."""
    for number in range(50):
        append(store, "rows", range(number, number + 1))
        assert resident(store) == list(range(max(number - 7, 0), number + 1))
    assert (store.appended, store.evicted, store.filled) == (50, 42, 8)


def test_what_does_not_fit_is_refused(store: RollingStore, records: RollingStore) -> None:
    """A sample that does not match the codec, or has no room even alone, is an error, and replaces no sample."""
    append(store, "rows", range(1, 2))
    with pytest.raises(SampleMismatchError, match="sample 3"):
        store.append((torch.zeros(3), 0), index=3)
    assert resident(store) == [1]
    append(records, "records", range(1, 2))
    with pytest.raises(ValueError, match="larger than the whole rolling cache"):
        records.append({"number": 2, "words": torch.zeros(10**6)})
    assert resident(records) == [1]


def test_an_empty_store_says_so(store: RollingStore) -> None:
    """Reading before the first append is an error in words."""
    with pytest.raises(RuntimeError, match="no sample has been appended yet"):
        store.read(np.array([0]))


def test_a_slot_that_is_being_written_gives_another_sample(store: RollingStore) -> None:
    """Readers do not wait for a writer: they get another resident sample, and count it."""
    append(store, "rows", range(8))
    taken = store.take()
    assert taken is not None
    read = gathered(store, np.full(20, taken))
    assert taken not in read
    assert len(set(read)) > 2  # not always the same one
    assert store.substituted == 20
    assert store.filled == 8  # its sample is about to come
    store.finish(taken)


def test_what_came_after_the_epoch_had_begun_is_counted(store: RollingStore) -> None:
    """A sample that left during an epoch is replaced by the newer one of its slot."""
    append(store, "rows", range(8))
    store.begin_epoch()
    assert gathered(store, np.array([0, 1, 7])) == [0, 1, 7]
    assert store.renewed == 0
    append(store, "rows", range(8, 9))
    assert gathered(store, np.array([0, 1])) == [8, 1]
    assert store.renewed == 1


def test_a_reader_waits_for_the_only_sample_while_it_is_replaced() -> None:
    """A store whose few slots are all being written is not empty."""
    store = RollingStore.empty(codec_of("rows"), 1)
    append(store, "rows", range(7, 8))
    taken = store.take()
    writer = threading.Timer(0.2, store.finish, [taken])
    writer.start()
    assert gathered(store, np.array([0])) == [7]
    writer.join()  # a sample can be read before its writer has given the slot up
    store.close()


def test_indices_outside_have_no_place(store: RollingStore) -> None:
    """An index that is no slot has no place. Reading no places gives no samples."""
    assert store.lookup(np.array([-1, 0, 7, 8])).tolist() == [-1, 0, 7, -1]
    assert store.read(np.empty(0, dtype=np.int64)) == []


# ---- records ----


def test_reading_records_after_close_is_an_error(records: RollingStore) -> None:
    """Records are copied as the caller iterates, which may be after `close`."""
    append(records, "records", range(1))
    samples = iter(records.read(records.readable_slots()))
    records.close()
    with pytest.raises(IndexError):
        next(samples)


def test_small_samples_end_at_the_number_of_slots(records: RollingStore) -> None:
    """If samples are smaller than expected, slots run out before bytes do."""
    count = records.count
    assert all(records.append({"number": number}) for number in range(3 * count))
    assert records.filled == count
    left = [read["number"] for read in records.read(records.readable_slots())]
    assert sorted(left) == list(range(2 * count, 3 * count))


def test_another_sample_replaces_a_record_that_has_left(records: RollingStore) -> None:
    """A slot that cannot be read gives another resident sample."""
    append(records, "records", range(5))
    assert {number_of(read) for read in records.read(np.array([70, 7, 1]))} <= set(range(5))
    assert records.substituted >= 1


# ---- other processes ----


def take_and_die(handle: StoreHandle) -> None:
    attach_rolling(handle).take()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_the_slot_of_a_killed_writer_is_taken_in_its_turn(store: RollingStore) -> None:
    """Readers pass over the slot of a killed writer, until its turn comes again."""
    append(store, "rows", range(3))
    with pytest.raises(ChildError, match="SIGKILL"):
        call(take_and_die, store.handle)
    assert resident(store) == [0, 1, 2]
    append(store, "rows", range(3, 10))
    assert store.readable_slots().tolist() == [0, 1, 2, 4, 5, 6, 7]
    append(store, "rows", range(10, 12))
    assert resident(store) == list(range(4, 12))


def grow_without_memory(layout: str) -> tuple[Any, ...]:
    store = RollingStore.empty(codec_of(layout), 1000, granted=10_000_000)
    append(store, layout, range(300))
    return store.capacity, store.filled, resident(store)


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "least", "most"), [("rows", 20, 160), ("records", 20, 200)])
def test_where_memory_ends_the_store_rolls_within_what_it_has(layout: str, least: int, most: int) -> None:
    """A full /dev/shm is no error: the store stops growing, and the oldest samples leave from then on."""
    capacity, filled, left = without_room(grow_without_memory, layout, mib=1)
    assert least < filled < most
    assert layout == "records" or filled == capacity
    assert left == list(range(300 - filled, 300))

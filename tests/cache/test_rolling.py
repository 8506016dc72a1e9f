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
from lightning_stocache.cache.layout import contents_of
from lightning_stocache.cache.rolling import RollingStore
from lightning_stocache.cache.store import StoreHandle, gathers
from tests.cache.test_torn_reads import codec_of, whole
from tests.cache.test_torn_reads import sample as sample_of
from tests.processes import ChildError, call, without_room

SPEC = codec_of("rows")


def sample(number: int) -> Any:
    """A row with its number in every word."""
    return sample_of("rows", number)


def record(number: int) -> Any:
    """A record with a size of its own, and its number in every word."""
    return sample_of("records", number)


def append(store: RollingStore, numbers: range) -> None:
    for number in numbers:
        store.append(sample(number))


def numbers(store: RollingStore, places: Any = None) -> list[int]:
    """The numbers of the samples in these slots, checked word by word."""
    places = store.readable_slots() if places is None else np.asarray(places)
    return [whole("rows" if gathers(store) else "records", read) for read in store.read(places)]


@pytest.fixture
def store() -> Iterator[RollingStore]:
    store = RollingStore.empty(SPEC, 8)
    yield store
    store.close()


@pytest.fixture
def records() -> Iterator[RollingStore]:
    store = RollingStore.empty(codec_of("records"), granted=500_000)
    yield store
    store.close()


def test_the_oldest_leave_first(store: RollingStore) -> None:
    """After any number of appends the last samples are resident, as many as there are slots."""
    for number in range(50):
        store.append(sample(number))
        assert sorted(numbers(store)) == list(range(max(number - 7, 0), number + 1))
    assert (store.appended, store.evicted, store.filled) == (50, 42, 8)


def test_a_sample_of_another_kind_is_refused(store: RollingStore) -> None:
    """A sample that does not match the codec is an error, and replaces no sample."""
    store.append(sample(1))
    with pytest.raises(SampleMismatchError, match="sample 3"):
        store.append((torch.zeros(3), 0), index=3)
    assert numbers(store) == [1]


def test_an_empty_store_says_so(store: RollingStore) -> None:
    """Reading before the first append is an error in words."""
    with pytest.raises(RuntimeError, match="no sample has been appended yet"):
        numbers(store, [0])


def test_a_slot_that_is_being_written_gives_another_sample(store: RollingStore) -> None:
    """Readers do not wait for a writer: they get another resident sample, and count it."""
    append(store, range(8))
    taken = store.take()
    assert taken is not None
    read = numbers(store, [taken] * 20)
    assert taken not in read
    assert len(set(read)) > 2  # not always the same one
    assert store.substituted == 20
    assert store.filled == 8  # its sample is about to come
    store.finish(taken)


def test_what_came_after_the_epoch_had_begun_is_counted(store: RollingStore) -> None:
    """A sample that left during an epoch is replaced by the newer one of its slot."""
    append(store, range(8))
    store.begin_epoch()
    assert numbers(store, [0, 1, 7]) == [0, 1, 7]
    assert store.renewed == 0
    store.append(sample(8))
    assert numbers(store, [0, 1]) == [8, 1]
    assert store.renewed == 1


def test_a_sample_that_changes_during_the_copy_is_copied_again(store: RollingStore) -> None:
    """A batch has whole samples only, even if samples are replaced while it is gathered."""
    append(store, range(8))

    into = [np.empty(size, dtype=np.uint8) for size in SPEC.sizes(8)]
    takes = 0
    live = [store.generations]

    class Generations(np.ndarray):  # type: ignore[type-arg]
        """The live generations; after the first look another sample comes."""

        def take(self, *args: Any, **more: Any) -> Any:
            nonlocal takes
            takes += 1
            found = live[0].take(*args, **more)
            if takes == 1:
                store.append(sample(100))
            return found

    store.generations = live[0].view(Generations)
    store.gather(np.arange(8), into)
    store.generations = live.pop()
    read = [whole("rows", each) for each in SPEC.split(into, 8)]
    assert read == [100, 1, 2, 3, 4, 5, 6, 7]
    assert takes > 2


def test_a_reader_waits_for_the_only_sample_while_it_is_replaced() -> None:
    """A store whose few slots are all being written is not empty."""
    store = RollingStore.empty(SPEC, 1)
    store.append(sample(7))
    taken = store.take()
    writer = threading.Timer(0.2, store.finish, [taken])
    writer.start()
    assert numbers(store, [0]) == [7]
    writer.join()  # a sample can be read before its writer has given the slot up
    store.close()


def test_indices_outside_have_no_place(store: RollingStore) -> None:
    """An index that is no slot has no place. Reading no places gives no samples."""
    assert store.lookup(np.array([-1, 0, 7, 8])).tolist() == [-1, 0, 7, -1]
    assert store.read(np.empty(0, dtype=np.int64)) == []


def test_a_look_from_outside_says_how_many_samples_there_are(store: RollingStore) -> None:
    """`contents_of` tells how many slots have a sample."""
    append(store, range(5))
    file = os.open(store.handle.segment.data, os.O_RDONLY)
    contents = contents_of(file)
    os.close(file)
    assert (contents.damage, contents.filled) == ("", 5)
    assert contents.manifest is not None
    assert contents.manifest.geometry.slots == 8


# ---- records ----


def test_reading_records_after_close_is_an_error(records: RollingStore) -> None:
    """Records are copied as the caller iterates, which may be after `close`."""
    records.append(record(0))
    samples = iter(records.read(records.readable_slots()))
    records.close()
    with pytest.raises(IndexError):
        next(samples)


def test_small_samples_end_at_the_number_of_slots(records: RollingStore) -> None:
    """If samples are smaller than expected, slots run out before bytes do."""
    count = records.count
    for number in range(3 * count):
        assert records.append({"number": number})
    assert records.filled == count
    left = [read["number"] for read in records.read(records.readable_slots())]
    assert sorted(left) == list(range(2 * count, 3 * count))


def test_a_sample_that_is_too_large_is_refused(records: RollingStore) -> None:
    """A record that has no room even alone is an error, and the resident samples stay."""
    records.append(record(1))
    with pytest.raises(ValueError, match="larger than the whole rolling cache"):
        records.append({"number": 2, "words": torch.zeros(10**6)})
    assert numbers(records) == [1]


def test_another_sample_replaces_a_record_that_has_left(records: RollingStore) -> None:
    """A slot that cannot be read gives another resident sample."""
    for number in range(5):
        records.append(record(number))
    assert set(numbers(records, [70, 7, 1])) <= set(range(5))
    assert records.substituted >= 1


# ---- other processes ----


def take_and_die(handle: StoreHandle) -> None:
    store = RollingStore.attach(handle)
    store.take()
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.processes
def test_the_slot_of_a_killed_writer_is_taken_in_its_turn(store: RollingStore) -> None:
    """Readers pass over the slot of a killed writer, until its turn comes again."""
    append(store, range(3))
    with pytest.raises(ChildError, match="SIGKILL"):
        call(take_and_die, store.handle)
    assert sorted(numbers(store)) == [0, 1, 2]
    append(store, range(3, 10))
    assert store.readable_slots().tolist() == [0, 1, 2, 4, 5, 6, 7]
    append(store, range(10, 12))
    assert sorted(numbers(store)) == list(range(4, 12))


def grow_without_memory(layout: str) -> tuple[int, int, list[int]]:
    store = RollingStore.empty(codec_of(layout), 1000, granted=10_000_000)
    for number in range(300):
        assert store.append(sample_of(layout, number))
    return store.capacity, store.filled, sorted(numbers(store))


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "mib", "least", "most"), [("rows", 1, 5, 40), ("records", 2, 20, 200)])
def test_where_memory_ends_the_store_rolls_within_what_it_has(layout: str, mib: int, least: int, most: int) -> None:
    """A full /dev/shm is no error: the store stops growing, and the oldest samples leave from then on."""
    capacity, filled, left = without_room(grow_without_memory, layout, mib=mib)
    assert least < filled < most
    assert layout == "records" or filled == capacity
    assert left == list(range(300 - filled, 300))

"""A rolling store of records: samples of any size, of which the oldest leave, and of which nobody reads half."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.store import Store
from tests.processes import without_room

Sample = dict[str, object]


def sample(number: int) -> Sample:
    """One of a size of its own, which says everywhere which it is."""
    words = random.Random(number).randrange(1, 4000)
    return {"number": number, "words": torch.full((words,), number), "text": f"{number} " * (words % 50)}


CODEC = RecordCodec.infer([sample(number) for number in range(20)])


def whole(read: Sample) -> int:
    number = read["number"]
    assert isinstance(number, int)
    expected = sample(number)
    assert read["text"] == expected["text"]
    assert torch.equal(read["words"], expected["words"])  # type: ignore[arg-type]
    return number


def numbers(store: Store, places: object = None) -> list[int]:
    slots = store.roll.readable_slots() if places is None else np.asarray(places)
    return [whole(read) for read in store.read(slots)]


@pytest.fixture
def store() -> Iterator[Store]:
    store = Store.create_rolling(CODEC, granted=500_000)
    yield store
    store.close()


def test_what_is_read_after_close_is_an_error_in_words() -> None:
    """Samples are copied out when they are asked for, which may be too late."""
    store = Store.create_rolling(CODEC, granted=500_000)
    store.append(sample(0))
    samples = store.read(store.roll.readable_slots())
    store.close()
    with pytest.raises(RuntimeError, match="was closed while samples were read"):
        next(samples)


def test_small_samples_end_at_the_number_of_slots() -> None:
    """Where samples are smaller than was expected, slots run out before bytes do."""
    store = Store.create_rolling(CODEC, granted=200_000)
    for number in range(3 * store.roll.count):
        assert store.append({"number": number})
    assert store.filled == store.roll.count
    assert sorted(read["number"] for read in store.read(store.roll.readable_slots())) == list(
        range(2 * store.roll.count, 3 * store.roll.count)
    )
    store.close()


def test_a_sample_that_is_too_large_is_refused(store: Store) -> None:
    """It could not even lie there alone; what is resident stays."""
    store.append(sample(1))
    with pytest.raises(ValueError, match="larger than the whole rolling cache"):
        store.append({"number": 2, "words": torch.zeros(10**6)})
    assert numbers(store) == [1]


def test_what_has_left_is_replaced_by_another(store: Store) -> None:
    """A slot that cannot be read gives another resident sample."""
    for number in range(5):
        store.append(sample(number))
    assert set(numbers(store, [70, 7, 1])) <= set(range(5))
    assert store.roll.substituted >= 1


def test_a_reader_that_is_kept_waiting_while_all_that_it_saw_leaves(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It looks again, and finds what came instead."""
    readable, last = store.roll.readable, 5
    for number in range(last):
        assert store.append(sample(number))

    def late(slots: Any) -> Any:
        nonlocal last
        while len(slots) == 5 and store.roll.evicted < 5:
            assert store.append(sample(last))
            last += 1
        return readable(slots)

    monkeypatch.setattr(store.roll, "readable", late)
    slots = store.roll.readable_slots()
    assert len(slots) > 0
    assert store.roll.evicted >= 5
    assert numbers(store, slots) == list(range(last - len(slots), last))


def grow_without_memory() -> tuple[int, list[int]]:
    store = Store.create_rolling(CODEC, granted=10_000_000)
    for number in range(300):
        assert store.append(sample(number))
    return store.roll.evicted, sorted(numbers(store))


@pytest.mark.processes
def test_where_memory_ends_the_store_rolls_within_what_it_has() -> None:
    """A full /dev/shm is no error: the store stops growing, and the oldest leave from then on."""
    evicted, left = without_room(grow_without_memory, mib=2)
    assert evicted > 100
    assert left == list(range(300 - len(left), 300))
    assert len(left) > 20

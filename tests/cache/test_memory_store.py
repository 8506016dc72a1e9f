"""One contract for stores in memory, of rows and of records: every process is served what was stored, whole."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from lightning_stocache.cache.placement import Ring
from lightning_stocache.cache.store import Store
from tests.cache.stores import LAYOUTS, LENGTH, NO_PLACE, SAMPLES, codec_of, encoded, gathers, memory_store, same
from tests.processes import call, call_many

GRANTED = 2**23


@pytest.fixture(params=LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def opened(layout: str, slots: int = LENGTH, granted: int = GRANTED, **more: Any) -> Any:
    """A store with so many slots."""
    return memory_store(codec_of(layout), granted, Ring.cut(LENGTH, (1.0,), (slots,)).arcs[0], **more)


@pytest.fixture
def store(layout: str) -> Iterator[Any]:
    store = opened(layout)
    yield store
    store.close()


def sample(store: Any, index: int) -> Any:
    return SAMPLES["rows" if gathers(store) else "records"](index)


def filled(store: Any, indices: Sequence[int] = range(LENGTH)) -> list[int]:
    """Store those samples; the indices that were stored."""
    return [index for index in indices if store.fill(index, sample(store, index))]


def contents(store: Any, indices: Sequence[int]) -> list[list[memoryview]]:
    return [encoded(store.codec, sample(store, index), index) for index in indices]


def served(store: Any) -> list[int]:
    """The indices that a store has; each sample is compared, by itself, among others and in a gather."""
    places = store.lookup(np.arange(LENGTH))
    ready = places[places != NO_PLACE]
    found = np.flatnonzero(places != NO_PLACE).tolist()
    assert all(same(got, sample(store, index)) for index, got in zip(found, store.read(ready), strict=True))
    assert [index for index in range(LENGTH) if store.get(index) is not None] == found
    assert all(same(store.get(index), sample(store, index)) for index in found)
    if gathers(store):
        memory = [np.empty(size, dtype=np.uint8) for size in store.codec.sizes(len(ready))]
        store.gather(ready[::-1], memory)
        rows = store.codec.split(memory, len(ready))[::-1]
        assert all(same(got, sample(store, index)) for index, got in zip(found, rows, strict=True))
    return found


def scribble(sample: Any) -> None:
    """Overwrite the tensor of a sample."""
    (sample[0] if isinstance(sample, tuple) else sample["array"]).fill_(77)


def use_elsewhere(store: Any, handle: Any) -> dict[str, Any]:
    """In another process: read what is there, fill what is not, and say what was seen; also by its address."""
    before = served(store)
    attached: Any = Store.attach(handle)
    assert served(attached) == before
    seen = {"before": before, "stored": filled(store, range(10, 20)), "filled": store.filled, "length": len(store)}
    assert served(attached) == served(store)
    attached.close(), store.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "method", "backend"),
    [
        ("rows", "fork", "file"),
        ("records", "fork", "tmpfile"),
        ("rows", "forkserver", "memfd"),
        ("records", "forkserver", "file"),
        ("rows", "spawn", "tmpfile"),
    ],
)
def test_what_was_stored_is_served_in_every_process(layout: str, method: str, backend: str) -> None:
    """Samples are got after they were filled, here and elsewhere; each is stored once; the rest has no slot."""
    store = opened(layout, slots=36, backend=backend)
    with_slot = [index for index in range(LENGTH) if store.has_place(index)]
    assert len(with_slot) == len(store) == 36
    assert served(store) == []
    here = filled(store, range(15))
    assert here == [index for index in with_slot if index < 15]
    seen = call(use_elsewhere, store, store.handle, method=method)
    assert seen["before"] == here
    assert seen["stored"] == [index for index in with_slot if 15 <= index < 20]
    assert (seen["length"], seen["filled"]) == (36, store.filled)
    assert served(store) == here + seen["stored"]
    store.close()


def test_indices_outside_of_the_dataset_have_no_place(store: Any) -> None:
    """The ring would wrap them around; those from the end are the same samples."""
    filled(store, range(0, LENGTH, 3))
    places = store.lookup(np.arange(-2 * LENGTH, 2 * LENGTH).reshape(4, LENGTH))
    assert places[1].tolist() == places[2].tolist() == store.lookup(np.arange(LENGTH)).tolist()
    assert set(places[[0, 3]].flatten().tolist()) == {NO_PLACE}
    assert [store.place(index) for index in range(LENGTH)] == places[2].tolist()
    assert [store.get(index - LENGTH) is None for index in range(LENGTH)] == [bool(i % 3) for i in range(LENGTH)]
    for index in (-LENGTH - 1, LENGTH, 7 * LENGTH):
        assert (store.has_place(index), store.get(index), store.place(index)) == (False, None, NO_PLACE)
        assert not store.fill(index, sample(store, 0))


def test_a_store_without_slots_serves_nothing(layout: str) -> None:
    """Everything is a bypass, and nothing fails."""
    store = opened(layout, slots=0, granted=0)
    assert len(store) == store.filled == 0
    assert list(store.put([1, 2], contents(store, [1, 2]))) == [None, None]
    assert filled(store) == served(store) == []
    store.close()


def test_changing_a_sample_changes_nothing_else(store: Any) -> None:
    """Neither the one that was stored nor one that was served reaches into the store, or into another read."""
    given = sample(store, 3)
    store.fill(3, given)
    scribble(given)
    filled(store)
    for index in range(LENGTH):
        scribble(store.get(index))
    first, second = store.read(store.lookup(np.array([3, 3])))
    scribble(first)
    assert same(second, sample(store, 3))
    assert served(store) == list(range(LENGTH))


def test_many_samples_are_stored_one_by_one(layout: str) -> None:
    """Each as the iterator comes to it; what has no slot, and what is there already, is told apart and stays."""
    store = opened(layout, slots=LENGTH // 2)
    indices = list(range(10))
    has_slot = [store.has_place(index) for index in indices]
    first = has_slot.index(True)
    filled(store, [first])
    outcomes = store.put(indices, contents(store, [*indices[:first], 9, *indices[first + 1 :]]))
    for index, outcome in enumerate(outcomes):
        assert outcome is ((index != first) if has_slot[index] else None)
        assert store.filled == max(sum(has_slot[: index + 1]), 1)
    assert served(store) == [index for index in indices if has_slot[index]]
    store.close()


@pytest.mark.processes
def test_a_slot_is_free_after_a_store_that_failed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came before stays, the error of the system comes through, and the slot can be filled by the next."""
    write = store.segment.store

    def failing(offset: int, *parts: memoryview) -> None:
        write(offset, *parts)
        raise OSError(5, "broken")

    outcomes = store.put(range(3), contents(store, range(3)))
    assert next(outcomes)
    with monkeypatch.context() as patch:
        patch.setattr(store.segment, "store", failing)
        with pytest.raises(OSError, match="broken"):
            next(outcomes)
    assert served(store) == [0]
    assert call(filled, store, [1]) == [1]
    assert served(store) == [0, 1]


def test_copies_in_one_process_are_closed_apart(store: Any) -> None:
    """A copy that was unpickled here serves the same, and gives its views up by itself."""
    filled(store)
    copy = pickle.loads(pickle.dumps(store))
    assert served(copy) == list(range(LENGTH))
    store.close()
    copy.close()
    assert copy.closed
    assert copy.memory_bytes == 0


def fill_in_disorder(store: Any, seed: int) -> list[int]:
    stored = filled(store, random.Random(seed).sample(range(LENGTH), LENGTH))
    served(store)
    return stored


@pytest.mark.processes
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_processes_that_fill_at_once_store_each_sample_once(layout: str, share: float) -> None:
    """Also where not all find room; what is stored is served to all."""
    codec = codec_of(layout)
    nbytes = sum(sum(part.nbytes for part in encoded(codec, SAMPLES[layout](index), index)) for index in range(LENGTH))
    store = opened(layout, round(LENGTH * share) if layout == "rows" else LENGTH, int(nbytes * share * 1.2) + 4096)
    stored = sum(call_many(fill_in_disorder, [(store, seed) for seed in range(3)]), list[int]())
    assert len(stored) == len(set(stored)) == store.filled
    assert served(store) == sorted(stored)
    assert (store.filled == LENGTH) == (share == 1.0)
    store.close()

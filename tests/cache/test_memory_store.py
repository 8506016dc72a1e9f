"""One contract for stores in memory, of rows and of records: every process is served what was stored, whole."""

import errno
import os
import pickle
import random
import time
import weakref
from collections.abc import Iterable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torchvision import tv_tensors

from lightning_stocache.cache.codec import nbytes_of
from lightning_stocache.cache.layout_records import Records
from lightning_stocache.cache.placement import Arc, Ring
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.seats import EMPTY, Seats
from lightning_stocache.cache.store import Store
from tests.cache.leaves import same
from tests.cache.stores import (
    ALL,
    LAYOUTS,
    LENGTH,
    NO_SLOT,
    PAGE,
    codec_of,
    encoded,
    filled,
    memory_store,
    number_of,
    refuse_stores,
    sample,
    served,
)
from tests.odds import CROWD
from tests.processes import call, hanging, wait_until

GRANTED = 2**23
MIB = 1 << 20


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


def contents(store: Any, indices: Iterable[int]) -> list[list[memoryview]]:
    return [encoded(store, index) for index in indices]


def scribble(read: Any) -> None:
    """Overwrite the words of a sample."""
    (read[0] if isinstance(read, tuple) else read["words"]).fill_(77)


def use_elsewhere(store: Any, handle: Any, before: list[int], new: list[int]) -> None:
    """In another process: read what is stored, and fill more; also through the handle."""
    attached = Store.attach(handle)
    assert served(store) == served(attached) == before
    assert filled(store, range(10, 20)) == new
    assert served(store) == served(attached) == before + new
    assert (store.filled, len(store)) == (len(before + new), 36)
    attached.close(), store.close()


@pytest.mark.processes
@pytest.mark.parametrize(
    ("layout", "method", "backend"), [("records", "fork", "memfd"), ("rows", "forkserver", "file")]
)
def test_what_was_stored_is_served_in_every_process(layout: str, method: str, backend: str) -> None:
    """Filled samples are served in every process. Each is stored once; the other indices have no slot."""
    store = opened(layout, slots=36, backend=backend)
    with_slot = [index for index in range(LENGTH) if store.has_slot(index)]
    assert len(with_slot) == len(store) == 36
    assert served(store) == []
    here = filled(store, range(15))
    assert here == [index for index in with_slot if index < 15]
    new = [index for index in with_slot if 15 <= index < 20]
    call(use_elsewhere, store, store.handle, here, new, method=method)
    assert served(store) == here + new
    store.close()


def test_indices_outside_of_the_dataset_have_no_place(store: Any, layout: str) -> None:
    """Nor has a negative index, whose meaning is the source's own. A served sample shares memory with nothing else."""
    given = sample(layout, 3)
    store.fill(3, given)
    scribble(given)
    filled(store, range(0, LENGTH, 3))
    places = store.lookup(np.arange(-2 * LENGTH, 2 * LENGTH).reshape(4, LENGTH))
    assert places[2].tolist() == [store.ready_slot(index) for index in ALL]
    assert set(places[[0, 1, 3]].flatten().tolist()) == {NO_SLOT}
    for index in ALL:
        assert (store.get(index) is None) == bool(index % 3)
        if index % 3 == 0:
            scribble(store.get(index))
    for index in (-LENGTH - 1, -1, LENGTH, 7 * LENGTH):
        assert (store.has_slot(index), store.get(index), store.ready_slot(index)) == (False, None, NO_SLOT)
        assert not store.fill(index, sample(layout, 0))
    first, second = store.read(store.lookup(np.array([3, 3])))
    scribble(first)
    assert number_of(second) == 3
    assert served(store) == list(range(0, LENGTH, 3))


def test_many_samples_are_stored_in_one_call(layout: str) -> None:
    """Without a slot, stored already, twice in the call, or larger than all there is, the outcome differs."""
    with closing(opened(layout, slots=LENGTH // 2)) as store:
        first, second, *_ = with_slot = [index for index in ALL if store.has_slot(index)]
        [without, *_] = [index for index in ALL if not store.has_slot(index)]
        filled(store, [first])
        indices = [without, first, second, second]
        assert store.put(indices, contents(store, [1, 9, second, second])) == [None, False, True, False]
        if layout == "records":
            giant = torch.zeros(9 * MIB, dtype=torch.uint8)
            assert not store.has_room(giant)
            assert store.has_room(sample(layout, 1))
            assert store.put(with_slot[2:4], [store.codec.encode(giant), encoded(store, with_slot[3])]) == [None, True]
            assert not store.fill(with_slot[2], giant)
        assert served(store) == [first, second, *with_slot[3:4]][: store.filled]
        assert store.filled == (3 if layout == "records" else 2)
    with closing(opened(layout, slots=0, granted=0)) as store:
        assert store.put([1, 2], contents(store, [1, 2])) == [None, None]
        assert len(store) == len(served(store)) == 0


@pytest.mark.parametrize("count", [2, 40])
@pytest.mark.parametrize("elements", [8, 2000])
def test_rows_of_a_batch_are_stored_as_samples_are(elements: int, count: int) -> None:
    """Small ones together, large or few ones each by itself: those that are free and have a slot, each from its row."""

    def made(index: int) -> Any:
        mask = tv_tensors.Mask(torch.full((2, 2), index))
        return torch.full((elements,), index), index % 2 == 0, None, torch.zeros(0), mask, np.float32(index)

    codec = SampleSpec.infer(made(0))
    with closing(memory_store(codec, arc=Ring.cut(100, (1.0,), (60,)).arcs[0])) as store:
        inside = [index for index in range(100) if store.has_slot(index)][: count + 2]
        outside = next(index for index in range(100) if not store.has_slot(index))
        assert store.fill(inside[0], made(inside[0]))
        indices = [outside, inside[2], *inside, inside[1]]
        places = [3 * number for number in reversed(range(len(indices)))]
        rows = codec.rows([np.zeros(size, np.uint8) for size in codec.sizes(3 * len(indices))], 3 * len(indices))
        contents = codec.put_many(rows, places, [codec.encode(made(index)) for index in indices])
        assert nbytes_of(contents) == len(indices) * codec.nbytes == sum(map(nbytes_of, ([each] for each in contents)))
        first = [number for number, index in enumerate(indices) if indices.index(index) == number]
        expected = [index in inside[1:] and number in first for number, index in enumerate(indices)]
        assert store.put(indices, contents) == [None, *expected[1:]]
        assert all(same(store.get(index), made(index)) for index in inside)
        assert store.filled == len(inside)


@pytest.mark.processes
def test_a_slot_is_free_after_a_store_that_failed(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier samples stay, the system's error is raised, no room is lost, and another process can fill the slots.
    While another process fills a slot, nobody waits for it; when that one dies, the slot is free."""
    write = store.segment.store

    def failing(offset: int, *parts: memoryview) -> None:
        write(offset, *parts)
        raise RuntimeError("broken")

    assert filled(store, [0]) == [0]
    free = getattr(store.layout, "free", 0)
    with monkeypatch.context() as patch:
        patch.setattr(store.segment, "store", failing)
        with pytest.raises(RuntimeError, match="broken"):
            store.put([1, 2], contents(store, [1, 2]))
    assert getattr(store.layout, "free", 0) == free
    assert served(store) == [0]
    assert call(filled, store, [1, 2]) == [1, 2]
    with hanging(
        Seats(store.segment, store.layout.states, store.layout.lives, store.layout.changes).take, [store.arc.slot(5)]
    ):
        assert filled(store, [5, 6]) == [6]
        assert store.put([4, 5, 7], contents(store, [4, 5, 7])) == [True, False, True]
    wait_until(lambda: filled(store, [5]) == [5])  # whether a process has ended is looked at every 10 ms
    assert served(store) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.ENOMEM, errno.EFBIG])
def test_what_the_system_refuses_is_not_stored(store: Any, error: int, monkeypatch: Any, caplog: Any) -> None:
    """Whatever the error of the system is, samples are served, and there is one warning that names it."""
    stored = filled(store, ALL[:3])
    with monkeypatch.context() as patch:
        refuse_stores(patch, error)
        assert filled(store) == []
        patch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 60)
        assert filled(store) == []
    [warning] = caplog.records
    named = {errno.ENOSPC: "no space left", errno.EFBIG: "ulimit -f"}.get(error, os.strerror(error))
    assert named in warning.getMessage()
    assert served(store) == stored
    monkeypatch.setattr(time, "monotonic", lambda now=time.monotonic: now() + 120)
    assert filled(store) == ALL[3:]


def test_copies_in_one_process_are_closed_apart(store: Any) -> None:
    """A copy that was unpickled here serves the same, and views keep the memory after `close`."""
    filled(store)
    copy = pickle.loads(pickle.dumps(store))
    assert served(copy) == ALL
    mapped = weakref.ref(copy.segment.memory(0, 1).obj)
    store.close()
    samples = iter(copy.read(copy.lookup(np.array(ALL))))
    first = next(samples)
    copy.close(), store.close()
    assert [number_of(read) for read in [first, *samples]] == ALL
    del samples
    assert mapped() is None
    assert (copy.closed, copy.memory_bytes) == (True, 0)


@pytest.mark.processes
def test_clear_empties_the_store_for_everybody(store: Any) -> None:
    """Afterwards all slots are EMPTY in every process and can be filled again; samples give their memory back."""
    filled(store)
    before = store.memory_bytes
    call(store.clear)
    assert store.memory_bytes < before / 2
    assert set(store.layout.states) == {EMPTY}
    assert served(store) == []
    assert filled(store, [7]) == served(store) == [7]
    columns = Store.create(RecordCodec(100), Arc(10**5, 10**5), granted=2**22)
    allocated = columns.segment.allocated_bytes
    columns.clear()
    assert columns.segment.allocated_bytes == allocated
    columns.close()


def fill_in_disorder(seed: int, store: Any) -> list[int]:
    stored = filled(store, random.Random(seed).sample(ALL, LENGTH))
    assert set(stored) <= set(served(store))  # more may come while this process looks
    return stored


@pytest.mark.processes
@pytest.mark.parametrize(("layout", "share"), [("rows", 0.5), ("records", 1.0), ("records", 0.5)])
def test_processes_that_fill_at_once_store_each_sample_once(layout: str, share: float, crowd: Any) -> None:
    """All processes together store each sample once, even without room for all."""
    codec = codec_of("records")
    nbytes = sum(part.nbytes for index in ALL for part in codec.encode(sample("records", index)))
    slots = round(LENGTH * share) if layout == "rows" else LENGTH
    store = opened(layout, slots, granted=int(nbytes * share * 1.2) + 4096)
    stored = sum(crowd(fill_in_disorder, store), list[int]())
    assert len(stored) == len(set(stored)) == store.filled
    assert served(store) == sorted(stored)
    assert (store.filled == LENGTH) == (share == 1.0)
    store.close()


def fill_some(first: int, store: Any) -> None:
    for index in range(first, 10_000, CROWD):
        store.fill(index, f"{index:4} " * (4 + index % 14))


@pytest.mark.processes
def test_records_of_many_processes_never_overlap(crowd: Any) -> None:
    """Thousands of records from 32 processes at once: each lies inside, whole, and the store is full."""
    with closing(Store.create(RecordCodec(100), Arc(10_000, 10_000), granted=2**19)) as store:
        crowd(fill_some, store)
        places = store.lookup(np.arange(10_000))
        found = np.flatnonzero(places != NO_SLOT)
        assert list(store.read(places[found])) == [f"{index:4} " * (4 + index % 14) for index in found]
        assert len(found) > 2000
        assert store.fill_fraction > 0.999


def test_a_thread_that_reads_meanwhile_is_served_whole_samples(store: Any, second_thread: Any) -> None:
    """A store that fills serves another thread each sample whole, or misses it."""
    second_thread(lambda: [number_of(read) for read in map(store.get, ALL) if read is not None])
    assert filled(store) == served(store) == ALL


# ---- how much there is ----


def test_what_is_stored_is_counted_to_the_byte() -> None:
    """Number, bytes of records and memory, after each sample; what is not ready has no bytes."""
    total = 0
    with closing(opened("records")) as store:
        for index in ALL:
            assert store.fill_fraction < 1
            [parts] = contents(store, [index])
            total += sum(part.nbytes for part in parts)
            assert store.put([index, index], [parts, parts]) == [True, False]  # what is ready takes nothing
            places = store.lookup(np.array(ALL))
            assert (store.stored_bytes(places[places != NO_SLOT]), store.filled) == (total, index + 1)
            assert total - PAGE <= store.memory_bytes <= total + 64 * (index + 1) + 2 * PAGE
            assert store.promised_bytes == GRANTED - store.memory_bytes
        assert (store.full, store.fill_fraction, store.granted_bytes) == (True, 1.0, GRANTED)


def test_a_full_store_holds_records_and_little_else(rng: random.Random) -> None:
    """95 % of the granted bytes are records of any sizes; of many small records some have no slot."""
    granted = 4 * MIB
    lengths = [int(300 * (MIB / 4 / 300) ** rng.random()) for _ in range(500)] + [300] * 5000
    rng.shuffle(lengths)

    def content(index: int) -> Any:
        # With 48 bytes for what is pickled beside small ones, and 320 beside large ones.
        return bytes(lengths[index] - 48) if lengths[index] < 5000 else np.empty(lengths[index] - 320, dtype=np.uint8)

    codec = RecordCodec.infer([content(index) for index in range(20)])
    arc = Ring.cut(len(lengths), (1.0,), (Records.slots_for(granted, codec, len(lengths)),)).arcs[0]
    with closing(Store.create(codec, arc, granted=granted)) as store:
        ready = [index for index in range(len(lengths)) if store.has_slot(index) and store.fill(index, content(index))]
        assert sum(lengths[index] for index in ready) >= 0.95 * granted
        assert store.memory_bytes <= granted
    small, large = RecordCodec(nbytes=100), RecordCodec(nbytes=100_000)
    assert Records.slots_for(MIB, large, 1000) == Records.slots_for(MIB, small, 1000) == 1000
    assert MIB // small.slot_bytes <= (slots := Records.slots_for(MIB, small, 10**6)) < 10**5
    assert Records.bytes_for(small, slots) < MIB / 6


def test_samples_of_many_gib_have_a_place() -> None:
    """Rows of 2 GiB and more, and records of 4 GiB and more."""
    nbytes = 2**31 + 8
    with closing(Store.create(SampleSpec.infer(torch.empty(nbytes, dtype=torch.uint8)), Arc(2, 2))) as store:
        assert store.put([0], [[memoryview(b"")]]) == [True]
        assert [field.shape for field in store.layout.fields] == [(2, nbytes)]
    with closing(Store.create(RecordCodec(2**32), Arc(2, 2), granted=2**34)) as store:
        assert store.layout.has_room(2**32 + 8)
        store.layout.columns["nbytes"][0] = 2**32 + 8
        assert store.stored_bytes(np.array([0])) == 2**32 + 8

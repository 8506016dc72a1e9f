"""A store of records serves, in every process, the sample that was stored under an index, or none."""

from __future__ import annotations

import itertools
import os
import pickle
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.placement import NO_SLOT, Arc, Ring
from lightning_stocache.cache.record_store import RecordStore, slots_for
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.stores import attach_store
from lightning_stocache.node.files import Backend
from tests.cache.test_records import Colour, Slim, Target, boxes, picture, same, scribble
from tests.logs import Log
from tests.processes import Child, ChildError, call, call_many, without_room

SAMPLES = 60
HEADER = 192  # bytes of a store that are not counted: the number of its arena
MIB = 1 << 20


def sample_of(index: int) -> Any:
    """The sample of an index: of another kind and size for each."""
    draws, size = np.random.default_rng(index), 7 + index * 997 % 9000
    made: list[Any] = [
        {"text": f"a caption, number {index} " * (index % 5), "ids": draws.integers(0, 99, index % 40).tolist()},
        (torch.from_numpy(draws.random((3, size))), index),
        {"image": picture("RGB", (20 + index, 30)), "boxes": boxes(index % 6), "target": Slim(index)},
        [np.asfortranarray(draws.random((size, 2))), draws.integers(0, 9, size).astype(np.int16), None],
        Target(index, draws.random((9, index + 1)) > 0.5, ["hard"] * (index % 3)),
        draws.bytes(size * 3),
        {"views": [(view := torch.from_numpy(draws.random(size)), view)], "colour": Colour.RED, "": ""},
    ]
    return made[index % len(made)]


EXPECTED = [sample_of(index) for index in range(SAMPLES)]
CODEC = RecordCodec.infer(EXPECTED)
ALL_BYTES = sum(CODEC.stored_size(CODEC.encode(sample)) for sample in EXPECTED)


def made(granted: int = 8 * MIB, slots: int = SAMPLES, backend: Backend | None = None) -> RecordStore:
    arc = Ring.cut(SAMPLES, (1.0,), (slots,)).arcs[0]
    return RecordStore.create(CODEC, arc, backend, granted=granted)


@pytest.fixture
def store() -> Iterator[RecordStore]:
    store = made()
    yield store
    store.close()


@pytest.fixture
def full(store: RecordStore) -> RecordStore:
    assert all(store.fill(index, EXPECTED[index]) for index in range(SAMPLES))
    return store


def served(store: RecordStore, indices: Sequence[int] = range(SAMPLES)) -> list[int]:
    """Those indices that a store has, whose samples are right; each is got, and read with the others."""
    places = store.lookup(np.array(indices))
    here = [index for index, place in zip(indices, places.tolist(), strict=True) if place != NO_SLOT]
    for index, sample in zip(here, store.read(places[places != NO_SLOT]), strict=True):
        assert same(sample, EXPECTED[index])
    for index in indices:
        sample = store.get(index)
        assert (sample is not None) == (index in here)
        assert sample is None or same(sample, EXPECTED[index])
    return here


# --- what was stored is served


def use_elsewhere(store: RecordStore, handle: Any) -> dict[str, Any]:
    """In another process: read what is there, fill what is not, and say what was seen; also by its address."""
    before = served(store)
    attached: Any = attach_store(handle)
    assert served(attached) == before
    stored = [index for index in range(10, 20) if store.fill(index, EXPECTED[index])]
    seen = {"before": before, "stored": stored, "filled": store.filled, "length": len(store)}
    assert served(attached) == served(store)
    for one in (attached, store):
        one.close()
    return seen


@pytest.mark.processes
@pytest.mark.parametrize(
    ("method", "backend"),
    [("fork", "tmpfile"), ("fork", "file"), ("forkserver", "tmpfile"), ("forkserver", "memfd"), ("spawn", "tmpfile")],
)
def test_what_was_stored_is_served_in_every_process(method: str, backend: Backend) -> None:
    """Samples are got after they were filled, here and elsewhere; each is stored once; the rest has no slot."""
    store = made(slots=45, backend=backend)
    with_slot = [index for index in range(SAMPLES) if store.has_place(index)]
    assert len(with_slot) == len(store) == 45
    assert served(store) == []
    here = [index for index in range(15) if store.fill(index, EXPECTED[index])]
    assert here == [index for index in with_slot if index < 15]
    seen = call(use_elsewhere, store, store.handle, method=method)
    assert seen["before"] == here
    assert seen["stored"] == [index for index in with_slot if 15 <= index < 20]
    assert (seen["length"], seen["filled"]) == (45, store.filled)
    assert served(store) == here + seen["stored"]
    store.close()


def test_lookups_keep_their_shape_and_indices_outside_have_no_place(full: RecordStore) -> None:
    """Indices from the end are the same samples; further out there is none."""
    indices = np.arange(-2 * SAMPLES, 2 * SAMPLES).reshape(4, SAMPLES)
    places = full.lookup(indices)
    assert places[1].tolist() == places[2].tolist() == full.lookup(np.arange(SAMPLES)).tolist()
    assert set(places[[0, 3]].flatten().tolist()) == {NO_SLOT}
    assert [full.place(index) for index in range(SAMPLES)] == places[2].tolist()
    for index in (-SAMPLES - 1, SAMPLES, 7 * SAMPLES):
        assert (full.has_place(index), full.get(index), full.place(index)) == (False, None, NO_SLOT)
        assert not full.fill(index, EXPECTED[0])


def test_a_store_without_slots_or_memory_serves_nothing() -> None:
    """Everything that does not fit in the rest of its header is a bypass, and nothing fails."""
    for store in (made(slots=0, granted=0), made(granted=0)):
        for index in range(SAMPLES):
            contents = CODEC.encode(EXPECTED[index])
            if sum(part.nbytes for part in contents) > HEADER:
                assert list(store.put_many([index], [contents])) == [None]
                assert store.get(index) is None
        store.close()


def test_changing_a_served_sample_changes_nothing_else(full: RecordStore) -> None:
    """Neither the store nor another read, nor does the sample that was stored reach into it."""
    given = sample_of(3)
    for index in range(SAMPLES):
        scribble(full.get(index))
    places = full.lookup(np.array([3, 3, 4]))
    for sample in full.read(places):
        scribble(sample)
    assert served(full) == list(range(SAMPLES))
    other = made()
    other.fill(3, given)
    scribble(given)
    assert served(other) == [3]
    other.close()


def test_who_has_begun_to_read_goes_on_when_the_store_is_closed(full: RecordStore) -> None:
    """The rest of the samples comes, and the memory is free when they have."""
    samples = full.read(full.lookup(np.arange(SAMPLES)))
    first = list(itertools.islice(samples, 20))
    full.close()
    assert full.closed
    for index, sample in enumerate([*first, *samples]):
        assert same(sample, EXPECTED[index])
    half = (store := made()).read(np.array([], dtype=np.int64))
    store.close()
    assert list(half) == []


def test_two_copies_in_one_process_are_closed_apart(full: RecordStore) -> None:
    """A copy that was unpickled here serves the same, and gives its views up by itself."""
    copy = pickle.loads(pickle.dumps(full))
    assert served(copy) == list(range(SAMPLES))
    full.close()
    copy.close()
    assert copy.closed
    assert copy.memory_bytes == 0


def test_what_is_ready_is_not_stored_again(full: RecordStore) -> None:
    """The sample that came first stays, and no memory is taken."""
    before = full.stored_bytes(full.lookup(np.arange(SAMPLES))), full.slots.used_bytes
    assert not any(full.fill(index, "another") for index in range(SAMPLES))
    assert list(full.put_many([0, 1], [CODEC.encode("x"), CODEC.encode("y")])) == [False, False]
    assert (full.stored_bytes(full.lookup(np.arange(SAMPLES))), full.slots.used_bytes) == before
    assert served(full) == list(range(SAMPLES))


def test_a_slot_is_free_after_a_store_that_failed(store: RecordStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of the system comes through, nothing is READY, and the room can be taken again."""

    def failing(offset: int, *parts: memoryview) -> None:
        raise OSError(5, "broken")

    with monkeypatch.context() as patch:
        patch.setattr(store.segment, "store", failing)
        with pytest.raises(OSError, match="broken"):
            store.fill(5, EXPECTED[5])
    assert served(store) == []
    used = store.slots.used_bytes
    assert used == RecordStore.reserved_bytes(SAMPLES)
    assert store.fill(5, EXPECTED[5])
    assert served(store) == [5]


# --- how much there is


def test_what_is_stored_is_counted_to_the_byte(store: RecordStore) -> None:
    """Number, share, bytes of records and memory, after each sample; and what is not READY has no bytes."""
    fixed = RecordStore.reserved_bytes(SAMPLES)
    assert (store.filled, round(store.fill_fraction, 3), store.full) == (0, 0.0, False)
    end, total = fixed, 0
    for number, index in enumerate(range(SAMPLES), 1):
        parts = CODEC.encode(EXPECTED[index])
        nbytes = sum(part.nbytes for part in parts)
        assert list(store.put_many([index], [parts])) == [True]
        end = (aligned(end) if len(parts) > 1 else -(-end // 8) * 8) + nbytes
        total += nbytes
        ready = store.lookup(np.arange(SAMPLES))
        assert store.stored_bytes(ready[ready != NO_SLOT]) == total
        assert store.filled == number
        assert store.slots.used_bytes == end
        share = max(end - HEADER, 0) / store.granted_bytes
        assert store.fill_fraction == (share if number < SAMPLES else 1.0)
        assert end <= store.memory_bytes + HEADER + 4096
        assert store.memory_bytes <= end + 2 * 4096
        assert store.promised_bytes == store.granted_bytes - store.memory_bytes
    assert store.full
    assert store.granted_bytes == 8 * MIB


def test_a_store_never_takes_more_than_was_granted() -> None:
    """Filled to the brim, its memory is what it may take."""
    for granted in (300_000, 300_001, 304_095):
        store = made(granted=granted)
        stored = [index for index in range(SAMPLES) if store.fill(index, EXPECTED[index])]
        assert served(store) == stored
        assert 0 < len(stored) < SAMPLES
        assert store.granted_bytes == granted
        assert store.slots.used_bytes <= granted + HEADER
        assert store.slots.used_bytes - HEADER - 8192 <= store.memory_bytes <= granted
        assert 0.5 < store.fill_fraction <= 1.0
        store.close()


def test_a_sample_larger_than_all_there_is_passes_by(store: RecordStore) -> None:
    """It is told that there is no room, before and after it is encoded; smaller ones are stored."""
    giant = torch.zeros(9 * MIB, dtype=torch.uint8)
    assert not store.has_room(giant)
    assert store.has_room(EXPECTED[1])
    contents = [CODEC.encode(giant), CODEC.encode(EXPECTED[1])]
    assert list(store.put_many([0, 1], contents)) == [None, True]
    assert not store.fill(0, giant)
    assert served(store) == [1]


SIZES = {
    "small": (300, 300, 8 * MIB),
    "up to 3 KB": (300, 3000, 8 * MIB),
    "all": (300, 2 * MIB, 64 * MIB),
    "large": (100_000, 2 * MIB, 64 * MIB),
    "largest": (2 * MIB, 2 * MIB, 64 * MIB),
}


@pytest.mark.parametrize("mixture", [*SIZES, "two sizes"])
def test_a_full_store_holds_records_and_little_else(mixture: str, rng: random.Random) -> None:
    """With as many slots as set-up gives it, 95 % of the bytes granted are records."""
    if mixture == "two sizes":
        granted = 64 * MIB
        sizes = rng.choices([300, 2 * MIB], [200, 1], k=20_000)
    else:
        low, high, granted = SIZES[mixture]
        sizes = [int(low * (high / low) ** rng.random()) for _ in range(300)]
        sizes += [int(low * (high / low) ** rng.random()) for _ in range(int(2 * granted / np.mean(sizes)))]

    def sample(index: int) -> Any:
        # The size of its record is the size.
        return bytes(sizes[index] - 48) if sizes[index] < 5000 else np.empty(sizes[index] - 320, dtype=np.uint8)

    codec = RecordCodec.infer([sample(index) for index in range(20)])
    slots = slots_for(granted, codec, len(sizes))
    store = RecordStore.create(codec, Ring.cut(len(sizes), (1.0,), (slots,)).arcs[0], granted=granted)
    for index in range(len(sizes)):
        if store.has_place(index):
            store.fill(index, sample(index))
    ready = store.lookup(np.arange(len(sizes)))
    assert store.stored_bytes(ready[ready != NO_SLOT]) >= 0.95 * granted
    assert store.memory_bytes <= granted
    store.close()


def test_every_index_has_a_slot_where_slots_cost_little() -> None:
    """Of a data set of small records that fits in small part, some have none; never fewer than would find room."""
    small, large = RecordCodec(nbytes=100), RecordCodec(nbytes=100_000)
    assert slots_for(MIB, large, 1000) == 1000
    assert slots_for(MIB, small, 1000) == 1000
    assert MIB // 116 <= slots_for(MIB, small, 10**6) < 10**5
    assert slots_for(0, small, 10**6) == 0
    assert RecordStore.bytes_for(small, slots_for(MIB, small, 10**6)) < MIB / 10


# --- several processes, death and shortage


def die_in_the_middle(store: RecordStore, index: int, after: int) -> None:
    """Be killed when the first parts of a record have been written, and half of the next one."""

    write = store.segment.store

    def half(offset: int, *parts: memoryview) -> None:
        content = b"".join([*parts[:after], parts[min(after, len(parts) - 1)][: parts[after - 1].nbytes // 2]])
        write(offset, memoryview(content))
        os.kill(os.getpid(), signal.SIGKILL)

    store.segment.store = half  # type: ignore[method-assign]
    store.fill(index, EXPECTED[index])


@pytest.mark.processes
def test_a_writer_that_is_killed_half_way_leaves_its_slot(store: RecordStore) -> None:
    """What it had written is served to nobody, and its room stays unused; the next process fills the slot."""
    for index, after in ((3, 0), (3, 1), (10, 1)):
        with pytest.raises(ChildError, match="SIGKILL"):
            call(die_in_the_middle, store, index, after)
        assert served(store) == []
    assert call(store.fill, 3, EXPECTED[3])
    assert store.fill(10, EXPECTED[10])
    assert served(store) == [3, 10]


def fill_all(store: RecordStore, seed: int) -> list[int]:
    order = random.Random(seed).sample(range(SAMPLES), SAMPLES)
    return [index for index in order if store.fill(index, EXPECTED[index])]


@pytest.mark.processes
def test_processes_that_fill_at_once_share_the_room() -> None:
    """Where not all find room, each sample is stored at most once, and what is stored is served to all."""
    store = made(granted=ALL_BYTES // 2)
    stored = sum(call_many(fill_all, [(store, seed) for seed in range(4)]), list[int]())
    assert len(stored) == len(set(stored)) == store.filled
    assert served(store) == sorted(stored)
    assert 10 < len(stored) < SAMPLES
    store.close()


def fill_without_room() -> tuple[list[int], list[str], int]:
    log = Log()
    store = RecordStore.create(RecordCodec(MIB), Arc(100, 100), granted=90 * MIB)
    with open("/dev/shm/other", "wb") as other:
        os.posix_fallocate(other.fileno(), 0, 40 * MIB)
    stored = [index for index in range(100) if store.fill(index, torch.full((MIB,), index, dtype=torch.uint8))]
    served = [index for index in range(100) if (sample := store.get(index)) is not None and int(sample.max()) == index]
    assert served == stored
    used = store.slots.used_bytes
    store.close()
    return stored, log.lines, used


@pytest.mark.processes
def test_without_memory_the_store_stops_growing_and_goes_on() -> None:
    """At ENOSPC a slot stays empty, with one warning, and no room is lost; what is stored is served."""
    stored, lines, used = without_room(fill_without_room)
    assert 20 <= len(stored) <= 24
    assert len(lines) == 1
    assert f"stops at {len(stored)} of 100 samples: no space left in /dev/shm" in lines[0]
    assert used < (len(stored) + 1) * MIB


def operate(store: RecordStore, seed: int, steps: int, dies: bool = False) -> list[int]:
    """Random gets, fills and batches, each compared with what is expected; which indices this process has stored.

    Args:
        dies: whether it is killed at some moment: in the middle of a record, or after some of the steps.
    """
    rng, stored = random.Random(seed), list[int]()
    if dies:
        write, left = store.segment.store, rng.randrange(1, 40)

        def deadly(offset: int, content: memoryview) -> None:
            nonlocal left
            left -= 1
            if left == 0:
                write(offset, content[: content.nbytes // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            write(offset, content)

        store.segment.store = deadly  # type: ignore[method-assign]
    for _ in range(steps):
        index = rng.randrange(SAMPLES)
        what = rng.choice(["get", "fill", "batch"])
        if what == "get":
            sample = store.get(index)
            assert sample is None or same(sample, EXPECTED[index])
        elif what == "fill":
            if store.fill(index, EXPECTED[index]):
                stored.append(index)
        else:
            batch = np.array(rng.choices(range(SAMPLES), k=4))
            places = store.lookup(batch)
            found = places != NO_SLOT
            for number, sample in zip(batch[found].tolist(), store.read(places[found]), strict=True):
                assert same(sample, EXPECTED[number])
    return stored


def stress(rng: random.Random, granted: int, workers: int, steps: int, victims: int, pause: float) -> tuple[int, int]:
    """One store, used by processes of which some are killed; how many were killed, and how many samples it holds."""
    store = made(granted=granted)
    children = [Child(operate, store, rng.random(), steps) for _ in range(workers)]
    killed = 0
    for number in range(victims):
        victim = Child(operate, store, rng.random(), 10**9, number % 2 == 0)
        time.sleep(pause * rng.random())
        victim.kill()
        killed += 1
    stored = sum((child.result() for child in children), list[int]())
    assert len(stored) == len(set(stored))  # nobody stored what another had
    here = served(store)
    assert store.filled == len(here)
    assert set(stored) <= set(here)
    # What is killed between the end of a record and READY is lost, one record each; all else can be used.
    places = store.lookup(np.array(here))
    lost = store.slots.used_bytes - store.stored_bytes(places) - RecordStore.reserved_bytes(SAMPLES)
    assert lost <= 64 * len(here) + killed * max(CODEC.stored_size(CODEC.encode(sample)) for sample in EXPECTED)
    rest = [index for index in range(SAMPLES) if index not in here and store.fill(index, EXPECTED[index])]
    assert served(store) == sorted(here + rest)
    store.close()
    return killed, len(here) + len(rest)


@pytest.mark.processes
def test_random_operations_of_several_processes_agree_with_a_dict(rng: random.Random) -> None:
    """Whatever processes do at once and whenever they are killed, nobody is served another sample than was stored."""
    for granted in (8 * MIB, ALL_BYTES // 2, ALL_BYTES // 8):
        killed, filled = stress(rng, granted, workers=2, steps=400, victims=5, pause=0.06)
        assert killed == 5
        assert (filled == SAMPLES) == (granted == 8 * MIB)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.timeout(3600)
def test_a_million_operations_of_four_processes_agree_with_a_dict(rng: random.Random, tmp_path: Path) -> None:
    """The same for two hundred stores, with four processes that live and four that are killed in each."""
    report = tmp_path / "report"
    operations = killed = 0
    started = time.monotonic()
    while operations < 10**6:
        granted = rng.choice([8 * MIB, ALL_BYTES, ALL_BYTES // 2, ALL_BYTES // 5])
        died, _ = stress(rng, granted, workers=4, steps=1200, victims=4, pause=0.03)
        operations, killed = operations + 4 * 1200, killed + died
        report.write_text(f"{operations:,} operations, {killed:,} kills, {time.monotonic() - started:.0f} s")
    print(report.read_text())

"""A store of records serves, in every process, the sample that was stored under an index, or none."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightning_stocache.cache.codec import aligned
from lightning_stocache.cache.layout import Records
from lightning_stocache.cache.placement import NO_SLOT, Ring
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.store import Store, slots_for
from lightning_stocache.node.files import Backend
from tests.cache.test_records import Colour, Slim, Target, boxes, picture, same

SAMPLES = 60
HEADER = Records.fixed_bytes  # of a store, which are not counted
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


def made(granted: int = 8 * MIB, slots: int = SAMPLES, backend: Backend | None = None) -> Store:
    arc = Ring.cut(SAMPLES, (1.0,), (slots,)).arcs[0]
    return Store.create(CODEC, arc, backend, granted=granted)


@pytest.fixture
def store() -> Iterator[Store]:
    store = made()
    yield store
    store.close()


@pytest.fixture
def full(store: Store) -> Store:
    assert all(store.fill(index, EXPECTED[index]) for index in range(SAMPLES))
    return store


def served(store: Store, indices: Sequence[int] = range(SAMPLES)) -> list[int]:
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


def test_who_has_begun_to_read_goes_on_when_the_store_is_closed(full: Store) -> None:
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


# --- how much there is


def test_what_is_stored_is_counted_to_the_byte(store: Store) -> None:
    """Number, share, bytes of records and memory, after each sample; and what is not READY has no bytes."""
    fixed = Records.reserved_bytes(SAMPLES)
    assert (store.filled, round(store.fill_fraction, 3), store.full) == (0, 0.0, False)
    end, total = fixed, 0
    for number, index in enumerate(range(SAMPLES), 1):
        parts = CODEC.encode(EXPECTED[index])
        nbytes = sum(part.nbytes for part in parts)
        assert list(store.put([index, index], [parts, parts])) == [
            True,
            False,
        ]  # what is ready stays, and takes nothing
        end = (aligned(end) if len(parts) > 1 else -(-end // 8) * 8) + nbytes
        total += nbytes
        ready = store.lookup(np.arange(SAMPLES))
        assert store.stored_bytes(ready[ready != NO_SLOT]) == total
        assert store.filled == number
        assert store.layout.free == end
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
        assert store.layout.free <= granted + HEADER
        assert store.layout.free - HEADER - 8192 <= store.memory_bytes <= granted
        assert 0.5 < store.fill_fraction <= 1.0
        store.close()


def test_a_sample_larger_than_all_there_is_passes_by(store: Store) -> None:
    """It is told that there is no room, before and after it is encoded; smaller ones are stored."""
    giant = torch.zeros(9 * MIB, dtype=torch.uint8)
    assert not store.has_room(giant)
    assert store.has_room(EXPECTED[1])
    contents = [CODEC.encode(giant), CODEC.encode(EXPECTED[1])]
    assert list(store.put([0, 1], contents)) == [None, True]
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
        # With 48 bytes for what is pickled beside small ones, and 320 beside large ones.
        return bytes(sizes[index] - 48) if sizes[index] < 5000 else np.empty(sizes[index] - 320, dtype=np.uint8)

    codec = RecordCodec.infer([sample(index) for index in range(20)])
    slots = slots_for(granted, codec, len(sizes))
    store = Store.create(codec, Ring.cut(len(sizes), (1.0,), (slots,)).arcs[0], granted=granted)
    for index in range(len(sizes)):
        if store.has_place(index):
            store.fill(index, sample(index))
    ready = store.lookup(np.arange(len(sizes))) != NO_SLOT
    assert np.array(sizes)[ready].sum() >= 0.95 * granted
    assert store.memory_bytes <= granted
    store.close()


def test_every_index_has_a_slot_where_slots_cost_little() -> None:
    """Of a data set of small records that fits in small part, some have none; never fewer than would find room."""
    small, large = RecordCodec(nbytes=100), RecordCodec(nbytes=100_000)
    assert slots_for(MIB, large, 1000) == 1000
    assert slots_for(MIB, small, 1000) == 1000
    assert MIB // small.slot_bytes <= slots_for(MIB, small, 10**6) < 10**5
    assert slots_for(0, small, 10**6) == 0
    assert Records.bytes_for(small, slots_for(MIB, small, 10**6)) < MIB / 7

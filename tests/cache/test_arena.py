"""Many processes take room from one run of bytes: no byte is given to two. What a death loses is test_kills' matter."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.layout import Records as Layout
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.node.segment import Segment
from tests.processes import call_many

SLOTS, CODEC = 1024, RecordCodec(1000)
BEGIN = Layout.reserved_bytes(SLOTS)

Records = list[tuple[int, int, int]]


def segment_of(room: int) -> Segment:
    segment = Segment.create(BEGIN + room + 1)
    segment.reserve(0, BEGIN)
    return segment


@contextmanager
def opened(segment: Segment) -> Iterator[Layout]:
    arena = Layout(segment, CODEC, SLOTS)
    try:
        yield arena
    finally:
        arena.close()


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = segment_of(10_000)
    yield segment
    segment.close()


def put(arena: Layout, nbytes: int, alignment: int = 8, mark: int = 1) -> int | None:
    """Store a record that is full of one byte, in the slot of this process; where it begins."""
    content, slot = memoryview(bytes([mark]) * nbytes), os.getpid() % SLOTS
    parts = [content] if alignment == 8 else [content[:1], content[1:]]
    return int(arena.columns["begin"][slot]) if arena.write(slot, parts) else None


@contextmanager
def failing(segment: Segment) -> Iterator[None]:
    """What is written to a segment fails when a part of it has been written."""
    store = segment.store

    def fail(offset: int, *parts: memoryview) -> None:
        store(offset, parts[0][:1])
        raise ZeroDivisionError

    segment.store = fail  # type: ignore[method-assign]
    try:
        yield
    finally:
        segment.store = store  # type: ignore[method-assign]


def overlaps(records: Records) -> list[tuple[int, int]]:
    """Neighbours of which the first ends behind the beginning of the second."""
    ends = sorted((begin, begin + nbytes) for begin, nbytes, _ in records)
    return [(first[0], second[0]) for first, second in pairwise(ends) if first[1] > second[0]]


def outside(segment: Segment, records: Records) -> Records:
    """Those that do not lie in the arena."""
    return [record for record in records if record[0] < BEGIN or record[0] + record[1] > segment.size - 1]


def damaged(segment: Segment, records: Records) -> Records:
    """Those that are not full of their byte."""
    wrong = []
    for begin, nbytes, mark in records:
        with segment.memory(begin, nbytes) as memory:
            if bytes(memory) != bytes([mark]) * nbytes:
                wrong.append((begin, nbytes, mark))
    return wrong


# --- one process


@given(st.lists(st.tuples(st.integers(1, 700), st.sampled_from([8, 64]), st.booleans()), max_size=60))
def test_records_lie_one_behind_the_other(wanted: list[tuple[int, int, bool]]) -> None:
    """Each at the next multiple of its alignment; what a write that fails has taken, the next record takes."""
    segment = segment_of(6000)
    with opened(segment) as arena:
        end = BEGIN
        for nbytes, alignment, fails in wanted:
            begin = -(-end // alignment) * alignment
            assert arena.has_room(nbytes) or begin + nbytes >= segment.size
            if fails:
                with pytest.raises(ZeroDivisionError) if begin + nbytes < segment.size else nullcontext():
                    with failing(segment):
                        put(arena, nbytes, alignment)
                continue
            fits = begin + nbytes < segment.size
            assert put(arena, nbytes, alignment) == (begin if fits else None)
            end = begin + nbytes if fits else end
            assert (arena.free - BEGIN) == end - BEGIN
    segment.close()


def test_what_is_too_large_finds_no_room_and_takes_none(segment: Segment) -> None:
    """A record larger than the arena is refused, and one that just fits is stored."""
    with opened(segment) as arena:
        assert not arena.has_room(10_001)
        assert put(arena, 10_001) is None
        assert (arena.free - BEGIN) == 0
        assert put(arena, 10_000) == BEGIN
        assert (arena.free - BEGIN) == 10_000
        assert not arena.has_room(1)
        assert put(arena, 1) is None


# --- several


def take_all(segment: Segment, seed: int, smallest: int, largest: int) -> Records:
    """Store records of random sizes, smaller ones where there is no room, until the smallest finds none."""
    rng, records, mark = random.Random(seed), Records(), seed % 255 + 1
    with opened(segment) as arena:
        while largest >= smallest:
            nbytes = int(smallest * (largest / smallest) ** rng.random())
            if arena.has_room(nbytes):
                offset = put(arena, nbytes, rng.choice([8, 64]), mark)
                if offset is not None:
                    records.append((offset, nbytes, mark))
                    continue
            largest = nbytes - 1
    return records


@pytest.mark.processes
@pytest.mark.parametrize(
    ("mib", "processes", "smallest", "largest", "share"),
    [(48, 4, 300, 2 << 20, 0.99), (1, 6, 20, 90, 0.5)],  # of 20 bytes at a multiple of 64 much is left
    ids=["all sizes", "small"],
)
def test_records_of_many_processes_never_overlap(
    mib: int, processes: int, smallest: int, largest: int, share: float
) -> None:
    """From several processes at once: each lies inside, whole, and the arena is full."""
    room = mib << 20
    segment = segment_of(room)
    records = sum(call_many(take_all, [(segment, seed, smallest, largest) for seed in range(processes)]), Records())
    assert overlaps(records) == []
    assert damaged(segment, records) == []
    assert outside(segment, records) == []
    assert sum(nbytes for _, nbytes, _ in records) > share * room
    with opened(segment) as arena:
        assert (arena.free - BEGIN) <= room
        assert not arena.has_room(smallest + 64)
    segment.close()

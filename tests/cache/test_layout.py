"""How samples lie: rows one array per field, records one behind the other, whoever writes; what a file says it holds.

What the death of a writer loses is test_kills' matter.
"""

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.layout import Contents, Records, Rows, contents_of
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.node.files import HEADER_BYTES, Geometry, Manifest, make_file, write_header
from lightning_stocache.node.segment import Segment
from tests.processes import call_many

row_sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 63, 64, 65, 200]), min_size=1, max_size=4)
counts = st.integers(0, 20)


def codec(row_bytes: list[int]) -> Any:
    return SimpleNamespace(row_bytes=tuple(row_bytes))


def read(slots: Rows, slot: int) -> list[bytes]:
    """A copy of one sample."""
    return [rows[slot].tobytes() for rows in slots.fields]


@contextmanager
def opened(row_bytes: list[int], count: int) -> Iterator[tuple[Rows, Segment]]:
    segment = Segment.create(Rows.bytes_for(codec(row_bytes), count))
    slots = Rows(segment, codec(row_bytes), count)
    yield slots, segment
    slots.close()
    segment.close()


def sample(row_bytes: list[int], seed: int) -> list[bytes]:
    return list(map(random.Random(seed).randbytes, row_bytes))


def write(slots: Rows, slot: int, content: list[bytes]) -> None:
    slots.write([slot], [list(map(memoryview, content))])


@given(row_bytes=row_sizes, count=counts)
def test_arrays_are_aligned_and_follow_each_other(row_bytes: list[int], count: int) -> None:
    """Every field's array begins at a multiple of 64 bytes, after the one before it, within the bytes asked for."""
    with opened(row_bytes, count) as (slots, _):
        tables = [rows.reshape(-1) for rows in slots.fields]
        begin = slots.state.ctypes.data if count else 0
        end = begin + count
        for table, nbytes in zip(tables, row_bytes, strict=True):
            assert table.size == count * nbytes
            if table.size:
                assert table.ctypes.data % 64 == 0
                assert table.ctypes.data >= end
                end = table.ctypes.data + table.size
        assert end - begin < Rows.bytes_for(codec(row_bytes), count)
        assert Rows.bytes_for(codec(row_bytes), count) <= count * (sum(row_bytes) + 1) + 64 * (len(row_bytes) + 3)


@pytest.mark.parametrize("row_bytes", [[1 << 16, 8], [1 << 16, 0, 1]])
def test_only_slots_that_are_used_hold_memory(row_bytes: list[int]) -> None:
    """Storing into a slot takes its own pages, of every field, and no others."""
    with opened(row_bytes, 100) as (slots, segment):
        assert segment.allocated_bytes == HEADER_BYTES
        write(slots, 50, sample(row_bytes, 1))
        pages = (1 << 16) // mmap.PAGESIZE + 1 + sum(nbytes > 0 for nbytes in row_bytes[1:])
        assert segment.allocated_bytes <= HEADER_BYTES + pages * mmap.PAGESIZE
        before = segment.allocated_bytes
        write(slots, 50, sample(row_bytes, 0))
        assert segment.allocated_bytes == before
        assert read(slots, 50) == sample(row_bytes, 0)


# ---- what lies in a segment's file ----


def file_of(slots: int, payload: int) -> tuple[int, Manifest]:
    file, _ = make_file("tmpfile")
    manifest = Manifest(Geometry(slots, slots), "numbers")
    write_header(file, payload, manifest)
    return file, manifest


def test_filled_slots_are_counted() -> None:
    """Filled slots are counted, with gaps between them."""
    file, manifest = file_of(10**6, 2 * 10**6)
    os.pwrite(file, bytes([2, 0, 2]), HEADER_BYTES)
    os.pwrite(file, b"\2" * 100_000, HEADER_BYTES + 700_000)
    os.pwrite(file, b"\7" * 9, HEADER_BYTES + 10**6)  # samples, not states
    assert contents_of(file) == Contents(manifest, "", 100_002)
    os.close(file)


def test_damage_is_said() -> None:
    """An unreadable header has its words. A file that is no segment is an error."""
    file, _ = file_of(100, 4096)
    os.ftruncate(file, HEADER_BYTES + 99)
    assert contents_of(file) == Contents(None, "is damaged: 100 slots do not fit in its 99 bytes")
    os.ftruncate(file, 100)
    assert "cut off" in contents_of(file).damage
    os.pwrite(file, b"something", 0)
    with pytest.raises(ValueError, match="not a segment"):
        contents_of(file)
    os.close(file)


# ---- records ----

SLOTS, CODEC = 1024, RecordCodec(1000)
BEGIN = Records.reserved_bytes(SLOTS)


def segment_of(room: int) -> Segment:
    segment = Segment.create(BEGIN + room + 1)
    segment.reserve(0, BEGIN)
    return segment


@contextmanager
def records_over(segment: Segment) -> Iterator[Records]:
    arena = Records(segment, CODEC, SLOTS)
    try:
        yield arena
    finally:
        arena.close()


def put(arena: Records, nbytes: int, alignment: int = 8, mark: int = 1) -> int | None:
    """Store a record of one repeated byte in the slot of this process. Returns where it begins."""
    content, slot = memoryview(bytes([mark]) * nbytes), os.getpid() % SLOTS
    parts = [content] if alignment == 8 else [content[:1], content[1:]]
    return int(arena.columns["begin"][slot]) if arena.write([slot], [parts]) == [True] else None


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


@given(st.lists(st.tuples(st.integers(1, 700), st.sampled_from([8, 64]), st.booleans()), max_size=60))
def test_records_lie_one_behind_the_other(wanted: list[tuple[int, int, bool]]) -> None:
    """Each record begins at the next multiple of its alignment. A failed write gives its room back."""
    segment = segment_of(6000)
    with records_over(segment) as arena:
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


def write_until_full(segment: Segment, mark: int) -> list[tuple[int, int, int]]:
    """Store small records until one finds no room; where each begins, its bytes and its mark."""
    rng, records = random.Random(mark), []
    with records_over(segment) as arena:
        while (begin := put(arena, nbytes := rng.randint(20, 90), rng.choice([8, 64]), mark)) is not None:
            records.append((begin, nbytes, mark))
    return records


@pytest.mark.processes
def test_records_of_many_processes_never_overlap() -> None:
    """Thousands of records from six processes at once: each lies inside, whole, and the arena is full."""
    segment = segment_of(2**20)
    written = call_many(write_until_full, [(segment, mark) for mark in range(1, 7)])
    records = sorted(record for records in written for record in records)
    begins = [begin for begin, *_ in records] + [segment.size - 1]
    assert begins[0] == BEGIN
    for (begin, nbytes, mark), end in zip(records, begins[1:], strict=True):
        assert begin + nbytes <= end
        assert bytes(segment.memory(begin, nbytes)) == bytes([mark]) * nbytes
    assert sum(nbytes for _, nbytes, _ in records) > 2**19  # at multiples of 64 much is left between small ones
    segment.close()

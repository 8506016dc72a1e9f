"""How samples lie: rows one array per field, records one behind the other, whoever writes; what a file says it holds.

What the death of a writer loses is test_kills' matter.
"""

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_stocache.cache.layout import ROLLING, Contents, Rows, contents_of
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.records import RecordCodec
from lightning_stocache.cache.store import NO_PLACE, Store
from lightning_stocache.node.files import HEADER_BYTES, Geometry, Manifest, make_file, write_header
from lightning_stocache.node.segment import Segment
from tests.processes import call_many

row_sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 63, 64, 65, 200]), min_size=1, max_size=4)
counts = st.integers(0, 20)


@contextmanager
def opened(row_bytes: list[int], count: int) -> Iterator[tuple[Rows, Segment]]:
    codec = SimpleNamespace(row_bytes=tuple(row_bytes))
    segment = Segment.create(Rows.bytes_for(codec, count))
    slots = Rows(segment, codec, count)
    yield slots, segment
    slots.close()
    segment.close()


@given(row_bytes=row_sizes, count=counts)
def test_arrays_are_aligned_and_follow_each_other(row_bytes: list[int], count: int) -> None:
    """Every field's array begins at a multiple of 64 bytes, after the one before it, within the bytes asked for."""
    with opened(row_bytes, count) as (slots, segment):
        tables = [rows.reshape(-1) for rows in slots.fields]
        begin = slots.state.ctypes.data if count else 0
        end = begin + count
        for table, nbytes in zip(tables, row_bytes, strict=True):
            assert table.size == count * nbytes
            if table.size:
                assert table.ctypes.data % 64 == 0
                assert table.ctypes.data >= end
                end = table.ctypes.data + table.size
        assert end - begin < segment.size
        assert segment.size <= count * (sum(row_bytes) + 1) + 64 * (len(row_bytes) + 3)


@pytest.mark.parametrize("row_bytes", [[1 << 16, 8], [1 << 16, 0, 1]])
def test_only_slots_that_are_used_hold_memory(row_bytes: list[int]) -> None:
    """Storing into a slot takes its own pages, of every field, and no others."""
    with opened(row_bytes, 100) as (slots, segment):
        assert segment.allocated_bytes == HEADER_BYTES
        pages = (1 << 16) // mmap.PAGESIZE + 1 + sum(nbytes > 0 for nbytes in row_bytes[1:])
        for seed in (0, 1):
            content = [random.Random(seed).randbytes(nbytes) for nbytes in row_bytes]
            slots.write([50], [list(map(memoryview, content))])
            assert [rows[50].tobytes() for rows in slots.fields] == content
            assert segment.allocated_bytes <= HEADER_BYTES + pages * mmap.PAGESIZE


def text(index: int) -> str:
    return f"{index:4} " * (4 + index % 14)


def fill_some(store: Any, first: int) -> None:
    for index in range(first, 10_000, 6):
        store.fill(index, text(index))


@pytest.mark.processes
def test_records_of_many_processes_never_overlap() -> None:
    """Thousands of records from six processes at once: each lies inside, whole, and the store is full."""
    store: Any = Store.create(RecordCodec(100), Arc(10_000, 10_000), granted=2**19)
    call_many(fill_some, [(store, first) for first in range(6)])
    places = store.lookup(np.arange(10_000))
    found = np.flatnonzero(places != NO_PLACE)
    assert list(store.read(places[found])) == [text(index) for index in found]
    assert len(found) > 2000
    assert store.layout.end - store.layout.free < 150
    assert store.stored_bytes(places[found]) > store.layout.free - store.layout.begin - 8 * len(found)
    store.close()


# ---- what lies in a segment's file ----


def file_of(slots: int, payload: int, **more: Any) -> tuple[int, Manifest]:
    file, _ = make_file("tmpfile")
    manifest = Manifest(Geometry(slots, slots), "numbers", **more)
    write_header(file, payload, manifest)
    return file, manifest


def test_filled_slots_are_counted() -> None:
    """Filled slots are counted, with gaps between them; the slots of a rolling store have generations."""
    file, manifest = file_of(10**6, 2 * 10**6)
    os.pwrite(file, bytes([2, 0, 2]), HEADER_BYTES)
    os.pwrite(file, b"\2" * 100_000, HEADER_BYTES + 700_000)
    os.pwrite(file, b"\7" * 9, HEADER_BYTES + 10**6)  # samples, not states
    assert contents_of(file) == Contents(manifest, "", 100_002)
    os.close(file)
    file, manifest = file_of(5, 4096, fingerprint=ROLLING)
    os.pwrite(file, np.array([2, 3, 0, -4, 6]).tobytes(), HEADER_BYTES)
    assert contents_of(file) == Contents(manifest, "", 2)
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

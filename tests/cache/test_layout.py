"""Slots lie one array per field, each read as it was written; what lies in the file of a segment can be told."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stocache.cache.layout import Contents, Rows, contents_of
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec
from lightning_stocache.cache.store import Store
from lightning_stocache.node.files import make_file, write_header
from lightning_stocache.node.header import HEADER_BYTES, Geometry, Manifest
from lightning_stocache.node.segment import Segment

row_sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 63, 64, 65, 200]), min_size=1, max_size=4)
counts = st.integers(0, 20)


def codec(row_bytes: list[int]) -> Any:
    return SimpleNamespace(row_bytes=tuple(row_bytes))


def read(slots: Rows, slot: int) -> list[torch.Tensor]:
    """A copy of one sample."""
    return [torch.from_numpy(rows[slot].copy()) if rows.size else torch.empty(0).byte() for rows in slots.fields]


@contextmanager
def opened(row_bytes: list[int], count: int) -> Iterator[tuple[Rows, Segment]]:
    segment = Segment.create(Rows.bytes_for(codec(row_bytes), count))
    slots = Rows(segment, codec(row_bytes), count)
    yield slots, segment
    slots.close()
    segment.close()


def sample(row_bytes: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for nbytes in row_bytes]


def contents(leaves: list[torch.Tensor]) -> list[memoryview]:
    return [leaf.numpy().data for leaf in leaves]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


@settings(deadline=None)
@given(row_bytes=row_sizes, count=counts)
def test_every_slot_keeps_its_own_sample(row_bytes: list[int], count: int) -> None:
    """After all slots are written, backwards, each reads as its own sample: no two overlap, whatever the sizes."""
    with opened(row_bytes, count) as (slots, _):
        for slot in reversed(range(count)):
            slots.write(slot, contents(sample(row_bytes, slot)))
        assert not slots.state.any()
        assert all(equal(read(slots, slot), sample(row_bytes, slot)) for slot in range(count))


@settings(deadline=None)
@given(row_bytes=row_sizes, count=st.integers(1, 20), data=st.data())
def test_a_gather_is_many_reads(row_bytes: list[int], count: int, data: st.DataObject) -> None:
    """Gathered rows, in any order and with repetitions, are those that single reads give, and copies of them."""
    wanted = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    with opened(row_bytes, count) as (slots, _):
        for slot in range(count):
            slots.write(slot, contents(sample(row_bytes, slot)))
        expected = [[read(slots, slot)[field] for slot in wanted] for field in range(len(row_bytes))]
        memory = [np.empty(len(wanted) * nbytes, dtype=np.uint8) for nbytes in row_bytes]
        indices = np.array(wanted, dtype=np.int64)
        slots.gather(indices, memory)
    for own, nbytes, rows in zip(memory, row_bytes, expected, strict=True):
        assert equal(list(torch.from_numpy(own).view(len(wanted), nbytes)), rows)


@given(row_bytes=row_sizes, count=counts)
def test_arrays_are_aligned_and_follow_each_other(row_bytes: list[int], count: int) -> None:
    """Every field's array begins at a multiple of 64 bytes, after the one before it, within the bytes asked for."""
    with opened(row_bytes, count) as (slots, _):
        tables = [torch.from_numpy(rows).view(-1) for rows in slots.fields]
        begin = slots.state.ctypes.data if count else 0
        end = begin + count
        for table, nbytes in zip(tables, row_bytes, strict=True):
            assert table.numel() == count * nbytes
            if table.numel():
                assert table.data_ptr() % 64 == 0
                assert table.data_ptr() >= end
                end = table.data_ptr() + table.numel()
        assert end - begin < Rows.bytes_for(codec(row_bytes), count)
        assert Rows.bytes_for(codec(row_bytes), count) <= count * (sum(row_bytes) + 1) + 64 * (len(row_bytes) + 3)


@pytest.mark.parametrize("row_bytes", [[1 << 16, 8], [1 << 16, 0, 1]])
@pytest.mark.parametrize("taken", ["reserved", "stored"])
def test_only_slots_that_are_used_hold_memory(row_bytes: list[int], taken: str) -> None:
    """Reserving a slot, or storing into it, takes its own pages, of every field, and no others."""
    with opened(row_bytes, 100) as (slots, segment):
        assert segment.allocated_bytes == HEADER_BYTES
        slots.reserve_rows(50) if taken == "reserved" else slots.write(50, contents(sample(row_bytes, 1)))
        pages = (1 << 16) // mmap.PAGESIZE + 1 + sum(nbytes > 0 for nbytes in row_bytes[1:])
        assert segment.allocated_bytes <= HEADER_BYTES + pages * mmap.PAGESIZE
        before = segment.allocated_bytes
        slots.write(50, contents(sample(row_bytes, 0)))
        assert segment.allocated_bytes == before
        assert equal(read(slots, 50), sample(row_bytes, 0))


def test_clear_empties_all_and_gives_memory_back() -> None:
    """After clear all states are empty, all slots read as zeroes, and only the states hold memory."""
    store = Store.create(SampleSpec.infer(torch.zeros(5000)), Arc(50, 50))
    assert all(store.fill(index, torch.ones(5000)) for index in range(50))
    store.clear()
    assert store.segment.allocated_bytes == HEADER_BYTES + mmap.PAGESIZE  # before a look, which takes pages
    assert store.filled == 0
    assert not any(rows.any() for rows in store.layout.fields)
    store.close()


# ---- what lies in a segment's file ----


def file_of(slots: int, payload: int) -> tuple[int, Manifest]:
    file, _ = make_file("tmpfile")
    manifest = Manifest(Geometry(slots, slots), "numbers")
    write_header(file, payload, manifest)
    return file, manifest


def test_filled_slots_are_counted() -> None:
    """Also with holes between them."""
    file, manifest = file_of(10**6, 2 * 10**6)
    os.pwrite(file, bytes([2, 0, 2]), HEADER_BYTES)
    os.pwrite(file, b"\2" * 100_000, HEADER_BYTES + 700_000)
    os.pwrite(file, b"\7" * 9, HEADER_BYTES + 10**6)  # samples, not states
    assert contents_of(file) == Contents(manifest, "", 100_002)
    os.close(file)


def test_damage_is_said() -> None:
    """A header that cannot be read; what is no segment is an error."""
    file, _ = file_of(100, 4096)
    os.ftruncate(file, HEADER_BYTES + 99)
    assert contents_of(file) == Contents(None, "is damaged: 100 slots do not fit in its 99 bytes")
    os.ftruncate(file, 100)
    assert "cut off" in contents_of(file).damage
    os.pwrite(file, b"something", 0)
    with pytest.raises(ValueError, match="not a segment"):
        contents_of(file)
    os.close(file)

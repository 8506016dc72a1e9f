"""Slots lie one array per field: what is written to one is read from it, and from no other."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_stocache.cache.layout import Rows
from lightning_stocache.cache.placement import Arc
from lightning_stocache.cache.rows import SampleSpec, bytes_of
from lightning_stocache.cache.store import Store
from lightning_stocache.node.header import HEADER_BYTES
from lightning_stocache.node.segment import Segment

row_sizes = st.lists(st.sampled_from([0, 1, 2, 3, 4, 6, 7, 8, 12, 16, 63, 64, 65, 200]), min_size=1, max_size=4)
counts = st.integers(0, 20)


def codec(row_bytes: list[int]) -> Any:
    return SimpleNamespace(row_bytes=tuple(row_bytes))


def read(slots: Rows, slot: int) -> list[torch.Tensor]:
    """A copy of one sample."""
    return [torch.from_numpy(rows[slot].copy()) if rows.size else torch.empty(0).byte() for rows in slots.fields]


@contextmanager
def opened(row_bytes: list[int], count: int) -> Iterator[Rows]:
    with lying_in_a_segment(row_bytes, count) as (slots, _):
        yield slots


@contextmanager
def lying_in_a_segment(row_bytes: list[int], count: int) -> Iterator[tuple[Rows, Segment]]:
    segment = Segment.create(Rows.bytes_for(codec(row_bytes), count))
    slots = Rows(segment, codec(row_bytes), count)
    yield slots, segment
    slots.close()
    segment.close()


def sample(row_bytes: list[int], seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator) for nbytes in row_bytes]


def contents(leaves: list[torch.Tensor]) -> list[memoryview]:
    return [bytes_of(leaf).numpy().data for leaf in leaves]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and len(one) == len(other)


@settings(deadline=None)
@given(row_bytes=row_sizes, count=counts)
def test_every_slot_keeps_its_own_sample(row_bytes: list[int], count: int) -> None:
    """After all slots are written, backwards, each reads as its own sample: no two overlap, whatever the sizes."""
    with opened(row_bytes, count) as slots:
        for slot in reversed(range(count)):
            slots.write(slot, contents(sample(row_bytes, slot)))
        assert not slots.state.any()
        assert all(equal(read(slots, slot), sample(row_bytes, slot)) for slot in range(count))


@settings(deadline=None)
@given(row_bytes=row_sizes, count=st.integers(1, 20), data=st.data())
def test_a_gather_is_many_reads(row_bytes: list[int], count: int, data: st.DataObject) -> None:
    """Gathered rows, in any order and with repetitions, are those that single reads give, and copies of them."""
    wanted = data.draw(st.lists(st.integers(0, count - 1), max_size=30))
    with opened(row_bytes, count) as slots:
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
    with opened(row_bytes, count) as slots:
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
    with lying_in_a_segment(row_bytes, 100) as (slots, segment):
        assert segment.allocated_bytes == HEADER_BYTES
        slots.reserve_rows(50) if taken == "reserved" else slots.write(50, contents(sample(row_bytes, 1)))
        pages = (1 << 16) // mmap.PAGESIZE + 1 + sum(nbytes > 0 for nbytes in row_bytes[1:])
        assert segment.allocated_bytes <= HEADER_BYTES + pages * mmap.PAGESIZE
        before = segment.allocated_bytes
        slots.write(50, contents(sample(row_bytes, 0)))
        assert segment.allocated_bytes == before
        assert equal(read(slots, 50), sample(row_bytes, 0))


def test_leaves_of_any_dtype_and_strides_are_stored_in_row_order() -> None:
    """What lies in a slot are the values in row order, however they lay in the memory of who stored them."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(0, 256, (5, 7, 3), dtype=torch.uint8, generator=generator).permute(2, 0, 1)
    every_other = torch.randn(4, 6, dtype=torch.float64, generator=generator)[:, ::2]
    leaves = [image, every_other, torch.tensor(7, dtype=torch.int16), torch.zeros(0)]
    row_bytes = [105, 96, 2, 0]
    with opened(row_bytes, 3) as slots:
        slots.write(1, contents(leaves))
        for row, leaf in zip(read(slots, 1), leaves, strict=True):
            assert torch.equal(row.clone().view(leaf.dtype).view(leaf.shape), leaf)
        assert not any(row.any() for slot in (0, 2) for row in read(slots, slot))


def test_clear_empties_all_and_gives_memory_back() -> None:
    """After clear all states are empty, all slots read as zeroes, and only the states hold memory."""
    store = Store.create(SampleSpec.infer(torch.zeros(5000)), Arc(50, 50))
    assert all(store.fill(index, torch.ones(5000)) for index in range(50))
    store.clear()
    assert store.segment.allocated_bytes == HEADER_BYTES + mmap.PAGESIZE  # before a look, which takes pages
    assert store.filled == 0
    assert not any(rows.any() for rows in store.layout.fields)
    store.close()


def test_a_closed_segment_is_unmapped() -> None:
    """Closing the slots drops their views, so that the segment's memory goes at its close."""
    segment = Segment.create(Rows.bytes_for(codec([64]), 10))
    mapped = segment.memory(0, 1).obj
    slots = Rows(segment, codec([64]), 10)
    slots.close()
    segment.close()
    assert isinstance(mapped, mmap.mmap)
    assert mapped.closed

"""What lies in a segment's file: how much is filled, at a cost that its header does not decide."""

from __future__ import annotations

import os
import tracemalloc

import pytest

from lightning_stocache.cache.layout import Contents, contents_of
from lightning_stocache.node.files import make_file, write_header
from lightning_stocache.node.header import HEADER_BYTES, Geometry, Manifest, write_manifest


def segment(slots: int, payload: int) -> tuple[int, Manifest]:
    file, _ = make_file("tmpfile")
    write_header(file, payload)
    manifest = Manifest(Geometry(slots, slots), "numbers")
    write_manifest(file, manifest)
    return file, manifest


def test_filled_slots_are_counted() -> None:
    """Also where states lie in several pieces, and with holes between them."""
    file, manifest = segment(10**6, 2 * 10**6)
    os.pwrite(file, bytes([2, 0, 2]), HEADER_BYTES)
    os.pwrite(file, b"\2" * 100_000, HEADER_BYTES + 700_000)
    os.pwrite(file, b"\7" * 9, HEADER_BYTES + 10**6)  # samples, not states
    assert contents_of(file) == Contents(manifest, "", 100_002)
    os.close(file)


@pytest.mark.timeout(20)
def test_a_file_that_is_mostly_holes_costs_nothing() -> None:
    """A tebibyte of slots, of which three are stored, is read where it holds memory."""
    file, manifest = segment(10**12, 10**12)
    os.pwrite(file, b"\2\2\2", HEADER_BYTES + 5 * 10**11)
    tracemalloc.start()
    assert contents_of(file) == Contents(manifest, "", 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    os.close(file)


def test_damage_is_said() -> None:
    """A state that there is not, and a header that cannot be read; what is no segment is an error."""
    file, _ = segment(100, 4096)
    os.pwrite(file, b"\1", HEADER_BYTES + 99)
    assert contents_of(file) == Contents(None, "is damaged: a slot is in a state that there is not")
    os.ftruncate(file, HEADER_BYTES + 99)
    assert contents_of(file) == Contents(None, "is damaged: 100 slots do not fit in its 99 bytes")
    os.ftruncate(file, 100)
    assert "cut off" in contents_of(file).damage
    os.pwrite(file, b"something", 0)
    with pytest.raises(ValueError, match="not a segment"):
        contents_of(file)
    os.close(file)

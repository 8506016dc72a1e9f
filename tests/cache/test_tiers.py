"""A store in memory above one on a disk says what there is, also when it is closed."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from lightning_stocache.cache.counters import Counters
from lightning_stocache.cache.store import counts_fills
from lightning_stocache.cache.stores import store_for
from lightning_stocache.cache.tiers import TieredStore, tiered
from lightning_stocache.node import files
from tests.cache.disks import LENGTH, Disk


def tiers(directory: Path, layout: str, *, write_back: bool) -> TieredStore:
    """Both, for the samples of a disk."""
    disk = Disk(directory, layout)
    memory = store_for(disk.codec).create(disk.codec, disk.arc, granted=2**20)
    return tiered(memory, disk.open(), write_back)


@pytest.mark.parametrize("layout", ["rows", "records"])
@pytest.mark.parametrize("write_back", [False, True])
def test_a_closed_one_is_asked_without_an_error(tmp_path: Path, layout: str, write_back: bool) -> None:
    """Who ends an epoch asks whether it is full, and an exception may have closed it by then."""
    store = tiers(tmp_path, layout, write_back=write_back)
    store.close()
    assert (store.closed, store.full) == (True, False)


@pytest.mark.parametrize("layout", ["rows", "records"])
def test_what_is_written_later_counts_as_filled(tmp_path: Path, layout: str) -> None:
    """All of it is served from memory, before any of it is on the disk."""
    store, disk = tiers(tmp_path, layout, write_back=True), Disk(tmp_path, layout)
    assert all(store.fill(index, disk.sample(index)) for index in range(LENGTH))
    assert (store.disk.filled, store.fill_fraction) == (0, 1.0)
    store.close()


@pytest.fixture
def counters() -> Any:
    counters = Counters.create()
    yield counters
    counters.close()


@pytest.mark.parametrize("layout", ["rows", "records"])
def test_a_disk_counts_what_it_has_stored(tmp_path: Path, layout: str, counters: Any, monkeypatch: Any) -> None:
    """The thread counts, and no sample that the disk has refused."""
    disk = Disk(tmp_path, layout)
    store, real, refused = disk.open(), files.store, list[int]()

    def store_half(data: int, offset: int, *parts: memoryview) -> None:
        refused.append(len(refused))
        if len(refused) > LENGTH:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(data, offset, *parts)

    assert counts_fills(store, counters)
    monkeypatch.setattr(files, "store", store_half)
    for index in range(LENGTH):
        store.fill(index, disk.sample(index))
    store.flush()
    assert 0 < counters.totals().fills == store.filled < LENGTH
    store.close()


@pytest.mark.parametrize("layout", ["rows", "records"])
@pytest.mark.parametrize("write_back", [False, True])
def test_what_lies_in_both_is_counted_once(tmp_path: Path, layout: str, write_back: bool, counters: Any) -> None:
    """When it is stored in memory; not when it comes to the disk, then or at the end."""
    store, disk = tiers(tmp_path, layout, write_back=write_back), Disk(tmp_path, layout)
    assert counts_fills(store, counters)
    for index in range(LENGTH):
        store.fill(index, disk.sample(index))
    store.save()
    assert counters.totals().fills == store.filled == store.disk.filled == LENGTH
    store.close()


def test_a_store_in_memory_is_counted_by_who_fills(counters: Any) -> None:
    """It stores at once."""
    disk = Disk(Path("/nowhere"), "rows")
    store = store_for(disk.codec).create(disk.codec, disk.arc)
    assert not counts_fills(store, counters)
    store.close()

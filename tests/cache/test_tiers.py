"""A store in memory above one on a disk says what there is, also when it is closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_stocache.cache.stores import store_for
from lightning_stocache.cache.tiers import TieredStore, tiered
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

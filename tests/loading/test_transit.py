"""Memory on the way from workers to the main process."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest
import torch

from lightning_stocache.loading import transit
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from lightning_stocache.loading.transit import transit_memory
from lightning_stocache.node.free import FreeMemory


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="there is no memfd here")
def test_it_takes_nothing_from_dev_shm_and_all_of_it_is_reserved():
    """What is left of /dev/shm belongs to the cache and to torch."""
    segment = transit_memory(1 << 20)
    assert segment.handle.data.startswith("/proc/")
    assert "memfd" in os.readlink(segment.handle.data)
    assert segment.allocated_bytes >= 1 << 20
    segment.close()


def test_memory_that_is_not_there_is_an_error_and_is_not_tried(monkeypatch):
    """Above a cgroup's limit the kernel would kill: so it is asked before."""
    monkeypatch.setattr(transit.FreeMemory, "measure", lambda directory: FreeMemory(None, 2**40, 1000))
    with pytest.raises(OSError, match="1001 bytes are more than the 1000 that the cgroup's memory limit leaves"):
        transit_memory(1001)
    transit_memory(1000).close()


def test_what_is_promised_to_a_cache_is_not_taken(monkeypatch):
    """Free now, but the cache is going to fill it."""
    monkeypatch.setattr(transit.FreeMemory, "measure", lambda directory: FreeMemory(None, 2**40, 1000))
    with pytest.raises(OSError, match="601 bytes are more than the 600 that the cgroup's memory limit leaves"):
        transit_memory(601, promised=400)
    transit_memory(600, promised=400).close()


@pytest.mark.parametrize("transform", [None, abs], ids=["gathered", "made"])
def test_loaders_leave_to_their_cache_what_it_has_not_filled_yet(monkeypatch, transform):
    """A window that fits only while the cache is empty would get the job killed when it is full."""
    source: Any = [torch.full((1000,), i) for i in range(40)]
    with closing(CachedDataset(source, transform=transform)) as dataset:
        cache = dataset.cache
        assert cache is not None
        size = cache.segment.size

        def measure(directory: str | None) -> FreeMemory:
            return FreeMemory(None, 2**40, size + 1000 - cache.memory_bytes)

        monkeypatch.setattr(transit.FreeMemory, "measure", measure)
        loader = CachedLoader(dataset, 4, num_workers=1, persistent_workers=True)
        for _ in range(3):
            assert [batch[:, 0].tolist() for batch in loader] == [[*range(i, i + 4)] for i in range(0, 40, 4)]
            assert loader._kept is not None
            assert loader._kept.staging is None or loader._kept.staging.take(4).rows == 0
            assert loader._kept.windows._segments == {}
        loader.close()

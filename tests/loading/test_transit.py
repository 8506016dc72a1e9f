"""Memory on the way from workers to the main process."""

from __future__ import annotations

import os

import pytest

from lightning_stocache.loading import transit
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

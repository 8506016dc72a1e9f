"""Large rows are gathered by several threads in the process that trains, which end with the epoch."""

from __future__ import annotations

import os
import threading
from contextlib import closing

import pytest
import torch

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader
from tests.sources import CountedSource

pytestmark = [pytest.mark.usefixtures("seeded")]

SAMPLES, BATCH = 96, 32
SOURCE = CountedSource(SAMPLES, shape=(4, 256, 256), classes=SAMPLES)  # rows of 256 KiB, batches of 8 MiB


def gather_threads() -> int:
    """The threads that gather beside their caller."""
    return sum(thread.name.startswith("stocache-gather") for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process with four cores, of which torch uses all, on a machine with more than anything else can use."""
    monkeypatch.setattr(os, "cpu_count", lambda: 10**6)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)


def test_a_warm_epoch_gathers_by_threads_that_end_with_it() -> None:
    """Read to its end, or broken off. The samples are those of the source."""
    with closing(CachedDataset(SOURCE)) as dataset, closing(CachedLoader(dataset, BATCH, shuffle=True)) as loader:
        list(loader)
        for last in (SAMPLES, BATCH):
            seen = 0
            iterator = iter(loader)
            while seen < last:
                images, labels = next(iterator)
                seen += len(labels)
                assert gather_threads() >= 1  # a batch of 8 MiB is work for two; another may start before one rests
                for image, label in zip(images, labels, strict=True):
                    assert torch.equal(image, SOURCE.expected(int(label))[0])
            del iterator, images, labels
            assert gather_threads() == 0


def test_each_epoch_asks_torch_for_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.set_num_threads(1)` leaves gathers to the caller from the next epoch on."""
    with closing(CachedDataset(SOURCE)) as dataset, closing(CachedLoader(dataset, BATCH)) as loader:
        list(loader)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
        for _ in loader:
            assert gather_threads() == 0

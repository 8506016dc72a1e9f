"""Requests open side by side, each with its deterministic part, in the memory that was asked for, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from torchvision.transforms import v2

from lightning_stocache.cache.codec import SampleMismatchError
from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.serve import CachedSource
from lightning_stocache.node.budget import Budget
from lightning_stocache.node.group import NodeGroup
from lightning_stocache.node.segment import Segment
from lightning_stocache.setup.open import open_caches
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest, Layout
from lightning_stocache.setup.segments import CacheMemoryError
from tests.sources import CountedSource, TransformedSource

pytestmark = pytest.mark.processes

LENGTH = 20


def opened(
    source: Dataset[Any],
    budget: str | int = "auto",
    group: NodeGroup | None = None,
    layout: Layout = "auto",
    **options: Any,
) -> OpenCache:
    group = NodeGroup.discover() if group is None else group
    request = CacheRequest(source, "", layout=layout)
    return open_caches([request], {"": Budget.parse(budget)}, group, **options)[0]


# --- on one rank


def test_what_was_opened_serves_the_deterministic_part(tmp_path: Path) -> None:
    """The source before the cut is cached, and the tail after it gives the samples of the source."""
    source = TransformedSource(LENGTH, log_path=tmp_path / "loads")
    source.transform = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.RandomCrop(4)])
    cropped = opened(source)
    assert cropped.cache is not None
    assert cropped.tail is not None
    assert cropped.source[3][0].shape == (3, 8, 8)
    assert cropped.tail(cropped.source[3])[0].shape == (3, 4, 4)
    served = CachedSource(cropped)
    assert served.sample(3)[0].shape == (3, 4, 4)
    loads = source.loads
    assert [image.shape for image, _ in served.samples([3, 3])] == [(3, 4, 4), (3, 4, 4)]
    assert source.loads == loads
    cropped.close()


def test_rows_read_at_set_up_that_differ_are_an_error(tmp_path: Path) -> None:
    """The last one is probed too, and compared with the first; without `strict` the source passes through."""
    source: Any = [torch.zeros(2), torch.zeros(2), torch.zeros(3)]
    passing = opened(source, layout="rows")
    assert passing.cache is None
    passing.close()
    request = CacheRequest(source, "", strict=True, layout="rows")
    with pytest.raises(SampleMismatchError, match=r"sample 2: the sample must be .* shape \(2,\).*shape \(3,\)"):
        open_caches([request], {"": Budget.parse("auto")}, NodeGroup())


@pytest.mark.parametrize("backend", ["tmpfile", "memfd", "file"])
def test_the_backend_can_be_chosen(backend: Any) -> None:
    """The memory lies where it was asked for, and no name is left while it is used."""
    its = opened(CountedSource(LENGTH), backend=backend)
    where = os.readlink(its.cache.handle.segment.data)
    assert where.startswith({"tmpfile": "/dev/shm/#", "memfd": "/memfd:", "file": "/dev/shm/lsc-"}[backend])
    assert where.endswith(" (deleted)")
    its.close()


def test_off_reads_and_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started, and nobody looks for free memory, which takes its time."""
    for what in ("allocation.FreeMemory", "find.Child"):
        monkeypatch.setattr(f"lightning_stocache.setup.{what}", None)
    off = opened(CountedSource(LENGTH), 0)
    assert off.cache is None
    assert CachedSource(off).sample(3)[1] == 3
    off.close()


def test_a_failure_half_way_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second request's segment cannot be made: the first one's memory is given back, and the error is told."""
    create, made = Segment.create, []

    def create_three(size: int, *rest: Any, **more: Any) -> Segment:
        if len(made) == 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(size)
        return create(size, *rest, **more)

    monkeypatch.setattr(Segment, "create", create_three)
    requests = [CacheRequest(CountedSource(LENGTH), "", strict=True) for _ in range(2)]
    with pytest.raises(CacheMemoryError, match=r"rank 0 could not make or reach .*No space left"):
        open_caches(requests, {"": Budget.parse("auto")}, NodeGroup())


def test_windows_passes_through(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Where processes cannot share memory, nothing is read or opened, and one warning says so."""
    monkeypatch.setattr("lightning_stocache.setup.open.sys.platform", "win32")
    source = CountedSource(LENGTH)
    dataset = CachedDataset(source)
    assert (dataset.cache, dataset.counters, dataset.budget_bytes) == (None, None, 0)
    assert dataset[3][1] == source.expected(3)[1]
    [record] = caplog.records
    assert "Windows" in record.getMessage()

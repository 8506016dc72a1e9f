"""Samples that draw random numbers while they are loaded are not stored, also where the look has not met them."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lightning_stocache.loading.dataset import CachedDataset
from lightning_stocache.loading.loader import CachedLoader

pytestmark = pytest.mark.processes


class RareClass(Dataset[Any]):
    """One class of a sorted folder is augmented."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, np.random.rand() if 303 <= index < 312 else 0.0])


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_random_class_is_not_frozen(num_workers: int, capfd: pytest.CaptureFixture[str]) -> None:
    """It has other draws in every epoch, and is counted as a bypass; the rest is cached."""
    with closing(CachedDataset(RareClass())) as dataset:
        loader = CachedLoader(dataset, 8, num_workers=num_workers)
        epochs = [torch.cat(list(loader))[303:312, 1].tolist() for _ in range(3)]
        assert dataset.cache is not None
        assert dataset.cache.filled == 400 - 16  # the two batches that hold it
        counts = dataset.counters.totals()  # type: ignore[union-attr]
        assert counts.served == 3 * 400
        assert counts.bypasses == 3 * 16
        assert len({*epochs[0], *epochs[1], *epochs[2]}) == 27


def test_a_frozen_source_is_stored_all_the_same() -> None:
    """`allow_random` keeps its first draw."""
    with closing(CachedDataset(RareClass(), allow_random=True)) as dataset:
        first, second = (torch.cat(list(CachedLoader(dataset, 8))) for _ in range(2))
        assert torch.equal(first, second)

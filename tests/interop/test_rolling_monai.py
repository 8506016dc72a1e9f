"""`replace_rate` against MONAI's SmartCacheDataset: the same samples in every epoch."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_stocache import CachedLoader, RollingCache

SLOT_BYTES = 8 + 2 * 8


class Numbers(Dataset[Any]):
    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index])


def epochs_of_monai(length: int, window: int, rate: float, epochs: int) -> list[list[int]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from monai.data import SmartCacheDataset

        dataset = SmartCacheDataset(
            [torch.tensor([number]) for number in range(length)],
            transform=lambda sample: sample,
            replace_rate=rate,
            cache_num=window,
            progress=False,
            shuffle=False,
        )
    dataset.start()
    found = []
    for _ in range(epochs):
        found.append(sorted(int(number) for batch in DataLoader(dataset, batch_size=4) for number in batch))
        dataset.update_cache()
    dataset.shutdown()
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("length", "window", "rate"), [(9, 4, 0.25), (23, 10, 0.1), (23, 10, 0.33), (30, 7, 1.0)])
def test_each_epoch_has_the_samples_that_smartcachedataset_has(length, window, rate):
    """As many samples, of which as many are new, and the same ones."""
    pytest.importorskip("monai")
    expected = epochs_of_monai(length, window, rate, 12)
    slots = window + math.ceil(window * rate)  # MONAI, too, holds the replacements beside what is trained on
    pool = RollingCache(Numbers(length), slots * SLOT_BYTES, fillers=2, replace_rate=rate, shuffle=False)
    loader = CachedLoader(pool, 4, shuffle=True)
    found = [sorted(int(number) for batch in loader for number in batch) for _ in expected]
    pool.close()
    assert found == expected

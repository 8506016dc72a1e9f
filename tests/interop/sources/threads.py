"""Datasets that read with threads of their own, a sample or a whole batch at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from tests.interop.setting import SAMPLES, Way


def _read(index: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(index).random((3, 4), dtype=np.float32))


def _noisy(index: int) -> torch.Tensor:
    return _read(index) + torch.rand(())


class _Pooled(Dataset[Any]):
    """Reads the two halves of a sample side by side, as from slow storage.

    Args:
        at_once: whether the threads have run before the loader is made, to measure the mean; else the pool is made by
            the first read in a process.
        threads: of the pool. Draws of a single one have an order.
    """

    def __init__(self, read: Callable[[int], Any] = _read, *, at_once: bool, threads: int = 2) -> None:
        self.read, self.threads = read, threads
        self.pool: ThreadPoolExecutor | None = None
        self.mean = self._all(range(4)).mean() if at_once else torch.tensor(0.5)

    def _all(self, indices: Any) -> torch.Tensor:
        self.pool = self.pool or ThreadPoolExecutor(self.threads)
        return torch.stack(list(self.pool.map(self.read, indices)))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self._all([index, SAMPLES + index]) - self.mean, index


class _PooledBatches(_Pooled):
    """Reads the samples of a batch side by side."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        numbers = [number for index in indices for number in (index, SAMPLES + index)]
        pairs = self._all(numbers).reshape(len(indices), 2, 3, 4) - self.mean
        return list(zip(pairs, indices, strict=True))


def _way(dataset: Callable[..., Any], *args: Any, **options: Any) -> Way:
    return lambda setting: setting.loader(dataset(*args, **options))


THREADS = {
    "pool_made_on_first_use": _way(_Pooled, at_once=False),
    "pool_that_has_run": _way(_Pooled, at_once=True),
    "batches_by_a_pool_made_on_first_use": _way(_PooledBatches, at_once=False),
    "batches_by_a_pool_that_has_run": _way(_PooledBatches, at_once=True),
    "pool_that_draws": _way(_Pooled, _noisy, at_once=False, threads=1),
}

"""What is kept of a whole stream as a map-style dataset, for a loader that makes batches from memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from torch.utils.data import Dataset, Sampler

from lightning_stocache.cache.placement import Integers
from lightning_stocache.loading.cached_source import CachedSource
from lightning_stocache.loading.dataset import CachedDataset, dataset_over
from lightning_stocache.loading.stream_source import StreamSource
from lightning_stocache.setup.open_cache import OpenCache
from lightning_stocache.setup.request import CacheRequest
from lightning_stocache.torch_internals import set_worker_dataset

__all__ = ["InitOnStream", "StreamBatches", "kept_dataset"]


class _Passed(Dataset[Any]):
    """Samples that have passed: they cannot be loaded again by their number."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NoReturn:
        raise RuntimeError("the stream was closed while an epoch was served from what is kept of it")


def kept_dataset(serving: StreamSource) -> tuple[CachedDataset, Integers]:
    """The samples of a stream of which all is kept, and their shards; the memory stays the stream's."""
    store = serving.opened.live
    assert store is not None
    stored, shards = store.in_order()
    request = CacheRequest(_Passed(len(stored)))
    opened = OpenCache(
        request, request.source, None, stored, serving.opened.counters, group=serving.opened.group, borrowed=True
    )
    return dataset_over(CachedSource(opened, serving.transform)), shards


class StreamBatches(Sampler[list[int]]):
    """The batches of a rank, by the number of the epoch.

    Args:
        serving: the stream.
        shards: the shard of every sample that is kept, int64 `[samples]`.
        batch_size: samples per batch.
        drop_last: whether all batches have that size.
    """

    def __init__(self, serving: StreamSource, shards: Integers, batch_size: int, drop_last: bool) -> None:
        self._serving, self._shards = serving, shards
        self.batch_size, self.drop_last, self.epoch = batch_size, drop_last, 0
        self._made: tuple[int, list[Integers]] | None = None  # those of the epoch, which is asked for several times

    def __iter__(self) -> Iterator[list[int]]:
        return (batch.tolist() for batch in self._batches())

    def __len__(self) -> int:
        return len(self._batches())

    def groups(self) -> Iterator[Integers]:
        """The indices of several batches at a time, all but the last of which have `batch_size`."""
        batches = self._batches()
        whole = next((number for number, batch in enumerate(batches) if len(batch) < self.batch_size), len(batches))
        if whole:
            yield np.concatenate(batches[:whole])
        yield from batches[whole:]

    def _batches(self) -> list[Integers]:
        if self._made is None or self._made[0] != self.epoch:
            batches = self._serving.batches(self.epoch, self._shards, self.batch_size, self.drop_last)
            self._made = self.epoch, batches
        return self._made[1]


class InitOnStream:
    """Calls a function of the user's in a worker that serves from memory, where the dataset is the user's stream.

    Args:
        function: the user's.
        source: the stream.
    """

    def __init__(self, function: Callable[[int], None], source: Any) -> None:
        self.function, self.source = function, source

    def __call__(self, worker: int) -> None:
        """In a worker, which has the number that is given."""
        set_worker_dataset(self.source)
        self.function(worker)
